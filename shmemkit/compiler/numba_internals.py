"""What other rooms use of numba-cuda's insides."""

from numba.cuda import decorators, vectorizers
from numba.cuda.cudadrv import devices
from numba.cuda.cudadrv.driver import Stream as NumbaStream
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.errors import normalize_kernel_dimensions
from numba.cuda.np.numpy_support import from_dtype

__all__ = [
    "CUDADispatcher",  # a function decorated with @cuda.jit
    "Module",
    "NumbaStream",
    "decorators",
    "from_dtype",  # NumPy's dtype -> Numba's type
    "normalize_kernel_dimensions",
    "vectorizers",
]


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
