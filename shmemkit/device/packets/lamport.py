"""Lamport packets: 16 bytes of data each, which show that they have arrived because the content of their
slot changes.

An empty slot holds the sentinel, a pattern of 128 bits. The sender stores a packet by one access. The
receiver polls the slot until it holds anything else, then resets it to the sentinel. There is no signal,
no flag, no fence and no second trip. A packet takes no byte more than its data; LL takes twice as many,
LL128 16 / 15.

A packet must arrive whole: docs/machine_code.md, whole packet. Kernels store and load it as a scalar of 128
bits, which PTX keeps whole. That a copy engine keeps it whole over NVLink, no document says.

The host draws 126 bits of the sentinel at random when it allocates the slots (``Transport.channel``). A
packet that equals the sentinel would not be seen to arrive. For data that do not know it, the probability
is 2**-126, less than that of a failure of links or memory. (After a wait that has expired, the sentinel
may be among the data.)

The accesses are relaxed, of scope "sys": they order nothing but themselves. A slot may be rewritten only
after its receiver has reset it, in a launch that has already ended. A reset by the running launch does not
count: nothing that the launch sends later orders the reset before the sender's next store. The kernel's
protocol must provide for this, mostly by two buffers: see the double-buffer lemma in docs/protocols.md.
The emulator raises ValueError if a sender writes a slot that is not empty, or whose reset is not yet
ordered.

TensorRT-LLM and FlashInfer have such buffers in their all-reduces for low latency and call them Lamport's.
Their sentinel is -0.0, which the data must not have.
"""

from __future__ import annotations

import functools
import sys

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

from ..argument_checks import check_emulated_integer, check_integer, described
from ..cuda.array_words import load_word, n_words, store_word
from ..cuda.unroll import folded, for_each, mapped
from ..cuda.weighted_sums import four_words, two_words
from ..emulator import address_of, current_thread, from_scalar, place
from ..shmem import bounded_waits
from ..shmem.peers import offset_of
from .packet_checks import check_emulated_lines, check_emulated_pieces, check_lines, check_pieces

__all__ = ["PIECE_BYTES", "lamport_load", "lamport_store", "load_piece", "store_piece"]

PIECE_BYTES = 16


def load_piece(x: Array, i: int) -> tuple[int, ...]:
    """-> piece `i` of `x`, two uint64, by one thread: ordinary loads. What the last one lacks is 0.

    x   1-D, contiguous: complex128 at a multiple of 16 bytes, for accesses of 16 bytes; uint64; or uint8 at
        any address, a byte at a time. Less than 2**31 pieces, of which `i` is one
    """
    thread, (first, last) = current_thread("load_piece"), _bytes_of("load_piece", "x", x, i)
    piece = np.zeros(PIECE_BYTES, np.uint8)
    piece[: last - first] = thread.bytes_of("read", x, first, last)
    return tuple(map(from_scalar, piece.view(np.uint64)))


def store_piece(out: Array, i: int, words: tuple[int, ...]) -> None:
    """Store what ``load_piece(out, i)`` would load: ordinary stores. What the last one lacks is dropped."""
    thread, (first, last) = current_thread("store_piece"), _bytes_of("store_piece", "out", out, i)
    piece = np.array([int(word) for word in words], np.uint64).view(np.uint8)
    thread.bytes_of("write", out, first, last)[:] = piece[: last - first]


def lamport_store(lines: Array, i: int, words: tuple[int, ...], low: int, high: int, pe: int) -> None:
    """Store a packet to slot `i` of rank `pe`'s `lines`, by one thread.

    lines      symmetric, uint64, 1-D, contiguous, at a multiple of 16 bytes, where NVLink reaches rank `pe`;
               two words for each slot, less than 2**31 of them. Pass this rank's own
    words      two uint64, together other than the sentinel
    low, high  the sentinel, two uint64: what the slot holds
    pe         the rank, this one included

    It orders nothing.
    """
    thread = current_thread("lamport_store")
    check_emulated_integer("lamport_store", i=i, low=low, high=high, pe=pe)
    empty, words = (int(low), int(high)), tuple(map(int, words))
    _check_piece("lamport_store()", words, empty)
    there = thread.peer(_place("lamport_store", lines, i), int(pe))
    thread.store_line(there, np.array(words, np.uint64), _check_empty("lamport_store()", empty))


