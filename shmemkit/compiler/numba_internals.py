"""What other rooms use of numba-cuda's insides."""

from numba.cuda import bf16, decorators, fp16, vectorizers
from numba.cuda.args import ArgHint
from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.cudadrv.driver import Stream as NumbaStream
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.errors import normalize_kernel_dimensions
from numba.cuda.libdevicefuncs import functions as libdevice_functions
from numba.cuda.np.numpy_support import as_dtype, from_dtype

__all__ = [
    "ArgHint",  # cuda.In and the like
    "CUDADispatcher",  # a function decorated with @cuda.jit
    "NumbaStream",
    "bf16",
    "fp16",
    "libdevice_functions",  # name -> (type of the result, parameters)
    "as_dtype",  # Numba's type -> NumPy's dtype
    "decorators",
    "from_dtype",  # NumPy's dtype -> Numba's type
    "normalize_kernel_dimensions",
    "normalize_signature",
    "vectorizers",
]
