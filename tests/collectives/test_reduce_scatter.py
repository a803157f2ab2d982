"""ReduceScatter on the emulator: float8, push in steps, shapes of outputs, explorations, and what is
refused."""

import numpy as np
import pytest
from fast import slow
from reduced import combined
from specification import calls

import shmemkit as sk
from shmemkit.collectives.reduce_scatter import METHODS, ReduceScatter
from shmemkit.runtime.symmetric_memory import as_dtype

# test_reduce_scatter_copy.py and _2d.py are about the others.
methods = pytest.mark.parametrize("method", [m for m in METHODS if m not in ("copy_engine", "push_2d")])


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


@pytest.mark.parametrize("n_pes", [2, *slow(3)])
def test_push_in_steps(pes, small, n_pes):
    """Parts of several steps."""
    small(sk.ReduceScatter, push={"part": 128, "chunk": 8192, "senders": 3})
    pes(n_pes).run(calls, "ReduceScatter", "push", [50_000, 3, 70_001], "uint8")


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
