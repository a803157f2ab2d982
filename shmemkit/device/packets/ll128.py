"""LL128, the low-latency protocol for larger messages: lines of 128 bytes, 120 of data and a flag of 8.

As LL (``ll.py``), but one flag for 15 words, so that 94 % of what is sent is data, not half. It relies on
what LL does not need: that a line, stored by eight threads of a warp in one instruction, arrives in one
piece, and is loaded so. Over NVLink, and within a GPU, it is; over PCIe or a network it may not be: see
``World.check_reach``.

A warp handles units of 960 bytes of data, eight lines, 1024 bytes, with two stores or loads of 16 bytes per
thread. Thread t has the pieces of 16 bytes number t - t // 8 and 28 more than that; threads 7, 15, 23 and 31
have piece 56 + t // 8, a half in each of two lines, and two flags:

  line       0        1        2        3      4        5        6        7
  pieces    0-6      7-13    14-20    21-27  28-34    35-41    42-48    49-55
  and half of 56       57       58       59     56       57       58       59, then the flag

So no thread needs data of another, and all accesses of a warp to the data are of 448 bytes in a row.

NCCL has the same protocol under the same name ("Demystifying NCCL", arXiv 2507.04786).
"""

from __future__ import annotations

import functools

import numpy as np
from numba import cuda

from shmemkit.compiler.ptx import (
    asm,
    data_address,
    element_address,
    gpu,
    gpu_function,
    load_bytes,
    store_bytes,
    types,
)
from shmemkit.typing import Array

from ..argument_checks import check_emulated_array, check_emulated_integer, check_integer
from ..cuda.thread_index import block_thread, block_threads, warp_thread
from ..emulator import address, group_thread
from ..shmem import bounded_waits
from .line_protocol import Protocol, check_emulated_lines, check_lines, check_reuse

__all__ = [
    "ll128_pack_block",
    "ll128_pack_warp",
    "ll128_recv_block",
    "ll128_recv_pack_block",
    "ll128_recv_pack_warp",
    "ll128_recv_warp",
    "ll128_words",
]

UNIT, WORDS = 960, 128  # bytes of data, and words of the lines, that a warp handles at a time
LINE, DATA = 16, 120  # words of a line, and bytes of data in it


def ll128_words(n_bytes: int) -> int:
    """How many uint64 words `n_bytes` bytes take: 128 for each 960. For hosts and kernels."""
    return (n_bytes + 959) // 960 * 128


