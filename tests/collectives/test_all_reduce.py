"""AllReduce on the emulator: methods, ranks, lengths, dtypes, ops, repeats, streams and graphs, with races
checked and messages late."""

import itertools

import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from reduced import combined

import shmemkit as sk
from shmemkit.device.cuda.word_reductions import DTYPES, OPS
from shmemkit.emu.stream import Stream
from shmemkit.runtime.symmetric_memory import as_dtype

# Those by multimem are in test_all_reduce_multimem.py: not of all ops and dtypes, nor in order.
methods = pytest.mark.parametrize("method", [m for m in sk.AllReduce.methods if "multimem" not in m])


def inputs(call, size, dtype, n):
    """What all ranks give in `call`."""
    return [np.random.default_rng([call, r]).integers(0, 100, size).astype(as_dtype(dtype)) for r in range(n)]


def reduce_all(method, sizes, dtype="float32", op="sum", unaligned=0, in_place=False):
    """One after another, by one object. The arrays of rank 0 are aligned, also if others' are not."""
    world = sk.init()
    n, dtype = world.n_ranks, as_dtype(dtype)
    counts = 2 if "float8" in dtype.name else 1  # by methods whose totals travel
    reduce = sk.AllReduce(world, counts * max(sizes) * dtype.itemsize, op, method)
    first = unaligned * world.rank
    for call, size in enumerate(sizes):
        given = inputs(call, size, dtype, n)
        room = np.zeros(first + size + 5, dtype)
        out = room[first : first + size]
        x = out if in_place else np.zeros(first + size, dtype)[first:]
        x[:] = given[world.rank]
        assert reduce(x, out) is out
        world.synchronize()
        np.testing.assert_array_equal(out.view("uint8"), combined(op, given).view("uint8"))
        assert not room[:first].any() and not room[first + size :].any()
    reduce.free()


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_pes", [1, 2, 3, 4])
def test_lengths(pes, n_pes, method):
    pes(n_pes).run(reduce_all, method, [1, 40, 0, 333, 41, 7], "float32")


@pytest.mark.slow
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_pes, sizes", [(5, [7, 130, 1]), (8, [64, 9]), (16, [33])])
def test_many_ranks(pes, n_pes, sizes, method):
    pes(n_pes).run(reduce_all, method, sizes, "int16", "max")


@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
def test_unaligned(pes, method):
    pes(3).run(reduce_all, method, [1, 300, 33, 65], "uint8", "sum", 3)


@pytest.mark.each_value
@methods
@pytest.mark.parametrize(
    "op, dtype", [(o, d) for o, d in itertools.product(OPS, DTYPES) if o != "avg" or "fl" in d]
)
def test_ops_and_dtypes(pes, method, op, dtype):
    pes(2).run(reduce_all, method, [9], dtype, op, 0, True)


