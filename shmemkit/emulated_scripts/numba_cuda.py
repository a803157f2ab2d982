"""What scripts ask ``numba.cuda`` for besides kernels, streams and arrays (of ``emu/launch_hook.py``)."""

import contextlib

import numpy as np
from numba import cuda

from shmemkit.compiler.numba_internals import decorators
from shmemkit.emu.launch_hook import DeviceArray
from shmemkit.emu.stand_in_modules import Served, not_served

from .cuda_core import COMPUTE_CAPABILITY
from .cupy import ndarray
from .current_process import current
from .streams import ScriptEvent, new_stream


class NumbaDevice(Served):
    """``cuda.get_current_device()``"""

    MULTIPROCESSOR_COUNT = 132
    WARP_SIZE = 32
    MAX_THREADS_PER_BLOCK = 1024
    MAX_SHARED_MEMORY_PER_BLOCK = 48 << 10
    COOPERATIVE_LAUNCH = 1
    name = b"shmemkit emulator"
    compute_capability = COMPUTE_CAPABILITY

    def __init__(self, number):
        self.id = number

    def __enter__(self):
        process = current("cuda.gpus")
        self.before, process.device = process.device, self.id
        return self

    def __exit__(self, *_):
        current("cuda.gpus").device = self.before


class _Gpus:
    def __len__(self):
        return current("cuda.gpus").machine.n_ranks

    def __getitem__(self, number):
        if not 0 <= number < len(self):
            raise IndexError(
                f"cuda.gpus: the index is {number}; it must be 0 to {len(self) - 1}: the emulator has "
                "a device for each rank"
            )
        return NumbaDevice(number)

    def __iter__(self):
        return (NumbaDevice(i) for i in range(len(self)))

    @property
    def lst(self):
        return list(self)

    @property
    def current(self):
        return NumbaDevice(current("cuda.gpus").device)


def _select_device(number):
    device = _Gpus()[number]
    current("cuda.select_device").device = number
    return device


def _refuse(name):
    def refuse(*_, **__):
        raise not_served(f"numba.cuda.{name}")

    return refuse


_REFUSED = (
    "current_context detect from_cuda_array_interface open_ipc_array profile_start profile_stop profiling"
).split()


@contextlib.contextmanager
def installed():
    """The functions of numba.cuda, replaced, also where ``emu/launch_hook.py`` has replaced them already."""
    gpus = _Gpus()
    replaced = {
        "stream": new_stream,
        "event": lambda timing=True: ScriptEvent(),
        "is_available": lambda: True,
        "gpus": gpus,
        "list_devices": lambda: list(gpus),
        "get_current_device": lambda: gpus.current,
        "select_device": _select_device,
        "close": lambda: None,
        "as_cuda_array": lambda array, sync=True: array.view(DeviceArray),
        "is_cuda_array": lambda array: isinstance(array, (DeviceArray, ndarray)),
        "is_float16_supported": lambda: True,
        "is_bfloat16_supported": lambda: True,
        "pinned": lambda *arrays: contextlib.nullcontext(),
        "pinned_array_like": np.empty_like,
        "defer_cleanup": contextlib.nullcontext,
    }
    replaced.update({name: _refuse(name) for name in _REFUSED})
    changes = [(cuda, name, value) for name, value in replaced.items()]
    changes.append((decorators, "_have_nvjitlink", lambda: True))  # @cuda.jit(lto=True): nothing is linked
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in changes]
    for (owner, name, value), (_, _, known) in zip(changes, before, strict=True):
        if known is not None:  # in this version of numba-cuda
            setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, known in before:
            if known is not None:
                setattr(owner, name, known)
