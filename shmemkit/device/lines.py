"""What LL (``ll.py``) and LL128 (``ll128.py``) share: what their lines may be, and how their primitives come
to the GPU, for a warp or a block, in armed kernels (``deadline.py``) and others."""

import functools
import sys

import numpy as np

from shmemkit.emu.arrays import address
from shmemkit.emu.report import place
from shmemkit.emu.thread import address_of

from . import deadline
from .checks import check_integer
from .ptx import TypingError, element_address, gpu, gpu_function, itemsize, types


def check_emulated_lines(name, lines, data, alignment, n_words):
    """In the emulator: `lines` may hold `data`."""
    at = address(lines) if lines.size else 0  # without elements it is anywhere
    if lines.dtype != np.uint64 or lines.ndim != 1 or not lines.flags.c_contiguous or at % alignment:
        raise ValueError(
            f"{name}: lines must be a 1-D contiguous array of uint64 at a multiple of {alignment} bytes, "
            f"given {lines.dtype} {lines.shape} at {at:#x}"
        )
    if not data.flags.c_contiguous:
        raise ValueError(f"{name}: the data must be contiguous, given strides {data.strides}")
    if lines.size < n_words:
        raise IndexError(f"{name}: {data.nbytes} bytes need {n_words} words, given {lines.size}")


def check_reuse(name, flag, flag_of):
    """In the emulator -> ``check(thread, lines, i)`` for ``Thread.store``: ValueError where word `i`, whose
    flag is ``flag_of(word)``, has `flag` already."""

    def check(thread, lines, i):
        if flag_of(lines.item(i)) == flag:
            word = place(thread.block.machine, thread, address_of(lines, i), sys._getframe())
            raise ValueError(
                f"{name}: {word} has the flag {flag} already, so that who waits for it may take the old data "
                "for the new: a word needs another flag each time, such as the number of the call, and one "
                "other than 0 where it was zeroed"
            )

    return check


def check_lines(primitive, *arrays):
    """On the GPU, when a kernel is compiled."""
    for array in arrays:
        if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C") or (
            array.dtype != types.uint64
        ):
            raise TypingError(f"{primitive}(): lines must be a 1-D contiguous array of uint64, given {array}")


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

            return impl_unless_stopped if deadline.armed() else impl

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
        if not (isinstance(data, types.Array) and data.layout == "C"):
            raise TypingError(f"{primitive}(): the data must be a contiguous array (layout C), given {data}")
        check_lines(primitive, lines)
        size, flag_type = itemsize(data.dtype), self.flag
        share = self.by_alignment(make, size)

        @gpu_function
        def transfer(data, lines, flag, number, numbers):
            share(data, element_address(lines, 0), data.size * size, flag_type(flag), number, numbers)

        return transfer
