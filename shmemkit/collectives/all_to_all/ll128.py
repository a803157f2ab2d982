"""All-to-all by LL128, in lines of 128 bytes. The fastest for small and middling messages.

Segments  segment k of x goes to rank k; segment k of out comes from rank k
Tiles     480 bytes of a segment, in the registers of a warp (``shmemkit.device.packets.ll128_tiles``)
Slots     slots[buffer, k], on every rank: the tiles of rank k. Only rank k writes them, over NVLink
Epochs    epochs[k, i], local: of tile i to rank k. The epoch is the flag and selects the buffer.
          Device-resident, so graph-safe

  a warp of a block (b, y), with k = me + 1 + y modulo the ranks, for its tiles i in ascending order. Steps
  1 and 2 of the next tile come before step 3, so that packets are under way while the warp waits:
          1. load tile i of segment k of x; store it to slots[buffer, me] on rank k, with the flag
          2. add 1 to the tile's epoch
          3. poll tile i of rank k in slots[buffer, k] until it has the flag; store it to segment k of out
     k = me: load tile i of segment me, and store it

A warp has a tile of one rank, not of all ranks. So more tiles are under way at once, and none that has
arrived waits for other ranks. Each multiprocessor gets blocks of all ranks, so all links are used alike.

No race: the double-buffer lemma (docs/protocols.md), for the tiles that two ranks exchange. No deadlock:
ascending-order progress, for each pair of ranks.
"""

import math

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll128_load_some,
    ll128_store_tile,
    load_tile,
    rank,
    span,
    store_tile,
    symm_at,
    tile_piece,
)

from ..packet_tiles import Tiles, tiles_of, words_of


@cuda.jit
def ll128_all_to_all(x, out, size, tiles, capacity, slots, epochs):
    """Send each rank its segment of `x`, to `out`.

    x, out    complex128, uint64 or uint8, as of ``load_tile``: n_ranks segments each, which lie apart
    size      elements of a segment
    tiles     of 480 bytes, which it has
    capacity  tiles that it may have
    slots     uint64 (2 * n_ranks * words of the capacity,), symmetric, zeros at first
    epochs     uint32 (n_ranks * capacity,), zeros at first
    grid      (any number, n_ranks) of blocks of whole warps, one-dimensional
    """
    warps, t, me, n = cuda.blockDim.x >> 5, cuda.threadIdx.x, rank(), cuda.gridDim.y
    k = me + 1 + cuda.blockIdx.y
    if k >= n:  # a remainder would be a division
        k -= n
    i = types.uint32(cuda.blockIdx.x * warps + (t >> 5))
    its, theirs = span(x, k * size, size), span(out, k * size, size)
    counts = span(epochs, k * capacity, capacity)
    there, here, buffer = types.uint32(me * capacity), types.uint32(k * capacity), types.uint32(n * capacity)
    step, packet = types.uint32(warps * cuda.gridDim.x), tile_piece(i)
    griddepcontrol_wait(its, theirs, counts, symm_at(slots, k), there, here, buffer, i, tiles, step, packet)
    griddepcontrol_launch_dependents()
    if k == me:
        while i < tiles:
            store_tile(theirs, i, load_tile(its, i))
            i = types.uint32(i + step)
    else:
        done, epoch, sent = i, types.uint32(0), types.uint32(0)
        while done < tiles:
            if i < tiles:
                sent = types.uint32(counts[i] + 1)
                at = types.uint32((sent & 1) * buffer + i)
                ll128_store_tile(slots, types.uint32(at + there), load_tile(its, i), sent, k)
                cuda.syncwarp()  # all threads have read the counter
                if t & 31 == 0:
                    counts[i] = sent
            if done < i:
                at = types.uint32((epoch & 1) * buffer + done)
                (words,) = ll128_load_some(slots, (types.uint32(at + here),), epoch)
                store_tile(theirs, done, words)
                done = types.uint32(done + step)
            i, epoch = types.uint32(i + step), sent


class LL128(Tiles):
    """The method "ll128" of ``AllToAll``."""

    most_ranks = math.inf  # a row of the grid for each

    def prepare(self, max_nbytes):
        n, xp = self.world.n_ranks, self.world.xp
        self.capacity = tiles_of(-(-max_nbytes // n))
        self.check("all_to_all ll128", 2 * n * self.capacity)
        self.slots = self.zeros((2 * n * words_of(self.capacity),), "uint64", "all_to_all.ll128.slots")
        self.epochs = xp.zeros(n * self.capacity, "uint32")
        self.bind_kinds(self._bind, 0)

    def bind(self, x, out, in_place):
        segment = x.nbytes // self.world.n_ranks
        return self._bind(*self.wide(x, out, segment), segment)

    def _bind(self, x, out, segment):
        n, tiles = self.world.n_ranks, tiles_of(segment)
        args = segment // x.itemsize, tiles, self.capacity, self.slots, self.epochs
        return self.launch_tiles(ll128_all_to_all, tiles, x, out, *args, rows=n)


_arrays = types.Array(types.uint64, 1, "C"), types.Array(types.uint32, 1, "C")
GPU_KERNELS = {
    f"ll128_all_to_all[{words}]": (
        ll128_all_to_all,
        (*[types.Array(words, 1, "C")] * 2, *[types.int64] * 3, *_arrays),
    )
    for words in (types.complex128, types.uint64, types.uint8)
}
