"""Bugs among the threads of a block or warp: barriers that are missing, or that not all threads reach."""

from numba import cuda, int32, uint64

from shmemkit.device import (
    copy_block,
    fence_mbarrier_init,
    ld_acquire,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
    notify,
    rank,
    st_release,
    symm_at,
    wait,
    wait_block,
    wait_warp,
)
from shmemkit.emu import DeadlockError, EmulatorError, RaceError

from .plant import (
    COUNTS,
    PROGRESS,
    RACE,
    RELEASE,
    SAME_CALLS,
    THREADS,
    filled,
    ints,
    launches,
    planted,
    private,
    signals,
)

# Block 0 of rank 0 sends rows of 2 * n elements to rank 1: the queue, with one slot.
ROWS = [[-1] * 12, [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]]


SLOT_AND_SIGNALS = ints(4), signals(), signals()


@planted(RaceError, THREADS, "slot", "syncthreads", right=ROWS)
def missing_syncthreads_before_notify(correct):
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

    return launches(kernel, *SLOT_AND_SIGNALS, threads=2, out=12)


@planted(RaceError, THREADS, "slot", "syncthreads", right=ROWS)
def missing_syncthreads_after_wait(correct):
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

    return launches(kernel, *SLOT_AND_SIGNALS, threads=2, out=12)


@planted(RaceError, THREADS, "slot", "syncthreads", right=ROWS)
def missing_syncthreads_before_release(correct):
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

    return launches(kernel, *SLOT_AND_SIGNALS, threads=2, out=12)


@planted(RaceError, THREADS, "slot", "syncthreads", right=[[-1] * 4, [13, 12, 11, 10]])
def missing_syncthreads_after_copy_block(correct):
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

    return launches(kernel, ints(4), signals(), threads=2, out=4)


@planted(RaceError, COUNTS, "slot", right=[[-1, -1], [10, 20]])
def two_threads_of_a_two_dimensional_block_notify(correct):
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

    return launches(kernel, ints(2), signals(), threads=(1, 2), out=2)


@planted(RaceError, THREADS, "part", "syncthreads", right=[[13, 12, 11, 10]], ranks=1)
def missing_syncthreads_between_phases(correct):
    """Each thread stores an element of a shared array and reads another's."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(4, int32)
        thread = cuda.threadIdx.x
        part[thread] = 10 + thread  # first second
        if correct:
            cuda.syncthreads()
        out[thread] = part[3 - thread]  # first second

    return launches(kernel, threads=4, out=4)


@planted(RaceError, THREADS, "part", "syncthreads", right=[[0, 11, 21, 31, 1, 10, 20, 30]], ranks=1)
def missing_syncthreads_before_reuse(correct):
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

    return launches(kernel, threads=2, out=8)


@planted(RaceError, THREADS, "part", "syncthreads", right=[[36] * 8], ranks=1)
def tree_reduction_without_a_barrier_per_level(correct):
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

    return launches(kernel, threads=8, out=8)


@planted(RaceError, THREADS, "part", "syncwarp", right=[[13, 12, 11, 10]], ranks=1)
def missing_syncwarp(correct):
    """Lanes of a warp do not run in step."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(4, int32)
        lane = cuda.threadIdx.x
        part[lane] = 10 + lane  # first second
        if correct:
            cuda.syncwarp()
        out[lane] = part[3 - lane]  # first second

    return launches(kernel, threads=4, out=4)


@planted(RaceError, THREADS, "part", right=[[33 - i for i in range(34)]], ranks=1)
def syncwarp_for_two_warps(correct):
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

    return launches(kernel, threads=34, out=34)


@planted(RaceError, THREADS, "part", "syncwarp", right=[[13, 12, 11, 10]], ranks=1)
def vote_as_a_barrier(correct):
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

    return launches(kernel, threads=4, out=4)


