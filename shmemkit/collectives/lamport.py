"""Lamport exchanges (``shmemkit.device.packets.lamport``): all-gather, reduce-scatter, and one-shot
all-reduce. Each rank sends all ranks x, or each of them another segment of x. What arrives is stored by rank,
or combined. (All-to-all has a kernel of its own.)

Packets   16 bytes of what a rank gets, in the registers of a thread; the 32 packets of a warp are a tile
Slots     slots[buffer, k], on every rank: the packets of rank k. Rank k writes them over NVLink; the receiver
          resets them to the sentinel
Epochs    epochs[i], local: of tile i; the epoch selects the buffer. Device-resident, so graph-safe

  a thread, for its packets i in ascending order. Steps 1 and 2 of the next packet come before step 3, so that
  packets are under way while the thread waits:
          1. load packet i of what each rank gets; store it to slots[buffer, me] on that rank. The next ranks
             come first, and the rank sends to itself, too
          2. add 1 to the tile's epoch (one thread of the warp)
          3. poll packet i in slots[buffer] of all ranks at once, until all are full; reset the slots. Store
             the packets to the segments of the output, or combine them in the order of the ranks and store
             the result

All ranks combine in the same order. So the bits are the same in every run, and an all-reduce has the same
bits on all ranks.

No race: the double-buffer lemma (docs/protocols.md); to consume a slot includes to reset it. A last tile has
at least one packet, so all ranks count it, too. x may lie in out where the result goes: a thread loads its
packet before it stores the result, and no other thread reads that packet. No deadlock: ascending-order
progress.
"""

import functools
import os

from numba import cuda, types

from shmemkit.device import (
    PIECE_BYTES,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    lamport_load,
    lamport_store,
    load_piece,
    num_ranks,
    rank,
    span,
    store_piece,
    symm_at,
)

from .packet_tiles import Exchange, Tiles, combining, copying, kernels_of

TILE = 32  # packets


