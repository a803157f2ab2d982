"""Bugs of the TMA's copies, which go on beside the thread that has asked for them."""

import numpy as np
from numba import cuda, types

from shmemkit.device import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    bulk_wait_group,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_proxy_async_global,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    notify,
    rank,
    symm_at,
    wait,
)
from shmemkit.emu import EmulatorError, RaceError

from .plant import TMA, ints, launches, planted, private, signals

N = 4  # float32: 16 bytes


@cuda.jit(device=True)
def load(tile, source, full):
    """Thread 0 asks for all of `source`, as the first phase of full[0]."""
    if cuda.threadIdx.x == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(full, 0, 4 * N)
        bulk_load(tile, source, full, 0)  # first
    cuda.syncthreads()


@planted(RaceError, TMA, "slot", "mbarrier_wait()", "may still read", right=[[-1], [0]], source=[load])
def source_given_back_before_it_is_read(correct):
    """The reader says that its slot may be overwritten, but the load that it has asked for is under way."""

    @cuda.jit
    def kernel(slot, empty, out):
        tile, full = cuda.shared.array(N, types.float32), cuda.shared.array(1, types.uint64)
        if rank() == 1:
            load(tile, slot, full)
            if correct:
                mbarrier_wait(full, 0, 0)
            notify(empty, 0, 1)
            mbarrier_wait(full, 0, 0)
            out[0] = tile[0]
        else:
            wait(empty, 1, "sys", "acquire", 1)
            symm_at(slot, 1)[0] = 7  # second

    return launches(kernel, ints(N, "float32"), signals())


@planted(RaceError, TMA, "slot", "mbarrier_wait()", "may still read", right=[[-1], [0]], source=[load])
def source_given_back_by_a_thread_that_has_not_met_those_who_waited(correct):
    """Thread 1 has waited for the load; thread 0, which asked for it, gives the slot back."""

    @cuda.jit
    def kernel(slot, empty, out):
        tile, full = cuda.shared.array(N, types.float32), cuda.shared.array(1, types.uint64)
        if rank() == 1:
            load(tile, slot, full)
            if cuda.threadIdx.x == 1:
                mbarrier_wait(full, 0, 0)
                out[0] = tile[0]
            if correct:
                cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                notify(empty, 0, 1)
        elif cuda.threadIdx.x == 0:
            wait(empty, 1, "sys", "acquire", 1)
            symm_at(slot, 1)[0] = 7  # second

    return launches(kernel, ints(N, "float32"), signals(), threads=2)


@planted(RaceError, TMA, "x", "mbarrier_wait() between them", right=[[3]], ranks=1, source=[load])
def source_overwritten_by_its_own_thread(correct):
    """Who asks for a load, and then stores to its source."""

    @cuda.jit
    def kernel(x, out):
        tile, full = cuda.shared.array(N, types.float32), cuda.shared.array(1, types.uint64)
        load(tile, x, full)
        if correct:
            mbarrier_wait(full, 0, 0)
        x[0] = 7  # second
        mbarrier_wait(full, 0, 0)
        out[0] = tile[0]

    return launches(kernel, lambda world: np.full(N, 3, "float32"))


@planted(RaceError, TMA, "x", "fence_proxy_async_global() before it", right=[[7]], ranks=1)
def stored_but_not_for_the_copies(correct):
    """A thread's own stores to global memory, too."""

    @cuda.jit
    def kernel(x, out):
        tile, full = cuda.shared.array(N, types.float32), cuda.shared.array(1, types.uint64)
        mbarrier_init(full, 0, 1)
        fence_mbarrier_init()
        x[0] = 7  # first
        if correct:
            fence_proxy_async_global()
        mbarrier_arrive_expect_tx(full, 0, 4 * N)
        bulk_load(tile, x, full, 0)  # second
        mbarrier_wait(full, 0, 0)
        out[0] = tile[0]

    return launches(kernel, lambda world: np.full(N, 3, "float32"))


@planted(RaceError, TMA, "slot", "fence_proxy_async_global()", right=[[-1], [7]])
def acquired_but_not_by_the_copies(correct):
    """The thread has waited for the data; without the fence its copies may read what was there before."""

    @cuda.jit
    def kernel(slot, full, out):
        tile, here = cuda.shared.array(N, types.float32), cuda.shared.array(1, types.uint64)
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            notify(full, 1, 1)
        else:
            mbarrier_init(here, 0, 1)
            fence_mbarrier_init()
            wait(full, 1, "sys", "acquire", 1)
            if correct:
                fence_proxy_async_global()
            mbarrier_arrive_expect_tx(here, 0, 4 * N)
            bulk_load(tile, slot, here, 0)  # second
            mbarrier_wait(here, 0, 0)
            out[0] = tile[0]

    return launches(kernel, ints(N, "float32"), signals())


@planted(
    EmulatorError, TMA, "thread 1 has stored to the tile, without fence_proxy_async", right=[[1]], ranks=1
)
def only_the_thread_that_sends_calls_the_fence(correct):
    """A fence is about the stores of the thread that calls it."""

    @cuda.jit
    def kernel(out):
        tile = cuda.shared.array(N, types.float32)
        i = cuda.threadIdx.x
        tile[i] = i + 1
        if correct or i == 0:
            fence_proxy_async()
        cuda.syncthreads()
        if i == 0:
            bulk_store(out, tile)
            bulk_commit_group()
            bulk_wait_group(0)

    def main(world):
        sums = np.zeros(N, "float32")
        kernel[1, N, world.stream](sums)
        world.stream.synchronize()
        return sums.tolist()[:1]

    return main


@planted(EmulatorError, TMA, "a block has ended before its bulk_load", right=[[0]], ranks=1, source=[load])
def nobody_waits_for_the_last_load(correct):
    """The shared memory that it writes may be another block's by then."""

    @cuda.jit
    def kernel(x, out):
        tile, full = cuda.shared.array(N, types.float32), cuda.shared.array(1, types.uint64)
        load(tile, x, full)
        if correct:
            mbarrier_wait(full, 0, 0)
        if cuda.threadIdx.x == 0:
            out[0] = 0

    return launches(kernel, private(N, "float32"), threads=2)
