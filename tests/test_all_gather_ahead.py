"""All-gathers by copy engines beside a consumer, into memory of their own: proofs for small sizes."""

import numpy as np
import pytest
from numba import cuda
from test_all_gather import fill
from test_all_gather_copy import take

import shmemkit as sk
from shmemkit.device import num_ranks, rank, wait
from shmemkit.kernels.all_gather import push_ahead
from shmemkit.kernels.all_gather.copy_engine import Transfer
from shmemkit.kernels.all_gather.push_ahead import PushAhead

WAIT = "Transfer.wait, not a consumer that waits"


@cuda.jit
def consume(out, arrived, signals, seen, last):
    for i in range(last):
        k = (rank() + i) % num_ranks()
        wait(arrived[k * signals :], signals, "sys", "acquire", 1)
        for j in range(k * out.size // num_ranks(), (k + 1) * out.size // num_ranks()):
            seen[j] = out[j]


def ahead(skips, size, by_columns):
    """The transfers alone: each beside a consumer that does not wait for so many of the last segments."""
    world = sk.init()
    n = world.n_ranks
    engine, x, seen = PushAhead(world, n * size), np.zeros(size, "uint8"), np.zeros(n * size, "uint8")
    x_given = x.reshape(1, size) if by_columns else x
    transfer = engine.overlap(x_given, engine.buffer, by_columns=by_columns)
    for call, skip in enumerate(skips):
        fill[1, 1, world.stream](x, 10 * call + world.rank)
        transfer.start()
        if skip == WAIT:
            transfer.wait()
            take[1, 1, world.stream](engine.buffer, seen)
        else:
            consume[1, 1, world.stream](engine.buffer, engine.arrived, engine.parts, seen, n - skip)
        transfer.finish()
        fill[1, 1, world.stream](x, 255)
        known = (world.rank + np.arange(n - (0 if skip == WAIT else skip))) % n
        assert (seen.reshape(n, size)[known].T == 10 * call + known).all()
    world.synchronize()
    engine.free()


def explored(n_pes, *skips, size=1, by_columns=False):
    return sk.emu.explore(ahead, n_pes, (skips, size, by_columns), exhaustive=True, heap_size=1 << 16)


@pytest.fixture
def parts(monkeypatch):
    """-> set_parts(n): the signals of a segment."""

    def set_parts(n):
        monkeypatch.setattr(PushAhead, "parts", n)
        monkeypatch.setattr(push_ahead, "UNIT", 1)
        monkeypatch.setattr(push_ahead, "LEAST", 1)

    return set_parts


@pytest.mark.parametrize(
    ("n_pes", "n_parts", "by_columns", "skips"),
    [
        (2, 1, False, (0, 0, 0, 0)),
        (2, 1, False, (1, 0, 1, 0)),
        (2, 1, False, (WAIT, 0, WAIT)),
        (3, 1, False, (2, 0)),
        (2, 2, False, (0, 1)),
        (2, 2, True, (0, 1)),
        (3, 1, True, (0, 0)),
    ],
)
def test_the_copies_are_proven_for_a_small_size(parts, n_pes, n_parts, by_columns, skips):
    parts(n_parts)
    found = explored(n_pes, *skips, size=n_parts, by_columns=by_columns)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.parametrize("signals", ["ready", "arrived"])
def test_each_signal_of_the_copies_is_needed(monkeypatch, parts, signals):
    parts(1)
    whole = Transfer._await

    def without(transfer, waited, peers=None):
        left_out = waited is getattr(transfer.engine, signals)
        return (Transfer._set_back if left_out else whole)(transfer, waited, peers)

    monkeypatch.setattr(Transfer, "_await", without)
    assert explored(2, 1, 0, 1, 0).failure is not None


def test_the_wait_for_all_segments_is_needed(monkeypatch, parts):
    parts(1)
    monkeypatch.setattr(Transfer, "wait", lambda self: None)
    assert explored(2, WAIT, WAIT).failure is not None


def test_what_ahead_does_not_do(pes):
    def main():
        world = sk.init()
        engine, x = PushAhead(world, 16 * world.n_ranks + 8), np.zeros(2)
        with pytest.raises(ValueError, match="out begins where the buffer"):
            engine.overlap(x, engine.buffer.view("float64")[1:])
        with pytest.raises(RuntimeError, match="start and finish are allowed, not run"):
            engine.overlap(x, engine.buffer.view("float64")[:-1]).run()

    pes(2).run(main)