@pytest.mark.each_value
@methods
@pytest.mark.parametrize("n_pes", range(1, 10))
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_combined_in_float32_and_rounded_once(pes, method, n_pes, dtype):
    """Also of odd lengths, at odd addresses; sums that saturate, and NaN."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        given = 4.0 * np.random.default_rng(n).integers(-64, 64, (n, 101))
        given[n // 2, 7], given[0, 9], given[n - 1, 9] = np.nan, np.inf, -np.inf
        given = given.astype(as_dtype(dtype))
        room = np.zeros(101 + me, given.dtype)
        x = room[me:]
        for op in ("sum", "max", "avg"):
            x[:] = given[me]
            sk.AllReduce(world, 256, op, method)(x, x)
            world.synchronize()
            np.testing.assert_array_equal(x.view("uint8"), combined(op, list(given)).view("uint8"))

    pes(n_pes).run(main)


@pytest.mark.slow
@methods
def test_larger_than_a_block(pes, method):
    pes(2).run(reduce_all, method, [20_000, 3, 21_000], "uint8")


@methods
@examples(8)
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    n_pes=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    dtype=st.sampled_from(["uint8", "float8_e4m3fn", "bfloat16", "float32", "float64"]),
    op=st.sampled_from(["sum", "min"]),
    unaligned=st.integers(0, 3),
    in_place=st.booleans(),
)
def test_any_shape(pes, method, seed, n_pes, sizes, dtype, op, unaligned, in_place):
    pes(n_pes, seed=seed).run(reduce_all, method, sizes, dtype, op, unaligned, in_place)


@methods
def test_nan_and_inf_pass(pes, method):
    def main(op, dtype):
        world = sk.init()
        x = np.array([np.nan, np.inf, -np.inf, 1, np.nan], as_dtype(dtype))
        if world.rank:
            x = np.array([1, 2, 3, np.nan, np.nan], as_dtype(dtype))
        out = sk.AllReduce(world, x.nbytes, op, method)(x)
        world.synchronize()
        expected = combined(
            op,
            [np.array([np.nan, np.inf, -np.inf, 1, np.nan], "float32")]
            + [np.array([1, 2, 3, np.nan, np.nan], "float32")] * (world.n_ranks - 1),
        )
        np.testing.assert_array_equal(out.astype("float32"), expected)

    for op, dtype in itertools.product(("sum", "max", "min"), ("float16", "bfloat16", "float32", "float64")):
        pes(2).run(main, op, dtype)


@methods
def test_all_ranks_get_the_same_bits_every_time(pes, method):
    def main():
        world = sk.init()
        x = np.random.default_rng(world.rank).standard_normal(100).astype("float32") * 10.0 ** (
            3 * world.rank
        )
        reduce = sk.AllReduce(world, x.nbytes, "sum", method)
        bits = set()
        for _ in range(3):
            out = reduce(x)
            world.synchronize()
            bits |= {b for b in world.host_allgather(out.tobytes())}
        assert len(bits) == 1

    pes(4).run(main)


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_streams_and_graphs(pes, method):
    def main():
        world = sk.init()
        reduce = sk.AllReduce(world, 320, "sum", method)
        other = Stream(world.stream.machine, world.rank)
        x, y, outs = np.zeros(40), np.zeros(9), [np.zeros(40), np.zeros(9), np.zeros(40)]
        graphs = []
        for stream in (world.stream, other):
            stream.begin_capture()
            reduce(x, outs[0], stream)
            reduce(y, outs[1], stream)
            graphs.append(stream.end_capture())
        for call in range(4):
            x[:], y[:] = call + world.rank, call * world.rank
            graphs[call % 2].launch(world.stream)
            reduce(x, outs[2], (None, world.stream)[call % 2])
            world.synchronize()
            ranks = sum(range(world.n_ranks))
            assert (outs[0] == call * world.n_ranks + ranks).all() and (outs[1] == call * ranks).all()
            assert (outs[2] == outs[0]).all()

    pes(2).run(main)


def few_calls(method, calls, words):
    """Of one thread per block: little enough for all schedules."""
    world = sk.init()
    reduce = sk.AllReduce.maker(method)(world, 8 * words, "sum", threads=1)
    x, out = np.zeros(words, "uint64"), np.zeros(words, "uint64")
    for call in range(calls):
        x[:] = 10 * call + world.rank
        reduce.bind(x, out, False, x.dtype)(None)
        world.synchronize()
        assert (out == 10 * call * world.n_ranks + sum(range(world.n_ranks))).all()
        out[:] = 255


@pytest.mark.slow
def test_one_shot_is_right_in_every_schedule():
    found = sk.emu.explore(few_calls, 2, ("one_shot", 3, 1), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.slow
def test_push_is_right_in_every_schedule():
    """Both stages have one scratch: the second call uses both of its buffers again."""
    found = sk.emu.explore(few_calls, 2, ("push", 2, 4), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


def test_wrong_arrays(pes):
    def main():
        world = sk.init()
        reduce = sk.AllReduce(world, 64, "avg")
        x = np.zeros(8, "float32")
        for array, out, message in [
            (x, np.zeros(7, "float32"), "out must be float32 with 8 elements"),
            (x, np.zeros(8), "out is float64 .*; out must be float32"),
            (
                np.zeros(17, "float32"),
                None,
                "x has 68 bytes, more than max_nbytes=64. Make an AllReduce with",
            ),
            (np.zeros(8, "int32"), None, "op is 'avg' and dtype int32; it must be a floating"),
            (np.zeros(4, "complex64"), None, "dtype is complex64; it must be "),
            (np.zeros(16, "float32")[::2], None, "it must be C-contiguous"),
        ]:
            with pytest.raises(ValueError, match=message):
                reduce(array, out)
        room = np.zeros(12, "float32")
        with pytest.raises(ValueError, match="overlap; they must lie apart, or be the same"):
            reduce(room[:8], room[4:])

    pes(2).run(main)
