"""Slabs: parts of the symmetric heap, each of which the ranks of a group allocate from by themselves."""


def slab_is_full(n_bytes, used, size, needed):
    """What the MemoryError of a group says."""
    return (
        f"the group's heap is full: {n_bytes} bytes are asked for, and {used} of {size} are in use on each of "
        f"its ranks. Free arrays of the group, or make it with heap={needed} or more"
    )
