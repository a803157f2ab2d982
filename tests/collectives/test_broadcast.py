"""Broadcast on the emulator: more tiles than warps, relays, explorations, and what is refused."""

import numpy as np
import pytest

import shmemkit as sk
from shmemkit.collectives.broadcast import METHODS

methods = pytest.mark.parametrize("method", sk.Broadcast.methods)


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
