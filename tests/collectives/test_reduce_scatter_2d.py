"""Reduce-scatters of several nodes on the emulator: the order of adding and of nodes, and the budget of
blocks."""

import numpy as np
import pytest
from reduced import UFUNCS
from specification import calls

import shmemkit as sk
from shmemkit.collectives.reduce_scatter import ReduceScatter
from shmemkit.collectives.reduce_scatter.push_2d import budget
from shmemkit.emu.network import Network
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.usefixtures("messages")


def test_a_thread_with_several_words(pes):
    """More than 4 of a block of 32 threads, and less, of a chunk."""
    pes(2, local_size=1).run(calls, "ReduceScatter", "push_2d", [480, 900, 130], "uint64")


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_order_is_the_documented_one_every_time(pes, dtype, op):
    """Of numbers whose sum depends on the order of adding, and on the precision of what is carried."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        given = [
            (np.random.default_rng(r).standard_normal((n, 50)) * 4.0 ** (r % 3)).astype(as_dtype(dtype))
            for r in range(n)
        ]
        add, wide = UFUNCS[op], [g[me].astype("float32") for g in given]
        first, *others = [add(wide[r], wide[r + 1]) for r in range(0, n, 2)]
        for other in others:
            first = add(first, other)
        expected = (first / np.float32(n) if op == "avg" else first).astype(as_dtype(dtype))
        scatter = ReduceScatter(world, given[0].nbytes, op, "push_2d")
        for _ in range(3):
            out = scatter(given[me])
            world.synchronize()
            assert out.tobytes() == expected.tobytes()

    pes(6, local_size=2).run(main)


def test_the_order_of_the_nodes(pes, monkeypatch):
    """The next one first, and none to my own."""
    sent, puts = [[] for _ in range(6)], Network.put

    def put(network, thread, dst, src, pe, *options):
        sent[thread.pe].append(int(pe))
        return puts(network, thread, dst, src, pe, *options)

    monkeypatch.setattr(Network, "put", put)
    pes(6, local_size=2).run(calls, "ReduceScatter", "push_2d", [5])
    assert sent == [[(me + 2) % 6, (me + 4) % 6] for me in range(6)]


def test_budget():
    """Of H200: on one node NVLink sets the pace, with several the network does, if few ranks are on each."""
    h200 = (9, 0), 132
    assert budget(*h200, 1, 1) == 1
    assert budget(*h200, 1, 8) == 24  # combines 9 bytes at 25 GB/s while NVLink carries 7 at 450
    assert budget(*h200, 4, 8) == 18  # and the network 1 at 50
    assert budget(*h200, 2, 1) == 4
    assert budget((8, 0), 108, 2, 8) == 16
    assert budget((7, 0), 80, 1, 2) == budget((8, 0), 80, 1, 2) == 36
    assert budget((12, 0), 20, 1, 8) == 10  # half of the multiprocessors
