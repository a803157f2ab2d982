"""Reduce-scatters of several nodes on the emulator: nodes, lengths, dtypes, parts and chunks, repeated calls,
in place, graphs; without races, with messages that overtake each other."""

import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from reduced import UFUNCS
from test_reduce_scatter import few_calls, scatter_all

import shmemkit as sk
from shmemkit.collectives.reduce_scatter import ReduceScatter
from shmemkit.collectives.reduce_scatter.push_2d import budget
from shmemkit.device.cuda.word_reductions import DTYPES
from shmemkit.emu.network import Network
from shmemkit.emu.stream import Stream
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.usefixtures("messages")
nodes_of = pytest.mark.parametrize("nodes, local_size", [(2, 2), (2, 3), (1, 3), (3, 1), (1, 1)])


@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@nodes_of
def test_lengths(pes, small_chunks, nodes, local_size):
    sizes = [1, 300, 0, 133, 600, 7]
    pes(nodes * local_size, local_size=local_size).run(scatter_all, "push_2d", sizes, "int16", "max")


@pytest.mark.slow
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("nodes, local_size", [(2, 4), (4, 2), (4, 4)])
def test_many_ranks(pes, nodes, local_size):
    pes(nodes * local_size, local_size=local_size).run(scatter_all, "push_2d", [9, 40, 3], "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_in_place(pes, small_chunks, dtype):
    op = "avg" if "float" in dtype else "prod"
    pes(4, local_size=2).run(scatter_all, "push_2d", [70, 9], dtype, op, 0, True)


@pytest.mark.parametrize(
    "dtype, unaligned, in_place", [("uint8", 3, False), ("float16", 1, True), ("float8_e4m3fn", 1, True)]
)
def test_unaligned(pes, small_chunks, dtype, unaligned, in_place):
    pes(4, local_size=2).run(scatter_all, "push_2d", [300, 1, 65], dtype, "sum", unaligned, in_place)


def test_a_thread_with_several_words(pes):
    """More than 4 of a block of 32 threads, and less, of a chunk."""
    pes(2, local_size=1).run(scatter_all, "push_2d", [480, 900, 130], "uint64")


@examples(8)
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    delivery=st.sampled_from(["eager", "ordered", "unordered"]),
    nodes=st.sampled_from([(2, 2), (2, 1), (3, 1), (1, 2), (3, 2)]),
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    dtype=st.sampled_from(["uint8", "float8_e4m3fn", "bfloat16", "float32", "float64"]),
    op=st.sampled_from(["sum", "min"]),
    unaligned=st.integers(0, 3),
    in_place=st.booleans(),
)
def test_any_shape(pes, small_chunks, seed, delivery, nodes, sizes, dtype, op, unaligned, in_place):
    ranks = pes(nodes[0] * nodes[1], local_size=nodes[1], seed=seed, delivery=delivery)
    ranks.run(scatter_all, "push_2d", sizes, dtype, op, unaligned, in_place)


@pytest.mark.each_value
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


def test_nan_and_inf_pass(pes):
    def main(op, dtype):
        world = sk.init()
        n = world.n_ranks
        given = [[np.nan, np.inf, -np.inf, 1, np.nan]] + [[1, 2, 3, np.nan, np.nan]] * (n - 1)
        x = np.array([given[world.rank]] * n, as_dtype(dtype))
        out = ReduceScatter(world, x.nbytes, op, "push_2d")(x)
        world.synchronize()
        expected = np.array(given[0])
        for other in given[1:]:
            expected = UFUNCS[op](expected, other)
        np.testing.assert_array_equal(out.astype("float64"), expected[None])

    for op in ("sum", "max"):
        for dtype in ("bfloat16", "float64"):
            pes(4, local_size=2).run(main, op, dtype)


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_streams_and_graphs(pes, small_chunks):
    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        scatter = ReduceScatter(world, 70 * 8 * n, "sum", "push_2d")
        other = Stream(world.stream.machine, world.rank)
        x, y, outs = np.zeros((n, 70)), np.zeros((n, 9)), [np.zeros(s) for s in (70, 9, 70)]
        graphs = []
        for stream in (world.stream, other):
            stream.begin_capture()
            scatter(x, outs[0], stream)
            scatter(y, outs[1], stream)
            graphs.append(stream.end_capture())
        for call in range(4):
            x[:], y[:] = call + me + np.arange(n)[:, None], call * me
            graphs[call % 2].launch(world.stream)
            scatter(x, outs[2], (None, world.stream)[call % 2])
            world.synchronize()
            ranks = sum(range(n))
            assert (outs[0] == (call + me) * n + ranks).all() and (outs[1] == call * ranks).all()
            assert (outs[2] == outs[0]).all()

    pes(4, local_size=2).run(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "nodes, local_size, calls, words, dtype",
    [(2, 1, 3, 17, "uint64"), (1, 2, 3, 17, "float16"), (3, 1, 3, 1, "float16")],
)
def test_right_in_every_schedule(small, nodes, local_size, calls, words, dtype):
    """17 words are 2 chunks. Three calls use the first half again. It fails with one half in the place of
    two, of any of the arrays, with one signal for all chunks, and without any of the waits."""
    small(sk.ReduceScatter, push_2d={"chunk": 8})
    args = "push_2d", calls, words, dtype
    found = sk.emu.explore(
        few_calls, nodes * local_size, args, exhaustive=True, local_size=local_size, heap_size=1 << 18
    )
    assert found.finished and found.failure is None, str(found)


@pytest.mark.schedules(deliveries="unordered", seeds=range(4))
def test_threads_of_a_block(pes, small):
    """It fails without any of the barriers of a block."""
    small(sk.ReduceScatter, push_2d={"chunk": 8})
    pes(6, local_size=3).run(few_calls, "push_2d", 4, 20, "uint64", 4)


def test_the_order_of_the_nodes(pes, monkeypatch):
    """The next one first, and none to my own."""
    sent, puts = [[] for _ in range(6)], Network.put

    def put(network, thread, dst, src, pe, *options):
        sent[thread.pe].append(int(pe))
        return puts(network, thread, dst, src, pe, *options)

    monkeypatch.setattr(Network, "put", put)
    pes(6, local_size=2).run(scatter_all, "push_2d", [5])
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
