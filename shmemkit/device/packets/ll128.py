"""LL128, the low-latency protocol for larger messages: lines of 128 bytes, 120 of data and a flag of 8.

As LL (``ll.py``), but one flag for 15 words, so that 94 % of what is sent is data, not half. It relies on
what LL does not need: that a line, stored by eight threads of a warp in one instruction, arrives in order.
What is known of that, and on which GPUs: docs/machine_code.md, whole line. ``World.check_reach`` refuses
others, PCIe and networks.

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
    WORDS,
    check_array,
    check_emulated_array,
    check_emulated_integer,
    check_integer,
    described,
    not_literal,
)
from ..cuda.array_words import load_word, n_words, store_word
from ..cuda.unroll import chained, mapped, tuple_of
from ..cuda.weighted_sums import two_words
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
            ranks; one of 1-D is row 0. Pass this rank's own; on each rank, words ``TILE_WORDS * i`` and up to
            the next tile are written
    tiles   a tuple: tiles[k] is the thread's two words, uint64, of what rank k gets
    flag    32 bits, other than what the lines hold now

    It orders nothing.
    """
    thread = group_thread("warp", "ll128_store_tiles", lines, row, i, None, flag)
    check_emulated_integer("ll128_store_tiles", row=row, i=i, flag=flag)
    (there,) = _rows_of("ll128_store_tiles", lines, row, 1)
    _store(thread, "ll128_store_tiles", there, i, dict(enumerate(tiles)), flag)


def ll128_load_tiles(lines: Array, row: int, n: int, i: int, flag: int) -> tuple[tuple[int, ...], ...]:
    """Wait for tile `i` in each of the `n` rows of `lines` from `row` on, of this rank, by all threads of a
    warp. -> for each row the thread's words of it, a tuple of two uint64

    lines   as of ``ll128_store_tiles``, which stores that tile in each row, 2-D
    n       a constant, as of a kernel's closure: all rows are polled at once

    It orders nothing. The second word of threads 7, 15, 23 and 31 is undefined, as are all words when the
    wait expires (docs/timeouts.md).
    """
    thread = group_thread("warp", "ll128_load_tiles", lines, row, n, i, flag)
    check_emulated_integer("ll128_load_tiles", row=row, n=n, i=i, flag=flag)
    places = [(line, i) for line in _rows_of("ll128_load_tiles", lines, row, n)]
    return _load(thread, "ll128_load_tiles", places, flag)


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
    _store(thread, "ll128_store_tile", lines, i, {int(pe): words}, flag)


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
    return _load(thread, "ll128_load_some", [(lines, i) for i in tiles], flag)


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


def _rows_of(name, lines, row, n):
    """The `n` rows from `row` on; lines of one dimension are row 0."""
    if getattr(lines, "ndim", 2) == 1:
        lines = lines[None]
    check_emulated_array(name, "lines", lines, 2, WORDS)
    if not 0 <= row < row + n <= lines.shape[0]:
        last = lines.shape[0] - 1
        raise IndexError(f"{name}(): the rows are {row} to {row + n - 1}; lines has rows 0 to {last}")
    return [lines[k] for k in range(int(row), int(row) + int(n))]


def _lines_of(name, lines, i):
    """The four lines of tile `i`."""
    check_emulated_lines(name, lines, 128, TILE_WORDS * (int(i) + 1))
    return [lines[k : k + LINE] for k in range(TILE_WORDS * int(i), TILE_WORDS * (int(i) + 1), LINE)]


def _store(thread, name, lines, i, tiles, flag):
    """The thread's words ``tiles[pe]`` to tile `i` of each rank `pe`; the warp meets."""
    flag = int(flag) & 0xFFFFFFFF
    check, here = check_reuse(name, flag, lambda word: word), _lines_of(name, lines, i)

    def store(words_of):
        for pe in tiles:
            tile = np.array([words_of[t][pe] for t in sorted(words_of)], np.uint64).reshape(-1, LINE)
            tile[:, LINE - 1] = flag
            for line, values in zip(here, tile, strict=True):
                thread.store_line(thread.peer(line, pe), values, check)

    _together(thread, name, {pe: tuple(map(int, words)) for pe, words in tiles.items()}, store)


def _load(thread, name, places, flag):
    """The thread's words of these tiles, of (lines, number), when they have the flag; the warp meets."""
    flag = int(flag) & 0xFFFFFFFF
    tiles = [_lines_of(name, lines, i) for lines, i in places]

    def load(_):
        why = f"to be the flag {flag}"
        return [
            np.concatenate([thread.wait_line(line, lambda word: word == flag, why) for line in tile])
            for tile in tiles
        ]

    return tuple(_pair(tile[2 * thread.lane :]) for tile in _together(thread, name, None, load))


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

_PAIR = types.UniTuple(types.uint64, 2)


@functools.cache
def _store_lines(n):
    """``store(places, words, flag)``: a tile to each of `n` places. What a line needs is inside the assembly:
    the warp is together, and eight threads store a line by one instruction, whatever a compiler makes of the
    code around it (docs/machine_code.md, whole line)."""
    head = "bar.warp.sync 0xffffffff; mov.u32 l, %laneid; and.b32 l, l, 7; setp.eq.u32 last, l, 7; "
    stores = [
        f"selp.b64 high, ${3 * n}, ${n + 2 * k + 1}, last; "
        f"st.relaxed.sys.global.v2.b64 [${k}], {{${n + 2 * k}, high}}; "
        for k in range(n)
    ]
    return asm(
        "{ .reg .pred last; .reg .b32 l; .reg .b64 high; " + head + "".join(stores) + "}",
        types.void,
        (types.UniTuple(types.uint64, n), types.UniTuple(_PAIR, n), types.uint64),
    )


