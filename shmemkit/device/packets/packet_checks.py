"""Checks of what LL, LL128 and Lamport packets are given."""

import sys

from shmemkit.compiler.ptx import types

from ..argument_checks import check_aligned, check_array, check_emulated_array
from ..emulator import address_of, place

_WORDS = (types.uint64,)
_PIECES = (types.complex128, types.uint64, types.uint8)


def check_emulated_lines(primitive, lines, alignment, n_words, data=None, name="lines"):
    """In the emulator: `lines` may hold `n_words` words, which the array `data` takes, if there is one."""
    check_emulated_array(primitive, name, lines, 1, _WORDS)
    check_aligned(primitive, name, lines, alignment)
    if lines.size < n_words:
        why = "" if data is None else f" for {data.nbytes} bytes"
        raise IndexError(f"{primitive}(): {name} has {lines.size} words; it must have {n_words} or more{why}")


def check_pieces(primitive, name, array):
    """On the GPU, when a kernel is compiled: an array that is loaded or stored by pieces of 16 bytes."""
    check_array(primitive, name, array, 1, _PIECES)


def check_emulated_pieces(primitive, name, array):
    """The same in the emulator."""
    check_emulated_array(primitive, name, array, 1, _PIECES)
    check_aligned(primitive, name, array, array.itemsize)


def check_reuse(primitive, flag, flag_of):
    """In the emulator -> ``check(thread, lines, i)`` for ``Thread.store``: ValueError where word `i`, whose
    flag is ``flag_of(word)``, has `flag` already."""

    def check(thread, lines, i):
        if flag_of(lines.item(i)) == flag:
            word = place(thread.block.machine, thread, address_of(lines, i), sys._getframe())
            raise ValueError(
                f"{primitive}(): {word} has the flag {flag} already, so its receiver may take the old data "
                "for the new. Use another flag each time, such as a count of the calls, and not the 0 of "
                "words that were zeroed"
            )

    return check


def check_lines(primitive, *arrays):
    """On the GPU, when a kernel is compiled."""
    for array in arrays:
        check_array(primitive, "lines", array, 1, _WORDS)
