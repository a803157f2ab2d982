"""CuPy's streams and arrays, as numba-cuda wants to see them. Needs CuPy."""

import functools

import cupy
from numba.cuda import types
from numba.cuda.cudadrv.driver import Stream as NumbaStream
from numba.cuda.np.numpy_support import from_dtype
from numba.cuda.typing.typeof import typeof_impl

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


@functools.cache
def register_arrays():
    """Teach Numba the type of CuPy arrays. Calling it again does nothing.

    Numba asks for a DLPack capsule otherwise, which takes longer and not every dtype has one; bfloat16 is
    that of ml_dtypes.
    """
    typeof_impl.register(cupy.ndarray, _typeof_array)


def _typeof_array(array, context):
    flags = array.flags
    layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
    return types.Array(from_dtype(array.dtype), array.ndim, layout)
