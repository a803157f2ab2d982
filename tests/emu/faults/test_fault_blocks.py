"""Bugs among the threads of a block or warp: barriers that are missing, or that not all threads reach."""

from fault import DeadlockError, EmulatorError, RaceError, fault, result
from numba import cuda, int32

import shmemkit as sk
from shmemkit.device import copy_block, notify, rank, symm_at, wait, wait_block, wait_warp

# Block 0 of rank 0 sends rows of 2 * n elements to rank 1: the queue, with one slot.
ROWS = [[-1] * 12, [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]]


def slot_and_signals():
    return sk.zeros(4, "int32"), sk.signals(1), sk.signals(1)


@fault(RaceError, "slot", "syncthreads", right=ROWS)
def test_missing_syncthreads_before_notify(correct):
    """Thread 0 notifies for the whole block before the others have stored."""

    @cuda.jit
    def kernel(slot, full, empty, out):
        thread = cuda.threadIdx.x
        for i in range(3):
            if rank() == 0:
                wait(empty, 1, "sys", "acquire", i)
                for k in range(thread, 4, 2):
                    symm_at(slot, 1)[k] = 10 * (i + 1) + k  # first
                if correct:
                    cuda.syncthreads()
                if thread == 0:
                    notify(full, 1, i + 1)
            else:
                wait(full, 1, "sys", "acquire", i + 1)
                for k in range(thread, 4, 2):
                    out[4 * i + 3 - k] = slot[3 - k]  # second
                cuda.syncthreads()
                if thread == 0:
                    notify(empty, 0, i + 1)

    return lambda world: result(world, kernel[1, 2], *slot_and_signals(), out=12)


@fault(RaceError, "slot", "syncthreads", right=ROWS)
def test_missing_syncthreads_after_wait(correct):
    """Thread 0 waits for the whole block, and the others do not wait for it."""

    @cuda.jit
    def kernel(slot, full, empty, out):
        thread = cuda.threadIdx.x
        for i in range(3):
            if rank() == 0:
                wait(empty, 1, "sys", "acquire", i)
                for k in range(thread, 4, 2):
                    symm_at(slot, 1)[k] = 10 * (i + 1) + k  # first second
                cuda.syncthreads()
                if thread == 0:
                    notify(full, 1, i + 1)
            else:
                if thread == 0:
                    wait(full, 1, "sys", "acquire", i + 1)
                if correct:
                    cuda.syncthreads()
                for k in range(thread, 4, 2):
                    out[4 * i + k] = slot[k]  # first second
                cuda.syncthreads()
                if thread == 0:
                    notify(empty, 0, i + 1)

    return lambda world: result(world, kernel[1, 2], *slot_and_signals(), out=12)


@fault(RaceError, "slot", "syncthreads", right=ROWS)
def test_missing_syncthreads_before_release(correct):
    """Thread 0 says that the slot is empty while others still read it."""

    @cuda.jit
    def kernel(slot, full, empty, out):
        thread = cuda.threadIdx.x
        for i in range(3):
            if rank() == 0:
                wait(empty, 1, "sys", "acquire", i)
                for k in range(thread, 4, 2):
                    symm_at(slot, 1)[k] = 10 * (i + 1) + k  # second
                cuda.syncthreads()
                if thread == 0:
                    notify(full, 1, i + 1)
            else:
                wait(full, 1, "sys", "acquire", i + 1)
                for k in range(thread, 4, 2):
                    out[4 * i + 3 - k] = slot[3 - k]  # first
                if correct:
                    cuda.syncthreads()
                if thread == 0:
                    notify(empty, 0, i + 1)

    return lambda world: result(world, kernel[1, 2], *slot_and_signals(), out=12)


@fault(RaceError, "slot", "syncthreads", right=[[-1] * 4, [13, 12, 11, 10]])
def test_missing_syncthreads_after_copy_block(correct):
    """copy_block has no barrier inside: each thread's share is there, not that of the others."""

    @cuda.jit
    def kernel(row, full, out):
        slot = cuda.shared.array(4, int32)
        if rank() == 0:
            if cuda.threadIdx.x == 0:
                for k in range(4):
                    symm_at(row, 1)[k] = 10 + k
                notify(full, 1, 1)
        else:
            wait(full, 1, "sys", "acquire", 1)
            copy_block(slot, row)  # first second
            if correct:
                cuda.syncthreads()
            for k in range(cuda.threadIdx.x, 4, 2):
                out[k] = slot[3 - k]  # first second

    return lambda world: result(world, kernel[1, 2], sk.zeros(4, "int32"), sk.signals(1), out=4)


@fault(RaceError, "slot", right=[[-1, -1], [10, 20]])
def test_two_threads_of_a_two_dimensional_block_notify(correct):
    """threadIdx.x == 0 holds for one thread of every row: each item is announced twice."""

    @cuda.jit
    def kernel(slot, full, out):
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        for i in range(2):
            if rank() == 0:
                cuda.syncthreads()
                if x == 0 and y == 0:
                    symm_at(slot, 1)[i] = 10 * (i + 1)  # first second
                cuda.syncthreads()
                if x == 0 and (y == 0 or not correct):
                    notify(full, 1, 1, "add")
            elif x == 0 and y == 0:
                wait(full, 1, "sys", "acquire", i + 1)
                out[i] = slot[i]  # first second

    return lambda world: result(world, kernel[1, (1, 2)], sk.zeros(2, "int32"), sk.signals(1), out=2)


