"""All-gather over several nodes: first across the nodes, then inside each node.

    ./mpi_launch.sh -n 4 examples/03_all_gather_2d.py

Every rank gives a segment and gets the segments of all ranks. If a rank sent its segment straight to every
other rank, the segment would cross the network once for each of them: with 2 nodes of 8 GPUs, 8 times. NVLink
inside a node is many times as fast as the network. So a rank sends its segment to one rank of each other
node, the one with its own local rank. That rank passes the segment on to its neighbours. Each segment crosses
the network once for each node, and all ranks send the same amount.

         node 0                node 1
    rank 0    rank 1      rank 2    rank 3
       segment 0 ------------>|                   1. across nodes: NVSHMEM's put_signal
                              |-------->|         2. inside the node: 16-byte stores, notify

If all ranks are on one host, the example declares two logical nodes, each with half of the ranks.
SHMEMKIT_LOCAL_SIZE=2 declares nodes of two ranks instead. On the emulator it prints

    2 nodes of 2 ranks (emulator), 1000 float32 of each rank
    the kernel of this example: passed
    sk.AllGather, 'll_2d': passed
    sk.AllGather, 'push_2d': passed

On GPUs it also prints how long a call of the two methods takes.
"""

import argparse
import os

import numpy as np
from mpi4py import MPI
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
    """Gather the segments of all ranks in the rows of the symmetric `out`. Row `rank()` is there before.

    arrived[k]   1 once segment k has arrived; symmetric, zeros before: for one call only

    Block (y, z) is for the rank y places further in the node, and for the node z places further:

      (0, z)  put the rank's own segment to that node, with a signal     release: the data precedes the signal
      (y, z)  wait for the segment that has come from that node          acquire: sees the data
              copy it to the neighbour and notify                        release
      (0, 0)  wait until all segments have arrived
    """
    me, n, y, z = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
    first = me // local_size * local_size  # the first rank of this node
    peer = first + (me - first + y) % local_size
    other = (me + z * local_size) % n  # on the other node, with the same local rank
    if y == 0 and z > 0:
        put_signal_nbi_block(out[me], out[me], arrived[me:], 1, SET, other)
    elif y > 0:
        if z > 0 and cuda.threadIdx.x == 0:
            signal_wait_until(arrived[other:], GE, 1)
        cuda.syncthreads()
        copy_block(symm_at(out, peer)[other], out[other])  # z == 0: the own segment
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            notify(arrived[other:], peer, 1)
    else:
        for k in range(cuda.threadIdx.x, n, cuda.blockDim.x):
            if k != me:
                signal_wait_until(arrived[k:], GE, 1)


def two_nodes():
    """-> half of the ranks if all are on one host and the user has not declared nodes, else None."""
    ranks = MPI.COMM_WORLD
    on_one_host = ranks.Split_type(MPI.COMM_TYPE_SHARED).size == ranks.size
    if on_one_host and ranks.size % 2 == 0 and "SHMEMKIT_LOCAL_SIZE" not in os.environ:
        return ranks.size // 2
    return None


def main():
    parser = argparse.ArgumentParser(description="All-gather over several nodes, real or logical ones.")
    parser.add_argument("--size", type=int, default=1000, help="float32 of each rank (1000)")
    options = parser.parse_args()

    with sk.init(local_size=two_nodes()) as world:
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

        # Ready to use, for any number of calls: LL for small segments, push for larger ones.
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
