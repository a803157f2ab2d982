"""Copies shared by the threads of a warp or block: 16 bytes per access, 4 accesses of each thread in flight.

Both arrays are taken as bytes. Where they agree modulo 16, the elements before the first multiple of 16 and
after the last are copied one by one and the rest as 16-byte words; where they do not, the widest word is
used to which both can be aligned: 8, 4, 2 bytes or 1.
"""

from __future__ import annotations

from shmemkit.compiler.ptx import asm, data_address, gpu, gpu_function, itemsize, load_bytes, store_bytes
from shmemkit.typing import Array

from ..argument_checks import check_contiguous, check_emulated_contiguous
from ..emulator import group_thread
from .thread_index import block_thread, block_threads, warp_thread, warp_threads

__all__ = ["copy_block", "copy_warp"]

_not_unrolled = asm("// not unrolled")


def copy_block(dst: Array, src: Array) -> None:
    """Copy `src` to `dst`, the work shared by the threads of the block.

    dst, src   contiguous arrays of one dtype, any dtype, shape and alignment; in global memory (this rank's
               or `symm_at`) or shared memory; not overlapping. ``min(dst.size, src.size)`` elements are
               copied, in memory order

    All threads of the block call it with the same arguments. It has no barrier inside, before or after: each
    thread copies a share of its own, in an order that is not defined. Call ``cuda.syncthreads()`` before
    others of the block use `dst`; then one thread's `notify` or `st_release` publishes all of it.
    """
    thread = group_thread("block", "copy_block", dst, src, meets=False)
    copy_share("copy_block", thread, dst, src, thread.thread_id, thread.block.n_threads)


def copy_warp(dst: Array, src: Array) -> None:
    """Copy `src` to `dst`, the work shared by the threads of the warp.

    As `copy_block`, for all threads of a warp; ``cuda.syncwarp()`` instead of ``cuda.syncthreads()``.
    """
    thread = group_thread("warp", "copy_warp", dst, src, meets=False)
    copy_share("copy_warp", thread, dst, src, thread.lane, thread.warp_size())


def _implement(primitive, thread, threads):
    @gpu(primitive)
    def _(dst, src):
        copy = copy_on_gpu(primitive.__name__, dst, src)
        return lambda dst, src: copy(dst, src, thread(), threads())


_implement(copy_block, block_thread, block_threads)
_implement(copy_warp, warp_thread, warp_threads)


def copy_share(primitive, thread, dst, src, share, shares):
    """In the emulator: share number `share` of `shares`, by `thread`; the others have the same arguments."""
    if share == 0:
        check_emulated_contiguous(primitive, dst=dst, src=src)
    n = min(dst.size, src.size)
    first, last = n * share // shares, n * (share + 1) // shares
    if first < last:
        thread.copy(dst, src, first, last)


def copy_on_gpu(primitive, dst, src):
    """``copy(dst, src, thread, threads)`` for arrays of these types."""
    check_contiguous(primitive, dst=dst, src=src)
    size = itemsize(dst.dtype)
    unit = min(size & -size, 8)  # what both addresses are surely multiples of
    widths = [width for width in (16, 8, 4, 2, 1) if width >= unit]
    copy = _copy_words(widths[-1], unit)
    for width in reversed(widths[:-1]):
        copy = _either(width, _copy_words(width, unit), copy)

    @gpu_function
    def whole(dst, src, thread, threads):
        copy(dst, src, min(dst.size, src.size) * size, thread, threads)

    return whole


def _either(width, wide, narrow):
    """`wide` if both arrays can be aligned to `width` at once, otherwise `narrow`."""

    @gpu_function
    def copy(dst, src, n_bytes, thread, threads):
        if (data_address(dst) ^ data_address(src)) & (width - 1) == 0:
            wide(dst, src, n_bytes, thread, threads)
        else:
            narrow(dst, src, n_bytes, thread, threads)

    return copy


def _copy_words(width, unit):
    """Copy by words of `width` bytes, and what is before and after them by units of `unit` bytes."""
    load, store = load_bytes(width), store_bytes(width)
    load_unit, store_unit = load_bytes(unit), store_bytes(unit)

    @gpu_function
    def copy(dst, src, n_bytes, thread, threads):
        head = min(-data_address(dst) & (width - 1), n_bytes)
        tail = head + ((n_bytes - head) & -width)
        step = threads * width
        i = head + thread * width
        while i + 3 * step < tail:
            a = load(src, i)
            b = load(src, i + step)
            c = load(src, i + 2 * step)
            d = load(src, i + 3 * step)
            store(dst, i, a)
            store(dst, i + step, b)
            store(dst, i + 2 * step, c)
            store(dst, i + 3 * step, d)
            i += 4 * step
        # At most three are left. No loop: LLVM would unroll it, after a 64-bit division.
        if i < tail:
            store(dst, i, load(src, i))
        if i + step < tail:
            store(dst, i + step, load(src, i + step))
        if i + 2 * step < tail:
            store(dst, i + 2 * step, load(src, i + 2 * step))
        if width > unit:
            i = thread * unit
            while i < head + n_bytes - tail:
                at = i if i < head else i - head + tail
                store_unit(dst, at, load_unit(src, at))
                i += threads * unit
                _not_unrolled()

    return copy
