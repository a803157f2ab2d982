"""All-reduce in two shots: each rank combines one segment of all ranks' arrays, which it loads from their
memory, and stores the result in the memory of all. For larger messages.

Segments  the array is cut into n_ranks segments, rank k's being the k-th; a segment into as many parts as
          there are blocks. Part b of all segments is block b's
Inputs    inputs[k, b], on every rank: part b of segment k of its array, for rank k to load
Results   results[k, b], on every rank: part b of segment k, combined. Written by rank k only
Signals   ready[k, b] and done[k, b], on every rank: the number of the last call whose parts b of rank k's
          inputs are there, and whose result is here (only rank k sets them)
Counters  calls[b], local: how many calls block b has taken part in: the number of a call. In device memory,
          so that a replayed graph counts on

  block b:
          1. copy the parts b of x to inputs[:, b]; syncthreads
          2. set ready[me, b] on all others to the number of this call      release, sys: publishes the parts
          3. wait until ready[k, b] here is at least that, for all k        acquire, sys: sees theirs
          4. load inputs[me, b] of all ranks, in their order, and combine them; store the result to
             results[me, b] of all others, and to my output; syncthreads
          5. set done[me, b] on all others                                  release, sys: publishes the result
          6. for each other rank k: wait until done[k, b] here is that      acquire, sys
             and copy results[k, b] to the output

Only one rank combines an element, in the order of the ranks: all ranks have the same bits, in every run.

No race, with nothing double-buffered: part b is always at the same place, and all ranks count it alike,
whatever the lengths of the calls. I write my inputs again in the next call, when done of all ranks has come
in this one, which they set after they have read them; and the results of others after ready of all ranks in
the next call, which they set in launches that begin after their launches before have ended: they have read
what was there. x may be out: each block has copied its parts of x before it writes the same of out. No
deadlock: what a block waits for, the blocks of the same number on the other ranks do before they wait for
that of others, in the order of the steps; all blocks are resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import load_word, n_words, num_ranks, rank, reduction, store_word, symm_at

from ..block_barrier import block_barrier
from ..method import Method

PART = 1 << 12  # bytes that are worth a block
MAX_BLOCKS = 104  # of a grid: one per multiprocessor of A100


@functools.cache
def two_shot_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    first, add, result = reduction(op, dtype)

    @cuda.jit
    def two_shot_all_reduce(x, out, segment, part, inputs, results, ready, done, calls):
        """Combine the `x` of all ranks in `out`.

        x, out           uint64 or uint8 (the bytes of elements of `dtype`), 1-D, of the same size; may be the
                         same
        segment, part    words of a segment, n_ranks of which are x, and of a part, gridDim.x of which are a
                         segment
        inputs, results  uint64 (n_ranks, parts at most, words of a part at most), symmetric
        ready, done      uint64 (n_ranks, parts at most), symmetric, zeros at first
        calls            uint64 (parts at most,), zeros at first
        grid             parts, one-dimensional, as the blocks are
        """
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n, size = rank(), num_ranks(), n_words(x)
        call = calls[b] + 1
        begin = min(b * part, segment)
        length = min(part, segment - begin)
        k = 0
        while k < n:  # 1
            i, end = t, min(length, size - k * segment - begin)
            while i < end:
                inputs[k, b, i] = load_word(x, k * segment + begin + i)
                i += threads
            k += 1
        cuda.syncthreads()
        block_barrier(ready, b, call)  # 2 and 3
        cuda.syncthreads()
        i, mine = t, me * segment + begin
        while i < min(length, size - mine):  # 4
            total = first(symm_at(inputs, 0)[me, b, i])
            k = 1
            while k < n:
                total = add(total, symm_at(inputs, k)[me, b, i])
                k += 1
            word = result(total, n)
            k = 1
            while k < n:
                other = me + k
                if other >= n:
                    other -= n
                symm_at(results, other)[me, b, i] = word
                k += 1
            store_word(out, mine + i, word)
            i += threads
        cuda.syncthreads()
        block_barrier(done, b, call)  # 5 and 6
        cuda.syncthreads()
        k = 1
        while k < n:
            other = me + k
            if other >= n:
                other -= n
            i, end = t, min(length, size - other * segment - begin)
            while i < end:
                store_word(out, other * segment + begin + i, results[other, b, i])
                i += threads
            k += 1
        if t == 0:
            calls[b] = call

    return two_shot_all_reduce


class TwoShot(Method):
    """The method "two_shot" of ``AllReduce``."""

    def prepare(self, max_nbytes, op):
        world, n = self.world, self.world.n_ranks
        world.check_reach("all_reduce two_shot")
        self.op, words = op, max(1, -(-max_nbytes // 8))
        segment = -(-words // n)
        self.blocks = max(1, min(MAX_BLOCKS, -(-8 * segment // PART)))
        room = max(min(PART // 8, segment), -(-segment // self.blocks)) + 15 & -16
        shape = n, self.blocks, room
        self.inputs = self.empty(shape, "uint64", "all_reduce.two_shot.inputs")
        self.results = self.empty(shape, "uint64", "all_reduce.two_shot.results")
        self.ready = self.zeros((n, self.blocks), "uint64", "all_reduce.two_shot.ready")
        self.done = self.zeros((n, self.blocks), "uint64", "all_reduce.two_shot.done")
        self.calls = world.xp.zeros(self.blocks, "uint64")

    def bind(self, x, out, in_place, dtype):
        segment = -(-(x.nbytes + 7 >> 3) // self.world.n_ranks)
        blocks = min(self.blocks, -(-8 * segment // PART))
        part = -(-segment // blocks) + 15 & -16
        args = x, out, segment, part, self.inputs, self.results, self.ready, self.done, self.calls
        return self.launch(two_shot_kernel(self.op, dtype.name), blocks, *args)


_x = {words: (types.Array(words, 1, "C"),) * 2 for words in (types.uint64, types.uint8)}
_three, _two, _one = (types.Array(types.uint64, d, "C") for d in (3, 2, 1))
GPU_KERNELS = {
    f"two_shot_all_reduce[{op},{dtype},{words}]": (
        two_shot_kernel(op, dtype),
        (*_x[words], types.int64, types.int64, _three, _three, _two, _two, _one),
    )
    for op, dtype, words in (
        ("sum", "bfloat16", types.uint64),
        ("sum", "float16", types.uint8),
        ("max", "float32", types.uint64),
        ("avg", "float64", types.uint64),
        ("prod", "int8", types.uint64),
    )
}
