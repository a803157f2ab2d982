"""What other rooms use of numba-cuda's insides, and how this one replaces Numba's contexts."""

import contextlib

from numba.cuda import bf16, decorators, fp16, vectorizers
from numba.cuda.args import ArgHint
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.cudadrv import devices
from numba.cuda.cudadrv.driver import Stream as NumbaStream
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.errors import normalize_kernel_dimensions
from numba.cuda.libdevicefuncs import functions as libdevice_functions
from numba.cuda.np.numpy_support import as_dtype, from_dtype

__all__ = [
    "ArgHint",  # cuda.In and the like
    "CUDADispatcher",  # a function decorated with @cuda.jit
    "Module",
    "NumbaStream",
    "bf16",
    "contexts_instead",
    "fp16",
    "libdevice_functions",  # name -> (type of the result, parameters)
    "as_dtype",  # Numba's type -> NumPy's dtype
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


class Module:
    """A compiled kernel, loaded once more: with constant and global memory of its own. `function` is as of
    its ``get_cufunc``."""

    def __init__(self, compiled):
        library = compiled._codelibrary
        self._context = devices.get_context()
        setup, teardown = library._setup_functions, library._teardown_functions
        self._module = self._context.create_module_image(library.get_cubin(), setup, teardown)
        self.function = self._module.get_function(library._entry_name)

    def unload(self):
        """No launch of it may follow, nor be running."""
        self._context.unload_module(self._module)
