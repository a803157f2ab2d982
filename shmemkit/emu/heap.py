"""The symmetric heap: one array of bytes per PE, the same layout on all of them.

Every PE allocates and frees in the same order, so each keeps its own list of allocations and all lists agree;
an address of one PE becomes another's by adding the distance of their heaps.

Freed memory is given out again only where there is no room elsewhere, so that a late use of it is known as
one.
"""

import bisect
import ctypes
import mmap
import operator
import os
from collections import deque
from typing import Any

import numpy as np

from .device_arrays import address

ALIGNMENT = 256  # bytes, as cudaMalloc and NVSHMEM
DEFAULT_SIZE = 1 << 30
EMPTY = (0xA5, 0xFF)  # bytes of memory with no content: NaN of all floating types, and no likely integer
LARGE = 1 << 20  # bytes of an allocation whose pages go back to the system when it is freed
_MADV_DONTNEED, _MADV_REMOVE = 4, 9  # of private memory, and of what processes share
_libc = ctypes.CDLL(None)


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
            f"NVSHMEM_SYMMETRIC_SIZE is {text!r}; it must be a number of bytes, with K, M or G, such as 512M"
        )
    return whole_pages(size)


def whole_pages(size):
    return -(-size // 4096) * 4096


def private_memory(n_bytes):
    """Zeroed memory of this process; pages cost nothing until they are touched."""
    try:
        return np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
    except (OSError, OverflowError, ValueError):
        raise too_large(n_bytes) from None


def too_large(n_bytes):
    return MemoryError(
        f"the symmetric heaps of all ranks need {n_bytes} bytes ({n_bytes / 2**30:.3g} GiB) of address "
        "space, which this system does not give. Use a smaller NVSHMEM_SYMMETRIC_SIZE or heap_size=, or "
        "fewer ranks"
    )


class Allocation:
    """A symmetric allocation: `offset` and `size` in bytes, and for reports the `name` and `dtype` of what it
    holds, and lines (see ``report.user_line``): the one that left it `empty`, if any, and the one that
    `freed` it, if it was."""

    __slots__ = ("offset", "size", "name", "dtype", "empty", "freed")

    def __init__(self, offset, size):
        self.offset, self.size = offset, size
        self.name = self.dtype = self.empty = self.freed = None


_offset = operator.attrgetter("offset")


def _give_pages_back(at, n_bytes):
    """The whole pages of this memory cost nothing any more; they are zero."""
    first, last = whole_pages(at), (at + n_bytes) // 4096 * 4096
    pages = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
    if _libc.madvise(*pages, _MADV_REMOVE):
        _libc.madvise(*pages, _MADV_DONTNEED)


class Heap:
    """`memory` holds the heaps of `n_pes` PEs one after another; this object allocates on PE `pe`."""

    def __init__(self, memory, n_pes, pe):
        self.memory, self.n_pes, self.pe = memory, n_pes, pe
        self.size = memory.size // n_pes
        self.base = address(memory) + pe * self.size  # of this PE
        self.allocations = []  # by offset
        self.reserve = None  # (first, n_bytes): have this part of `memory`, or raise MemoryError
        self.freed = deque()  # those that were freed, whose memory nobody has got since; the oldest first
        self.top = 0  # from here on, no memory was ever given out

    def allocate(self, n_bytes):
        """-> uint8 array of this PE. MemoryError when no gap is large enough."""
        need = -(-max(n_bytes, 1) // ALIGNMENT) * ALIGNMENT
        start = self._room(n_bytes, need)
        begin = self.pe * self.size + start
        if self.reserve is not None:
            self.reserve(begin, need)
        bisect.insort(self.allocations, Allocation(start, need), key=_offset)
        self.top = max(self.top, start + need)
        # In two steps: an empty slice would begin where `memory` does.
        return self.memory[begin : begin + need][:n_bytes]

    def _room(self, n_bytes, need):
        """Where there are `need` bytes: new ones, else between what is in use and what was freed, else freed
        ones, the oldest first."""
        if self.size - self.top >= need:
            return self.top
        while True:
            start = 0
            for a in sorted([*self.allocations, *self.freed, Allocation(self.size, 0)], key=_offset):
                if a.offset - start >= need:
                    return start
                start = a.offset + a.size
            if not self.freed:
                break
            self.freed.popleft()
        used = sum(a.size for a in self.allocations)
        raise MemoryError(
            f"the symmetric heap is full: {n_bytes} bytes are asked for, and {used} of {self.size} are in "
            f"use on each rank. Set NVSHMEM_SYMMETRIC_SIZE, now {self.size}, to {used + need} or more"
        )

    def find(self, array):
        """The allocation that holds `array` (of this PE), or None."""
        offset = address(array) - self.base
        for a in self.allocations:
            if a.offset <= offset < a.offset + a.size:
                return a
        return None

    def free(self, array, line):
        """Give `array` back; `line` of the program does it. -> its Allocation"""
        allocation = self.find(array)
        if allocation is None:
            raise ValueError("free(): the array is not in the symmetric heap, or was freed before")
        self.allocations.remove(allocation)
        allocation.freed = line
        self.freed.append(allocation)
        # So that a use of it shows.
        if array.nbytes < LARGE:
            array.fill(0xFF)
        else:
            _give_pages_back(address(array), array.nbytes)
        return allocation

    def leave_empty(self, array, line):
        """Fill the allocation of `array` with what nobody writes; `line` of the program made it."""
        allocation: Any = self.find(array)
        allocation.empty = line
        whole = self.memory[self.pe * self.size + allocation.offset :][: allocation.size]
        whole.reshape(-1, len(EMPTY))[:] = EMPTY

    def freed_at(self, array):
        """The freed Allocation that `array`, of any PE's heap, lies in, or None."""
        begin = address(array) - address(self.memory)
        if not 0 <= begin < self.memory.size:
            return None
        offset = begin % self.size
        return next((a for a in self.freed if a.offset <= offset < a.offset + a.size), None)

    def on(self, array, pe):
        """The same offset in the heap of PE `pe`, with the same shape, dtype and strides. `array` lies in any
        PE's heap."""
        if not 0 <= pe < self.n_pes:
            raise IndexError(f"rank is {pe}; it must be 0 to {self.n_pes - 1}")
        begin = address(array) - address(self.memory)
        if not 0 <= begin < self.memory.size:
            raise ValueError(
                f"the array {array.dtype} {array.shape} is not symmetric; it must be in the symmetric heap. "
                "Allocate it with shmemkit.zeros, empty, full, array or signals"
            )
        offset = begin % self.size + pe * self.size
        return np.ndarray.__new__(type(array), array.shape, array.dtype, self.memory, offset, array.strides)
