"""The machine code of every kernel, made once and kept where all tests look at it.

    python tests/machine_code.py [--out ROOT] [--only PATTERN] [--jobs N]

makes the kernels that GPU_KERNELS list (with `only`, those whose names match) in N processes, and prints the
folder where they are: ROOT/TOOLCHAIN-SOURCES, so that whoever has the same compilers and the same sources
finds them. It has

    NAME.ptx, NAME.sass    the code, without addresses, and with short names: equal code has equal text
    NAME.json              what it needs (`Made`)
    toolchain.json         the versions that made it
    digests.json           of each kernel that is there: what tells whether another code runs

The command needs no pytest. Tests look at what their own Python makes (`made(name)` makes one kernel if it
is not there), and at what the command made of the same sources by others in ROOT: another Python, another
CUDA. Where that makes the same PTX for the same ptxas, the rest is taken from the first one's folder. ROOT is
build/machine_code, or SHMEMKIT_MACHINE_CODE.
"""

import argparse
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TREE))

import torn_lines  # noqa: E402
from kernel_types import listed  # noqa: E402
from ptx import (  # noqa: E402
    AMPERE,
    HOPPER,
    Resources,
    assemble,
    compile_ptx,
    disassembled,
    missing,
    needs_compiler,
    tool,
)

ROOMS = ("collectives", "gemm", "moe", "attention")
BESIDES = ("runtime.gpu_timeline", "runtime.stream_barrier")  # modules of other rooms
TOOLS = ("ptxas", "nvdisasm")
ENVIRONMENT = r"\b_ZN08NumbaEnv\w+"
SETTINGS = r"SHMEMKIT_TIME(OUT|LINE)$|NUMBA_(?!CACHE_DIR|NUM_THREADS|CUDA_LOW_OCC)"  # of what code is made
KEPT = 3  # folders of earlier sources, for those who go back and forth
Kernel = namedtuple("Kernel", "function types cc")
Made = namedtuple("Made", "ptx sass needed unlimited")
Made.__doc__ = """A kernel's code, and the Resources that it needs, within its max_registers and without."""


# ---- which kernels there are


@functools.cache
def kernels():
    """-> {name: Kernel}, from GPU_KERNELS of all modules. Of a kernel that is listed for several types, as
    "ring[sum,float16]" and others, Ampere gets the first one."""
    found = {}
    for module in [*modules(), torn_lines]:
        table = listed(module)
        for cc, arch in ((HOPPER, "sm_90a"), (AMPERE, "sm_80")):
            able = [name for name, (*_, least) in table.items() if cc[:2] >= least]
            for name in able if cc == HOPPER else _first_of_each(able):
                found[f"{short(module)}-{name}-{arch}"] = Kernel(*table[name][:2], cc)
    return found


@functools.cache
def modules():
    rooms = [importlib.import_module(f"shmemkit.{room}") for room in ROOMS]
    inside = [i.name for room in rooms for i in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
    inside += [f"shmemkit.{name}" for name in BESIDES]
    return rooms + [importlib.import_module(name) for name in inside]


def short(module):
    return module.__name__.removeprefix("shmemkit.")


def _first_of_each(names):
    """Of those that are alike up to their brackets."""
    return {name.partition("[")[0]: name for name in reversed(names)}.values()


# ---- where they are


@functools.cache
def sources():
    """A digest of what the kernels are made of, but for the compilers: files and settings."""
    names = "machine_code.py", "kernel_types.py", "kernel_types.json", "ptx.py", "torn_lines.py"
    mine = [TREE / "tests" / name for name in names]
    told = hashlib.sha256()
    mine += [TREE / "shmemkit" / f"{name.replace('.', '/')}.py" for name in BESIDES]
    for file in sorted((TREE / "shmemkit").glob("*.py")) + mine:
        told.update(file.read_bytes())
    for room in ("support", "compiler", "device", *ROOMS):
        for file in sorted((TREE / "shmemkit" / room).rglob("*.py")):
            told.update(f"{file.relative_to(TREE)}\n".encode() + file.read_bytes())
    told.update(
        "".join(f"{k}={v}\n" for k, v in sorted(os.environ.items()) if re.match(SETTINGS, k)).encode()
    )
    return told.hexdigest()[:16]


@functools.cache
def toolchain():
    """-> {name: version} of all that makes machine code of sources."""
    needs_compiler()
    nvvm = re.search(r"^// Cuda compilation tools, .*V([\d.]+)", compile_ptx(_nothing, ()), re.M)
    assert nvvm is not None
    for name in TOOLS:
        if tool(name) is None:
            missing(f"{name} is not installed")
    ask = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    told = {name: ask([tool(name), "--version"]).stdout for name in TOOLS}
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("numba", "numba-cuda", "llvmlite", "numpy")},
        "nvvm": nvvm[1],
        **{name: re.findall(r"V([\d.]+)", text)[-1] for name, text in told.items()},
    }


