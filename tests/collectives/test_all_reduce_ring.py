"""The rings of AllReduce on the emulator: small chunks, several nodes, the order in which they combine,
totals in float32; without races, with messages that overtake each other. (test_all_reduce.py has them
among all methods.)"""

import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from test_all_reduce import combined, few_calls, reduce_all

import shmemkit as sk
from shmemkit.collectives.all_reduce import ring
from shmemkit.emu.stream import Stream
from shmemkit.runtime.symmetric_memory import as_dtype

RINGS = "ring", "ring_reduce_scatter"
methods = pytest.mark.parametrize("method", RINGS)


@pytest.fixture
def small_chunks(monkeypatch):
    """Of 2 to 16 words; blocks have several of them."""
    for name, value in {"LEAST": 2, "MOST": 16, "RING_BLOCKS": 3, "SCATTER_BLOCKS": 2}.items():
        monkeypatch.setattr(ring, name, value)


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries=("eager", "unordered"), seeds=[None, 0, 1])
@pytest.mark.parametrize("n_pes", [1, 2, 3, 4])
def test_several_chunks(pes, small_chunks, n_pes, method):
    pes(n_pes).run(reduce_all, method, [1, 200, 0, 331, 200, 7, 332])


@pytest.mark.slow
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_pes, sizes", [(5, [133, 1, 260]), (8, [90, 9])])
def test_many_ranks(pes, small_chunks, n_pes, sizes, method):
    pes(n_pes).run(reduce_all, method, sizes, "int16", "min")


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("in_place", [False, True])
def test_dtypes_in_chunks(pes, small_chunks, dtype, in_place, method):
    pes(3).run(reduce_all, method, [1, 333, 64, 334], dtype, "sum", 3, in_place)


@methods
@examples(12)
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    delivery=st.sampled_from(["eager", "ordered", "unordered"]),
    n_pes=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    dtype=st.sampled_from(["uint8", "bfloat16", "float32", "float64"]),
    op=st.sampled_from(["sum", "max", "min"]),
    unaligned=st.integers(0, 3),
    in_place=st.booleans(),
)
def test_any_shape(pes, small_chunks, method, seed, delivery, n_pes, sizes, dtype, op, unaligned, in_place):
    ranks = pes(n_pes, seed=seed, delivery=delivery)
    ranks.run(reduce_all, method, sizes, dtype, op, unaligned, in_place)


@pytest.mark.each_value
@pytest.mark.schedules(deliveries=("ordered", "unordered"), seeds=[None, 0])
@pytest.mark.parametrize("nodes, local_size", [(2, 1), (3, 1), (2, 2)])
def test_nodes(pes, small_chunks, nodes, local_size):
    pes(nodes * local_size, local_size=local_size).run(reduce_all, "ring", [9, 200, 0, 333], "bfloat16")


def test_only_the_first_goes_across_nodes(pes):
    def main():
        with pytest.raises(ValueError, match="all_reduce ring_reduce_scatter cannot be used here"):
            sk.AllReduce(sk.init(), 80, "sum", "ring_reduce_scatter")

    pes(2, local_size=1).run(main)


@pytest.mark.each_value
@methods
@pytest.mark.parametrize("dtype, op", [("float32", "sum"), ("bfloat16", "avg"), ("float16", "prod")])
def test_the_order_is_the_documented_one(pes, small_chunks, dtype, op, method):
    """Bit by bit: additions are rounded, so that another order gives other bits; those of 16 bits are rounded
    at the end only."""

    def main():
        world = sk.init()
        n, size = world.n_ranks, 333
        x = [np.random.default_rng(k).standard_normal(size).astype(as_dtype(dtype)) for k in range(n)]
        out = sk.AllReduce(world, x[0].nbytes, op, method)(x[world.rank])
        world.synchronize()
        expected, begin = [], 0
        if method == "ring":
            expected = [combined(op, x)]
        else:
            words = -(-x[0].nbytes // 8)
            segment = (-(-words // n) + 15 & -16) * 8 // x[0].itemsize
            for k in range(n):
                order = [*range(k + 1, n), *range(k + 1)]
                expected.append(combined(op, [x[r][begin : begin + segment] for r in order]))
                begin += segment
        np.testing.assert_array_equal(out.view("uint8"), np.concatenate(expected).view("uint8"))

    pes(4).run(main)


@methods
def test_sums_of_16_bits_are_rounded_once(pes, method):
    """If each of them is, 256 + 1 + 1 + 1 stays 256 in bfloat16."""

    def main():
        world = sk.init()
        x = np.full(40, 256 if world.rank == 0 else 1, as_dtype("bfloat16"))
        out = sk.AllReduce(world, x.nbytes, "sum", method)(x)
        world.synchronize()
        assert (out.astype("float32") == 260).all()  # 259, to nearest even

    pes(4).run(main)


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_graphs_between_calls(pes, small_chunks, method):
    def main():
        world = sk.init()
        reduce = sk.AllReduce(world, 800, "sum", method)
        x, y, outs = np.zeros(100), np.zeros(9), [np.zeros(100), np.zeros(9), np.zeros(100)]
        other = Stream(world.stream.machine, world.rank)
        other.begin_capture()
        reduce(x, outs[0], other)
        reduce(y, outs[1], other)
        graph = other.end_capture()
        for call in range(4):
            x[:], y[:] = call + world.rank, call * world.rank
            graph.launch(world.stream)
            reduce(x, outs[2])
            world.synchronize()
            ranks = sum(range(world.n_ranks))
            assert (outs[0] == call * world.n_ranks + ranks).all() and (outs[1] == call * ranks).all()
            assert (outs[2] == outs[0]).all()

    pes(3).run(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, n_pes, local_size, calls, words, chunk",
    [
        ("ring", 2, 2, 3, 6, 2),
        ("ring", 2, 1, 3, 4, 2),
        ("ring", 3, 3, 2, 4, 2),
        ("ring_reduce_scatter", 2, 2, 3, 32, 8),
        ("ring_reduce_scatter", 3, 3, 2, 48, 16),
    ],
)
def test_right_in_every_schedule(monkeypatch, method, n_pes, local_size, calls, words, chunk):
    """Of one block. It fails without any of the waits; with a signal that counts the chunks, or stands for
    both phases; with partial totals and results, those of all chunks, or of all segments, in one buffer; and
    without counting the calls."""
    for name, value in {"LEAST": chunk, "MOST": chunk, "RING_BLOCKS": 1, "SCATTER_BLOCKS": 1}.items():
        monkeypatch.setattr(ring, name, value)
    found = sk.emu.explore(
        few_calls, n_pes, (method, calls, words), exhaustive=True, local_size=local_size, heap_size=1 << 18
    )
    assert found.finished and found.failure is None, str(found)


@pytest.mark.parametrize("wanted", [1, 5, 208, 832])
def test_chunks_fit_in_what_was_made(wanted):
    """Whatever the most words, fewer of them need no more chunks, and no larger ones."""
    sizes = sorted({*range(1, 3000, 7), *(ring.MOST * k + d for k in (1, 5, 208, 832) for d in (-1, 0, 1))})
    room = most = 0
    for words in sizes:
        chunk, chunks = ring.chunks_of(words, wanted)
        assert (chunks - 1) * chunk < words <= chunks * chunk
        room, most = max(room, chunk), max(most, chunks)
        assert room == chunk and most <= ring.most_chunks(words, wanted)