@functools.cache
def sending(n):
    """-> ``send(slots, i, packets, low, high, me)``: store the k-th of `n` packets to slot `i` of the k-th
    rank after `me`, for all k; the last one is `me`. So a rank receives from about one at a time."""
    before = sending(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def send(slots, i, packets, low, high, me):
        if before is not None:
            before(slots, i, packets, low, high, me)
        lamport_store(slots, i, packets[n - 1], low, high, rank_after(me, n))

    return send


@cuda.jit(device=True)
def rank_after(me, y):
    """The y-th rank after `me`, modulo their number; y is up to that."""
    k = me + y
    return k - num_ranks() if k >= num_ranks() else k


@functools.cache
def slot_indices_of(n):
    """-> ``slot_indices(i, row)``: slot `i` of each of `n` rows, of `row` slots each."""
    before = slot_indices_of(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def slot(i, row):
        return (i,)

    @cuda.jit(device=True)
    def slot_indices(i, row):
        return before(i, row) + (types.uint32(i + types.uint32((n - 1) * row)),)

    return slot_indices if n > 1 else slot


@functools.cache
def _loading_segments(n):
    """-> ``load(x, size, i, me)``: packet `i` of the segments of x, of `size` elements, of the `n` ranks
    after `me`."""
    before = _loading_segments(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def load_first(x, size, i, me):
        return (load_piece(span(x, rank_after(me, 1) * size, size), i),)

    @cuda.jit(device=True)
    def load(x, size, i, me):
        return before(x, size, i, me) + (load_piece(span(x, rank_after(me, n) * size, size), i),)

    return load if n > 1 else load_first


@functools.cache
def _storing_segments(n):
    """-> ``store(out, size, i, packets)``: store the k-th of `n` packets as packet `i` of segment k."""
    before = _storing_segments(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def store(out, size, i, packets):
        if before is not None:
            before(out, size, i, packets)
        store_piece(span(out, (n - 1) * size, size), i, packets[n - 1])

    return store


def _loading_one(n):
    copies = copying(n)

    @cuda.jit(device=True)
    def load(x, size, i, me):
        return copies(load_piece(x, i))

    return load


def _storing_result(op, dtype, n):
    combine = combining(op, dtype, n)

    @cuda.jit(device=True)
    def store(out, size, i, packets):
        store_piece(out, i, combine(packets))

    return store


@functools.cache
def lamport_kernel(n, personalized, op=None, dtype=None):
    """-> the kernel of `n` ranks. `personalized`: x has a segment for each rank. With `op`, as "sum", it
    combines what arrives, of `dtype`, a name as "float16"."""
    load = _loading_segments(n) if personalized else _loading_one(n)
    store = _storing_segments(n) if op is None else _storing_result(op, dtype, n)
    send, slot_indices = sending(n), slot_indices_of(n)

    @cuda.jit
    def lamport(x, out, size, packets, tiles, slots, row, low, high, epochs):
        """Send each rank `x`, or its segment of it, to `out`.

        x, out     complex128, uint64 or uint8, as of ``load_piece``; x has n segments if they are
                   personalized, else one; out has n, or one if they are combined. They may be the same, or
                   one a segment of the other, as the kinds of collectives allow it
        size       elements of a segment
        packets     of 16 bytes, of a segment; tiles: of 32 packets
        slots      uint64 (4 * n * row,), symmetric, the sentinel everywhere at first
        row        slots of the capacity: of whole tiles
        low, high  the sentinel
        epochs      uint32 (row / 32,), zeros at first
        grid       any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        i, me = types.uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x), rank()
        step, end = types.uint32(cuda.blockDim.x * cuda.gridDim.x), types.uint32(32 * tiles)
        griddepcontrol_wait(x, out, size, symm_at(slots, 0), epochs, me, i)
        griddepcontrol_launch_dependents()
        done, epoch, sent = i, types.uint32(0), types.uint32(0)
        while done < end:
            if i < end:
                sent = types.uint32(epochs[i >> 5] + 1)
                if i < packets:
                    slot = types.uint32(((sent & 1) * n + me) * row + i)
                    send(slots, slot, load(x, size, i, me), low, high, me)
                cuda.syncwarp()  # all threads have read the counter
                if i & 31 == 0:
                    epochs[i >> 5] = sent
            if done < i:
                if done < packets:
                    first = types.uint32((epoch & 1) * n * row + done)
                    store(out, size, done, lamport_load(slots, slot_indices(first, row), low, high))
                done = types.uint32(done + step)
            i, epoch = types.uint32(i + step), sent

    return lamport


def tiles_of(n_bytes):
    """How many tiles they are."""
    return -(-n_bytes // (TILE * PIECE_BYTES))


class LamportMethod(Tiles):
    """A method with slots for Lamport packets."""

    def empty_slots(self, number, name):
        """-> so many slots, symmetric and empty; ``sentinel`` says what they hold. Collective."""
        world = self.world
        drawn = world.host_allgather(os.urandom(16))[0]
        self.sentinel = tuple(int.from_bytes(part, "little") >> 1 for part in (drawn[:8], drawn[8:]))  # int64
        slots = self.empty((2 * number,), "uint64", name)
        with world.stream:
            slots.reshape(-1, 2)[:] = world.xp.asarray(self.sentinel, "uint64")
        world.stream.synchronize()
        return slots


class Lamport(LamportMethod, Exchange):
    """A method by this kernel."""

    def prepare_slots(self, n_bytes):
        tiles, n = max(1, tiles_of(n_bytes)), self.world.n_ranks
        self.check(self.name, 2 * n * tiles)
        self.row = TILE * tiles
        self.slots = self.empty_slots(2 * n * self.row, f"{self.name.replace(' ', '.')}.slots")
        self.epochs = self.world.xp.zeros(tiles, "uint32")

    def _bind(self, x, out, segment, dtype=None):
        kernel = lamport_kernel(self.world.n_ranks, self.personalized, self.op, dtype)
        packets, tiles = -(-segment // PIECE_BYTES), tiles_of(segment)
        sizes = segment // out.itemsize, packets, tiles
        args = self.slots, self.row, *self.sentinel, self.epochs
        return self.launch_tiles(kernel, max(1, tiles), x, out, *sizes, *args)


_words, _counts = types.Array(types.uint64, 1, "C"), types.Array(types.uint32, 1, "C")


def gpu_kernels(op, personalized, combined):
    """-> the GPU_KERNELS of a module whose method is by this kernel, for the collective `op`"""
    more = *[types.int64] * 3, _words, *[types.int64] * 3, _counts
    return kernels_of(f"lamport_{op}", lamport_kernel, more, personalized, combined)
