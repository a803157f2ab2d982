"""All-reduces by copy engines on the emulator: graphs between calls, and explorations."""

import numpy as np
import pytest
from fast import slow
from numba import cuda
from small_kernels import take
from test_reduce_scatter_copy import fill

import shmemkit as sk


@pytest.mark.schedules(deliveries="eager", seeds=[0])
@pytest.mark.parametrize("symmetric, size", [(True, 45), *slow((True, 1440), (False, 1440))])
def test_graphs_interleaved_with_calls(pes, small_chunks, symmetric, size):
    """What makes x and takes out is on the stream, and the host waits for nothing before the end."""

    def main():
        world = sk.init()
        n, me, stream = world.n_ranks, world.rank, world.stream
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


def two_calls(symmetric, words):
    """In place, of one thread per block and one block, in one graph, and the input of the second from the
    result of the first."""
    world = sk.init()
    n, me, stream = world.n_ranks, world.rank, world.stream
    settings = {"threads": 1, "line": 1, "of_stages": {"threads": 1}}
    method = sk.AllReduce._maker("copy_engine")(world, 8 * words, "sum", **settings)
    x = world.empty(words, "uint64") if symmetric else np.zeros(words, "uint64")
    x[:] = np.arange(words) + 100 * me
    world.host_barrier()
    run = method.bind(x, x, True, x.dtype)
    stream.begin_capture()
    run(stream)
    double[1, 1, stream](x)
    run(stream)
    stream.end_capture().launch(stream)
    world.synchronize()
    assert (x == 2 * n * (n * np.arange(words) + 100 * sum(range(n)))).all()


@pytest.mark.slow
@pytest.mark.parametrize("symmetric, words", [(False, 8), (True, 8), (False, 9)])
def test_right_in_many_schedules(symmetric, words):
    """Packets are lines: of 2, 1 is copied first. It fails without any of the orders of the streams, and
    without any of the barriers. A ninth word is in no segment of whole packets."""
    found = sk.emu.explore(two_calls, 2, (symmetric, words), exhaustive=True, max_runs=400, heap_size=1 << 16)
    assert found.failure is None, str(found)
