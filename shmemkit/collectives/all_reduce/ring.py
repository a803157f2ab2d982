"""All-reduce around a ring: each rank sends to the next rank only. A reduce phase goes along the ranks, then
a broadcast phase. It uses NVSHMEM's put_signal and runs on any nodes. It takes 2 n - 2 hops, one after
another, so it is for arrays of many chunks.

Partial totals travel: what the ranks before have combined, word by word (``partial_results.py``). Totals of
float16, bfloat16 and float8 travel as float32, in two or four times the bytes, so only results are rounded,
once.

Chunks    the array is cut into chunks, which are dealt out to the blocks
Partials  partials[c], on every rank: the total of chunk c over the ranks before; the rank then adds its own.
          Written by the rank before and by the rank itself; the network reads it
Results   results[c], on every rank: chunk c, combined. Written by the rank before, on the last rank by the
          rank itself; the network reads it
Signals   partials_full[c] and results_full[c], on every rank: the last epoch whose partials[c], and whose
          results[c], are here. Set by the rank before, with the data
Epochs    epochs[c], local: of chunk c. Device-resident, so graph-safe

  block b, for each of its chunks c = b, b + gridDim.x, ...:
          1. except on rank 0: wait for partials_full[c]; syncthreads        acquire, also of the network
          2. combine partials[c] with the own chunk of x (rank 0 takes its chunk alone), into partials[c];
             the last rank: into results[c] and its output
          3. put partials[c], with partials_full[c], to the next rank; the last rank: put results[c], with
             results_full[c], to rank 0                                      the signal follows the data
  then, except on the last rank, for each of them:
          4. wait for results_full[c]; syncthreads                           acquire, also of the network
          5. put results[c], with results_full[c], to the next rank, unless that is the last; copy it to the
             output
  at the end: add 1 to the epochs

Each chunk has its own signal in each phase: several messages to one rank are in flight at once, and arrive in
any order. If one signal counted them, a later chunk could be taken for an earlier one.

One rank combines an element, in the order of the ranks: all ranks get the same bits, in every run, and those
of "one_shot".

No race, without a double buffer: a result acknowledges all partials.

- A rank that has the result of chunk c knows that all ranks have added their values. So the next rank has
  read its partials[c], and the puts from the partials[c] of both have been received: in the next epoch the
  rank may write both.
- When a rank has the result of the next epoch of chunk c, all ranks have begun that epoch, so their previous
  launches have ended: they have copied results[c], and all puts from there have been received. So the rank
  may write the results[c] of the next rank and, on the last rank, its own.
- No rank calls quiet, yet no two puts with one signal are in flight at once. All ranks give chunk c the same
  slot and count its epochs alike, whatever the sizes of the calls.
- x may be out: a block has read a chunk of x before it writes it.

No deadlock: in the first loop, rank 0 waits for no rank, and each other rank for the first loop of the rank
before. In the second loop, rank 0 waits for the first loop of the last rank, and each other rank for the rank
before. All ranks' blocks have the same chunks, in the same order, and all are co-resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    ComparisonType,
    SignalOp,
    load_word,
    n_words,
    num_ranks,
    put_signal_nbi_block,
    rank,
    reduction,
    signal_wait_until,
    store_word,
)

from ..method import Method
from ..partial_results import shares, totals

SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


class InChunks(Method):
    """A method that combines chunks. A subclass has

    least, most  words of a chunk: 4 to 16 KB
    blocks       of the grid
    chunks       of a block, if they are not too small
    wanted       chunks, if they are neither too small nor too large
    """

    least, most, chunks = 1 << 9, 1 << 11, 8
    blocks: int
    wanted: int

    def chunks_of(self, words):
        """-> (words of a chunk, chunks), for `words` words. Both grow with `words`."""
        chunk = min(self.most, max(self.least, -(-words // self.wanted) + 15 & -16))
        return chunk, max(1, -(-words // chunk))

    def most_chunks(self, words):
        """The most chunks of `words` words or fewer."""
        return max(1, -(-words // self.most), min(self.wanted, -(-words // self.least)))


@functools.cache
def ring_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    first, add, result = reduction(op, dtype)
    words, load_total, store_total = totals(op, dtype)

    @cuda.jit
    def ring_all_reduce(x, out, chunk, partials, results, partials_full, results_full, epochs):
        """Combine the `x` of all ranks in `out`.

        x, out    uint64 or uint8 (the bytes of elements of `dtype`), 1-D, of the same size; may be the same
        chunk     words of a chunk
        partials  uint64 (chunks at most, twice the words of a chunk at most), symmetric
        results   uint64 (chunks at most, words of a chunk at most), symmetric
        partials_full, results_full
                  uint64 (chunks at most,), symmetric, zeros at first
        epochs    as partials_full, not symmetric
        grid      any number of blocks, one-dimensional, as the blocks are; the same on all ranks
        """
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, last, size = rank(), num_ranks() - 1, n_words(x)
        to = me + 1 if me < last else 0
        c = b
        while c * chunk < size:
            begin, epoch = c * chunk, epochs[c] + 1
            length = min(chunk, size - begin)
            if me > 0:
                if t == 0:
                    signal_wait_until(partials_full[c:], GE, epoch)  # 1
                cuda.syncthreads()
            i = t
            while i < length:  # 2
                word = load_word(x, begin + i)
                total = first(word) if me == 0 else add(load_total(partials[c], i, length), word)
                if me < last:
                    store_total(partials[c], i, length, total)
                else:
                    word = result(total, last + 1)
                    store_word(out, begin + i, word)
                    results[c, i] = word
                i += threads
            if me < last:  # 3; such a put begins with a barrier of the block
                mine = partials[c, : words * length]
                put_signal_nbi_block(mine, mine, partials_full[c:], epoch, SET, to)
            elif last > 0:
                mine = results[c, :length]
                put_signal_nbi_block(mine, mine, results_full[c:], epoch, SET, to)
            c += cuda.gridDim.x
        c = b
        while me < last and c * chunk < size:
            begin, epoch = c * chunk, epochs[c] + 1
            length = min(chunk, size - begin)
            if t == 0:
                signal_wait_until(results_full[c:], GE, epoch)  # 4
            cuda.syncthreads()
            if to < last:
                mine = results[c, :length]
                put_signal_nbi_block(mine, mine, results_full[c:], epoch, SET, to)  # 5
            i = t
            while i < length:
                store_word(out, begin + i, results[c, i])
                i += threads
            c += cuda.gridDim.x
        _count(epochs, b, chunk, size)

    return ring_all_reduce


@cuda.jit(device=True)
def _count(epochs, b, chunk, size):
    """Add 1 to the counters of the chunks of block b."""
    cuda.syncthreads()  # all threads have read them
    if cuda.threadIdx.x == 0:
        while b * chunk < size:
            epochs[b] += 1
            b += cuda.gridDim.x


class Ring(InChunks):
    """The method "ring" of ``AllReduce``: a chunk a hop."""

    blocks = 104  # one per multiprocessor of A100

    counts = staticmethod(shares)

    @property
    def wanted(self):
        return self.blocks * self.chunks

    def prepare(self, max_nbytes, op):
        self.op, words = op, max(1, -(-max_nbytes // 8))
        room, chunks = self.chunks_of(words)[0], self.most_chunks(words)
        self.partials = self.empty((chunks, 2 * room), "uint64", "all_reduce.ring.partials")
        self.results = self.empty((chunks, room), "uint64", "all_reduce.ring.results")
        self.partials_full = self.zeros(chunks, "uint64", "all_reduce.ring.partials_full")
        self.results_full = self.zeros(chunks, "uint64", "all_reduce.ring.results_full")
        self.epochs = self.world.xp.zeros(chunks, "uint64")

    def bind(self, x, out, in_place, dtype):
        times = shares(dtype.name)
        chunk, chunks = self.chunks_of(times * (x.nbytes + 7 >> 3))
        args = x, out, chunk // times, self.partials, self.results
        args += self.partials_full, self.results_full, self.epochs
        return self.launch(ring_kernel(self.op, dtype.name), min(chunks, self.blocks), *args)


_x = {words: (types.Array(words, 1, "C"),) * 2 for words in (types.uint64, types.uint8)}
_two, _one = (types.Array(types.uint64, d, "C") for d in (2, 1))
GPU_KERNELS = {
    f"ring_all_reduce[{op},{dtype},{words}]": (
        ring_kernel(op, dtype),
        (*_x[words], types.int64, _two, _two, _one, _one, _one),
    )
    for op, dtype, words in (
        ("sum", "bfloat16", types.uint64),
        ("sum", "float16", types.uint8),
        ("max", "float32", types.uint64),
        ("avg", "float64", types.uint64),
        ("prod", "int8", types.uint64),
        ("sum", "float8_e4m3fn", types.uint64),
        ("avg", "float8_e5m2", types.uint8),
    )
}
