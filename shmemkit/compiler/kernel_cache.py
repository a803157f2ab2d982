"""A disk cache of this package's own kernels, as machine code: Numba takes seconds to type and lower one, in
each process.

An entry has what a launch needs: the linked cubin, the name of its entry, whether it is cooperative, and the
tables in constant memory that are filled when it is loaded (``ptx.constant_words``). Its key is made of all
that the machine code depends on:

    sources     of this package
    versions    of Python, Numba, NumPy, CUDA's compilers, the driver, ...; and which files the compilers and
                numba-cuda's sources are, which somebody may have patched
    settings    of Numba
    function    its code, its options and what its closure holds: tiles, dtypes, other device functions, of
                which the same is taken; and what their modules have, which a program might have changed
    types       of the arguments; the GPU's compute capability

What has no such description is not kept, such as the `order` of a Gemm, a function of the program's. Neither
are kernels with waits that are bounded or recorded, and those that link more than such tables: NVSHMEM's
functions. If a source has changed since this process imported the package, its modules may be older: nothing
is kept.

Entries lie beside those of ``jit_cache.py``, which verifies them. SHMEMKIT_CACHE_KERNELS=0 turns this cache
off.
"""

import contextlib
import enum
import functools
import hashlib
import json
import logging
import os
import platform
import re
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import numpy as np
from cuda.bindings import driver
from cuda.core import ObjectCode
from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
from numba import cuda
from numba.cuda import types, typing
from numba.cuda.codegen import CUDACodeLibrary
from numba.cuda.core import config
from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.cudadrv import nvvm
from numba.cuda.dispatcher import CUDADispatcher, _Kernel
from numba.cuda.extending import _Intrinsic

from shmemkit.support import installed
from shmemkit.support.settings import switch

from . import IMPORTED, PACKAGE, jit_cache, stamps
from .bounded_compile import armed, grouped
from .ptx import TABLES

_log = logging.getLogger(__name__)
NAME = __name__.partition(".")[0]
NUMBA_CUDA = Path(cuda.__file__).parent
VERSIONS = "numba", "numba-cuda", "llvmlite", "numpy", "ml-dtypes"
SENSITIVE = "launch_config_sensitive", "shared_memory_carveout"  # attributes that an entry does not keep
_ACCESSES = re.compile(r'asm [^"]*"[^"]*\.sys\.global\.[^"]*"')
CONSTANTS = type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, enum.Enum


class NotDescribed(Exception):
    """Of what the machine code depends on in a way that is not known."""


@functools.cache
def sources():
    """-> a digest of this package's sources; None if one has changed since they were imported."""
    try:
        texts = [(os.path.relpath(file, PACKAGE), Path(file).read_bytes()) for file in sorted(IMPORTED)]
    except OSError:  # it is not there any more
        return None
    if not texts or changed():  # after they were read
        return None
    return jit_cache.digest(*(part for pair in texts for part in pair))


def changed():
    """Whether a source has changed since they were imported. No clock says it: files may be on a host whose
    clock differs."""
    return stamps(PACKAGE) != IMPORTED


@functools.cache
def versions():
    found = list(installed.versions(VERSIONS).items())
    files = sorted((os.path.relpath(path, NUMBA_CUDA), *of[:2]) for path, of in stamps(NUMBA_CUDA).items())
    return sys.implementation.name, platform.python_version(), found, files, toolchain(), jit_cache.versions()


def toolchain():
    """-> what compiles and links: of a toolkit that pip did not install, no package says the version. Without
    nvJitLink the driver links."""
    found: list = [nvvm.NVVM().get_version(), nvvm.NVVM().get_ir_version()]
    for name in ("nvvm", "nvJitLink"):
        with contextlib.suppress(DynamicLibNotFoundError):
            path = load_nvidia_dynamic_lib(name).abs_path
            file = os.stat(path)
            found.append((name, path, file.st_size, file.st_mtime_ns))
    with contextlib.suppress(RuntimeError):  # there is none
        found.append(driver.cuDriverGetVersion())
    return found


def settings():
    names = (name for name in vars(config) if name.startswith(("CUDA_", "DEBUG", "OPT", "BOUNDS", "EXTEND")))
    return sorted((name, repr(getattr(config, name))) for name in names)


def described(value, seen, described_by):
    """Give `described_by` all parts of `value`, as bytes or strings. NotDescribed if there are others."""
    if isinstance(value, CONSTANTS):
        described_by(f"{type(value).__module__}.{type(value).__qualname__} {value!r}")
    elif isinstance(value, types.Type):
        if "enum" in repr(value).lower():  # whose members it does not tell
            raise NotDescribed(value)
        described_by(f"type {value!r}")
    elif isinstance(value, (tuple, list)):
        described_by(f"{type(value).__qualname__} of {len(value)}")
        for part in value:
            described(part, seen, described_by)
    elif isinstance(value, dict):
        described(list(value.items()), seen, described_by)
    elif isinstance(value, frozenset):  # of constants, in code
        described_by(f"frozenset {sorted(map(repr, value))}")
    elif isinstance(value, (type, ModuleType)) or getattr(np, getattr(value, "__name__", ""), 0) is value:
        described_by(f"{getattr(value, '__module__', '')}.{value.__name__}")
    elif isinstance(value, (CUDADispatcher, _Intrinsic, FunctionType)):
        if id(value) in seen:
            described_by(f"as {seen[id(value)]}")
            return
        seen[id(value)] = len(seen)
        if isinstance(value, CUDADispatcher):
            described(value.targetoptions, seen, described_by)
        _function(getattr(value, "py_func", getattr(value, "_defn", value)), seen, described_by)
    else:
        raise NotDescribed(value)


