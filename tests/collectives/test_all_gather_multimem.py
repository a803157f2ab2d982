"""All-gathers by multicast on the emulator: blocks of several warps."""

import numpy as np
import pytest

import shmemkit as sk


@pytest.mark.each_value
@pytest.mark.every(2)
@pytest.mark.parametrize("method, local_size", [("multimem", 4), ("ll_2d_multimem", 2)])
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_all_gather_by_blocks_of_several_warps(pes, method, local_size):
    def main():
        world = sk.init(local_size=local_size)
        gather = sk.AllGather._maker(method)(world, 4 * 230, threads=64)
        for call in range(3):
            x, out = np.full(230, 10 * call + world.rank, "uint8"), np.zeros((4, 230), "uint8")
            gather.bind(x, out.reshape(-1), False)(None)
            world.synchronize()
            assert (out == 10 * call + np.arange(4)[:, None]).all()
        gather.free()

    pes(4).run(main)
