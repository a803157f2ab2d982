"""Bugs that one lucky order hides: a barrier, wait, signal or atomic orders less than it seems to."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import ComparisonType as Compare
from shmemkit.device import (
    SignalOp,
    Teams,
    atomic_add,
    atomic_fetch,
    atomic_set,
    barrier_all,
    broadcast,
    fcollect,
    fence,
    g,
    ld_acquire,
    notify,
    num_ranks,
    p,
    quiet,
    rank,
    red_release,
    signal_op,
    signal_wait_until,
    st_release,
    symm_at,
    sync_all,
    sync_all_block,
    wait,
    wait_block,
)
from shmemkit.emu import EmulatorError, RaceError

from .plant import (
    ATOMICS,
    BARRIERS,
    COLLECTIVES,
    COUNTS,
    CREDITS,
    PUTS,
    RELEASE,
    SIGNALS,
    SPINNING,
    STREAMS,
    WAITS,
    filled,
    ints,
    launches,
    planted,
    private,
    result,
    signals,
)

# ---- barriers of ranks and collectives: what comes before them on each rank, and nothing later


@planted(RaceError, BARRIERS, "halo", right=[[-1, 12, 22, 32], [-1, 10, 20, 30], [-1, 11, 21, 31]], ranks=3)
def halo_with_two_buffers_that_change_too_rarely(correct):
    """Steps 2 and 3 have the same buffer: the barrier of step 2 is before the neighbour's load of step 2."""

    @cuda.jit
    def kernel(halo, out):
        right = (rank() + 1) % num_ranks()
        for i in range(1, 4):
            buffer = i % 2 if correct else i // 2
            symm_at(halo, right)[buffer] = 10 * i + rank()  # first second
            barrier_all()
            out[i] = halo[buffer]  # first second

    return launches(kernel, ints(2), out=4)


@planted(RaceError, BARRIERS, "bins", right=[[2, 2], [2, 2]])
def counter_cleared_while_others_count_for_the_next_round(correct):
    """The owner clears its bin after the barrier; another rank may already count for the next round."""

    @cuda.jit
    def kernel(bins, out):
        for i in range(2):
            for pe in range(num_ranks()):
                atomic_add(bins, 1, pe)  # first second
            barrier_all()
            out[i] = bins[0]  # first second
            bins[0] = 0  # first second
            if correct:
                sync_all()

    return launches(kernel, ints(), out=2)


@planted(RaceError, BARRIERS, "parts", right=[[11, 13], [10, 12]])
def part_refilled_by_a_block_that_has_not_met_the_readers(correct):
    """Each block fills its part for the next round as soon as the peer may read that of this round."""

    @cuda.jit
    def kernel(parts, out):
        i = cuda.threadIdx.x
        for step in range(2):
            parts[i] = 10 + rank() + 2 * step + 10 * i  # first second
            sync_all_block()
            if i == 0:
                out[step] = symm_at(parts, 1 - rank())[0]  # first second
            if correct:
                sync_all_block()

    return launches(kernel, ints(2), threads=2, out=2)


@planted(RaceError, COLLECTIVES, "inbox", right=[[30], [-1], [-1]], ranks=3)
def root_reads_what_others_sent_before_the_broadcast(correct):
    """A broadcast orders after its root alone; the root itself has waited for nobody."""

    @cuda.jit
    def kernel(inbox, dst, src, out):
        symm_at(inbox, 0)[rank()] = 10 * rank()  # first second
        if correct:
            fcollect(Teams.TEAM_WORLD, dst, src)
        else:
            broadcast(Teams.TEAM_WORLD, dst, src, 0)
        if rank() == 0:
            out[0] = inbox[0] + inbox[1] + inbox[2]  # first second

    return launches(kernel, ints(3), ints(3), ints())