@fault(RaceError, "part", "syncthreads", right=[[13, 12, 11, 10]], pes=1)
def test_missing_syncthreads_between_phases(correct):
    """Each thread stores an element of a shared array and reads another's."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(4, int32)
        thread = cuda.threadIdx.x
        part[thread] = 10 + thread  # first second
        if correct:
            cuda.syncthreads()
        out[thread] = part[3 - thread]  # first second

    return lambda world: result(world, kernel[1, 4], out=4)


@fault(RaceError, "part", "syncthreads", right=[[0, 11, 21, 31, 1, 10, 20, 30]], pes=1)
def test_missing_syncthreads_before_reuse(correct):
    """A shared array is filled again in the next turn of a loop while others still read it."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(2, int32)
        thread = cuda.threadIdx.x
        out[4 * thread] = thread
        for i in range(1, 4):
            part[thread] = 10 * i + thread  # first second
            cuda.syncthreads()
            out[4 * thread + i] = part[1 - thread]  # first second
            if correct:
                cuda.syncthreads()

    return lambda world: result(world, kernel[1, 2], out=8)


@fault(RaceError, "part", "syncthreads", right=[[36] * 8], pes=1)
def test_tree_reduction_without_a_barrier_per_level(correct):
    """Sums of a block by halves: the barrier stands behind the loop, not in it."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(8, int32)
        thread, half = cuda.threadIdx.x, 4
        part[thread] = thread + 1
        cuda.syncthreads()
        while half:
            if thread < half:
                part[thread] += part[thread + half]  # first second
            if correct:
                cuda.syncthreads()
            half //= 2
        cuda.syncthreads()
        out[thread] = part[0]

    return lambda world: result(world, kernel[1, 8], out=8)


@fault(RaceError, "part", "syncwarp", right=[[13, 12, 11, 10]], pes=1)
def test_missing_syncwarp(correct):
    """Lanes of a warp do not run in step."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(4, int32)
        lane = cuda.threadIdx.x
        part[lane] = 10 + lane  # first second
        if correct:
            cuda.syncwarp()
        out[lane] = part[3 - lane]  # first second

    return lambda world: result(world, kernel[1, 4], out=4)


@fault(RaceError, "part", right=[[33 - i for i in range(34)]], pes=1)
def test_syncwarp_for_two_warps(correct):
    """syncwarp orders the lanes of one warp; the block has two."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(34, int32)
        thread = cuda.threadIdx.x
        part[thread] = thread  # first second
        if correct:
            cuda.syncthreads()
        else:
            cuda.syncwarp()
        out[thread] = part[33 - thread]  # first second

    return lambda world: result(world, kernel[1, 34], out=34)


@fault(RaceError, "part", "syncwarp", right=[[13, 12, 11, 10]], pes=1)
def test_vote_as_a_barrier(correct):
    """Votes and shuffles exchange values of registers; they order no memory."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(4, int32)
        lane = cuda.threadIdx.x
        part[lane] = 10 + lane  # first second
        if correct:
            cuda.syncwarp()
        else:
            cuda.all_sync(0xF, True)
        out[lane] = part[3 - lane]  # first second

    return lambda world: result(world, kernel[1, 4], out=4)


@fault(RaceError, "part", right=[[13, 12, 11, 10]], pes=1)
def test_syncwarp_of_some_lanes(correct):
    """Only the lanes in the mask meet: here the lower two, and the upper two, among themselves."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(4, int32)
        lane = cuda.threadIdx.x
        part[lane] = 10 + lane  # first second
        cuda.syncwarp(0xF if correct else 0x3 << lane // 2 * 2)
        out[lane] = part[3 - lane]  # first second

    return lambda world: result(world, kernel[1, 4], out=4)


@fault(RaceError, "slots", right=[[-1] * 4, [0, 1, 2, 3]])
def test_wait_warp_for_a_block(correct):
    """wait_warp makes each warp wait for all signals; here each waits for its own part of them."""

    @cuda.jit
    def kernel(slots, full, out):
        thread = cuda.threadIdx.x
        if rank() == 0:
            if thread < 4:
                symm_at(slots, 1)[thread] = thread  # first second
                notify(full[thread:], 1, 1)
        else:
            warp = thread // 32
            if correct:
                wait_block(full, 4, "sys", "acquire", 1)
            else:
                wait_warp(full[2 * warp :], 2, "sys", "acquire", 1)
            if thread < 4:
                out[thread] = slots[thread]  # first second

    return lambda world: result(world, kernel[1, 34], sk.zeros(4, "int32"), sk.signals(4), out=4)


@fault(DeadlockError, "syncthreads", "waits for full[0]", right=[[7, 7]], pes=1)
def test_divergent_syncthreads(correct):
    """Thread 0 meets the others in a barrier that they only reach after what it does behind it."""

    @cuda.jit
    def kernel(full, out):
        thread = cuda.threadIdx.x
        if thread == 0:
            if not correct:
                cuda.syncthreads()
            notify(full, rank(), 7)
        else:
            wait(full, 1, "gpu", "acquire", 7)
        cuda.syncthreads()
        out[thread] = full[0]

    return lambda world: result(world, kernel[1, 2], sk.signals(1), out=2)


@fault(EmulatorError, "syncthreads()", "different places", right=[[12, 12]], pes=1)
def test_syncthreads_in_a_loop_of_unequal_length(correct):
    """Three elements for two threads: thread 1's barrier behind the loop is thread 0's second one in it."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(3, int32)
        thread = cuda.threadIdx.x
        for i in range(thread, 3, 2):
            if not correct:
                cuda.syncthreads()
            part[i] = 10 + i
        cuda.syncthreads()
        out[thread] = part[2]

    return lambda world: result(world, kernel[1, 2], out=2)
