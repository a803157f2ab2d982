"""All-gather: every rank gives a segment, and gets those of all ranks. Two ways, each a kernel of its own.

    ./mpi_launch.sh -n 4 examples/02_all_gather.py

Push. A rank stores its segment into a buffer in each peer's memory, and then a signal there: notify is a
release, wait an acquire, so who sees the signal sees the data. Nobody asks whether the buffer is free. The
buffer has two halves, for calls with even and with odd numbers, and that is enough: who writes a half again,
two calls later, has in the call between received what the peer sent then; which the peer did after its own
call before, with all that it had to read.

LL, low latency. A store and then a signal are two trips, one after the other. If every 8 bytes that are
stored hold 4 bytes of data and 4 of a flag, then the data says itself that it is there: one trip, for twice
the bytes. The flag is the number of the call, and the halves are the same. This is faster for small segments.

The calls are counted on the GPU, by the kernel, so that they may be captured in a CUDA graph and replayed.
On the emulator it prints

    4 ranks (emulator), 1000 float32 of each
    push: passed
    ll: passed
    sk.AllGather: passed

and on GPUs how long a call of each takes, too. ``sk.AllGather`` has these methods and others, for any number
of blocks, dtype and length, and picks one by the size.
"""

import argparse

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    copy_block,
    ll_pack_block,
    ll_recv_block,
    ll_words,
    notify,
    num_ranks,
    rank,
    symm_at,
    wait_block,
)

CALLS = 5  # one after the other, without a wait of the host


@cuda.jit
def push(x, out, inbox, arrived, calls):
    """Block y sends `x` to the rank y further, and receives from there; block 0 copies my own.

    inbox[half, k]   what rank k has sent here, of the last call with this half; symmetric
    arrived[k]       the number of the last call of which it is all here; symmetric
    calls[y]         how many calls block y has taken part in
    """
    me, y = rank(), cuda.blockIdx.x
    peer = (me + y) % num_ranks()
    call = calls[y] + 1
    half = call & 1
    if y == 0:
        copy_block(out[me], x)
    else:
        copy_block(symm_at(inbox, peer)[half, me], x)
        cuda.syncthreads()  # all threads have stored
        if cuda.threadIdx.x == 0:
            notify(arrived[me:], peer, call, "set", "sys")
        wait_block(arrived[peer:], 1, "sys", "acquire", call)
        copy_block(out[peer], inbox[half, peer])
    cuda.syncthreads()  # all threads have read the counter
    if cuda.threadIdx.x == 0:
        calls[y] = call


@cuda.jit
def ll(x, out, lines, calls):
    """The same; lines[half, k] is what rank k has sent here, packed."""
    me, y = rank(), cuda.blockIdx.x
    peer = (me + y) % num_ranks()
    call = calls[y] + 1
    if y == 0:
        copy_block(out[me], x)
    else:
        ll_pack_block(symm_at(lines, peer)[call & 1, me], x, call)
        ll_recv_block(out[peer], lines[call & 1, peer], call)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        calls[y] = call


def main():
    parser = argparse.ArgumentParser(description="All-gather by push and by LL.")
    parser.add_argument("--size", type=int, default=1000, help="float32 of each rank (1000)")
    options = parser.parse_args()

    with sk.init() as world:
        n, size, xp, timer = world.n_ranks, options.size, world.xp, sk.Timer(world)
        data = np.random.default_rng(0).standard_normal((CALLS, n, size), "float32")
        inputs, outputs = xp.asarray(data[:, world.rank]), xp.empty((CALLS, n, size), "float32")
        inbox, arrived = sk.empty((2, n, size), "float32", "inbox"), sk.signals(n, "arrived")
        lines = sk.zeros((2, n, ll_words(4 * size)), "uint64", "lines")

        def by(kernel, *buffers):
            """-> gather(x, out), which enqueues `kernel`: a block for each rank, all of them at once."""
            args = *buffers, xp.zeros(n, "int64")
            bound = sk.bind(kernel, n, 256, (inputs[0], outputs[0], *args), co_resident=True)
            return lambda x, out: bound.with_args(x, out, *args)()

        world.print(f"{n} ranks ({world.backend.name}), {size} float32 of each", ranks=0)
        ways = {"push": by(push, inbox, arrived), "ll": by(ll, lines)}
        ways["sk.AllGather"] = sk.AllGather(world, data[0].nbytes)
        for name, gather in ways.items():
            outputs.fill(np.nan)
            for x, out in zip(inputs, outputs, strict=True):
                gather(x, out)
            wrong, note = int((world.asnumpy(outputs) != data).sum()), ""
            if wrong:
                raise RuntimeError(f"{name}: {wrong} wrong elements on rank {world.rank}")
            if world.backend.name != "emulator":
                us = timer(lambda g=gather: g(inputs[0], outputs[0]))
                note = f", {us:.1f} us"
            world.print(f"{name}: passed{note}", ranks=0)


if __name__ == "__main__":
    main()
