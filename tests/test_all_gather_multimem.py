"""All-gathers by multicast on the emulator: nodes, lengths, dtypes, repeated calls; under several schedules
and without races. (tests/test_all_gather.py has what all methods must do on one node.)"""

import numpy as np
import pytest
from test_all_gather import gather_all

import shmemkit as sk
from shmemkit.kernels.all_gather import METHODS

unordered = pytest.mark.schedules(deliveries="unordered", seeds=[None, 0, 1])


@pytest.mark.parametrize("n_pes", [1, 2, 3, 4, 5, 8])
@unordered
def test_all_gather_in_one_node(pes, n_pes):
    pes(n_pes).run(gather_all, "multimem", [33, 0, 5, 300], "int16")


@pytest.mark.parametrize("n_pes, local_size", [(2, 1), (4, 2), (6, 3), (6, 2), (8, 4), (8, 2)])
@unordered
def test_all_gather_over_nodes(pes, n_pes, local_size):
    pes(n_pes, local_size=local_size).run(gather_all, "ll_2d_multimem", [33, 0, 5, 300], "int16")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("unaligned", [0, 3])
@pytest.mark.parametrize("dtype", ["uint8", "float64", "bfloat16"])
def test_all_gather_in_place_and_unaligned(pes, dtype, unaligned, in_place):
    sizes = [1, 0, 7, 8, 33, 700, 3]
    pes(4, local_size=2).run(gather_all, "ll_2d_multimem", sizes, dtype, unaligned, in_place)
    pes(3).run(gather_all, "multimem", sizes, dtype, unaligned, in_place)


def test_all_gather_of_several_chunks_and_parts(pes, monkeypatch):
    monkeypatch.setattr("shmemkit.kernels.all_gather.multimem.PART", 64)
    pes(2).run(gather_all, "multimem", [1000, 65, 3, 2000], "uint8")
    pes(2, local_size=1).run(gather_all, "ll_2d_multimem", [9000, 5000, 3, 9000], "uint8")


@pytest.mark.parametrize("method, local_size", [("multimem", 4), ("ll_2d_multimem", 2)])
@pytest.mark.schedules(deliveries="unordered", seeds=range(3))
def test_all_gather_by_blocks_of_several_warps(pes, method, local_size):
    def main():
        world = sk.init(local_size=local_size)
        gather = METHODS[method](world, 4 * 700)
        gather.threads = 96
        gather._launches.clear()
        for call in range(3):
            x, out = np.full(700, 10 * call + world.rank, "uint8"), np.zeros((4, 700), "uint8")
            gather.bind(x, out.reshape(-1), False)(None)
            world.synchronize()
            assert (out == 10 * call + np.arange(4)[:, None]).all()
        gather.free()

    pes(4).run(main)


@pytest.mark.parametrize("method, n_pes, calls", [("multimem", 2, 3), ("ll_2d_multimem", 2, 3)])
def test_proven_for_two_ranks_of_a_node(method, n_pes, calls):
    """Three calls use the first half again."""
    found = sk.emu.explore(few_calls, n_pes, (method, calls), exhaustive=True, heap_size=1 << 16)
    assert found.finished and found.failure is None, str(found)


def test_proven_for_two_nodes():
    found = sk.emu.explore(
        few_calls, 2, ("ll_2d_multimem", 3), exhaustive=True, heap_size=1 << 16, local_size=1
    )
    assert found.finished and found.failure is None, str(found)


def few_calls(method, calls):
    world = sk.init()
    n = world.n_ranks
    gather = METHODS[method](world, 4 * n)
    gather.threads = 1
    gather._launches.clear()
    for call in range(calls):
        x, out = np.full(4, 10 * call + world.rank, "uint8"), np.zeros((n, 4), "uint8")
        gather.bind(x, out.reshape(-1), False)(None)
        assert (out == 10 * call + np.arange(n)[:, None]).all()
