"""What other rooms use of numba-cuda's insides, and how this one replaces Numba's contexts."""

# ruff: noqa: F401 - other rooms import these names from here

import contextlib
import os
from typing import Any, NamedTuple

from cuda.core import ObjectCode  # pyright: ignore[reportAttributeAccessIssue]
from numba.cuda import bf16, decorators, fp16, vectorizers
from numba.cuda.args import ArgHint  # cuda.In and the like
from numba.cuda.core import config  # pyright: ignore[reportAttributeAccessIssue]
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.cudadrv.driver import Stream as NumbaStream
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher  # a function decorated with @cuda.jit
from numba.cuda.errors import normalize_kernel_dimensions
from numba.cuda.libdevicefuncs import (
    functions as libdevice_functions,
)  # name: (result, parameters)
from numba.cuda.np.numpy_support import as_dtype, from_dtype  # Numba's type -> NumPy's, and back


def no_warnings_of_small_grids():
    """They are normal here. A program that sets the variable decides."""
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
    config.reload_config()  # Numba may have been imported before


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


class Function(NamedTuple):
    handle: int  # a CUkernel


class Module:
    """A compiled kernel, loaded once more: with constant and global memory of its own. `function` is as of
    its ``get_cufunc``, but keeps nothing loaded.

    Numba keeps one ObjectCode of a kernel, which is loaded once, whoever asks. Another one, of the same
    machine code, is another library. It unloads itself, so Numba must not do that, too.
    """

    def __init__(self, compiled):
        library = compiled._codelibrary
        self._code: Any = ObjectCode.from_cubin(bytes(library.get_cubin().code))
        self._teardown = list(library._teardown_functions)
        for setup in library._setup_functions:
            setup(self._code)
        self.function = Function(int(self._code.get_kernel(library._entry_name).handle))

    def unload(self):
        """Now: it waits for running kernels, which may be waiting for this rank. No launch of it may follow,
        nor be running."""
        while self._teardown:
            self._teardown.pop()(self._code)
        self._code = None
