"""All-reduce in two shots, by LL128: each rank combines one segment of all ranks' arrays, which they send it,
and sends the result to all. Lines say themselves that they have arrived: no signals, no fences. For middling
messages.

Tiles     480 bytes of the array, in the registers of a warp (``shmemkit.device.packets.ll128_tiles``)
Segments  the array is cut into n_ranks segments of as many tiles, rank k's being the k-th. For what the last
          ones lack, anything is sent, and nothing stored
Lines     inputs[k], on every rank: its segment of rank k's array. results[k]: segment k, combined. Both
          written by rank k only, over NVLink
Counters  calls[i], local: how often tile i of the segments has been sent; it gives the flag. In device
          memory, so that a replayed graph counts on

  a warp, for its tiles i, one after the other:
          1. load tile i of all segments; store that of segment k to inputs[me] on rank k, with the flag: on
             this one, too
          2. add 1 to the tile's counter
          3. poll tile i in inputs, of all ranks at once, until all have the flag; combine them in the order
             of the ranks; store the result to results[me] on all ranks, with the flag
          4. poll tile i in results, of all ranks at once; store them to the segments of the output

Only one rank combines an element, in the order of the ranks: all ranks have the same bits, in every run.

No race, with nothing double-buffered: tile i is always at the same place, and all ranks count it alike,
whatever the lengths of the calls and the grids. I write inputs[me] on rank k again in the next call, and in
this one I have received the results of rank k, which it sends when it has read the same tile of its inputs. I
write results[me] on rank k again in the next call, when its inputs have come here, which it sends when its
launch before has ended: it has read all results of this one. x may be out: a warp has loaded its tiles of x
before it writes the same of out, and what others load of them, beyond the end of theirs, is not stored.

No deadlock: all warps take their tiles in ascending order. So the first tile that is not done on all ranks
waits for none, on any rank, and goes through the steps, in each of which all send before they wait. All
blocks are resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll128_load_tiles,
    ll128_store_tiles,
    rank,
    symm_at,
)

from ..packet_tiles import Tiles, combining, copying, loading, storing, tiles_of, words_of


@functools.cache
def two_shot_ll128_kernel(op, dtype, n):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum", of `n` ranks."""
    load, combine, copies, store = loading(n), combining(op, dtype, n), copying(n), storing(n)

    @cuda.jit
    def two_shot_ll128_all_reduce(x, out, segment, inputs, results, calls):
        """Combine the `x` of all ranks in `out`.

        x, out           complex128, uint64 or uint8 (the bytes of elements of `dtype`), as of ``load_tile``,
                         of the same size; may be the same
        segment          tiles of 480 bytes of a segment, n of which are x
        inputs, results  uint64 (n_ranks, words of a segment at most), symmetric, zeros at first
        calls            uint32 (tiles of a segment at most,), zeros at first
        grid             any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        warps, t = cuda.blockDim.x >> 5, cuda.threadIdx.x
        i, me = types.uint32(cuda.blockIdx.x * warps + (t >> 5)), rank()
        griddepcontrol_wait(x, out, segment, symm_at(inputs, 0), results, calls, me, i)
        griddepcontrol_launch_dependents()
        while i < segment:
            call = calls[i] + 1
            ll128_store_tiles(inputs, me, i, load(x, segment, i), call)
            cuda.syncwarp()  # all threads have read the counter
            if t & 31 == 0:
                calls[i] = call
            words = combine(ll128_load_tiles(inputs, 0, n, i, call))
            ll128_store_tiles(results, me, i, copies(words), call)
            store(out, segment, i, ll128_load_tiles(results, 0, n, i, call))
            i = types.uint32(i + warps * cuda.gridDim.x)

    return two_shot_ll128_all_reduce


class TwoShotLL128(Tiles):
    """The method "two_shot_ll128" of ``AllReduce``."""

    def prepare(self, max_nbytes, op):
        self.op, n = op, self.world.n_ranks
        segment = -(-tiles_of(max_nbytes) // n)
        self.check("all_reduce two_shot_ll128", n * segment)
        shape = n, words_of(segment)
        self.inputs = self.zeros(shape, "uint64", "all_reduce.two_shot_ll128.inputs")
        self.results = self.zeros(shape, "uint64", "all_reduce.two_shot_ll128.results")
        self.calls = self.world.xp.zeros(segment, "uint32")

    def bind(self, x, out, in_place, dtype):
        n = self.world.n_ranks
        kernel, segment = two_shot_ll128_kernel(self.op, dtype.name, n), -(-tiles_of(x.nbytes) // n)
        x, out = self.wide(x, out, x.nbytes)
        return self.launch_tiles(kernel, segment, x, out, segment, self.inputs, self.results, self.calls)


_two, _one = types.Array(types.uint64, 2, "C"), types.Array(types.uint32, 1, "C")
GPU_KERNELS = {
    f"two_shot_ll128_all_reduce[{op},{dtype},{n},{words}]": (
        two_shot_ll128_kernel(op, dtype, n),
        (*[types.Array(words, 1, "C")] * 2, types.int64, _two, _two, _one),
    )
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, types.complex128),
        ("sum", "float32", 2, types.complex128),
        ("sum", "float16", 4, types.uint8),
        ("max", "float32", 8, types.uint64),
        ("prod", "int8", 16, types.complex128),
    )
}
