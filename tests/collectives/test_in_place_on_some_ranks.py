"""Whether x is its own part of the output is each rank's own affair: collectives of which some ranks are in
place and others not, call after call, with races checked."""

import numpy as np
import pytest
from reduced import combined
from test_all_reduce import inputs

import shmemkit as sk

SIZE = 100
pytestmark = pytest.mark.usefixtures("small_chunks")


def calls(world):
    """-> (call, whether this rank is in place)"""
    return [(call, (call + world.rank) % 3 == 0) for call in range(5)]


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("method", sk.AllGather.methods)
@pytest.mark.parametrize("n_pes", [2, 3])
def test_all_gather(pes, n_pes, method):
    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        gather = sk.AllGather(world, n * SIZE * 8, method)
        for call, in_place in calls(world):
            out = np.zeros((n, SIZE))
            x = out[me] if in_place else np.zeros(SIZE)
            x[:] = 10 * call + me
            gather(x, out)
            world.synchronize()
            assert (out == 10 * call + np.arange(n)[:, None]).all()

    pes(n_pes).run(main)


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("method", [m for m in sk.AllReduce.methods if "multimem" not in m])
def test_all_reduce(pes, method):
    def main():
        world = sk.init()
        reduce = sk.AllReduce(world, SIZE * 8, "sum", method)
        for call, in_place in calls(world):
            given = inputs(call, SIZE, "float32", world.n_ranks)
            x = given[world.rank].copy()
            out = reduce(x, x if in_place else np.zeros(SIZE, "float32"))
            world.synchronize()
            assert (out == combined("sum", given)).all()

    pes(3).run(main)


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("method", [m for m in sk.ReduceScatter.methods if m != "push_2d"])
def test_reduce_scatter(pes, method):
    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        scatter = sk.ReduceScatter(world, n * SIZE * 8, "max", method)
        for call, in_place in calls(world):
            given = inputs(call, n * SIZE, "float32", n)
            x, mine = given[me].copy(), slice(me * SIZE, (me + 1) * SIZE)
            out = scatter(x, x[mine] if in_place else np.zeros(SIZE, "float32"))
            world.synchronize()
            assert (out == combined("max", [array[mine] for array in given])).all()

    pes(3).run(main)
