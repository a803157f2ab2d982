"""GPU functions called from Python, on memory of this process: each PTX instruction in them is executed here.

    Gpu(monkeypatch)
    ll.packing(8, store_line)(x, address, n_bytes, flag, thread, threads)

It knows loads, stores, additions and the clock; a subclass's ``run`` has others.
"""

import ctypes
import re
from types import SimpleNamespace

import numpy as np
from numba import cuda
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import _Intrinsic

LOAD = re.compile(r"\bld\.[\w.]*global\.(?:v(\d)\.)?[busf](\d+) .*?\[\$(\d)\]")
STORE = re.compile(r"\bst\.[\w.]*global\.(?:v\d\.)?[busf](\d+) \[\$0\]")
ADD = re.compile(r"\batom\.add\.[\w.]*global\.u(\d+) \$0, \[\$1\], 1;")


class Gpu:
    """Executes instructions from when it is made until the test ends. One thread: what a warp does together,
    it does alone. Addresses are those of this process."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(
            _Intrinsic, "__call__", lambda function, *given: self.run(function.__doc__, *given)
        )
        monkeypatch.setattr(CUDADispatcher, "__call__", lambda function, *given: function.py_func(*given))
        for name, index in {"threadIdx": (37, 5, 63), "blockIdx": (70000, 3, 65534)}.items():
            monkeypatch.setattr(cuda, name, SimpleNamespace(**dict(zip("xyz", index, strict=True))))
        monkeypatch.setattr(cuda, "syncwarp", lambda *mask: None)
        monkeypatch.setattr(cuda, "any_sync", lambda mask, predicate: predicate)

    def run(self, ptx, *given):
        """What the instructions `ptx` do with their arguments. -> their result"""
        if given and isinstance(given[0], tuple):  # the same access to several addresses
            words, bits = map(int, LOAD.search(ptx).groups()[:2])
            return tuple(self.read_words(int(at), words, bits // 8) for at in given[0])
        if found := LOAD.search(ptx):
            vector, bits, n_results = int(found[1] or 1), int(found[2]), int(found[3])
            size = vector * bits // 8 // n_results
            results = self.read_words(int(given[0]), n_results, size)
            return results if n_results > 1 else results[0]
        if found := STORE.search(ptx):
            address, *values = map(int, given)
            size = int(found[1]) // 8
            assert address % (size * len(values)) == 0, f"{ptx} at {address}"
            return [self.write_memory(address + i * size, value, size) for i, value in enumerate(values)]
        if found := ADD.search(ptx):
            size = int(found[1]) // 8
            before = self.read_memory(int(given[0]), size)
            self.write_memory(int(given[0]), int(before) + 1, size)
            return before
        if found := re.fullmatch(r"load (\d+) bytes", ptx):
            array, offset = given
            size = int(found[1])
            part = array.view("uint8").reshape(-1)[int(offset) :][:size].tobytes()
            return tuple(np.frombuffer(part, "u4")) if size == 16 else np.frombuffer(part, f"u{size}")[0]
        if "%globaltimer" in ptx:
            return self.clock()
        if ptx.startswith("ld.const"):
            return np.uint64(self.constant(int(given[0])))
        raise NotImplementedError(ptx)

    def read_words(self, address, n, size):
        return tuple(self.read_memory(address + i * size, size) for i in range(n))

    def read_memory(self, address, size):
        return np.frombuffer(self.at(address, size), f"u{size}")[0]

    def write_memory(self, address, value, size):
        self.at(address, size)[:] = value.to_bytes(size, "little")

    @staticmethod
    def at(address, size):
        return memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def clock(self):
        """Nanoseconds, as uint64."""
        raise NotImplementedError

    def constant(self, index):
        """The word of the module's table in constant memory."""
        raise NotImplementedError
