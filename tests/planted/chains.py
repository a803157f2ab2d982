"""Programs that synchronise in less usual ways."""

import numpy as np
from numba import cuda, int32

import shmemkit as sk
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    barrier_all,
    copy_warp,
    fence,
    get,
    grid_barrier,
    ld_acquire,
    notify,
    num_ranks,
    put,
    put_nbi,
    put_signal,
    put_signal_block,
    quiet,
    rank,
    red_release,
    signal_op,
    signal_wait_until,
    st_release,
    symm_at,
    sync_all,
    threadfence,
    wait,
    wait_block,
)
from shmemkit.emu import RaceError, UseAfterFreeError

from .plant import (
    BARRIERS,
    COUNTS,
    CREDITS,
    FREED,
    PUTS,
    RELEASE,
    STREAMS,
    THREADS,
    filled,
    ints,
    launches,
    planted,
    private,
    result,
    signals,
)


@planted(RaceError, RELEASE, "slot", right=[[-1], [-1], [7]], ranks=3)
def a_chain_of_ranks(correct):
    """Rank 2 reads what rank 0 has stored: it has heard so from rank 1 alone."""

    @cuda.jit
    def kernel(slot, flag, out):
        if rank() == 0:
            symm_at(slot, 2)[0] = 7  # first
            notify(flag, 1, 1)
        else:
            if rank() == 1 or correct:
                wait(flag, 1, "sys", "acquire", 1)
            if rank() == 1:
                notify(flag, 2, 1)
            else:
                out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, THREADS, "slot", right=[[-1, -1], [7, 7]])
def a_chain_of_scopes(correct):
    """Block to block at scope "gpu", rank to rank at scope "sys", thread to thread by a barrier."""

    @cuda.jit
    def kernel(slot, local, remote, out):
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        if rank() == 0:
            if block == 0 and thread == 1:
                symm_at(slot, 1)[0] = 7  # first
            cuda.syncthreads()
            if thread == 0:
                if block == 0:
                    notify(local, 0, 1, "add", "gpu")
                else:
                    wait(local, 1, "gpu", "acquire", 1)
                    notify(remote, 1, 1)
        else:
            if block == 1 and thread == 1:
                wait(remote, 1, "sys", "acquire", 1)
                st_release(local, 0, 1, "gpu")
            if block == 0 and thread == 0:
                wait(local, 1, "gpu", "acquire", 1)
            if correct:
                cuda.syncthreads()
            if block == 0:
                out[thread] = slot[0]  # second

    return launches(kernel, ints(), signals(), signals(), blocks=2, threads=2, out=2)


@planted(RaceError, COUNTS, "slots", right=[[6], [-1], [-1]], ranks=3)
def a_counter_of_several_ranks(correct):
    """Who acquires a sum sees what preceded each of its additions."""

    @cuda.jit
    def kernel(slots, count, out):
        me = rank()
        symm_at(slots, 0)[me] = me + 1  # first
        red_release(symm_at(count, 0), 0, 1)
        if me == 0:
            wait(count, 1, "sys", "acquire", num_ranks() if correct else 2)
            out[0] = slots[0] + slots[1] + slots[2]  # second

    return launches(kernel, ints(3), ints())


@planted(RaceError, RELEASE, "slot", right=[[12]], ranks=1)
def a_release_sequence(correct):
    """An atomic without a fence, between a release and an acquire, passes on what was released."""

    @cuda.jit
    def kernel(slot, count, out):
        block = cuda.blockIdx.x
        if block == 0:
            slot[0] = 12  # first
            if correct:
                red_release(count, 0, 1, "gpu")
            else:
                cuda.atomic.add(count, 0, 1)
        elif block == 1:
            while cuda.atomic.cas(count, 0, 1, 2) != 1:
                pass
        else:
            while ld_acquire(count, 0, "gpu") != 2:
                pass
            out[0] = slot[0]  # second

    return launches(kernel, private(), private(), blocks=3)


