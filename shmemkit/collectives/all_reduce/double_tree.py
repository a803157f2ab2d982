"""All-reduce in two binary trees, up to the root and down again. For many ranks: it takes 2 log2(n) hops at
most, a ring 2 n - 2. Each rank is an inner node of one tree only, and a leaf of the other. Each tree carries
half of the data, so all ranks send about as much (Sanders, Speck and Traeff, 2009). It uses NVSHMEM's
put_signal and runs on any nodes.

Trees     two, of all ranks; ``position`` gives parent and children. An inner node has one child or two
Chunks    the array is cut into chunks: even ones go through tree 0, odd ones through tree 1
Partials  partials[row, c], on every rank: partial totals (``partial_results.py``). The first child's row gets
          that child's total of chunk c; the rank then replaces it by its own total, which includes both
          children. The second child's row gets that child's total. The network reads the first row
Results   results[c], on every rank: chunk c, combined. Written by the parent, on the root by the rank itself;
          the network reads it
Signals   partials_full[0, c] and partials_full[1, c], set by the first and the second child; results_full[c],
          set by the parent. On every rank: the last epoch whose data are there. Each signal comes with its
          data
Epochs    epochs[0, c] and epochs[1, c], local: of chunk c, upwards and downwards. Device-resident, so
          graph-safe

  block (b, tree, up), for each chunk c = 2 b + tree, 2 (b + gridDim.x) + tree, ...:
          1. wait for partials_full[0, c] and partials_full[1, c], if there are such children; syncthreads
                                                                             acquire, also of the network
          2. combine the first child's total, the own chunk of x and the second child's total, in this order,
             into the first child's row; the root: into results[c] and its output
          3. put that row, with partials_full[0 or 1, c], to the parent; the root: put results[c], with
             results_full[c], to its children                                the signal follows the data
  block (b, tree, down), for each of these chunks, except on the root:
          4. wait for results_full[c]; syncthreads                           acquire, also of the network
          5. put results[c], with results_full[c], to the children; copy it to the output
  at the end, each block adds 1 to its epochs

Different blocks go up and down, so later chunks go up while earlier ones come down. The second child's row
has room for half of the chunks: a rank has children in one tree only, and c >> 1 counts its chunks.

Order: (first child's + own) + second child's, for each subtree. In tree 0 this is the order of the ranks, in
tree 1 that of their positions. Only the root computes a result: all ranks get the same bits, in every run.
Rounding may give other bits than other methods.

No race, without a double buffer: a result acknowledges all partials.

- A rank that has the result of chunk c knows that all ranks have added their values, and that all totals have
  been received on the way to the root: all rows of chunk c have been read. So its child, which sends its next
  total in its next launch, may write the row, and so may the rank.
- When the root has all inputs of the next result of chunk c, all other ranks have begun the next epoch, so
  their previous launches have ended: they have received and copied results[c]. So the root may write its own
  results[c] and its children's. The same holds for each node and its subtree.
- No rank calls quiet, yet no two puts with one signal are in flight at once. All ranks give chunk c the same
  slot and tree, and count its epochs alike, whatever the sizes of the calls.
- x may be out: a result comes down after the rank's values have been received on the way up.

No deadlock: blocks that go up wait, in the end, for leaves, which wait for no rank; all ranks take the chunks
in the same order. Blocks that go down wait for blocks that go up, never the reverse. All blocks are
co-resident.
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
    reduction,
    signal_wait_until,
    store_word,
)

from ..partial_results import floats, half, high_floats, joined, low_floats, shares, totals
from .ring import InChunks

SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


def position(rank, n_ranks, tree):
    """-> (parent, side, first, second) of `rank` in tree 0 or 1: ranks, -1 where there is none; side 0 if it
    is its parent's first child, 1 if its second.

    Tree 0 has the ranks in order, from left to right, numbered from 1: odd numbers are leaves; a number with
    more zeros at its end is higher, and the root is the largest power of two. Tree 1 is its mirror image, if
    the ranks are even in number; else it is shifted by one: those who were inner nodes are leaves.
    """
    mirrored = n_ranks % 2 == 0
    number = rank + 1 if tree == 0 else n_ranks - rank if mirrored else rank or n_ranks
    low = number & -number
    up = number - low | 2 * low
    if up > n_ranks:
        up = number - low  # 0: it is the root
    first = number - low // 2 if low > 1 else 0
    step = low // 2
    while number + step > n_ranks:
        step //= 2
    second = number + step if step else 0

    def rank_of(number):
        if number == 0:
            return -1
        return number - 1 if tree == 0 else n_ranks - number if mirrored else number % n_ranks

    return rank_of(up), int(number > up), rank_of(first), rank_of(second)


def merging(op, dtype):
    """-> ``merge(total, row, i, length)``, for kernels: a total, combined with the i-th in `row`, as ``load``
    of ``totals(op, dtype)`` has it."""
    words = totals(op, dtype).words
    if words == 1:
        add = reduction(op, dtype).add

        @cuda.jit(device=True)
        def merge(total, row, i, length):
            return add(total, row[i])  # the word of a total is exact

        return merge
    first, add, word_of = reduction("sum" if op == "avg" else op, "float32")

    @cuda.jit(device=True)
    def merge_floats(total, row, i, length):
        low = add(first(low_floats(total)), row[i])
        high = add(first(high_floats(total)), row[length + i])
        return floats(word_of(low, 1), word_of(high, 1))

    @cuda.jit(device=True)
    def merge_eight(total, row, i, length):
        return joined(
            merge_floats(half(total, 0), row, i, length),
            merge_floats(half(total, 1), row, 2 * length + i, length),
        )

    return merge_eight if words == 4 else merge_floats


@functools.cache
def double_tree_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    first_of, add, result = reduction(op, dtype)
    words, load_total, store_total = totals(op, dtype)
    merge = merging(op, dtype)

    @cuda.jit
    def double_tree_all_reduce(
        x, out, chunk, positions, partials, results, partials_full, results_full, epochs
    ):
        """Combine the `x` of all ranks in `out`.

        x, out         uint64 or uint8 (the bytes of elements of `dtype`), 1-D, of the same size; may be the
                       same
        chunk          words of a chunk
        positions      int64 (2, 4): ``position`` of this rank in both trees
        partials       uint64 (chunks at most, and half of that, rounded up; twice the words of a chunk at
                       most), symmetric
        results        uint64 (chunks at most, words of a chunk at most), symmetric
        partials_full  uint64 (2, chunks at most), symmetric, zeros at first
        results_full   uint64 (chunks at most,), symmetric, zeros at first
        epochs         as partials_full, not symmetric
        grid           (any number, 2 trees, 2: up and down), one-dimensional blocks; the same on all ranks
        """
        t, threads, tree, down = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockIdx.y, cuda.blockIdx.z
        size, seconds, begin_with = n_words(x), results_full.size, 2 * cuda.blockIdx.x + tree
        parent, side, first, second = (
            positions[tree, 0],
            positions[tree, 1],
            positions[tree, 2],
            positions[tree, 3],
        )
        c = begin_with
        while down == 0 and c * chunk < size:
            begin, epoch = c * chunk, epochs[0, c] + 1
            length = min(chunk, size - begin)
            if t == 0:  # 1
                if first >= 0:
                    signal_wait_until(partials_full[0, c:], GE, epoch)
                if second >= 0:
                    signal_wait_until(partials_full[1, c:], GE, epoch)
            cuda.syncthreads()
            i = t
            while i < length:  # 2
                word = load_word(x, begin + i)
                total = first_of(word) if first < 0 else add(load_total(partials[c], i, length), word)
                if second >= 0:
                    total = merge(total, partials[seconds + (c >> 1)], i, length)
                if parent >= 0:
                    store_total(partials[c], i, length, total)
                else:
                    word = result(total, num_ranks())
                    store_word(out, begin + i, word)
                    results[c, i] = word
                i += threads
            if parent >= 0:  # 3; such a put begins with a barrier of the block
                row = c if side == 0 else seconds + (c >> 1)
                there, mine = partials[row, : words * length], partials[c, : words * length]
                put_signal_nbi_block(there, mine, partials_full[side, c:], epoch, SET, parent)
            else:
                _to_children(results[c, :length], results_full[c:], epoch, first, second)
            c += 2 * cuda.gridDim.x
        while down == 1 and parent >= 0 and c * chunk < size:
            begin, epoch = c * chunk, epochs[1, c] + 1
            length = min(chunk, size - begin)
            if t == 0:
                signal_wait_until(results_full[c:], GE, epoch)  # 4
            cuda.syncthreads()
            _to_children(results[c, :length], results_full[c:], epoch, first, second)  # 5
            i = t
            while i < length:
                store_word(out, begin + i, results[c, i])
                i += threads
            c += 2 * cuda.gridDim.x
        c = begin_with
        while t == 0 and c * chunk < size:  # all threads have read the counters before a barrier above
            epochs[down, c] += 1
            c += 2 * cuda.gridDim.x

    return double_tree_all_reduce


@cuda.jit(device=True)
def _to_children(part, signal, epoch, first, second):
    if first >= 0:
        put_signal_nbi_block(part, part, signal, epoch, SET, first)
    if second >= 0:
        put_signal_nbi_block(part, part, signal, epoch, SET, second)


class DoubleTree(InChunks):
    """The method "double_tree" of ``AllReduce``."""

    counts = staticmethod(shares)
    blocks = 26  # for each tree and direction: 104 in all, one per multiprocessor of A100

    @property
    def wanted(self):
        return 2 * self.blocks * self.chunks

    def prepare(self, max_nbytes, op):
        world, words = self.world, max(1, -(-max_nbytes // 8))
        self.op = op
        room, chunks = self.chunks_of(words)[0], self.most_chunks(words)
        rows = chunks + (chunks + 1) // 2
        self.partials = self.empty((rows, 2 * room), "uint64", "all_reduce.double_tree.partials")
        self.results = self.empty((chunks, room), "uint64", "all_reduce.double_tree.results")
        self.partials_full = self.zeros((2, chunks), "uint64", "all_reduce.double_tree.partials_full")
        self.results_full = self.zeros(chunks, "uint64", "all_reduce.double_tree.results_full")
        self.epochs = world.xp.zeros((2, chunks), "uint64")
        positions = [position(world.rank, world.n_ranks, tree) for tree in (0, 1)]
        self.positions = world.xp.asarray(positions, "int64")

    def bind(self, x, out, in_place, dtype):
        times = shares(dtype.name)
        chunk, chunks = self.chunks_of(times * (x.nbytes + 7 >> 3))
        grid = min((chunks + 1) // 2, self.blocks), 2, 2
        shared = (
            self.positions,
            self.partials,
            self.results,
            self.partials_full,
            self.results_full,
            self.epochs,
        )
        return self.launch(double_tree_kernel(self.op, dtype.name), grid, x, out, chunk // times, *shared)


_x = {words: (types.Array(words, 1, "C"),) * 2 for words in (types.uint64, types.uint8)}
_two, _one = (types.Array(types.uint64, d, "C") for d in (2, 1))
_positions = types.Array(types.int64, 2, "C")
GPU_KERNELS = {
    f"double_tree_all_reduce[{op},{dtype},{words}]": (
        double_tree_kernel(op, dtype),
        (*_x[words], types.int64, _positions, _two, _two, _two, _one, _two),
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