def lamport_load(lines: Array, places: tuple[int, ...], low: int, high: int) -> tuple[tuple[int, ...], ...]:
    """Wait for packets in some slots of this rank's `lines`, by one thread, which polls all of them at once.
    Reset the slots to the sentinel. -> for each its words, a tuple of two uint64

    lines      as of ``lamport_store``, which stores these packets
    places     a tuple of the slots' numbers, each once
    low, high  the sentinel

    It orders nothing. When the wait expires (docs/timeouts.md), the words are what the slot holds.
    """
    thread = current_thread("lamport_load")
    if not isinstance(places, tuple):
        raise TypeError(_not_places(places))
    numbers = {f"places[{k}]": i for k, i in enumerate(places)}
    check_emulated_integer("lamport_load", low=low, high=high, **numbers)
    empty = int(low), int(high)
    there = [_place("lamport_load", lines, i) for i in places]
    pieces = [thread.wait_line(here, _unlike(here, empty), "to be a piece") for here in there]
    for here in there:
        thread.store_line(here, np.array(empty, np.uint64))
        thread.block.machine.emptied[address_of(here, 0)] = thread
    return tuple(tuple(map(from_scalar, words)) for words in pieces)


def _not_places(given):
    return f"lamport_load(): places is {described(given)}; it must be a tuple of integers, such as (i,)"


# ---- in the emulator


def emulated_copy(arguments):
    """Copy whole packets, uint8, to empty slots, as a copy engine does; the last one first."""
    places, pieces, empty = arguments
    thread = current_thread("copy")
    for array in (places, pieces):
        if address_of(array, 0) % PIECE_BYTES or pieces.size % PIECE_BYTES:
            raise ValueError(
                f"a copy of {pieces.size} bytes at {address_of(pieces, 0):#x} to {address_of(places, 0):#x}: "
                f"size and addresses must be multiples of {PIECE_BYTES} bytes; other pieces may arrive in "
                "parts"
            )
    for first in range(pieces.size - PIECE_BYTES, -1, -PIECE_BYTES):
        words = np.array(thread.bytes_of("read", pieces, first, first + PIECE_BYTES)).view(np.uint64)
        _check_piece("a copy", words, empty)
        at = first // 8
        thread.store_line(places[at : at + 2], words, _check_empty("a copy", empty))


def _check_piece(what, words, empty):
    if tuple(map(int, words)) == empty:
        raise ValueError(
            f"{what}: the piece equals the pattern of an empty place; it must differ, or nobody sees it "
            "arrive"
        )


