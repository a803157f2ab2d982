"""Broadcast by pieces that say themselves that they have arrived: the root sends each once, to one of the
others, which passes it on. For all but small messages: what leaves a GPU, or comes to it, is no more than the
message, and a piece is on its second way while the next ones are on their first.

LamportMethod    16 bytes of the array, in the registers of a thread; the 32 of a warp are a tile
Relay     of a tile: one of the others, in turn
Chunks    as many pieces in a row as a block has threads: always the same number
Lines     slots[buffer], on every rank but the root: a place for each piece (``device.packets.lamport``).
          Written over NVLink by the root, if I am the piece's relay, and by its relay otherwise; made empty
          by this rank
Signals   empty[k, c], on the root: how many calls that have chunk c rank k has begun (only k sets it)
Counters  epochs[c], local: how many calls before had chunk c; they give the half. In device memory, so that a
          replayed graph counts on

  block b, for its chunks c = b, b + gridDim.x, ..., at first:
          1. the root: wait until empty[k, c] is at least epochs[c], for all k     acquire, sys
             another:  set empty[me, c] there to epochs[c] + 1                     release, sys
  then a thread, for its piece of each:
          2. the root: load it, store it to slots[buffer] on its relay, and to the output
             another:  poll it in slots[buffer] until it is there; make the place empty; if I am its relay,
                       store it to slots[buffer] on the others; store it to the output
  at last: 3. syncthreads, and add 1 to the counters of the chunks

No race: a piece is always at the same place, and all ranks count its chunk alike, whatever the lengths of the
calls and the grids. The root writes half h of a chunk again two calls later, of those that have the chunk. It
waits first (1) until all others have begun the call between, and so their launches before have ended, which
made half h empty. Relays write what the root has sent after that. x may be out: a thread has loaded its piece
before it stores it. No deadlock: the root waits for calls before this one; relays wait for the root, and the
others for the relays, all in ascending order; all blocks are resident. That the next launch begins early
(PDL) changes neither: its blocks come when all of this one are resident, and touch nothing until these have
ended.
"""

import math

from numba import cuda, types

from shmemkit.device import (
    PIECE_BYTES,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    lamport_load,
    lamport_store,
    load_piece,
    notify,
    num_ranks,
    rank,
    store_piece,
    symm_at,
    wait,
)

from ..lamport import TILE, LamportMethod, rank_after, tiles_of


@cuda.jit
def lamport_broadcast(x, out, in_place, root, packets, chunks, slots, row, low, high, empty, epochs):
    """Store the root's `x` in `out`.

    x, out     complex128, uint64 or uint8, as of ``load_piece``, of the same size; x counts on the root only
    in_place   whether x is out
    packets     how many of 16 bytes it has; chunks: how many these are, of as many as a block has threads
    slots      uint64 (4 * row,), symmetric, the pattern everywhere at first: two halves of two words for each
               slot
    row        places of a half
    low, high  the pattern
    empty      uint64 (n_ranks, chunks of the capacity), symmetric, zeros at first
    epochs      uint64 (chunks of the capacity,), zeros at first
    grid       any number of blocks, one-dimensional, as the blocks are: of whole warps, of as many threads in
               all launches
    """
    b, t, threads, blocks = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, cuda.gridDim.x
    me, n = rank(), num_ranks()
    griddepcontrol_wait(x, out, root, symm_at(slots, 0), empty, epochs, me, n)
    griddepcontrol_launch_dependents()
    c = b + t * blocks
    while c < chunks:
        if me != root:
            notify(empty[me, c:], root, epochs[c] + 1, "set", "sys")
        else:
            for y in range(1, n):
                wait(empty[rank_after(root, y), c:], 1, "sys", "acquire", epochs[c])
        c += threads * blocks
    cuda.syncthreads()
    c = b
    while c < chunks:
        i = types.uint32(c * threads + t)
        slot = types.uint32((epochs[c] & 1) * row + i)
        if i < packets and n == 1:
            store_piece(out, i, load_piece(x, i))
        elif i < packets:
            relay = rank_after(root, 1 + types.int64((i >> 5) % types.uint32(n - 1)))
            if me == root:
                packet = load_piece(x, i)
                lamport_store(slots, slot, packet, low, high, relay)
                if not in_place:
                    store_piece(out, i, packet)
            else:
                (packet,) = lamport_load(slots, (slot,), low, high)
                if me == relay:
                    for y in range(1, n):
                        k = rank_after(root, y)
                        if k != me:
                            lamport_store(slots, slot, packet, low, high, k)
                store_piece(out, i, packet)
        c += blocks
    cuda.syncthreads()  # all threads have read the counters
    c = b + t * blocks
    while c < chunks:
        epochs[c] += 1
        c += threads * blocks


class Lamport(LamportMethod):
    """The method "lamport" of ``Broadcast``."""

    threads, blocks = 256, 8
    most_ranks = math.inf

    def prepare(self, max_nbytes, root):
        self.root, xp = root, self.world.xp
        tiles = max(1, tiles_of(max_nbytes))
        self.check("broadcast lamport", 2 * tiles)
        self.row, chunks = TILE * tiles, -(-TILE * tiles // self.threads)
        self.slots = self.empty_slots(2 * self.row, "broadcast.lamport.slots")
        self.empty_signals = self.zeros((self.world.n_ranks, chunks), "uint64", "broadcast.lamport.empty")
        self.epochs = xp.zeros(chunks, "uint64")
        self.bind_kinds(self._bind, False, 0)

    def bind(self, x, out, in_place):
        return self._bind(*self.wide(x, out, x.nbytes), in_place, x.nbytes)

    def _bind(self, x, out, in_place, n_bytes):
        packets = -(-n_bytes // PIECE_BYTES)
        args = in_place, self.root, packets, -(-packets // self.threads), self.slots, self.row, *self.pattern
        return self.launch_tiles(
            lamport_broadcast, max(1, tiles_of(n_bytes)), x, out, *args, self.empty_signals, self.epochs
        )


_words = types.Array(types.uint64, 1, "C")
GPU_KERNELS = {
    f"lamport_broadcast[{words}]": (
        lamport_broadcast,
        (
            *[types.Array(words, 1, "C")] * 2,
            types.boolean,
            *[types.int64] * 3,
            _words,
            *[types.int64] * 3,
            *(types.Array(types.uint64, 2, "C"), _words),
        ),
    )
    for words in (types.complex128, types.uint64, types.uint8)
}
