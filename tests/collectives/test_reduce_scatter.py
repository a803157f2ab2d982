"""ReduceScatter on the emulator: shapes of outputs, and what auto takes."""

import numpy as np
import pytest

import shmemkit as sk


@pytest.mark.parametrize("method", sk.ReduceScatter.methods)
def test_shapes_of_new_outputs(pes, method):
    def main():
        world = sk.init()
        n = world.n_ranks
        scatter = sk.ReduceScatter(world, 1 << 10, "sum", method)
        shapes = {(n, 3, 2): (1, 3, 2), (4 * n,): (4,), (2 * n, 3): (2, 3), (n,): (1,), (3, n, 2): (6,)}
        for shape, expected in {**shapes, (0, 3): (0, 3)}.items():
            x = np.arange(np.prod(shape), dtype="int64").reshape(shape)
            out = scatter(x)
            world.synchronize()
            assert out.shape == expected and out.dtype == x.dtype
            assert (out.reshape(-1) == n * x.reshape(n, x.size // n)[world.rank]).all()

    pes(2).run(main)


def test_auto(pes):
    def main():
        world = sk.init()
        scatter = sk.ReduceScatter(world, 1 << 20)
        assert [scatter.method_for(n) for n in (8, 1 << 20)] == ["ll128", "push"]
        for size in (3, (1 << 12) + 1):
            x = np.full((2, size), world.rank + 1, "int32")
            out = scatter(x)
            world.synchronize()
            assert (out == 3).all()

    pes(2).run(main)
