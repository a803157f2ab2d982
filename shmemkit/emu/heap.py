"""The symmetric heap: one array of bytes per PE, the same layout on all of them.

Every PE allocates and frees in the same order, so each keeps its own list of allocations and all lists agree;
an address of one PE becomes another's by adding the distance of their heaps.

A *slab* is a part of the heap that a group of PEs allocates from by itself. Its PEs agree among themselves
alone.

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

from shmemkit.support.agreement import ranks_text
from shmemkit.support.settings import n_bytes

from .device_arrays import address

ALIGNMENT = 256  # bytes, as cudaMalloc and NVSHMEM
DEFAULT_SIZE = 1 << 30
EMPTY = (0xA5, 0xFF)  # bytes of memory with no content: NaN of all floating types, and no likely integer
LARGE = 1 << 20  # bytes of an allocation whose pages go back to the system when it is freed
_MADV_DONTNEED, _MADV_REMOVE = 4, 9  # of private memory, and of what processes share
# MAP_NORESERVE of Linux, which Python names from 3.13 on: memory counts when it is touched.
_RESERVED_AS_TOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
_libc = ctypes.CDLL(None)


def heap_size(default=DEFAULT_SIZE):
    """Bytes per PE: NVSHMEM_SYMMETRIC_SIZE (with K, M or G), as NVSHMEM reads it."""
    text = os.environ.get("NVSHMEM_SYMMETRIC_SIZE", "").strip()
    if not text:
        return default
    size = n_bytes(text)
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
        return np.frombuffer(mmap.mmap(-1, n_bytes, flags=_RESERVED_AS_TOUCHED), np.uint8)
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

    end = property(lambda self: self.offset + self.size)


class Slab:
    """Bytes `offset` to `end` of the heap: a group's, or the whole heap. From `top` on, no memory of it was
    ever given out."""

    __slots__ = ("offset", "size", "end", "top", "slabs", "full")

    def __init__(self, offset, size, full):
        self.offset, self.size, self.end, self.top = offset, size, offset + size, offset
        self.slabs = []  # that lie in it
        self.full = full  # (bytes asked for, in use, of how many, needed) -> what a report says


_offset = operator.attrgetter("offset")


def _heap_is_full(n_bytes, used, size, needed):
    return (
        f"the symmetric heap is full: {n_bytes} bytes are asked for, and {used} of {size} are in "
        f"use on each rank. Set NVSHMEM_SYMMETRIC_SIZE, now {size}, to {needed} or more"
    )


def _is_of(allocation, slab):
    """Whether it lies in `slab`, and not in one that lies in that."""
    offset = allocation.offset
    if not slab.offset <= offset < slab.end:
        return False
    return not any(inner.offset <= offset < inner.end for inner in slab.slabs)


def _give_pages_back(at, n_bytes):
    """The whole pages of this memory cost nothing any more; they are zero."""
    first, last = whole_pages(at), (at + n_bytes) // 4096 * 4096
    pages = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
    if _libc.madvise(*pages, _MADV_REMOVE):
        _libc.madvise(*pages, _MADV_DONTNEED)


class Heap:
    """`memory` holds the heaps of `n_ranks` PEs one after another; this object allocates on PE `pe`."""

    def __init__(self, memory, n_ranks, pe):
        self.memory, self.n_ranks, self.pe = memory, n_ranks, pe
        self.size = memory.size // n_ranks
        self.base = address(memory) + pe * self.size  # of this PE
        self.allocations = []  # by offset
        self.reserve = None  # (first, n_bytes): have this part of `memory`, or raise MemoryError
        self.freed = deque()  # those that were freed, whose memory nobody has got since; the oldest first
        self.whole = Slab(0, self.size, _heap_is_full)
        self.groups = []  # (slab, PEs) of those that this PE is in

    def allocate(self, n_bytes, slab=None):
        """-> uint8 array of this PE, in `slab` (default: the whole heap). MemoryError when no gap is large
        enough."""
        slab = slab or self.whole
        need = -(-max(n_bytes, 1) // ALIGNMENT) * ALIGNMENT
        start = self._take(n_bytes, need, slab)
        bisect.insort(self.allocations, Allocation(start, need), key=_offset)
        begin = self.pe * self.size + start
        # In two steps: an empty slice would begin where `memory` does.
        return self.memory[begin : begin + need][:n_bytes]

    def new_slab(self, n_bytes, slab, full):
        """-> a Slab of `n_bytes` in `slab`; ``full(bytes asked for, in use, size, needed)`` says how it can
        be larger. MemoryError as of ``allocate``."""
        need = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        made = Slab(self._take(n_bytes, need, slab), need, full)
        slab.slabs.append(made)
        return made

    def free_slab(self, made, slab):
        """Give back what ``new_slab`` has taken from `slab`, and all that was allocated of it."""
        slab.slabs.remove(made)
        self.groups = [group for group in self.groups if not made.offset <= group[0].offset < made.end]
        for a in [a for a in self.allocations if made.offset <= a.offset < made.end]:
            self.allocations.remove(a)
        self.freed.append(Allocation(made.offset, made.size))  # after its arrays, whose lines reports name

    def _take(self, n_bytes, need, slab):
        start = self._room(n_bytes, need, slab)
        if self.reserve is not None:
            self.reserve(self.pe * self.size + start, need)
        slab.top = max(slab.top, start + need)
        return start

    def _room(self, n_bytes, need, slab):
        """Where `slab` has `need` bytes: new ones, else between what is in use and what was freed, else freed
        ones, the oldest first."""
        if slab.end - slab.top >= need:
            return slab.top
        used = [*slab.slabs, *(a for a in self.allocations if _is_of(a, slab))]
        freed = [a for a in self.freed if _is_of(a, slab)]
        while True:
            start = slab.offset
            for a in sorted([*used, *freed, Allocation(slab.end, 0)], key=_offset):
                if a.offset - start >= need:
                    return start
                start = max(start, a.end)  # a freed slab holds its freed arrays
            if not freed:
                break
            self.freed.remove(freed.pop(0))
        in_use = sum(a.size for a in used)
        raise MemoryError(slab.full(n_bytes, in_use, slab.size, in_use + need))

    def at(self, offset):
        """The allocation that holds byte `offset`, or None."""
        i = bisect.bisect_right(self.allocations, offset, key=_offset) - 1
        return self.allocations[i] if i >= 0 and offset < self.allocations[i].end else None

    def find(self, array):
        """The allocation that holds `array` (of this PE), or None."""
        return self.at(address(array) - self.base)

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

    def freed_at(self, offset):
        """The freed Allocation that byte `offset` lies in, or None."""
        return next((a for a in self.freed if a.offset <= offset < a.end), None)

    def on(self, array, pe):
        """The same offset in the heap of PE `pe`, with the same shape, dtype and strides. `array` lies in any
        PE's heap."""
        if not 0 <= pe < self.n_ranks:
            raise IndexError(f"rank is {pe}; it must be 0 to {self.n_ranks - 1}")
        begin = address(array) - address(self.memory)
        if not 0 <= begin < self.memory.size:
            raise ValueError(
                f"the array {array.dtype} {array.shape} is not symmetric; it must be in the symmetric heap. "
                "Allocate it with shmemkit.zeros, empty, full, array or signals"
            )
        for slab, pes in self.groups:
            if pe not in pes and slab.offset <= begin % self.size < slab.end:
                raise ValueError(
                    f"the array {array.dtype} {array.shape} is in the memory of the group of "
                    f"{ranks_text(sorted(pes))}, and rank {pe} of the World is not in that. Kernels take the "
                    "group's ranks with shmemkit.bind(..., group=group)"
                )
        offset = begin % self.size + pe * self.size
        return np.ndarray.__new__(type(array), array.shape, array.dtype, self.memory, offset, array.strides)
