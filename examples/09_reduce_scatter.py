"""Reduce-scatter within a node: add up the arrays of all ranks; each rank gets its segment of the sum.

    ./mpi_launch.sh -n 4 examples/09_reduce_scatter.py

Every rank has an array of n segments, one for each rank. Segment k of the result goes to rank k. A rank first
scatters its segments into the memory of their owners, over NVLink. Then it adds up what has arrived for its
own segment:

               scatter                      reduce
    rank 0   x0 x1 x2 x3 --> segment k --> x0 of ranks 0, 1, 2, 3
    rank 1   x0 x1 x2 x3     to rank k     x1 of ranks 0, 1, 2, 3
    rank 2   x0 x1 x2 x3                   x2 of ranks 0, 1, 2, 3
    rank 3   x0 x1 x2 x3                   x3 of ranks 0, 1, 2, 3

The order matters. If all ranks sent to rank 0 first, then to rank 1, and so on, they would share the links of
one rank at a time. So rank r sends to rank r + 1 first, then to r + 2, and so on: all links are busy. The
segments for rank r arrive in the order r - 1, r - 2, ..., and rank r adds them in this order. It adds the
first one while the others are on their way.

Each block has one part of each segment: it scatters that part, and then reduces it.

Protocol, for block b on rank r:

    1. copy part b of each peer's segment to scratch[buffer, r, part b] there
    2. set arrived[r, b] there to the number of the call      release: publishes the part
    3. wait until arrived[k, b] is the number of the call     acquire: sees what rank k stored
    4. add part b of scratch[buffer, k] to the result

No race: two buffers take turns, so a part is rewritten two calls later. In the call between, the sender has
received the peer's part b of that call. The peer sent it after its previous call had ended, so the peer had
read the buffer. No deadlock: every block sends before it waits, and all blocks run at once.

The kernel counts the calls in GPU memory, so a CUDA graph can capture a call and replay it many times.

On the emulator it prints

    4 ranks (emulator), 1000 float32 for each, 3 parts
    scatter and reduce: passed
    sk.ReduceScatter: passed

On GPUs it also prints how long a call takes. ``sk.ReduceScatter`` has this method and others, for all dtypes
and several operations, and selects one by the size.
"""

import argparse

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import copy_block, notify, num_ranks, rank, symm_at, wait_block

CALLS = 5  # one after another; the host does not wait between them


@cuda.jit
def reduce_scatter(x, out, part, scratch, arrived, calls):
    """Add up row `rank()` of the `x` of all ranks in `out`.

    part             elements of a part; block b has elements b * part, ... of each segment
    scratch[b2, k]   the segment of rank k for this rank, in buffer b2 of two; symmetric
    arrived[k, b]    the last call whose part b of rank k has arrived; symmetric
    calls[b]         how many calls block b has made
    """
    me, n, b, thread = rank(), num_ranks(), cuda.blockIdx.x, cuda.threadIdx.x
    begin, end = b * part, min((b + 1) * part, out.size)
    call = calls[b] + 1
    buffer = call & 1

    for y in range(1, n):
        peer = (me + y) % n
        copy_block(symm_at(scratch, peer)[buffer, me, begin:end], x[peer, begin:end])
        cuda.syncthreads()  # all threads have stored
        if thread == 0:
            notify(arrived[me, b:], peer, call, "set", "sys")

    for i in range(begin + thread, end, cuda.blockDim.x):
        out[i] = x[me, i]
    for y in range(1, n):
        peer = (me + n - y) % n
        wait_block(arrived[peer, b:], 1, "sys", "acquire", call)
        for i in range(begin + thread, end, cuda.blockDim.x):
            out[i] += scratch[buffer, peer, i]

    cuda.syncthreads()  # all threads have read the counter
    if thread == 0:
        calls[b] = call


def main():
    parser = argparse.ArgumentParser(description="Reduce-scatter within a node.")
    parser.add_argument("--size", type=int, default=1000, help="float32 of a segment (1000)")
    parser.add_argument("--parts", type=int, default=3, help="of a segment; a block for each (3)")
    options = parser.parse_args()

    with sk.init() as world:
        n, size, parts, xp = world.n_ranks, options.size, options.parts, world.xp
        # Small whole numbers: their sums are exact in any order.
        data = np.random.default_rng(0).integers(0, 1000, (CALLS, n, n, size)).astype("float32")
        expected = data.sum(axis=1)[:, world.rank]
        inputs, outputs = xp.asarray(data[:, world.rank]), xp.empty((CALLS, size), "float32")
        part = -(-size // parts)
        scratch = sk.empty((2, n, size), "float32", "scratch")
        arrived = sk.zeros((n, parts), "uint64", "arrived")
        args = part, scratch, arrived, xp.zeros(parts, "int64")
        # Blocks wait for the other ranks. co_resident: refuse a grid whose blocks do not all run at once.
        bound = sk.bind(reduce_scatter, parts, 128, (inputs[0], outputs[0], *args), co_resident=True)

        world.print(f"{n} ranks ({world.backend.name}), {size} float32 for each, {parts} parts", ranks=0)
        ways = {
            "scatter and reduce": lambda x, out: bound.with_args(x, out, *args)(),
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
