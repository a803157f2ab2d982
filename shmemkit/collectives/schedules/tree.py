"""Trees: partial totals go up to the root, results come down again. All-reduce over any nodes, by the network
transport (``collectives.network``).

Ring      one tree, in which each rank has one child: the rank before. The root is the last rank. Results go
          from the root to rank 0, then along the ranks. So each rank sends to the next one only. It takes 2 n
          - 2 hops, one after another: for arrays of many chunks
Double    two binary trees of all ranks, each for half of the data (Sanders, Speck and Traeff, 2009). A rank
          is an inner node of one and a leaf of the other, so all ranks send about as much. It takes 2 log2(n)
          hops at most: for many ranks

Chunks    the array is cut into chunks, which are dealt out to the trees
Partials  partials[row, c], on every rank: partial totals (``partial_results.py``). The first child's row gets
          that child's total of chunk c; the rank then replaces it by its own total, which includes both
          children. The second child's row gets that child's total. The network reads the first row
Results   results[c], on every rank: chunk c, combined. Written by the rank from which results come, on the
          root by the rank itself; the network reads it
Signals   partials_full[0, c] and partials_full[1, c], set by the first and the second child; results_full[c].
          On every rank: the last epoch whose data are there. Chunks arrive in any order: each has its own
Epochs    epochs[0, c] and epochs[1, c], local: of chunk c, upwards and downwards. Device-resident, so
          graph-safe

  block (b, tree, up), for each chunk c of the tree, every gridDim.x-th, in ascending order:
          1. wait for partials_full[0, c] and partials_full[1, c], if there are such children
          2. combine the first child's total, the own chunk of x and the second child's total, in this order,
             into the first child's row; the root: into results[c] and its output
          3. put that row to the parent; the root: put results[c] to the ranks that get it from here
  block (b, tree, down), for each of these chunks, except on the root:
          4. wait for results_full[c]
          5. put results[c] to the ranks that get it from here; copy it to the output
  at the end, each block adds 1 to its epochs

Different blocks go up and down, so later chunks go up while earlier ones come down. The second child's row
has room for half of the chunks: a rank has children in one tree only, and c >> 1 counts its chunks.

Totals of float16, bfloat16 and float8 travel as float32, in two or four times the bytes: only results are
rounded. Order: (first child's + own) + second child's, for each subtree. In a ring and in tree 0 this is the
order of the ranks, in tree 1 that of their positions. Only the root computes a result: all ranks get the same
bits, in every run. In two trees, rounding may give other bits than other methods.

No race, without a double buffer: a result acknowledges all partials. The put lemma (docs/protocols.md) holds
for all puts.

- A rank that has the result of chunk c knows that all totals of chunk c have been received and read, on the
  way to the root. So in the next epoch, its child may write the row, and so may the rank.
- When the root has all inputs of the next result of chunk c, all other ranks have begun the next epoch, so
  their previous launches have ended: they have received and copied results[c], and all puts from there have
  been received. So each results[c] may be written again.
- x may be out: a result comes down after the rank's values have been received on the way up.

No deadlock: blocks that go up wait, in the end, for leaves, which wait for no rank; all ranks take the chunks
in the same order. Blocks that go down wait for blocks that go up, never the reverse.
"""

import functools

from numba import cuda

from shmemkit.device import load_word, n_words, num_ranks, reduction, span, store_word
from shmemkit.device.cuda.partial_results import merging, shares, totals
from shmemkit.operations.method import Method

from ..network import put, wait_for


def ring(rank, n_ranks):
    """-> the links of ``tree_kernel`` of `rank` in a ring."""
    last, following = n_ranks - 1, (rank + 1) % n_ranks
    parent = rank + 1 if rank < last else -1
    return [(parent, 0, rank - 1, -1, following if following < last else -1, -1)]


def double_tree(rank, n_ranks):
    """-> the links of ``tree_kernel`` of `rank` in both trees."""
    positions = [position(rank, n_ranks, tree) for tree in (0, 1)]
    return [(*it, *it[2:]) for it in positions]


