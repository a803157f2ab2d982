"""What scripts ask ``numba.cuda`` for besides kernels, streams and arrays (of ``emu/launch_hook.py``)."""

import contextlib

from numba import cuda

from shmemkit.compiler.numba_internals import decorators
from shmemkit.emu.launch_hook import DeviceArray, Replacements
from shmemkit.emu.stand_in_modules import refuse

from .cupy import ndarray
from .current_process import current
from .devices import ContextDevice
from .streams import ScriptEvent, new_stream


class NumbaDevice(ContextDevice):
    """``cuda.get_current_device()``"""

    call, error = "cuda.gpus", IndexError
    WARP_SIZE = 32
    MAX_THREADS_PER_BLOCK = 1024
    MAX_SHARED_MEMORY_PER_BLOCK = 48 << 10
    COOPERATIVE_LAUNCH = 1
    name = b"shmemkit emulator"
    id = property(int)
    MULTIPROCESSOR_COUNT = property(lambda self: self._gpu.sms)
    compute_capability = property(lambda self: self._gpu.compute_capability)


class _Gpus:
    def __len__(self):
        return current("cuda.gpus").machine.n_ranks

    def __getitem__(self, number):
        return NumbaDevice(number)

    def __iter__(self):
        return (NumbaDevice(i) for i in range(len(self)))

    @property
    def lst(self):
        return list(self)

    @property
    def current(self):
        return NumbaDevice()


_REFUSED = (
    "current_context detect from_cuda_array_interface open_ipc_array profile_start profile_stop profiling"
).split()


@contextlib.contextmanager
def installed():
    """The functions of numba.cuda, replaced, also where ``emu/launch_hook.py`` has replaced them already."""
    gpus = _Gpus()
    replacements = Replacements()
    for name, value in {
        "stream": new_stream,
        "event": lambda timing=True: ScriptEvent(),
        "is_available": lambda: True,
        "gpus": gpus,
        "list_devices": lambda: list(gpus),
        "get_current_device": lambda: gpus.current,
        "select_device": lambda number: gpus[number].make_current(),
        "close": lambda: None,
        "as_cuda_array": lambda array, sync=True: array.view(DeviceArray),
        "is_cuda_array": lambda array: isinstance(array, (DeviceArray, ndarray)),
        **{name: refuse(f"numba.cuda.{name}") for name in _REFUSED},
    }.items():
        replacements.replace(cuda, name, value)
    # @cuda.jit(lto=True): nothing is linked.
    replacements.replace(decorators, "_have_nvjitlink", lambda: True)
    try:
        yield
    finally:
        replacements.restore()
