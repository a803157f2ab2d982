"""What scripts ask ``numba.cuda`` for beside kernels, streams and arrays (which ``emu/hook.py`` serves)."""

import contextlib

from numba import cuda

from .cuda_core import COMPUTE_CAPABILITY
from .modules import Served, not_served
from .process import current
from .streams import ScriptEvent, find, new_stream


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
        current("cuda.gpus").device = self.id
        return self

    def __exit__(self, *_):
        pass


class _Gpus:
    def __len__(self):
        return current("cuda.gpus").machine.n_pes

    def __getitem__(self, number):
        if not 0 <= number < len(self):
            raise IndexError(f"cuda.gpus[{number}]: the emulator has as many devices as PEs, {len(self)}")
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
    "current_context device_array_like_async get_ipc_handle mapped_array mapped_array_like managed_array "
    "open_ipc_array pinned profile_start profile_stop profiling reduce Reduce vectorize"
).split()


@contextlib.contextmanager
def installed():
    """The functions of numba.cuda, replaced, also where ``emu/hook.py`` has replaced them already."""
    gpus = _Gpus()
    replaced = {
        "stream": new_stream,
        "external_stream": find,
        "default_stream": lambda: current("cuda.default_stream").null,
        "legacy_default_stream": lambda: current("cuda.legacy_default_stream").null,
        "event": lambda timing=True: ScriptEvent(),
        "is_available": lambda: True,
        "gpus": gpus,
        "list_devices": lambda: list(gpus),
        "get_current_device": lambda: gpus.current,
        "select_device": _select_device,
        "close": lambda: None,
        "as_cuda_array": lambda array, sync=True: array,
    }
    replaced.update({name: _refuse(name) for name in _REFUSED if hasattr(cuda, name)})
    before = {name: getattr(cuda, name) for name in replaced if hasattr(cuda, name)}
    for name in before:
        setattr(cuda, name, replaced[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(cuda, name, value)
