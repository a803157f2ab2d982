"""LL128, the low-latency protocol for larger messages: lines of 128 bytes, 120 of data and a flag of 8.

As LL (``ll.py``), but one flag for 15 words, so that 94 % of what is sent is data, not half. It relies on
what LL does not need: that a line, stored by eight threads of a warp in one instruction, arrives in one
piece, and is loaded so. Over NVLink, and within a GPU, it is; over PCIe or a network it may not be: see
``World.check_reach``.

A warp has a tile, 480 bytes of an array, as two words in the registers of each thread. It stores a tile as
four lines, to one rank or to all ranks in turn, and waits for several tiles at once. So data can be combined,
or sent to several ranks, without a trip through memory. A tile is 30 pieces of 16 bytes. Thread t has piece
t - t // 8, and so its share of a line. Threads 7, 15, 23 and 31 have half of piece 28 or 29, and the flag as
their second word. A warp accesses a tile in 448 contiguous bytes, and 32.

NCCL has the same protocol under the same name ("Demystifying NCCL", arXiv 2507.04786).
"""

from __future__ import annotations

import functools

import numpy as np
from numba import cuda

from shmemkit.compiler.ptx import (
    TypingError,
    asm,
    element_address,
    gpu,
    gpu_function,
    load_bytes,
    store_bytes,
    types,
)
from shmemkit.typing import Array

from ..argument_checks import (
    check_array,
    check_emulated_array,
    check_emulated_integer,
    check_integer,
    described,
    not_literal,
)
from ..cuda.array_words import load_word, n_words, store_word
from ..emulator import current_thread, from_scalar, group_thread
from ..shmem import bounded_waits
from ..shmem.peers import offset_of
from .packet_checks import check_emulated_lines, check_emulated_pieces, check_lines, check_pieces, check_reuse

__all__ = [
    "TILE_BYTES",
    "TILE_WORDS",
    "ll128_load_some",
    "ll128_load_tiles",
    "ll128_store_tile",
    "ll128_store_tiles",
    "load_tile",
    "store_tile",
    "tile_piece",
]

TILE_BYTES, TILE_WORDS = 480, 64
"""Of data, and of the lines it takes."""

PIECES, LINE = 30, 16  # of 16 bytes in a tile; words


