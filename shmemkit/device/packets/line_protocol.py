"""What LL (``ll.py``) and LL128 (``ll128.py``) share: the checks of `lines`, and how their primitives come
to the GPU, for a warp or a block, in armed kernels (``bounded_waits.py``) and others.
"""

import functools
import sys

from shmemkit.compiler.ptx import element_address, gpu, gpu_function, itemsize, types

from ..argument_checks import check_aligned, check_array, check_emulated_array, check_integer
from ..emulator import address_of, place
from ..shmem import bounded_waits

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


class Protocol:
    """One of the two, on the GPU.

    flag          numba type of the flags
    by_alignment  ``by_alignment(make, size)``: of what ``make(width)`` gives, for accesses to the data of
                  `width` bytes, that which suits the address of an array of elements of `size` bytes. All of
                  them are ``f(data, address of the lines, bytes, flag, number, numbers)``: the share of
                  thread or warp `number`
    arrived       ``arrived(primitive)``: the function that polls a line
    stopped       whether the time of an armed kernel is up, so that nothing may be stored to a peer

    Below, `number` and `numbers` are functions of a kernel: one's number in the warp or block, and of how
    many.
    """

    def __init__(self, flag, by_alignment, arrived, stopped):
        self.flag, self.by_alignment, self.arrived, self.stopped = flag, by_alignment, arrived, stopped

    def implement_pack(self, pack, packing, number, numbers):
        """``pack(lines, src, flag)``, by ``packing(width)``."""
        stopped = self.stopped

        @gpu(pack)
        def _(lines, src, flag):
            check_integer(pack.__name__, flag=flag)
            transfer = self._transfer(pack.__name__, packing, src, lines)

            def impl(lines, src, flag):
                transfer(src, lines, flag, number(), numbers())

            def impl_unless_stopped(lines, src, flag):
                if not stopped():
                    transfer(src, lines, flag, number(), numbers())

            return impl_unless_stopped if bounded_waits.armed() else impl

    def implement_recv(self, recv, receiving, number, numbers):
        """``recv(dst, lines, flag)``, by ``receiving(arrived, width)``."""

        @gpu(recv)
        def _(dst, lines, flag):
            check_integer(recv.__name__, flag=flag)
            make = functools.partial(receiving, self.arrived(recv.__name__))
            transfer = self._transfer(recv.__name__, make, dst, lines)

            def impl(dst, lines, flag):
                transfer(dst, lines, flag, number(), numbers())

            return impl

    def _transfer(self, primitive, make, data, lines):
        """``transfer(data, lines, flag, number, numbers)`` for arrays of these types."""
        check_array(primitive, "the data", data)
        check_lines(primitive, lines)
        size, flag_type = itemsize(data.dtype), self.flag
        share = self.by_alignment(make, size)

        @gpu_function
        def transfer(data, lines, flag, number, numbers):
            share(data, element_address(lines, 0), data.size * size, flag_type(flag), number, numbers)

        return transfer
