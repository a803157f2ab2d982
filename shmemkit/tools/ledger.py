"""What a run on GPUs says of the kernels that it launched: docs/checked.md is made from it.

    with Launches(world) as launches:
        ...                        # a case
        rooms = launches.take()    # the modules whose kernels it launched
    {"ledger": about(world), "answer": "passed", "cases": [{"answer": "right", "rooms": rooms}, ...]}

is what ``shmemkit check --json`` and the GPU tests (SHMEMKIT_CHECKED) write, and more. Cases are "right",
"wrong" or "not tried"; all together "passed", "wrong" or "incomplete". A room is a module that defines
kernels.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import shmemkit
from shmemkit.bench.results import Results
from shmemkit.runtime.launch import _EmulatedLaunch, _GpuLaunch
from shmemkit.support.installed import versions

PACKAGE = Path(shmemkit.__file__).parent
COMPILERS = [f"nvidia-{name}{end}" for name in ("nvvm", "nvjitlink", "cuda-nvcc") for end in ("", "-cu12")]


@functools.cache
def modules() -> list:
    """All modules that have kernels, and those that launch them."""
    names = [f"shmemkit.{room}" for room in ("collectives", "gemm", "moe", "attention")]
    for package in [importlib.import_module(name) for name in names]:
        names += [found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    names += ["shmemkit.runtime.gpu_timeline", "shmemkit.runtime.stream_barrier"]
    return [importlib.import_module(name) for name in names]


@functools.cache
def rooms() -> dict[str, list[str]]:
    """-> {room: its kernels, as GPU_KERNELS list them: "MODULE-NAME"}, without "shmemkit."."""
    found: dict[str, list[str]] = {}
    for module in modules():
        for name, entry in getattr(module, "GPU_KERNELS", {}).items():
            kernel = entry[0] if isinstance(entry, tuple) else entry
            of_room = found.setdefault(_short(kernel.py_func.__module__), [])
            of_room.append(f"{_short(module.__name__)}-{name}")
    return found


def _short(name):
    return name.removeprefix("shmemkit.")


def sources() -> str:
    """A digest of the package's files: whether two checkouts run the same. Without digests.json, which is
    made of them."""
    told = hashlib.sha256()
    for file in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json")):
        if file.name == "digests.json":
            continue
        told.update(f"{file.relative_to(PACKAGE)}\n".encode() + file.read_bytes())
    return told.hexdigest()[:16]


class Launches(contextlib.AbstractContextManager):
    """Notes, until its end, whose kernels are launched where `world` is, on GPUs or on the emulator. One at
    a time in a process; not for timed runs."""

    _kind: Any

    def __init__(self, world):
        self._kind = _EmulatedLaunch if world.backend.name == "emulator" else _GpuLaunch

    def __enter__(self):
        self._rooms, self._call = set(), self._kind.__call__

        @functools.wraps(self._call)
        def noting(launch, stream=None):
            self._rooms.add(_short(launch.kernel.py_func.__module__))
            return self._call(launch, stream)

        self._kind.__call__ = noting
        return self

    def __exit__(self, *_):
        self._kind.__call__ = self._call

    def take(self) -> list[str]:
        """-> the rooms since the last one was taken"""
        found, self._rooms = self._rooms & rooms().keys(), set()
        return sorted(found)


def about(world) -> dict[str, Any]:
    """Where and what this program runs. Collective."""
    found = Results(world, []).as_dict()
    found["versions"] |= versions(COMPILERS)
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    arguments = [re.sub(r"(^|=)/.*/", r"\1", argument) for argument in sys.argv[1:]]  # without folders
    kept = {key: found[key] for key in ("date", "n_ranks", "machine", "versions", "environment")}
    return kept | {
        "command": f"shmemkit run -n {world.n_ranks} -m {shlex.join([name, *arguments])}",
        "gpus": found["machine"]["gpus"],
        "shmemkit": shmemkit.__version__,
        "sources": sources(),
    }