@planted(RaceError, RELEASE, "parts", right=[[21]], ranks=1)
def fences_before_syncthreads(correct):
    """Everybody stores and fences, then one atomic speaks for all: in the order of sequentially consistent
    fences, each thread's comes before that of the last block."""

    @cuda.jit
    def kernel(parts, done, out):
        thread, block = cuda.threadIdx.x, cuda.blockIdx.x
        parts[2 * block + thread] = 1 + 2 * block + thread  # first
        if correct:
            threadfence("gpu")
        cuda.syncthreads()
        if thread == 0 and cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:
            threadfence("gpu")
            total = 0
            for i in range(parts.shape[0]):
                total += parts[i]  # second
            out[0] = total

    return launches(kernel, private(6), private(), blocks=3, threads=2)


@planted(RaceError, THREADS, "parts", right=[[21]], ranks=1)
def fences_before_syncwarp(correct):
    """The same in a warp."""

    @cuda.jit
    def kernel(parts, done, out):
        thread, block = cuda.threadIdx.x, cuda.blockIdx.x
        parts[2 * block + thread] = 1 + 2 * block + thread  # first
        threadfence("gpu")
        if correct:
            cuda.syncwarp()
        if thread == 0 and cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:
            threadfence("gpu")
            total = 0
            for i in range(parts.shape[0]):
                total += parts[i]  # second
            out[0] = total

    return launches(kernel, private(6), private(), blocks=3, threads=2)


@planted(RaceError, RELEASE, "total", right=[[3, 3]], ranks=1)
def spin_lock_handed_on(correct):
    """A lock in shared memory between two warps, opened by an atomic after a fence."""

    @cuda.jit
    def kernel(out):
        lock, total = cuda.shared.array(1, int32), cuda.shared.array(1, int32)
        thread = cuda.threadIdx.x
        if thread == 0:
            lock[0], total[0] = 0, 1
        cuda.syncthreads()
        if thread % 32 == 0:
            while cuda.atomic.cas(lock, 0, 0, 1) != 0:
                pass
            cuda.threadfence_block()
            total[0] += 1  # first second
            if correct:
                cuda.threadfence_block()
            cuda.atomic.exch(lock, 0, 0)
        cuda.syncthreads()
        if thread % 32 == 0:
            out[thread // 32] = total[0]

    return launches(kernel, threads=33, out=2)


@planted(RaceError, PUTS, "inbox outbox", right=[[-1], [30]])
def thread_0_is_quiet_for_its_block(correct):
    """The puts of all threads, which have met thread 0 since, are complete after its quiet."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        thread = cuda.threadIdx.x
        if rank() == 0:
            put_nbi(inbox[thread:], outbox[thread : thread + 1], 1)  # first
            if correct:
                cuda.syncthreads()
            if thread == 0:
                quiet()
                outbox[0] = outbox[1] = 99  # second
                notify(arrived, 1, 1)
        elif thread == 0:
            wait(arrived, 1, "sys", "acquire", 1)
            out[0] = inbox[0] + inbox[1]  # second

    return launches(kernel, ints(2), lambda world: sk.array([10, 20], "int32"), signals(), threads=2)


@planted(RaceError, PUTS, "inbox", right=[[-1], [33]])
def one_fence_for_several_puts(correct):
    """All puts before the fence come before the signal behind it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox[:1], outbox, 1)  # first
            put_signal(inbox[1:2], outbox, arrived[1:], 1, SignalOp.SIGNAL_ADD, 1)  # first
            put_nbi(inbox[2:], outbox, 1)  # first
            if correct:
                fence()
            signal_op(arrived, 1, SignalOp.SIGNAL_SET, 1)
        else:
            signal_wait_until(arrived, ComparisonType.CMP_EQ, 1)
            out[0] = inbox[0] + inbox[1] + inbox[2]  # second

    return launches(kernel, ints(3), filled(11), signals(2))