@planted(RaceError, THREADS, "part", right=[[13, 12, 11, 10]], ranks=1)
def syncwarp_of_some_lanes(correct):
    """Only the lanes in the mask meet: here the lower two, and the upper two, among themselves."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(4, int32)
        lane = cuda.threadIdx.x
        part[lane] = 10 + lane  # first second
        cuda.syncwarp(0xF if correct else 0x3 << lane // 2 * 2)
        out[lane] = part[3 - lane]  # first second

    return launches(kernel, threads=4, out=4)


@planted(RaceError, RELEASE, "slots", right=[[-1] * 4, [0, 1, 2, 3]])
def wait_warp_for_a_block(correct):
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

    return launches(kernel, ints(4), signals(4), threads=34, out=4)


@planted(DeadlockError, PROGRESS, "syncthreads", "waits for full[0]", right=[[7, 7]], ranks=1)
def divergent_syncthreads(correct):
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

    return launches(kernel, signals(), threads=2, out=2)


@planted(EmulatorError, SAME_CALLS, "syncthreads()", "different places", right=[[12, 12]], ranks=1)
def syncthreads_in_a_loop_of_unequal_length(correct):
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

    return launches(kernel, threads=2, out=2)


@planted(RaceError, THREADS, "tile", right=[[i ^ 1 for i in range(32)]] * 2)
def shuffle_between_store_and_load(correct):
    """All threads are at the shuffle at once, but it orders no memory: the values travel in registers."""

    @cuda.jit
    def kernel(out):
        tile = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        tile[i] = i  # first
        other = cuda.shfl_xor_sync(0xFFFFFFFF, i, 1)
        out[i] = other if correct else tile[other]  # second

    return launches(kernel, threads=32, out=32)


@planted(RaceError, RACE, "out", right=[[496]] * 2)
def sum_by_shuffles_stored_by_all_lanes(correct):
    """The values travel in registers; one thread stores the result."""

    @cuda.jit
    def kernel(out):
        i = total = cuda.threadIdx.x
        step = 16
        while step > 0:
            total += cuda.shfl_down_sync(0xFFFFFFFF, total, step)
            step //= 2
        if i == 0 or not correct:
            out[0] = total  # first second

    return launches(kernel, threads=32)


@planted(RaceError, THREADS, "tile", right=[[15 - i for i in range(16)]] * 2)
def syncwarp_of_half_a_warp(correct):
    """The lower half meets among itself, and reads what the upper half has stored."""

    @cuda.jit
    def kernel(out):
        tile = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        tile[i] = i  # first
        if i < 16:
            cuda.syncwarp(0x0000FFFF)
            out[i] = tile[(15 if correct else 31) - i]  # second

    return launches(kernel, threads=32, out=16)


@planted(RaceError, THREADS, "tile", right=[[33 + i for i in range(32)]] * 2)
def consuming_warp_reads_before_the_barrier(correct):
    """The producing and the consuming warp reach the block's barrier at different lines, each as a whole."""

    @cuda.jit
    def kernel(out):
        tile = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        if i < 32:
            tile[i] = 33 + i  # first
            cuda.syncthreads()
        else:
            if correct:
                cuda.syncthreads()
            out[i - 32] = tile[i - 32]  # second
            if not correct:
                cuda.syncthreads()

    return launches(kernel, threads=64, out=32)


@planted(RaceError, THREADS, "tile", right=[[10, 11]] * 2)
def no_barrier_as_the_other_warp_has_returned(correct):
    """The second warp returns as a whole, and is not waited for. The threads that are left need the
    barrier."""

    @cuda.jit
    def kernel(out):
        tile = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        if i >= 32:
            return
        tile[i] = 10 + i  # first
        if correct:
            cuda.syncthreads()
        if i < 2:
            out[1 - i] = tile[1 - i]  # second

    return launches(kernel, threads=64, out=2)


