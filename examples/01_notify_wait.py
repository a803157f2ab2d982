"""Notify and wait: a queue from each rank to the next one, inside one kernel.

    ./mpi_launch.sh -n 4 examples/01_notify_wait.py

The queue has 32 slots in the memory of the *next* rank. Producer blocks store inputs into these slots, over
NVLink, and notify the next rank. Consumer blocks wait for the inputs of the previous rank, copy them out, and
notify the previous rank that the slot is empty. One kernel does all of this, on every rank at once. The host
does nothing between two items.

On GPUs it sends 2025 inputs of 128 float32, 20 times. On the emulator it sends 96 inputs, 2 times (--full for
the full size), and prints

    rank 0 of 4 (emulator): 2 repeats of 96 x 128 float32 from rank 3: passed
    rank 1 of 4 (emulator): 2 repeats of 96 x 128 float32 from rank 0: passed
    rank 2 of 4 (emulator): 2 repeats of 96 x 128 float32 from rank 1: passed
    rank 3 of 4 (emulator): 2 repeats of 96 x 128 float32 from rank 2: passed

``sk.Queue`` is this queue, ready to use, for any dtype and in CUDA graphs.
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
    """Send `inputs` to the next rank, and receive those of the previous rank into `outputs`.

    full[s]    on the receiver: how often slot s has been filled
    empty[s]   on the sender: how often slot s has been emptied
    first      the number of this launch's first item; the numbers continue from launch to launch

    Item number i uses slot i % SLOTS, for the (i // SLOTS)-th time: its `turn`. The signals only grow, so
    nothing resets them. Each rank waits on signals in its own memory.
    """
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
            token = wait(full[slot:], 1, "sys", "acquire", turn + 1)  # here each thread waits
            arrived = consume_token(queue, token)  # marks the reads that need the wait
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
                # An exception ends all ranks; after sys.exit the others might wait for this one.
                raise RuntimeError(f"repeat {repeat}: {len(wrong)} wrong elements, first {tuple(wrong[0])}")
        world.print(
            f"rank {world.rank} of {world.n_ranks} ({world.backend.name}): {repeats} repeats of "
            f"{n_inputs} x {BLOCK_SIZE} float32 from rank {previous}: passed"
        )


if __name__ == "__main__":
    main()