def is_own(function):
    """Whether a function is the package's. (Of one that a program has made by ``exec``, no module may be
    known.)"""
    return (function.__module__ or "").partition(".")[0] == NAME


def _function(function, seen, described_by):
    if not is_own(function):
        raise NotDescribed(function)
    described_by(f"function {function.__module__}.{function.__qualname__}")
    described((function.__defaults__, function.__kwdefaults__), seen, described_by)
    codes = [function.__code__]
    for code in codes:  # with those in it
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        described_by(code.co_code)
        described((code.co_names, code.co_freevars, code.co_argcount, code.co_flags), seen, described_by)
        described([x for x in code.co_consts if not isinstance(x, CodeType)], seen, described_by)
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType):
                value = value.__module__, value.__qualname__, value.__code__.co_code
            if isinstance(value, (*CONSTANTS, CUDADispatcher, tuple)):
                described((name, value), seen, described_by)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        described((name, cell.cell_contents), seen, described_by)


def in_use():
    return switch("SHMEMKIT_CACHE_KERNELS", True) and jit_cache.folder() is not None


def key_of(kernel, argument_types):
    """-> the key of the entry; None if there is none."""
    own = is_own(kernel.py_func)
    shown = any(getattr(config, name) for name in vars(config) if name.startswith("DUMP_"))
    if not own or armed() or grouped() or shown or kernel.targetoptions.get("debug") or sources() is None:
        return None
    digest = hashlib.sha256()

    def described_by(part):
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(b"%d:" % len(data) + data)

    try:
        described((kernel, argument_types), {}, described_by)
    except NotDescribed:
        return None
    cc = CUDACodeLibrary(None, "")._ensure_cc(None)
    return jit_cache.digest("kernel", sources(), versions(), settings(), digest.hexdigest(), cc)


def packed(kernel):
    """-> the entry of a compiled kernel, or None."""
    if changed():  # a module that was imported since may be newer
        return None
    library = kernel._codelibrary
    tables = sorted(name for name, file in TABLES.items() if file in library._linking_files)
    sensitive = any(getattr(kernel, name, None) for name in SENSITIVE)
    if len(tables) < len(library._linking_files) or sensitive or getattr(library, "referenced_objects", None):
        return None
    accesses = sorted(set(_ACCESSES.findall(library.get_llvm_str())))  # which ``compiled_kernels`` looks at
    head = {"entry": kernel.entry_name, "cooperative": kernel.cooperative, "tables": tables, "llvm": accesses}
    return json.dumps(head).encode() + b"\n" + bytes(library.get_cubin().code)


def unpacked(entry, name, argument_types):
    """-> the kernel, compiled and not loaded; None if a module that makes a table of it is not imported"""
    head, _, cubin = entry.partition(b"\n")
    head = json.loads(head)
    if not TABLES.keys() >= set(head["tables"]):
        return None
    library = CUDACodeLibrary(None, name, entry_name=head["entry"])
    library._cubin_cache[library._ensure_cc(None)] = ObjectCode.from_cubin(cubin)
    for table in head["tables"]:
        library.add_linking_file(TABLES[table])
    library._llvm_strs, library._finalized = head["llvm"], True
    return _Kernel._rebuild(
        cooperative=head["cooperative"],
        name=head["entry"],
        signature=typing.signature(types.void, *argument_types),
        codelibrary=library,
        debug=False,
        lineinfo=False,
        call_helper=None,
        extensions=[],
    )


def caching_compile(original):
    """`original`, ``CUDADispatcher.compile``, with the cache."""

    @functools.wraps(original)
    def compile(self, sig):
        argument_types, _ = normalize_signature(sig)
        known = self.specialized or argument_types in self.overloads
        key = None if known or not in_use() else key_of(self, argument_types)
        if key is None:
            return original(self, sig)
        kernel = None

        def make():
            nonlocal kernel
            kernel = original(self, sig)
            return packed(kernel)

        entry = jit_cache.cached(key, make, alone=False)
        if kernel is not None:
            return kernel
        kernel = unpacked(entry, self.py_func.__name__, argument_types)
        if kernel is None:
            return original(self, sig)
        try:
            kernel.bind()
        except Exception:  # the driver does not take it
            _log.debug("%s is compiled again", self.py_func.__qualname__, exc_info=True)
            return original(self, sig)
        self.add_overload(kernel, argument_types)
        return kernel

    return compile


@functools.cache
def install():
    """Wrap numba-cuda's compiler with this cache and that of ``jit_cache.py``. Calling it again does
    nothing."""
    jit_cache.install()
    CUDADispatcher.compile = caching_compile(CUDADispatcher.compile)
