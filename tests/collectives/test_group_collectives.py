"""Every collective, by each of its methods, on groups: each on two groups at once, whose ranks are in
another order than the World's, with races checked and messages late. And overlapping groups in turn."""

import numpy as np
import pytest
from specification import ALL, calls

import shmemkit as sk
from shmemkit.runtime.stream_order import StreamOrder, _Streams

WAYS = [(name, method) for name, what in ALL.items() for method in what.kind.methods]
SIZES = [5, 300, 300]  # elements of a segment


def some(world):
    """Ranks 0 and 2, and ranks 4, 3 and 1, in this order."""
    odd = world.rank not in (0, 2)
    return world.split(int(odd), key=-world.rank if odd else world.rank)


def made_on(world, name, method):
    """Calls on `world`. -> why this method is refused there, or None"""
    try:
        calls(name, method, SIZES, root=world.n_ranks - 1, world=world)
    except ValueError as error:
        return str(error)


@pytest.mark.each_value
@pytest.mark.every(4)
@pytest.mark.parametrize("name, method", WAYS)
def test_every_method_on_groups(name, method):
    def main():
        with sk.init() as world, some(world) as group:
            assert group.world_rank(group.rank) == world.rank
            return group.n_ranks, made_on(group, name, method)

    for n, refusal in sk.emu.run(main, 5, races=True, delivery="unordered", seed=0):
        if refusal is not None:  # a World of that many ranks must refuse alike
            (alone, *_) = sk.emu.run(lambda: made_on(sk.init(), name, method), n)
            assert refusal == alone


# ---- the order of calls


def mesh(world, heap="1M"):
    """The groups of this rank's row and column, of a square of ranks."""
    side = int(world.n_ranks**0.5)
    rows = world.split(world.rank // side, heap=heap)
    return rows, world.split(world.rank % side, heap=heap)


def in_turn(rounds, reduce_by, gather_by):
    """Row all-reduces and column all-gathers in turn, on two streams, of one word."""

    def main():
        world = sk.init()
        row, column = mesh(world)
        reduce, gather = sk.AllReduce(row, 8, method=reduce_by), sk.AllGather(column, 16, gather_by)
        streams = world.backend.new_stream(), world.stream
        x, totals = np.full(1, world.rank, "int64"), np.zeros((rounds, 1), "int64")
        gathered = np.zeros((rounds, 2), "int64")
        for total, out in zip(totals, gathered, strict=True):
            reduce(x, total, stream=streams[0])
            gather(total, out, stream=streams[1])
            x = out[:1]
        world.synchronize()
        for k in range(rounds):
            assert gathered[k].tolist() == expected(world.rank, k)
        return True

    return main


def expected(rank, k):
    """What the column gathers in round `k`, of a mesh of 2 by 2: each row has the sum of its ranks' words."""
    words = [0, 1, 2, 3]
    for _ in range(k + 1):
        sums = [words[0] + words[1], words[2] + words[3]]
        words = [sums[0]] * 4
    return sums


def test_a_mesh_on_two_streams():
    assert all(sk.emu.run(in_turn(4, "push", "push_1d"), 4, races=True, delivery="unordered", seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("gather_by", ["ll", "push_1d"])
def test_a_mesh_in_every_schedule(small, gather_by):
    """One block, one thread, one word, two rounds."""
    one = {"threads": 1}
    small(sk.AllReduce, one_shot=one)
    small(sk.AllGather, **{gather_by: one})
    found = sk.emu.explore(in_turn(2, "one_shot", gather_by), 4, exhaustive=True)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.slow
def test_the_order_between_groups_is_needed(small, monkeypatch):
    """With an order for each group, the exploration above fails."""
    small(sk.AllReduce, one_shot={"threads": 1})
    small(sk.AllGather, ll={"threads": 1})
    monkeypatch.setattr(StreamOrder, "__init__", of_each_group)
    assert sk.emu.explore(in_turn(2, "one_shot", "ll"), 4, exhaustive=True).failure is not None


def of_each_group(order, world):
    order._world, order._calls = world, world.backend.calls
    order._streams = _Streams(world.backend)
