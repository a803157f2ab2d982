"""Gathers over several nodes on the emulator: when auto takes them, memory that is given back,
explorations, and what goes wrong without one of the waits."""

import numpy as np
import pytest
from mutations import argument, delay, goes_wrong, omit, seeds, single_buffer

import shmemkit as sk
from shmemkit.collectives.gather import push_2d
from shmemkit.emu import DeadlockError, RaceError

pytestmark = pytest.mark.usefixtures("messages")


def test_auto_takes_it_where_nvlink_ends_at_the_node(pes, messages):
    """From each rank of another node once, to that of its number."""

    def main():
        world = sk.init()
        gather = sk.Gather(world, 6 * 800, 3)
        assert gather.method_for(800) == "push_2d" and set(gather.refused) == {"ll", "push"}
        out = gather(np.full(100, float(world.rank)))
        world.synchronize()
        if world.rank == 3:
            assert (out == np.arange(6.0)[:, None]).all()

    pes(6, local_size=2).run(main)
    assert sorted(messages) == [(0, 2), (1, 3), (4, 2), (5, 3)]


def test_others_where_it_spans_them(pes, monkeypatch):
    """As in racks of NVLink."""

    def main():
        gather = sk.Gather(sk.init(), 1 << 21)
        assert [gather.method_for(n) for n in (8, 1 << 18, 1 << 21)] == ["ll", "ll", "push"]

    monkeypatch.setattr("shmemkit.backends.emulator.EmulatorBackend.unreached", lambda *_: None)
    pes(4, local_size=2).run(main)


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0, 1])
def test_what_is_under_way_has_come_before_memory_is_given_back(pes):
    """Nobody waits for the last signals."""

    def main():
        world = sk.init()
        collective = sk.Gather(world, 4 * 320, 1, "push_2d")
        for _ in range(2):
            collective(np.zeros(40))
        collective.free()
        arrays = [world.zeros(4096, "uint8") for _ in range(4)]
        world.barrier()
        world.synchronize()
        assert not any(array.any() for array in arrays)

    pes(4, local_size=2).run(main)


def few_calls(calls, module=push_2d, root=0, threads=1, words=1):
    """Which no host holds up. -> whether all results are right"""
    world = sk.init()
    n, me = world.n_ranks, world.rank
    gather = module.Push2D(world, 8 * n * words, root, threads=threads)
    outs = [np.zeros(n * words, "uint64") for _ in range(calls)]
    for call, out in enumerate(outs):
        x = np.full(words, 10 * call + me, "uint64")
        gather.bind(x, out if me == root else x, False)(None)
    world.synchronize()
    wanted = np.repeat(np.arange(n), words)
    return me != root or all((out == 10 * call + wanted).all() for call, out in enumerate(outs))


@pytest.mark.slow
@pytest.mark.parametrize("nodes, local_size, calls", [(2, 1, 4), (1, 2, 4), (3, 1, 3), (2, 2, 2)])
def test_right_in_every_schedule(nodes, local_size, calls):
    """The third and fourth call use both halves again. Of nodes of two, one rank passes on another's parts:
    two calls, since of three there are hundreds of schedules."""

    def main():
        assert few_calls(calls)

    n_ranks = nodes * local_size
    found = sk.emu.explore(main, n_ranks, exhaustive=True, local_size=local_size, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.parametrize("nodes, local_size, ended", [(2, 2, [0, 2, 1, 4]), (3, 1, [0, 1, 1])])
def test_calls_ahead_of_the_root(nodes, local_size, ended):
    """Which makes none: ranks of its node make two, those that send through them four."""
    calls = {}

    def main():
        world = sk.init()
        gather = push_2d.Push2D(world, 8 * world.n_ranks, 0)
        calls[world.rank] = gather.epochs
        x = np.zeros(1)
        for _ in range(6 if world.rank else 0):
            gather.bind(x, x, False)(None)
        world.synchronize()

    with pytest.raises(DeadlockError):
        sk.emu.run(main, nodes * local_size, local_size=local_size)
    assert [calls[rank][0, 0] for rank in sorted(calls)] == ended


def test_begun_is_a_sum(mutate):
    """Of numbers that are set the network may bring an old one last."""
    mutate(push_2d, argument("signal_op", 1, "epoch"), argument("signal_op", 2, "SignalOp.SIGNAL_SET"))

    def main():
        assert few_calls(4, push_2d)

    found = sk.emu.explore(main, 2, exhaustive=True, local_size=1, heap_size=1 << 18)
    assert isinstance(found.failure, (DeadlockError, RaceError)), str(found)


def is_wrong(n):
    """Whether it is seen in n schedules, on nodes of two."""
    options = dict(local_size=2, delivery="unordered", races=True)
    return goes_wrong(sk.emu.run, few_calls, 4, (5, push_2d, 1, 2, 3), **options, each=seeds(n))


def test_nothing_is_wrong_otherwise():
    assert not is_wrong(5)


CHANGES = [
    omit("wait_for", 1),
    argument("wait_for", 1, "epoch - 2 if epoch > 2 else 0", 1),
    omit("copy_block", 1),
    omit("put"),
    omit("signal_op"),
    omit("wait_for", 2),
    omit("wait_block", 1),
    omit("wait_block", 2),
    omit("cuda.syncthreads", 1),
    omit("notify", 1),
    omit("cuda.syncthreads", 2),
    delay("cuda.syncthreads", 2),
    omit("notify", 2),
    single_buffer(),
]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_each_line_is_needed(mutate, change):
    mutate(push_2d, change)
    assert is_wrong(12)
