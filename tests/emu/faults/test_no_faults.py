"""Correct programs that synchronise in less usual ways: nothing is reported of them."""

import numpy as np
import pytest
from fault import check_correct, result
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


def correct(right, pes=3):
    """Decorator: makes ``make()`` -> main(world) a slow test of each delivery; `main` returns `right`, by
    rank."""

    def decorate(make):
        @pytest.mark.slow
        @pytest.mark.parametrize("delivery", ["eager", "ordered", "unordered"])
        def test(delivery):
            check_correct(make(), right, delivery, pes)

        test.__name__, test.__doc__ = make.__name__, make.__doc__
        return test

    return decorate


@correct([[-1], [-1], [7]])
def test_a_chain_of_ranks():
    """Rank 2 reads what rank 0 has stored: it has heard so from rank 1 alone."""

    @cuda.jit
    def kernel(slot, flag, out):
        if rank() == 0:
            symm_at(slot, 2)[0] = 7
            notify(flag, 1, 1)
        else:
            wait(flag, 1, "sys", "acquire", 1)
            if rank() == 1:
                notify(flag, 2, 1)
            else:
                out[0] = slot[0]

    return lambda world: result(world, kernel[1, 1], sk.zeros(1, "int32"), sk.signals(1))


@correct([[-1, -1], [7, 7]], pes=2)
def test_a_chain_of_scopes():
    """Block to block at scope "gpu", rank to rank at scope "sys", thread to thread by a barrier."""

    @cuda.jit
    def kernel(slot, local, remote, out):
        block, thread = cuda.blockIdx.x, cuda.threadIdx.x
        if rank() == 0:
            if block == 0 and thread == 1:
                symm_at(slot, 1)[0] = 7
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
            cuda.syncthreads()
            if block == 0:
                out[thread] = slot[0]

    return lambda world: result(
        world, kernel[2, 2], sk.zeros(1, "int32"), sk.signals(1), sk.signals(1), out=2
    )


@correct([[6], [-1], [-1]])
def test_a_counter_of_several_ranks():
    """Who acquires a sum sees what preceded each of its additions."""

    @cuda.jit
    def kernel(slots, count, out):
        me = rank()
        symm_at(slots, 0)[me] = me + 1
        red_release(symm_at(count, 0), 0, 1)
        if me == 0:
            wait(count, 1, "sys", "acquire", num_ranks())
            out[0] = slots[0] + slots[1] + slots[2]

    return lambda world: result(world, kernel[1, 1], sk.zeros(3, "int32"), sk.zeros(1, "int32"))


@correct([[12]], pes=1)
def test_a_release_sequence():
    """An atomic without a fence, between a release and an acquire, passes on what was released."""

    @cuda.jit
    def kernel(slot, count, out):
        block = cuda.blockIdx.x
        if block == 0:
            slot[0] = 12
            red_release(count, 0, 1, "gpu")
        elif block == 1:
            while cuda.atomic.cas(count, 0, 1, 2) != 1:
                pass
        else:
            while ld_acquire(count, 0, "gpu") != 2:
                pass
            out[0] = slot[0]

    return lambda world: result(world, kernel[3, 1], np.zeros(1, "int32"), np.zeros(1, "int32"))


@correct([[21]], pes=1)
def test_fences_before_syncthreads():
    """Everybody stores and fences, then one atomic speaks for all: in the order of sequentially consistent
    fences, each thread's comes before that of the last block."""

    @cuda.jit
    def kernel(parts, done, out):
        thread, block = cuda.threadIdx.x, cuda.blockIdx.x
        parts[2 * block + thread] = 1 + 2 * block + thread
        threadfence("gpu")
        cuda.syncthreads()
        if thread == 0 and cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:
            threadfence("gpu")
            total = 0
            for i in range(parts.shape[0]):
                total += parts[i]
            out[0] = total

    return lambda world: result(world, kernel[3, 2], np.zeros(6, "int32"), np.zeros(1, "int32"))


@correct([[21]], pes=1)
def test_fences_before_syncwarp():
    """The same in a warp."""

    @cuda.jit
    def kernel(parts, done, out):
        thread, block = cuda.threadIdx.x, cuda.blockIdx.x
        parts[2 * block + thread] = 1 + 2 * block + thread
        threadfence("gpu")
        cuda.syncwarp()
        if thread == 0 and cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:
            threadfence("gpu")
            total = 0
            for i in range(parts.shape[0]):
                total += parts[i]
            out[0] = total

    return lambda world: result(world, kernel[3, 2], np.zeros(6, "int32"), np.zeros(1, "int32"))


