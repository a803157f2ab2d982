"""Exchanges of segments by LL128: lines of 128 bytes that say themselves that they have arrived. What
all-gather and all-to-all share: all peers get the same segment of x, or each gets another one.

Segments  segment k of out comes from rank k
Tiles     480 bytes of a segment, in the registers of a warp (``shmemkit.device.ll128_tiles``)
Lines     lines[half, k], on every rank: the tiles of what rank k sends here. Written by rank k only, over
          NVLink
Counters  calls[i], local: how often tile i of the segments has been sent; it gives the flag and the half. In
          device memory, so that a replayed graph counts on

  a warp, for its tiles i, one after the other:
          1. load tile i of the segments of all ranks; store each to lines[half, me] on its rank, with the
             flag: on this one, too
          2. add 1 to the tile's counter
          3. poll tile i in lines[half], of all ranks at once, until all have the flag; store them to the
             segments of the output

No race, although nobody acknowledges: tile i is always at the same place, and all ranks count it alike,
whatever the lengths of the calls and the grids. I write to half h of a tile on rank k again two calls with it
later, and in the one between the tile of rank k has come, which it sends when its launch before has ended
(after griddepcontrol_wait): it has read what half h held. Where x is my segment of out, a warp stores what is
there already. No deadlock: all warps take their tiles in ascending order, so the first one that is not there
on all ranks waits for none, and is sent; all blocks are resident. That the next launch begins early (PDL)
changes neither: its blocks come when all of this one are resident, and touch nothing until these have ended.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll128_load_tiles,
    ll128_store_tiles,
    load_tile,
    rank,
)
from shmemkit.kernels.tiles import Tiles, copying, loading_segments, storing_segments, tiles_of


@functools.cache
def ll128_kernel(personalized, n):
    """-> the kernel of `n` ranks; `personalized`: x has a segment for each rank."""
    store, copies = storing_segments(n), copying(n)
    load_segments = loading_segments(n)

    @cuda.jit(device=True)
    def load_one(x, size, i):
        return copies(load_tile(x, i))

    load = load_segments if personalized else load_one

    @cuda.jit
    def ll128(x, out, size, tiles, lines, calls):
        """Send each rank a segment of `x`, to `out`.

        x, out  complex128, uint64 or uint8, as of ``load_tile``: out has n segments, x too if they are
                personalized, else one
        size    elements of a segment
        tiles   of 480 bytes, which it has
        lines   uint64 (2 * n, words of the capacity), symmetric, zeros at first
        calls   uint32 (tiles of the capacity,), zeros at first
        grid    any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        warps, t = cuda.blockDim.x >> 5, cuda.threadIdx.x
        i, me = types.uint32(cuda.blockIdx.x * warps + (t >> 5)), rank()
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        while i < tiles:
            call = calls[i] + 1
            half = n * (call & 1)
            ll128_store_tiles(lines, half + me, i, load(x, size, i), call)
            cuda.syncwarp()  # all threads have read the counter
            if t & 31 == 0:
                calls[i] = call
            store(out, size, i, ll128_load_tiles(lines, half, n, i, call))
            i = types.uint32(i + warps * cuda.gridDim.x)

    return ll128


class LL128(Tiles):
    """A method by LL128. A subclass has

    name          of it, as "all_gather ll128"
    personalized  whether x has a segment for each rank
    """

    def prepare(self, max_nbytes):
        self.prepare_halves(self.name, -(-max_nbytes // self.world.n_ranks))
        for dtype in ("complex128", "uint64", "uint8"):
            nothing = self.world.xp.empty(0, dtype)
            self._bind(nothing, nothing, 0)

    def bind(self, x, out, in_place):
        segment = out.nbytes // self.world.n_ranks
        return self._bind(*self.wide(x, out, segment), segment)

    def _bind(self, x, out, segment):
        kernel, tiles = ll128_kernel(self.personalized, self.world.n_ranks), tiles_of(segment)
        args = x, out, segment // out.itemsize, tiles, self.lines, self.calls
        return self.launch_tiles(kernel, tiles, *args)


_tables = types.Array(types.uint64, 2, "C"), types.Array(types.uint32, 1, "C")


def gpu_kernels(personalized, op):
    """-> the GPU_KERNELS of a module whose method is made of these. On sm_80, some with a segment for each
    rank spill registers: those of many ranks, and those by words and bytes."""
    return {
        f"ll128_{op}[{n},{words}]": (
            ll128_kernel(personalized, n),
            (*[types.Array(words, 1, "C")] * 2, types.int64, types.int64, *_tables),
            *[(9, 0)] * (personalized and (n, words) != (4, types.complex128)),
        )
        for n, words in (
            (4, types.complex128),
            (8, types.uint64),
            (4, types.uint8),
            (16, types.complex128),
        )
    }