def _nothing():
    pass


def root():
    return Path(os.environ.get("SHMEMKIT_MACHINE_CODE") or TREE / "build" / "machine_code")


@functools.cache
def folder(inside):
    """Where this Python's are; made, with toolchain.json."""
    versions = toolchain()
    name = "python{python}-nvvm{nvvm}-ptxas{ptxas}".format(**versions)
    told = hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:8]
    made = inside / f"{name}-{told}-{sources()}"
    if not made.exists():
        for old in sorted(inside.glob(f"{name}-{told}-*"), key=lambda at: at.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    made.mkdir(parents=True, exist_ok=True)
    _write(made / "toolchain.json", json.dumps(versions, indent=1))
    return made


def folders(inside=None):
    """Those that the command has made of these sources, {toolchain: folder}, but for this environment's."""
    found = {}
    for digests in sorted((inside or root()).glob(f"*-{sources()}/digests.json")):
        if json.loads(digests.read_text())["by"] != sys.prefix:
            found[digests.parent.name.rsplit("-", 2)[0]] = digests.parent
    return found


def versions_of(where):
    """The toolchain that made a folder."""
    return json.loads((where / "toolchain.json").read_text())


def _file(where, name, suffix):
    return where / (re.sub(r"[^\w.,=-]", "_", name) + suffix)


def _write(file, text):
    """Whole, or not at all."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text(text)
    partial.rename(file)


# ---- making one


def made(name, where=None):
    """The kernel's code, by this Python; by whoever made the folder `where`, if that is given."""
    if where is None:
        where = folder(root())
        _make(name, where)
    try:
        numbers = json.loads(_file(where, name, ".json").read_text())
    except FileNotFoundError:
        raise KeyError(f"{name} is not in {where}") from None
    texts = (_file(where, name, suffix).read_text() for suffix in (".ptx", ".sass"))
    return Made(*texts, *(Resources(*numbers[of]) for of in ("needed", "unlimited")))


def _make(name, where):
    """Make it, if it is not there, while nobody else does."""
    result = _file(where, name, ".json")
    if result.exists():
        return
    with open(_file(where, name, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if result.exists():
            return
        kernel = kernels()[name]
        ptx = plain_ptx(compile_ptx(kernel.function, kernel.types, kernel.cc))
        code, numbers = _found_elsewhere(name, ptx, where) or _assembled(ptx, kernel)
        _write(_file(where, name, ".ptx"), ptx)
        _write(_file(where, name, ".sass"), code)
        _write(result, numbers)
        Path(lock.name).unlink()


def _found_elsewhere(name, ptx, where):
    """(SASS, JSON) of a sibling whose PTX and ptxas are the same, or None."""
    for other in folders(where.parent).values():
        with contextlib.suppress(FileNotFoundError):
            same_tools = all(versions_of(other)[name] == toolchain()[name] for name in TOOLS)
            if other != where and same_tools and _file(other, name, ".ptx").read_text() == ptx:
                return tuple(_file(other, name, suffix).read_text() for suffix in (".sass", ".json"))
    return None


def _assembled(ptx, kernel):
    """(SASS, JSON)"""
    limit = kernel.function.targetoptions.get("max_registers")
    cubin, needed = assemble(ptx, kernel.cc, limit)
    unlimited = assemble(ptx, kernel.cc)[1] if limit and needed.spills else needed
    return plain_sass(disassembled(cubin)), json.dumps({"needed": needed, "unlimited": unlimited})


def plain_ptx(ptx):
    """Without comments, and without the environments that Numba declares for functions and that none reads;
    with short names in the place of Numba's, which count what has been compiled before. (NVSHMEM's functions,
    which the linker finds, end in _nbst.)"""
    lines = [line.partition("//")[0].rstrip() for line in ptx.splitlines()]
    read = {name for line in lines if ".common" not in line for name in re.findall(ENVIRONMENT, line)}
    kept = [line for line in lines if line and read.issuperset(re.findall(ENVIRONMENT, line))]
    return _with_short_names("".join(f"{line}\n" for line in kept))


def _with_short_names(text):
    return _renamed(r"\b_Z(?!\w*_nbst)\w+", "_Z", text)


def _renamed(pattern, short, text):
    names = {}
    return re.sub(pattern, lambda found: names.setdefault(found[0], f"{short}{len(names)}"), text)


def plain_sass(text):
    """One instruction a line, without addresses; the labels that an instruction names, numbered anew, and a
    line "function:" before each function."""
    steps = []
    for line in text.splitlines():
        if instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(\S.*?)\s*;", line):
            steps.append(re.sub(r"\s+", " ", instruction[1]))
        elif line.startswith(".text."):
            steps.append("function:")
        elif label := re.match(r"(\.L_\w+):", line):
            steps.append(label[0])
    named = set(re.findall(r"`\((\.L_\w+)\)", "\n".join(steps)))
    kept = [step for step in steps if not step.startswith(".L_") or step[:-1] in named]
    text = "".join(f"{step}\n" for step in kept)
    return _renamed(r"\.L_\w+", ".L", _with_short_names(text))


# ---- making all


def make_all(names, where, jobs, tell=print):
    """Make them in so many processes, those of a module in one: they have device functions in common. -> the
    errors, {name: message}"""
    by_module = {}
    for name in names:
        if not _file(where, name, ".json").exists():
            by_module.setdefault((kernels()[name].cc, name.partition("-")[0]), []).append(name)
    todo = [part for group in by_module.values() for part in _parts(group, 16)]
    begun, n, errors = time.monotonic(), 0, {}
    toolchain(), kernels()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _without_collector) as pool:
        for done in as_completed([pool.submit(_make_some, part, where) for part in todo]):
            some, failed = done.result()
            n += some
            errors |= failed
            tell(f"{n} of {sum(map(len, todo))} kernels, {time.monotonic() - begun:.0f} s")
    return errors


def _parts(names, most):
    return [names[i : i + most] for i in range(0, len(names), most)]


def _without_collector():
    """It would look at Numba's objects again and again, in vain: a third of the time."""
    gc.freeze()
    gc.disable()


def _make_some(names, where):
    errors = {}
    for name in names:
        try:
            _make(name, where)
        except Exception as error:  # each is told
            errors[name] = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()
    return len(names), errors


def write_digests(where, names):
    """digests.json: of what runs, the instructions and what a launch takes of a multiprocessor."""
    table = {}
    for name in names:
        with contextlib.suppress(KeyError):
            code, numbers = made(name, where), {}
            # Numba numbers all shared arrays of a process.
            sass = re.sub(
                r"_cudapy_smem_\d+", lambda m, n=numbers: f"smem{n.setdefault(m[0], len(n))}", code.sass
            )
            told = hashlib.sha256(f"{code.needed.registers} {code.needed.shared}\n{sass}".encode())
            table[name] = told.hexdigest()[:16]
    from shmemkit.tools import ledger

    of = {"by": sys.prefix, "toolchain": toolchain(), "sources": ledger.sources()}
    all_of_it = {**of, "kernels": table}
    _write(where / "digests.json", json.dumps(all_of_it, indent=1))


def main():
    parser = argparse.ArgumentParser(description="Compile the package's kernels to machine code.")
    parser.add_argument("--out", type=Path, help="default: SHMEMKIT_MACHINE_CODE, or build/machine_code")
    parser.add_argument("--only", default="", help="a regular expression that names contain")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    names = [name for name in kernels() if re.search(options.only, name)]
    if not names:
        parser.error(f"--only {options.only}: no kernel has such a name; there are {', '.join(kernels())}")
    where = folder((options.out or root()).resolve())
    errors = make_all(names, where, options.jobs, lambda line: print(line, file=sys.stderr, flush=True))
    write_digests(where, kernels())
    for name, error in errors.items():
        print(f"{name}: {error}", file=sys.stderr)
    print(where)
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
