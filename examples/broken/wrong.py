"""An all-gather that is right on most machines, most of the time: docs/debugging.md finds out why.

Every rank puts its part into the gathered array of all ranks, and counts itself in their counter.

    python -m shmemkit.emu -n 4 --races examples/broken/wrong.py
"""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import ComparisonType, SignalOp, num_ranks, put_nbi, rank, signal_op, signal_wait_until


@cuda.jit
def all_gather(gathered, part, arrived, out):
    me, n = rank(), part.shape[0]
    for peer in range(num_ranks()):
        put_nbi(gathered[me * n : (me + 1) * n], part, peer)
        signal_op(arrived, 1, SignalOp.SIGNAL_ADD, peer)
    signal_wait_until(arrived, ComparisonType.CMP_GE, num_ranks())
    for i in range(gathered.shape[0]):
        out[i] = gathered[i]


with sk.init() as world:
    n = 3 * world.n_ranks
    gathered, arrived, out = sk.zeros(n, "int64"), sk.signals(1), world.xp.zeros(n, "int64")
    part = sk.array(np.arange(3) + 3 * world.rank)
    all_gather[1, 1, world.stream](gathered, part, arrived, out)
    assert (world.asnumpy(out) == np.arange(n)).all(), f"rank {world.rank} has {out}"
    if world.rank == 0:
        print("all parts have arrived")