@correct([[3, 3]], pes=1)
def test_spin_lock_handed_on():
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
            total[0] += 1
            cuda.threadfence_block()
            cuda.atomic.exch(lock, 0, 0)
        cuda.syncthreads()
        if thread % 32 == 0:
            out[thread // 32] = total[0]

    return lambda world: result(world, kernel[1, 33], out=2)


@correct([[-1], [30]], pes=2)
def test_thread_0_is_quiet_for_its_block():
    """The puts of all threads, which have met thread 0 since, are complete after its quiet."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        thread = cuda.threadIdx.x
        if rank() == 0:
            put_nbi(inbox[thread:], outbox[thread : thread + 1], 1)
            cuda.syncthreads()
            if thread == 0:
                quiet()
                outbox[0] = outbox[1] = 99
                notify(arrived, 1, 1)
        elif thread == 0:
            wait(arrived, 1, "sys", "acquire", 1)
            out[0] = inbox[0] + inbox[1]

    def main(world):
        outbox = sk.array([10, 20], "int32")
        return result(world, kernel[1, 2], sk.zeros(2, "int32"), outbox, sk.signals(1))

    return main


@correct([[-1], [33]], pes=2)
def test_one_fence_for_several_puts():
    """All puts before the fence come before the signal behind it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox[:1], outbox, 1)
            put_signal(inbox[1:2], outbox, arrived[1:], 1, SignalOp.SIGNAL_ADD, 1)
            put_nbi(inbox[2:], outbox, 1)
            fence()
            signal_op(arrived, 1, SignalOp.SIGNAL_SET, 1)
        else:
            signal_wait_until(arrived, ComparisonType.CMP_EQ, 1)
            out[0] = inbox[0] + inbox[1] + inbox[2]

    def main(world):
        outbox = sk.full(1, 11, "int32")
        return result(world, kernel[1, 1], sk.zeros(3, "int32"), outbox, sk.signals(2))

    return main


@correct([[23], [21], [22]])
def test_fence_by_fence():
    """Chunks with a fence between them may share a counter."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        following = (rank() + 1) % num_ranks()
        for chunk in range(2):
            put_signal(inbox[chunk:], outbox[chunk : chunk + 1], arrived, 1, SignalOp.SIGNAL_ADD, following)
            fence()
        total = 0
        for chunk in range(2):
            signal_wait_until(arrived, ComparisonType.CMP_GE, chunk + 1)
            total += inbox[chunk]
        out[0] = total

    def main(world):
        outbox = sk.array([1 + world.rank, 20], "int32")
        return result(world, kernel[1, 1], sk.zeros(2, "int32"), outbox, sk.signals(1))

    return main


@correct([[0, 3, 6], [0, 3, 6], [0, 3, 6]])
def test_barriers_of_ranks_in_a_loop():
    """NVSHMEM's barrier by thread 0 between two barriers of the block; the array is used again."""

    @cuda.jit
    def kernel(parts, out):
        me, n, thread = rank(), num_ranks(), cuda.threadIdx.x
        for r in range(3):
            if thread < n:
                put(parts[me : me + 1], parts[n + r : n + r + 1], thread)
            cuda.syncthreads()
            if thread == 0:
                barrier_all()
            cuda.syncthreads()
            if thread == 1:
                out[r] = parts[0] + parts[1] + parts[2]
            cuda.syncthreads()
            if thread == 0:
                sync_all()
            cuda.syncthreads()

    def main(world):
        parts = sk.array([0, 0, 0, 0, 1, 2], "int32")
        return result(world, kernel[1, 3], parts, out=3)

    return main


@correct([[1, 2], [2, 0], [0, 1]])
def test_kernels_streams_and_ranks():
    """A kernel per step, on two streams joined by events, with barriers of the ranks on one of them."""

    @cuda.jit
    def store(x, step):
        x[step] = (rank() + step) % num_ranks()

    @cuda.jit
    def pull(x, step, out):
        out[step] = symm_at(x, (rank() + 1) % num_ranks())[step]

    def main(world):
        side = cuda.stream()
        x, out = sk.zeros(2, "int32"), np.zeros(2, "int32")
        for step in range(2):
            store[1, 1, side](x, step)
            world.stream.wait_event(side.record())
            world.barrier()
            pull[1, 1, world.stream](x, step, out)
            side.wait_event(world.stream.record())
        world.stream.synchronize()
        return out.tolist()

    return main


