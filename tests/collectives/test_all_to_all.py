"""AllToAllV on the emulator: splits that vary. (test_every_method.py has AllToAll.)"""

import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

import shmemkit as sk
from shmemkit.emu.stream import Stream
from shmemkit.runtime.symmetric_memory import as_dtype


@cuda.jit
def fill(x, value):
    for i in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        x[i] = value + i


@cuda.jit
def add(x, total):
    for i in range(x.size):
        total[0] += x[i]


@pytest.mark.parametrize("symmetric", [False, True])
def test_variable_into_one_output_again_and_again(pes, symmetric):
    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        exchange = sk.AllToAllV(world, n * 40 * 4)
        out = exchange.output(n * 40, "int32") if symmetric else np.zeros(n * 40, "int32")
        x, total, got = np.zeros(n * 40, "int32"), np.zeros(1, "int64"), np.zeros(n, "int64")
        splits = np.full(n, 40, "int64")
        for call in range(5):
            fill[1, 8, world.stream](x, 1000 * call + 10_000 * me)
            exchange(x, splits, out, got)
            add[1, 1, world.stream](out, total)
        world.synchronize()
        segments = 1000 * np.arange(5)[:, None, None] + 10_000 * np.arange(n)[:, None]
        assert total[0] == (segments + 40 * me + np.arange(40)).sum()

    pes(3).run(main)


# ---- variable splits


def landed(splits, rows, rooms, me):
    """[(from, row of its x, how many), ...] of those that land on rank `me`, and its out_splits."""
    parts, reported, at = [], [], 0
    for k, wanted in enumerate(splits):
        wanted = [max(count, 0) for count in wanted]
        first, count = sum(wanted[:me]), wanted[me]
        fits = first + count <= rows[k] and count <= rooms[me] - at
        reported.append(count if fits else -count)
        if fits:
            parts.append((k, first, count))
            at += count
    return parts, reported


