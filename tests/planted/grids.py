"""Bugs among the blocks of a grid: last blocks, barriers of a grid, locks, blocks that are not there."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    atomic_add,
    atomic_compare_swap,
    atomic_set,
    grid_barrier,
    ld_acquire,
    notify,
    num_ranks,
    rank,
    st_release,
    symm_at,
    threadfence,
    wait,
)
from shmemkit.emu import DeadlockError, RaceError

from .plant import (
    ATOMICS,
    BARRIERS,
    COUNTS,
    PROGRESS,
    RELEASE,
    THREADS,
    WRONG,
    ints,
    launches,
    planted,
    private,
    result,
    signals,
)


def last_block(fence="after", scope="gpu", barrier=True, reset=True):
    """Blocks store their part; the last one to end adds them up. `fence`: by thread 0 "after" the barrier, or
    "before" it, or by "all" threads before it, or None."""

    @cuda.jit
    def kernel(parts, done, out):
        thread, block = cuda.threadIdx.x, cuda.blockIdx.x
        parts[2 * block + 1 - thread] += 2 * block + 1 - thread  # first second
        if fence == "all" or (fence == "before" and thread == 0):
            threadfence("gpu")
        if barrier:
            cuda.syncthreads()
        if thread == 0:
            if fence == "after":
                threadfence(scope)
            if cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:
                threadfence("gpu")
                total = 0
                for i in range(parts.shape[0]):
                    total += parts[i]  # first second
                out[0] = total
                if reset:
                    done[0] = 0

    return kernel


@planted(RaceError, RELEASE, "parts", "release", right=[[15]], ranks=1, source=[last_block])
def last_block_without_threadfence(correct):
    """The atomic counter orders nothing by itself: a fence before it publishes the block's part."""
    kernel = last_block(fence="after" if correct else None)
    return launches(kernel, private(6), private(), blocks=3, threads=2)


@planted(RaceError, THREADS, "parts", right=[[15]], ranks=1, source=[last_block])
def last_block_without_syncthreads(correct):
    """Thread 0 counts its block as done while other threads still store."""
    kernel = last_block(barrier=correct)
    return launches(kernel, private(6), private(), blocks=3, threads=2)


@planted(RaceError, RELEASE, "parts", right=[[15]], ranks=1, source=[last_block])
def last_block_where_only_thread_0_fences_its_own(correct):
    """A fence before the barrier is for the thread's own stores: then each thread needs one."""
    kernel = last_block(fence="all" if correct else "before")
    return launches(kernel, private(6), private(), blocks=3, threads=2)


@planted(WRONG, COUNTS, right=[[30]], ranks=1)
def counter_of_blocks_not_reset(correct):
    """The second launch begins to count where the first one ended, and has no last block."""
    kernel = last_block(reset=correct)

    def main(world):
        parts, done = np.zeros(6, "int32"), np.zeros(1, "int32")
        result(world, kernel[3, 2], parts, done)
        return result(world, kernel[3, 2], parts, done)

    return main


@planted(RaceError, RELEASE, "parts", "scope", right=[[15]], ranks=1, source=[last_block])
def last_block_with_a_fence_of_the_block(correct):
    """A fence of scope "block" publishes to the threads of the block only."""
    kernel = last_block(scope="gpu" if correct else "block")
    return launches(kernel, private(6), private(), blocks=3, threads=2)


@planted(RaceError, THREADS, "parts", "grid_barrier", right=[[2, 1, 0]], ranks=1)
def missing_grid_barrier(correct):
    """Each block reads another one's part in the second phase."""

    @cuda.jit
    def kernel(parts, state, out):
        block = cuda.blockIdx.x
        parts[block] = block  # first second
        if correct:
            grid_barrier(state)
        out[block] = parts[cuda.gridDim.x - 1 - block]  # first second

    return launches(kernel, private(3), private(2, "uint32"), blocks=3, out=3)


