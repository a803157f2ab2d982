"""Slabs: parts of the symmetric heap, each of which the ranks of a group allocate from by themselves."""

import bisect


def slab_is_full(n_bytes, used, size, needed):
    """What the MemoryError of a group says."""
    return (
        f"the group's heap is full: {n_bytes} bytes are asked for, and {used} of {size} are in use on each "
        f"of its ranks. Free arrays of the group, or make it with heap={needed} or more"
    )


class Slab:
    """`raw`, symmetric memory that begins at `address`. Ranks that take and give back alike get alike."""

    def __init__(self, raw, address):
        self.raw, self.address, self.size = raw, address, raw.nbytes
        self._taken = []  # (offset, size), in order

    def take(self, n_bytes):
        """-> the offset of the first gap of `n_bytes`, which is taken now. MemoryError if there is none."""
        begin = 0
        for offset, size in [*self._taken, (self.size, 0)]:
            if offset - begin >= n_bytes:
                bisect.insort(self._taken, (begin, n_bytes))
                return begin
            begin = offset + size
        used = sum(size for _, size in self._taken)
        raise MemoryError(slab_is_full(n_bytes, used, self.size, used + n_bytes))

    def give_back(self, offset):
        """What ``take`` returned."""
        self._taken = [taken for taken in self._taken if taken[0] != offset]
