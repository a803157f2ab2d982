"""All-reduce in two binary trees: up to the root, then down again, for many ranks: 2 log2(n) hops at most,
where a ring has 2 n - 2. Each rank is an inner node of one tree only, and a leaf of the other, so that with
half of the data in either, all ranks send about as much: the idea is of Sanders, Speck and Traeff (2009).
Through NVSHMEM, so on any nodes.

Trees     two, of all ranks; ``place`` says who is whose child. An inner node has one child or two
Chunks    the array is cut into chunks; the even ones go through tree 0, the odd ones through tree 1
Partials  partials[row, c], on every rank, combined so far (``partial_results.py``). Row of the first: what my
          first child has of chunk c, then what it and I, and my second child, have. Row of the second: what
          my second child has. Written by that child and by me; the network reads it
Results   results[c], on every rank: chunk c, combined. Written by the parent, on the root by me; the network
          reads it
Signals   reduced[0, c] and reduced[1, c], set by my first and second child, and done[c], set by the parent,
          on every rank: the number of the last call whose partial totals, and whose results, of chunk c are
          here. Each comes with its data
Counters  calls[0, c] and calls[1, c], local: how many calls chunk c has taken part in, upwards and downwards:
          the number of a call. In device memory, so that a replayed graph counts on

  block (b, tree, up), for each chunk c = 2 b + tree, 2 (b + gridDim.x) + tree, ...:
          1. wait for reduced[0, c] and reduced[1, c], if I have such children; syncthreads
                                                                             acquire, also of the network
          2. combine the first child's total, my chunk of x, and the second child's total, in this order, into
             the row of the first; the root: into results[c] and its output
          3. put that row, and reduced[0 or 1, c], to the parent; the root: results[c], and done[c], to its
             children                                                        the signal follows the data
  block (b, tree, down), for each of these chunks, except on the root:
          4. wait for done[c]; syncthreads                                   acquire, also of the network
          5. put results[c], and done[c], to my children; copy it to the output
  at the end, each adds 1 to its counters

Blocks of their own go up and down, so that later chunks go up while earlier ones come down. The row of the
second has room for half of the chunks: I have children in one tree only, c >> 1 counts its chunks.

An element is combined in the order of the ranks in tree 0, of their places in tree 1, with brackets around
each subtree: (first child's + mine) + second child's. Only the root finishes it: the same bits on all ranks,
in every run; other bits than of other methods, as additions are rounded.

No race, with nothing double-buffered: a result is an acknowledgement by all ranks. When I have that of chunk
c, all have added their part, and all totals have been received on their way to the root: all rows of chunk c
on all ranks have been read. So my child, who sends its next total in its next launch, may write my row, and I
mine. And when the root has what it needs for the next result of chunk c, all other ranks have begun the next
call, and so ended the one before, upwards and downwards: all have received their results[c], and copied them.
So the root may write its results[c] and those of its children; and each of them, who had to be in that call
as all below it had, those of its own. Nobody calls quiet; no two puts with one signal are under way at once.
A chunk is always at the same place, in the same tree, and all ranks count it alike, whatever the lengths of
the calls. x may be out: what comes down is written after my part has been received on the way up.

No deadlock: blocks that go up wait for leaves in the end, who wait for nobody, with the chunks in the same
order on all ranks; those that go down for those that go up, which never wait for them. All are resident.
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

from ..method import Method
from ..partial_results import floats, high_floats, low_floats, totals
from .ring import chunks_of, most_chunks

BLOCKS = 26  # for each tree and direction: 104 in all, one per multiprocessor of A100
CHUNKS = 8  # for each of them, if they are not too small
SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


def place(rank, n_ranks, tree):
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
    if dtype not in ("float16", "bfloat16"):
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

    return merge_floats


@functools.cache
def double_tree_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    first_of, add, result = reduction(op, dtype)
    words, load_total, store_total = totals(op, dtype)
    merge = merging(op, dtype)

    @cuda.jit
    def double_tree_all_reduce(x, out, chunk, places, partials, results, reduced, done, calls):
        """Combine the `x` of all ranks in `out`.

        x, out    uint64 or uint8 (the bytes of elements of `dtype`), 1-D, of the same size; may be the same
        chunk     words of a chunk
        places    int64 (2, 4): ``place`` of this rank in both trees
        partials  uint64 (chunks at most, and half of that, rounded up; twice the words of a chunk at most),
                  symmetric
        results   uint64 (chunks at most, words of a chunk at most), symmetric
        reduced   uint64 (2, chunks at most), symmetric, zeros at first
        done      uint64 (chunks at most,), symmetric, zeros at first
        calls     as reduced, not symmetric
        grid      (any number, 2 trees, 2: up and down), one-dimensional blocks; the same on all ranks
        """
        t, threads, tree, down = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockIdx.y, cuda.blockIdx.z
        size, seconds, begin_with = n_words(x), done.size, 2 * cuda.blockIdx.x + tree
        parent, side, first, second = places[tree, 0], places[tree, 1], places[tree, 2], places[tree, 3]
        c = begin_with
        while down == 0 and c * chunk < size:
            begin, call = c * chunk, calls[0, c] + 1
            length = min(chunk, size - begin)
            if t == 0:  # 1
                if first >= 0:
                    signal_wait_until(reduced[0, c:], GE, call)
                if second >= 0:
                    signal_wait_until(reduced[1, c:], GE, call)
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
                put_signal_nbi_block(there, mine, reduced[side, c:], call, SET, parent)
            else:
                _to_children(results[c, :length], done[c:], call, first, second)
            c += 2 * cuda.gridDim.x
        while down == 1 and parent >= 0 and c * chunk < size:
            begin, call = c * chunk, calls[1, c] + 1
            length = min(chunk, size - begin)
            if t == 0:
                signal_wait_until(done[c:], GE, call)  # 4
            cuda.syncthreads()
            _to_children(results[c, :length], done[c:], call, first, second)  # 5
            i = t
            while i < length:
                store_word(out, begin + i, results[c, i])
                i += threads
            c += 2 * cuda.gridDim.x
        c = begin_with
        while t == 0 and c * chunk < size:  # all threads have read the counters before a barrier above
            calls[down, c] += 1
            c += 2 * cuda.gridDim.x

    return double_tree_all_reduce


@cuda.jit(device=True)
def _to_children(part, signal, call, first, second):
    if first >= 0:
        put_signal_nbi_block(part, part, signal, call, SET, first)
    if second >= 0:
        put_signal_nbi_block(part, part, signal, call, SET, second)


class DoubleTree(Method):
    """The method "double_tree" of ``AllReduce``."""

    def prepare(self, max_nbytes, op):
        world, words = self.world, max(1, -(-max_nbytes // 8))
        self.op, wanted = op, 2 * BLOCKS * CHUNKS
        room, chunks = chunks_of(words, wanted)[0], most_chunks(words, wanted)
        rows = chunks + (chunks + 1) // 2
        self.partials = self.empty((rows, 2 * room), "uint64", "all_reduce.double_tree.partials")
        self.results = self.empty((chunks, room), "uint64", "all_reduce.double_tree.results")
        self.reduced = self.zeros((2, chunks), "uint64", "all_reduce.double_tree.reduced")
        self.done = self.zeros(chunks, "uint64", "all_reduce.double_tree.done")
        self.calls = world.xp.zeros((2, chunks), "uint64")
        places = [place(world.rank, world.n_ranks, tree) for tree in (0, 1)]
        self.places = world.xp.asarray(places, "int64")

    def bind(self, x, out, in_place, dtype):
        chunk, chunks = chunks_of(x.nbytes + 7 >> 3, 2 * BLOCKS * CHUNKS)
        grid = min((chunks + 1) // 2, BLOCKS), 2, 2
        shared = self.places, self.partials, self.results, self.reduced, self.done, self.calls
        return self.launch(double_tree_kernel(self.op, dtype.name), grid, x, out, chunk, *shared)


_x = {words: (types.Array(words, 1, "C"),) * 2 for words in (types.uint64, types.uint8)}
_two, _one = (types.Array(types.uint64, d, "C") for d in (2, 1))
_places = types.Array(types.int64, 2, "C")
GPU_KERNELS = {
    f"double_tree_all_reduce[{op},{dtype},{words}]": (
        double_tree_kernel(op, dtype),
        (*_x[words], types.int64, _places, _two, _two, _two, _one, _two),
    )
    for op, dtype, words in (
        ("sum", "bfloat16", types.uint64),
        ("sum", "float16", types.uint8),
        ("max", "float32", types.uint64),
        ("avg", "float64", types.uint64),
        ("prod", "int8", types.uint64),
    )
}