@correct([[3, 30], [3, 30], [3, 30]])
def test_memory_given_back_and_used_again():
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
            parts, arrived = sk.zeros(3, "int32"), sk.signals(3)
            found += result(world, kernel[1, 1], parts, arrived, factor)
            sk.free(parts)
            sk.free(arrived)
        return found

    return main


@correct([[5, 6, 7, 8], [1, 2, 3, 4]], pes=2)
def test_views_of_the_same_memory():
    """Written as bytes by a warp, read as words by a block; rows and slices of one array."""

    @cuda.jit
    def kernel(table, mine, arrived, out):
        thread = cuda.threadIdx.x
        there = symm_at(table, 1 - rank())
        copy_warp(there[1].view(int32), mine.view(int32))
        cuda.syncwarp()
        if thread == 0:
            notify(arrived[1:], 1 - rank(), 1)
        wait_block(arrived[1:], 1, "sys", "acquire", 1)
        out[thread] = table[1, thread]

    def main(world):
        mine = np.arange(1, 5, dtype="int32") + 4 * world.rank
        return result(world, kernel[1, 4], sk.zeros((2, 4), "int32"), mine, sk.signals(2), out=4)

    return main


@correct([[2, 4, 6]] * 2, pes=2)
def test_grid_barriers_and_ranks_in_turn():
    """All blocks, then all ranks, then all blocks: everybody sees everybody's."""

    @cuda.jit
    def kernel(parts, state, arrived, out):
        block, other = cuda.blockIdx.x, 1 - rank()
        for r in range(3):
            symm_at(parts, other)[3 * (r % 2) + block] = (r + 1) * (block == 1) * 2
            grid_barrier(state)
            if block == 0:
                notify(arrived, other, 1, "add")
                wait(arrived, 1, "sys", "acquire", r + 1)
            grid_barrier(state)
            if block == 2:
                out[r] = parts[3 * (r % 2)] + parts[3 * (r % 2) + 1] + parts[3 * (r % 2) + 2]

    return lambda world: result(
        world, kernel[3, 1], sk.zeros(6, "int32"), np.zeros(2, "uint32"), sk.signals(1), out=3
    )


@correct([[7, 7], [7, 7]], pes=2)
def test_reading_at_the_same_time():
    """Any number of threads, ranks and gets may read what nobody writes any more."""

    @cuda.jit
    def kernel(x, copy, out):
        thread = cuda.threadIdx.x
        if rank() == 0 and thread == 0:
            x[0] = symm_at(x, 1)[0] = 7
        cuda.syncthreads()
        if thread == 0:
            barrier_all()
            get(copy, x, 1 - rank())
        cuda.syncthreads()
        out[thread] = (x[0] + symm_at(x, 1 - rank())[0] + copy[0]) // 3

    return lambda world: result(world, kernel[1, 2], sk.zeros(1, "int32"), np.zeros(1, "int32"), out=2)


@correct([[60]], pes=1)
def test_block_votes_are_barriers():
    """syncthreads_count and its like meet as syncthreads does."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(3, int32)
        thread = cuda.threadIdx.x
        part[thread] = 10 * (thread + 1)
        if cuda.syncthreads_or(int32(thread == 2)) and thread == 0:
            out[0] = part[0] + part[1] + part[2]

    return lambda world: result(world, kernel[1, 3])


@correct([[-1], [9]], pes=2)
def test_acknowledged_by_put_signal():
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
                put_signal_block(slot, item, full, i + 1, SignalOp.SIGNAL_SET, 1)
            elif cuda.threadIdx.x == 0:
                signal_wait_until(full, ComparisonType.CMP_GE, i + 1)
                total += slot[0] + 2 * slot[1]
                fence()
                signal_op(empty, i + 1, SignalOp.SIGNAL_SET, 0)
        if rank() == 1 and cuda.threadIdx.x == 0:
            out[0] = total

    return lambda world: result(
        world, kernel[1, 2], sk.zeros(2, "int32"), np.zeros(2, "int32"), sk.signals(1), sk.signals(1)
    )
