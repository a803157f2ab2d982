"""Bugs of puts and gets under way: what a fence, quiet and a signal order, and what they do not."""

from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    atomic_inc,
    fence,
    get,
    get_nbi,
    notify,
    num_ranks,
    p,
    put,
    put_nbi,
    put_signal,
    put_signal_nbi,
    quiet,
    rank,
    signal_op,
    signal_wait_until,
    symm_at,
    sync_all,
    threadfence,
    wait,
)
from shmemkit.emu import DeadlockError, RaceError

from .plant import BARRIERS, COUNTS, PUTS, RACE, RELEASE, filled, ints, launches, planted, result, signals

# inbox, outbox and two signals
ARRAYS = ints(2), lambda world: sk.array([10 + world.rank, 20 + world.rank], "int32"), signals(2)
GE, EQ = ComparisonType.CMP_GE, ComparisonType.CMP_EQ
SET, ADD = SignalOp.SIGNAL_SET, SignalOp.SIGNAL_ADD


@planted(RaceError, PUTS, "inbox", "fence", right=[[-1], [10]])
def missing_fence_between_put_and_signal(correct):
    """The signal of signal_op may overtake the put before it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            if correct:
                fence()
            signal_op(arrived, 1, SET, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", "fence", right=[[-1], [10]])
def missing_fence_after_put_nbi(correct):
    """The same with a non-blocking put."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put_nbi(inbox, outbox, 1)  # first
            if correct:
                fence()
            signal_op(arrived, 1, ADD, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", "fence", right=[[-1], [10]])
def missing_fence_before_an_atomic(correct):
    """A remote atomic as the signal."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            if correct:
                fence()
            atomic_inc(arrived, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", "quiet", right=[[-1], [10]])
def missing_quiet_before_notify(correct):
    """notify is a store over NVLink, and overtakes puts."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put_nbi(inbox, outbox, 1)  # first
            if correct:
                quiet()
            notify(arrived, 1, 1)
        else:
            wait(arrived, 1, "sys", "acquire", 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", "quiet", right=[[-1], [10]])
def fence_where_quiet_is_needed(correct):
    """A fence orders puts and signals of NVSHMEM among each other, not the store of notify."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put_nbi(inbox, outbox, 1)  # first
            if correct:
                quiet()
            else:
                fence()
            notify(arrived, 1, 1)
        else:
            wait(arrived, 1, "sys", "acquire", 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", "quiet", right=[[-1], [10], [10]], ranks=3)
def fence_for_another_pe(correct):
    """A put to rank 1, a signal to rank 2, which looks at rank 1: a fence orders for each rank by itself."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            if correct:
                quiet()
            else:
                fence()
            signal_op(arrived, 1, SET, 2)
        elif rank() == 2:
            signal_wait_until(arrived, GE, 1)
            out[0] = symm_at(inbox, 1)[0]  # second
            notify(arrived, 1, 1)
        else:
            wait(arrived, 1, "sys", "acquire", 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", right=[[-1], [30]])
def signal_of_another_put(correct):
    """put_signal's signal says that its own data is there, not that of the put before."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox[:1], outbox[:1], 1)  # first
            if correct:
                fence()
            put_signal(inbox[1:], outbox[1:], arrived, 1, SET, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0] + inbox[1]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "outbox", "quiet", right=[[-1], [10]])
def source_of_put_nbi_reused(correct):
    """The source is overwritten while the put may not have read it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put_signal_nbi(inbox, outbox, arrived, 1, SET, 1)  # first
            if correct:
                quiet()
            outbox[0] = 99  # second
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "outbox", "quiet", right=[[-1], [10]])
def source_of_put_nbi_reused_after_a_fence(correct):
    """A fence does not say that the source has been read. A blocking put has read it when it returns."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            if correct:
                put(inbox, outbox, 1)
            else:
                put_nbi(inbox, outbox, 1)  # first
            fence()
            outbox[0] = 99  # second
            signal_op(arrived, 1, SET, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", "quiet", right=[[11], [10]])
def get_nbi_used_before_quiet(correct):
    """The destination of a non-blocking get is read at once."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        get_nbi(inbox, outbox, 1 - rank())  # first
        if correct:
            quiet()
        out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, RELEASE, "outbox", right=[[11], [10]])
def get_of_what_is_not_there_yet(correct):
    """A rank fills its outbox in the kernel; its peer gets it without knowing that it has."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        outbox[0] = 10 + rank()  # first second
        notify(arrived, 1 - rank(), 1)
        if correct:
            wait(arrived, 1, "sys", "acquire", 1)
        get(inbox, outbox, 1 - rank())  # first second
        out[0] = inbox[0]

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "outbox", "syncthreads", right=[[-1, -1], [10, 20]])
def put_of_what_other_threads_store(correct):
    """Thread 0 puts what the whole block has stored, without a barrier."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        thread = cuda.threadIdx.x
        if rank() == 0:
            outbox[1 - thread] = 10 * (2 - thread)  # second
            if correct:
                cuda.syncthreads()
            if thread == 0:
                put_signal(inbox, outbox, arrived, 1, SET, 1)  # first
        else:
            signal_wait_until(arrived, GE, 1)
            out[thread] = inbox[thread]

    return launches(kernel, *ARRAYS, threads=2, out=2)


@planted(
    RaceError, COUNTS, "inbox", "a signal for each message", right=[[-1, -1], [10, 20]], delivery="unordered"
)
def one_counter_for_several_messages(correct):
    """Chunks of a ring under way add to one counter: a later one may satisfy the wait for an earlier one."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        for chunk in range(2):
            if rank() == 0:
                signal = arrived[chunk:] if correct else arrived
                put_signal_nbi(  # first
                    inbox[chunk:], outbox[chunk : chunk + 1], signal, 1, ADD, 1
                )
            else:
                signal = arrived[chunk:] if correct else arrived
                wait(signal, 1, "sys", "acquire", 1 if correct else chunk + 1)
                out[chunk] = inbox[chunk]  # second

    return launches(kernel, *ARRAYS, out=2)


@planted(
    RaceError,
    COUNTS,
    "inbox",
    "a signal for each message",
    right=[[13, 12, 11], [10, 13, 12], [11, 10, 13], [12, 11, 10]],
    ranks=4,
    delivery="unordered",
    seed=0,
)
def ring_forwards_what_has_not_come(correct):
    """All steps of a ring add to one counter; step k may be taken for the one before it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        following = (rank() + 1) % num_ranks()
        for step in range(num_ranks() - 1):
            source = outbox if step == 0 else inbox[step - 1 : step]
            signal = arrived[step:] if correct else arrived
            put_signal_nbi(  # first second
                inbox[step:], source[:1], signal, 1, ADD, following
            )
            wait(signal, 1, "sys", "acquire", 1 if correct else step + 1)
        for step in range(num_ranks() - 1):
            out[step] = inbox[step]

    return launches(kernel, ints(3), filled(10, step=1), signals(3), out=3)


@planted(RaceError, BARRIERS, "inbox", right=[[-1], [10]])
def sync_all_where_barrier_all_is_needed(correct):
    """sync_all meets, and leaves puts under way."""

    @cuda.jit
    def kernel(inbox, outbox, _, out):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            if correct:
                quiet()
        sync_all()
        if rank() == 1:
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, RACE, "inbox", right=[[10, 11, 12]] * 3, ranks=3)
def pushes_one_element_too_many(correct):
    """Each rank's part of a gathered array ends one element too late, in the next rank's."""

    @cuda.jit
    def kernel(inbox, part, arrived, out):
        me = rank()
        for peer in range(num_ranks()):
            put_signal(  # first second
                inbox[me : me + 1 if correct else me + 2], part, arrived, 1, ADD, peer
            )
        signal_wait_until(arrived, GE, num_ranks())
        for i in range(num_ranks()):
            out[i] = inbox[i]

    return launches(kernel, ints(3), filled(10, 2, step=1), signals(), out=3)