@planted(RaceError, COUNTS, "inbox", right=[[23], [21], [22]], ranks=3, delivery="unordered")
def fence_by_fence(correct):
    """Chunks with a fence between them may share a counter."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        following = (rank() + 1) % num_ranks()
        for chunk in range(2):
            part = outbox[chunk : chunk + 1]
            put_signal(inbox[chunk:], part, arrived, 1, SignalOp.SIGNAL_ADD, following)  # first
            if correct:
                fence()
        total = 0
        for chunk in range(2):
            signal_wait_until(arrived, ComparisonType.CMP_GE, chunk + 1)
            total += inbox[chunk]  # second
        out[0] = total

    return launches(kernel, ints(2), lambda world: sk.array([1 + world.rank, 20], "int32"), signals())


@planted(RaceError, BARRIERS, "parts", right=[[0, 3, 6], [0, 3, 6], [0, 3, 6]], ranks=3)
def barriers_of_ranks_in_a_loop(correct):
    """NVSHMEM's barrier by thread 0 between two barriers of the block; the array is used again."""

    @cuda.jit
    def kernel(parts, out):
        me, n, thread = rank(), num_ranks(), cuda.threadIdx.x
        for r in range(3):
            if thread < n:
                put(parts[me : me + 1], parts[n + r : n + r + 1], thread)  # first second
            cuda.syncthreads()
            if thread == 0:
                barrier_all()
            cuda.syncthreads()
            if thread == 1:
                out[r] = parts[0] + parts[1] + parts[2]  # first second
            cuda.syncthreads()
            if thread == 0 and correct:
                sync_all()
            cuda.syncthreads()

    return launches(kernel, lambda world: sk.array([0, 0, 0, 0, 1, 2], "int32"), threads=3, out=3)


@planted(RaceError, STREAMS, "x", right=[[1, 2], [2, 0], [0, 1]], ranks=3)
def kernels_streams_and_ranks(correct):
    """A kernel per step, on two streams joined by events, with barriers of the ranks on one of them."""

    @cuda.jit
    def store(x, step):
        x[step] = (rank() + step) % num_ranks()  # first

    @cuda.jit
    def pull(x, step, out):
        out[step] = symm_at(x, (rank() + 1) % num_ranks())[step]  # second

    def main(world):
        side = cuda.stream()
        x, out = sk.zeros(2, "int32"), np.zeros(2, "int32")
        for step in range(2):
            store[1, 1, side](x, step)
            if correct:
                world.stream.wait_event(side.record())
            world.barrier()
            pull[1, 1, world.stream](x, step, out)
            side.wait_event(world.stream.record())
        world.stream.synchronize()
        return out.tolist()

    return main


@planted(UseAfterFreeError, FREED, "parts", right=[[3, 30], [3, 30], [3, 30]], ranks=3)
def memory_given_back_and_used_again(correct):
    """The second array lies where the first one was."""

    @cuda.jit
    def kernel(parts, arrived, factor, out):
        me = rank()
        for peer in range(num_ranks()):
            symm_at(parts, peer)[me] = factor * me
            notify(arrived[me:], peer, 1)
        wait(arrived, num_ranks(), "sys", "acquire", 1)
        out[0] = parts[0] + parts[1] + parts[2]

    def main(world):
        found = []
        for factor in (1, 10):
            if correct or factor == 1:
                parts, arrived = sk.zeros(3, "int32", "parts"), sk.signals(3)
            found += result(world, kernel[1, 1], parts, arrived, factor)
            sk.free(parts)
            sk.free(arrived)
        return found

    return main


@planted(RaceError, THREADS, "table", right=[[5, 6, 7, 8], [1, 2, 3, 4]])
def views_of_the_same_memory(correct):
    """Written as bytes by a warp, read as words by a block; rows and slices of one array."""

    @cuda.jit
    def kernel(table, mine, arrived, out):
        thread = cuda.threadIdx.x
        there = symm_at(table, 1 - rank())
        copy_warp(there[1].view(int32), mine.view(int32))  # first
        if correct:
            cuda.syncwarp()
        if thread == 0:
            notify(arrived[1:], 1 - rank(), 1)
        wait_block(arrived[1:], 1, "sys", "acquire", 1)
        out[thread] = table[1, thread]  # second

    def mine(world):
        return np.arange(1, 5, dtype="int32") + 4 * world.rank

    return launches(kernel, ints((2, 4)), mine, signals(2), threads=4, out=4)


