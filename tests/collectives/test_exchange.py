"""All-gather, all-to-all and reduce-scatter by LL128 and by pieces on the emulator: what the tests of all
methods of each leave out. (test_all_reduce_ll128.py and test_lamport.py have the device functions.)"""

import numpy as np
import pytest

import shmemkit as sk


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
    "all_gather": (sk.AllGather.maker, gathered, ()),
    "all_to_all": (sk.AllToAll.maker, exchanged, ()),
    "reduce_scatter": (sk.ReduceScatter.maker, scattered, ("sum",)),
}
kinds = pytest.mark.parametrize("kind", KINDS)
methods = pytest.mark.parametrize("method", ["ll128", "lamport"])


def calls(kind, method, sizes, blocks=None):
    """One after another; of words, a tile for every 60, or 64."""
    made, data, options = KINDS[kind]
    world = sk.init()
    settings = {} if blocks is None else {"blocks": blocks}
    method = made(method)(world, 8 * max(sizes) * world.n_ranks, *options, **settings)
    for call, size in enumerate(sizes):
        x, out, expected = data(world, size, call)
        args = (x.dtype,) if options else ()
        method.bind(x.reshape(-1), out.reshape(-1), False, *args)(None)
        world.synchronize()
        np.testing.assert_array_equal(out, expected)
    method.free()


@pytest.mark.slow
@kinds
@methods
@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 0, 1]])
def test_right_in_every_schedule(kind, method, sizes):
    """The third call uses the first half again; one of nothing does not count."""
    found = sk.emu.explore(calls, 2, (kind, method, sizes), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.each_value
@kinds
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_more_tiles_than_warps(pes, kind, method):
    """Of tiles that are full and tiles that are not, in turn."""
    pes(3).run(calls, kind, method, [200, 1, 61, 120, 65, 128, 199, 2, 200], 0)


@kinds
@methods
def test_what_cannot_be_counted_is_refused(pes, kind, method):
    """Lines of more than 16 GiB, before they are asked for."""

    def main():
        made, _, options = KINDS[kind]
        with pytest.raises(ValueError, match=f"{kind} {method}: its slots would take .*; it is for smaller"):
            made(method)(sk.init(), 9 << 30, *options)

    pes(1).run(main)


@pytest.mark.slow
@methods
def test_many_ranks(pes, method):
    """All-to-all has no code for each rank."""
    pes(17).run(calls, "all_to_all", method, [1, 1])


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@methods
def test_many_ranks_are_refused(pes, kind, method):
    def main():
        made, _, options = KINDS[kind]
        with pytest.raises(ValueError, match=f"{kind} {method}: there are 17 ranks; it is for 16 at most"):
            made(method)(sk.init(), 64, *options)

    pes(17).run(main)


@methods
def test_the_blocks_of_all_rows_fit(pes, method):
    """Of a grid with a row for each rank, too."""

    def main():
        world = sk.init()
        exchange = sk.AllToAll.maker(method)(world, 100)
        most = exchange.blocks * world.backend.multiprocessors
        assert exchange.most
        assert all(0 <= most - blocks * rows < 3 for (_, rows, _), blocks in exchange.most.items())

    pes(3).run(main)
