"""The machine code of the kernels that a program compiles, for whoever looks at it."""

import contextlib
import re
import time
from dataclasses import dataclass, field

from numba.cuda.dispatcher import CUDADispatcher

_SNIPPET, _BARRIER = re.compile(r'asm [^"]*"([^"]*)"'), "bar.warp.sync"
_ACCESS = re.compile(r"\b(st|ld)\.\w+\.sys\.global\.(?:v2\.b64|b128)")
_KINDS = {"st": "stores", "ld": "loads"}


@dataclass
class Compiled:
    """`cubins`: (name, machine code, lines, packets) of each kernel that accesses lines of LL128, where lines
    and packets of 16 bytes say of which there are some: {"stores", "loads"}; `kernels`: how many were
    compiled; `seconds` that this took."""

    kernels: int = 0
    cubins: list = field(default_factory=list)
    seconds: float = 0.0


def accesses(llvm):
    """-> of which LLVM's code has lines, and of which packets: each {"stores", "loads"}, or less"""
    found = set(), set()
    for snippet in _SNIPPET.findall(llvm):
        found[_BARRIER not in snippet].update(_KINDS[access] for access in _ACCESS.findall(snippet))
    return found


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
            lines, packets = accesses(library.get_llvm_str())
            if lines:
                code = bytes(library.get_cubin().code)
                found.cubins.append((self.py_func.__name__, code, lines, packets))
        return kernel

    CUDADispatcher.compile = compile
    try:
        yield found
    finally:
        CUDADispatcher.compile = original
