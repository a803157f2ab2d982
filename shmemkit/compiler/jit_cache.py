"""A disk cache for the two slow steps of a first launch: compiling NVSHMEM's headers, and linking.

numba-cuda links every kernel that calls NVSHMEM with a C++ shim that includes nvshmem.h. NVRTC takes
seconds for it (docs/launching.md), once per kernel and process. Two functions of numba-cuda are wrapped here:

    nvrtc.compile       its output, keyed by the source, options, versions and the headers' time stamps
    _Linker.complete    the linked cubin, keyed by the bytes of everything that is linked, options and
                        versions

NVSHMEM's shim is widened before it is compiled: it gets every point-to-point function of NVSHMEM, not only
those that the kernel calls. This costs NVRTC nothing (its time goes into the headers) and the linker drops
what is not called; so one compilation, once per machine, serves all kernels. Collectives would make it
several times larger; they are compiled only for kernels that call them.

``kernel_cache.py`` keeps the package's own kernels as a whole, by the same means.

Environment: SHMEMKIT_CACHE_DIR is the folder (default: $XDG_CACHE_HOME/shmemkit or ~/.cache/shmemkit);
SHMEMKIT_CACHE=0 turns the cache off. It may be deleted at any time. Ranks that start at once wait for the one
that compiles. Entries are written whole or not at all and verified when read; a damaged one is made anew. The
folder and the entries must belong to the user who runs the program, and nobody else may write to them: what
is in them is executed.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import stat
import sys
import tempfile
import time
import warnings
from pathlib import Path

from shmemkit.support import installed
from shmemkit.support.command_line import say
from shmemkit.support.progress import showing
from shmemkit.support.settings import switch

MAGIC = b"shmemkit-cache-1"
LOCK_TIMEOUT = 120.0  # seconds to wait for another process that makes the same entry
TELL_AFTER = 5.0  # seconds until whoever waits says so
MAX_ENTRIES, MAX_BYTES = 4096, 1 << 30
LEFT_BEHIND = 3600.0  # seconds, after which nobody writes an unfinished file any more

# Sources with any other #include are not cached: we could not tell when such a header changes.
WATCHED_INCLUDES = {"entry_point.h", "cuda/atomic", "memsys.cuh", "nrt.cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)

SHIM_MARK = "__NVSHMEM_NUMBA_SUPPORT__"
SHIM_FUNCTION = re.compile(r'extern "C" __device__ int\s+(\w+)\(.*?\n    }', re.S)
MANGLED = re.compile(r"_ZL?(\d+)(\w+)_nbst")
POINT_TO_POINT = re.compile(
    r"nvshmemx?_(?:(?!qp_)[a-z]+\d*_)?"  # with a type in the name; those for one network queue (qp) are rare
    r"(?:p|g|(?:put|get|put_signal)(?:_nbi)?(?:_warp|_block)?|atomic_\w+|signal_\w+"
    r"|quiet|fence|ptr|my_pe|n_pes|team_\w+|barrier\w*|sync\w*)"
)


def folder():
    """The cache's folder as the environment has it now, or None when SHMEMKIT_CACHE is off."""
    if not switch("SHMEMKIT_CACHE", True):
        return None
    chosen = os.environ.get("SHMEMKIT_CACHE_DIR")
    chosen = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "shmemkit"
    try:
        return chosen.expanduser()
    except RuntimeError as error:  # no such user, or no home
        _warn(f"no JIT cache: cannot use {chosen} ({error}). Set SHMEMKIT_CACHE_DIR to a writable folder")
        return None


def digest(*parts):
    """A hexadecimal key of `parts` (bytes, or anything whose repr says all of it)."""
    h = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        h.update(b"%d:" % len(data))
        h.update(data)
    return h.hexdigest()


