"""The network transport: data to ranks of any node, by NVSHMEM's put_signal.

    put(dst, src, signal, epoch, to)    copies src to dst on rank `to`, then sets signal[0] there to the epoch
    wait_for(signal, epoch)             acquires: what came with the signal can be read

The *put lemma* (docs/protocols.md) says when the source may be written again, without quiet, and why a double
buffer has a signal for each buffer.

A node has `local_size` consecutive ranks. Rank (i, l) is the l-th of node i.

On the host, ``ranks_in_reach`` says how many ranks do without it.
"""

from numba import cuda

from shmemkit.device import ComparisonType, SignalOp, num_ranks, put_signal_nbi_block, rank, signal_wait_until
from shmemkit.device.packets.transports import after

SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE

device = cuda.jit(device=True)


@device
def put(dst, src, signal, epoch, to):
    """Copy `src`, symmetric, to `dst` on rank `to`; then set signal[0] there to `epoch`. By a block, with a
    barrier first: its threads may just have written the source."""
    put_signal_nbi_block(dst, src, signal, epoch, SET, to)


@device
def wait_for(signal, epoch):
    """Until signal[0] is `epoch` or more: acquire, for all threads of the block, also of the network."""
    if cuda.threadIdx.x == 0:
        signal_wait_until(signal, GE, epoch)
    cuda.syncthreads()


@device
def where(local_size):
    """-> (i, l) of this rank."""
    node, local = 0, rank()
    while local >= local_size:
        local -= local_size
        node += 1
    return node, local


@device
def place(local_size, y, z):
    """-> (first, peer, there), for rank (i, l): ranks (i, 0), (i, l + y) and (i + z, 0), modulo the ranks of
    a node, and the nodes. y and z are below these."""
    _, local = where(local_size)
    first = rank() - local
    return first, first + after(local, y, local_size), after(first, z * local_size, num_ranks())


@device
def end_epoch(epochs, i, epoch):
    """Count: set epochs[i]. The threads of the block have read it before."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        epochs[i] = epoch


def ranks_in_reach(world):
    """-> how many consecutive ranks reach each other by stores: those of a node, or 1. Collective."""
    near = world.near()
    return world.local_size if all(world.host_allgather(all(near[k] for k in world.node_ranks))) else 1