def _bytes_of(primitive, name, array, i):
    """Where piece `i` begins and ends."""
    check_emulated_integer(primitive, i=i)
    check_emulated_pieces(primitive, name, array)
    first = PIECE_BYTES * int(i)
    if not 0 <= first < array.nbytes:
        last = -(-array.nbytes // PIECE_BYTES) - 1
        raise IndexError(f"{primitive}(): i is {i}; {name} has pieces 0 to {last}")
    return first, min(array.nbytes, first + PIECE_BYTES)


def _place(primitive, lines, i):
    check_emulated_lines(primitive, lines, PIECE_BYTES, 0)
    if not 0 <= i < lines.size // 2:
        raise IndexError(f"{primitive}(): the place is {i}; lines has places 0 to {lines.size // 2 - 1}")
    return lines[2 * int(i) : 2 * int(i) + 2]


def _unlike(here, empty):
    (low, high), item = empty, here.item
    return lambda word: word != high or item(0) != low


def _check_empty(what, empty):
    """``check(thread, line, last)`` for ``Thread.store_line``"""

    def check(thread, line, last):
        machine, key = thread.block.machine, address_of(line, 0)
        if (line.item(0), line.item(last)) != empty:
            reason = (
                "is not empty; it must be. Its receiver has not taken the piece there yet, or the host has "
                "not filled the place with the pattern"
            )
        else:
            by = machine.emptied.get(key)
            if by is None or by is thread or by.block.launch.done:
                return
            reason = (
                "was made empty by a launch that is still running, so this piece may be lost. A later launch "
                "of the receiver must send something first"
            )
        raise ValueError(f"{what}: {place(machine, thread, key, sys._getframe())} {reason}")

    return check


# ---- on the GPU

device = cuda.jit(device=True)
_load_16, _store_16 = load_bytes(16), store_bytes(16)
# A scalar of 128 bits, which PTX keeps whole; of a vector, it may divide the elements.
_store = asm(
    "{ .reg .b128 packet; mov.b128 packet, {$1, $2}; st.relaxed.sys.global.b128 [$0], packet; }",
    types.void,
    (types.uint64, types.uint64, types.uint64),
)
_load = asm(
    "{ .reg .b128 packet; ld.relaxed.sys.global.b128 packet, [$2]; mov.b128 {$0, $1}, packet; }",
    types.UniTuple(types.uint64, 2),
    (types.uint64,),
)
_stopped = bounded_waits.stopped


@gpu(load_piece)
def _(x, i):
    check_integer("load_piece", i=i)
    check_pieces("load_piece", "x", x)

    def whole(x, i):
        return two_words(_load_16(x, 16 * types.int64(i)))

    def by_words(x, i):
        at = 2 * types.int64(i)
        low, high = load_word(x, at), types.uint64(0)
        if at + 1 < n_words(x):
            high = load_word(x, at + 1)
        return low, high

    return whole if x.dtype == types.complex128 else by_words


@gpu(store_piece)
def _(out, i, words):
    check_integer("store_piece", i=i)
    check_pieces("store_piece", "out", out)

    def whole(out, i, words):
        _store_16(out, 16 * types.int64(i), four_words(words))

    def by_words(out, i, words):
        at = 2 * types.int64(i)
        store_word(out, at, words[0])
        if at + 1 < n_words(out):
            store_word(out, at + 1, words[1])

    return whole if out.dtype == types.complex128 else by_words


@gpu_function
def _address(i, lines):
    return element_address(lines, 0) + types.uint64(PIECE_BYTES) * types.uint64(i)


@gpu(lamport_store)
def _(lines, i, words, low, high, pe):
    check_integer("lamport_store", i=i, low=low, high=high, pe=pe)
    check_lines("lamport_store", lines)
    armed = bounded_waits.armed()

    def impl(lines, i, words, low, high, pe):
        if not (armed and _stopped()):
            _store(_address(i, lines) + offset_of(pe), words[0], words[1])

    return impl


@device
def _reset(k, address, sentinel):
    low, high = sentinel
    _store(address, low, high)


@device
def _look(address, sentinel):
    (low, high), piece = sentinel, _load(address)
    return (piece,), (piece[0] == low) & (piece[1] == high), address


@device
def _look_further(before, address, sentinel):
    pieces, empty, at = before
    (piece,), is_empty, here = _look(address, sentinel)
    return pieces + (piece,), empty | is_empty, at if empty else here


@functools.cache
def arriving(n, armed, recorded):
    """``arrived(addresses, low, high)``: the packets of `n` slots, when all are full; in an armed kernel what
    is there when its time is up."""
    look, over = folded(n, _look, _look_further), bounded_waits.overdue("lamport_load", types.uint64, "ne")
    first_look, every, clock = bounded_waits.FIRST, bounded_waits.EVERY, bounded_waits.clock
    waited = bounded_waits.ended("lamport_load")

    @gpu_function
    def arrived(addresses, low, high):
        left, since = first_look, types.uint64(0)
        while True:
            pieces, empty, at = look(addresses, (low, high))
            if not empty:
                if armed:
                    waited(since, addresses[n - 1])
                return pieces
            if armed:
                left -= 1
                if left == 0:
                    if over(since, at, low, low):
                        return pieces
                    if since == 0:
                        since = clock()
                    left = every

    return arrived


@gpu(lamport_load)
def _(lines, places, low, high):
    check_integer("lamport_load", low=low, high=high)
    check_lines("lamport_load", lines)
    if not isinstance(places, types.BaseTuple) or not all(isinstance(i, types.Integer) for i in places):
        raise TypingError(_not_places(places))
    n = len(places)
    addresses_of, reset = mapped(n, _address), for_each(n, _reset)
    arrived = arriving(n, bounded_waits.armed(), bounded_waits.recording())

    def impl(lines, places, low, high):
        addresses, low, high = addresses_of(places, lines), types.uint64(low), types.uint64(high)
        pieces = arrived(addresses, low, high)
        reset(addresses, (low, high))
        return pieces

    return impl