@functools.cache
def _load_lines(n):
    """``load(addresses)``: the thread's words of `n` tiles, likewise."""
    loads = [f"ld.relaxed.sys.global.v2.b64 {{${2 * k}, ${2 * k + 1}}}, [${2 * n + k}]; " for k in range(n)]
    return asm(
        "bar.warp.sync 0xffffffff; " + "".join(loads),
        types.UniTuple(_PAIR, n),
        (types.UniTuple(types.uint64, n),),
    )


device = cuda.jit(device=True)
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
def _address(i, lines, first=0):
    """Of the thread's words in the lines of tile `i`, where word `first` begins tile 0."""
    at = types.uint64(i) * types.uint64(8 * TILE_WORDS) + types.uint64(16 * cuda.laneid)
    return element_address(lines, first) + at


@gpu_function
def _first_word(lines, row):
    return row * lines.shape[1]


@gpu_function
def _of_only_row(lines, row):
    return 0


def _first_word_of(primitive, lines):
    """``first_word(lines, row)`` for lines of this type; those of one dimension are row 0."""
    if getattr(lines, "ndim", 2) == 1:
        check_lines(primitive, lines)
        return _of_only_row
    check_array(primitive, "lines", lines, 2, WORDS)
    return _first_word


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
        low, high = two_words(_load_16(x, 16 * min(_piece(i), types.int32(x.size - 1))))
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


@device
def _place(pe, address):
    return address + offset_of(pe)


@gpu(ll128_store_tiles)
def _(lines, row, i, tiles, flag):
    check_integer("ll128_store_tiles", row=row, i=i, flag=flag)
    first_word, armed = _first_word_of("ll128_store_tiles", lines), bounded_waits.armed()
    places_of, store = tuple_of(len(tiles), _place), _store_lines(len(tiles))

    def impl(lines, row, i, tiles, flag):
        if not (armed and _stopped()):
            places = places_of(_address(i, lines, first_word(lines, row)))
            store(places, tiles, types.uint64(types.uint32(flag)))

    return impl


@gpu(ll128_store_tile)
def _(lines, i, words, flag, pe):
    check_integer("ll128_store_tile", i=i, flag=flag, pe=pe)
    check_lines("ll128_store_tile", lines)
    armed, store = bounded_waits.armed(), _store_lines(1)

    def impl(lines, i, words, flag, pe):
        if not (armed and _stopped()):
            store((_place(pe, _address(i, lines)),), (words,), types.uint64(types.uint32(flag)))

    return impl


@device
def _look(k, tile, state):
    late, at, seen, addresses, flag = state
    found = types.uint32(tile[1])
    if found != flag and seen == flag:
        at, seen = addresses[k], found
    return late | (found != flag), at, seen, addresses, flag


@functools.cache
def arriving(n, primitive, armed, recorded):
    """``arrived(addresses, flag)``: the thread's words of `n` tiles, when all threads of the warp see their
    flags; in an armed kernel what is there when its time is up. They poll together: threads without flags
    must not be ahead of those that have them, and a vote orders no memory. Then they load once more: nothing
    says that the 128 bytes of a line are loaded at one time."""
    load, look = _load_lines(n), chained(n, _look)
    over = bounded_waits.overdue(primitive, types.uint32, "eq")
    first_look, every, clock = bounded_waits.FIRST, bounded_waits.EVERY, bounded_waits.clock
    waited = bounded_waits.ended(primitive)

    @gpu_function
    def arrived(addresses, flag):
        left, since = first_look, types.uint64(0)
        while True:
            tiles = load(addresses)
            late, at, seen, _, _ = look(tiles, (False, addresses[0], flag, addresses, flag))
            late = _has_flag() & late
            if not cuda.any_sync(0xFFFFFFFF, late):
                if armed:
                    waited(since, addresses[n - 1])
                return load(addresses)  # lines that came while they were loaded
            if armed:
                left -= 1
                if left == 0:
                    given_up = late and over(since, at + types.uint64(8), flag, seen)
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
    n = n if isinstance(n, int) else n.literal_value
    first_word = _first_word_of("ll128_load_tiles", lines)
    arrived = arriving(n, "ll128_load_tiles", bounded_waits.armed(), bounded_waits.recording())

    @device
    def address(k, arguments):
        lines, row, i = arguments
        return _address(i, lines, first_word(lines, row + k))

    addresses = tuple_of(n, address)
    return lambda lines, row, n, i, flag: arrived(addresses((lines, row, i)), types.uint32(flag))


@gpu(ll128_load_some)
def _(lines, tiles, flag):
    check_integer("ll128_load_some", flag=flag)
    check_lines("ll128_load_some", lines)
    if not isinstance(tiles, types.BaseTuple) or not all(isinstance(i, types.Integer) for i in tiles):
        raise TypingError(_not_tiles(tiles))
    addresses = mapped(len(tiles), _address)
    arrived = arriving(len(tiles), "ll128_load_some", bounded_waits.armed(), bounded_waits.recording())
    return lambda lines, tiles, flag: arrived(addresses(tiles, lines), types.uint32(flag))
