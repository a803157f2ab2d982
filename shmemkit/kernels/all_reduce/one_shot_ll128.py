"""All-reduce in one shot, by LL128: as "one_shot", by lines of 128 bytes, of which 94 % are data, not half.

Tiles     480 bytes of the array, in the registers of a warp (``shmemkit.device.ll128_tiles``)
Lines     lines[half, k], on every rank: the tiles of rank k. Written by rank k only, over NVLink
Counters  calls[i], local: how often tile i has been sent; it gives the flag and the half. In device memory,
          so that a replayed graph counts on

  a warp, for its tiles i, one after the other:
          1. load tile i; store it to lines[half, me] on all ranks, with the flag: on this one, too
          2. add 1 to the tile's counter
          3. poll tile i in lines[half], of all ranks at once, until all have the flag; combine them in the
             order of the ranks; store the result

All ranks combine in the same order, so that all have the same bits, in every run. That I send to myself,
which takes no longer than what others send me, makes step 3 the same on all ranks.

No race: tile i is always at the same place, and all ranks count it alike, whatever the lengths of the calls
and the grids. I write to half h of a tile again two calls with it later, and in the one between its lines
have come from all ranks, which they send when their launches before have ended: they have read what half h
held. x may be out: a warp sends its tile before it writes it, and what others load of it, beyond the end of
theirs, is not stored. No deadlock: all warps take their tiles in ascending order, so the first one that is
not there on all ranks waits for none, and is sent; all blocks are resident.
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
    store_tile,
)
from shmemkit.kernels.tiles import Tiles, combining, copying, tiles_of


@functools.cache
def one_shot_ll128_kernel(op, dtype, n):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum", of `n` ranks."""
    combine, copies = combining(op, dtype, n), copying(n)

    @cuda.jit
    def one_shot_ll128_all_reduce(x, out, tiles, lines, calls):
        """Combine the `x` of all ranks in `out`.

        x, out  complex128, uint64 or uint8 (the bytes of elements of `dtype`), as of ``load_tile``, of the
                same size; may be the same
        tiles   of 480 bytes, which x has
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
            ll128_store_tiles(lines, half + me, i, copies(load_tile(x, i)), call)
            cuda.syncwarp()  # all threads have read the counter
            if t & 31 == 0:
                calls[i] = call
            store_tile(out, i, combine(ll128_load_tiles(lines, half, n, i, call)))
            i = types.uint32(i + warps * cuda.gridDim.x)

    return one_shot_ll128_all_reduce


class OneShotLL128(Tiles):
    """The method "one_shot_ll128" of ``AllReduce``."""

    def prepare(self, max_nbytes, op):
        self.op = op
        self.prepare_halves("all_reduce one_shot_ll128", max_nbytes)

    def bind(self, x, out, in_place, dtype):
        kernel = one_shot_ll128_kernel(self.op, dtype.name, self.world.n_ranks)
        tiles = tiles_of(x.nbytes)
        x, out = self.wide(x, out, x.nbytes)
        return self.launch_tiles(kernel, tiles, x, out, tiles, self.lines, self.calls)


_lines, _calls = types.Array(types.uint64, 2, "C"), types.Array(types.uint32, 1, "C")
GPU_KERNELS = {
    f"one_shot_ll128_all_reduce[{op},{dtype},{n},{words}]": (
        one_shot_ll128_kernel(op, dtype, n),
        (*[types.Array(words, 1, "C")] * 2, types.int64, _lines, _calls),
    )
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, types.complex128),
        ("sum", "float32", 2, types.complex128),
        ("sum", "float16", 4, types.uint8),
        ("max", "float32", 8, types.uint64),
        ("prod", "int8", 16, types.complex128),
    )
}
