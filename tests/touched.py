"""What the fast set must touch: each method of each collective, each primitive for kernels, each example.

While tests run, this notes

- the methods that host objects have been called with (not those that "auto" has taken), and other host
  objects that have been called,
- the primitives that kernels name which the emulator has launched, and those that host code has called and
  that remember it (``functools.cache``),
- the examples that the emulator has run.

At the end of a run of the whole fast set without failures, what has not been noted fails the run.
"""

import functools
import inspect
import types
import weakref
from pathlib import Path

import pytest
from fast import is_chosen
from numba.cuda.dispatcher import CUDADispatcher

import shmemkit as sk
import shmemkit.device as device
from shmemkit.emu import launch_hook

EXAMPLES = Path(__file__).parent.parent / "examples"
OBJECTS = [getattr(sk, name) for name in sk.__all__ if hasattr(getattr(sk, name), "methods")]
OTHER_OBJECTS = [
    "AttentionCombine.__call__",
    "Barrier.__call__",
    "ExpertParallel.dispatch",
    "ExpertParallel.combine",
    "ExpertParallel.combine_weights",
    "ExpertParallel.keep",
    "Gemm.__call__",
]
OTHER_OBJECTS += ["GroupedGemm.__call__", "ExpertIndex.update", "Queue.__init__"]
PRIMITIVES = {
    name: value
    for name, value in vars(device).items()
    if name in device.__all__ and callable(value) and not isinstance(value, type)
}
OF_HOSTS = {"tensor_map"}  # makes what tma_load takes
TO_TOUCH = {
    *(f"{kind.__name__}: method {method!r}" for kind in OBJECTS for method in kind.methods),
    *OTHER_OBJECTS,
    *(f"shmemkit.device.{name}" for name in PRIMITIVES if name not in OF_HOSTS),
    *(f"examples/{path.name}" for path in EXAMPLES.glob("*.py")),
}

_names = {}  # by id; several for one with aliases
for _name, _value in PRIMITIVES.items():
    _names.setdefault(id(_value), []).append(_name)
_touched, _kernels = set(), weakref.WeakSet()
_OF_WORKERS = pytest.StashKey()  # what the workers of xdist have touched
_UNTOUCHED = pytest.StashKey()


def examples(arguments):
    """The examples among the `arguments` of a command are run."""
    paths = (EXAMPLES.parent.joinpath(argument) for argument in arguments)
    _touched.update(f"examples/{path.name}" for path in paths if path.parent == EXAMPLES)


def primitives_of(function, seen=None):
    """Names of the primitives that `function` uses, or a function that it calls."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    names = set(_names_in(function.__code__))
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    values += [cell.cell_contents for cell in function.__closure__ or ()]
    while values:
        value = values.pop()
        if id(value) in _names:
            yield from _names[id(value)]
        elif isinstance(value, (tuple, list)):
            values += value
        elif isinstance(value, types.ModuleType) and value.__name__.startswith("shmemkit"):
            values += [vars(value)[name] for name in names if name in vars(value)]
        elif isinstance(value, CUDADispatcher):
            yield from primitives_of(value.py_func, seen)
        elif inspect.isfunction(value):
            yield from primitives_of(value, seen)


def _names_in(code):
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


class Noted:
    """A method of a class, which notes ``what(self)`` when it is called. It adds no frame: reports name the
    caller's line."""

    def __init__(self, function, what):
        self.function, self.what = function, what

    def __get__(self, instance, owner=None):
        if instance is not None:
            _touched.add(self.what(instance))
        return self.function.__get__(instance, owner)


def _noting_kernels(rebind):
    @functools.wraps(rebind)
    def noting(kernel, *is_sized):
        function = rebind(kernel, *is_sized)
        if function not in _kernels:
            _kernels.add(function)
            _touched.update(f"shmemkit.device.{name}" for name in primitives_of(function))
        return function

    return noting


def pytest_configure(config):
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setattr(launch_hook, "rebind", _noting_kernels(launch_hook.rebind))
    for kind in OBJECTS:
        patch.setattr(kind, "__call__", Noted(kind.__call__, _method_of))
    for name in OTHER_OBJECTS:
        kind, method = getattr(sk, name.partition(".")[0]), name.partition(".")[2]
        patch.setattr(kind, method, Noted(getattr(kind, method), lambda _, name=name: name))


def _method_of(made):
    return f"{type(made).__name__}: method {made.method!r}"


def touched():
    """-> what this process has touched"""
    cached = {name for name, value in PRIMITIVES.items() if hasattr(value, "cache_info")}
    called = {name for name in cached if sum(PRIMITIVES[name].cache_info()[:2])}
    return _touched | {f"shmemkit.device.{name}" for name in called}


def is_whole(config):
    """Whether this is a run of the whole fast set, or of more."""
    return not is_chosen(config) and config.getoption("markexpr") in ("", "not gpu")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    found = getattr(node, "workeroutput", {}).get("touched", ())
    node.config.stash.setdefault(_OF_WORKERS, set()).update(found)


def pytest_sessionfinish(session, exitstatus):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["touched"] = sorted(touched())
    elif exitstatus == pytest.ExitCode.OK and is_whole(config):
        config.stash[_UNTOUCHED] = TO_TOUCH - touched() - config.stash.get(_OF_WORKERS, set())
        if config.stash[_UNTOUCHED]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    untouched = config.stash.get(_UNTOUCHED, ())
    if untouched:
        terminalreporter.section("no test touches these", red=True)
        terminalreporter.write_line("\n".join(sorted(untouched)))
