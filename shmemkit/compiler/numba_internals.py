"""What other rooms use of numba-cuda's insides."""

from numba.cuda import decorators, vectorizers
from numba.cuda.cudadrv.driver import Stream as NumbaStream
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.errors import normalize_kernel_dimensions
from numba.cuda.np.numpy_support import from_dtype

__all__ = [
    "CUDADispatcher",  # a function decorated with @cuda.jit
    "NumbaStream",
    "decorators",
    "from_dtype",  # NumPy's dtype -> Numba's type
    "normalize_kernel_dimensions",
    "vectorizers",
]