@planted(RaceError, PUTS, "inbox", right=[[-1], [10]])
def single_word_put_without_fence(correct):
    """p is a put of one word, and no more ordered before a signal than others."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            p(inbox, outbox[0], 1)  # first
            if correct:
                fence()
            signal_op(arrived, 1, SET, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, RELEASE, "outbox", right=[[99], [10]])
def source_of_a_get_refilled(correct):
    """The owner overwrites what its peer is getting."""

    @cuda.jit
    def kernel(inbox, outbox, done, out):
        if rank() == 1:
            get(inbox, outbox, 0)  # first second
            notify(done, 0, 1)
            out[0] = inbox[0]
        else:
            if correct:
                wait(done, 1, "sys", "acquire", 1)
            outbox[0] = 99  # first second
            out[0] = outbox[0]

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "outbox", "quiet", right=[[-1], [10]])
def end_of_a_kernel_completes_no_put(correct):
    """The next kernel on the stream overwrites the source of a put that is still under way."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        if rank() == 0:
            put_signal_nbi(inbox, outbox, arrived, 1, SET, 1)  # first
            if correct:
                quiet()
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]

    @cuda.jit
    def refill(outbox, out):
        outbox[0] = 99  # second

    def main(world):
        inbox, outbox, arrived = (make(world) for make in ARRAYS)
        got = result(world, send[1, 1], inbox, outbox, arrived)
        result(world, refill[1, 1], outbox)
        return got

    return main


