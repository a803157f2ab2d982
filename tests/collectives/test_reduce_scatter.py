"""ReduceScatter on the emulator: methods, ranks, lengths, dtypes, ops, repeats, streams and graphs, with
races checked and messages late."""

import itertools

import numpy as np
import pytest
from fast import examples, slow
from hypothesis import given
from hypothesis import strategies as st
from reduced import combined

import shmemkit as sk
from shmemkit.collectives.reduce_scatter import METHODS, ReduceScatter
from shmemkit.device.cuda.word_reductions import DTYPES, OPS
from shmemkit.emu.stream import Stream
from shmemkit.runtime.symmetric_memory import as_dtype

# test_reduce_scatter_copy.py and _2d.py are about the others.
methods = pytest.mark.parametrize("method", [m for m in METHODS if m not in ("copy_engine", "push_2d")])


def inputs(call, size, dtype, n):
    """What all ranks give in `call`: n parts of `size` elements, which no order of adding changes."""
    return [
        np.random.default_rng([call, r]).integers(0, 100, n * size).astype(as_dtype(dtype)) for r in range(n)
    ]


def order(method, rank, n):
    """In which the ranks' elements are combined."""
    return [(rank + 1 + k) % n for k in range(n)] if method == "ring" else list(range(n))


def scatter_all(method, sizes, dtype="float32", op="sum", unaligned=0, in_place=False):
    """One after another, by one object. `sizes` are those of a part; those of rank 0 are aligned, also if
    others' are not."""
    world = sk.init()
    n, me, dtype = world.n_ranks, world.rank, as_dtype(dtype)
    counts = 2 if "float8" in dtype.name else 1  # by methods whose totals travel
    scatter = ReduceScatter(world, counts * n * max(sizes) * dtype.itemsize, op, method)
    first = unaligned * me
    for call, size in enumerate(sizes):
        given = inputs(call, size, dtype, n)
        room = np.zeros(first + n * size + 5, dtype)
        x = room[first : first + n * size]
        x[:] = given[me]
        mine = slice(me * size, (me + 1) * size)
        beside = np.zeros(first + size + 5, dtype)
        out = x[mine] if in_place else beside[first:][:size]
        assert scatter(x, out) is out
        world.synchronize()
        expected = combined(op, [given[k][mine] for k in order(method, me, n)])
        np.testing.assert_array_equal(out.view("uint8"), expected.view("uint8"))
        out[:] = given[me][mine] if in_place else 0
        assert (x == given[me]).all() and not beside.any()
        assert not room[:first].any() and not room[first + n * size :].any()
    scatter.free()


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_pes", [1, 2, 3, 4])
def test_lengths(pes, n_pes, method):
    pes(n_pes).run(scatter_all, method, [1, 40, 0, 133, 41, 7], "float32")


@pytest.mark.slow
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_pes, sizes", [(5, [7, 30, 1]), (8, [64, 9]), (16, [5])])
def test_many_ranks(pes, small_chunks, n_pes, sizes, method):
    pes(n_pes).run(scatter_all, method, sizes, "int16", "max")


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[0, 1])
@pytest.mark.parametrize("n_pes", [2, 3])
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_several_blocks_and_chunks(pes, small_chunks, n_pes, dtype, method):
    pes(n_pes).run(scatter_all, method, [250, 3, 520, 7, 33, 510], dtype)


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float8_e5m2"])
def test_unaligned(pes, method, dtype):
    pes(3).run(scatter_all, method, [1, 300, 33, 65], dtype, "sum", 3, False)
    pes(3).run(scatter_all, method, [1, 33, 65], dtype, "max", 3, True)


@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
def test_in_place(pes, small_chunks, method):
    pes(3).run(scatter_all, method, [40, 8, 100], "float32", "sum", 0, True)


@pytest.mark.each_value
@methods
@pytest.mark.parametrize(
    "op, dtype", [(o, d) for o, d in itertools.product(OPS, DTYPES) if o != "avg" or "fl" in d]
)
def test_ops_and_dtypes(pes, method, op, dtype):
    pes(3).run(scatter_all, method, [9], dtype, op, 0, True)