@planted(RaceError, COLLECTIVES, "dst", right=[[7], [7], [7]], ranks=3)
def dst_of_a_broadcast_read_before_it(correct):
    """A rank still reads dst when the root has entered the broadcast, which may write it from then on."""

    @cuda.jit
    def kernel(dst, src, out):
        if rank() == 2:
            out[0] = dst[0]  # first second
        if correct:
            sync_all()
        broadcast(Teams.TEAM_WORLD, dst, src, 1)  # first second
        out[0] = dst[0]

    return launches(kernel, ints(), filled(7))


# ---- waits: the first value that satisfies them


@planted(RaceError, CREDITS, "slots", right=[[-1] * 5, [10, 11, 12, 13, 14]])
def two_slots_whose_sender_waits_one_item_short(correct):
    """Item i goes to slot i % 2 when item i - 2 has been read: the sender waits for item i - 3 alone."""

    @cuda.jit
    def kernel(slots, full, empty, out):
        for i in range(5):
            if rank() == 0:
                wait(empty, 1, "sys", "acquire", max(i - 1 if correct else i - 2, 0))
                symm_at(slots, 1)[i % 2] = 10 + i  # first
                notify(full, 1, i + 1)
            else:
                wait(full, 1, "sys", "acquire", i + 1)
                out[i] = slots[i % 2]  # second
                notify(empty, 0, i + 1)

    return launches(kernel, ints(2), signals(), signals(), out=5)


@planted(RaceError, WAITS, "items", right=[[-1] * 4, [10, 11, 12, 13]])
def takes_more_of_a_batch_than_its_wait_has_seen(correct):
    """The consumer waits for one item, and takes two. What the wait returns says how many there are."""

    @cuda.jit
    def kernel(items, tail, out):
        if rank() == 0:
            for i in range(4):
                symm_at(items, 1)[i] = 10 + i  # first
                st_release(symm_at(tail, 1), 0, i + 1)
        else:
            head = 0
            while head < 4:
                end = wait(tail, 1, "sys", "acquire", head + 1)
                if not correct:
                    end = head + 2
                while head < end:
                    out[head] = items[head]  # second
                    head += 1

    return launches(kernel, ints(4), signals(), out=4)


@planted(RaceError, CREDITS, "slot", right=[[-1] * 3, [-1] * 3, [10, 11, 12]], ranks=3)
def relay_that_acknowledges_before_the_next_rank_has_read(correct):
    """Rank 1 passes on by its one slot, and does not wait until rank 2 has read the item before."""

    @cuda.jit
    def kernel(slot, full, empty, out):
        for i in range(3):
            if rank() > 0:
                wait(full, 1, "sys", "acquire", i + 1)
                if rank() == 2:
                    out[i] = slot[0]  # first second
            if rank() < 2:
                if rank() == 0 or correct:
                    wait(empty, 1, "sys", "acquire", i)
                symm_at(slot, rank() + 1)[0] = 10 + i if rank() == 0 else slot[0]  # first second
                notify(full, rank() + 1, i + 1)
            if rank() > 0:
                notify(empty, rank() - 1, i + 1)

    return launches(kernel, ints(), signals(), signals(), out=3)


@planted(RaceError, COUNTS, "parts", right=[[21], [21], [21]], ranks=3)
def block_waits_for_the_count_of_the_round_before(correct):
    """All ranks add to a counter; in round 1 the wait is for the arrivals of round 0."""

    @cuda.jit
    def kernel(parts, arrived, out):
        i, me, n = cuda.threadIdx.x, rank(), num_ranks()
        for step in range(2):
            if i < n:
                symm_at(parts, i)[step, me] = (me + 1) * (step + 1) + step  # first second
            cuda.syncthreads()
            if i < n:
                notify(arrived, i, 1, "add")
            wait_block(arrived, 1, "sys", "acquire", n * (step + 1 if correct else 1))
            if i == 0:
                total = 0
                for pe in range(n):
                    for s in range(step + 1):
                        total += parts[s, pe]  # first second
                out[0] = total

    return launches(kernel, ints((2, 3)), signals(), threads=4)


