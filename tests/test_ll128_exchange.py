"""All-gather, all-to-all and reduce-scatter by LL128 on the emulator: what the tests of all methods of each
leave out. (tests/test_all_reduce_ll128.py has the device functions.)"""

import numpy as np
import pytest

import shmemkit as sk
from shmemkit.kernels import all_gather, all_to_all, reduce_scatter, tiles


def gathered(world, words, call):
    n = world.n_ranks
    x, out = np.full(words, 10 * call + world.rank, "uint64"), np.zeros((n, words), "uint64")
    return x, out, 10 * call + np.arange(n)[:, None] + np.zeros(words)


def exchanged(world, words, call):
    n, me = world.n_ranks, world.rank
    x = np.repeat((100 * call + 10 * me + np.arange(n, dtype="uint64"))[:, None], words, axis=1)
    return x, np.zeros_like(x), 100 * call + 10 * np.arange(n)[:, None] + me + np.zeros(words)


def scattered(world, words, call):
    n, me = world.n_ranks, world.rank
    x = np.repeat((10 * call + me + np.arange(n, dtype="uint64"))[:, None], words, axis=1)
    return x, np.zeros(words, "uint64"), np.full(words, (10 * call + me) * n + n * (n - 1) // 2)


KINDS = {
    "all_gather": (all_gather.METHODS["ll128"], gathered, ()),
    "all_to_all": (all_to_all.METHODS["ll128"], exchanged, ()),
    "reduce_scatter": (reduce_scatter.METHODS["ll128"], scattered, ("sum",)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def calls(kind, sizes, blocks=None):
    """One after another; of words, a tile for every 60."""
    make, data, options = KINDS[kind]
    world = sk.init()
    method = make(world, 8 * max(sizes) * world.n_ranks, *options)
    if blocks:
        method.blocks = blocks / world.backend.multiprocessors
        method.most.clear()  # what prepare found
    for call, size in enumerate(sizes):
        x, out, expected = data(world, size, call)
        args = (x.dtype,) if options else ()
        method.bind(x.reshape(-1), out.reshape(-1), False, *args)(None)
        world.synchronize()
        np.testing.assert_array_equal(out, expected)
    method.free()


@kinds
def test_right_in_every_schedule(kind):
    """The third call uses the first half again."""
    found = sk.emu.explore(calls, 2, (kind, [1, 1, 1]), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@kinds
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_more_tiles_than_warps(pes, kind):
    pes(3).run(calls, kind, [200, 1, 61, 120, 199, 200], 1)


@kinds
def test_what_cannot_be_counted_is_refused(pes, kind):
    """Lines of more than 16 GiB, before they are asked for."""

    def main():
        make, _, options = KINDS[kind]
        with pytest.raises(ValueError, match=f"{kind} ll128: lines of .* are allowed; it is for smaller"):
            make(sk.init(), 9 << 30, *options)

    pes(1).run(main)


@kinds
def test_many_ranks_are_refused(pes, kind, monkeypatch):
    monkeypatch.setattr(tiles, "MOST_RANKS", 2)

    def main():
        make, _, options = KINDS[kind]
        with pytest.raises(ValueError, match=f"{kind} ll128: 3 ranks: up to 2 are allowed"):
            make(sk.init(), 64, *options)

    pes(3).run(main)


def test_the_blocks_of_all_rows_fit(pes):
    """Of a grid with a row for each rank, too."""

    def main():
        world = sk.init()
        method = all_to_all.METHODS["ll128"](world, 100)
        most = method.blocks * world.backend.multiprocessors
        assert method.most and all(0 <= most - blocks * world.n_ranks < 3 for blocks in method.most.values())

    pes(3).run(main)
