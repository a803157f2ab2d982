"""While an emulated world is alive, ``kernel[grid, block, stream, shared](...)`` runs on the emulator.

Numba's dispatcher is asked for a launch configuration as always; what it returns launches here. The host
functions of ``numba.cuda`` that scripts use besides kernels (streams, events, device arrays) are replaced for
as long.
"""

import contextlib
import inspect

import numpy as np
from numba import cuda

from shmemkit.compiler import type_check
from shmemkit.compiler.numba_internals import CUDADispatcher, normalize_kernel_dimensions
from shmemkit.support.gpus import n_gpus
from shmemkit.support.settings import integer, shown

from . import signatures, ufuncs
from .grid import Launch, Shape
from .stand_in_modules import refuse
from .stream import Event, Stream, default_stream, find
from .thread import Thread
from .translation import rebind, use_device_modules
from .ufuncs import DeviceArray, as_device_array, is_device_array
from .workers import running

MAX_THREADS_PER_BLOCK = 1024
MAX_SHARED = 227 << 10  # bytes of a block, of Hopper


class Configured:
    """`kernel[grid, block, stream, shared]`; `pdl` as in ``shmemkit.bind``, `cluster` a number of blocks
    along x, `members` as of a ``Launch``."""

    def __init__(self, kernel, grid, block, stream=0, shared=0, pdl=False, cluster=1, members=None):
        self.kernel, self.pdl, self.cluster, self.members = kernel, pdl, cluster, members
        self.grid, self.block = normalize_kernel_dimensions(grid, block)
        n_threads = int(np.prod(self.block))
        if not 0 < n_threads <= MAX_THREADS_PER_BLOCK or min(self.grid) < 1:
            raise ValueError(
                f"kernel {kernel.py_func.__name__}: the grid is {self.grid}, the block {self.block}; it "
                f"must be one block or more, and 1 to {MAX_THREADS_PER_BLOCK} threads per block"
            )
        self.stream = find(stream)
        if not hasattr(shared, "__index__") or isinstance(shared, bool):
            raise TypeError(
                f"kernel {kernel.py_func.__name__}: the dynamic shared memory is {shown(shared)}; it must "
                "be an integer, in bytes"
            )
        if not 0 <= shared <= MAX_SHARED:
            raise ValueError(
                f"kernel {kernel.py_func.__name__}: the dynamic shared memory is {shared} bytes; it must be "
                f"0 to {MAX_SHARED} per block, as on an H100 or H200. Loop over smaller pieces"
            )
        self.shared = int(shared)

    def __call__(self, *arguments):
        function = self.kernel.py_func
        parameters = list(inspect.signature(function).parameters)
        if len(arguments) != len(parameters):
            raise TypeError(
                f"kernel {function.__name__}: {len(arguments)} arguments are given; it takes "
                f"{len(parameters)}: {', '.join(parameters)}"
            )
        type_check.check(self.kernel, arguments)
        arguments = signatures.converted(self.kernel, arguments)
        shape = Shape(self.grid, self.block, self.shared, self.pdl, self.cluster, self.members)
        self.stream.enqueue(
            Launch(self.stream, function.__name__, rebind(function), parameters, arguments, shape)
        )


def _configure(kernel, configuration):
    """``kernel[configuration]``"""
    if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
        raise ValueError(
            f"kernel {kernel.py_func.__name__}: the launch configuration is {configuration!r}; it must be "
            "[blocks, threads per block], as in kernel[20, 128](...), and may have a stream and the bytes of "
            "dynamic shared memory after these"
        )
    return Configured(kernel, *configuration)