@planted(RaceError, SIGNALS, "full slot", right=[[-1] * 3, [10, 11, 12]])
def flag_reset_after_the_answer(correct):
    """A flag is set, reset and set again. A receiver that answers first may reset the next item's flag."""

    @cuda.jit
    def kernel(slot, full, empty, out):
        for i in range(3):
            if rank() == 0:
                symm_at(slot, 1)[0] = 10 + i  # first second
                notify(full, 1, 1)  # first second
                wait(empty, 1, "sys", "acquire", 1, "eq")
                st_release(empty, 0, 0)
            else:
                wait(full, 1, "sys", "acquire", 1, "eq")
                if not correct:
                    notify(empty, 0, 1)
                out[i] = slot[0]  # first second
                st_release(full, 0, 0)  # first second
                if correct:
                    notify(empty, 0, 1)

    return launches(kernel, ints(), signals(), signals(), out=3)


@planted(RaceError, RELEASE, "total", right=[[6]], ranks=1)
def one_before_the_last_arriver_adds_up(correct):
    """The last of three blocks, by a counter, adds up; here the one before it does."""

    @cuda.jit
    def kernel(total, arrived, out):
        total[cuda.blockIdx.x] = cuda.blockIdx.x + 1  # first second
        cuda.threadfence()
        if cuda.atomic.add(arrived, 0, 1) == (2 if correct else 1):
            cuda.threadfence()
            out[0] = total[0] + total[1] + total[2]  # first second

    return launches(kernel, private(3), private(), blocks=3)


@planted(RaceError, RELEASE, "account", right=[[40]], ranks=1)
def lock_is_given_back_before_the_store(correct):
    """The load is under the lock, the store behind it."""

    @cuda.jit
    def kernel(lock, account):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        cuda.threadfence()
        old = account[0]  # first second
        if correct:
            account[0] = old + 10
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)
        if not correct:
            account[0] = old + 10  # first second

    def main(world):
        account = np.zeros(1, "int32")
        kernel[4, 1](np.zeros(1, "int32"), account)
        world.synchronize()
        return account.tolist()

    return main


# ---- signals that are set


@planted(RaceError, SIGNALS, "done", "set", right=[[-1], [30]])
def two_blocks_set_one_signal(correct):
    """Both blocks set the peer's signal to 1; the peer cannot tell which of them is done."""

    @cuda.jit
    def kernel(parts, done, out):
        block = cuda.blockIdx.x
        if rank() == 0:
            symm_at(parts, 1)[block] = 10 * (block + 1)
            if correct:
                notify(done, 1, 1, "add")
            else:
                notify(done, 1, 1)  # first second
        elif block == 0 and correct:
            wait(done, 1, "sys", "acquire", 2)
            out[0] = parts[0] + parts[1]

    return launches(kernel, ints(2), signals(), blocks=2)


@planted(RaceError, SIGNALS, "progress", "set", right=[[-1], [3]])
def progress_set_by_messages_without_a_fence(correct):
    """Two messages of one thread may overtake each other: the signal may go back."""

    @cuda.jit
    def kernel(progress, out):
        if rank() == 0:
            for i in range(3):
                signal_op(progress, i + 1, SignalOp.SIGNAL_SET, 1)  # first second
                if correct:
                    fence()
        else:
            signal_wait_until(progress, Compare.CMP_GE, 3)
            out[0] = progress[0] if correct else 3

    return launches(kernel, signals())


@planted(RaceError, SIGNALS, "arrived", "set", right=[[2, 2], [-1, -1], [-1, -1]], ranks=3)
def counter_reset_while_others_add(correct):
    """The receiver resets the counter, and lets the senders go on before that."""

    @cuda.jit
    def kernel(arrived, go, out):
        for i in range(2):
            if rank() > 0:
                wait(go, 1, "sys", "acquire", i)
                notify(arrived, 0, 1, "add")  # first second
            else:
                wait(arrived, 1, "sys", "acquire", 2)
                out[i] = 2
                if correct:
                    st_release(arrived, 0, 0)
                for pe in range(1, 3):
                    notify(go, pe, i + 1)
                if not correct:
                    st_release(arrived, 0, 0)  # first second

    return launches(kernel, signals(), signals(), out=2)


