"""The rooms of shmemkit: a module imports only what is in its own room or in a lower one, and no imports form
a circle. Imports inside functions count, and so do public names that are taken from ``shmemkit`` itself."""

import ast
import functools
import importlib.util
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import shmemkit

# From the lowest to the highest. A module is in the room with the longest name that begins its own.
LAYERS = (
    "shmemkit.typing",
    "shmemkit",  # the version, and a table of public names: it imports nothing until it is asked for one
    "shmemkit.support",
    "shmemkit.comm",
    "shmemkit.compiler",
    "shmemkit.emu",
    "shmemkit.device.emulator",
    "shmemkit.device.enums",
    "shmemkit.device.argument_checks",
    "shmemkit.device.swizzle",
    "shmemkit.device.cuda",
    "shmemkit.device.shmem",
    "shmemkit.device.packets",
    "shmemkit.device",
    "shmemkit.backends",
    "shmemkit.runtime",
    "shmemkit.operations",
    "shmemkit.collectives",
    "shmemkit.gemm",
    "shmemkit.moe",
    "shmemkit.attention",
    "shmemkit.kernels",
    "shmemkit.compat",
    "shmemkit.emulated_scripts",
    "shmemkit.emu.__main__",
    "shmemkit.bench",
    "shmemkit.tools",
    "shmemkit.timeline",
    "shmemkit.notebook",
    "shmemkit.pytest_plugin",
    "shmemkit.__main__",
)
WITHOUT_EMULATOR = ("runtime", "backends.nvshmem", "operations", "collectives", "gemm", "moe", "attention")
ON_COLLECTIVES = ("gemm", "moe", "attention")  # which import of collectives only these:
COLLECTIVES = "all_gather", "all_reduce", "reduce_scatter", "attention_combine"
DOOR = "shmemkit.device.emulator"  # by which `device` reaches the emulator
NUMBA_ROOM = "shmemkit.compiler"  # which alone imports numba-cuda's insides
PUBLIC_OF_NUMBA = {"numba", "numba.cuda", "numba.types", "numba.cuda.types"}


@pytest.fixture(scope="module")
def modules():
    """{name: path} of shmemkit's modules"""
    package, found = Path(shmemkit.__file__).parent, {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.fixture(scope="module")
def imported(modules):
    """{name: [(name, line)]}: what each module imports"""
    return {
        name: list(imports(name, path, path.read_text("utf-8"), modules)) for name, path in modules.items()
    }


def imports(name, path, code, modules):
    """What a module imports, of shmemkit and others: (name, line)."""
    tree = ast.parse(code)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    roots = set()  # what the module calls shmemkit
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
                if alias.name == "shmemkit":
                    roots.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            for alias in node.names:
                yield resolved(base, alias.name, modules), node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in roots:
            yield resolved("shmemkit", node.attr, modules), node.lineno


def resolved(base, name, modules):
    """The module that ``from base import name`` loads."""
    if base == "shmemkit" and name in shmemkit.__all__:
        value = getattr(shmemkit, name)
        return value.__name__ if isinstance(value, ModuleType) else value.__module__
    if f"{base}.{name}" in modules or base.startswith("numba"):
        return f"{base}.{name}"
    return base


def is_in(name, room):
    return f"{name}.".startswith(f"{room}.")


def room_of(name):
    return max((room for room in LAYERS if is_in(name, room)), key=len)


def is_inside_numba(target):
    """Whether `target`, a module or a name in one, is of a module that is not for everybody."""
    module = target
    while not is_module(module):
        module = module.rpartition(".")[0]
    return module not in PUBLIC_OF_NUMBA


@functools.cache
def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what is before the last dot is no package
        return False


def is_one_of(name, rooms):
    return any(is_in(name, f"shmemkit.{room}") for room in rooms)


def violations(imported):
    """-> what is wrong with what the modules import, {name: [(name, line)]}: a line each"""
    wrong, graph = [], defaultdict(set)
    for name in imported:
        if room_of(name) == "shmemkit" != name:
            wrong.append(f"{name} is in no room of LAYERS")
        for target, line in imported[name]:
            where = f"{name}, line {line}, imports {target}"
            if is_in(target, "numba") and is_inside_numba(target) and not is_in(name, NUMBA_ROOM):
                wrong.append(f"{where}; only {NUMBA_ROOM} imports numba-cuda's insides")
            if target not in imported or target == name:
                continue
            graph[name].add(target)
            if LAYERS.index(room_of(target)) > LAYERS.index(room_of(name)):
                wrong.append(f"{where}, which stands above it")
            if is_in(target, "shmemkit.collectives") and is_one_of(name, ON_COLLECTIVES):
                if not is_one_of(target, [f"collectives.{each}" for each in COLLECTIVES]):
                    wrong.append(f"{where}, no collective; what both need belongs into a room below")
            if is_in(target, "shmemkit.emu"):
                if is_in(name, "shmemkit.device") and name != DOOR:
                    wrong.append(f"{where}; `device` reaches the emulator through {DOOR} only")
                if is_one_of(name, WITHOUT_EMULATOR):
                    wrong.append(f"{where}; this room does without the emulator")
    return wrong + [f"a circle of imports: {' -> '.join(circle)}" for circle in circles(graph)]


def circles(graph):
    """-> one circle for each import that closes one"""
    found, done, way = [], set(), []

    def visit(name):
        way.append(name)
        for target in sorted(graph[name]):
            if target in way:
                found.append([*way[way.index(target) :], target])
            elif target not in done:
                visit(target)
        way.pop()
        done.add(name)

    for name in sorted(graph):
        if name not in done:
            visit(name)
    return found


def test_rooms(imported):
    assert violations(imported) == []


@pytest.mark.parametrize(
    "module, code, said",
    [
        (
            "support/settings",
            "from shmemkit.runtime import world",
            "imports shmemkit.runtime.world, which stands above",
        ),
        (
            "emu/grid",
            "def f():\n    from ..device import rank",
            "shmemkit.device, which stands above it",
        ),
        ("runtime/timer", "import shmemkit as sk\nsk.AllGather", "imports shmemkit.collectives.all_gather"),
        (
            "device/cuda/mma",
            "from ..shmem import rma",
            "shmemkit.device.shmem.rma, which stands above it",
        ),
        (
            "support/settings",
            "from . import agreement",
            "shmemkit.support.settings -> shmemkit.support.agreement",
        ),
        ("device/cuda/mma", "from shmemkit.emu import thread", "reaches the emulator through"),
        ("moe/combine", "from shmemkit.emu.thread import Thread", "this room does without the emulator"),
        ("backends/nvshmem", "from shmemkit.emu import run", "this room does without the emulator"),
        (
            "moe/combine",
            "from shmemkit.collectives import network",
            "shmemkit.collectives.network, no collective",
        ),
        ("runtime/launch", "from numba.cuda.dispatcher import CUDADispatcher", "numba-cuda's insides"),
        ("gemm/simt", "def f():\n    from numba.cuda import codegen", "numba-cuda's insides"),
        ("another/room", "", "shmemkit.another.room is in no room"),
    ],
)
def test_what_is_wrong_is_found(modules, imported, module, code, said):
    name = f"shmemkit.{module.replace('/', '.')}"
    more = list(imports(name, Path(f"{module}.py"), code, modules))
    found = violations({**imported, name: [*imported.get(name, ()), *more]})
    assert any(said in line for line in found)
