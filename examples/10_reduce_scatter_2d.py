"""Reduce-scatter over several nodes: first inside each node, then across the nodes.

    ./mpi_launch.sh -n 4 examples/10_reduce_scatter_2d.py

Every rank has a segment for each rank, and each rank gets the sum of its segments. If all ranks sent straight
to the owner, each segment would cross the network once for every rank of the other nodes. So the ranks of a
node add up first, over NVLink, which is many times as fast. Only the sum of a node crosses the network, once:

          node 0                  node 1
    rank 0      rank 1      rank 2      rank 3
       x2 <------- x2                               1. inside the node: 16-byte stores, notify
       x2+x2 ---------------> x2+x2                 2. across nodes: NVSHMEM's put_signal

For the segment of a rank on another node, the rank with the same local rank adds up. So all ranks of a node
send the same amount over the network. The kernel takes the other nodes first, so that the network has work
while the ranks add up for their own node.

Protocol, for rank l of node i. Block (b, z) has part b of the segments for the node j, z places further:

    1. copy part b of the segment for rank k of node j to staged[buffer, j, l, part b] on the neighbour k of
       this node, and set arrived[j, l, b] there to the number of the call           release
    2. wait until arrived[j, k, b] is the number of the call, for all neighbours k   acquire
    3. add up the part for rank l of node j: the own one and staged[buffer, j]
    4. j != i: put the sum to inbox[buffer, i] on rank l of node j; the signal got[buffer, i, b] follows it
       j == i: store the sum as the result, wait for got[buffer, m, b] of all other nodes m, and add inbox

No race: two buffers take turns, so each is rewritten two calls later. In the call between, the writer has
received from the reader. The reader sent after its previous call had ended, so it had read the buffer. That
call could not end before the writer's put had arrived, so the writer may reuse the source of the put as well.
No deadlock: every block sends before it waits, and all blocks run at once.

Puts of neighbouring calls may be on the network together, and the network may reorder them. With one signal
for both buffers, the signal of the later put could arrive before the data of the earlier one. So each buffer
has its own signals. The emulator reports the race otherwise, with --races --delivery unordered.

If all ranks are on one host, the example declares two logical nodes, each with half of the ranks.
SHMEMKIT_LOCAL_SIZE=2 declares nodes of two ranks instead. On the emulator it prints

    2 nodes of 2 ranks (emulator), 1000 float32 for each rank, 3 parts
    the kernel of this example: passed
    sk.ReduceScatter: passed

On GPUs it also prints how long a call takes.
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
    put_signal_nbi_block,
    rank,
    signal_wait_until,
    symm_at,
    wait_block,
)

CALLS = 5  # one after another; the host does not wait between them
SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def reduce_scatter_2d(x, out, part, staged, arrived, outbox, inbox, got, calls):
    """Add up row `rank()` of the `x` of all ranks in `out`. Blocks (parts, nodes).

    part               elements of a part; part b has elements b * part, ... of each segment
    staged[b2, j, k]   the segment of neighbour k for this local rank of node j, in buffer b2; symmetric
    arrived[j, k, b]   the last call whose part b of it has arrived; symmetric
    outbox[b2, j]      the sum of this node for node j, in buffer b2; symmetric
    inbox[b2, m]       the sum of node m for this rank, in buffer b2; symmetric
    got[b2, m, b]      the last call whose part b of it has arrived in buffer b2; symmetric
    calls[b, z]        how many calls block (b, z) has made
    """
    nodes, local_size = arrived.shape[0], arrived.shape[1]
    node, local = rank() // local_size, rank() % local_size
    b, z, thread, threads = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
    begin, end = b * part, min((b + 1) * part, out.size)
    call = calls[b, z] + 1
    buffer = call & 1
    to = (node + z) % nodes
    mine = to * local_size + local  # the rank that this block adds up for

    for y in range(1, local_size):  # 1
        k = (local + y) % local_size
        there = symm_at(staged, node * local_size + k)
        copy_block(there[buffer, to, local, begin:end], x[to * local_size + k, begin:end])
        cuda.syncthreads()  # all threads have stored
        if thread == 0:
            notify(arrived[to, local, b:], node * local_size + k, call, "set", "sys")

    total = outbox[buffer, to] if z > 0 else out
    for i in range(begin + thread, end, threads):
        total[i] = x[mine, i]
    for y in range(1, local_size):
        k = (local + local_size - y) % local_size
        wait_block(arrived[to, k, b:], 1, "sys", "acquire", call)  # 2
        for i in range(begin + thread, end, threads):
            total[i] += staged[buffer, to, k, i]  # 3

    if z > 0:  # 4; the put begins with a barrier of the block: all threads have stored
        box = inbox[buffer, node, begin:end]
        put_signal_nbi_block(box, total[begin:end], got[buffer, node, b:], call, SET, mine)
    else:
        for m in range(nodes):
            if m != node:
                if thread == 0:
                    signal_wait_until(got[buffer, m, b:], GE, call)
                cuda.syncthreads()
                for i in range(begin + thread, end, threads):
                    out[i] += inbox[buffer, m, i]

    cuda.syncthreads()  # all threads have read the counter
    if thread == 0:
        calls[b, z] = call


def two_nodes():
    """-> half of the ranks if all are on one host and the user has not declared nodes, else None."""
    ranks = MPI.COMM_WORLD
    on_one_host = ranks.Split_type(MPI.COMM_TYPE_SHARED).size == ranks.size
    if on_one_host and ranks.size % 2 == 0 and "SHMEMKIT_LOCAL_SIZE" not in os.environ:
        return ranks.size // 2
    return None


def main():
    parser = argparse.ArgumentParser(description="Reduce-scatter over several nodes, real or logical ones.")
    parser.add_argument("--size", type=int, default=1000, help="float32 of a segment (1000)")
    parser.add_argument("--parts", type=int, default=3, help="of a segment; a block for each, and node (3)")
    options = parser.parse_args()

    with sk.init(local_size=two_nodes()) as world:
        n, size, parts, xp = world.n_ranks, options.size, options.parts, world.xp
        nodes, local_size = world.n_nodes, world.local_size
        # Small whole numbers: their sums are exact in any order.
        data = np.random.default_rng(0).integers(0, 1000, (CALLS, n, n, size)).astype("float32")
        expected = data.sum(axis=1)[:, world.rank]
        inputs, outputs = xp.asarray(data[:, world.rank]), xp.empty((CALLS, size), "float32")
        args = (
            -(-size // parts),
            sk.empty((2, nodes, local_size, size), "float32", "staged"),
            sk.zeros((nodes, local_size, parts), "uint64", "arrived"),
            sk.empty((2, nodes, size), "float32", "outbox"),
            sk.empty((2, nodes, size), "float32", "inbox"),
            sk.zeros((2, nodes, parts), "uint64", "got"),
            xp.zeros((parts, nodes), "int64"),
        )
        grid, first = (parts, nodes), (inputs[0], outputs[0])
        # Blocks wait for the other ranks. co_resident: refuse a grid whose blocks do not all run at once.
        bound = sk.bind(reduce_scatter_2d, grid, 128, (*first, *args), co_resident=True)

        world.print(
            f"{nodes} nodes of {local_size} ranks ({world.backend.name}), {size} float32 for each rank,",
            f"{parts} parts",
            ranks=0,
        )
        ways = {
            "the kernel of this example": lambda x, out: bound.with_args(x, out, *args)(),
            "sk.ReduceScatter": sk.ReduceScatter(world, inputs[0].nbytes),
        }
        for name, reduce in ways.items():
            outputs.fill(np.nan)
            for x, out in zip(inputs, outputs, strict=True):
                reduce(x, out)
            wrong, note = int((world.asnumpy(outputs) != expected).sum()), ""
            if wrong:
                raise RuntimeError(f"{name}: {wrong} wrong elements on rank {world.rank}")
            if world.backend.name != "emulator":
                us = sk.Timer(world)(lambda r=reduce: r(inputs[0], outputs[0]))
                note = f", {us:.1f} us"
            world.print(f"{name}: passed{note}", ranks=0)


if __name__ == "__main__":
    main()
