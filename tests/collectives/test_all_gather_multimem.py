"""All-gathers by multicast on the emulator: nodes, lengths, dtypes, repeated calls; under several schedules
and without races. (test_all_gather.py has what all methods must do on one node.)"""

import numpy as np
import pytest
from test_all_gather import gather_all, prove

import shmemkit as sk

unordered = pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])


@pytest.mark.each_value
@pytest.mark.parametrize("n_pes, local_size", [(2, 1), (4, 2), (6, 3), (6, 2)])
@unordered
def test_all_gather_over_nodes(pes, n_pes, local_size):
    pes(n_pes, local_size=local_size).run(gather_all, "ll_2d_multimem", [33, 0, 5, 300], "int16")


@pytest.mark.each_value
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("unaligned", [0, 3])
@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_all_gather_in_place_and_unaligned(pes, dtype, unaligned, in_place):
    sizes = [1, 0, 8, 33, 300]
    pes(4, local_size=2).run(gather_all, "ll_2d_multimem", sizes, dtype, unaligned, in_place)
    pes(3).run(gather_all, "multimem", sizes, dtype, unaligned, in_place)


@unordered
def test_all_gather_of_several_chunks_and_parts(pes, small_chunks):
    pes(2).run(gather_all, "multimem", [1000, 65, 3, 700], "uint8")
    pes(2, local_size=1).run(gather_all, "ll_2d_multimem", [700, 500, 3, 700], "uint8")


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