def _check_owner(status, what):
    """OSError unless `what`, of this os.stat result, is this user's, and nobody else may write to it."""
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{what} belongs to user {status.st_uid}, not to you, user {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to {what}. If you trust its content, chmod go-w it")


def _open(path, flags):
    """-> a descriptor of the file at `path`. Follows no link there, and waits for no FIFO: OSError."""
    if os.path.islink(path):
        raise OSError(f"{path} is a link")
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return handle


def read(path):
    """The payload of the entry at `path`, or None when it is absent or damaged. One that others may have
    written is not looked at, with a warning."""
    try:
        with open(_open(path, os.O_RDONLY), "rb") as file:
            _check_owner(os.fstat(file.fileno()), path)
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(path.parent, f"JIT cache: an entry is not used, and its code is compiled again: {error}")
        return None
    head = len(MAGIC) + 32
    if data[:head] != MAGIC + hashlib.sha256(data[head:]).digest():
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the oldest entries go first
    return data[head:]


def write(path, payload):
    """Put `payload` at `path`, or OSError. Readers see the old entry or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _remove_old(path.parent)


def _remove_old(folder):
    """The entries that were used least recently, beyond MAX_ENTRIES and MAX_BYTES; and what a process left
    that ended while it wrote."""
    entries, old = [], []
    for file in os.scandir(folder):
        with contextlib.suppress(OSError):  # another process has removed it
            status = file.stat(follow_symlinks=False)
            if file.name.endswith(".bin"):
                entries.append((status.st_mtime, status.st_size, file.path))
            elif file.name.startswith(".new-") and status.st_mtime < time.time() - LEFT_BEHIND:
                old.append(file.path)
    n, n_bytes = len(entries), sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if n <= MAX_ENTRIES and n_bytes <= MAX_BYTES:
            break
        n, n_bytes = n - 1, n_bytes - size
        old.append(path)
    for path in old:
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def locked(path):
    """Hold the file lock at `path`; after LOCK_TIMEOUT, or where locks do not work, go on without it. A line
    on standard error says so where it takes TELL_AFTER.

    The system releases the lock of a process that dies, so that a lock is never left behind.
    """
    with open(_open(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        begin, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - begin
                if waited > LOCK_TIMEOUT:
                    break
                if waited > TELL_AFTER and not told:
                    told = True
                    say(
                        "shmemkit: waiting for another process that compiles for the JIT cache and holds the "
                        f"lock {path}; in {LOCK_TIMEOUT - waited:.0f} s this one compiles the code itself"
                    )
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield


@functools.cache
def _warn(message):
    warnings.warn(message, stacklevel=4)


_warned = set()


def _warn_once(where, message):
    """Of a folder, the first such message."""
    if where not in _warned:
        _warned.add(where)
        _warn(message)


def cached(key, make, alone=True):
    """The payload (bytes) of entry `key`, made by `make()` and kept when it is not there; None, which is not
    kept, if that is what `make` returns.

    Of several processes that ask at once, one makes it and the others wait, if they are to be `alone`: not
    where `make` makes other entries. Never fails because of the cache: where the folder cannot be used it
    warns once and calls `make()`.
    """
    where = folder()
    if where is None:
        return make()
    entry = where / f"{key}.bin"
    with contextlib.ExitStack() as stack:
        try:
            where.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_owner(os.stat(where), where)
            found = read(entry)
            if found is not None:
                return found
            if alone:
                stack.enter_context(locked(where / f"lock-{key[:2]}"))
        except OSError as error:
            _warn(f"no JIT cache: cannot use {where} ({error}). Set SHMEMKIT_CACHE_DIR to a writable folder")
            return make()
        found = read(entry) if alone else None
        if found is not None:
            return found
        payload = make()
        try:
            if payload is not None:
                write(entry, payload)
        except OSError as error:
            _warn(f"no JIT cache: cannot write to {where} ({error}). Set SHMEMKIT_CACHE_DIR to another")
        return payload


def _stamps(directory, recursive):
    """(path, size, time stamp) of the files of a header directory, to notice that it was replaced."""
    pattern = "**/*" if recursive else "*"
    found = ((path, path.stat()) for path in Path(directory).glob(pattern))
    return sorted((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)


@functools.cache
def headers_digest(directories):
    # NVSHMEM's own headers one by one; of CUDA's and CCCL's thousands the top level, which an upgrade
    # touches.
    return digest(*((path, _stamps(path, os.path.exists(f"{path}/nvshmem.h"))) for path in directories))


# Packages whose version may change generated code; CUDA's own are named by their major version, or not.
CUDA_PACKAGES = ("cuda-nvrtc", "cuda-runtime", "cuda-cccl", "cuda-nvcc", "nvvm", "nvjitlink")
PACKAGES = ["numba-cuda", "cuda-bindings", "cuda-core"]
PACKAGES += [f"{name}-cu{major}" for name in ("nvshmem4py", "nvidia-nvshmem") for major in (12, 13)]
PACKAGES += [f"nvidia-{name}{suffix}" for name in CUDA_PACKAGES for suffix in ("", "-cu12")]


@functools.cache
def versions():
    """The installed ones of PACKAGES: [(name, version)]."""
    return list(installed.versions(PACKAGES).items())


def shim_library():
    """name -> source of NVSHMEM's point-to-point functions; empty when nvshmem4py is laid out otherwise."""
    module = sys.modules.get("nvshmem.bindings.device.numba._numbast")  # whoever made a shim has imported it
    return _point_to_point_functions(module.__file__) if module else {}


@functools.cache
def _point_to_point_functions(path):
    functions = {m[1]: m[0] for m in SHIM_FUNCTION.finditer(Path(path).read_text())}
    return {name: source for name, source in functions.items() if _is_point_to_point(name)}


def _is_point_to_point(name):
    mangled = MANGLED.fullmatch(name)
    return mangled is not None and POINT_TO_POINT.fullmatch(mangled[2][: int(mangled[1])]) is not None


def widen(source):
    """The NVSHMEM shim `source` with all point-to-point functions, the same whichever of them it had."""
    start = source.find('extern "C" __device__')
    if start < 0:
        return source
    functions = {m[1]: m[0] for m in SHIM_FUNCTION.finditer(source, start)}
    if len(functions) != source.count('extern "C" __device__'):
        return source  # not laid out as expected: leave it alone
    functions = shim_library() | functions
    return source[:start].rstrip() + "\n" + "\n".join(functions[name] for name in sorted(functions)) + "\n"


def caching_compile(original):
    from cuda.core import ObjectCode
    from numba.cuda import config
    from numba.cuda.cuda_paths import get_cuda_paths
    from numba.cuda.cudadrv import nvrtc

    @functools.wraps(original)
    def compile(src, name, cc, ltoir=False, lineinfo=False, debug=False):
        text = src.decode("utf8") if isinstance(src, bytes) else src
        if folder() is None or not set(INCLUDE.findall(text)) <= WATCHED_INCLUDES:
            return original(src, name, cc, ltoir=ltoir, lineinfo=lineinfo, debug=debug)
        shim = SHIM_MARK in text
        if shim:
            text = widen(text)
        search = tuple(filter(None, config.CUDA_NVRTC_EXTRA_SEARCH_PATHS.split(":")))
        includes = (get_cuda_paths()["include_dir"].info or "", *search)

        def make():
            with warnings.catch_warnings():
                if shim:  # forty lines about deprecated vector types of CUDA's own headers
                    warnings.filterwarnings("ignore", message="NVRTC log messages")
                compiled, _ = original(text, name, cc, ltoir=ltoir, lineinfo=lineinfo, debug=debug)
            code = compiled.code
            return code if isinstance(code, bytes) else code.encode()

        options = (cc, ltoir, lineinfo, debug)
        key = digest("nvrtc", text, options, nvrtc._get_nvrtc_version(), versions(), headers_digest(includes))
        code = cached(key, make)
        return (ObjectCode.from_ltoir if ltoir else ObjectCode.from_ptx)(code, name=name), ""

    return compile


def _caching_complete(original):
    from cuda.bindings import nvjitlink
    from cuda.core import ObjectCode
    from numba.cuda.cudadrv import driver

    @functools.wraps(original)
    def complete(self):
        # Without nvJitLink the driver links, and what it makes depends on the driver.
        if folder() is None or not driver._have_nvjitlink():
            return original(self)
        inputs = sorted(  # numba keeps the files to link in a set
            (code.code_type, code.code if isinstance(code.code, bytes) else str(code.code).encode())
            for code in self._object_codes
        )
        options = (self.arch, self.max_registers, self.lineinfo, self.lto, self.additional_flags)
        linked = None

        def make():
            nonlocal linked
            linked = original(self)
            return bytes(linked.code)

        parts = [part for pair in inputs for part in pair]
        cubin = cached(digest("link", *parts, options, nvjitlink.version(), versions()), make)
        if linked is None:
            # What the original leaves behind for numba: a finished linker with empty logs.
            self.linker, self._info_log, self._error_log, self._complete = self, "", "", True
            linked = ObjectCode.from_cubin(cubin)
        return linked

    return complete


def _ordered_modules(library):
    """A library's own module, then those of what it calls, sorted by name where numba iterates over a set.

    Otherwise each process would order them differently, and so make different code of the same kernel.
    """
    callees = sorted(library._linking_libraries, key=lambda callee: callee.name)
    return [library._module] + [module for callee in callees for module in callee.modules]


def _telling_compile(original):
    @functools.wraps(original)
    def compile(self, sig):
        with showing(f"compiling {self.py_func.__name__}"):
            return original(self, sig)

    return compile


@functools.cache
def install():
    """Wrap numba-cuda's compiler and linker with the cache; kernels that compile long say so on the terminal.
    Calling it again does nothing."""
    from numba.cuda.codegen import CUDACodeLibrary
    from numba.cuda.cudadrv import driver, nvrtc
    from numba.cuda.dispatcher import CUDADispatcher

    folder()  # a bad SHMEMKIT_CACHE is refused here, not while a kernel is compiled
    CUDACodeLibrary.modules = property(_ordered_modules)
    nvrtc.compile = caching_compile(nvrtc.compile)
    driver._Linker.complete = _caching_complete(driver._Linker.complete)
    CUDADispatcher.compile = _telling_compile(CUDADispatcher.compile)
