"""Gather on the emulator: explorations, and what is refused."""

import numpy as np
import pytest

import shmemkit as sk

methods = pytest.mark.parametrize("method", sk.Gather.methods)


def few_calls(method, calls, n_bytes):
    """Of one thread per block, to a root that nobody holds up: little enough for all schedules."""
    world = sk.init()
    gather = sk.Gather.maker(method)(world, 8 * world.n_ranks, 0, threads=1)
    outs = [np.zeros(world.n_ranks * n_bytes, "uint8") for _ in range(calls)]
    for call, out in enumerate(outs):
        x = np.full(n_bytes, 10 * call + world.rank, "uint8")
        gather.bind(x, x if world.rank else out, False)(None)
    world.synchronize()
    if world.rank == 0:
        ranks = np.arange(world.n_ranks).repeat(n_bytes)
        assert all((out == 10 * call + ranks).all() for call, out in enumerate(outs))


@pytest.mark.slow
@pytest.mark.parametrize("method, n_pes, calls", [("ll", 2, 4), ("ll", 3, 3), ("push", 2, 4), ("push", 3, 3)])
def test_right_in_every_schedule(method, n_pes, calls):
    """It fails with one half in the place of two, if a sender does not wait for the root, or the root for
    senders."""
    args = method, calls, 8
    found = sk.emu.explore(few_calls, n_pes, args, exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda w: (w, 8, 2), "root is 2; it must be 0 to 1"),
        (
            lambda w: (w, 8, 0, "tree"),
            "method is 'tree'; it must be 'll', 'll128', 'push', 'push_2d'",
        ),
        (lambda w: (w, 8, w.rank), "rank 0 gives root=0, rank 1 gives root=1"),
    ],
)
def test_wrong_arguments(pes, arguments, message):
    def main():
        world = sk.init()
        with pytest.raises(ValueError, match=message):
            sk.Gather(*arguments(world))

    pes(2).run(main)


def test_wrong_arrays(pes):
    def main():
        world = sk.init()
        gather = sk.Gather(world, 64, 1)
        x = np.zeros(8, "float32")
        wrong = [
            (np.zeros(9, "float32"), None, "has 72 bytes, more than max_nbytes=64"),
            (np.zeros(16, "float32")[::2], None, "it must be C-contiguous"),
        ]
        if world.rank == 1:
            room = np.zeros(20, "float32")
            wrong += [
                (x, np.zeros((2, 8), "int32"), "out is int32 .*; out must be float32"),
                (x, np.zeros(8, "float32"), "out must be float32 with 16 elements"),
                (room[:8], room[:16], "overlap; they must lie apart, or x must be its own part"),
            ]
        else:
            wrong += [
                (
                    x,
                    np.zeros((2, 8), "float32"),
                    "out is given on rank 0; it must be None there. The root, rank 1, gets",
                )
            ]
        for array, out, message in wrong:
            with pytest.raises(ValueError, match=message):
                gather(array, out)
        with pytest.raises(TypeError, match="Gather: x is a list; it must be a NumPy array"):
            gather([1, 2])

    pes(2).run(main)
