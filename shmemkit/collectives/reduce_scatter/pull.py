"""Reduce-scatter by pull: each rank loads its segment from the memory of all ranks, and combines it.

Segments  x is n_ranks segments, one for each rank. Each is handled as words of its own: a segment may begin
          anywhere. It is cut into as many parts as there are blocks; block b has part b of all segments
Signals   full[k, b], on every rank: the last epoch whose parts b of rank k may be loaded (only rank k sets
          it)
Epochs    epochs[b], local: of block b; the epoch selects the buffer. Device-resident, so graph-safe

If x is in private memory, the others cannot load it: ``pull_reduce_scatter_staged``, through

Staged    staged[buffer, k, b], on every rank: part b of the segment of its x that is for rank k

  block b:
          1. copy the parts b of the others' segments of x to staged[buffer, :, b]; syncthreads
          2. set full[me, b] on all others to the epoch                     release, sys: publishes the parts
          3. wait until full[k, b] >= epoch, for all k                      acquire, sys: sees their parts
          4. load part b from staged[buffer, me, b] of all ranks, in their order, and its own from x; combine
             it, and store the result

No race: the double-buffer lemma (docs/protocols.md), for part b. All ranks give it the same slot and count
its epochs alike, whatever the sizes of the calls. It needs no credits.

If x is symmetric (the same part of the same array on all ranks): ``pull_reduce_scatter``, which needs

Credits   credits[k, b], on every rank: the last epoch in which rank k has loaded its part b here (only rank k
          sets it)

  block b:
          1. set full[me, b] on all others to the epoch                     release, sys: publishes x
          2. wait until full[k, b] >= epoch, for all k                      acquire, sys: sees their x
          3. load part b of the own segment of x from all ranks, in their order; combine it, store the result;
             syncthreads
          4. set credits[me, b] on all others                               release, sys: after the loads
          5. wait until credits[k, b] >= epoch, for all k                   acquire, sys

No race: the peers load x after this rank has set full, which comes after all earlier work of the stream.
Later work of the stream comes after the credits of all peers for all parts.

In both, out may be the rank's own segment of x: no other rank loads it, and a thread loads its word before it
stores it. The two kernels share full and epochs, and may alternate. They combine in the order of the ranks:
the bits are the same in every run.

No deadlock: a block waits for the blocks of the same number on the other ranks. They do what it waits for
before their own wait for it. All blocks are co-resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import load_word, n_words, num_ranks, rank, reduction, store_word, symm_at

from ..block_barrier import block_barrier
from ..method import Method

PART = 1 << 12  # bytes that are worth a block
MAX_BLOCKS = 104  # of a grid: one per multiprocessor of A100


def _combining(op, dtype):
    """-> a device function: combine the words begin .. end - 1 of `out` by this block: the rank's own from
    `mine`, those of the others from `theirs`, symmetric, where they begin with word begin - skipped."""
    first, add, result = reduction(op, dtype)

    @cuda.jit(device=True)
    def combine(out, mine, theirs, begin, end, skipped):
        me, n = rank(), num_ranks()
        i = begin + cuda.threadIdx.x
        while i < end:
            word = load_word(mine, i)
            total = first(word if me == 0 else load_word(symm_at(theirs, 0), i - skipped))
            k = 1
            while k < n:
                total = add(total, word if me == k else load_word(symm_at(theirs, k), i - skipped))
                k += 1
            store_word(out, i, result(total, n))
            i += cuda.blockDim.x

    return combine


@functools.cache
def pull_kernels(op, dtype):
    """-> the kernels that reduce `dtype`, a name as "float16", by `op`, as "sum": of a symmetric x, and of
    any."""
    combine = _combining(op, dtype)

    @cuda.jit
    def pull_reduce_scatter(x, out, part, full, credits, epochs):
        """Combine the segments of this rank, of the `x` of all ranks, in `out`.

        x, out         uint64 or uint8 (the bytes of elements of `dtype`), 1-D, x n_ranks times as large; out
                       may be x's segment of this rank. x is symmetric
        part           words of a part: gridDim.x of them are out
        full, credits  uint64 (n_ranks, parts at most), symmetric, zeros at first
        epochs         uint64 (parts at most,), zeros at first
        grid           parts, one-dimensional, as the blocks are
        """
        b, me, size = cuda.blockIdx.x, rank(), n_words(out)
        epoch = epochs[b] + 1
        block_barrier(full, b, epoch)
        cuda.syncthreads()
        segment = x[me * out.size : (me + 1) * out.size]
        combine(out, segment, segment, min(b * part, size), min((b + 1) * part, size), 0)
        cuda.syncthreads()
        block_barrier(credits, b, epoch)
        if cuda.threadIdx.x == 0:
            epochs[b] = epoch

    @cuda.jit
    def pull_reduce_scatter_staged(x, out, part, staged, full, epochs):
        """The same of an x that need not be symmetric. `staged` is uint64 (2, n_ranks, parts at most, words
        of a part at most), symmetric; the others as of `pull_reduce_scatter`."""
        b, me, n, size = cuda.blockIdx.x, rank(), num_ranks(), n_words(out)
        epoch = epochs[b] + 1
        buffer = epoch & 1
        begin, end = min(b * part, size), min((b + 1) * part, size)
        i = begin + cuda.threadIdx.x
        while i < end:
            y = 1
            while y < n:
                peer = me + y
                if peer >= n:
                    peer -= n
                word = load_word(x[peer * out.size : (peer + 1) * out.size], i)
                staged[buffer, peer, b, i - begin] = word
                y += 1
            i += cuda.blockDim.x
        cuda.syncthreads()
        block_barrier(full, b, epoch)
        cuda.syncthreads()
        combine(out, x[me * out.size : (me + 1) * out.size], staged[buffer, me, b], begin, end, begin)
        if cuda.threadIdx.x == 0:
            epochs[b] = epoch

    return pull_reduce_scatter, pull_reduce_scatter_staged


class Pull(Method):
    """The method "pull" of ``ReduceScatter``."""

    def prepare(self, max_nbytes, op):
        world, n = self.world, self.world.n_ranks
        world.check_reach("reduce_scatter pull")
        self.op, words = op, max(1, -(-max_nbytes // (8 * n)))
        self.blocks = max(1, min(MAX_BLOCKS, -(-8 * words // PART)))
        room = max(min(PART // 8, words), -(-words // self.blocks)) + 15 & -16
        self.staged = self.empty((2, n, self.blocks, room), "uint64", "reduce_scatter.pull.staged")
        self.full = self.zeros((n, self.blocks), "uint64", "reduce_scatter.pull.full")
        self.credits = self.zeros((n, self.blocks), "uint64", "reduce_scatter.pull.credits")
        self.epochs = world.xp.zeros(self.blocks, "uint64")

    def bind(self, x, out, in_place, dtype):
        words = -(-out.nbytes // 8)
        part = -(-words // min(self.blocks, -(-8 * words // PART))) + 15 & -16
        blocks, (direct, staged) = -(-words // part), pull_kernels(self.op, dtype.name)
        if self.world.is_symmetric(x):
            return self.launch(direct, blocks, x, out, part, self.full, self.credits, self.epochs)
        return self.launch(staged, blocks, x, out, part, self.staged, self.full, self.epochs)


def _signatures(words):
    x, signals, epochs = (
        types.Array(t, d, "C") for t, d in ((words, 1), (types.uint64, 2), (types.uint64, 1))
    )
    staged = types.Array(types.uint64, 4, "C")
    return (x, x, types.int64, signals, signals, epochs), (x, x, types.int64, staged, signals, epochs)


GPU_KERNELS = {
    f"{kernel.py_func.__name__}[{op},{dtype},{words}]": (kernel, signature)
    for op, dtype, words in (
        ("sum", "bfloat16", types.uint64),
        ("sum", "float16", types.uint8),
        ("max", "float32", types.uint64),
        ("avg", "float64", types.uint64),
        ("prod", "int8", types.uint64),
    )
    for kernel, signature in zip(pull_kernels(op, dtype), _signatures(words), strict=True)
}
