"""The machine code of the kernels that a program compiles, for whoever looks at it."""

import contextlib
import re
import time
from dataclasses import dataclass, field

from numba.cuda.dispatcher import CUDADispatcher

_LINES = re.compile(r'asm [^"]*"[^"]*bar\.warp\.sync[^"]*\.sys\.global\.v2\.b64')
_PACKETS = re.compile(r'asm [^"]*"(?![^"]*bar\.warp\.sync)[^"]*\.sys\.global\.(v2\.b64|b128)')


@dataclass
class Compiled:
    """`cubins`: (name, machine code, whether threads also access packets of 16 bytes) of each kernel that
    accesses lines of LL128; `kernels`: how many were compiled; `seconds` that this took."""

    kernels: int = 0
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
            found.kernels += 1
            library = kernel._codelibrary
            if _LINES.search(code := library.get_llvm_str()):
                packets = _PACKETS.search(code) is not None
                found.cubins.append((self.py_func.__name__, bytes(library.get_cubin().code), packets))
        return kernel

    CUDADispatcher.compile = compile
    try:
        yield found
    finally:
        CUDADispatcher.compile = original