def position(rank, n_ranks, tree):
    """-> (parent, side, first, second) of `rank` in tree 0 or 1: ranks, -1 where there is none; side 0 if it
    is its parent's first child, 1 if its second. An inner node has one child or two.

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


@functools.cache
def tree_kernel(op, dtype, binary):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"; `binary`: ranks may have
    two children, and send results to two."""
    first_of, add, result = reduction(op, dtype)
    words, load_total, store_total = totals(op, dtype)
    merge = merging(op, dtype)

    @cuda.jit(device=True)
    def send_down(part, signal, epoch, its):
        if its[4] >= 0:
            put(part, part, signal, epoch, its[4])
        if binary and its[5] >= 0:
            put(part, part, signal, epoch, its[5])

    @cuda.jit(max_registers=None if binary else 64)  # of 512 threads; with two children some would be spilled
    def tree_all_reduce(x, out, chunk, links, partials, results, partials_full, results_full, epochs):
        """Combine the `x` of all ranks in `out`.

        x, out         uint64 or uint8 (the bytes of elements of `dtype`), 1-D, of the same size; may be the
                       same
        chunk          words of a chunk
        links          int64 (trees, 6): this rank's parent; 1 if it is its second child, else 0; its first
                       and second child; and two ranks to which it sends results. -1 where there is none
        partials       uint64 (chunks at most, if binary half as many more, rounded up; twice the words of a
                       chunk at most), symmetric
        results        uint64 (chunks at most, words of a chunk at most), symmetric
        partials_full  uint64 (2, chunks at most), symmetric, zeros at first
        results_full   uint64 (chunks at most,), symmetric, zeros at first
        epochs         as partials_full, not symmetric
        grid           (any number, trees, 2: up and down), one-dimensional blocks; the same on all ranks
        """
        t, threads, tree, down = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockIdx.y, cuda.blockIdx.z
        size, seconds, step = n_words(x), results_full.size, cuda.gridDim.y * cuda.gridDim.x
        begin_with = cuda.gridDim.y * cuda.blockIdx.x + tree
        parent, first, second = links[tree, 0], links[tree, 2], links[tree, 3] if binary else -1
        c = begin_with
        while down == 0 and c * chunk < size:
            begin, epoch = c * chunk, epochs[0, c] + 1
            length = min(chunk, size - begin)
            if first >= 0:  # 1
                wait_for(span(partials_full[0], c, 1), epoch)
            if second >= 0:
                wait_for(span(partials_full[1], c, 1), epoch)
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
            if parent >= 0:  # 3
                side = links[tree, 1] if binary else 0
                row = c if side == 0 else seconds + (c >> 1)
                there, mine = span(partials[row], 0, words * length), span(partials[c], 0, words * length)
                put(there, mine, span(partials_full[side], c, 1), epoch, parent)
            else:
                send_down(span(results[c], 0, length), span(results_full, c, 1), epoch, links[tree])
            c += step
        while down == 1 and parent >= 0 and c * chunk < size:
            begin, epoch = c * chunk, epochs[1, c] + 1
            length = min(chunk, size - begin)
            wait_for(span(results_full, c, 1), epoch)  # 4
            send_down(span(results[c], 0, length), span(results_full, c, 1), epoch, links[tree])  # 5
            i = t
            while i < length:
                store_word(out, begin + i, results[c, i])
                i += threads
            c += step
        cuda.syncthreads()  # all threads have read the counters
        c = begin_with
        while t == 0 and c * chunk < size:
            epochs[down, c] += 1
            c += step

    return tree_all_reduce


class Tree(Method):
    """A method of this schedule. A subclass has

    name         that its symmetric arrays' names begin with
    links_of     (rank, n_ranks) -> the links of ``tree_kernel``
    trees        their number
    least, most  words of a chunk: 4 to 16 KB
    blocks       of a row of the grid; rows are trees, up and down. In all 104: the multiprocessors of A100,
                 but for 4
    chunks       of a block, if they are not too small
    """

    least, most = 1 << 9, 1 << 11
    name: str
    trees: int
    blocks: int
    chunks: int

    counts = staticmethod(shares)

    @property
    def wanted(self):
        """Chunks, if they are neither too small nor too large."""
        return self.trees * self.blocks * self.chunks

    def chunks_of(self, words):
        """-> (words of a chunk, chunks), for `words` words. Both grow with `words`."""
        chunk = min(self.most, max(self.least, -(-words // self.wanted) + 15 & -16))
        return chunk, max(1, -(-words // chunk))

    def most_chunks(self, words):
        """The most chunks of `words` words or fewer."""
        return max(1, -(-words // self.most), min(self.wanted, -(-words // self.least)))

    def prepare(self, max_nbytes, op):
        world, words = self.world, max(1, -(-max_nbytes // 8))
        self.op = op
        self.within(self.blocks, 2 * self.trees)
        room, chunks = self.chunks_of(words)[0], self.most_chunks(words)
        rows = chunks + (chunks + 1) // 2 * (self.trees - 1)
        self.shared = (
            world.xp.asarray(self.links_of(world.rank, world.n_ranks), "int64"),
            self.empty((rows, 2 * room), "uint64", f"{self.name}.partials"),
            self.empty((chunks, room), "uint64", f"{self.name}.results"),
            self.zeros((self.trees, chunks), "uint64", f"{self.name}.partials_full"),
            self.zeros(chunks, "uint64", f"{self.name}.results_full"),
            world.xp.zeros((2, chunks), "uint64"),
        )

    @classmethod
    def kernel_of(cls, n_ranks, op, dtype, **_):
        return tree_kernel(op, dtype, cls.trees > 1)

    def bind(self, x, out, in_place, dtype):
        times = shares(dtype.name)
        chunk, chunks = self.chunks_of(times * (x.nbytes + 7 >> 3))
        kernel = self.kernel_of(self.world.n_ranks, self.op, dtype.name)
        blocks = self.within(min(-(-chunks // self.trees), self.blocks), 2 * self.trees)
        grid = blocks, self.trees, 2
        return self.launch(kernel, grid, x, out, chunk // times, *self.shared)


class Ring(Tree):
    """The method "ring" of ``AllReduce``."""

    name, links_of = "all_reduce.ring", staticmethod(ring)
    trees, blocks, chunks = 1, 52, 16


class DoubleTree(Tree):
    """The method "double_tree" of ``AllReduce``."""

    name, links_of = "all_reduce.double_tree", staticmethod(double_tree)
    trees, blocks, chunks = 2, 26, 8


GPU_KERNELS = {
    f"{name}_all_reduce[{op},{dtype},{words}]": (tree_kernel(op, dtype, binary), {"x out": words})
    for name, binary in (("ring", False), ("double_tree", True))
    for op, dtype, words in (
        ("sum", "bfloat16", "uint64"),
        ("sum", "float16", "uint8"),
        ("max", "float32", "uint64"),
        ("avg", "float64", "uint64"),
        ("prod", "int8", "uint64"),
        ("sum", "float8_e4m3fn", "uint64"),
        ("avg", "float8_e5m2", "uint8"),
    )
}
