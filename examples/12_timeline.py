"""A timeline: what blocks do, and for what they wait.

    ./mpi_launch.sh -n 2 examples/12_timeline.py

Block 0 of each rank sends chunks to its right neighbour. Block 1 adds up each chunk that has come from the
left. Both mark what they do as phases. The waits and, on the emulator, the signals need no marks. The program
prints that the sums are right, and writes a timeline, which ui.perfetto.dev opens and this draws:

    shmemkit timeline timeline.json

In one process (``shmemkit emu -n 2 examples/12_timeline.py``) the emulator also draws an arrow from each
signal to the wait that it satisfied. There are two slots, so block 0 may be two chunks ahead. With
``--slots 1`` the timeline shows that it waits for each chunk to be added up.
"""

import argparse

from numba import cuda

import shmemkit as sk
from shmemkit.device import begin_phase, end_phase, notify, num_ranks, rank, symm_at, wait_block

CHUNKS, SIZE = 6, 64


@cuda.jit
def send_and_add(x, slots, full, empty, total, chunks):
    left, right = (rank() - 1) % num_ranks(), (rank() + 1) % num_ranks()
    n, i = slots.shape[0], cuda.threadIdx.x
    for c in range(chunks):
        slot, turn = c % n, c // n
        if cuda.blockIdx.x == 0:
            wait_block(empty[slot:], 1, "sys", "acquire", turn)  # as often as the slot was used before
            begin_phase("send")
            symm_at(slots, right)[slot, i] = x[c, i]
            cuda.syncthreads()
            if i == 0:
                notify(full[slot:], right, turn + 1)
            end_phase("send")
        else:
            wait_block(full[slot:], 1, "sys", "acquire", turn + 1)
            begin_phase("add")
            total[i] += slots[slot, i]
            cuda.syncthreads()
            if i == 0:
                notify(empty[slot:], left, turn + 1)
            end_phase("add")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--out", default="timeline.json")
    options = parser.parse_args()
    with sk.init() as world:
        xp = world.xp
        x = xp.arange(CHUNKS * SIZE, dtype="float32").reshape(CHUNKS, SIZE) + world.rank
        total = xp.zeros(SIZE, "float32")
        slots = sk.zeros((options.slots, SIZE), "float32", "slots")
        full, empty = sk.signals(options.slots, "full"), sk.signals(options.slots, "empty")
        with sk.Timeline(world) as timeline:
            step = sk.bind(send_and_add, 2, SIZE, (x, slots, full, empty, total, CHUNKS), co_resident=True)
            step()
        timeline.save(options.out)
        left = (world.rank - 1) % world.n_ranks
        right_sum = bool((total == (x - world.rank + left).sum(0)).all())
        world.print(f"rank {world.rank}: the sums are {'right' if right_sum else 'WRONG'}")
        assert right_sum


if __name__ == "__main__":
    main()
