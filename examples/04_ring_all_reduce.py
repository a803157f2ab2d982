"""Ring all-reduce: the arrays of all ranks are added up, and every rank gets the sum, in two phases.

    ./mpi_launch.sh -n 4 examples/04_ring_all_reduce.py

Every rank sends to the next one only. In the reduce phase, rank 0 sends its array to rank 1, which adds its
own and sends the sum to rank 2, and so on: the last rank has the sum of all. In the broadcast phase it sends
that to rank 0, and from there it goes along the ranks again, up to the last but one.

        reduce      0 --> 1 --> 2 --> 3
        broadcast   3 --> 0 --> 1 --> 2

One after another, that would take 2 n - 2 times as long as one send. But the array is cut into chunks: while
rank 1 adds its part of the second chunk, rank 2 does that of the first. Each block has chunks of its own.

put_signal sends a chunk, and then sets a signal where it went: who sees the signal sees that chunk, not
others. A block sends several chunks, one after another, and does not wait until they have arrived; a network
may swap them. If they all added 1 to one signal, then "the signal is 1" would say that some chunk is here,
perhaps the second, while the first one's memory still holds what was there before. So there is a signal for
each chunk. And one for each phase, since both phases bring a rank the same chunk. On one host such a program
gives right results every time with one signal, too; the emulator, with --races --delivery unordered, says
what is wrong with it.

The signals hold the number of the call, which the kernel counts on the GPU: so they need no reset, and calls
may be captured in a CUDA graph. Nobody asks whether the next rank's memory is free, and no buffer is there
twice. A rank that has a chunk's sum knows that all have added their part, so the partial sums have been read;
and one that has the next call's knows that all have ended this one.

On the emulator it prints

    4 ranks (emulator), 1000 float32, 8 chunks in 3 blocks
    ring: passed
    sk.AllReduce: passed

and on GPUs how long a call of each takes, too. ``sk.AllReduce`` has this method and others, for all dtypes
and several operations, and picks one by the size.
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

CALLS = 5  # one after the other, without a wait of the host
SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def ring_all_reduce(x, out, chunk, partial, total, reduced, done, calls):
    """Add up the `x` of all ranks in `out`.

    chunk       elements of a chunk; block b has the chunks b, b + gridDim.x, ...
    partial     the sums of the ranks before, and mine; symmetric
    total       the sums of all ranks; symmetric
    reduced[c]  the number of the last call of which the partial sums of chunk c are here; symmetric
    done[c]     likewise the sums of all; symmetric
    calls[c]    how many calls chunk c has taken part in
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
        if following < last:  # who has it already
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
        # Whole numbers, not large: their sums are exact, in whatever order they are added.
        data = np.random.default_rng(0).integers(0, 1000, (CALLS, n, size)).astype("float32")
        expected = data.sum(axis=1)
        inputs, outputs = xp.asarray(data[:, world.rank]), xp.empty((CALLS, size), "float32")
        partial, total = (sk.empty(size, "float32", name) for name in ("partial", "total"))
        reduced, done = sk.signals(max(1, chunks), "reduced"), sk.signals(max(1, chunks), "done")
        args = options.chunk, partial, total, reduced, done, xp.zeros(chunks, "int64")
        # A block waits for the other ranks: co_resident makes sure that all blocks run at once.
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
