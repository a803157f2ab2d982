"""Scatter and Reduce on the emulator, in one line."""

import numpy as np
import pytest
from specification import calls

import shmemkit as sk


@pytest.mark.parametrize("method", [name for name in sk.Reduce.methods if name != "copy_engine"])
def test_more_ranks_than_are_polled_at_once(pes, method):
    def main():
        with sk.init() as world:
            n, me = world.n_ranks, world.rank
            total = sk.Reduce(world, 40, 1, "sum", method)(np.arange(5) + 10 * me)
            assert me != 1 or (total == n * np.arange(5) + 5 * n * (n - 1)).all()

    pes(17).run(main)


@pytest.mark.schedules(deliveries=("eager", "ordered", "unordered"), seeds=[None, 0, 1])
def test_in_place_with_fewer_tiles_than_warps(pes, small):
    """Warps without a tile load nothing that another one stores."""
    small(sk.Reduce, ll128={"threads": 128})
    pes(2).run(calls, "Reduce", "ll128", [1, 61, 200], "uint64", "sum", 1, 0, "in place")


def test_one_liners(pes):
    def main():
        with sk.init() as world:
            n, me = world.n_ranks, world.rank
            x = np.arange(2.0 * n).reshape(n, 2)
            assert (sk.scatter(x if me == 1 else None, 1, out=np.zeros(2)) == x[me]).all()
            total = sk.reduce(x + me, 1, "max")
            assert total is None if me != 1 else (total == x + n - 1).all()
            if me == 1:
                assert sk.scatter(x, 1).shape == (1, 2)
            else:
                sk.scatter(None, 1, out=np.zeros((1, 2)))

    pes(3).run(main)
