"""All-gathers by multicast on the emulator: blocks of several warps, and explorations."""

import numpy as np
import pytest
from test_all_gather import prove

import shmemkit as sk

unordered = pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])


@pytest.mark.each_value
@pytest.mark.parametrize("method, local_size", [("multimem", 4), ("ll_2d_multimem", 2)])
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_all_gather_by_blocks_of_several_warps(pes, method, local_size):
    def main():
        world = sk.init(local_size=local_size)
        gather = sk.AllGather.maker(method)(world, 4 * 700, threads=96)
        for call in range(3):
            x, out = np.full(700, 10 * call + world.rank, "uint8"), np.zeros((4, 700), "uint8")
            gather.bind(x, out.reshape(-1), False)(None)
            world.synchronize()
            assert (out == 10 * call + np.arange(4)[:, None]).all()
        gather.free()

    pes(4).run(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, local_size", [("multimem", 2), ("ll_2d_multimem", 2), ("ll_2d_multimem", 1)]
)
def test_proven_for_two_ranks(method, local_size):
    """Three calls use the first half again."""
    prove(2, (method, 3), local_size)