@gpu(ll128_words)
def _(n_bytes):
    check_integer("ll128_words", n_bytes=n_bytes)

    def impl(n_bytes):
        return types.int64(types.uint32(n_bytes + 959) // types.uint32(960)) * 128

    return impl


def ll128_pack_block(lines: Array, src: Array, flag: int) -> None:
    """Store `src` to `lines` with the flag, the work shared by the warps of the block.

    lines   uint64, 1-D, contiguous, at a multiple of 128 bytes, ``ll128_words(bytes of src)`` of them or
            more: on a peer that NVLink reaches (`symm_at`), or this rank
    src     contiguous, any dtype, shape and alignment (fastest at multiples of 16 bytes)
    flag    64 bits, other than what the lines hold now: usually the epoch, the number of the call

    All threads of the block, whole warps of 32, call it with the same arguments; it orders nothing and has no
    barrier.
    """
    thread = group_thread("block", "ll128_pack_block", lines, src, flag, meets=False)
    _pack("ll128_pack_block", thread, lines, src, flag, thread.thread_id, thread.n_threads)


def ll128_pack_warp(lines: Array, src: Array, flag: int) -> None:
    """`ll128_pack_block` by the threads of a warp."""
    thread = group_thread("warp", "ll128_pack_warp", lines, src, flag, meets=False)
    _pack("ll128_pack_warp", thread, lines, src, flag, thread.lane, 32)


def ll128_recv_block(dst: Array, lines: Array, flag: int) -> None:
    """Wait for the data in `lines`, and store it to `dst`, the work shared by the warps of the block.

    dst     contiguous, any dtype, shape and alignment; its size says how many bytes
    lines   of this rank: where the sender has called ``ll128_pack_block(lines, src, flag)``, with a `src` of
            as many bytes

    All threads of the block, whole warps of 32, call it. Each has stored its share when it returns:
    ``cuda.syncthreads()`` before others use `dst`.
    """
    thread = group_thread("block", "ll128_recv_block", dst, lines, flag, meets=False)
    _recv("ll128_recv_block", thread, dst, lines, flag, thread.thread_id, thread.n_threads)


def ll128_recv_warp(dst: Array, lines: Array, flag: int) -> None:
    """`ll128_recv_block` by the threads of a warp."""
    thread = group_thread("warp", "ll128_recv_warp", dst, lines, flag, meets=False)
    _recv("ll128_recv_warp", thread, dst, lines, flag, thread.lane, 32)


def ll128_recv_pack_block(there: Array, lines: Array, n_words: int, flag: int) -> None:
    """Wait for `n_words` words in `lines`, a multiple of 128, and store them to `there` as they are, with the
    flags: to pass them on to another rank. Otherwise as `ll128_recv_block`."""
    thread = group_thread("block", "ll128_recv_pack_block", there, lines, n_words, flag, meets=False)
    _forward("ll128_recv_pack_block", thread, there, lines, n_words, flag, thread.thread_id, thread.n_threads)


def ll128_recv_pack_warp(there: Array, lines: Array, n_words: int, flag: int) -> None:
    """`ll128_recv_pack_block` by the threads of a warp."""
    thread = group_thread("warp", "ll128_recv_pack_warp", there, lines, n_words, flag, meets=False)
    _forward("ll128_recv_pack_warp", thread, there, lines, n_words, flag, thread.lane, 32)


# ---- in the emulator: each thread has a share of lines, with 120 neighbouring bytes each


def _share(lines, n_bytes, number, threads):
    """-> (line, first byte, last byte of its data) for each line of a thread"""
    n = ll128_words(n_bytes) // LINE
    for line in range(n * number // threads, n * (number + 1) // threads):
        first = min(n_bytes, DATA * line)
        yield lines[LINE * line : LINE * (line + 1)], first, min(n_bytes, first + DATA)


def _pack(name, thread, lines, src, flag, number, threads):
    _check_emulated(name, thread, lines, flag, "src", src)
    check = _unlike(name, flag)
    for line, first, last in _share(lines, src.nbytes, number, threads):
        words = np.zeros(LINE, np.uint64)
        words[LINE - 1] = _bits(flag)
        if last > first:
            words.view(np.uint8)[: last - first] = thread.bytes_of("read", src, first, last)
        thread.store_line(line, words, check)


def _recv(name, thread, dst, lines, flag, number, threads):
    _check_emulated(name, thread, lines, flag, "dst", dst)
    for line, first, last in _share(lines, dst.nbytes, number, threads):
        words = _poll(thread, line, flag)
        if last > first:
            thread.bytes_of("write", dst, first, last)[:] = words.view(np.uint8)[: last - first]


def _forward(name, thread, there, lines, n_words, flag, number, threads):
    check_emulated_integer(name, n_words=n_words, flag=flag)
    check = None if address(there) == address(lines) else _unlike(name, flag)  # they may replace themselves
    n = int(n_words) // LINE
    for line in range(n * number // threads, n * (number + 1) // threads):
        words = slice(LINE * line, LINE * (line + 1))
        thread.store_line(there[words], _poll(thread, lines[words], flag), check)


def _bits(flag):
    return int(flag) & 0xFFFFFFFFFFFFFFFF


def _unlike(name, flag):
    return check_reuse(name, _bits(flag), lambda word: word)


def _poll(thread, line, flag):
    flag = _bits(flag)
    return thread.wait_line(line, lambda word: word == flag, f"to be the flag {flag}")


def _check_emulated(name, thread, lines, flag, what, data):
    check_emulated_integer(name, flag=flag)
    check_emulated_array(name, what, data)
    check_emulated_lines(name, lines, 128, ll128_words(data.nbytes), data)
    check_whole_warps(name, thread)


def check_whole_warps(name, thread):
    """In the emulator."""
    if thread.n_threads % 32:
        raise ValueError(
            f"{name}(): the block has {thread.n_threads} threads; it must have a multiple of 32, whole warps"
        )


# ---- on the GPU

_stopped = bounded_waits.warp_stopped  # of a warp: a line is stored whole, or not
_store_line = asm(
    "st.relaxed.sys.global.v2.b64 [$0], {$1, $2};",
    types.void,
    (types.uint64, types.uint64, types.uint64),
)
_load_line = asm(
    "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];",
    types.UniTuple(types.uint64, 2),
    (types.uint64,),
)


@functools.cache
def _pieces_of(width):
    """``load(array, offset, n_bytes) -> two uint64`` and ``store(array, offset, n_bytes, low, high)`` of the
    16 bytes at `offset`, or those of them below `n_bytes`, by accesses of `width` bytes."""
    load_one, store_one = load_bytes(width), store_bytes(width)
    load_byte, store_byte = load_bytes(1), store_bytes(1)
    bits = 8 * min(width, 8)

    @gpu_function
    def word(array, offset):
        value = types.uint64(0)
        for k in range(8 // width):
            value |= types.uint64(load_one(array, offset + k * width)) << types.uint64(k * bits)
        return value

    @gpu_function
    def load_whole(array, offset):
        return word(array, offset), word(array, offset + 8)

    @gpu_function
    def load_vector(array, offset):
        a, b, c, d = load_one(array, offset)
        return (
            types.uint64(b) << types.uint64(32) | types.uint64(a),
            types.uint64(d) << types.uint64(32) | types.uint64(c),
        )

    whole = load_vector if width == 16 else load_whole

    @gpu_function
    def load(array, offset, n_bytes):
        if offset + 16 <= n_bytes:
            return whole(array, offset)
        low, high = types.uint64(0), types.uint64(0)
        i = offset
        while i < n_bytes:
            byte = types.uint64(load_byte(array, i)) << types.uint64(8 * (i & 7))
            if i - offset < 8:
                low |= byte
            else:
                high |= byte
            i += 1
        return low, high

    @gpu_function
    def store_word(array, offset, value):
        for k in range(8 // width):
            store_one(array, offset + k * width, value >> types.uint64(k * bits))

    @gpu_function
    def store_whole(array, offset, low, high):
        store_word(array, offset, low)
        store_word(array, offset + 8, high)

    @gpu_function
    def store_vector(array, offset, low, high):
        half = types.uint64(32)
        words = (types.uint32(low), types.uint32(low >> half), types.uint32(high), types.uint32(high >> half))
        store_one(array, offset, words)

    all_of = store_vector if width == 16 else store_whole

    @gpu_function
    def store(array, offset, n_bytes, low, high):
        if offset + 16 <= n_bytes:
            all_of(array, offset, low, high)
        else:
            i = offset
            while i < n_bytes:
                value = low if i - offset < 8 else high
                store_byte(array, i, value >> types.uint64(8 * (i & 7)))
                i += 1

    return load, store


@gpu_function
def _first_piece(lane):
    """The byte, of a unit, of a thread's first or only piece."""
    return 16 * (56 + (lane >> 3)) if lane & 7 == 7 else 16 * (lane - (lane >> 3))


@functools.cache
def _packing(width):
    load, _ = _pieces_of(width)

    @gpu_function
    def pack(src, address, n_bytes, flag, warp, warps):
        lane = warp_thread()
        offset = warp * UNIT + _first_piece(lane)
        line = address + types.uint64(warp * 1024 + lane * 16)
        start = warp * UNIT
        while start < n_bytes:
            a, b = load(src, offset, n_bytes)
            c, d = b, flag
            if lane & 7 == 7:
                b = flag
            else:
                c, d = load(src, offset + 448, n_bytes)
            cuda.syncwarp()  # a line is one instruction of eight threads
            _store_line(line, a, b)
            _store_line(line + types.uint64(512), c, d)
            start += warps * UNIT
            offset += warps * UNIT
            line += types.uint64(warps * 1024)

    return pack


@gpu_function
def _arrived(line, flag, lane):
    """The thread's share of two lines, when all threads of the warp see their flags."""
    cuda.syncwarp()  # a line is one instruction of eight threads
    first, second = _load_line(line), _load_line(line + types.uint64(512))
    while cuda.any_sync(0xFFFFFFFF, lane & 7 == 7 and (first[1] != flag or second[1] != flag)):
        first, second = _load_line(line), _load_line(line + types.uint64(512))
    return first, second


@functools.cache
def _arrived_or_late(primitive):
    """`_arrived` of an armed kernel, which returns what is there when its time is up.

    The threads of the warp poll together, as there. If those with the flags waited by themselves, the others
    might load their parts of the lines too early: a vote that follows orders no memory, and what comes after
    it may be loaded before it. A syncwarp does.
    """
    over = bounded_waits.overdue(primitive, types.uint64, "eq")
    first_look, every = bounded_waits.FIRST, bounded_waits.EVERY
    clock = bounded_waits.clock

    @gpu_function
    def arrived(line, flag, lane):
        cuda.syncwarp()  # a line is one instruction of eight threads
        left, since = first_look, types.uint64(0)
        first, second = _load_line(line), _load_line(line + types.uint64(512))
        late = lane & 7 == 7 and (first[1] != flag or second[1] != flag)
        while cuda.any_sync(0xFFFFFFFF, late):
            left -= 1
            if left == 0:
                given_up = False
                if late:
                    seen, offset = (first[1], 8) if first[1] != flag else (second[1], 520)
                    given_up = over(since, line + types.uint64(offset), flag, seen)
                if cuda.any_sync(0xFFFFFFFF, given_up):
                    break
                if since == 0:
                    since = clock()
                left = every
            cuda.syncwarp()
            first, second = _load_line(line), _load_line(line + types.uint64(512))
            late = lane & 7 == 7 and (first[1] != flag or second[1] != flag)
        return first, second

    return arrived


def _arrived_of(primitive):
    return _arrived_or_late(primitive) if bounded_waits.armed() else _arrived


@gpu_function
def _store_unless_stopped(address, low, high):
    if not _stopped():
        cuda.syncwarp()
        _store_line(address, low, high)


@functools.cache
def _receiving(arrived, width):
    _, store = _pieces_of(width)

    @gpu_function
    def recv(dst, address, n_bytes, flag, warp, warps):
        lane = warp_thread()
        offset = warp * UNIT + _first_piece(lane)
        line = address + types.uint64(warp * 1024 + lane * 16)
        start = warp * UNIT
        while start < n_bytes:
            first, second = arrived(line, flag, lane)
            if lane & 7 == 7:
                store(dst, offset, n_bytes, first[0], second[0])
            else:
                store(dst, offset, n_bytes, first[0], first[1])
                store(dst, offset + 448, n_bytes, second[0], second[1])
            start += warps * UNIT
            offset += warps * UNIT
            line += types.uint64(warps * 1024)

    return recv


def _by_alignment(make, size):
    """What suits the address of an array of elements of `size` bytes: 16 bytes at a time, or as many as an
    element has."""
    narrow = make(min(size & -size, 8))
    wide = make(16)

    @gpu_function
    def choose(data, address, n_bytes, flag, warp, warps):
        if data_address(data) & 15 == 0:
            wide(data, address, n_bytes, flag, warp, warps)
        else:
            narrow(data, address, n_bytes, flag, warp, warps)

    return choose


@gpu_function
def _block_warp():
    return block_thread() >> 5


@gpu_function
def _block_warps():
    return block_threads() >> 5


@gpu_function
def _only_warp():
    return 0


@gpu_function
def _one_warp():
    return 1


def _implement_forward(forward, warp, warps):
    """For a warp or a block: `warp` is one's number among its `warps`."""

    @gpu(forward)
    def _(there, lines, n_words, flag):
        check_integer(forward.__name__, n_words=n_words, flag=flag)
        check_lines(forward.__name__, there, lines)
        arrived = _arrived_of(forward.__name__)
        store = _store_unless_stopped if bounded_waits.armed() else _store_line

        def impl(there, lines, n_words, flag):
            lane, unit, step = warp_thread(), warp(), warps()
            source, target = element_address(lines, 0), element_address(there, 0)
            while WORDS * unit < n_words:
                at = types.uint64(1024 * unit + 16 * lane)
                first, second = arrived(source + at, types.uint64(flag), lane)
                cuda.syncwarp()  # a line is one instruction of eight threads
                store(target + at, first[0], first[1])
                store(target + at + types.uint64(512), second[0], second[1])
                unit += step

        return impl


_ll128 = Protocol(types.uint64, _by_alignment, _arrived_of, _stopped)
_ll128.implement_pack(ll128_pack_block, _packing, _block_warp, _block_warps)
_ll128.implement_pack(ll128_pack_warp, _packing, _only_warp, _one_warp)
_ll128.implement_recv(ll128_recv_block, _receiving, _block_warp, _block_warps)
_ll128.implement_recv(ll128_recv_warp, _receiving, _only_warp, _one_warp)
_implement_forward(ll128_recv_pack_block, _block_warp, _block_warps)
_implement_forward(ll128_recv_pack_warp, _only_warp, _one_warp)
