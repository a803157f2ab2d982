"""What other rooms use of numba-cuda's insides."""

from numba.cuda import decorators, vectorizers
from numba.cuda.args import ArgHint
from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.cudadrv.driver import Stream as NumbaStream
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.errors import normalize_kernel_dimensions
from numba.cuda.np.numpy_support import as_dtype, from_dtype

__all__ = [
    "ArgHint",  # cuda.In and the like
    "CUDADispatcher",  # a function decorated with @cuda.jit
    "NumbaStream",
    "as_dtype",  # Numba's type -> NumPy's dtype
    "decorators",
    "from_dtype",  # NumPy's dtype -> Numba's type
    "normalize_kernel_dimensions",
    "normalize_signature",
    "vectorizers",
]
