"""All-reduce in two shots: each rank combines one segment, which it loads from the memory of all ranks, and
stores the result in the memory of all. For larger messages.

Segments  the array is cut into n_ranks segments, one for each rank; a segment is cut into as many parts as
          there are blocks. Block b has part b of all segments
Inputs    inputs[k, b], on every rank: part b of segment k of its array, for rank k to load
Results   results[k, b], on every rank: part b of segment k, combined. Written by rank k only
Signals   inputs_full[k, b] and results_full[k, b], on every rank: the last epoch whose inputs on rank k, and
          whose results of rank k here, are complete (only rank k sets them)
Epochs    epochs[b], local: of block b. Device-resident, so graph-safe

  block b:
          1. copy the parts b of x to inputs[:, b]; syncthreads
          2. set inputs_full[me, b] on all others to the epoch            release, sys: publishes the parts
          3. wait until inputs_full[k, b] >= epoch, for all k             acquire, sys: sees their parts
          4. load inputs[me, b] of all ranks, in their order, and combine them; store the result to
             results[me, b] of all others, and to the own output; syncthreads
          5. set results_full[me, b] on all others                        release, sys: publishes the result
          6. for each other rank k: wait until results_full[k, b] >= epoch    acquire, sys
             and copy results[k, b] to the output

One rank combines an element, in the order of the ranks: all ranks get the same bits, in every run.

No race, without a double buffer. All ranks give part b the same slot and count its epochs alike, whatever the
sizes of the calls. A rank writes its inputs again in the next epoch, after results_full of all ranks has
come, which they set after they have read the inputs. It writes the results of other ranks after inputs_full
of all ranks has come in the next epoch. They set it in launches that begin after their previous launches have
ended: they have read the old results. x may be out: each block copies its parts of x before it writes those
of out.

No deadlock: a block waits for the blocks of the same number on the other ranks. They do what it waits for
before their own wait for it, in the order of the steps. All blocks are co-resident.
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
    def two_shot_all_reduce(x, out, segment, part, inputs, results, inputs_full, results_full, epochs):
        """Combine the `x` of all ranks in `out`.

        x, out           uint64 or uint8 (the bytes of elements of `dtype`), 1-D, of the same size; may be the
                         same
        segment, part    words of a segment, n_ranks of which are x, and of a part, gridDim.x of which are a
                         segment
        inputs, results  uint64 (n_ranks, parts at most, words of a part at most), symmetric
        inputs_full, results_full
                         uint64 (n_ranks, parts at most), symmetric, zeros at first
        epochs           uint64 (parts at most,), zeros at first
        grid             parts, one-dimensional, as the blocks are
        """
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n, size = rank(), num_ranks(), n_words(x)
        epoch = epochs[b] + 1
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
        block_barrier(inputs_full, b, epoch)  # 2 and 3
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
        block_barrier(results_full, b, epoch)  # 5 and 6
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
            epochs[b] = epoch

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
        self.inputs_full = self.zeros((n, self.blocks), "uint64", "all_reduce.two_shot.inputs_full")
        self.results_full = self.zeros((n, self.blocks), "uint64", "all_reduce.two_shot.results_full")
        self.epochs = world.xp.zeros(self.blocks, "uint64")

    def bind(self, x, out, in_place, dtype):
        segment = -(-(x.nbytes + 7 >> 3) // self.world.n_ranks)
        blocks = min(self.blocks, -(-8 * segment // PART))
        part = -(-segment // blocks) + 15 & -16
        args = (
            x,
            out,
            segment,
            part,
            self.inputs,
            self.results,
            self.inputs_full,
            self.results_full,
            self.epochs,
        )
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
