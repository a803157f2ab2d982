"""Scatter and Reduce on the emulator: explorations, one-liners, and what is refused."""

import numpy as np
import pytest

import shmemkit as sk

ways = pytest.mark.parametrize(
    "kind, method",
    [pytest.param(k, m, id=f"{k.__name__}-{m}") for k in (sk.Scatter, sk.Reduce) for m in k.methods],
)


def few_calls(kind, method, calls):
    """Of one word, or tile: little enough for all schedules. The root is not waited for by others."""
    world = sk.init()
    n, me = world.n_ranks, world.rank
    made = kind.maker(method)(world, 8 * n, 0, *["sum"] * (kind is sk.Reduce))
    outs = [np.zeros(1, "uint64") for _ in range(calls)]
    for call, out in enumerate(outs):
        if kind is sk.Scatter:
            made.bind(10 * call + np.arange(n, dtype="uint64"), out, False)(None)
        else:
            made.bind(np.full(1, 10 * call + me, "uint64"), out, False, out.dtype)(None)
    world.synchronize()
    for call, out in enumerate(outs):
        if kind is sk.Scatter:
            assert out == 10 * call + me
        elif me == 0:
            assert out == 10 * call * n + n * (n - 1) // 2


@pytest.mark.slow
@ways
def test_right_in_every_schedule(kind, method):
    """The third call uses the first buffer again, and waits for its credit."""
    if (kind, method) == (sk.Reduce, "push"):
        pytest.skip("two kernels of other collectives, which are explored there")
    found = sk.emu.explore(few_calls, 2, (kind, method, 3), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


def test_one_liners(pes):
    def main():
        with sk.init() as world:
            n, me = world.n_ranks, world.rank
            x = np.arange(2.0 * n).reshape(n, 2)
            assert (sk.scatter(x if me == 1 else None, 1, out=np.zeros(2)) == x[me]).all()
            total = sk.reduce(x + me, 1, "max")
            assert total is None if me != 1 else (total == x + n - 1).all()
            if me == 1:
                assert sk.scatter(x, 1).shape == (1, 2)
            else:
                sk.scatter(None, 1, out=np.zeros((1, 2)))

    pes(3).run(main)


@pytest.mark.parametrize(
    "make, call, message",
    [
        (lambda w: sk.Scatter(w, 64), (None, np.zeros(2)), "x is None on rank 0, the root; it must have all"),
        (lambda w: sk.Scatter(w, 64, 1), (np.zeros(4), np.zeros(2)), "x is given on rank 0; it must be None"),
        (lambda w: sk.Scatter(w, 64, 1), (None,), "rank 0 gives no out; it must give an array for its seg"),
        (lambda w: sk.Scatter(w, 64), (np.zeros(5), np.zeros(2)), "x must be float64 with 4 elements"),
        (
            lambda w: sk.Scatter(w, 64),
            (np.zeros(20), np.zeros(10)),
            "x has 160 bytes, more than max_",
        ),
        (
            lambda w: sk.Reduce(w, 64, 1),
            (np.zeros(4), np.zeros(4)),
            "out is given on rank 0; it must be",
        ),
        (lambda w: sk.Reduce(w, 64), (np.zeros(4), np.zeros(3)), "out must be float64 with 4 elements"),
        (lambda w: sk.Reduce(w, 64), (np.zeros(4, bool),), "x has dtype bool, which cannot be reduced"),
        (lambda w: sk.scatter, (), "x and out are None; the root gives x, all other ranks give out"),
    ],
)
def test_wrong_calls(pes, make, call, message):
    def main():
        world = sk.init()
        made = make(world)
        if world.rank == 0:
            with pytest.raises(ValueError, match=message):
                made(*call)

    pes(2).run(main)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda w: sk.Scatter(w, 64, 2), "Scatter: root is 2; it must be 0 to 1"),
        (lambda w: sk.Reduce(w, 64, 0, "mean"), "op is 'mean'; it must be"),
        (lambda w: sk.Reduce(w, 64, w.rank), "rank 0 gives root=0, rank 1 gives root=1"),
    ],
)
def test_wrong_arguments(pes, make, message):
    def main():
        with pytest.raises(ValueError, match=message):
            make(sk.init())

    pes(2).run(main)
