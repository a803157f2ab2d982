"""AllReduce by a ring, on the emulator: small chunks, several nodes, the order in which they combine,
totals in float32; without races, with messages that overtake each other. (test_all_reduce.py has it among
all methods.)"""

import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from test_all_reduce import combined, few_calls, reduce_all

import shmemkit as sk
from shmemkit.emu.stream import Stream
from shmemkit.runtime.symmetric_memory import as_dtype


@pytest.mark.each_value
@pytest.mark.schedules(deliveries=("eager", "unordered"), seeds=[None, 0, 1])
@pytest.mark.parametrize("n_pes", [1, 2, 3, 4])
def test_several_chunks(pes, small_chunks, n_pes):
    pes(n_pes).run(reduce_all, "ring", [1, 200, 0, 331, 200, 7, 332])


@pytest.mark.slow
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_pes, sizes", [(5, [133, 1, 260]), (8, [90, 9])])
def test_many_ranks(pes, small_chunks, n_pes, sizes):
    pes(n_pes).run(reduce_all, "ring", sizes, "int16", "min")


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("in_place", [False, True])
def test_dtypes_in_chunks(pes, small_chunks, dtype, in_place):
    pes(3).run(reduce_all, "ring", [1, 333, 64, 334], dtype, "sum", 3, in_place)


@examples(12)
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    delivery=st.sampled_from(["eager", "ordered", "unordered"]),
    n_pes=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    dtype=st.sampled_from(["uint8", "float8_e4m3fn", "bfloat16", "float32", "float64"]),
    op=st.sampled_from(["sum", "max", "min"]),
    unaligned=st.integers(0, 3),
    in_place=st.booleans(),
)
def test_any_shape(pes, small_chunks, seed, delivery, n_pes, sizes, dtype, op, unaligned, in_place):
    ranks = pes(n_pes, seed=seed, delivery=delivery)
    ranks.run(reduce_all, "ring", sizes, dtype, op, unaligned, in_place)


@pytest.mark.each_value
@pytest.mark.schedules(deliveries=("ordered", "unordered"), seeds=[None, 0])
@pytest.mark.parametrize("nodes, local_size", [(2, 1), (3, 1), (2, 2)])
def test_nodes(pes, small_chunks, nodes, local_size):
    pes(nodes * local_size, local_size=local_size).run(reduce_all, "ring", [9, 200, 0, 333], "bfloat16")


@pytest.mark.each_value
@pytest.mark.parametrize("dtype, op", [("float32", "sum"), ("bfloat16", "avg"), ("float16", "prod")])
def test_the_order_is_the_documented_one(pes, small_chunks, dtype, op):
    """Bit by bit: additions are rounded, so that another order gives other bits; those of 16 bits are rounded
    at the end only."""

    def main():
        world = sk.init()
        x = [np.random.default_rng(k).standard_normal(333) for k in range(world.n_ranks)]
        x = [row.astype(as_dtype(dtype)) for row in x]
        out = sk.AllReduce(world, x[0].nbytes, op, "ring")(x[world.rank])
        world.synchronize()
        np.testing.assert_array_equal(out.view("uint8"), combined(op, x).view("uint8"))

    pes(4).run(main)


def test_sums_of_16_bits_are_rounded_once(pes):
    """If each of them is, 256 + 1 + 1 + 1 stays 256 in bfloat16."""

    def main():
        world = sk.init()
        x = np.full(40, 256 if world.rank == 0 else 1, as_dtype("bfloat16"))
        out = sk.AllReduce(world, x.nbytes, "sum", "ring")(x)
        world.synchronize()
        assert (out.astype("float32") == 260).all()  # 259, to nearest even

    pes(4).run(main)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_counts_twice(pes, small_chunks, dtype):
    """There is memory for totals of two bytes each."""

    def main():
        world = sk.init()
        x = np.ones(300, as_dtype(dtype))
        reduce = sk.AllReduce(world, 600, "sum", "ring")
        for size in (300, 299, 7):
            out = reduce(x[:size])
            world.synchronize()
            assert (out.astype("float32") == 2).all()
        with pytest.raises(ValueError, match="x has 301 bytes, which count 2 times, .* than max_nbytes=600"):
            reduce(np.ones(301, x.dtype))
        out = sk.all_reduce(np.ones(1 << 16, x.dtype))  # whose object has room for that
        world.synchronize()
        assert (out.astype("float32") == 2).all()

    pes(2, local_size=1).run(main)


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_graphs_between_calls(pes, small_chunks):
    def main():
        world = sk.init()
        reduce = sk.AllReduce(world, 800, "sum", "ring")
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
    "n_pes, local_size, calls, words, chunk", [(2, 2, 3, 6, 2), (2, 1, 3, 4, 2), (3, 3, 2, 4, 2)]
)
def test_right_in_every_schedule(small, n_pes, local_size, calls, words, chunk):
    """Of one block. It fails without any of the waits; with a signal that counts the chunks, or stands for
    both phases; with partial totals and results, or those of all chunks, in one buffer; and without counting
    the calls."""
    small(sk.AllReduce, ring={"least": chunk, "most": chunk, "blocks": 1})
    found = sk.emu.explore(
        few_calls, n_pes, ("ring", calls, words), exhaustive=True, local_size=local_size, heap_size=1 << 18
    )
    assert found.finished and found.failure is None, str(found)


@pytest.mark.parametrize("wanted", [1, 5, 208, 832])
def test_chunks_fit_in_what_was_made(pes, wanted):
    """Whatever the most words, fewer of them need no more chunks, and no larger ones."""

    def main():
        ring = sk.AllReduce.maker("ring")(sk.init(), 8, "sum", blocks=wanted, chunks=1)
        edges = {ring.most * k + d for k in (1, 5, 208, 832) for d in (-1, 0, 1)}
        room = most = 0
        for words in sorted({*range(1, 3000, 7), *edges}):
            chunk, chunks = ring.chunks_of(words)
            assert (chunks - 1) * chunk < words <= chunks * chunk
            room, most = max(room, chunk), max(most, chunks)
            assert room == chunk and most <= ring.most_chunks(words)

    pes(1).run(main)
