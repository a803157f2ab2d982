"""Broadcast on the emulator: two warps of LL128 in all schedules."""

import numpy as np
import pytest

import shmemkit as sk


def two_warps(calls):
    """By LL128, of a block with two warps: the root may not write before both have read their tiles."""
    world, size = sk.init(), 61
    broadcast = sk.Broadcast._maker("ll128")(world, 8 * size, 0)
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


def test_a_read_only_array_of_the_root(pes):
    """It writes nothing there."""

    def main():
        world = sk.init()
        x = np.full(4, world.rank, "float32")
        x.flags.writeable = world.rank != 1
        sk.broadcast(x, root=1)
        world.synchronize()
        assert (x == 1).all()

    pes(2).run(main)
