"""Ring all-reduce: add up the arrays of all ranks, in two phases; every rank gets the sum.

    ./mpi_launch.sh -n 4 examples/04_ring_all_reduce.py

Every rank sends to the next one only. In the reduce phase, rank 0 sends its array to rank 1, which adds its
own and sends the sum to rank 2, and so on. The last rank has the sum of all. In the broadcast phase, it sends
the sum to rank 0, and the sum goes along the ranks again, up to the last but one.

        reduce      0 --> 1 --> 2 --> 3
        broadcast   3 --> 0 --> 1 --> 2

With whole arrays this would take 2 n - 2 sends, one after the other. So the array is cut into chunks, and the
ranks form a pipeline: while rank 1 adds to the second chunk, rank 2 adds to the first. Each block has chunks
of its own.

put_signal sends a chunk and then sets a signal at the receiver. A rank that sees the signal sees that chunk,
but not other chunks: a block sends several chunks without waiting, and a network may reorder them. Suppose
that each chunk added 1 to a common signal. Then a signal of 1 would mean that one chunk has arrived. It might
be the second one, while the memory of the first still holds old data. So each chunk has its own signal. Each
phase has its own signals too, because both phases bring the same chunk to a rank. On one host a program with
one signal gives right results every time; the emulator reports the race, with --races --delivery unordered.

The signals hold the number of the call, which the kernel counts in GPU memory. So they need no reset, and a
CUDA graph can capture the call. No rank asks whether the next rank's memory is free, and there is only one
buffer of each kind. A rank that has the sum of a chunk knows that all ranks have added their part: they have
read the partial sums. A rank that has the sum of the next call knows that all ranks have ended this one.

On the emulator it prints

    4 ranks (emulator), 1000 float32, 8 chunks in 3 blocks
    ring: passed
    sk.AllReduce: passed

On GPUs it also prints how long a call takes. ``sk.AllReduce`` has this method and others, for all dtypes and
several operations, and selects one by the size.
"""

import argparse

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    copy_block,
    num_ranks,
    put_signal_nbi_block,
    rank,
    signal_wait_until,
)

CALLS = 5  # one after another; the host does not wait between them
SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def ring_all_reduce(x, out, chunk, partial, total, reduced, done, calls):
    """Add up the `x` of all ranks in `out`.

    chunk       elements of a chunk; block b has the chunks b, b + gridDim.x, ...
    partial     the sums up to the previous rank, then up to this one; symmetric
    total       the sums of all ranks; symmetric
    reduced[c]  the last call whose partial sums of chunk c have arrived; symmetric
    done[c]     the last call whose total sums of chunk c have arrived; symmetric
    calls[c]    how many calls chunk c has made
    """
    me, last = rank(), num_ranks() - 1
    following = me + 1 if me < last else 0
    first = cuda.blockIdx.x

    c = first
    while c * chunk < x.size:  # the reduce phase
        begin, end = c * chunk, min((c + 1) * chunk, x.size)
        call, mine = calls[c] + 1, partial[begin:end]
        if me > 0:
            if cuda.threadIdx.x == 0:
                signal_wait_until(reduced[c:], GE, call)
            cuda.syncthreads()
        for i in range(begin + cuda.threadIdx.x, end, cuda.blockDim.x):
            number = x[i] if me == 0 else partial[i] + x[i]
            if me < last:
                partial[i] = number
            else:
                total[i] = out[i] = number
        if me < last:  # the put begins with a barrier of the block: all threads have stored
            put_signal_nbi_block(mine, mine, reduced[c:], call, SET, following)
        elif last > 0:
            mine = total[begin:end]
            put_signal_nbi_block(mine, mine, done[c:], call, SET, following)
        c += cuda.gridDim.x

    c = first
    while me < last and c * chunk < x.size:  # the broadcast phase
        begin, end = c * chunk, min((c + 1) * chunk, x.size)
        call, mine = calls[c] + 1, total[begin:end]
        if cuda.threadIdx.x == 0:
            signal_wait_until(done[c:], GE, call)
        cuda.syncthreads()
        if following < last:  # the last rank has the sum already
            put_signal_nbi_block(mine, mine, done[c:], call, SET, following)
        copy_block(out[begin:end], mine)
        c += cuda.gridDim.x

    cuda.syncthreads()  # all threads have read the counters
    for c in range(first + cuda.threadIdx.x * cuda.gridDim.x, calls.size, cuda.gridDim.x * cuda.blockDim.x):
        calls[c] += 1


def main():
    parser = argparse.ArgumentParser(description="All-reduce around a ring, in two phases.")
    parser.add_argument("--size", type=int, default=1000, help="float32 of each rank (1000)")
    parser.add_argument("--chunk", type=int, default=125, help="float32 of a chunk (125)")
    parser.add_argument("--blocks", type=int, default=3, help="blocks that share the chunks (3)")
    options = parser.parse_args()

    with sk.init() as world:
        n, size, xp, timer = world.n_ranks, options.size, world.xp, sk.Timer(world)
        chunks = -(-size // options.chunk)
        # Small whole numbers: their sums are exact in any order.
        data = np.random.default_rng(0).integers(0, 1000, (CALLS, n, size)).astype("float32")
        expected = data.sum(axis=1)
        inputs, outputs = xp.asarray(data[:, world.rank]), xp.empty((CALLS, size), "float32")
        partial, total = (sk.empty(size, "float32", name) for name in ("partial", "total"))
        reduced, done = sk.signals(max(1, chunks), "reduced"), sk.signals(max(1, chunks), "done")
        args = options.chunk, partial, total, reduced, done, xp.zeros(chunks, "int64")
        # Blocks wait for the other ranks. co_resident: refuse a grid whose blocks do not all run at once.
        bound = sk.bind(ring_all_reduce, options.blocks, 64, (inputs[0], outputs[0], *args), co_resident=True)

        blocks = f"{chunks} chunks in {options.blocks} blocks"
        world.print(f"{n} ranks ({world.backend.name}), {size} float32, {blocks}", ranks=0)
        ways = {
            "ring": lambda x, out: bound.with_args(x, out, *args)(),
            "sk.AllReduce": sk.AllReduce(world, expected[0].nbytes),
        }
        for name, reduce in ways.items():
            outputs.fill(np.nan)
            for x, out in zip(inputs, outputs, strict=True):
                reduce(x, out)
            wrong, note = int((world.asnumpy(outputs) != expected).sum()), ""
            if wrong:
                raise RuntimeError(f"{name}: {wrong} wrong elements on rank {world.rank}")
            if world.backend.name != "emulator":
                us = timer(lambda r=reduce: r(inputs[0], outputs[0]))
                note = f", {us:.1f} us"
            world.print(f"{name}: passed{note}", ranks=0)


if __name__ == "__main__":
    main()
