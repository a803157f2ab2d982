"""The schedule is the same every time."""

from emulated import spmd
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    barrier_all,
    ld_acquire,
    notify,
    num_ranks,
    rank,
)


def test_the_schedule_is_the_same_every_time():
    order = []

    @cuda.jit
    def kernel(lock, x):
        order.append((rank(), cuda.blockIdx.x, cuda.threadIdx.x))
        cuda.syncthreads()
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        order.append((rank(), cuda.blockIdx.x, cuda.threadIdx.x))
        cuda.nanosleep(1)
        cuda.atomic.exch(lock, 0, 0)
        barrier_all() if cuda.grid(1) == 0 else None
        order.append(ld_acquire(x, rank()))
        notify(x[rank() :], (rank() + 1) % num_ranks(), 1, "add")

    def once():
        order.clear()
        spmd(3, lambda world: kernel[3, 5](sk.zeros(1, "int32"), sk.signals(4)))
        return list(order)

    first = once()
    assert len(first) == 3 * 3 * 3 * 5 and once() == first and once() == first