def tile_piece(i: int) -> int:
    """-> the number of the calling thread's piece, or half piece, of 16 bytes of tile `i`, an int32. Accesses
    to tiles begin with it: pass it to ``griddepcontrol_wait``, so that it is computed before.

    i   an integer; less than 2**31 pieces
    """
    thread = current_thread("tile_piece")
    check_emulated_integer("tile_piece", i=i)
    return from_scalar(np.int32(_first_byte(thread.lane, i) // 16))


def load_tile(x: Array, i: int) -> tuple[int, ...]:
    """-> the calling thread's two words, uint64, of tile `i` of `x`, by all threads of a warp: ordinary
    loads.

    x   1-D, contiguous, not empty: complex128 at a multiple of 16 bytes, for accesses of 16 bytes; uint64; or
        uint8 at any address, a byte at a time. Less than 2**31 pieces of 16 bytes

    What lies beyond the end of `x` is undefined, and so is the second word of threads 7, 15, 23 and 31.
    """
    thread = group_thread("warp", "load_tile", x, i, meets=False)
    first, last = _bytes_of(thread, "load_tile", "x", x, i)
    words = np.full(2, ~np.uint64(0))  # what is undefined shows
    if last > first:
        words.view(np.uint8)[: last - first] = thread.bytes_of("read", x, first, last)
    return _pair(words)


def store_tile(out: Array, i: int, words: tuple[int, ...]) -> None:
    """Store what ``load_tile(out, i)`` would load, by all threads of a warp: ordinary stores. What lies
    beyond the end of `out` is dropped."""
    thread = group_thread("warp", "store_tile", out, i, meets=False)
    first, last = _bytes_of(thread, "store_tile", "out", out, i)
    if last > first:
        part = np.array([int(word) for word in words], np.uint64).view(np.uint8)
        thread.bytes_of("write", out, first, last)[:] = part[: last - first]


def ll128_store_tiles(lines: Array, row: int, i: int, tiles: tuple[tuple[int, ...], ...], flag: int) -> None:
    """Store a tile to each rank, with the flag: as tile `i` of row `row` of its `lines`, by all threads of a
    warp.

    lines   symmetric, uint64, 2-D, contiguous, rows at multiples of 128 bytes, where NVLink reaches all
            ranks. Pass this rank's own; on each rank, words ``TILE_WORDS * i`` and up to the next tile are
            written. Less than 2**31 times 16 bytes
    tiles   a tuple: tiles[k] is the thread's two words, uint64, of what rank k gets
    flag    32 bits, other than what the lines hold now

    It orders nothing.
    """
    thread = group_thread("warp", "ll128_store_tiles", lines, row, i, None, flag)
    check_emulated_integer("ll128_store_tiles", row=row, i=i, flag=flag)
    (lines,) = _rows_of("ll128_store_tiles", lines, row, 1, i)
    flag = int(flag) & 0xFFFFFFFF
    check = check_reuse("ll128_store_tiles", flag, lambda word: word)

    def store(pairs):
        words = np.array([pairs[t] for t in sorted(pairs)], np.uint64)  # thread, rank, low or high
        for pe in range(words.shape[1]):
            there, tile = thread.peer(lines, pe), words[:, pe].reshape(-1, LINE)
            tile[:, LINE - 1] = flag
            for line, values in enumerate(tile, TILE_WORDS // LINE * int(i)):
                thread.store_line(there[LINE * line : LINE * (line + 1)], values, check)

    mine = tuple(tuple(int(word) for word in words) for words in tiles)
    _together(thread, "ll128_store_tiles", mine, store)


def ll128_load_tiles(lines: Array, row: int, n: int, i: int, flag: int) -> tuple[tuple[int, ...], ...]:
    """Wait for tile `i` in each of the `n` rows of `lines` from `row` on, of this rank, by all threads of a
    warp. -> for each row the thread's words of it, a tuple of two uint64

    lines   as of ``ll128_store_tiles``, which stores that tile in each row
    n       a constant, as of a kernel's closure: all rows are polled at once

    It orders nothing. The second word of threads 7, 15, 23 and 31 is undefined, as are all words when the
    wait expires (docs/timeouts.md).
    """
    thread = group_thread("warp", "ll128_load_tiles", lines, row, n, i, flag)
    check_emulated_integer("ll128_load_tiles", row=row, n=n, i=i, flag=flag)
    rows = _rows_of("ll128_load_tiles", lines, row, n, i)
    tiles = _load_all(thread, "ll128_load_tiles", [(line, TILE_WORDS * int(i)) for line in rows], flag)
    return tuple(_pair(tile[2 * thread.lane :]) for tile in tiles)


def ll128_store_tile(lines: Array, i: int, words: tuple[int, ...], flag: int, pe: int) -> None:
    """Store a tile to one rank, with the flag: as tile `i` of its `lines`, by all threads of a warp.

    lines   symmetric, uint64, 1-D, contiguous, at a multiple of 128 bytes, where NVLink reaches rank `pe`.
            Pass this rank's own; on that rank, words ``TILE_WORDS * i`` and up to the next tile are written
    words   the thread's two words, uint64
    flag    32 bits, other than what the lines hold now
    pe      the rank, this one included

    It orders nothing.
    """
    thread = group_thread("warp", "ll128_store_tile", lines, i, None, flag, pe)
    check_emulated_integer("ll128_store_tile", i=i, flag=flag, pe=pe)
    check_emulated_lines("ll128_store_tile", lines, 128, TILE_WORDS * (int(i) + 1))
    flag, pe = int(flag) & 0xFFFFFFFF, int(pe)
    check = check_reuse("ll128_store_tile", flag, lambda word: word)

    def store(pairs):
        there = thread.peer(lines, pe)
        tile = np.array([pairs[t] for t in sorted(pairs)], np.uint64).reshape(-1, LINE)
        tile[:, LINE - 1] = flag
        for line, values in enumerate(tile, TILE_WORDS // LINE * int(i)):
            thread.store_line(there[LINE * line : LINE * (line + 1)], values, check)

    _together(thread, "ll128_store_tile", tuple(int(word) for word in words), store)


def ll128_load_some(lines: Array, tiles: tuple[int, ...], flag: int) -> tuple[tuple[int, ...], ...]:
    """Wait for some tiles of `lines`, of this rank, by all threads of a warp, which poll all of them at
    once. -> for each the thread's words of it, a tuple of two uint64

    lines   as of ``ll128_store_tile``, which stores these tiles
    tiles   a tuple of their numbers, one perhaps several times

    It orders nothing. What is undefined is as in ``ll128_load_tiles``.
    """
    thread = group_thread("warp", "ll128_load_some", lines, tiles, flag)
    if not isinstance(tiles, tuple):
        raise TypeError(_not_tiles(tiles))
    check_emulated_integer("ll128_load_some", flag=flag, **{f"tiles[{k}]": i for k, i in enumerate(tiles)})
    for i in tiles:
        check_emulated_lines("ll128_load_some", lines, 128, TILE_WORDS * (int(i) + 1))
    firsts = [TILE_WORDS * int(i) for i in tiles]
    loaded = _load_all(thread, "ll128_load_some", [(lines, first) for first in firsts], flag)
    return tuple(_pair(tile[2 * thread.lane :]) for tile in loaded)


# ---- in the emulator


def _bytes_of(thread, primitive, name, array, i):
    """The first and last byte of a thread's words of the tile; the last is the first where there are none."""
    check_emulated_integer(primitive, i=i)
    check_emulated_pieces(primitive, name, array)
    first = min(array.nbytes, _first_byte(thread.lane, i))
    return first, min(array.nbytes, first + (8 if thread.lane % 8 == 7 else 16))


def _first_byte(lane, i):
    """Where a thread's words of the tile are."""
    return TILE_BYTES * int(i) + (448 + lane - 7 if lane % 8 == 7 else 16 * (lane - lane // 8))


def _rows_of(name, lines, row, n, i):
    """The `n` rows from `row` on, in which there is a tile `i`."""
    check_emulated_array(name, "lines", lines, 2, (types.uint64,))
    if not 0 <= row < row + n <= lines.shape[0]:
        last = lines.shape[0] - 1
        raise IndexError(f"{name}(): the rows are {row} to {row + n - 1}; lines has rows 0 to {last}")
    rows = [lines[k] for k in range(int(row), int(row) + int(n))]
    for line in rows:
        check_emulated_lines(name, line, 128, TILE_WORDS * (int(i) + 1))
    return rows


def _load_all(thread, name, places, flag):
    """The tiles that begin at these (lines, word), when they have the flag; the warp meets."""
    flag = int(flag) & 0xFFFFFFFF

    def load(_):
        why = f"to be the flag {flag}"
        return [
            np.concatenate(
                [
                    thread.wait_line(lines[k : k + LINE], lambda word: word == flag, why)
                    for k in range(first, first + TILE_WORDS, LINE)
                ]
            )
            for lines, first in places
        ]

    return _together(thread, name, None, load)


def _pair(words):
    return from_scalar(words[0]), from_scalar(words[1])


def _together(thread, name, value, function):
    """``function(values by thread)``, by the last of the warp to come. -> its result. It orders no memory."""
    if thread.n_threads % 32:
        raise ValueError(
            f"{name}(): the block has {thread.n_threads} threads; it must have a multiple of 32, whole warps"
        )
    return thread.block.meeting(thread, "warp", what=name).join(thread, value, function)


# ---- on the GPU: pieces are counted in 32 bits, for fewer instructions

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
_load_16, _store_16, _store_8 = load_bytes(16), store_bytes(16), store_bytes(8)
_stopped = bounded_waits.warp_stopped  # of a warp: a line is stored whole, or not


@gpu_function
def _has_flag():
    return cuda.laneid & 7 == 7


@gpu_function
def _piece(i):
    lane = cuda.laneid
    return types.int32(PIECES * i + (28 + (lane >> 4) if lane & 7 == 7 else lane - (lane >> 3)))


@gpu_function
def _line_address(lines, row, i):
    """Of the thread's words in the lines of tile `i`."""
    piece = types.int32(row * (lines.shape[1] >> 1) + 32 * i + cuda.laneid)
    return element_address(lines[0], 0) + types.uint64(16 * piece)


def _check_rows(primitive, lines):
    check_array(primitive, "lines", lines, 2, (types.uint64,))


def _not_tiles(given):
    return f"ll128_load_some(): tiles is {described(given)}; it must be a tuple of integers, such as (i,)"


@gpu(tile_piece)
def _(i):
    check_integer("tile_piece", i=i)
    return lambda i: _piece(i)


@gpu(load_tile)
def _(x, i):
    check_integer("load_tile", i=i)
    check_pieces("load_tile", "x", x)

    def by_pieces(x, i):
        a, b, c, d = _load_16(x, 16 * min(_piece(i), types.int32(x.size - 1)))
        low = types.uint64(b) << types.uint64(32) | types.uint64(a)
        high = types.uint64(d) << types.uint64(32) | types.uint64(c)
        return high if cuda.laneid & 15 == 15 else low, high

    def by_words(x, i):
        at, last = 2 * _piece(i) + types.int32(cuda.laneid & 15 == 15), n_words(x) - 1
        return load_word(x, min(at, last)), load_word(x, min(at + 1, last))

    return by_pieces if x.dtype == types.complex128 else by_words


@gpu(store_tile)
def _(out, i, words):
    check_integer("store_tile", i=i)
    check_pieces("store_tile", "out", out)

    def by_pieces(out, i, words):
        (low, high), piece, half = words, _piece(i), types.uint64(32)
        four = types.uint32(low), types.uint32(low >> half), types.uint32(high), types.uint32(high >> half)
        inside = piece < types.int32(out.size)
        if inside & (not _has_flag()):
            _store_16(out, 16 * piece, four)
        if inside & _has_flag():
            _store_8(out, 16 * piece + (cuda.laneid & 8), low)

    def by_words(out, i, words):
        low, high = words
        at, size = 2 * _piece(i) + types.int32(cuda.laneid & 15 == 15), n_words(out)
        if at < size:
            store_word(out, at, low)
        if (at + 1 < size) & (not _has_flag()):
            store_word(out, at + 1, high)

    return by_pieces if out.dtype == types.complex128 else by_words


@functools.cache
def _places(n):
    """``places(address)``: where on each of `n` ranks that is which is at `address` here."""
    before = _places(n - 1) if n > 1 else None

    @gpu_function
    def only(address):
        return (address + offset_of(0),)

    @gpu_function
    def places(address):
        return before(address) + (address + offset_of(n - 1),)

    return places if n > 1 else only


@functools.cache
def _storing(n):
    """``store(places, tiles, flag)``"""
    before = _storing(n - 1) if n > 1 else None

    @gpu_function
    def store(places, tiles, flag):
        if before is not None:
            before(places, tiles, flag)
        low, high = tiles[n - 1]
        if _has_flag():
            high = types.uint64(flag)
        _store_line(places[n - 1], low, high)

    return store


@gpu(ll128_store_tiles)
def _(lines, row, i, tiles, flag):
    check_integer("ll128_store_tiles", row=row, i=i, flag=flag)
    _check_rows("ll128_store_tiles", lines)
    places, store, armed = _places(len(tiles)), _storing(len(tiles)), bounded_waits.armed()

    def impl(lines, row, i, tiles, flag):
        if not (armed and _stopped()):
            there = places(_line_address(lines, row, i))  # while the data are on their way
            cuda.syncwarp()  # a line is one instruction of eight threads
            store(there, tiles, types.uint32(flag))

    return impl


@functools.cache
def _looking(n):
    """``look(address, step)``: what is there now in `n` rows, `step` bytes apart."""
    before = _looking(n - 1) if n > 1 else None

    @gpu_function
    def look_at_one(address, step):
        return (_load_line(address),)

    @gpu_function
    def look(address, step):
        return before(address, step) + (_load_line(address + types.uint64((n - 1) * step)),)

    return look if n > 1 else look_at_one


@functools.cache
def _any_late(n):
    """``any_late(tiles, flag)``: whether one of `n` rows lacks the flag."""
    before = _any_late(n - 1) if n > 1 else None

    @gpu_function
    def one_late(tiles, flag):
        return types.uint32(tiles[0][1]) != flag

    @gpu_function
    def any_late(tiles, flag):
        return before(tiles, flag) | (types.uint32(tiles[n - 1][1]) != flag)

    return any_late if n > 1 else one_late


@functools.cache
def _first_late(n):
    """``first_late(tiles, flag)`` -> the first of `n` rows that lacks the flag, or any, and what it has."""
    before = _first_late(n - 1) if n > 1 else None

    @gpu_function
    def only(tiles, flag):
        return 0, types.uint32(tiles[0][1])

    @gpu_function
    def first_late(tiles, flag):
        row, seen = before(tiles, flag)
        return (row, seen) if seen != flag else (n - 1, types.uint32(tiles[n - 1][1]))

    return first_late if n > 1 else only


@functools.cache
def _arrived(n, looking=_looking):
    """``arrived(address, step, flag)``: the thread's words of `n` rows, when all threads of the warp see
    their flags. They poll together: threads without flags must not be ahead of those that have them,
    and a vote orders no memory."""
    look, any_late = looking(n), _any_late(n)

    @gpu_function
    def arrived(address, step, flag):
        while True:
            cuda.syncwarp()
            tiles = look(address, step)
            if not cuda.any_sync(0xFFFFFFFF, _has_flag() & any_late(tiles, flag)):
                return tiles

    return arrived


@gpu_function
def _row_address(address, step, row):
    return address + types.uint64(row * step)


@functools.cache
def _arrived_or_late(n, primitive="ll128_load_tiles", looking=_looking, address_of=_row_address):
    """`_arrived` of an armed kernel, which returns what is there when its time is up."""
    look, first_late = looking(n), _first_late(n)
    over = bounded_waits.overdue(primitive, types.uint32, "eq")
    first_look, every = bounded_waits.FIRST, bounded_waits.EVERY
    clock = bounded_waits.clock

    @gpu_function
    def arrived(address, step, flag):
        left, since = first_look, types.uint64(0)
        while True:
            cuda.syncwarp()
            tiles = look(address, step)
            row, seen = first_late(tiles, flag)
            late = _has_flag() and seen != flag
            if not cuda.any_sync(0xFFFFFFFF, late):
                return tiles
            left -= 1
            if left == 0:
                at = address_of(address, step, row) + types.uint64(8)
                given_up = late and over(since, at, flag, seen)
                if cuda.any_sync(0xFFFFFFFF, given_up):
                    return tiles
                if since == 0:
                    since = clock()
                left = every

    return arrived


@gpu(ll128_load_tiles)
def _(lines, row, n, i, flag):
    check_integer("ll128_load_tiles", row=row, i=i, flag=flag)
    if not isinstance(n, (types.IntegerLiteral, int)):
        raise TypingError(not_literal("ll128_load_tiles", "n", n, "such as 4"))
    _check_rows("ll128_load_tiles", lines)
    rows = n if isinstance(n, int) else n.literal_value
    arrived = (_arrived_or_late if bounded_waits.armed() else _arrived)(rows)

    def impl(lines, row, n, i, flag):
        return arrived(_line_address(lines, row, i), 8 * lines.shape[1], types.uint32(flag))

    return impl


# ---- one rank's, and tiles anywhere


@gpu_function
def _tile_address(lines, i):
    """Of the thread's words in tile `i`."""
    at = types.uint64(i) * types.uint64(8 * TILE_WORDS) + types.uint64(16 * cuda.laneid)
    return element_address(lines, 0) + at


@gpu(ll128_store_tile)
def _(lines, i, words, flag, pe):
    check_integer("ll128_store_tile", i=i, flag=flag, pe=pe)
    check_lines("ll128_store_tile", lines)
    armed = bounded_waits.armed()

    def impl(lines, i, words, flag, pe):
        if not (armed and _stopped()):
            low, high = words
            there = _tile_address(lines, i) + offset_of(pe)
            cuda.syncwarp()  # a line is one instruction of eight threads
            _store_line(there, low, types.uint64(types.uint32(flag)) if _has_flag() else high)

    return impl


@functools.cache
def _addresses(n):
    """``addresses(lines, tiles)`` of the thread's words of `n` tiles."""
    before = _addresses(n - 1) if n > 1 else None

    @gpu_function
    def only(lines, tiles):
        return (_tile_address(lines, tiles[0]),)

    @gpu_function
    def addresses(lines, tiles):
        return before(lines, tiles) + (_tile_address(lines, tiles[n - 1]),)

    return addresses if n > 1 else only


@functools.cache
def _looking_at(n):
    """``look(addresses, step)``: what is there now; `step` is not needed."""
    before = _looking_at(n - 1) if n > 1 else None

    @gpu_function
    def look_at_one(addresses, step):
        return (_load_line(addresses[0]),)

    @gpu_function
    def look(addresses, step):
        return before(addresses, step) + (_load_line(addresses[n - 1]),)

    return look if n > 1 else look_at_one


@functools.cache
def _address_at(n):
    """``address_of(addresses, step, k)``: the k-th of `n`."""
    before = _address_at(n - 1) if n > 1 else None

    @gpu_function
    def only(addresses, step, k):
        return addresses[0]

    @gpu_function
    def address_of(addresses, step, k):
        return addresses[n - 1] if k == n - 1 else before(addresses, step, k)

    return address_of if n > 1 else only


@gpu(ll128_load_some)
def _(lines, tiles, flag):
    check_integer("ll128_load_some", flag=flag)
    check_lines("ll128_load_some", lines)
    if not isinstance(tiles, types.BaseTuple) or not all(isinstance(i, types.Integer) for i in tiles):
        raise TypingError(_not_tiles(tiles))
    n = len(tiles)
    addresses = _addresses(n)
    if bounded_waits.armed():
        arrived = _arrived_or_late(n, "ll128_load_some", _looking_at, _address_at(n))
    else:
        arrived = _arrived(n, _looking_at)

    def impl(lines, tiles, flag):
        return arrived(addresses(lines, tiles), 0, types.uint32(flag))

    return impl
