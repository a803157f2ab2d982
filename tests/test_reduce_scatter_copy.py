"""Reduce-scatters by copy engines on the emulator: pieces, streams and graphs, with races checked.
(tests/test_reduce_scatter.py has what all methods must do.)"""

import itertools

import numpy as np
import pytest
from numba import cuda
from test_reduce_scatter import scatter_all

import shmemkit as sk
from shmemkit.device import notify, wait
from shmemkit.emu.backend import EmulatorBackend
from shmemkit.kernels import copied_pieces
from shmemkit.kernels.reduce_scatter import ReduceScatter
from shmemkit.kernels.reduce_scatter.copy_engine import CopyEngine
from shmemkit.world import World

SMALL = {"BLOCKS": 3, "PART": 64}  # 1 to 3 blocks


@pytest.fixture
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(copied_pieces, name, value)


@cuda.jit
def fill(x, first, step):
    """Segment k becomes first + step * k."""
    for k in range(x.shape[0]):
        for i in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
            x[k, i] = first + step * k


@cuda.jit
def take(out, seen):
    for i in range(cuda.threadIdx.x, seen.size, cuda.blockDim.x):
        seen[i] = out[i]


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_pes", [1, 2, 3, 5])
def test_lengths(pes, small, n_pes):
    """Of a first part and 2 pieces, of which some are empty."""
    pes(n_pes).run(scatter_all, "copy_engine", [1, 100, 0, 233, 17, 600, 41], "int16", "max")


@pytest.mark.parametrize("n_pes, sizes", [(8, [64, 9]), (16, [5])])
def test_many_ranks(pes, n_pes, sizes):
    pes(n_pes).run(scatter_all, "copy_engine", sizes, "float32")


@pytest.mark.parametrize("dtype, unaligned", [("uint8", 3), ("float16", 1), ("float64", 0), ("bfloat16", 0)])
@pytest.mark.parametrize("in_place, symmetric", [(False, False), (True, True)])
def test_dtypes_unaligned_and_in_place(pes, small, dtype, unaligned, in_place, symmetric):
    args = dtype, "sum", unaligned, in_place, symmetric
    pes(3).run(scatter_all, "copy_engine", [300, 1, 65], *args)


def test_a_thread_with_several_words(pes):
    """More than 4 of a block of 32 threads, and less."""
    pes(2).run(scatter_all, "copy_engine", [480, 900, 130], "uint64")


@pytest.mark.parametrize("itemsize", [1, 8])
@pytest.mark.parametrize("size", [0, 1, 15, 17, 100, 1 << 20, (1 << 20) + 1, (3 << 23) + 5, 1 << 28])
def test_cuts(size, itemsize):
    """At whole lines, a line behind what was asked for at most."""
    shares = 0.25, 0.5, 0.95
    first, *cuts, end = copied_pieces.cuts_of(size, itemsize, *shares)
    line = 128 // itemsize
    assert first == 0 and end == size and len(cuts) == 3
    assert all(cut % line == 0 or cut == size for cut in cuts)
    words = -(-size * itemsize // 8) * 8 // itemsize
    for cut, share in zip(cuts, shares, strict=True):
        assert min(size, words * share - 8) <= cut < words * share + line


@pytest.mark.parametrize("order", [copied_pieces.one_by_one, copied_pieces.in_rounds])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [0, 5, 100, 1000, (1 << 22) + 1])
def test_every_element_goes_to_every_rank_once(order, n_ranks, size):
    parts = {y: [] for y in range(n_ranks)}
    for y, first, end in order(copied_pieces.cuts_of(size, 8, 0.3, 0.9), n_ranks):
        parts[y].append((first, end))
    everyone = order is copied_pieces.in_rounds and n_ranks == 1
    assert bool(parts.pop(0)) == everyone
    for of_one in parts.values():
        assert of_one[0][0] == 0 and of_one[-1][1] == size
        assert all(before[1] == after[0] for before, after in itertools.pairwise(of_one))


@pytest.mark.schedules(deliveries="eager", seeds=[None, 0])
def test_graphs_interleaved_with_calls(pes, small):
    """What makes x and takes out is on the stream, and the host waits for nothing before the end."""

    def main():
        world = sk.init()
        n, me, stream = world.n_ranks, world.rank, world.stream
        scatter = ReduceScatter(world, n * 100 * 8, "sum", "copy_engine")
        xs = [np.zeros((n, size), "int64") for size in (100, 7, 50)]
        outs = [np.zeros(x.shape[1], "int64") for x in xs]
        seen, graphs = np.zeros((9, 100), "int64"), []
        for calls in ((0,), (1, 2, 1)):
            stream.begin_capture()
            for which in calls:
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


