"""Broadcasts over several nodes on the emulator: when auto takes them, memory that is given back,
explorations, and what goes wrong without one of the waits."""

import numpy as np
import pytest
from mutations import argument, condition, goes_wrong, omit, seeds, single_buffer

import shmemkit as sk
from shmemkit.collectives.broadcast import push_2d
from shmemkit.emu import DeadlockError, RaceError

pytestmark = pytest.mark.usefixtures("messages")
nodes_of = pytest.mark.parametrize("nodes, local_size", [(2, 2), (2, 3), (3, 1), (1, 3)])


def test_auto_takes_it_where_nvlink_ends_at_the_node(pes, messages):
    """From each rank of the root's node as much as from the others, once to each other node."""

    def main():
        world = sk.init()
        broadcast = sk.Broadcast(world, 800, 3)
        assert broadcast.method_for(800) == "push_2d" and set(broadcast.refused) == {"ll128", "ll", "scatter"}
        x = np.full(100, float(world.rank))
        broadcast(x)
        world.synchronize()
        assert (x == 3).all()

    pes(6, local_size=2).run(main)
    assert sorted(messages) == [(2, 0), (2, 4), (3, 1), (3, 5)]


def test_others_where_it_spans_them(pes, monkeypatch):
    """As in racks of NVLink."""

    def main():
        broadcast = sk.Broadcast(sk.init(), 1 << 21)
        assert [broadcast.method_for(n) for n in (8, 1 << 20, 1 << 21)] == ["ll128", "ll128", "scatter"]

    monkeypatch.setattr("shmemkit.backends.emulator.EmulatorBackend.unreached", lambda *_: None)
    pes(4, local_size=2).run(main)


def test_refusals_say_what_to_take(pes):
    def main():
        with pytest.raises(ValueError, match="on another node. method='auto' takes one that can be used"):
            sk.Broadcast(sk.init(), 8, 0, "scatter")

    pes(4, local_size=2).run(main)


def test_what_is_not_enough_memory_is_said_first(pes):
    """Though methods of one node cannot run either."""

    def main():
        message = (
            "not enough memory for push_2d. .*symmetric heap is full.* Others cannot run at all. scatter: "
        )
        with pytest.raises(MemoryError, match=message):
            sk.Broadcast(sk.init(), 1 << 40)

    pes(4, local_size=2).run(main)


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0, 1])
def test_what_is_under_way_has_come_before_memory_is_given_back(pes):
    """Nobody waits for the last signals."""

    def main():
        world = sk.init()
        collective = sk.Broadcast(world, 320, 1, "push_2d")
        for _ in range(2):
            collective(np.zeros(40))
        collective.free()
        arrays = [world.zeros(4096, "uint8") for _ in range(4)]
        world.barrier()
        world.synchronize()
        assert not any(array.any() for array in arrays)

    pes(4, local_size=2).run(main)


def few_calls(calls, module=push_2d, root=0, threads=1):
    """Which no host holds up. -> whether all results are right"""
    world = sk.init()
    broadcast = module.Push2D(world, 8 * world.local_size, root, threads=threads)
    outs = [np.zeros(world.local_size, "uint64") for _ in range(calls)]
    for call, out in enumerate(outs):
        number = 10 + call + 100 * (world.rank != root)
        broadcast.bind(np.full(out.size, number, "uint64"), out, False)(None)
    world.synchronize()
    return all((out == 10 + call).all() for call, out in enumerate(outs))


@pytest.mark.slow
@pytest.mark.parametrize("nodes, local_size, calls", [(2, 1, 4), (1, 2, 4), (3, 1, 3)])
def test_right_in_every_schedule(nodes, local_size, calls):
    """The third and fourth call use both halves again."""

    def main():
        assert few_calls(calls)

    n_ranks = nodes * local_size
    found = sk.emu.explore(main, n_ranks, exhaustive=True, local_size=local_size, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


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
    return goes_wrong(sk.emu.run, few_calls, 4, (5, push_2d, 1, 2), **options, each=seeds(n))


def test_nothing_is_wrong_otherwise():
    assert not is_wrong(5)


CHANGES = [
    omit("signal_op"),
    omit("wait_block", 1),
    argument("wait_block", 0, "span(full[buffer, to], b, 1)", 1),
    omit("copy_block", 1),
    omit("cuda.syncthreads", 1),
    omit("notify", 1),
    omit("wait_block", 2),
    omit("wait_for", 1),
    condition("peer != root", "False"),
    condition("peer != root", "me == root"),
    omit("cuda.syncthreads", 2),
    omit("notify", 2),
    omit("wait_block", 3),
    omit("wait_for", 2),
    argument("wait_for", 1, "epoch - 2", 2),
    argument("span", 0, "outbox[0, b]", 16, "push_broadcast_2d"),
    omit("copy_block", 3),
    single_buffer(),
    argument("put", 3, "epoch - 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_each_line_is_needed(mutate, change):
    mutate(push_2d, change)
    assert is_wrong(12)
