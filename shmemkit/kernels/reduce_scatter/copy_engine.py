"""Reduce-scatter by copy engines: they scatter, each rank's segments to the ranks that they are for, and
blocks combine what has come. For large messages.

``shmemkit.kernels.copied_pieces`` has the protocol: segment k of x goes to rank k. When a part has come from
the last rank, this part of all of them is combined, in the order of the ranks: so the bits are the same in
every run. out may be my segment of x.

The first part of all segments is combined while the rest comes: all at the end would take longer than the
copies of the last segment. The shares are those that were fastest on four H200.
"""

import functools

from numba import cuda, types

from shmemkit.device import n_words, num_ranks, rank, reduction, store_word
from shmemkit.kernels.copied_pieces import SHARES, CopiedPieces, Step, cuts_of, in_rounds
from shmemkit.kernels.meeting import meet

from .rows import combining


@functools.cache
def reduction_kernel(op, dtype, n_ranks):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    _, _, result = reduction(op, dtype)
    one, four = combining(op, dtype, n_ranks)

    @cuda.jit(max_registers=128)  # of 512 threads; only of int8 as bytes some are spilled
    def combine_copied(mine, out, part, staged, at, stride, ready, calls):
        """Combine a piece of all ranks, when it is there, in `out`.

        mine, out  uint64 or uint8 (the bytes of elements of `dtype`), 1-D, of the same size: the piece of
                   this rank's own x, and of the output; may be the same
        part       words of a block's part: gridDim.x of them are out, or more
        staged     uint64, 1-D: rank k's piece begins with word at + k * stride
        ready      uint64 (n_ranks, gridDim.x), symmetric, zeros at first
        calls      uint64 (gridDim.x,), zeros at first
        grid       any, one-dimensional, as the blocks are; the same in all launches
        """
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n, size = rank(), num_ranks(), n_words(out)
        call = calls[b] + 1
        meet(ready, b, call)
        cuda.syncthreads()
        i, end = b * part + t, min((b + 1) * part, size)
        while i + 3 * threads < end:
            p, q, r, s = four(mine, staged, at, stride, me, n, i, threads)
            store_word(out, i, result(p, n))
            store_word(out, i + threads, result(q, n))
            store_word(out, i + 2 * threads, result(r, n))
            store_word(out, i + 3 * threads, result(s, n))
            i += 4 * threads
        while i < end:
            store_word(out, i, result(one(mine, staged, at, stride, me, n, i), n))
            i += threads
        if t == 0:
            calls[b] = call

    return combine_copied


class CopyEngine(CopiedPieces):
    """The method "copy_engine" of ``ReduceScatter``."""

    name = "reduce_scatter copy_engine"

    def prepare(self, max_nbytes, op):
        self.op = op
        self.prepare_pieces(max_nbytes)

    def bind(self, x, out, in_place, dtype):
        """-> run(stream)"""
        portions = in_rounds(cuts_of(out.size, out.itemsize, *SHARES), self.world.n_ranks)
        steps = self.steps(x, out, dtype, portions)
        return lambda stream: self.run(steps, stream, self.barrier)

    def steps(self, x, out, dtype, portions):
        """-> the Steps of these `portions`, (y, first, end): those from the last rank have kernels, which
        combine their part of `out`. As for ``bind``."""
        n, me, unit = self.world.n_ranks, self.world.rank, 8 // x.itemsize
        segments = [x[k * out.size : (k + 1) * out.size] for k in range(n)]
        kernel, (staged, stride) = reduction_kernel(self.op, dtype.name, n), self.staging("uint64")
        steps = []
        for y, first, end in portions:
            combine = None
            if y == n - 1:
                mine, its = segments[me][first:end], out[first:end]
                rows = self.part_of(its) // unit, staged, first // unit, stride
                combine = self.launch(kernel, self.blocks, mine, its, *rows, self.ready, self.calls)
            steps.append(Step(self.copies_of(segments, y, first, end), combine))
        return steps


_words = types.Array(types.uint64, 1, "C")
GPU_KERNELS = {
    f"combine_copied[{op},{dtype},{n},{words}]": (
        reduction_kernel(op, dtype, n),
        (
            *[types.Array(words, 1, "C")] * 2,
            *(types.int64, _words, types.int64, types.int64),
            *(types.Array(types.uint64, 2, "C"), _words),
        ),
    )
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, types.uint64),
        ("sum", "float16", 4, types.uint8),
        ("max", "float32", 8, types.uint64),
        ("avg", "float64", 2, types.uint64),
        ("prod", "int8", 16, types.uint64),
    )
}