@planted(RaceError, THREADS, "parts", right=[[2, 4, 6]] * 2)
def grid_barriers_and_ranks_in_turn(correct):
    """All blocks, then all ranks, then all blocks: everybody sees everybody's."""

    @cuda.jit
    def kernel(parts, state, arrived, out):
        block, other = cuda.blockIdx.x, 1 - rank()
        for r in range(3):
            symm_at(parts, other)[3 * (r % 2) + block] = (r + 1) * (block == 1) * 2  # first second
            grid_barrier(state)
            if block == 0:
                notify(arrived, other, 1, "add")
                wait(arrived, 1, "sys", "acquire", r + 1)
            if correct:
                grid_barrier(state)
            if block == 2:
                out[r] = parts[3 * (r % 2)] + parts[3 * (r % 2) + 1] + parts[3 * (r % 2) + 2]  # first second

    return launches(kernel, ints(6), private(2, "uint32"), signals(), blocks=3, out=3)


@planted(RaceError, THREADS, "copy x", right=[[7, 7], [7, 7]])
def reading_at_the_same_time(correct):
    """Any number of threads, ranks and gets may read what nobody writes any more."""

    @cuda.jit
    def kernel(x, copy, out):
        thread = cuda.threadIdx.x
        if rank() == 0 and thread == 0:
            x[0] = symm_at(x, 1)[0] = 7  # first
        cuda.syncthreads()
        if thread == 0:
            barrier_all()
            get(copy, x, 1 - rank())  # first
        if correct:
            cuda.syncthreads()
        out[thread] = (x[0] + symm_at(x, 1 - rank())[0] + copy[0]) // 3  # second

    return launches(kernel, ints(), private(), threads=2, out=2)


@planted(RaceError, THREADS, "part", right=[[60]], ranks=1)
def block_votes_are_barriers(correct):
    """syncthreads_count and its like meet as syncthreads does."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(3, int32)
        thread = cuda.threadIdx.x
        part[thread] = 10 * (thread + 1)  # first
        if correct:
            any_of_them = cuda.syncthreads_or(int32(thread == 2))
        else:
            any_of_them = cuda.any_sync(0x7, thread == 2)
        if any_of_them and thread == 0:
            out[0] = part[0] + part[1] + part[2]  # second

    return launches(kernel, threads=3)


@planted(RaceError, CREDITS, "slot", right=[[-1], [9]])
def acknowledged_by_put_signal(correct):
    """A slot under puts alone: data and signal there, the acknowledgement back, three items."""

    @cuda.jit
    def kernel(slot, item, full, empty, out):
        total = 0
        for i in range(3):
            if rank() == 0:
                if cuda.threadIdx.x == 0:
                    signal_wait_until(empty, ComparisonType.CMP_GE, i)
                    item[0] = item[1] = i
                cuda.syncthreads()
                put_signal_block(slot, item, full, i + 1, SignalOp.SIGNAL_SET, 1)  # first second
            elif cuda.threadIdx.x == 0:
                signal_wait_until(full, ComparisonType.CMP_GE, i + 1)
                if not correct:
                    signal_op(empty, i + 1, SignalOp.SIGNAL_SET, 0)
                total += slot[0] + 2 * slot[1]  # first second
                fence()
                if correct:
                    signal_op(empty, i + 1, SignalOp.SIGNAL_SET, 0)
        if rank() == 1 and cuda.threadIdx.x == 0:
            out[0] = total

    return launches(kernel, ints(2), private(2), signals(), signals(), threads=2)
