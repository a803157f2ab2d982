"""Reduce-scatter by LL: each rank sends all others their segments, and each combines what it gets. The
fastest for small messages.

Segments  x is n_ranks segments, the k-th for rank k, each handled as words of its own: one may begin anywhere
Lines     lines[half, k], on every rank: the words of its segment of rank k's x, packed
          (``shmemkit.device.ll``). Written by rank k only, over NVLink
Counters  calls[c], local: how often chunk c, of a word for each thread of a block, has been sent; it gives
          the flag and the half. In device memory, so that a replayed graph counts on

  block b, for its chunks c = b, b + gridDim.x, ...; a thread for its word of each:
          1. for each other rank, from the next one on: store the word of its segment to lines[half, me] on
             it, with the flag
          2. add 1 to the chunk's counter
          3. for all ranks k, in their order: poll the word in lines[half, k], my own is in x, and combine it;
             store the result

They combine in the order of the ranks, so the bits are the same in every run.

No race: chunk c is always at the same place, and all ranks count it alike, whatever the lengths of the calls.
I write to half h of it again two calls with it later, and in the one between the chunks of all ranks have
come, which they send when their launches before have ended: they have read what half h held. out may be my
segment of x: it is sent to nobody, and a thread reads its word before it writes it. No deadlock: a block
sends all that it has to send before it waits; all blocks are resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll_load,
    ll_store,
    load_word,
    n_words,
    num_ranks,
    rank,
    reduction,
    store_word,
    symm_at,
)
from shmemkit.kernels.method import Method

BLOCKS = 2  # of a grid, at most, for each multiprocessor


@functools.cache
def ll_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    first, add, result = reduction(op, dtype)

    @cuda.jit
    def ll_reduce_scatter(x, out, lines, calls):
        """Combine the segments of this rank, of the `x` of all ranks, in `out`.

        x, out  uint64 or uint8 (the bytes of elements of `dtype`), 1-D, x n_ranks times as large; out may be
                x's segment of this rank
        lines   uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
        calls   uint64 (chunks of the capacity,), zeros at first
        grid    any number of blocks, one-dimensional, as the blocks are
        """
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n, size = rank(), num_ranks(), n_words(out)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        c = b
        while c * threads < size:
            i = c * threads + t
            if i < size:
                call = calls[c] + 1
                y = 1
                while y < n:
                    peer = me + y
                    if peer >= n:
                        peer -= n
                    word = load_word(x[peer * out.size : (peer + 1) * out.size], i)
                    ll_store(symm_at(lines, peer)[call & 1, me], i, word, call)
                    y += 1
            c += cuda.gridDim.x
        cuda.syncthreads()  # all threads have read the counters
        if t == 0:
            c = b
            while c * threads < size:
                calls[c] += 1
                c += cuda.gridDim.x
        cuda.syncthreads()
        mine = x[me * out.size : (me + 1) * out.size]
        c = b
        while c * threads < size:
            i = c * threads + t
            if i < size:
                call = calls[c]
                word = load_word(mine, i)
                total = first(word if me == 0 else ll_load(lines[call & 1, 0], i, call))
                k = 1
                while k < n:
                    total = add(total, word if me == k else ll_load(lines[call & 1, k], i, call))
                    k += 1
                store_word(out, i, result(total, n))
            c += cuda.gridDim.x

    return ll_reduce_scatter


class LL(Method):
    """The method "ll" of ``ReduceScatter``."""

    threads = 128

    def prepare(self, max_nbytes, op):
        world, n = self.world, self.world.n_ranks
        world.check_reach("reduce_scatter ll")
        self.op, words = op, max(1, -(-max_nbytes // (8 * n)))
        self.lines = self.zeros((2, n, 2 * words), "uint64", "reduce_scatter.ll.lines")
        self.calls = world.xp.zeros(-(-words // self.threads), "uint64")

    def bind(self, x, out, in_place, dtype):
        chunks = -(-out.nbytes // (8 * self.threads))
        grid = min(chunks, BLOCKS * self.world.backend.multiprocessors)
        return self.launch(ll_kernel(self.op, dtype.name), grid, x, out, self.lines, self.calls, pdl=True)


_lines, _calls = types.Array(types.uint64, 3, "C"), types.Array(types.uint64, 1, "C")
GPU_KERNELS = {
    f"ll_reduce_scatter[{op},{dtype},{words}]": (
        ll_kernel(op, dtype),
        (*[types.Array(words, 1, "C")] * 2, _lines, _calls),
    )
    for op, dtype, words in (
        ("sum", "bfloat16", types.uint64),
        ("sum", "float16", types.uint8),
        ("max", "float32", types.uint64),
        ("avg", "float64", types.uint64),
        ("prod", "int8", types.uint64),
    )
}
