"""Reduce-scatters by copy engines on the emulator: pieces, the order of copies, streams and graphs, and
explorations."""

import numpy as np
import pytest
from numba import cuda
from small_kernels import take
from specification import calls

import shmemkit as sk
from shmemkit.backends.emulator import EmulatorBackend
from shmemkit.collectives.reduce_scatter import ReduceScatter
from shmemkit.runtime.world import World


@cuda.jit
def fill(x, first, step):
    """Segment k becomes first + step * k."""
    for k in range(x.shape[0]):
        for i in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
            x[k, i] = first + step * k


def test_a_thread_with_several_pieces(pes):
    """All that it takes at once, and fewer."""
    pes(2).run(calls, "ReduceScatter", "copy_engine", [480, 900, 130], "uint64")


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_threads_send_what_is_not_at_multiples_of_16_bytes(pes, small_chunks):
    """On some ranks, all of it; and on all of them, what is left of a segment."""

    def main():
        world = sk.init()
        n, me, size = world.n_ranks, world.rank, 37
        scatter = ReduceScatter(world, n * size * 4, "sum", "copy_engine")
        room, out = np.zeros(n * size + 4, "int32"), np.zeros(size, "int32")
        for call in range(4):
            x = room[(me + call) % 4 :][: n * size]
            x[:] = np.arange(n * size) + 1000 * me + call
            scatter(x, out)
            world.synchronize()
            expected = n * (np.arange(me * size, (me + 1) * size) + call) + 1000 * sum(range(n))
            assert (out == expected).all()

    pes(3).run(main)


@pytest.mark.schedules(deliveries="eager", seeds=[None, 0])
def test_graphs_interleaved_with_calls(pes, small_chunks):
    """What makes x and takes out is on the stream, and the host waits for nothing before the end."""

    def main():
        world = sk.init()
        n, me, stream = world.n_ranks, world.rank, world.stream
        scatter = ReduceScatter(world, n * 100 * 8, "sum", "copy_engine")
        xs = [np.zeros((n, size), "int64") for size in (100, 7, 50)]
        outs = [np.zeros(x.shape[1], "int64") for x in xs]
        seen, graphs = np.zeros((9, 100), "int64"), []
        for chosen in ((0,), (1, 2, 1)):
            stream.begin_capture()
            for which in chosen:
                scatter(xs[which], outs[which])
            graphs.append(stream.end_capture())
        for repeat in range(9):
            which = repeat % 3
            fill[1, 4, stream](xs[which], 100 * repeat + me, 10)
            if repeat in (4, 5):
                scatter(xs[which], outs[which])
            else:
                graphs[which > 0].launch(stream)
            take[1, 4, stream](outs[which], seen[repeat, : outs[which].size])
        world.synchronize()
        for repeat in range(9):
            expected = n * (100 * repeat + 10 * me) + sum(range(n))
            assert (seen[repeat, : outs[repeat % 3].size] == expected).all()

    pes(3).run(main)


def test_streams_follow_each_other(pes, small_chunks):
    def main():
        world = sk.init()
        n, me, streams = world.n_ranks, world.rank, [world.stream, cuda.stream(), cuda.stream()]
        scatter = ReduceScatter(world, n * 60 * 4, "sum", "copy_engine")
        x, out, seen = np.zeros((n, 60), "int32"), np.zeros(60, "int32"), np.zeros((6, 60), "int32")
        for call in range(6):
            stream = streams[call % 3]
            if call:
                stream.wait_event(streams[(call - 1) % 3].record())
            fill[1, 4, stream](x, 10 * call + me, 1)
            scatter(x, out, stream=stream)
            take[1, 4, stream](out, seen[call])
        world.synchronize()
        expected = n * (10 * np.arange(6) + me) + sum(range(n))
        assert (seen == expected[:, None]).all()

    pes(2).run(main)


def test_the_order_of_the_copies(pes, small_chunks, monkeypatch):
    """To the next rank first, none to this one, one copy after the other, beside the stream."""
    peers, lanes = {r: [] for r in range(4)}, {r: [] for r in range(4)}
    copy, view = EmulatorBackend.copy_pieces, World.peer_view

    def viewed(world, array, rank):
        peers[world.rank].append(rank)
        return view(world, array, rank)

    def copied(backend, *args):
        enqueue = copy(backend, *args)
        return lambda stream: (lanes[backend.pe].append(stream), enqueue(stream))

    monkeypatch.setattr(EmulatorBackend, "copy_pieces", copied)
    monkeypatch.setattr(World, "peer_view", viewed)

    def main():
        world = sk.init()
        x = np.ones((world.n_ranks, 128), "int64")
        assert (ReduceScatter(world, x.nbytes, "sum", "copy_engine")(x) == world.n_ranks).all()

    pes(4).run(main)
    for me in range(4):
        assert peers[me] == [(me + y) % 4 for y in (1, 2, 3)]
        assert len(lanes[me]) == 3 and len(set(lanes[me])) == 1


def test_captures_have_a_lane_of_their_own(pes):
    """Which are not kept when the next one begins."""

    def main():
        world = sk.init()
        method = ReduceScatter._maker("copy_engine")(world, 64, "sum")
        x, out = np.ones(2 * world.n_ranks, "uint64"), np.zeros(2, "uint64")
        run = method.bind(x, out, False, x.dtype)
        run(None)
        streams = []
        for _ in range(3):
            world.stream.begin_capture()
            run(None)
            graph = world.stream.end_capture()
            streams.append(method.side_streams.captures)
            graph.launch(world.stream)
            run(None)
        world.synchronize()
        assert streams == [1, 1, 1] and (out == world.n_ranks).all()

    pes(2).run(main)


# ---- all schedules


def few_calls(sizes):
    """Of one thread per block and one block, in one graph."""
    world = sk.init()
    n, me, stream = world.n_ranks, world.rank, world.stream
    method = ReduceScatter._maker("copy_engine")(world, n * 8 * max(sizes), "sum", threads=1)
    xs = [100 * call + 10 * me + np.arange(n, dtype="uint64").repeat(size) for call, size in enumerate(sizes)]
    outs = [np.zeros(size, "uint64") for size in sizes]
    runs = [method.bind(x, out, False, x.dtype) for x, out in zip(xs, outs, strict=True)]
    stream.begin_capture()
    for run in runs:
        run(stream)
    stream.end_capture().launch(stream)
    world.synchronize()
    for call, out in enumerate(outs):
        assert (out == n * (100 * call + me) + 10 * sum(range(n))).all()


@pytest.mark.slow
def test_right_in_every_schedule():
    """Of a piece, and two and a half. It fails without the barrier, and without any of the orders of the
    streams."""
    found = sk.emu.explore(few_calls, 2, ((2, 5),), exhaustive=True, heap_size=1 << 16)
    assert found.finished and found.failure is None, str(found)
