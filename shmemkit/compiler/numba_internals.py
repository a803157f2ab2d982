"""What other rooms use of numba-cuda's insides, and how this one replaces Numba's contexts."""

import contextlib

from numba.cuda import decorators, vectorizers
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.cudadrv.driver import Stream as NumbaStream
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.errors import normalize_kernel_dimensions
from numba.cuda.np.numpy_support import from_dtype

__all__ = [
    "CUDADispatcher",  # a function decorated with @cuda.jit
    "NumbaStream",
    "contexts_instead",
    "decorators",
    "from_dtype",  # NumPy's dtype -> Numba's type
    "normalize_kernel_dimensions",
    "vectorizers",
]


@contextlib.contextmanager
def contexts_instead(contexts):
    """Numba uses `contexts`, one for typing and one for the target, meanwhile; no other thread compiles."""
    with global_compiler_lock:
        before = cuda_target.typing_context, cuda_target.target_context
        cuda_target._typingctx, cuda_target._targetctx = contexts
        try:
            yield
        finally:
            cuda_target._typingctx, cuda_target._targetctx = before
