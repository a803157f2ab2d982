"""sk.Barrier on the emulator: ranks, nodes, streams and graphs; with races checked and messages late."""

import numpy as np
import pytest
from numba import cuda

import shmemkit as sk
from shmemkit.backends.emulator import EmulatorBackend
from shmemkit.collectives import barrier as collectives_barrier
from shmemkit.device import get, num_ranks, rank
from shmemkit.emu.stream import Stream

PLACES = [(1, 1), (1, 2), (1, 5), (2, 2), (3, 1), (2, 3), (5, 1)]  # nodes, ranks of each
places = pytest.mark.parametrize("nodes, local_size", PLACES)


@cuda.jit
def write(x, call):
    x[0] = 100 * call[0] + rank()


@cuda.jit
def read(x, call, wrong):
    """Those of all ranks."""
    found = cuda.local.array(1, "int64")
    k = 0
    while k < num_ranks():
        get(found, x, k)
        if found[0] != 100 * call[0] + k:
            wrong[0] += 1
        k += 1
    call[0] += 1


def rounds(count, streams=1, skip=()):
    """Write, meet, read all, meet, and so on, without a wait of the host; `skip` barriers of those."""
    world = sk.init()
    barrier = sk.Barrier(world)
    x, call, wrong = sk.zeros(1, "int64"), np.zeros(1, "int64"), np.zeros(1, "int64")
    others = [world.stream, *(Stream(world.stream.machine, world.rank) for _ in range(streams - 1))]
    world.host_barrier()
    for turn in range(2 * count):
        kernel, args = ((write, (x, call)), (read, (x, call, wrong)))[turn % 2]
        stream = others[turn % streams]
        kernel[1, 1, stream](*args)
        if turn not in skip:
            barrier(stream=stream)
        for other in others:  # the kernels are in order, too
            other.wait_event(stream.record())
    world.synchronize()
    assert wrong[0] == 0
    barrier.free()


@pytest.mark.each_value
@places
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0, 1])
def test_all_meet(pes, nodes, local_size):
    pes(nodes * local_size, local_size=local_size).run(rounds, 3)


@pytest.mark.slow
@pytest.mark.parametrize("nodes, local_size", [(1, 16), (2, 8), (8, 2)])
def test_many_ranks(pes, nodes, local_size):
    pes(nodes * local_size, local_size=local_size).run(rounds, 2)


@pytest.mark.parametrize("nodes, local_size", [(1, 3), (2, 2)])
def test_fewer_threads_than_ranks(pes, monkeypatch, nodes, local_size):
    monkeypatch.setattr(collectives_barrier, "MAX_THREADS", 1)
    pes(nodes * local_size, local_size=local_size).run(rounds, 2)


@pytest.mark.slow
@pytest.mark.parametrize("nodes, local_size", [(1, 3), (2, 2)])
@pytest.mark.parametrize("skip", [0, 1])
def test_each_is_needed(pes, nodes, local_size, skip):
    """The first lets others read too early, the second lets this one write too early."""
    with pytest.raises((sk.emu.RaceError, AssertionError)):
        pes(nodes * local_size, local_size=local_size, seed=0).run(rounds, 2, 1, [skip])


@pytest.mark.parametrize("nodes, local_size", [(1, 2), (2, 2)])
def test_on_several_streams(pes, nodes, local_size):
    pes(nodes * local_size, local_size=local_size).run(rounds, 3, 2)


@pytest.mark.each_value
@pytest.mark.parametrize("nodes, local_size", [(1, 2), (2, 1)])
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_in_graphs(pes, nodes, local_size):
    """Beside another barrier, and with a call between."""

    def main():
        world = sk.init()
        barrier, other = sk.Barrier(world), sk.Barrier(world)
        x, call, wrong = sk.zeros(1, "int64"), np.zeros(1, "int64"), np.zeros(1, "int64")
        world.stream.begin_capture()
        write[1, 1, world.stream](x, call)
        barrier()
        read[1, 1, world.stream](x, call, wrong)
        other(stream=world.stream)
        graph = world.stream.end_capture()
        for turn in range(5):
            graph.launch(world.stream)
            if turn == 2:
                other()
        world.synchronize()
        assert wrong[0] == 0 and call[0] == 5

    pes(nodes * local_size, local_size=local_size).run(main)


@pytest.mark.parametrize("local_size", [1, 2, 4])
def test_ranks_that_nobody_maps(pes, monkeypatch, local_size):
    """Also within a node they meet through NVSHMEM then."""

    def mapped(self):
        return [pe == self.pe for pe in range(self.machine.n_ranks)]

    monkeypatch.setattr(EmulatorBackend, "mapped", mapped)
    pes(4, local_size=local_size).run(rounds, 2)


@pytest.mark.slow
@pytest.mark.parametrize("nodes, local_size, count", [(1, 2, 2), (1, 3, 1), (2, 1, 2), (3, 1, 1), (2, 2, 1)])
def test_right_in_every_schedule(nodes, local_size, count):
    """It fails without any of the waits, or if a signal of one rank counts for another's."""
    found = sk.emu.explore(
        rounds, nodes * local_size, (count, 1), exhaustive=True, local_size=local_size, heap_size=1 << 18
    )
    assert found.finished and found.failure is None, str(found)


def test_who_is_missing(pes):
    def main():
        world = sk.init()
        barrier = sk.Barrier(world)
        if world.rank != 1:
            barrier()
        world.synchronize()

    with pytest.raises(sk.emu.DeadlockError, match=r"waits for arrivals\[1\] on rank 0 >= 1"):
        pes(3).run(main)