@planted(RaceError, SIGNALS, "flag", right=[[1], [1]])
def store_by_notify_where_any_order_will_do(correct):
    """Both ranks say the same to rank 0, in whatever order. That is for atomic_set: a signal stands for
    what came before it."""

    @cuda.jit
    def kernel(flag, out):
        if correct:
            atomic_set(flag, 1, 0)
        else:
            notify(flag, 0, 1)  # first second
        barrier_all()
        out[0] = 1

    return launches(kernel, signals())


# ---- atomics


@planted(RaceError, ATOMICS, "whole", right=[[3], [3]])
def counter_of_64_bits_added_to_as_32(correct):
    """Rank 1 counts in the lower half of the words that rank 0 counts in."""

    @cuda.jit
    def kernel(whole, half, out):
        if rank() == 0 or correct:
            red_release(symm_at(whole, 0), 0, 1 + rank())  # first second
        else:
            red_release(symm_at(half, 0), 0, 1 + rank())  # first second
        barrier_all()
        out[0] = symm_at(whole, 0)[0] if correct else 3

    def main(world):
        whole = sk.zeros(1, "int64")
        return result(world, kernel[1, 1], whole, whole.view("int32"))

    return main


@planted(RaceError, ATOMICS, "word", right=[[5], [5]])
def fetched_while_it_is_stored(correct):
    """atomic_fetch goes with another rank's ordinary load, and not with its store."""

    @cuda.jit
    def kernel(word, out):
        if rank() == 0:
            out[0] = atomic_fetch(word, 1)  # first second
        elif correct:
            out[0] = word[0]
        else:
            word[0] = 5  # first second

    return launches(kernel, filled(5))


# ---- loops on ordinary loads; p and g


@planted(EmulatorError, SPINNING, "spins on an ordinary load", "while ready[0] == 0:", right=[[7]], ranks=1)
def block_spins_on_an_ordinary_load(correct):
    """Block 0 polls the flag of block 1 by ordinary loads. That is an error in every schedule."""

    @cuda.jit
    def kernel(data, ready, out):
        if cuda.blockIdx.x == 1:
            data[0] = 7
            st_release(ready, 0, 1, "gpu")
        elif correct:
            while ld_acquire(ready, 0, "gpu") == 0:
                pass
            out[0] = data[0]
        else:
            while ready[0] == 0:
                pass

    return launches(kernel, private(), private(1, "uint32"), blocks=2)


@planted(RaceError, PUTS, "cell", "quiet", right=[[2], [-1]])
def remote_increment_without_quiet(correct):
    """g may fetch the value of before the last p, which is still under way."""

    @cuda.jit
    def kernel(cell, out):
        if rank() == 0:
            for _ in range(2):
                p(cell, g(cell, 1) + 1, 1)  # first second
                if correct:
                    quiet()
            out[0] = g(cell, 1) if correct else 2

    return launches(kernel, ints())


# ---- hosts


@cuda.jit
def send(box):
    symm_at(box, 1 - rank())[0] = 10 + rank()  # first


@cuda.jit
def receive(box, out):
    out[0] = box[0]  # second


@planted(RaceError, STREAMS, "box", right=[[11], [10]], source=(send, receive))
def hosts_meet_while_their_kernels_run(correct):
    """host_allgather waits for the host programs, and for no kernel."""

    def main(world):
        box, out = sk.zeros(1, "int32"), np.zeros(1, "int32")
        send[1, 1, world.stream](box)
        if correct:
            world.stream.synchronize()
        world.host_allgather(world.rank)
        receive[1, 1, world.stream](box, out)
        world.stream.synchronize()
        return out.tolist()

    return main
