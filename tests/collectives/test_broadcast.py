"""Broadcast on the emulator: methods, ranks, roots, lengths, dtypes, repeats, streams and graphs, with races
checked and messages late."""

import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st

import shmemkit as sk
from shmemkit.collectives.broadcast import METHODS
from shmemkit.emu.stream import Stream
from shmemkit.runtime.symmetric_memory import as_dtype

methods = pytest.mark.parametrize("method", sk.Broadcast.methods)


def send_all(method, sizes, root=0, dtype="float32", unaligned=0, in_place=True):
    """One after another, by one object. The arrays of rank 0 are aligned, also if others' are not."""
    world = sk.init()
    dtype = as_dtype(dtype)
    broadcast = sk.Broadcast(world, max(sizes) * dtype.itemsize, root, method)
    first = unaligned * world.rank
    for call, size in enumerate(sizes):
        sent = [np.random.default_rng([call, r]).integers(0, 100, size).astype(dtype) for r in (0, 1)]
        room = np.zeros(first + size + 5, dtype)
        x = room[first : first + size]
        x[:] = sent[world.rank != root]
        out = x if in_place else np.zeros(size, dtype)
        assert broadcast(x, None if in_place else out) is out
        world.synchronize()
        np.testing.assert_array_equal(out, sent[0])
        assert not room[:first].any() and not room[first + size :].any()
    broadcast.free()


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_pes", [1, 2, 3, 4])
def test_lengths(pes, small_chunks, n_pes, method):
    pes(n_pes).run(send_all, method, [1, 40, 0, 333, 41, 7, 300], n_pes - 1)


@pytest.mark.slow
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_pes, sizes", [(5, [7, 130, 1]), (8, [64, 9]), (18, [33])])
def test_many_ranks(pes, small_chunks, n_pes, sizes, method):
    pes(n_pes).run(send_all, method, sizes, 2, "int16")


@pytest.mark.each_value
@methods
@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float64", "complex128"])
def test_dtypes_unaligned(pes, method, dtype):
    pes(3).run(send_all, method, [1, 300, 33, 65], 1, dtype, 3, False)


@methods
@examples(8)
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    n_pes=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 500), min_size=1, max_size=5),
    dtype=st.sampled_from(["uint8", "float32", "float64"]),
    unaligned=st.integers(0, 3),
    in_place=st.booleans(),
)
def test_any_shape(pes, small_chunks, method, seed, n_pes, sizes, dtype, unaligned, in_place):
    pes(n_pes, seed=seed).run(send_all, method, sizes, n_pes // 2, dtype, unaligned, in_place)


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_streams_and_graphs(pes, method):
    def main():
        world = sk.init()
        broadcast = sk.Broadcast(world, 320, 0, method)
        other = Stream(world.stream.machine, world.rank)
        x, y = np.zeros(40), np.zeros(9)
        graphs = []
        for stream in (world.stream, other):
            stream.begin_capture()
            broadcast(x, stream=stream)
            broadcast(y, stream=stream)
            graphs.append(stream.end_capture())
        for call in range(4):
            x[:], y[:] = call + 100 * world.rank, -call + 100 * world.rank
            graphs[call % 2].launch(world.stream)
            broadcast(x, stream=(None, world.stream)[call % 2])
            world.synchronize()
            assert (x == call).all() and (y == -call).all()

    pes(2).run(main)


def with_few_warps(method, sizes, root, blocks, threads):
    """A warp has several tiles."""
    world = sk.init()
    broadcast = sk.Broadcast.maker(method)(world, 8 * max(sizes), root)
    broadcast.threads, broadcast.most = threads, dict.fromkeys(broadcast.most, blocks)
    for call, size in enumerate(sizes):
        x, out = np.arange(size, dtype="uint64") + 1000 * call, np.zeros(size, "uint64")
        broadcast.bind(x + 7 * world.rank, out, False)(None)
        world.synchronize()
        np.testing.assert_array_equal(out, x + 7 * root)
    broadcast.free()


@pytest.mark.each_value
@pytest.mark.parametrize("method", ["ll128", "lamport"])
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("blocks, threads", [(1, 32), (2, 64)])
def test_more_tiles_than_warps(pes, method, blocks, threads):
    pes(3).run(with_few_warps, method, [200, 1, 61, 120, 421, 200], 1, blocks, threads)


def relayed(calls):
    """Of a piece, from rank 1 to 2 and 0."""
    world = sk.init()
    broadcast = sk.Broadcast.maker("lamport")(world, 16, 1)
    outs = [np.zeros(2, "uint64") for _ in range(calls)]
    for call, out in enumerate(outs):
        broadcast.bind(np.full(2, 10 * call + world.rank, "uint64"), out, False)(None)
    world.synchronize()
    assert all((out == 10 * call + 1).all() for call, out in enumerate(outs))


@pytest.mark.slow
def test_relays_in_many_schedules():
    """The third call uses the first half again."""
    found = sk.emu.explore(relayed, 3, (3,), exhaustive=True, heap_size=1 << 18)
    assert found.failure is None, str(found)


def few_calls(method, calls):
    """Of one thread per block, or warp, by a root that nobody holds up: little enough for all schedules."""
    world = sk.init()
    broadcast = sk.Broadcast.maker(method)(world, 8, 0, threads=32 if method in ("ll128", "lamport") else 1)
    outs = [np.zeros(1, "uint64") for _ in range(calls)]
    for call, out in enumerate(outs):
        broadcast.bind(np.full(1, 10 + call, "uint64"), out, False)(None)
    world.synchronize()
    assert [int(out[0]) for out in outs] == [10 + call for call in range(calls)]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_right_in_every_schedule(method):
    """The third and fourth call use both halves again."""
    found = sk.emu.explore(few_calls, 2, (method, 4), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


def two_warps(calls):
    """By LL128, of a block with two warps: the root may not write before both have read their tiles."""
    world, size = sk.init(), 61
    broadcast = sk.Broadcast.maker("ll128")(world, 8 * size, 0)
    broadcast.threads, broadcast.most = 64, dict.fromkeys(broadcast.most, 1)
    broadcast._launches.clear()
    outs = [np.zeros(size, "uint64") for _ in range(calls)]
    for call, out in enumerate(outs):
        broadcast.bind(np.full(size, 10 + call, "uint64"), out, False)(None)
    world.synchronize()
    assert [(out == 10 + call).all() for call, out in enumerate(outs)] == [True] * calls


@pytest.mark.slow
def test_two_warps_in_every_schedule():
    found = sk.emu.explore(two_warps, 2, (3,), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda w: (w, 8, 2), "root is 2; it must be 0 to 1"),
        (
            lambda w: (w, 8, 0, "tree"),
            "method is 'tree'; it must be 'll', 'll128', 'lamport', 'scatter', 'push_2d' or 'auto'",
        ),
        (lambda w: (w, 8, w.rank), "rank 0 gives root=0, rank 1 gives root=1. Broadcast needs the same root"),
    ],
)
def test_wrong_arguments(pes, arguments, message):
    def main():
        world = sk.init()
        with pytest.raises(ValueError, match=message):
            sk.Broadcast(*arguments(world))

    pes(2).run(main)
