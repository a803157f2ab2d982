"""All-gather: every rank gives a segment and gets the segments of all ranks. Two kernels do it in two ways.

    ./mpi_launch.sh -n 4 examples/02_all_gather.py

Push. A rank stores its segment into a buffer in each peer's memory, and then sets a signal there. `notify` is
a release and `wait` an acquire: a rank that sees the signal also sees the data. No rank asks whether the
buffer is free. Two buffers, used in turn, are enough. Rank A rewrites a buffer of rank B two calls
later. Before that, A has received B's segment of the call in between. B sent that segment after its previous
call had ended, so B had read the buffer.

LL (low latency). A store followed by a signal makes two trips over the link, one after the other. LL makes
one: every 8 bytes hold 4 bytes of data and a 4-byte flag, so each word shows that it has arrived. The price
is twice the bytes, so LL is faster for small segments. The flag is the number of the call. The two buffers
are as above.

The kernel counts the calls in GPU memory. So a CUDA graph can capture a call and replay it many times.

On the emulator it prints

    4 ranks (emulator), 1000 float32 of each
    push: passed
    ll: passed
    sk.AllGather: passed

On GPUs it also prints how long a call takes. ``sk.AllGather`` has these methods and others, for all dtypes
and sizes, and selects one by the size.
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

CALLS = 5  # one after another; the host does not wait between them


@cuda.jit
def push(x, out, inbox, arrived, calls):
    """Gather the `x` of all ranks in the rows of `out`. Block y exchanges segments with one peer: the rank
    y places further. Block 0 copies the rank's own segment.

    inbox[b, k]   the segment of rank k, in buffer b of two; symmetric
    arrived[k]    the last call whose segment of rank k has arrived; symmetric
    calls[y]      how many calls block y has made
    """
    me, y = rank(), cuda.blockIdx.x
    peer = (me + y) % num_ranks()
    call = calls[y] + 1
    buffer = call & 1
    if y == 0:
        copy_block(out[me], x)
    else:
        copy_block(symm_at(inbox, peer)[buffer, me], x)
        cuda.syncthreads()  # all threads have stored
        if cuda.threadIdx.x == 0:
            notify(arrived[me:], peer, call, "set", "sys")
        wait_block(arrived[peer:], 1, "sys", "acquire", call)
        copy_block(out[peer], inbox[buffer, peer])
    cuda.syncthreads()  # all threads have read the counter
    if cuda.threadIdx.x == 0:
        calls[y] = call


@cuda.jit
def ll(x, out, packets, calls):
    """The same by LL; packets[b, k] is the packed segment of rank k, in buffer b of two; symmetric."""
    me, y = rank(), cuda.blockIdx.x
    peer = (me + y) % num_ranks()
    call = calls[y] + 1
    if y == 0:
        copy_block(out[me], x)
    else:
        ll_pack_block(symm_at(packets, peer)[call & 1, me], x, call)
        ll_recv_block(out[peer], packets[call & 1, peer], call)
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
        packets = sk.zeros((2, n, ll_words(4 * size)), "uint64", "packets")

        def by(kernel, *buffers):
            """-> gather(x, out), which enqueues `kernel` with a block for each rank, all of them resident."""
            args = *buffers, xp.zeros(n, "int64")
            bound = sk.bind(kernel, n, 256, (inputs[0], outputs[0], *args), co_resident=True)
            return lambda x, out: bound.with_args(x, out, *args)()

        world.print(f"{n} ranks ({world.backend.name}), {size} float32 of each", ranks=0)
        ways = {"push": by(push, inbox, arrived), "ll": by(ll, packets)}
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
