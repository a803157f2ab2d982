"""All-reduce in two shots, by LL128: each rank combines one segment, which all ranks send it, and sends the
result to all. The packets carry their flags, so it needs no signals and no fences. For middling messages.

Tiles     480 bytes of the array, in the registers of a warp (``shmemkit.device.packets.ll128_tiles``)
Segments  the array is cut into n_ranks segments of equally many tiles, one for each rank. Where the last
          segments are shorter, ranks send anything and store nothing
Slots     inputs[k], on every rank: its segment of rank k's array. results[k]: segment k, combined. Only rank
          k writes them, over NVLink
Epochs    epochs[i], local: of tile i of the segments; the epoch is the flag. Device-resident, so graph-safe

  a warp, for its tiles i, one after the other:
          1. load tile i of all segments; store that of segment k to inputs[me] on rank k, also on this one,
             with the flag
          2. add 1 to the tile's epoch
          3. poll tile i in inputs, of all ranks at once, until all have the flag; combine them in the order
             of the ranks; store the result to results[me] on all ranks, with the flag
          4. poll tile i in results, of all ranks at once; store them to the segments of the output

One rank combines an element, in the order of the ranks: all ranks get the same bits, in every run.

No race, without a double buffer. All ranks give tile i the same slot and count its epochs alike, whatever the
sizes of the calls and the grids.

- A rank writes inputs[me] on rank k again in the next epoch. In this one it has received the results of rank
  k, which rank k sends after it has read the same tile of its inputs.
- A rank writes results[me] on rank k again in the next epoch, after rank k's inputs have come. Rank k sends
  them after its previous launch has ended: it has read all results.
- x may be out: a warp loads its tiles of x before it writes the same tiles of out. What other warps load
  there lies beyond the end of their segments, and is not stored.

No deadlock: ascending-order progress (docs/protocols.md); in each step a warp sends before it waits.
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
    def two_shot_ll128_all_reduce(x, out, segment, inputs, results, epochs):
        """Combine the `x` of all ranks in `out`.

        x, out           complex128, uint64 or uint8 (the bytes of elements of `dtype`), as of ``load_tile``,
                         of the same size; may be the same
        segment          tiles of 480 bytes of a segment, n of which are x
        inputs, results  uint64 (n_ranks, words of a segment at most), symmetric, zeros at first
        epochs           uint32 (tiles of a segment at most,), zeros at first
        grid             any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        warps, t = cuda.blockDim.x >> 5, cuda.threadIdx.x
        i, me = types.uint32(cuda.blockIdx.x * warps + (t >> 5)), rank()
        griddepcontrol_wait(x, out, segment, symm_at(inputs, 0), results, epochs, me, i)
        griddepcontrol_launch_dependents()
        while i < segment:
            epoch = epochs[i] + 1
            ll128_store_tiles(inputs, me, i, load(x, segment, i), epoch)
            cuda.syncwarp()  # all threads have read the counter
            if t & 31 == 0:
                epochs[i] = epoch
            words = combine(ll128_load_tiles(inputs, 0, n, i, epoch))
            ll128_store_tiles(results, me, i, copies(words), epoch)
            store(out, segment, i, ll128_load_tiles(results, 0, n, i, epoch))
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
        self.epochs = self.world.xp.zeros(segment, "uint32")

    def bind(self, x, out, in_place, dtype):
        n = self.world.n_ranks
        kernel, segment = two_shot_ll128_kernel(self.op, dtype.name, n), -(-tiles_of(x.nbytes) // n)
        x, out = self.wide(x, out, x.nbytes)
        return self.launch_tiles(kernel, segment, x, out, segment, self.inputs, self.results, self.epochs)


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
