"""All-to-all by Lamport packets (``device.packets.lamport``), which have no byte more than the data.

Segments  segment k of x goes to rank k; segment k of out comes from rank k
Packets   16 bytes of a segment, in the registers of a thread; the 32 packets of a warp are a tile
Slots     slots[buffer, k], on every rank: the packets of rank k. Rank k writes them over NVLink; the
          receiver resets them to the sentinel
Epochs    epochs[k, i], local: of tile i to rank k; the epoch selects the buffer. Device-resident, so
          graph-safe

  a thread of a block (b, y), with k = me + 1 + y modulo the ranks, for its packets i in ascending order.
  Steps 1 and 2 of the next packet come before step 3, so that packets are under way while the thread waits:
          1. load packet i of segment k of x; store it to slots[buffer, me] on rank k
          2. add 1 to the tile's epoch (one thread of the warp)
          3. poll packet i of rank k in slots[buffer, k] until it is full; reset the slot; store the packet
             to segment k of out
     k = me: load packet i of segment me, and store it

A thread has a packet of one rank, not of all ranks. So more packets are under way at once, and none that
has arrived waits for other ranks. Each multiprocessor gets blocks of all ranks, so all links are used
alike.

No race: the double-buffer lemma (docs/protocols.md), for the tiles that two ranks exchange; to consume a
slot includes to reset it. No deadlock: ascending-order progress, for each pair of ranks.
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
    packets     of 16 bytes, of a segment; tiles: of 32 packets
    slots      uint64 (4 * n_ranks * row,), symmetric, the sentinel everywhere at first
    row        slots of the capacity: of whole tiles
    low, high  the sentinel
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
        args = segment // x.itemsize, packets, tiles, self.slots, self.row, *self.sentinel, self.epochs
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
