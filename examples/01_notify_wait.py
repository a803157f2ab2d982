"""Notify and wait: a queue through which every rank sends to the next one, from inside one kernel.

    ./mpi_launch.sh -n 4 examples/01_notify_wait.py

Each rank's producer blocks write inputs into the 32 slots of a queue in the *next* rank's memory, over
NVLink, and notify it. Its consumer blocks wait for what the previous rank sends, copy it out, and notify back
that the slot is free. All of it happens in one kernel that runs on every rank at once; no host is involved
between two items.

On GPUs: 20 repeats of 2025 inputs of 128 float32. Without one, the same kernel runs on the CPU emulator, on
96 inputs and 2 repeats (--full for all of it). It prints, in this order of ranks or another:

    rank 0 of 4 (emulator): 2 repeats of 96 x 128 float32 from rank 3: passed
    rank 1 of 4 (emulator): 2 repeats of 96 x 128 float32 from rank 0: passed
    rank 2 of 4 (emulator): 2 repeats of 96 x 128 float32 from rank 1: passed
    rank 3 of 4 (emulator): 2 repeats of 96 x 128 float32 from rank 2: passed

``shmemkit.kernels.queue`` has this queue ready to use, for any dtype and for CUDA graphs.
"""

import argparse

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import consume_token, notify, num_ranks, rank, symm_at, wait

SLOTS = 32
BLOCK_SIZE = 128  # threads, and elements of an input
PRODUCERS, CONSUMERS = 16, 4  # blocks


@cuda.jit
def producer_consumer(inputs, outputs, queue, full, empty, first):
    """Input i of this launch is item number first + i of the queue; the numbers go on through all launches,
    so that the signals only grow and nobody has to reset them. `full` counts on the receiver how often a slot
    was filled, `empty` on the sender how often it was emptied: everyone waits on its own memory."""
    me, n_ranks = rank(), num_ranks()
    following, previous = (me + 1) % n_ranks, (me + n_ranks - 1) % n_ranks
    block, thread = cuda.blockIdx.x, cuda.threadIdx.x
    if block < PRODUCERS:
        their_queue = symm_at(queue, following)  # the same array, in the next rank's memory
        for i in range(block, inputs.shape[0], PRODUCERS):
            slot, turn = (first + i) % SLOTS, (first + i) // SLOTS
            if thread == 0:
                wait(empty[slot:], 1, "sys", "acquire", turn)  # the slot has been emptied `turn` times
            cuda.syncthreads()
            their_queue[slot, thread] = inputs[i, thread]
            cuda.syncthreads()  # all threads have written
            if thread == 0:
                notify(full[slot:], following, turn + 1, "set", "sys")
    else:
        for i in range(block - PRODUCERS, outputs.shape[0], CONSUMERS):
            slot, turn = (first + i) % SLOTS, (first + i) // SLOTS
            token = wait(full[slot:], 1, "sys", "acquire", turn + 1)  # here every thread waits for itself
            arrived = consume_token(queue, token)  # says which reads need the wait
            outputs[i, thread] = arrived[slot, thread]
            cuda.syncthreads()  # all threads have read
            if thread == 0:
                notify(empty[slot:], previous, turn + 1, "set", "sys")


def random_inputs(n, repeat, rank):
    """What `rank` sends in `repeat`."""
    return np.random.default_rng([repeat, rank]).standard_normal((n, BLOCK_SIZE), "float32")


def main():
    parser = argparse.ArgumentParser(description="A producer-consumer queue between neighbouring ranks.")
    parser.add_argument("--inputs", type=int, help="inputs per rank and repeat (2025; 96 on the emulator)")
    parser.add_argument("--repeats", type=int, help="launches (20; 2 on the emulator)")
    parser.add_argument("--full", action="store_true", help="the full size on the emulator too")
    options = parser.parse_args()

    with sk.init() as world:
        small = world.backend.name == "emulator" and not options.full
        n_inputs = options.inputs or (96 if small else 2025)
        repeats = options.repeats or (2 if small else 20)
        previous = (world.rank - 1) % world.n_ranks

        queue = sk.empty((SLOTS, BLOCK_SIZE), "float32", name="queue")
        full, empty = sk.signals(SLOTS, "full"), sk.signals(SLOTS, "empty")
        for repeat in range(repeats):
            inputs = world.xp.asarray(random_inputs(n_inputs, repeat, world.rank))
            outputs = world.xp.full_like(inputs, np.nan)
            producer_consumer[PRODUCERS + CONSUMERS, BLOCK_SIZE, world.stream](
                inputs, outputs, queue, full, empty, repeat * n_inputs
            )
            expected = random_inputs(n_inputs, repeat, previous)
            wrong = np.argwhere(world.asnumpy(outputs) != expected)
            if len(wrong):
                # Raised, not sys.exit: it ends the other ranks too, which would wait for this one.
                raise RuntimeError(f"repeat {repeat}: {len(wrong)} wrong elements, first {tuple(wrong[0])}")
        world.print(
            f"rank {world.rank} of {world.n_ranks} ({world.backend.name}): {repeats} repeats of "
            f"{n_inputs} x {BLOCK_SIZE} float32 from rank {previous}: passed"
        )


if __name__ == "__main__":
    main()