@planted(RaceError, THREADS, "parts", right=[[3, 3, 3]], ranks=1)
def syncthreads_for_a_grid(correct):
    """syncthreads meets the threads of one block."""

    @cuda.jit
    def kernel(parts, state, out):
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        if thread == 0:
            parts[block] = block  # first second
        if correct:
            grid_barrier(state)
        else:
            cuda.syncthreads()
        if thread == 1:
            out[block] = parts[0] + parts[1] + parts[2]  # first second

    return launches(kernel, private(3), private(2, "uint32"), blocks=3, threads=2, out=3)


@planted(DeadlockError, PROGRESS, "grid", right=[[-1, 1, 2]], ranks=1)
def grid_barrier_that_a_block_leaves_out(correct):
    """A block without work waits for something else than the grid."""

    @cuda.jit
    def kernel(state, flag, out):
        block = cuda.blockIdx.x
        if block > 0 or correct:
            grid_barrier(state)
        if block == 0:
            wait(flag, 1, "gpu", "acquire", 2)
        else:
            out[block] = block
            notify(flag, rank(), 1, "add", "gpu")

    return launches(kernel, private(2, "uint32"), signals(), blocks=3, out=3)


@planted(RaceError, BARRIERS, "inbox", right=[[11], [10]])
def grid_barrier_for_peers(correct):
    """A barrier of the grid on each rank says nothing about the other rank."""

    @cuda.jit
    def kernel(inbox, state, arrived, out):
        block = cuda.blockIdx.x
        if block == 0:
            symm_at(inbox, 1 - rank())[0] = 10 + rank()  # first second
        grid_barrier(state)
        if block == 1:
            if correct:
                notify(arrived, 1 - rank(), 1)
                wait(arrived, 1, "sys", "acquire", 1)
            out[0] = inbox[0]  # first second

    return launches(kernel, ints(), private(2, "uint32"), signals(), blocks=2)


@planted(DeadlockError, PROGRESS, "waits for flag[0] on rank 0", right=[[5]], ranks=1)
def waits_for_a_kernel_later_on_the_stream(correct):
    """The consumer is launched first, on the producer's stream: the producer can never start."""

    @cuda.jit
    def consume(flag, out):
        wait(flag, 1, "gpu", "acquire", 1)
        out[0] = 5

    @cuda.jit
    def produce(flag):
        notify(flag, rank(), 1, "set", "gpu")

    def main(world):
        flag, out = sk.signals(1), np.zeros(1, "int32")
        other = cuda.stream() if correct else world.stream
        consume[1, 1, world.stream](flag, out)
        produce[1, 1, other](flag)
        world.stream.synchronize()
        other.synchronize()
        return out.tolist()

    return main


@planted(RaceError, ATOMICS, "counter", "scope", right=[[2], [-1]])
def cuda_atomic_on_a_peers_memory(correct):
    """cuda.atomic is atomic among the threads of one GPU."""

    @cuda.jit
    def kernel(counter, out):
        if correct:
            atomic_add(counter, 1, 0)
        else:
            cuda.atomic.add(symm_at(counter, 0), 0, 1)  # first second
        if rank() == 0:
            while ld_acquire(counter, 0) != 2:  # second
                pass
            out[0] = 2

    return launches(kernel, ints())


@planted(RaceError, RELEASE, "total", right=[[3], [-1]])
def lock_of_all_ranks_without_fences(correct):
    """Remote atomics take and open a lock, and order nothing that is done under it."""

    @cuda.jit
    def kernel(total, lock, done, out):
        while atomic_compare_swap(lock, 0, 1, 0) != 0:
            pass
        if correct:
            threadfence("sys")
        symm_at(total, 0)[0] += 1  # first second
        if correct:
            threadfence("sys")
        atomic_set(lock, 0, 0)
        notify(done, 0, 1, "add")
        if rank() == 0:
            wait(done, 1, "sys", "acquire", num_ranks())
            out[0] = 3 if total[0] == num_ranks() else 0

    return launches(kernel, ints(), ints(), signals())


def locked(release="fence", acquire=True, leave=False):
    """Blocks add to a total under a lock. `release`: "fence", "exchange" alone, or an ordinary "store"."""

    @cuda.jit
    def kernel(total, lock, out):
        if cuda.threadIdx.x == 0:
            while cuda.atomic.cas(lock, 0, 0, 1) != 0:  # first second
                pass
            if acquire:
                threadfence("gpu")
            total[0] += 1  # first second
            if total[0] == 2 and leave:
                return
            if release == "fence":
                threadfence("gpu")
            if release == "store":
                lock[0] = 0  # first second
            else:
                cuda.atomic.exch(lock, 0, 0)  # first second

    return kernel


