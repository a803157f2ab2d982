"""Parts of arrays, without what Python's slices cost."""

from __future__ import annotations

from shmemkit.compiler.ptx import gpu_part
from shmemkit.typing import Array

from ..argument_checks import check_array, check_emulated_array, check_emulated_integer, check_integer
from ..emulator import current_thread

__all__ = ["span"]


def span(array: Array, first: int, size: int) -> Array:
    """Return ``array[first : first + size]``, in two instructions.

    A slice takes some fifteen instructions, because positions may be negative or beyond the end.

    array   1-D, contiguous
    first   0 or more; first + size is array.size at most. Not checked on the GPU; in the emulator IndexError

    Any thread may call it. It touches no memory and orders nothing.
    """
    current_thread("span")
    check_emulated_integer("span", first=first, size=size)
    check_emulated_array("span", "array", array, 1)
    if first < 0 or size < 0 or first + size > array.size:
        raise IndexError(
            f"span(): first is {first}, size {size}; both must be 0 or more, and first + size at most "
            f"{array.size}, the size of the array"
        )
    return array[int(first) : int(first) + int(size)]


@gpu_part(span)
def _(array, first, size):
    check_integer("span", first=first, size=size)
    check_array("span", "array", array, 1)
