"""All-gathers by copy engines beside a consumer, into memory of their own: proofs for small sizes."""

import numpy as np
import pytest
from mutations import omit_store
from numba import cuda
from small_kernels import fill, take

import shmemkit as sk
from shmemkit.collectives.all_gather import push_ahead
from shmemkit.collectives.all_gather.copy_engine import Transfer
from shmemkit.collectives.all_gather.push_ahead import AheadByColumns, PushAhead
from shmemkit.device import num_ranks, rank, wait
from shmemkit.runtime import stream_barrier

WAIT = "Transfer.wait, not a consumer that waits"


@cuda.jit
def consume(out, arrived, signals, seen, last):
    each = arrived.size // num_ranks()
    for i in range(last):
        k = (rank() + i) % num_ranks()
        wait(arrived[k * each :], signals, "sys", "acquire", 1)
        for j in range(k * out.size // num_ranks(), (k + 1) * out.size // num_ranks()):
            seen[j] = out[j]


def ahead(skips, size, by_columns):
    """The transfers alone: each beside a consumer that does not wait for so many of the last segments."""
    world = sk.init()
    n = world.n_ranks
    engine, x, seen = PushAhead(world, n * size), np.zeros(size, "uint8"), np.zeros(n * size, "uint8")
    x_given = x.reshape(1, size) if by_columns else x
    transfer = engine.overlap(x_given, engine.buffer, by_columns=by_columns)
    arrived, signals = engine.arrived, 1
    if by_columns:  # no wait for parts that have nothing
        arrived, signals = engine.by_columns, min(size, push_ahead.PARTS)
    for call, skip in enumerate(skips):
        fill[1, 1, world.stream](x, 10 * call + world.rank)
        transfer.start()
        if skip == WAIT:
            transfer.wait()
            take[1, 1, world.stream](engine.buffer, seen)
        else:
            consume[1, 1, world.stream](engine.buffer, arrived, signals, seen, n - skip)
        transfer.finish(awaited=skip in (0, WAIT))
        fill[1, 1, world.stream](x, 255)
        known = (world.rank + np.arange(n - (0 if skip == WAIT else skip))) % n
        assert (seen.reshape(n, size)[known].T == 10 * call + known).all()
    world.synchronize()
    engine.free()


def explored(n_ranks, *skips, size=1, by_columns=False):
    return sk.emu.explore(ahead, n_ranks, (skips, size, by_columns), exhaustive=True, heap_size=1 << 16)


@pytest.fixture
def parts(monkeypatch):
    """-> set_parts(n): of the columns."""

    def set_parts(n):
        monkeypatch.setattr(push_ahead, "PARTS", n)
        monkeypatch.setattr(push_ahead, "UNIT", 1)

    return set_parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_ranks", "n_parts", "size", "by_columns", "skips"),
    [
        (2, 1, 1, False, (0, 0, 0, 0)),
        (2, 1, 1, False, (1, 0, 1, 0)),
        (2, 1, 1, False, (WAIT, 0, WAIT)),
        (3, 1, 1, False, (2, 0)),
        (2, 2, 2, True, (0, 1)),
        (2, 2, 2, True, (WAIT, 0)),
        (2, 2, 1, True, (0, 0)),
        (3, 1, 1, True, (0, 0)),
    ],
)
def test_the_copies_are_proven_for_a_small_size(parts, n_ranks, n_parts, size, by_columns, skips):
    parts(n_parts)
    found = explored(n_ranks, *skips, size=size, by_columns=by_columns)
    assert found.finished and found.failure is None, str(found)


def test_columns_and_rows_alternate(pes):
    """Each has signals of its own: mine, which are always there, are not those of others elsewhere."""

    def main():
        world = sk.init()
        n, size = world.n_ranks, 6 * push_ahead.UNIT
        engine, x = PushAhead(world, n * size), np.zeros((1, size), "uint8")
        seen = np.zeros(n * size, "uint8")
        transfers = [engine.overlap(x, engine.buffer, by_columns=i == 1) for i in range(2)]
        for call in range(6):
            fill[1, 8, world.stream](x.reshape(-1), 10 * call + world.rank)
            transfer, arrived = ((transfers[0], engine.arrived), (transfers[1], engine.by_columns))[call % 2]
            transfer.start()
            consume[1, 1, world.stream](engine.buffer, arrived, arrived.size // n, seen, n)
            transfer.finish(awaited=True)
            assert (seen.reshape(n, size) == 10 * call + np.arange(n)[:, None]).all()

    pes(3).run(main)


def test_each_part_of_the_columns_comes_before_its_signal(monkeypatch, parts):
    parts(2)
    whole = AheadByColumns.side_operations.func
    monkeypatch.setattr(AheadByColumns, "side_operations", property(lambda transfer: whole(transfer)[::-1]))
    assert explored(2, 0, size=2, by_columns=True).failure is not None


def test_parts_that_have_nothing_are_signalled_first(monkeypatch, parts):
    """Nobody waits for them: else their signals may come when the next call sets them back."""
    parts(2)
    monkeypatch.setattr(push_ahead, "sorted", lambda order, key: order, raising=False)
    assert explored(2, 0, 0, size=1, by_columns=True).failure is not None
    assert explored(2, 0, 0, size=2, by_columns=True).failure is None


@pytest.mark.parametrize("by_columns", [False, True])
def test_signals_are_set_back(mutate, parts, by_columns):
    parts(1)
    mutate(stream_barrier, omit_store("signals[]"))
    assert explored(2, 0, by_columns=by_columns).failure is None
    assert explored(2, 0, 0, by_columns=by_columns).failure is not None


@pytest.mark.slow
def test_the_wait_for_all_segments_is_needed(monkeypatch, parts):
    parts(1)
    monkeypatch.setattr(Transfer, "wait", lambda self: None)
    for by_columns in (False, True):
        assert explored(2, WAIT, WAIT, by_columns=by_columns).failure is not None


def test_what_ahead_does_not_do(pes):
    def main():
        world = sk.init()
        engine, x = PushAhead(world, 16 * world.n_ranks + 8), np.zeros(2)
        with pytest.raises(ValueError, match="out must begin where the buffer"):
            engine.overlap(x, engine.buffer.view("float64")[1:])
        with pytest.raises(RuntimeError, match="has only start\\(\\), wait\\(\\) and finish\\(\\)"):
            engine.overlap(x, engine.buffer.view("float64")[:-1]).run()

    pes(2).run(main)