def test_streams_follow_each_other(pes, small):
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
            scatter(x, out, stream)
            take[1, 4, stream](out, seen[call])
        world.synchronize()
        expected = n * (10 * np.arange(6) + me) + sum(range(n))
        assert (seen == expected[:, None]).all()

    pes(2).run(main)


def test_the_order_of_the_copies(pes, small, monkeypatch):
    """To the next rank first, none to this one, one copy after the other, beside the stream."""
    peers, lanes = {r: [] for r in range(4)}, {r: [] for r in range(4)}
    copy, view = EmulatorBackend.copy, World.peer_view

    def viewed(world, array, rank):
        peers[world.rank].append(rank)
        return view(world, array, rank)

    def copied(backend, dst, src):
        enqueue = copy(backend, dst, src)
        return lambda stream: (lanes[backend.pe].append(stream), enqueue(stream))

    monkeypatch.setattr(EmulatorBackend, "copy", copied)
    monkeypatch.setattr(World, "peer_view", viewed)

    def main():
        world = sk.init()
        x = np.ones((world.n_ranks, 128), "int64")  # a first part and 2 pieces
        assert (ReduceScatter(world, x.nbytes, "sum", "copy_engine")(x) == world.n_ranks).all()

    pes(4).run(main)
    for me in range(4):
        assert peers[me] == [(me + y) % 4 for y in (1, 2, 3, 1, 2, 3, 3)]
        assert len(lanes[me]) == 7 and len(set(lanes[me])) == 1


@cuda.jit
def hold(seen):
    wait(seen, 1, "sys", "acquire", 1)


@cuda.jit
def see(out, seen):
    if out[0] == 3 and out[111] == 3 and out[112] == 0:
        notify(seen, 0, 1)
        notify(seen, 1, 1)


def test_pieces_are_combined_while_others_are_copied(pes, small, monkeypatch):
    """The last copy of rank 1 begins only when rank 0 has combined the pieces before."""

    def main():
        world = sk.init()
        n, seen = world.n_ranks, world.signals(1)
        x, out = np.full(n * 128, world.rank + 1, "uint64"), np.zeros(128, "uint64")  # 96, 16 and 16
        method = CopyEngine(world, x.nbytes, "sum")
        copy, launch, made = world.backend.copy, method.launch, []

        def held(dst, src):
            made.append(copy(dst, src))
            if world.rank == 1 and len(made) == 3:
                return lambda stream: (hold[1, 1, stream](seen), made[2](stream))
            return made[-1]

        def watched(*args):
            bound = launch(*args)
            return lambda stream: (bound(stream), world.rank or see[1, 1, world.stream](out, seen))

        monkeypatch.setattr(method, "launch", watched)
        monkeypatch.setattr(world.backend, "copy", held)
        method.bind(x, out, False, x.dtype)(None)
        world.synchronize()
        assert (out == 3).all() and len(made) == 3

    pes(2).run(main)


def test_captures_have_a_lane_of_their_own(pes):
    """Which are not kept when the next one begins."""

    def main():
        world = sk.init()
        method = CopyEngine(world, 64, "sum")
        x, out = np.ones(2 * world.n_ranks, "uint64"), np.zeros(2, "uint64")
        run = method.bind(x, out, False, x.dtype)
        run(None)
        streams = []
        for _ in range(3):
            world.stream.begin_capture()
            run(None)
            graph = world.stream.end_capture()
            streams.append(method.lanes.captures)
            graph.launch(world.stream)
            run(None)
        world.synchronize()
        assert streams == [1, 1, 1] and (out == world.n_ranks).all()

    pes(2).run(main)


def test_refused_where_memory_is_not_mapped(pes, capfd):
    def main():
        with sk.init() as world:
            with pytest.raises(ValueError, match="reduce_scatter copy_engine cannot be used here: rank ."):
                ReduceScatter(world, 64, "sum", "copy_engine")

    pes(4, local_size=2).run(main)
    assert "without free" not in capfd.readouterr().err


# ---- all schedules


def few_calls(sizes):
    """Of one thread per block and one block, in one graph."""
    world = sk.init()
    n, me, stream = world.n_ranks, world.rank, world.stream
    method = CopyEngine(world, n * 8 * max(sizes), "sum")
    method.threads = 1
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


def test_right_in_every_schedule(monkeypatch):
    """Of a first part and 2 pieces: words are lines. It fails without the wait in the kernel, without the
    barrier, and without any of the orders of the streams."""
    monkeypatch.setattr(copied_pieces, "LINE", 1)
    found = sk.emu.explore(few_calls, 2, ((7, 14),), exhaustive=True, heap_size=1 << 16)
    assert found.finished and found.failure is None, str(found)
