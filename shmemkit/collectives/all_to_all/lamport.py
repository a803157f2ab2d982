"""All-to-all by pieces that say themselves that they have arrived (``device.packets.lamport``), with no byte
more than the data have.

Segments  what a rank has for each rank, and gets from each; segment k of x goes to rank k, which sends what
          becomes segment k of out
Pieces    16 bytes of a segment, in the registers of a thread; 32 pieces of a warp are a tile
Lines     slots[buffer, k], on every rank: places for the pieces of what rank k sends here. Written by rank k
          over NVLink, and made empty by this rank
Counters  epochs[k, i], local: how often tile i has gone to rank k; it gives the half. In device memory, so
          that a replayed graph counts on

  a thread of a block (b, y), with k = me + 1 + y modulo the ranks, for its pieces i, one after the other;
  steps 1 and 2 of the next one come before step 3, so that pieces are on their way while it waits:
          1. load piece i of segment k of x, and store it to slots[buffer, me] on rank k
          2. add 1 to the tile's counter (one thread of the warp)
          3. poll piece i in slots[buffer, k], until it is there: what rank k sends; make its place empty;
          store
             it to segment k of out
     k = me: load piece i of segment me, and store it

A piece of one rank for a thread, not that of all ranks: so more are under way at once, and none that has come
waits for those of other ranks. The blocks of a rank follow each other in the grid: each multiprocessor gets
some of all ranks, and so all links are used alike.

No race, although nobody acknowledges: piece i is always at the same place, and rank k and I count its tile
alike, whatever the lengths of the calls and the grids. I store to half h of it on rank k again two calls with
it later, and in the one between a piece of that tile has come from rank k, which it sends when its launch
before has ended (after griddepcontrol_wait): it has taken what half h held, and made it empty. No deadlock:
of the tiles that rank k and I exchange, the warps take theirs in ascending order. So the first one that has
not come on both waits for none, and is sent; all blocks are resident. That the next launch begins early (PDL)
changes neither: its blocks come when all of this one are resident, and touch nothing until these have ended.
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
    rank,
    span,
    store_piece,
    symm_at,
)

from ..lamport import TILE, LamportMethod, tiles_of


@cuda.jit
def lamport_all_to_all(x, out, size, packets, tiles, slots, row, low, high, epochs):
    """Send each rank its segment of `x`, to `out`.

    x, out     complex128, uint64 or uint8, as of ``load_piece``: n_ranks segments each, which lie apart
    size       elements of a segment
    packets     of 16 bytes, which it has; tiles: of 32 pieces
    slots      uint64 (4 * n_ranks * row,), symmetric, the pattern everywhere at first
    row        places of the capacity: of whole tiles
    low, high  the pattern
    epochs      uint32 (n_ranks * row / 32,), zeros at first
    grid       (any number, n_ranks) of blocks of whole warps, one-dimensional
    """
    me, n = rank(), cuda.gridDim.y
    k = me + 1 + cuda.blockIdx.y
    if k >= n:  # a remainder would be a division
        k -= n
    i = types.uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    step, end = types.uint32(cuda.blockDim.x * cuda.gridDim.x), types.uint32(32 * tiles)
    its, theirs = span(x, k * size, size), span(out, k * size, size)
    counts = span(epochs, k * (row >> 5), row >> 5)
    there, here, buffer = types.uint32(me * row), types.uint32(k * row), types.uint32(n * row)
    griddepcontrol_wait(its, theirs, counts, symm_at(slots, k), there, here, buffer, i, end, step)
    griddepcontrol_launch_dependents()
    if k == me:
        while i < packets:
            store_piece(theirs, i, load_piece(its, i))
            i = types.uint32(i + step)
    else:
        done, epoch, sent = i, types.uint32(0), types.uint32(0)
        while done < end:
            if i < end:
                sent = types.uint32(counts[i >> 5] + 1)
                if i < packets:
                    slot = types.uint32((sent & 1) * buffer + i + there)
                    lamport_store(slots, slot, load_piece(its, i), low, high, k)
                cuda.syncwarp()  # all threads have read the counter
                if i & 31 == 0:
                    counts[i >> 5] = sent
            if done < i:
                if done < packets:
                    slot = types.uint32((epoch & 1) * buffer + done + here)
                    (words,) = lamport_load(slots, (slot,), low, high)
                    store_piece(theirs, done, words)
                done = types.uint32(done + step)
            i, epoch = types.uint32(i + step), sent


class Lamport(LamportMethod):
    """The method "lamport" of ``AllToAll``."""

    most_ranks = math.inf  # a row of the grid for each

    def prepare(self, max_nbytes):
        n, xp = self.world.n_ranks, self.world.xp
        tiles = max(1, tiles_of(-(-max_nbytes // n)))
        self.check("all_to_all lamport", 2 * n * tiles)
        self.row = TILE * tiles
        self.slots = self.empty_slots(2 * n * self.row, "all_to_all.lamport.slots")
        self.epochs = xp.zeros(n * tiles, "uint32")
        self.bind_kinds(self._bind, 0)

    def bind(self, x, out, in_place):
        segment = x.nbytes // self.world.n_ranks
        return self._bind(*self.wide(x, out, segment), segment)

    def _bind(self, x, out, segment):
        tiles, packets = tiles_of(segment), -(-segment // PIECE_BYTES)
        args = segment // x.itemsize, packets, tiles, self.slots, self.row, *self.pattern, self.epochs
        return self.launch_tiles(lamport_all_to_all, max(1, tiles), x, out, *args, rows=self.world.n_ranks)


GPU_KERNELS = {
    f"lamport_all_to_all[{words}]": (
        lamport_all_to_all,
        (
            *[types.Array(words, 1, "C")] * 2,
            *[types.int64] * 3,
            types.Array(types.uint64, 1, "C"),
            *[types.int64] * 3,
            types.Array(types.uint32, 1, "C"),
        ),
    )
    for words in (types.complex128, types.uint64, types.uint8)
}