def locked_total(kernel):
    def main(world):
        total, lock = np.zeros(1, "int32"), np.zeros(1, "int32")
        result(world, kernel[3, 2], total, lock)
        return total.tolist()

    return main


@planted(RaceError, RELEASE, "total", "release", right=[[3]], ranks=1, source=[locked])
def lock_released_without_threadfence(correct):
    """The atomic that opens the lock may be seen before what was stored under it."""
    return locked_total(locked("fence" if correct else "exchange"))


@planted(RaceError, RELEASE, "total", "threadfence", right=[[3]], ranks=1, source=[locked])
def lock_taken_without_threadfence(correct):
    """The loads under the lock may come before the atomic that takes it."""
    return locked_total(locked(acquire=correct))


@planted(RaceError, RELEASE, "total", right=[[3]], ranks=1, source=[locked])
def lock_without_fences(correct):
    """The lock excludes, but what its holder has stored is not ordered before the next holder's accesses."""
    return locked_total(locked("fence" if correct else "exchange", acquire=correct))


@planted(DeadlockError, PROGRESS, "waits for lock[0] on rank 0", right=[[3]], ranks=1)
def lock_without_release(correct):
    """A way out of the critical section leaves the lock closed."""
    return locked_total(locked(leave=not correct))


@planted(RaceError, ATOMICS, "lock total", right=[[3]], ranks=1, source=[locked])
def lock_released_by_an_ordinary_store(correct):
    """The lock is opened by an ordinary store, which publishes nothing."""
    return locked_total(locked("fence" if correct else "store"))


@planted(DeadlockError, PROGRESS, "waits for", right=[[0, 1, 2]], ranks=1)
def home_made_grid_barrier_is_reused_at_once(correct):
    """Blocks wait for the counter to be 0 again, which the first ones to go on have raised by then."""

    @cuda.jit
    def kernel(state, out):
        for _ in range(3):
            before = ld_acquire(state, 1, "gpu")
            if cuda.atomic.add(state, 0, 1) == cuda.gridDim.x - 1:
                st_release(state, 0, 0, "gpu")
                st_release(state, 1, before + 1, "gpu")
            elif correct:
                while ld_acquire(state, 1, "gpu") == before:
                    pass
            else:
                while ld_acquire(state, 0, "gpu") != 0:
                    pass
        out[cuda.blockIdx.x] = cuda.blockIdx.x

    return launches(kernel, private(2), blocks=3, out=3)


@planted(RaceError, THREADS, "x", right=[[4, 4, 4]] * 2)
def stencil_in_place_with_one_grid_barrier_a_step(correct):
    """A block's store has no order with its neighbour's load of the step. Two arrays in turn need one barrier
    a step."""

    @cuda.jit
    def kernel(x, state, out):
        b = cuda.blockIdx.x
        for k in range(2):
            source, target = (k, 1 - k) if correct else (0, 0)
            x[target, b] = x[source, b] + x[source, (b + 1) % 3]  # first second
            grid_barrier(state)
        out[b] = x[0, b]

    return launches(kernel, lambda world: np.ones((2, 3), "int32"), private(2, "uint32"), blocks=3, out=3)


@planted(RaceError, THREADS, "box", right=[[6, 7]] * 2)
def notify_for_a_grid_without_a_grid_barrier(correct):
    """Every block stores to the peer, all meet, block 0 releases; the peer's block 0 acquires, and all
    meet."""

    @cuda.jit
    def kernel(box, ready, state, out):
        b = cuda.blockIdx.x
        symm_at(box, 1 - rank())[b] = 6 + b  # first
        if correct:
            grid_barrier(state)
        if b == 0:
            notify(ready, 1 - rank(), 1)
            wait(ready, 1, "sys", "acquire", 1)
        grid_barrier(state)
        out[b] = box[b]  # second

    return launches(kernel, ints(2), signals(), private(2, "uint32"), blocks=2, out=2)
