"""All-to-alls of several nodes on the emulator: messages, graphs, and many schedules."""

import numpy as np
import pytest
from specification import calls

import shmemkit as sk

pytestmark = pytest.mark.usefixtures("messages")
METHOD = "push_2d"


def test_one_message_for_a_pair_of_nodes(pes, messages):
    """And local index, however many ranks they have."""
    pes(6, local_size=3).run(calls, "AllToAll", METHOD, [40])
    assert sorted(messages) == [(k, (k + 3) % 6) for k in range(6)]


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_graphs_and_auto(pes):
    """Launches of two graphs, and a call between, without a barrier; the method is the one for nodes."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        exchange = sk.AllToAll(world, n * 80)
        assert exchange.method_for(n * 80) == METHOD
        xs, graphs = [np.zeros((n, size), "int16") for size in (40, 3)], []
        outs = [np.zeros_like(x) for x in xs]
        for x, out in zip(xs, outs, strict=True):
            world.stream.begin_capture()
            exchange(x, out)
            graphs.append(world.stream.end_capture())
        for call in range(5):
            x, out = xs[call % 2], outs[call % 2]
            x[...] = 100 * call + 10 * me + np.arange(n)[:, None]
            if call == 2:
                exchange(x, out)
            else:
                graphs[call % 2].launch(world.stream)
            world.synchronize()
            assert (out == 100 * call + 10 * np.arange(n)[:, None] + me).all()

    pes(4, local_size=2).run(main)


def calls_in_a_row(calls):
    """Of two lengths; no host waits between them."""
    world = sk.init()
    n = world.n_ranks
    exchange, outs = sk.AllToAll._maker(METHOD)(world, 8 * n, threads=2), []
    for call in range(calls):
        size = 8 if call % 3 else 3
        x = (50 * (call % 5) + 10 * world.rank + np.arange(n, dtype="uint8")).repeat(size)
        outs.append(np.zeros((n, size), "uint8"))
        exchange.bind(x, outs[-1].reshape(-1), False)(None)
    world.synchronize()
    for call, out in enumerate(outs):
        assert (out == 50 * (call % 5) + 10 * np.arange(n)[:, None] + world.rank).all()


@pytest.mark.slow
def test_calls_in_a_row_in_many_schedules():
    """Two nodes of two ranks. It fails with one half in the place of two, of the outgoing or incoming parts
    or the signals; and without any of the waits and barriers of the block."""
    found = sk.emu.explore(calls_in_a_row, 4, (6,), range(4), local_size=2, heap_size=1 << 18)
    assert found.failure is None, str(found)