@pytest.mark.each_value
@methods
@pytest.mark.parametrize("n_pes", range(1, 10))
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_combined_in_float32_and_rounded_once(pes, method, n_pes, dtype):
    """Also of odd lengths, at odd addresses; sums that saturate, and NaN."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        given = 4.0 * np.random.default_rng(n).integers(-64, 64, (n, n, 33))
        given[n // 2, :, 7], given[0, :, 9], given[n - 1, :, 9] = np.nan, np.inf, -np.inf
        given = given.astype(as_dtype(dtype))
        for op in ("sum", "min", "avg"):
            out = ReduceScatter(world, 2 * given[me].nbytes, op, method)(given[me])
            world.synchronize()
            expected = combined(op, list(given[:, me]))
            np.testing.assert_array_equal(out[0].view("uint8"), expected.view("uint8"))

    pes(n_pes).run(main)


@pytest.mark.slow
@methods
def test_larger_than_a_block(pes, method):
    pes(2).run(scatter_all, method, [10_000, 3, 10_500], "uint8")


@pytest.mark.parametrize("n_pes", [2, *slow(3)])
def test_push_in_steps(pes, small, n_pes):
    """Parts of several steps."""
    small(sk.ReduceScatter, push={"part": 128, "chunk": 8192, "senders": 3})
    pes(n_pes).run(scatter_all, "push", [50_000, 3, 70_001], "uint8")


def test_push_where_gpus_differ(pes):
    """As many parts as the GPU with fewest multiprocessors has blocks."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = (5, 3)[world.rank]
        scatter = ReduceScatter(world, 2 * 70_000, "sum", "push")
        out = scatter(np.full((2, 70_000), world.rank + 1, "uint8"))
        world.synchronize()
        assert scatter._methods["push"].parts == 3 and (out == 3).all()

    pes(2).run(main)


@methods
@examples(8)
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    n_pes=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    dtype=st.sampled_from(["uint8", "float8_e4m3fn", "bfloat16", "float32", "float64"]),
    op=st.sampled_from(["sum", "min"]),
    unaligned=st.integers(0, 3),
    in_place=st.booleans(),
)
def test_any_shape(pes, method, seed, n_pes, sizes, dtype, op, unaligned, in_place):
    pes(n_pes, seed=seed).run(scatter_all, method, sizes, dtype, op, unaligned, in_place)