def _for_all(kernel, ntasks, tpb=0, stream=0, sharedmem=0):
    """``kernel.forall(n)``: a one-dimensional grid of at least n threads."""
    n = integer(f"kernel {kernel.py_func.__name__}.forall", "ntasks", ntasks)
    tpb = tpb or 128

    def launch(*arguments):
        if n > 0:
            Configured(kernel, -(-n // tpb), tpb, stream, sharedmem)(*arguments)

    return launch


def _to_device(obj, stream=0, copy=True, to=None):
    if to is not None:
        to[...] = obj
        return to
    return np.array(obj).view(DeviceArray)


def _device_array(shape, dtype=np.float64, strides=None, order="C", *_, **__):
    """Also mapped and managed: their streams and flags have no meaning here."""
    return np.empty(shape, dtype, order).view(DeviceArray)


def _device_array_like(ary, *_, **__):
    return np.empty_like(ary).view(DeviceArray)


def _pinned_array(shape, dtype=np.float64, strides=None, order="C"):
    return np.empty(shape, dtype, order)


def _mapped(arrays):
    """Of the same memory."""
    views = [array.view(DeviceArray) for array in arrays]
    return views[0] if len(views) == 1 else views


def _new_stream(*_, **__):
    default = default_stream()
    return Stream(default.machine, default.pe)


def _synchronize():
    default = default_stream()
    default.machine.synchronize(default.pe)


_OF_COMPILED_CODE = "inspect_asm inspect_llvm inspect_lto_ptx inspect_sass inspect_types".split()
_OF_DEVICES = (
    "close current_context detect get_current_device list_devices open_ipc_array profile_start profile_stop "
    "profiling select_device"
).split()


class Replacements:
    """Attributes that are replaced for a while, but for those that this version of their owner lacks."""

    def __init__(self):
        self._before = []  # (owner, name, value)

    def replace(self, owner, name, value):
        if hasattr(owner, name):
            self._before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def restore(self):
        while self._before:
            setattr(*self._before.pop())


_replacements = Replacements()
_INSTEAD = "docs/numba.md has a table of what is"


def install(device_modules):
    """From now on kernels run here, and see ``device_modules()``: {name of a module: its stand-in}."""
    use_device_modules(device_modules)
    replace = _replacements.replace
    unconfigured = CUDADispatcher.__call__

    def call(kernel, *args, **kwargs):
        """A device function that a kernel reached through a module or a tuple, which rebind does not look
        into."""
        thread = running()
        if isinstance(thread, Thread):
            return rebind(kernel.py_func, thread.block.launch.is_sized)(*args, **kwargs)
        return unconfigured(kernel, *args, **kwargs)

    replace(CUDADispatcher, "__call__", call)
    for owner, name, function in signatures.NOT_COMPILED + ufuncs.CALLING:
        replace(owner, name, function)
    replace(CUDADispatcher, "configure", lambda kernel, *args: Configured(kernel, *args))
    replace(CUDADispatcher, "__getitem__", _configure)
    replace(CUDADispatcher, "forall", _for_all)
    replace(CUDADispatcher, "specialize", lambda kernel, *_: kernel)
    for name in _OF_COMPILED_CODE:
        replace(CUDADispatcher, name, refuse(f"{name} of a kernel", _INSTEAD))
    for name in _OF_DEVICES if n_gpus() == 0 else ():
        replace(cuda, name, refuse(f"cuda.{name}", _INSTEAD))
    replace(cuda, "stream", _new_stream)
    replace(cuda, "default_stream", default_stream)
    replace(cuda, "legacy_default_stream", default_stream)
    replace(cuda, "per_thread_default_stream", lambda: find(2))
    replace(cuda, "external_stream", find)
    replace(cuda, "event", Event)
    replace(cuda, "event_elapsed_time", Event.elapsed_time)
    replace(cuda, "synchronize", _synchronize)
    replace(cuda, "to_device", _to_device)
    replace(cuda, "device_array", _device_array)
    replace(cuda, "device_array_like", _device_array_like)
    replace(cuda, "pinned_array", _pinned_array)
    replace(cuda, "pinned_array_like", np.empty_like)
    replace(cuda, "mapped_array", _device_array)
    replace(cuda, "mapped_array_like", _device_array_like)
    replace(cuda, "managed_array", _device_array)
    replace(cuda, "as_cuda_array", as_device_array)
    replace(cuda, "is_cuda_array", is_device_array)
    replace(cuda, "pinned", lambda *arrays: contextlib.nullcontext())
    replace(cuda, "mapped", lambda *arrays, **_: contextlib.nullcontext(_mapped(arrays)))
    replace(cuda, "defer_cleanup", contextlib.nullcontext)
    for name in ("is_float16_supported", "is_bfloat16_supported"):
        replace(cuda, name, lambda: True)


def uninstall():
    _replacements.restore()
    if CUDADispatcher.configure is not _configure_without_world:
        _numba.append(CUDADispatcher.configure)
        CUDADispatcher.configure = _configure_without_world


_numba = []  # its own ``configure``


def _configure_without_world(kernel, grid, block, stream=0, *more):
    """``kernel[...]`` after the last World: what would end in the depths of Numba is refused."""
    if isinstance(stream, Stream) or n_gpus() == 0:
        raise RuntimeError(
            f"kernel {kernel.py_func.__name__}: this rank has no World, and the emulator ended with the last "
            "one. Launch before finalize(), or call shmemkit.init() again"
        )
    return _numba[-1](kernel, grid, block, stream, *more)
