"""Reduce-scatter by LL128: each rank sends all others their segments, by lines of 128 bytes that say
themselves that they have arrived, and each combines what it gets. For middling messages.

Tiles     480 bytes of a segment, in the registers of a warp (``shmemkit.device.ll128_tiles``)
Segments  x is n_ranks segments, the k-th for rank k
Lines     lines[half, k], on every rank: the tiles of its segment of rank k's x. Written by rank k only, over
          NVLink
Counters  calls[i], local: how often tile i of the segments has been sent; it gives the flag and the half. In
          device memory, so that a replayed graph counts on

  a warp, for its tiles i, one after the other:
          1. load tile i of all segments; store that of segment k to lines[half, me] on rank k, with the flag:
             on this one, too
          2. add 1 to the tile's counter
          3. poll tile i in lines[half], of all ranks at once, until all have the flag; combine them in the
             order of the ranks; store the result

They combine in the order of the ranks, so the bits are the same in every run. My own lines are there before
those of others: so step 3 is the same for all ranks.

No race: tile i is always at the same place, and all ranks count it alike, whatever the lengths of the calls
and the grids. I write to half h of a tile on rank k again two calls with it later, and in the one between the
tile of rank k has come, which it sends when its launch before has ended: it has read what half h held. out
may be my segment of x: a warp has loaded its tile of it before it writes it, and no other reads it. No
deadlock: all warps take their tiles in ascending order, so the first one that is not there on all ranks waits
for none, and is sent; all blocks are resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll128_load_tiles,
    ll128_store_tiles,
    rank,
    store_tile,
)
from shmemkit.kernels.tiles import Tiles, combining, loading_segments, tiles_of


@functools.cache
def ll128_kernel(op, dtype, n):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum", of `n` ranks."""
    load, combine = loading_segments(n), combining(op, dtype, n)

    @cuda.jit
    def ll128_reduce_scatter(x, out, tiles, lines, calls):
        """Combine the segments of this rank, of the `x` of all ranks, in `out`.

        x, out  complex128, uint64 or uint8 (the bytes of elements of `dtype`), as of ``load_tile``, x `n`
                times as large; out may be x's segment of this rank
        tiles   of 480 bytes, which out has
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
            ll128_store_tiles(lines, half + me, i, load(x, out.size, i), call)
            cuda.syncwarp()  # all threads have read the counter
            if t & 31 == 0:
                calls[i] = call
            store_tile(out, i, combine(ll128_load_tiles(lines, half, n, i, call)))
            i = types.uint32(i + warps * cuda.gridDim.x)

    return ll128_reduce_scatter


class LL128(Tiles):
    """The method "ll128" of ``ReduceScatter``."""

    def prepare(self, max_nbytes, op):
        self.op = op
        self.prepare_halves("reduce_scatter ll128", -(-max_nbytes // self.world.n_ranks))

    def bind(self, x, out, in_place, dtype):
        kernel, tiles = ll128_kernel(self.op, dtype.name, self.world.n_ranks), tiles_of(out.nbytes)
        x, out = self.wide(x, out, out.nbytes)
        return self.launch_tiles(kernel, tiles, x, out, tiles, self.lines, self.calls)


_lines, _calls = types.Array(types.uint64, 2, "C"), types.Array(types.uint32, 1, "C")
GPU_KERNELS = {
    f"ll128_reduce_scatter[{op},{dtype},{n},{words}]": (
        ll128_kernel(op, dtype, n),
        (*[types.Array(words, 1, "C")] * 2, types.int64, _lines, _calls),
        *[(9, 0)] * (n == 16),  # on sm_80, it spills registers
    )
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, types.complex128),
        ("sum", "float32", 2, types.complex128),
        ("sum", "float16", 4, types.uint8),
        ("max", "float32", 8, types.uint64),
        ("prod", "int8", 16, types.complex128),
    )
}
