"""Hello: every rank sends its number to the rank on its right, from inside a kernel.

    ./mpi_launch.sh -n 4 examples/00_hello.py

Each rank stores into its right neighbour's memory and then notifies it. `notify` is a release and `wait` an
acquire: the rank that sees the flag also sees the store. On GPUs and on the emulator alike it prints

    rank 0 got 3
    rank 1 got 0
    rank 2 got 1
    rank 3 got 2
"""

from numba import cuda

import shmemkit as sk
from shmemkit.device import notify, num_ranks, rank, symm_at, wait


@cuda.jit
def pass_right(inbox, flag, out):
    right = (rank() + 1) % num_ranks()
    symm_at(inbox, right)[0] = rank()  # a store into the right neighbour's memory
    notify(flag, right, 1)  # release: whoever sees the flag sees the store
    wait(flag, 1, "sys", "acquire")  # until one signal, flag[0], is 1
    out[0] = inbox[0]


with sk.init() as world:
    inbox, flag = sk.zeros(1, "int64", "inbox"), sk.signals(1, "flag")  # symmetric: on every rank
    out = world.xp.zeros(1, "int64")
    pass_right[1, 1, world.stream](inbox, flag, out)
    world.print(f"rank {world.rank} got {world.asnumpy(out)[0]}")
