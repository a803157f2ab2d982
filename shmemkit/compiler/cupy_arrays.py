"""CuPy's arrays, as numba-cuda wants to see them. Needs CuPy."""

import functools

import cupy
from numba.cuda import types
from numba.cuda.np.numpy_support import from_dtype
from numba.cuda.typing.typeof import typeof_impl


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