@planted(
    DeadlockError,
    COUNTS,
    "waits for arrived[0] on rank 1 == 1, now 2",
    right=[[-1], [30]],
    delivery="unordered",
    seed=5,
)
def wait_for_a_value_that_is_passed_over(correct):
    """Two additions under way arrive between two looks: who waits for exactly 1 never sees it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put_signal_nbi(inbox[:1], outbox[:1], arrived, 1, ADD, 1)
            put_signal_nbi(inbox[1:], outbox[1:], arrived, 1, ADD, 1)
            quiet()
        else:
            if not correct:
                signal_wait_until(arrived, EQ, 1)
            signal_wait_until(arrived, EQ, 2)
            out[0] = inbox[0] + inbox[1]

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", "fence", right=[[-1], [10]])
def fence_before_the_put(correct):
    """The fence orders what is before it; the put comes after it, and has no order with the signal."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            if not correct:
                fence()
            put(inbox, outbox, 1)  # first
            if correct:
                fence()
            signal_op(arrived, 1, SET, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", right=[[-1], [30]])
def second_put_after_the_fence(correct):
    """The fence is between the two puts, blocking or not: it orders the first one before the signal alone."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox[0:1], outbox[0:1], 1)
            if not correct:
                fence()
            put_nbi(inbox[1:2], outbox[1:2], 1)  # first
            if correct:
                fence()
            signal_op(arrived, 1, SET, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0] + inbox[1]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", "fence", right=[[-1], [10], [10]], ranks=3)
def no_fence_for_two_pes_each_of_which_is_signalled(correct):
    """One fence orders the messages to rank 1 among themselves, and those to rank 2 among themselves."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            for pe in range(1, 3):
                put(inbox, outbox, pe)  # first
            if correct:
                fence()
            for pe in range(1, 3):
                signal_op(arrived, 1, SET, pe)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


def for_another_thread(order, met):
    """Thread 1 puts; thread 0 calls `order` and signals, after it has met thread 1 or not."""
    order = cuda.jit(device=True)(order)

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        i = cuda.threadIdx.x
        if rank() == 0:
            if i == 1:
                put(inbox, outbox, 1)  # first
            if met:
                cuda.syncthreads()
            if i == 0:
                order()
                signal_op(arrived, 1, SET, 1)
        elif i == 0:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS, threads=2)


@planted(RaceError, PUTS, "inbox", right=[[-1], [10]], source=[for_another_thread])
def another_thread_fences_without_having_met(correct):
    """Nothing orders the put before thread 0's fence."""
    return for_another_thread(lambda: fence(), correct)


@planted(RaceError, PUTS, "inbox", right=[[-1], [10]], source=[for_another_thread])
def another_thread_calls_quiet_without_having_met(correct):
    """Nothing orders the put before thread 0's quiet."""
    return for_another_thread(lambda: quiet(), correct)


@planted(RaceError, PUTS, "inbox", right=[[11], [10]])
def fence_after_get_nbi(correct):
    """A fence says nothing about gets: their data need not be here."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        get_nbi(inbox, outbox, 1 - rank())  # first
        if correct:
            quiet()
        else:
            fence()
        out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", right=[[-1], [10]])
def thread_1_notifies_of_what_thread_0_is_completing(correct):
    """Thread 0 puts and calls quiet. If the block meets then, causality is transitive."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        i = cuda.threadIdx.x
        if rank() == 0:
            if i == 0:
                put(inbox, outbox, 1)  # first
                quiet()
            if correct:
                cuda.syncthreads()
            if i == 1:
                notify(arrived, 1, 1)
        elif i == 1:
            wait(arrived, 1, "sys", "acquire", 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS, threads=2)


@planted(RaceError, PUTS, "inbox", "fence", right=[[-1], [10]])
def threadfence_in_the_place_of_fence(correct):
    """A fence of PTX knows nothing of the put that is under way."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            if correct:
                fence()
            else:
                threadfence("sys")
            signal_op(arrived, 1, SET, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", right=[[-1], [10]])
def p_of_a_flag_without_a_fence(correct):
    """p is in one piece, so that it may be a flag. But the two messages may be delivered in either order."""

    @cuda.jit
    def kernel(inbox, outbox, flag, out):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            if correct:
                fence()
            p(flag, 1, 1)
        else:
            signal_wait_until(flag, GE, 1)
            out[0] = inbox[0]  # second

    return launches(kernel, *ARRAYS)


@planted(RaceError, PUTS, "inbox", "fence", right=[[23], [-1], [-1]], ranks=3)
def arrivals_counted_without_a_fence(correct):
    """Each sender's put is before its own fence, and its addition behind it; the receiver waits for all."""

    @cuda.jit
    def kernel(inbox, outbox, arrivals, out):
        if rank() > 0:
            put(inbox[rank() - 1 : rank()], outbox[0:1], 0)  # first
            if correct:
                fence()
            atomic_inc(arrivals, 0)
        else:
            signal_wait_until(arrivals, GE, 2)
            out[0] = inbox[0] + inbox[1]  # second

    return launches(kernel, *ARRAYS)
