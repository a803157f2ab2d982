"""The network transport: what its functions order; and where a rank is in its node."""

import numpy as np
import pytest
from mutations import argument, goes_wrong, omit, seeds
from numba import cuda

import shmemkit as sk
from shmemkit.collectives import network
from shmemkit.device import num_ranks, rank

THREADS = 2


@cuda.jit
def exchange(x, out, source, slots, full, epochs):
    """out = the x of the rank before, in reverse. Of two ranks, each hears from its reader in every epoch."""
    t, following = cuda.threadIdx.x, (rank() + 1) % num_ranks()
    epoch = epochs[0] + 1
    buffer = epoch & 1
    source[buffer, t] = x[t]
    network.put(slots[buffer], source[buffer], full[buffer:], epoch, following)
    network.wait_for(full[buffer:], epoch)
    out[t] = slots[buffer, THREADS - 1 - t]
    cuda.syncthreads()
    if t == 0:
        epochs[0] = epoch


def few_calls(calls):
    """-> whether all results are right; no host waits between calls."""
    world = sk.init()
    shape = 2, THREADS
    slots, source = sk.zeros(shape, "int64"), sk.zeros(shape, "int64")
    full, epochs = sk.zeros(2, "uint64"), np.zeros(1, "uint64")
    xs = [100 * call + 10 * world.rank + np.arange(THREADS) for call in range(calls)]
    outs = [np.zeros(THREADS, "int64") for _ in xs]
    for x, out in zip(xs, outs, strict=True):
        exchange[1, THREADS](x, out, source, slots, full, epochs)
    world.synchronize()
    before = (world.rank - 1) % world.n_ranks - world.rank
    return all((out == x[::-1] + 10 * before).all() for x, out in zip(xs, outs, strict=True))


def is_wrong():
    options = dict(local_size=1, delivery="unordered", races=True)
    return goes_wrong(sk.emu.run, few_calls, 2, (4,), **options, each=seeds(8))


def test_data_come_before_their_signal_in_every_epoch():
    assert not is_wrong()


@pytest.mark.parametrize(
    "change",
    [
        omit("signal_wait_until"),
        omit("cuda.syncthreads", inside="wait_for"),
        argument("put_signal_nbi_block", 3, "epoch - 1"),
        omit("put_signal_nbi_block"),
    ],
)
def test_each_step_is_needed(mutate, change):
    mutate(network, change)
    assert is_wrong()


@pytest.mark.parametrize("change", [None, omit("cuda.syncthreads", inside="end_epoch")])
def test_all_threads_have_read_the_counter(mutate, change):
    @cuda.jit
    def count(seen, epochs):
        seen[cuda.threadIdx.x] = epochs[0, 0]
        network.end_epoch(epochs, (0, 0), 5)

    def main():
        sk.init()
        seen, epochs = np.ones(THREADS, "uint64"), np.zeros((1, 1), "uint64")
        count[1, THREADS](seen, epochs)
        return seen.tolist(), epochs.tolist()

    if change is None:
        assert sk.emu.run(main, 1, races=True) == [([0, 0], [[5]])]
        return
    mutate(network, change)
    with pytest.raises(sk.emu.RaceError):
        sk.emu.run(main, 1, races=True)


@pytest.mark.parametrize("nodes, local_size", [(1, 1), (1, 4), (4, 1), (3, 2)])
def test_where_a_rank_is(pes, nodes, local_size):
    @cuda.jit
    def kernel(out):
        y, z = cuda.blockIdx.x, cuda.blockIdx.y
        out[y, z, 0], out[y, z, 1] = network.where(local_size)
        out[y, z, 2], out[y, z, 3], out[y, z, 4] = network.place(local_size, y, z)

    def main():
        world = sk.init()
        out = np.zeros((local_size, nodes, 5), "int64")
        kernel[(local_size, nodes), 1](out)
        world.synchronize()
        node, local = divmod(world.rank, local_size)
        first = node * local_size
        for y, z in np.ndindex(local_size, nodes):
            peer, there = first + (local + y) % local_size, (node + z) % nodes * local_size
            assert out[y, z].tolist() == [node, local, first, peer, there]

    pes(nodes * local_size, local_size=local_size).run(main)
