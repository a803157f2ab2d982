"""The machine code of the kernels that a program compiles, for whoever looks at it."""

import contextlib
import time
from dataclasses import dataclass, field

from numba.cuda.dispatcher import CUDADispatcher


@dataclass
class Compiled:
    """`cubins`: (name, machine code) of each kernel; `seconds` that compiling took."""

    cubins: list = field(default_factory=list)
    seconds: float = 0.0


@contextlib.contextmanager
def compiled_kernels():
    """-> Compiled: the kernels that are compiled meanwhile, or taken from the cache."""
    found, original = Compiled(), CUDADispatcher.compile

    def compile(self, sig):
        known, begin = set(map(id, self.overloads.values())), time.monotonic()
        kernel = original(self, sig)
        if id(kernel) not in known:
            found.seconds += time.monotonic() - begin
            found.cubins.append((self.py_func.__name__, bytes(kernel._codelibrary.get_cubin().code)))
        return kernel

    CUDADispatcher.compile = compile
    try:
        yield found
    finally:
        CUDADispatcher.compile = original
