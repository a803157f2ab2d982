"""Parts of arrays, without what Python's slices cost."""

from shmemkit.emu.thread import current_thread

from .checks import check_emulated_integer, check_integer
from .ptx import TypingError, gpu_part, types

__all__ = ["span"]


def span(array, first, size):
    """`size` elements of `array`, from `first` on: what ``array[first : first + size]`` is, in two
    instructions. A slice takes some fifteen, for positions that are negative, or beyond the end.

    array   1-D, contiguous
    first   0 or more; first + size is array.size at most. Not checked on the GPU; in the emulator IndexError

    Any thread may call it. It touches no memory, and orders nothing.
    """
    current_thread("span")
    check_emulated_integer("span()", first=first, size=size)
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"span: a 1-D contiguous array is needed, given {array.shape}, {array.strides}")
    if first < 0 or size < 0 or first + size > array.size:
        raise IndexError(f"span: elements {first} to {first + size} of an array of {array.size}")
    return array[int(first) : int(first) + int(size)]


@gpu_part(span)
def _(array, first, size):
    check_integer("span", first=first, size=size)
    if not isinstance(array, types.Array) or (array.ndim, array.layout) != (1, "C"):
        raise TypingError(f"span(): a 1-D contiguous array is needed, given {array}")
