"""AllReduce's double tree on the emulator: the trees themselves, and the order in which elements
are combined."""

import numpy as np
import pytest
from reduced import UFUNCS

import shmemkit as sk
from shmemkit.collectives.schedules.tree import position
from shmemkit.runtime.symmetric_memory import as_dtype

# ---- the trees


@pytest.mark.parametrize("n", [*range(1, 73), 1000])
def test_trees(n):
    """All ranks are below one root, at most log2(n) hops, and parents and children agree."""
    inner = []
    for tree in (0, 1):
        positions = [position(rank, n, tree) for rank in range(n)]
        (root,) = [rank for rank, (parent, *_) in enumerate(positions) if parent < 0]
        level, reached, depth = [root], [], -1
        while level:
            reached, depth = reached + level, depth + 1
            level = [child for rank in level for child in positions[rank][2:] if child >= 0]
        assert sorted(reached) == list(range(n)) and depth == n.bit_length() - 1
        for rank, (_, _, *children) in enumerate(positions):
            assert children[0] >= 0 or children[1] < 0
            for side, child in enumerate(children):
                assert child < 0 or positions[child][:2] == (rank, side)
        inner.append({rank for rank, (_, _, first, _) in enumerate(positions) if first >= 0})
    assert not inner[0] & inner[1] and n - len(inner[0] | inner[1]) == n % 2


def in_order(rank, n, tree):
    """The ranks of a subtree, from left to right."""
    _, _, first, second = position(rank, n, tree)
    below = [in_order(child, n, tree) if child >= 0 else [] for child in (first, second)]
    return [*below[0], rank, *below[1]]


def test_tree_0_has_the_ranks_in_order_and_tree_1_mirrors_or_shifts_them():
    assert in_order(7, 8, 0) == [0, 1, 2, 3, 4, 5, 6, 7] and in_order(0, 8, 1) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert in_order(3, 5, 0) == [0, 1, 2, 3, 4] and in_order(4, 5, 1) == [1, 2, 3, 4, 0]


# ---- the operation


def combined_in_tree(op, arrays, tree, rank=None):
    """As ``place`` says, of wide arrays."""
    n = len(arrays)
    if rank is None:
        (rank,) = [r for r in range(n) if position(r, n, tree)[0] < 0]
    _, _, first, second = position(rank, n, tree)
    total = arrays[rank]
    if first >= 0:
        total = UFUNCS[op](combined_in_tree(op, arrays, tree, first), total)
    if second >= 0:
        total = UFUNCS[op](total, combined_in_tree(op, arrays, tree, second))
    return total


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize("n_ranks", [4, 7])
@pytest.mark.parametrize("dtype, op", [("float32", "sum"), ("bfloat16", "avg"), ("float16", "prod")])
def test_the_order_is_the_documented_one(pes, small_chunks, dtype, op, n_ranks):
    """Bit by bit: additions are rounded, so that another order gives other bits; those of 16 bits are rounded
    at the end only."""

    def main():
        world = sk.init()
        n, size = world.n_ranks, 333
        x = [np.random.default_rng(k).standard_normal(size).astype(as_dtype(dtype)) for k in range(n)]
        out = sk.AllReduce(world, x[0].nbytes, op, "double_tree")(x[world.rank])
        world.synchronize()
        method = sk.AllReduce._maker("double_tree")(world, x[0].nbytes, op)
        chunk = method.chunks_of(-(-x[0].nbytes // 8))[0] * 8 // x[0].itemsize
        expected = np.empty_like(out)
        for c, begin in enumerate(range(0, size, chunk)):
            part = slice(begin, begin + chunk)
            total = combined_in_tree(op, [a[part].astype("float32") for a in x], c % 2)
            expected[part] = total / np.float32(n) if op == "avg" else total
        np.testing.assert_array_equal(out.view("uint8"), expected.view("uint8"))

    pes(n_ranks).run(main)
