"""Threadblock orders: permutations of the tiles, with the properties that they are made for."""

import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, int64
from ptx import compile_ptx, instructions

import shmemkit as sk
from shmemkit.device.swizzle import (
    grouped,
    order_of,
    quotient,
    rank_rotated,
    reduce_scatter,
    rotated,
    row_major,
)

counts = st.integers(1, 40)


@st.composite
def ranks(draw):
    """n_ranks, n_local, rank"""
    n_local, n_nodes = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return n_local * n_nodes, n_local, draw(st.integers(0, n_local * n_nodes - 1))


@given(n_m=counts, n_n=counts, group=st.integers(1, 50))
def test_tiles_are_permuted(n_m, n_n, group):
    for swizzle in (lambda t: row_major(t, n_m, n_n), lambda t: grouped(t, n_m, n_n, group)):
        assert sorted(order_of(swizzle, n_m, n_n).ravel()) == list(range(n_m * n_n))


@given(n_m=st.integers(1, 200), place=ranks())
def test_rows_are_permuted(n_m, place):
    n_ranks, n_local, rank = place
    for order in (rank_rotated, reduce_scatter):
        rows = [order(m, n_m, rank, n_ranks, n_local) for m in range(n_m)]
        assert sorted(rows) == list(range(n_m))


@given(n_m=counts, first=st.integers(0, 39))
def test_rotated(n_m, first):
    first %= n_m
    assert [rotated(m, n_m, first) for m in range(n_m)] == [(m + first) % n_m for m in range(n_m)]


def test_grouped_by_hand():
    turns = order_of(lambda t: grouped(t, 5, 3, 2), 5, 3)
    assert turns.tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11], [12, 13, 14]]


@given(n_m=counts, n_n=counts)
def test_groups_of_one_row_are_row_major(n_m, n_n):
    assert all(grouped(t, n_m, n_n, 1) == row_major(t, n_m, n_n) for t in range(n_m * n_n))


@given(n_m=st.integers(8, 40), n_n=st.integers(8, 40), start=st.integers(0, 1600))
def test_tiles_under_way_share_their_operands(n_m, n_n, start):
    """Sixty-four tiles in a row need fewer tile rows and columns than row by row."""
    start = min(start, n_m * n_n - 64)
    rows, columns = zip(*(grouped(t, n_m, n_n, 8) for t in range(start, start + 64)), strict=True)
    assert len(set(rows)) <= 16 and len(set(rows)) + len(set(columns)) <= 16 + n_n


@given(place=ranks(), per_rank=st.integers(1, 5))
def test_the_ranks_one_after_another(place, per_rank):
    """Where every rank has as many rows: the owners come in the order that is promised."""
    n_ranks, n_local, rank = place
    node, local = divmod(rank, n_local)
    for order, ahead in ((rank_rotated, 0), (reduce_scatter, 1)):
        rows = [order(m, n_ranks * per_rank, rank, n_ranks, n_local) for m in range(n_ranks * per_rank)]
        owners = [row // per_rank for row in rows[::per_rank]]
        expected = [
            (node + ahead + i) % (n_ranks // n_local) * n_local + (local + ahead + j) % n_local
            for i in range(n_ranks // n_local)
            for j in range(n_local)
        ]
        assert owners == expected
        assert all(row // per_rank == owners[i // per_rank] for i, row in enumerate(rows))
    assert owners[-1] == rank  # of reduce_scatter


@given(n_ranks=st.integers(1, 8), per_rank=st.integers(1, 8), data=st.data())
def test_one_level_is_the_plain_formula(n_ranks, per_rank, data):
    rank, total = data.draw(st.integers(0, n_ranks - 1)), n_ranks * per_rank
    for m in range(total):
        assert rank_rotated(m, total, rank, n_ranks, n_ranks) == (m + rank * per_rank) % total
        assert reduce_scatter(m, total, rank, n_ranks, n_ranks) == (m + (rank + 1) * per_rank) % total


def test_two_nodes_of_four():
    """Rank 0 sends to node 1 first, there to the rank after its own place; its own part comes last."""
    assert [reduce_scatter(m, 8, 0, 8, 4) for m in range(8)] == [5, 6, 7, 4, 1, 2, 3, 0]
    assert [reduce_scatter(m, 8, 4, 8, 4) for m in range(8)] == [1, 2, 3, 0, 5, 6, 7, 4]


@given(n_ranks=st.integers(2, 8), rows=st.integers(1, 400), tile=st.integers(16, 128))
def test_the_first_tile_needs_no_earlier_rank(n_ranks, rows, tile):
    """Parts that are no multiple of a tile: what comes first does not begin before the rank's own part."""
    n_m = -(-n_ranks * rows // tile)
    for rank in range(n_ranks):
        first = rank_rotated(0, n_m, rank, n_ranks, n_ranks)
        assert first * tile >= rank * rows or first == 0  # no tile is left for the last of many ranks


@cuda.jit
def _orders(out, n_m, n_n, group, rank, n_ranks, n_local):
    i = cuda.grid(1)
    if i < n_m * n_n:
        m, n = grouped(i, n_m, n_n, group)
        out[i, 0], out[i, 1] = m, n
        m, n = row_major(i, n_m, n_n)
        out[i, 2], out[i, 3] = rank_rotated(m, n_m, rank, n_ranks, n_local), n
        out[i, 4], out[i, 5] = reduce_scatter(m, n_m, rank, n_ranks, n_local), quotient(i, group)


def expected_orders(n_m, n_n, group, rank, n_ranks, n_local):
    expected = []
    for i in range(n_m * n_n):
        m, n = row_major(i, n_m, n_n)
        rows = [f(m, n_m, rank, n_ranks, n_local) for f in (rank_rotated, reduce_scatter)]
        expected.append([*grouped(i, n_m, n_n, group), rows[0], n, rows[1], i // group])
    return expected


ORDERS = (7, 5, 3, 2, 6, 3)


def test_in_an_emulated_kernel():
    def main():
        out = sk.init().xp.zeros((35, 6), "int64")
        _orders[2, 32](out, *ORDERS)
        sk.current().synchronize()
        assert out.tolist() == expected_orders(*ORDERS)

    sk.emu.run(main, 1)


@pytest.mark.gpu
def test_in_a_kernel():
    from gpu import world

    out = world().xp.zeros((35, 6), "int64")
    sk.bind(_orders, 2, 32, (out, *ORDERS))()
    world().synchronize()
    np.testing.assert_array_equal(out.get(), expected_orders(*ORDERS))


def test_kernels_divide_32_bits():
    ptx = compile_ptx(_orders, (int64[:, ::1], *[int64] * 6))
    divisions = [line for line in instructions(ptx) if line.startswith(("div", "rem"))]
    assert divisions and all(line.startswith("div.u32") for line in divisions)


@examples(20)
@given(a=st.integers(0, 2**32 - 1), b=st.integers(1, 2**32 - 1))
def test_quotient(a, b):
    assert quotient(a, b) == a // b


@pytest.mark.parametrize(("a", "b"), [(1 << 32, 3), (-1, 3), (3, 0), (3, 1 << 32)])
def test_a_quotient_is_of_32_bits(a, b):
    assert quotient((1 << 32) - 1, 2) == (1 << 31) - 1
    with pytest.raises(ValueError, match=r"quotient\(\): a is .*, b is .*; both must be 0 to 2\*\*32 - 1"):
        quotient(a, b)