def exchange_rows(calls, shape=(3,), dtype="int16", symmetric=False, pad=0):
    """`calls`: for each, the splits of all ranks, the rows of each one's x, and of each one's out."""
    world = sk.init()
    n, me, dtype = world.n_ranks, world.rank, as_dtype(dtype)
    row = int(np.prod(shape)) * dtype.itemsize
    exchange = sk.AllToAllV(world, row * max(max(*rows, *rooms) for _, rows, rooms in calls))
    splits, out_splits = np.zeros(n, "int64"), np.zeros(n, "int64")
    for call, (of_all, rows, rooms) in enumerate(calls):
        xs = [
            np.random.default_rng([call, k]).integers(0, 100, (rows[k], *shape)).astype(dtype)
            for k in range(n)
        ]
        size = rooms[me] * (row // dtype.itemsize)
        room = np.zeros(pad + size + 5, dtype)
        if symmetric:  # of one size on all ranks; the outs are parts of it, of as many rows as each wants
            room = exchange.output(pad + max(rooms) * (row // dtype.itemsize) + 5, dtype)
            room[:] = 0
            world.barrier()
        out = room[pad : pad + size].reshape(rooms[me], *shape)
        splits[:], out_splits[:] = of_all[me], 77
        result = exchange(xs[me], splits, out, out_splits)
        assert result[0] is out and result[1] is out_splits
        world.synchronize()
        parts, reported = landed(of_all, rows, rooms, me)
        assert out_splits.tolist() == reported and splits.tolist() == list(of_all[me])
        expected = np.concatenate([xs[me][:0]] + [xs[k][first : first + m] for k, first, m in parts])
        np.testing.assert_array_equal(out[: len(expected)], expected)
        assert not out[len(expected) :].any() and not room[:pad].any() and not room[pad + size :].any()
    exchange.free()


def random_calls(n, count, most, seed):
    rng = np.random.default_rng(seed)
    calls = []
    for _ in range(count):
        splits = rng.integers(0, most + 1, (n, n)) * rng.integers(0, 2, (n, n))
        calls.append((splits.tolist(), splits.sum(1).tolist(), splits.sum(0).tolist()))
    return calls


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_variable(pes, small_chunks, n_ranks, symmetric):
    calls = random_calls(n_ranks, 4, 20, n_ranks)
    pes(n_ranks).run(exchange_rows, calls, (3,), "int16", symmetric)


@pytest.mark.slow
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_ranks", [5, 8, 16])
def test_variable_many_ranks(pes, n_ranks):
    pes(n_ranks).run(exchange_rows, random_calls(n_ranks, 2, 5, 1), (2,), "float32")


@pytest.mark.parametrize(
    "dtype, shape", [("uint8", ()), ("bfloat16", (5,)), ("float64", (2, 3)), ("int32", (0,))]
)
def test_variable_dtypes_and_shapes(pes, dtype, shape):
    pes(2).run(exchange_rows, random_calls(2, 2, 9, 2), shape, dtype)


def test_variable_larger_than_a_part(pes):
    pes(2).run(exchange_rows, [([[0, 900], [500, 3]], [900, 503], [500, 903])], (128,), "int32")


@pytest.mark.parametrize("symmetric", [False, True])
def test_what_does_not_fit_is_reported(pes, small_chunks, symmetric):
    """It lands whole or not at all, and what comes after it takes its place."""
    calls = [
        ([[2, 1, 1], [5, 0, 2], [3, 4, 0]], [4, 7, 7], [6, 6, 6]),  # rank 0 has no room for the 5 of rank 1
        ([[2, 1, 1], [5, 0, 2], [3, 4, 0]], [4, 7, 7], [0, 0, 0]),
        ([[2, 3, 1], [-4, 1, 2], [1 << 62, 1 << 62, 1]], [4, 3, 7], [6, 6, 6]),  # x of rank 0 has but 4 rows
        ([[1, 1, 1], [1, 1, 1], [1, 1, 1]], [3, 3, 3], [3, 3, 3]),
    ]
    pes(3).run(exchange_rows, calls, (3,), "int16", symmetric)


@examples(12)
@given(data=st.data(), seed=st.none() | st.integers(0, 1 << 30), n=st.integers(1, 3), symmetric=st.booleans())
def test_variable_any_splits(pes, small_chunks, data, seed, n, symmetric):
    number = st.integers(0, 3) | st.integers(-2, 40)
    calls = []
    for _ in range(data.draw(st.integers(1, 3))):
        splits = data.draw(st.lists(st.lists(number, min_size=n, max_size=n), min_size=n, max_size=n))
        rows = [sum(max(c, 0) for c in of) + data.draw(st.integers(-2, 3)) for of in splits]
        rooms = [sum(max(of[k], 0) for of in splits) + data.draw(st.integers(-2, 3)) for k in range(n)]
        rows, rooms = ([max(m, 0) for m in ms] for ms in (rows, rooms))
        calls.append((splits, rows, [max(rooms)] * n if symmetric else rooms))
    shape, dtype = data.draw(st.sampled_from([((), "uint8"), ((3,), "int16"), ((4,), "float32")]))
    pad = data.draw(st.integers(0, 3))
    pes(n, seed=seed).run(exchange_rows, calls, shape, dtype, symmetric, pad)


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("symmetric", [False, True])
def test_variable_in_graphs_and_back(pes, symmetric):
    """The host knows no splits: those that come back are those that were sent."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        exchange = sk.AllToAllV(world, 30 * 8)
        other = Stream(world.stream.machine, me)
        x, splits, counts, back_counts = np.zeros(10, "int64"), *np.zeros((3, n), "int64")
        out, back = np.zeros((2, 30), "int64")
        if symmetric:
            out, back = exchange.output(30, "int64"), exchange.output(30, "int64")
        world.stream.begin_capture()
        exchange(x, splits, out, counts)
        other.wait_event(world.stream.record())
        exchange(out, counts, back, back_counts, stream=other)
        world.stream.wait_event(other.record())
        graph = world.stream.end_capture()
        for call in range(4):
            splits[:] = np.random.default_rng([call, me]).integers(0, 4, n)
            x[:] = 100 * call + 10 * me + np.arange(10)
            graph.launch(world.stream)
            if call == 2:
                exchange(x, splits, out, counts, stream=world.stream)
                exchange(out, counts, back, back_counts)
            world.synchronize()
            assert (back_counts == splits).all()
            assert (back[: splits.sum()] == x[: splits.sum()]).all()

    pes(3).run(main)


def few_variable_calls(calls, symmetric):
    """Of one thread per block: little enough for all schedules."""
    world = sk.init()
    n, me = world.n_ranks, world.rank
    exchange = sk.AllToAllV._maker("push")(world, 32, threads=1)
    x, splits, out_splits = np.zeros(4, "uint8"), *np.zeros((2, n), "int64")
    out = world.zeros(4, "uint8") if symmetric else np.zeros(4, "uint8")
    for call in range(calls):
        x[:] = 50 * call + 10 * me + np.arange(4)
        splits[:] = 1 + (call + me) % 2, 1
        exchange.bind(x, splits, out, out_splits)(None)
        world.synchronize()
        expected = []
        for k in range(n):
            first, count = (0, 1 + (call + k) % 2) if me == 0 else (1 + (call + k) % 2, 1)
            assert out_splits[k] == count
            expected += [50 * call + 10 * k + first + i for i in range(count)]
        assert out[: len(expected)].tolist() == expected
        out[:] = 255


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_variable_right_in_every_schedule(symmetric):
    found = sk.emu.explore(few_variable_calls, 2, (3, symmetric), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


def test_variable_wrong_arrays(pes):
    def main():
        world = sk.init()
        exchange = sk.AllToAllV(world, 64)
        x, splits = np.zeros((4, 2), "float32"), np.zeros(2, "int64")
        good = {"x": x, "splits": splits, "out": np.zeros((8, 2), "float32"), "out_splits": splits.copy()}
        for wrong, message in [
            ({"out": np.zeros((8, 3), "float32")}, "both must have rows of one dtype and shape"),
            ({"out": np.zeros((8, 2), "int32")}, "rows of one dtype and shape"),
            ({"x": np.zeros(8, "float32"), "out": np.zeros((), "float32")}, "rows of one dtype and shape"),
            ({"out": np.zeros((9, 2), "float32")}, "out has 72 bytes, more than max_nbytes=64"),
        ]:
            with pytest.raises(ValueError, match=message):
                exchange(**{**good, **wrong})

    pes(2).run(main)
