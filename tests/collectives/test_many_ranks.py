"""The collectives on many ranks, with heaps of the default size: 64 GiB, and more, that nobody touches."""

import numpy as np
import pytest
from emulated import spmd

import shmemkit as sk

SIZES = [pytest.param(64, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.full)]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("local_size", [None, pytest.param(8, marks=pytest.mark.full)])
def test_all_gather(n, local_size):
    def main(world):
        return sk.all_gather(np.full(256, world.rank, "float32")).reshape(n, 256)

    for gathered in spmd(n, main, local_size=local_size):
        assert (gathered == np.arange(n)[:, None]).all()


@pytest.mark.slow
def test_others():
    n = 64

    def main(world):
        x = np.arange(4 * n, dtype="int32") + world.rank
        mine = slice(4 * world.rank, 4 * world.rank + 4)
        total = n * np.arange(4 * n) + n * (n - 1) // 2
        assert (sk.all_reduce(x) == total).all()
        assert (sk.reduce_scatter(x) == total[mine]).all()
        assert (sk.all_to_all(x).reshape(n, 4) == np.arange(4 * n)[mine] + np.arange(n)[:, None]).all()
        assert (sk.broadcast(x.copy(), root=5) == np.arange(4 * n) + 5).all()
        root = world.rank == 7
        assert (
            sk.scatter(x if root else None, 7, out=world.xp.empty(4, "int32")) == np.arange(4 * n)[mine] + 7
        ).all()
        for result, right in ((sk.reduce(x, 7), total), (sk.gather(x[:1], 7), np.arange(n)[:, None])):
            assert (result == right).all() if root else result is None

    spmd(n, main)