@planted(RaceError, THREADS, "slot", right=[[100 * k + i for k in range(2) for i in (1, 0)]] * 2)
def lane_0_acknowledges_while_others_of_its_warp_read(correct):
    """Warp 0 fills a slot, meets and releases; warp 1 acquires, reads, meets and acknowledges."""

    @cuda.jit
    def kernel(slot, full, empty, out):
        i, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
        for k in range(2):
            if i < 32:
                while ld_acquire(empty, 0, "gpu") < k:
                    pass
                if lane < 2:
                    slot[lane] = 100 * k + lane  # first
                cuda.syncwarp()
                if lane == 0:
                    st_release(full, 0, k + 1, "gpu")
            else:
                while ld_acquire(full, 0, "gpu") < k + 1:
                    pass
                if lane < 2:
                    out[2 * k + lane] = slot[1 - lane]  # second
                if correct:
                    cuda.syncwarp()
                if lane == 0:
                    st_release(empty, 0, k + 1, "gpu")

    return launches(kernel, private(2), private(), private(), threads=64, out=4)


@planted(RaceError, THREADS, "x", right=[[7]] * 2)
def store_after_the_arrival_at_an_mbarrier(correct):
    """The arrival releases what is before it, the wait for the phase acquires it."""

    @cuda.jit
    def kernel(x, out):
        full = cuda.shared.array(1, uint64)
        i = cuda.threadIdx.x
        if i == 0:
            mbarrier_init(full, 0, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if i == 0:
            if correct:
                x[0] = 7
            mbarrier_arrive(full, 0)
            if not correct:
                x[0] = 7  # first
        if i == 32:
            mbarrier_wait(full, 0, 0)
            out[0] = x[0]  # second

    return launches(kernel, private(), threads=64)


@planted(RaceError, THREADS, "inbox", "syncthreads", right=[[4] * 32] * 2)
def copy_block_is_published_without_syncthreads(correct):
    """Thread 0 notifies when its own share of the copy is stored."""

    @cuda.jit
    def kernel(inbox, mine, ready, out):
        i = cuda.threadIdx.x
        copy_block(symm_at(inbox, 1 - rank()), mine)  # first
        if correct:
            cuda.syncthreads()
        if i == 0:
            notify(ready, 1 - rank(), 1)
        wait_block(ready, 1, "sys", "acquire", 1)
        out[i] = inbox[i]  # second

    return launches(kernel, ints(32), filled(4, 32), signals(), threads=32, out=32)


@planted(RaceError, RELEASE, "box", right=[[5, 6, 7, 8]] * 2)
def thread_0_notifies_for_threads_that_it_has_not_met(correct):
    """The stores of the other threads are not before thread 0's release."""

    @cuda.jit
    def kernel(box, ready, out):
        i = cuda.threadIdx.x
        symm_at(box, 1 - rank())[i] = 5 + i  # first
        if correct:
            cuda.syncthreads()
        if i == 0:
            notify(ready, 1 - rank(), 1)
        wait_block(ready, 1, "sys", "acquire", 1)
        out[i] = box[i]  # second

    return launches(kernel, ints(4), signals(), threads=4, out=4)


@planted(RaceError, RELEASE, "box", right=[[5, 5]] * 2)
def thread_0_waits_and_thread_1_does_not_meet_it(correct):
    """Thread 1 has neither waited nor met thread 0."""

    @cuda.jit
    def kernel(box, ready, out):
        i = cuda.threadIdx.x
        if i == 0:
            symm_at(box, 1 - rank())[0] = 5  # first
            notify(ready, 1 - rank(), 1)
            wait(ready, 1, "sys", "acquire", 1)
        if correct:
            cuda.syncthreads()
        out[i] = box[0]  # second

    return launches(kernel, ints(), signals(), threads=2, out=2)


@planted(RaceError, RELEASE, "box", right=[[5]] * 2)
def wait_warp_of_the_first_warp_only(correct):
    """The second warp has not waited, and has not met the first one."""

    @cuda.jit
    def kernel(box, ready, out):
        i = cuda.threadIdx.x
        if i == 0:
            symm_at(box, 1 - rank())[0] = 5  # first
            notify(ready, 1 - rank(), 1)
        if i < 32 or correct:
            wait_warp(ready, 1, "sys", "acquire", 1)
        if i == 32:
            out[0] = box[0]  # second

    return launches(kernel, ints(), signals(), threads=64)
