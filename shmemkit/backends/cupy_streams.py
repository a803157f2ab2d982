"""CuPy's streams, as numba-cuda wants to see them. Needs CuPy."""

import cupy

from shmemkit.compiler.numba_internals import NumbaStream
from shmemkit.device.shmem import bounded_waits


class Stream(cupy.cuda.Stream, NumbaStream):
    """A new non-blocking stream that is one to CuPy, to Numba, and (by ``__cuda_stream__``) to cuda.core.

    CuPy's methods come first: ``with``, ``use``, ``record``, ``begin_capture``, ``synchronize``. `ptr` and
    `handle` are the address of the CUDA stream. It belongs to the device that is current when it is made.
    ``synchronize`` raises SignalTimeout when waits of kernels have expired.
    """

    def __init__(self):
        cupy.cuda.Stream.__init__(self, non_blocking=True)
        NumbaStream.__init__(self, self.ptr)

    def synchronize(self):
        with bounded_waits.checked():
            cupy.cuda.Stream.synchronize(self)

    __hash__ = cupy.cuda.Stream.__hash__