@methods
def test_shapes_of_new_outputs(pes, method):
    def main():
        world = sk.init()
        n = world.n_ranks
        scatter = ReduceScatter(world, 1 << 10, "sum", method)
        shapes = {(n, 3, 2): (1, 3, 2), (4 * n,): (4,), (2 * n, 3): (2, 3), (n,): (1,), (3, n, 2): (6,)}
        for shape, expected in {**shapes, (0, 3): (0, 3)}.items():
            x = np.arange(np.prod(shape), dtype="int64").reshape(shape)
            out = scatter(x)
            world.synchronize()
            assert out.shape == expected and out.dtype == x.dtype
            assert (out.reshape(-1) == n * x.reshape(n, x.size // n)[world.rank]).all()

    pes(2).run(main)


@methods
def test_nan_and_inf_pass(pes, method):
    def main(op, dtype):
        world = sk.init()
        n = world.n_ranks
        given = [[np.nan, np.inf, -np.inf, 1, np.nan]] + [[1, 2, 3, np.nan, np.nan]] * (n - 1)
        x = np.array([given[world.rank]] * n, as_dtype(dtype))
        out = ReduceScatter(world, x.nbytes, op, method)(x)
        world.synchronize()
        expected = combined(op, [np.array(g, "float32") for g in given])
        np.testing.assert_array_equal(out.astype("float32"), expected[None])

    for op, dtype in itertools.product(("sum", "max", "min"), ("float16", "bfloat16", "float32", "float64")):
        pes(2).run(main, op, dtype)


@pytest.mark.each_value
@methods
@pytest.mark.parametrize("dtype, op", [("float32", "sum"), ("bfloat16", "avg"), ("float16", "sum")])
def test_the_order_is_the_documented_one_every_time(pes, method, dtype, op):
    """Of numbers whose sum depends on the order of adding, and on the precision of what is carried."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        given = [
            (np.random.default_rng(r).standard_normal((n, 50)) * 4.0 ** (r % 3)).astype(as_dtype(dtype))
            for r in range(n)
        ]
        scatter = ReduceScatter(world, given[0].nbytes, op, method)
        expected = combined(op, [given[k][me] for k in order(method, me, n)])
        for _ in range(3):
            out = scatter(given[me])
            world.synchronize()
            assert out.tobytes() == expected.tobytes()

    pes(4).run(main)


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_streams_and_graphs(pes, method):
    """Of symmetric and of private arrays."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        scatter = ReduceScatter(world, 40 * 8 * n, "sum", method)
        other = Stream(world.stream.machine, world.rank)
        x, y = scatter.output((n, 40), "float64"), np.zeros((n, 9))
        outs = [np.zeros(40), scatter.output(9, "float64"), np.zeros(40)]
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

    pes(2).run(main)


def few_calls(method, calls, words, dtype="uint64", threads=1):
    """Of one thread per block, and one word, little enough for all schedules."""
    world = sk.init()
    n, me = world.n_ranks, world.rank
    scatter = sk.ReduceScatter.maker(method)(world, 8 * words * n, "sum", threads=threads)
    x, out = np.zeros(words * n, "uint64"), np.zeros(words, "uint64")
    given = x.view(dtype).reshape(n, -1)
    for call in range(calls):
        given[:] = 10 * call + me + 3 * np.arange(n)[:, None]
        scatter.bind(x, out, False, given.dtype)(None)
        world.synchronize()
        assert (out.view(dtype) == (10 * call + 3 * me) * n + sum(range(n))).all()
        out[:] = 255


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=range(8))
@pytest.mark.parametrize("method", ["push", "ring"])
def test_threads_of_a_block(pes, method):
    pes(3).run(few_calls, method, 4, 4, "uint64", 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, dtype", [("ll", "uint64"), ("push", "uint64"), ("ring", "uint64"), ("ring", "float16")]
)
def test_right_in_every_schedule(small_chunks, method, dtype):
    found = sk.emu.explore(few_calls, 2, (method, 3, 1, dtype), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@methods
def test_refused_where_memory_is_not_mapped(pes, method):
    def main():
        world = sk.init()
        with pytest.raises(ValueError, match=f"reduce_scatter {method} cannot be used here: rank ."):
            ReduceScatter(world, 64, "sum", method)

    pes(4, local_size=2).run(main)


def test_wrong_arrays(pes):
    def main():
        world = sk.init()
        scatter = ReduceScatter(world, 64, "avg", "ll")
        x = np.zeros((2, 8), "float32")
        for array, out, message in [
            (x, np.zeros(7, "float32"), "out must be float32 with 8 elements"),
            (x, np.zeros(16, "float32"), "out must be float32 with 8 elements"),
            (x, np.zeros(8), "out is float64 .*; out must be float32"),
            (
                np.zeros(5, "float32"),
                None,
                r"x is \(5,\); the number of its elements must be a multiple of 2",
            ),
            (np.zeros(18, "float32"), None, "x has 72 bytes, more than max_nbytes=64"),
            (np.zeros(8, "int32"), None, "op is 'avg' and dtype int32; it must be a floating"),
            (np.zeros(4, "complex64"), None, "dtype is complex64; it must be "),
            (np.zeros(32, "float32")[::2], None, "it must be C-contiguous"),
            (x, x[1 - world.rank], "overlap; they must lie apart, or out must be its own part of x"),
        ]:
            with pytest.raises(ValueError, match=message):
                scatter(array, out)

    pes(2).run(main)


def test_auto(pes):
    def main():
        world = sk.init()
        scatter = sk.ReduceScatter(world, 1 << 20)
        assert [scatter.method_for(n) for n in (8, 1 << 20)] == ["ll128", "push"]
        for size in (3, (1 << 15) + 1):
            x = np.full((2, size), world.rank + 1, "int32")
            out = scatter(x)
            world.synchronize()
            assert (out == 3).all()

    pes(2).run(main)
