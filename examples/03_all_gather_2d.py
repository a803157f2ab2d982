"""All-gather over several nodes: once across nodes, then inside the node.

    SHMEMKIT_LOCAL_SIZE=2 ./mpi_launch.sh -n 4 examples/03_all_gather_2d.py

Every rank gives a segment, and gets those of all ranks. Sent straight to each rank, a segment would cross the
network once for every rank of every other node: with 2 nodes of 8 GPUs, 8 times the same bytes. But inside a
node there is NVLink, which is many times as fast. So a rank sends its segment to one rank of each other node,
that of its own local rank, and that one passes it on to its neighbours: over the network goes what must go,
once, and all ranks send equally much.

         node 0                node 1
    rank 0    rank 1      rank 2    rank 3
       segment 0 ------------>|                   1. across nodes: NVSHMEM's put_signal
                              |-------->|         2. inside the node: 16-byte stores, notify

SHMEMKIT_LOCAL_SIZE=2 declares logical nodes of two ranks, so that it can be tried on one host, on GPUs or the
emulator; without it the nodes are the hosts. On the emulator it prints

    2 nodes of 2 ranks (emulator), 1000 float32 of each rank
    the kernel of this example: passed
    sk.AllGather, 'll_2d': passed
    sk.AllGather, 'push_2d': passed

and on GPUs how long a call of the two methods takes, too.
"""

import argparse

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    copy_block,
    notify,
    num_ranks,
    put_signal_nbi_block,
    rank,
    signal_wait_until,
    symm_at,
)

SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def all_gather_2d(out, arrived, local_size):
    """Row `rank()` of the symmetric `out` is mine; gather the others. Once: `arrived` is zeros before.

    Block (y, z) thinks of the rank y further in its node, and of the node z further; (0, 0) waits for all.
    """
    me, n, y, z = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
    first = me // local_size * local_size  # rank of my node
    peer = first + (me - first + y) % local_size
    other = (me + z * local_size) % n  # on the other node: who has my local rank
    if y == 0 and z > 0:
        put_signal_nbi_block(out[me], out[me], arrived[me:], 1, SET, other)
    elif y > 0:
        if z > 0 and cuda.threadIdx.x == 0:
            signal_wait_until(arrived[other:], GE, 1)
        cuda.syncthreads()
        copy_block(symm_at(out, peer)[other], out[other])  # my own segment, if z == 0
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            notify(arrived[other:], peer, 1)
    else:
        for k in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            if k != me:
                signal_wait_until(arrived[k:], GE, 1)


def main():
    parser = argparse.ArgumentParser(description="All-gather over several nodes, real or logical ones.")
    parser.add_argument("--size", type=int, default=1000, help="float32 of each rank (1000)")
    options = parser.parse_args()

    with sk.init() as world:
        n, size = world.n_ranks, options.size
        expected = np.stack([np.random.default_rng(k).standard_normal(size, "float32") for k in range(n)])
        x = world.xp.asarray(expected[world.rank])

        def report(what, out, note=""):
            wrong = int((world.asnumpy(out) != expected).sum())
            if wrong:
                raise RuntimeError(f"{what}: {wrong} wrong elements on rank {world.rank}")
            world.print(f"{what}: passed{note}", ranks=0)

        nodes = f"{world.n_nodes} nodes of {world.local_size} ranks ({world.backend.name})"
        world.print(f"{nodes}, {size} float32 of each rank", ranks=0)
        out, arrived = sk.zeros((n, size), name="out"), sk.signals(n, "arrived")
        out[world.rank] = x
        all_gather_2d[(world.local_size, world.n_nodes), 256, world.stream](out, arrived, world.local_size)
        report("the kernel of this example", out)

        # Ready to use, any number of times: in small messages every word says itself that it has arrived.
        for method in ("ll_2d", "push_2d"):
            gather = sk.AllGather(world, n * x.nbytes, method)
            gathered, note = gather(x), ""
            if world.backend.name != "emulator":
                us = sk.Timer(world)(lambda g=gather, y=gathered: g(x, y))
                note = f", {us:.1f} us"
            report(f"sk.AllGather, {method!r}", gathered, note)
            gather.free()


if __name__ == "__main__":
    main()
