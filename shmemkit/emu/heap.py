"""The symmetric heap: one array of bytes per PE, the same layout on all of them.

Every PE allocates and frees in the same order, so each keeps its own list of allocations and all lists agree;
an address of one PE becomes another's by adding the distance of their heaps.
"""

import mmap
import os

import numpy as np

from .arrays import address

ALIGNMENT = 256  # bytes, as cudaMalloc and NVSHMEM
DEFAULT_SIZE = 1 << 30


def heap_size(default=DEFAULT_SIZE):
    """Bytes per PE: NVSHMEM_SYMMETRIC_SIZE (with K, M or G), as NVSHMEM reads it."""
    text = os.environ.get("NVSHMEM_SYMMETRIC_SIZE", "").strip()
    if not text:
        return default
    digits = text.rstrip("kKmMgGtTbBiI")
    scale = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    try:
        size = int(float(digits) * scale[text[len(digits) :].upper()[:1]])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(
            f"NVSHMEM_SYMMETRIC_SIZE={text!r}: a number of bytes with K, M or G is allowed, such as 512M"
        )
    return whole_pages(size)


def whole_pages(size):
    return -(-size // 4096) * 4096


def private_memory(n_bytes):
    """Zeroed memory of this process; pages cost nothing until they are touched."""
    return np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)


class Allocation:
    """A symmetric allocation: `offset` and `size` in bytes, and the `name` and `dtype` of what it holds, for
    reports."""

    __slots__ = ("offset", "size", "name", "dtype")

    def __init__(self, offset, size):
        self.offset, self.size, self.name, self.dtype = offset, size, None, None


class Heap:
    """`memory` holds the heaps of `n_pes` PEs one after another; this object allocates on PE `pe`."""

    def __init__(self, memory, n_pes, pe):
        self.memory, self.n_pes, self.pe = memory, n_pes, pe
        self.size = memory.size // n_pes
        self.base = address(memory) + pe * self.size  # of this PE
        self.allocations = []  # by offset

    def allocate(self, n_bytes):
        """-> uint8 array of this PE. MemoryError when no gap is large enough."""
        need = -(-max(n_bytes, 1) // ALIGNMENT) * ALIGNMENT
        start = 0
        for i, a in enumerate([*self.allocations, Allocation(self.size, 0)]):
            if a.offset - start >= need:
                self.allocations.insert(i, Allocation(start, need))
                begin = self.pe * self.size + start
                # In two steps: an empty slice would begin where `memory` does.
                return self.memory[begin : begin + need][:n_bytes]
            start = a.offset + a.size
        used = sum(a.size for a in self.allocations)
        raise MemoryError(
            f"symmetric heap exhausted: {n_bytes} bytes asked for, {used} of {self.size} in use on each "
            f"rank; set NVSHMEM_SYMMETRIC_SIZE (now {self.size}) to at least {used + need}"
        )

    def find(self, array):
        """The allocation that holds `array` (of this PE), or None."""
        offset = address(array) - self.base
        for a in self.allocations:
            if a.offset <= offset < a.offset + a.size:
                return a
        return None

    def free(self, array):
        allocation = self.find(array)
        if allocation is None:
            raise ValueError("free: not an array of the symmetric heap, or freed before")
        self.allocations.remove(allocation)

    def on(self, array, pe):
        """The same place in the heap of PE `pe`, with the same shape, dtype and strides. `array` lies in any
        PE's heap."""
        if not 0 <= pe < self.n_pes:
            raise IndexError(f"rank {pe} does not exist: ranks are 0 to {self.n_pes - 1}")
        begin = address(array) - address(self.memory)
        if not 0 <= begin < self.memory.size:
            raise ValueError(
                f"not a symmetric array: {array.dtype} {array.shape} lies outside of the symmetric heap; "
                "allocate it with shmemkit.zeros, empty, full, array or signals"
            )
        offset = begin % self.size + pe * self.size
        return np.ndarray.__new__(type(array), array.shape, array.dtype, self.memory, offset, array.strides)
