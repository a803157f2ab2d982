"""Reduce-scatter by pull: each rank loads its segment from the memory of all ranks, and combines it.

Segments  x is n_ranks segments, the k-th for rank k, each handled as words of its own: one may begin
          anywhere. A segment is cut into as many parts as there are blocks; part b of all is block b's
Signals   ready[k, b], on every rank: the number of the last call whose parts b of rank k may be loaded (only
          rank k sets it)
Counters  calls[b], local: how many calls block b has taken part in: the number of a call, and the half. In
          device memory, so that a replayed graph counts on

Of an x in private memory, which others cannot load, ``pull_reduce_scatter_staged``, through

Staged    staged[half, k, b], on every rank: part b of the segment of its x that is rank k's

  block b:
          1. copy the parts b of the others' segments of x to staged[half, :, b]; syncthreads
          2. set ready[me, b] on all others to the number of this call      release, sys: publishes the parts
          3. wait until ready[k, b] here is at least that, for all k        acquire, sys: sees theirs
          4. load part b from staged[half, me, b] of all ranks, in their order, my own from x; combine it, and
             store the result

No race: part b is always at the same place, and all ranks count it alike, whatever the lengths of the calls.
Half h of it is written again two calls with block b later. In the one between, ready of all ranks has come,
which they set in launches that begin after their launches before have ended: they have read what half h held.
Nobody tells that it has read.

Of a symmetric x (the same part of the same array on all ranks), ``pull_reduce_scatter``, which needs

Done      done[k, b], on every rank: the number of the last call in which rank k has loaded its part b here
          (only rank k sets it)

  block b:
          1. set ready[me, b] on all others to the number of this call      release, sys: publishes x
          2. wait until ready[k, b] here is at least that, for all k        acquire, sys: sees theirs
          3. load part b of my segment of x from all ranks, in their order; combine it, store the result;
             syncthreads
          4. set done[me, b] on all others                                  release, sys: after my loads
          5. wait until done[k, b] here is at least that, for all k         acquire, sys

No race: the peers load my x after my ready of this call, which comes after all that my stream did before;
what comes later on it is after done of all parts of all peers.

In both, out may be my segment of x: only I load it, and a thread loads its word before it stores it. They
share signals and counters, and may take turns. They combine in the order of the ranks, so the bits are the
same in every run. No deadlock: what a block waits for, the blocks of the same number on the other ranks do
before they wait for it in turn; all blocks are resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import load_word, n_words, num_ranks, rank, reduction, store_word, symm_at

from ..block_barrier import block_barrier
from ..method import Method

PART = 1 << 12  # bytes that are worth a block
MAX_BLOCKS = 104  # of a grid: one per multiprocessor of A100


def _combining(op, dtype):
    """-> a device function: combine the words begin .. end - 1 of `out` by my block, those of this rank from
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
    def pull_reduce_scatter(x, out, part, ready, done, calls):
        """Combine the segments of this rank, of the `x` of all ranks, in `out`.

        x, out       uint64 or uint8 (the bytes of elements of `dtype`), 1-D, x n_ranks times as large; out
                     may be x's segment of this rank. x is symmetric
        part         words of a part: gridDim.x of them are out
        ready, done  uint64 (n_ranks, parts at most), symmetric, zeros at first
        calls        uint64 (parts at most,), zeros at first
        grid         parts, one-dimensional, as the blocks are
        """
        b, me, size = cuda.blockIdx.x, rank(), n_words(out)
        call = calls[b] + 1
        block_barrier(ready, b, call)
        cuda.syncthreads()
        segment = x[me * out.size : (me + 1) * out.size]
        combine(out, segment, segment, min(b * part, size), min((b + 1) * part, size), 0)
        cuda.syncthreads()
        block_barrier(done, b, call)
        if cuda.threadIdx.x == 0:
            calls[b] = call

    @cuda.jit
    def pull_reduce_scatter_staged(x, out, part, staged, ready, calls):
        """The same of an x that need not be symmetric. `staged` is uint64 (2, n_ranks, parts at most, words
        of a part at most), symmetric; the others as of `pull_reduce_scatter`."""
        b, me, n, size = cuda.blockIdx.x, rank(), num_ranks(), n_words(out)
        call = calls[b] + 1
        half = call & 1
        begin, end = min(b * part, size), min((b + 1) * part, size)
        i = begin + cuda.threadIdx.x
        while i < end:
            y = 1
            while y < n:
                peer = me + y
                if peer >= n:
                    peer -= n
                word = load_word(x[peer * out.size : (peer + 1) * out.size], i)
                staged[half, peer, b, i - begin] = word
                y += 1
            i += cuda.blockDim.x
        cuda.syncthreads()
        block_barrier(ready, b, call)
        cuda.syncthreads()
        combine(out, x[me * out.size : (me + 1) * out.size], staged[half, me, b], begin, end, begin)
        if cuda.threadIdx.x == 0:
            calls[b] = call

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
        self.ready = self.zeros((n, self.blocks), "uint64", "reduce_scatter.pull.ready")
        self.done = self.zeros((n, self.blocks), "uint64", "reduce_scatter.pull.done")
        self.calls = world.xp.zeros(self.blocks, "uint64")

    def bind(self, x, out, in_place, dtype):
        words = -(-out.nbytes // 8)
        part = -(-words // min(self.blocks, -(-8 * words // PART))) + 15 & -16
        blocks, (direct, staged) = -(-words // part), pull_kernels(self.op, dtype.name)
        if self.world.is_symmetric(x):
            return self.launch(direct, blocks, x, out, part, self.ready, self.done, self.calls)
        return self.launch(staged, blocks, x, out, part, self.staged, self.ready, self.calls)


def _signatures(words):
    x, signals, calls = (
        types.Array(t, d, "C") for t, d in ((words, 1), (types.uint64, 2), (types.uint64, 1))
    )
    staged = types.Array(types.uint64, 4, "C")
    return (x, x, types.int64, signals, signals, calls), (x, x, types.int64, staged, signals, calls)


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
