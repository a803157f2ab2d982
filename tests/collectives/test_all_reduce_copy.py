"""All-reduces by copy engines on the emulator: segments of several parts, into private and symmetric memory,
with races checked. (test_all_reduce.py has what all methods must do.)"""

import numpy as np
import pytest
from fast import slow
from numba import cuda
from reduced import combined
from small_kernels import take
from test_all_reduce import inputs
from test_reduce_scatter_copy import fill

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype


def reduce_all(sizes, dtype="float32", op="sum", symmetric=False, in_place=False, unaligned=0):
    """One after another, by one object; `symmetric` outs, or, if None, every other one. What lies around out
    stays."""
    world = sk.init()
    n, dtype = world.n_ranks, as_dtype(dtype)
    reduce = sk.AllReduce(world, max(sizes) * dtype.itemsize, op, "copy_engine")
    most = unaligned + max(sizes) + 5
    rooms = np.zeros(most, dtype), reduce.output(most, dtype)
    for call, size in enumerate(sizes):
        given, room = inputs(call, size, dtype, n), rooms[call % 2 if symmetric is None else symmetric]
        room[:] = 0
        out = room[unaligned:][:size]
        x = out if in_place else np.zeros(size, dtype)
        x[:] = given[world.rank]
        world.host_barrier()
        assert reduce(x, out) is out
        world.synchronize()
        np.testing.assert_array_equal(out.view("uint8"), combined(op, given).view("uint8"))
        assert not room[:unaligned].any() and not room[unaligned + size :].any()
        assert in_place or (x == given[world.rank]).all()
        world.host_barrier()  # the host's writes to the symmetric array are no part of the call
    reduce.free()


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize(
    "n_pes, sizes", [(1, [800, 3]), (2, [2560, 300, 16]), (3, [4800, 12, 1200, 2400]), *slow((5, [4000]))]
)
@pytest.mark.parametrize("symmetric", [False, True, None])
@pytest.mark.parametrize("in_place", [False, True])
def test_parts(pes, small_chunks, n_pes, sizes, symmetric, in_place):
    pes(n_pes).run(reduce_all, sizes, "float32", "sum", symmetric, in_place)


@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize(
    "dtype, op, unaligned", [("uint8", "max", 3), *slow(("float64", "prod", 0)), ("bfloat16", "sum", 1)]
)
def test_dtypes_and_alignments(pes, small_chunks, dtype, op, unaligned):
    pes(3).run(reduce_all, [4800, 1, 1001], dtype, op, True, True, unaligned)


@pytest.mark.schedules(deliveries="eager", seeds=[None, 0])
@pytest.mark.parametrize("symmetric", [True, *slow(False)])
def test_graphs_interleaved_with_calls(pes, small_chunks, symmetric):
    """What makes x and takes out is on the stream, and the host waits for nothing before the end."""

    def main():
        world = sk.init()
        n, me, stream, size = world.n_ranks, world.rank, world.stream, 1440
        reduce = sk.AllReduce(world, 8 * size, "sum", "copy_engine")
        x = np.zeros((1, size), "int64")
        out = reduce.output(size, "int64") if symmetric else np.zeros(size, "int64")
        stream.begin_capture()
        for _ in range(2):
            reduce(x[0], out)
        graph, seen = stream.end_capture(), np.zeros((6, size), "int64")
        for call in range(6):
            fill[1, 4, stream](x, 100 * call + me, 0)
            if call % 3 == 2:
                reduce(x[0], out)
            else:
                graph.launch(stream)
            take[1, 4, stream](out, seen[call])
        world.synchronize()
        assert (seen == (100 * n * np.arange(6) + sum(range(n)))[:, None]).all()

    pes(3).run(main)


@pytest.mark.parametrize("method", ["push", "copy_engine"])
def test_refused_over_nodes(pes, method):
    """By the name that was asked for."""

    def main():
        with pytest.raises(ValueError, match=f"all_reduce {method}: reduce_scatter {method} cannot be used"):
            sk.AllReduce(sk.init(), 64, method=method)

    pes(4, local_size=2).run(main)


# ---- all schedules


@cuda.jit
def double(x):
    for i in range(x.size):
        x[i] *= 2


def two_calls(symmetric):
    """In place, of one thread per block and one block, in one graph, and the input of the second from the
    result of the first."""
    world = sk.init()
    n, me, stream = world.n_ranks, world.rank, world.stream
    settings = {"threads": 1, "line": 1, "of_stages": {"threads": 1}}
    method = sk.AllReduce.maker("copy_engine")(world, 8 * 4 * n, "sum", **settings)
    x = world.empty(4 * n, "uint64") if symmetric else np.zeros(4 * n, "uint64")
    x[:] = np.arange(4 * n) + 100 * me
    world.host_barrier()
    run = method.bind(x, x, True, x.dtype)
    stream.begin_capture()
    run(stream)
    double[1, 1, stream](x)
    run(stream)
    stream.end_capture().launch(stream)
    world.synchronize()
    assert (x == 2 * n * (n * np.arange(4 * n) + 100 * sum(range(n)))).all()


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_right_in_many_schedules(symmetric):
    """Pieces are lines: of 2, 1 is copied first. It fails without any of the orders of the streams, and
    without any of the barriers."""
    found = sk.emu.explore(two_calls, 2, (symmetric,), exhaustive=True, max_runs=400, heap_size=1 << 16)
    assert found.failure is None, str(found)
