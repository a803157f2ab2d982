"""A pipeline between two ranks that hangs: docs/debugging.md finds out why.

Rank 0 pushes numbers through two slots of rank 1. Slot s is filled for the r-th time when full[s] is r, and
has been emptied for the r-th time when empty[s], on rank 0, is r.

    python -m shmemkit.emu -n 2 examples/broken/hang.py
"""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import notify, rank, symm_at, wait


@cuda.jit
def pipeline(slots, full, empty, out):
    for i in range(out.shape[0]):
        slot, turn = i % 2, i // 2
        if rank() == 0:
            wait(empty[slot:], 1, "sys", "acquire", turn)
            symm_at(slots, 1)[slot] = i * i
            notify(full[slot:], 1, turn + 1)
        else:
            wait(full[slot:], 1, "sys", "acquire", turn + 1)
            out[i] = slots[slot]
            notify(empty[turn:], 0, turn + 1)


with sk.init() as world:
    out = world.xp.zeros(6, "int64")
    full, empty = sk.signals(2, name="full"), sk.signals(2, name="empty")
    pipeline[1, 1, world.stream](sk.zeros(2, "int64"), full, empty, out)
    if world.rank == 1:
        assert (world.asnumpy(out) == np.arange(6) ** 2).all()
        print("all numbers have arrived")
