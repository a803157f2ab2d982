"""Bugs of puts and gets under way: what a fence, quiet and a signal order, and what they do not."""

from fault import DeadlockError, RaceError, fault, result
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
    wait,
)


def arrays(world):
    """inbox, outbox and two signals"""
    outbox = sk.array([10 + world.rank, 20 + world.rank], "int32")
    return sk.zeros(2, "int32"), outbox, sk.signals(2)


@fault(RaceError, "inbox", "fence", right=[[-1], [10]])
def test_missing_fence_between_put_and_signal(correct):
    """The signal of signal_op may overtake the put before it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            if correct:
                fence()
            signal_op(arrived, 1, SignalOp.SIGNAL_SET, 1)
        else:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[0] = inbox[0]  # second

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "inbox", "fence", right=[[-1], [10]])
def test_missing_fence_after_put_nbi(correct):
    """The same with a non-blocking put."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put_nbi(inbox, outbox, 1)  # first
            if correct:
                fence()
            signal_op(arrived, 1, SignalOp.SIGNAL_ADD, 1)
        else:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[0] = inbox[0]  # second

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "inbox", "fence", right=[[-1], [10]])
def test_missing_fence_before_an_atomic(correct):
    """A remote atomic as the signal."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            if correct:
                fence()
            atomic_inc(arrived, 1)
        else:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[0] = inbox[0]  # second

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "inbox", "quiet", right=[[-1], [10]])
def test_missing_quiet_before_notify(correct):
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

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "inbox", "quiet", right=[[-1], [10]])
def test_fence_where_quiet_is_needed(correct):
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

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "inbox", "quiet", right=[[-1], [10], [10]], pes=3)
def test_fence_for_another_pe(correct):
    """A put to rank 1, a signal to rank 2, which looks at rank 1: a fence orders for each rank by itself."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            if correct:
                quiet()
            else:
                fence()
            signal_op(arrived, 1, SignalOp.SIGNAL_SET, 2)
        elif rank() == 2:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[0] = symm_at(inbox, 1)[0]  # second
            notify(arrived, 1, 1)
        else:
            wait(arrived, 1, "sys", "acquire", 1)
            out[0] = inbox[0]  # second

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "inbox", right=[[-1], [30]])
def test_signal_of_another_put(correct):
    """put_signal's signal says that its own data is there, not that of the put before."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox[:1], outbox[:1], 1)  # first
            if correct:
                fence()
            put_signal(inbox[1:], outbox[1:], arrived, 1, SignalOp.SIGNAL_SET, 1)
        else:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[0] = inbox[0] + inbox[1]  # second

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "outbox", "quiet", right=[[-1], [10]])
def test_source_of_put_nbi_reused(correct):
    """The source is overwritten while the put may not have read it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put_signal_nbi(inbox, outbox, arrived, 1, SignalOp.SIGNAL_SET, 1)  # first
            if correct:
                quiet()
            outbox[0] = 99  # second
        else:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[0] = inbox[0]

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "outbox", "quiet", right=[[-1], [10]])
def test_source_of_put_nbi_reused_after_a_fence(correct):
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
            signal_op(arrived, 1, SignalOp.SIGNAL_SET, 1)
        else:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[0] = inbox[0]

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "inbox", "quiet", right=[[11], [10]])
def test_get_nbi_used_before_quiet(correct):
    """The destination of a non-blocking get is read at once."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        get_nbi(inbox, outbox, 1 - rank())  # first
        if correct:
            quiet()
        out[0] = inbox[0]  # second

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "outbox", right=[[11], [10]])
def test_get_of_what_is_not_there_yet(correct):
    """A rank fills its outbox in the kernel; its peer gets it without knowing that it has."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        outbox[0] = 10 + rank()  # first second
        notify(arrived, 1 - rank(), 1)
        if correct:
            wait(arrived, 1, "sys", "acquire", 1)
        get(inbox, outbox, 1 - rank())  # first second
        out[0] = inbox[0]

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "outbox", "syncthreads", right=[[-1, -1], [10, 20]])
def test_put_of_what_other_threads_store(correct):
    """Thread 0 puts what the whole block has stored, without a barrier."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        thread = cuda.threadIdx.x
        if rank() == 0:
            outbox[1 - thread] = 10 * (2 - thread)  # second
            if correct:
                cuda.syncthreads()
            if thread == 0:
                put_signal(inbox, outbox, arrived, 1, SignalOp.SIGNAL_SET, 1)  # first
        else:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[thread] = inbox[thread]

    return lambda world: result(world, kernel[1, 2], *arrays(world), out=2)


@fault(RaceError, "inbox", "a signal for each message", right=[[-1, -1], [10, 20]], delivery="unordered")
def test_one_counter_for_several_messages(correct):
    """Chunks of a ring under way add to one counter: a later one may satisfy the wait for an earlier one."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        for chunk in range(2):
            if rank() == 0:
                signal = arrived[chunk:] if correct else arrived
                put_signal_nbi(  # first
                    inbox[chunk:], outbox[chunk : chunk + 1], signal, 1, SignalOp.SIGNAL_ADD, 1
                )
            else:
                signal = arrived[chunk:] if correct else arrived
                wait(signal, 1, "sys", "acquire", 1 if correct else chunk + 1)
                out[chunk] = inbox[chunk]  # second

    return lambda world: result(world, kernel[1, 1], *arrays(world), out=2)


@fault(
    RaceError,
    "inbox",
    "a signal for each message",
    right=[[13, 12, 11], [10, 13, 12], [11, 10, 13], [12, 11, 10]],
    pes=4,
    delivery="unordered",
    seed=0,
)
def test_ring_forwards_what_has_not_come(correct):
    """All steps of a ring add to one counter; step k may be taken for the one before it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        following = (rank() + 1) % num_ranks()
        for step in range(num_ranks() - 1):
            source = outbox if step == 0 else inbox[step - 1 : step]
            signal = arrived[step:] if correct else arrived
            put_signal_nbi(  # first second
                inbox[step:], source[:1], signal, 1, SignalOp.SIGNAL_ADD, following
            )
            wait(signal, 1, "sys", "acquire", 1 if correct else step + 1)
        for step in range(num_ranks() - 1):
            out[step] = inbox[step]

    def main(world):
        outbox = sk.full(1, 10 + world.rank, "int32")
        return result(world, kernel[1, 1], sk.zeros(3, "int32"), outbox, sk.signals(3), out=3)

    return main


@fault(RaceError, "inbox", right=[[-1], [10]])
def test_sync_all_where_barrier_all_is_needed(correct):
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

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "inbox", right=[[10, 11, 12]] * 3, pes=3)
def test_pushes_one_element_too_many(correct):
    """Each rank's part of a gathered array ends one element too late, in the next rank's."""

    @cuda.jit
    def kernel(inbox, part, arrived, out):
        me = rank()
        for peer in range(num_ranks()):
            put_signal(  # first second
                inbox[me : me + 1 if correct else me + 2], part, arrived, 1, SignalOp.SIGNAL_ADD, peer
            )
        signal_wait_until(arrived, ComparisonType.CMP_GE, num_ranks())
        for i in range(num_ranks()):
            out[i] = inbox[i]

    def main(world):
        part = sk.full(2, 10 + world.rank, "int32")
        return result(world, kernel[1, 1], sk.zeros(3, "int32"), part, sk.signals(1), out=3)

    return main


@fault(RaceError, "inbox", right=[[-1], [10]])
def test_single_word_put_without_fence(correct):
    """p is a put of one word, and no more ordered before a signal than others."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            p(inbox, outbox[0], 1)  # first
            if correct:
                fence()
            signal_op(arrived, 1, SignalOp.SIGNAL_SET, 1)
        else:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[0] = inbox[0]  # second

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "outbox", right=[[99], [10]])
def test_source_of_a_get_refilled(correct):
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

    return lambda world: result(world, kernel[1, 1], *arrays(world))


@fault(RaceError, "outbox", "quiet", right=[[-1], [10]])
def test_end_of_a_kernel_completes_no_put(correct):
    """The next kernel on the stream overwrites the source of a put that is still under way."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        if rank() == 0:
            put_signal_nbi(inbox, outbox, arrived, 1, SignalOp.SIGNAL_SET, 1)  # first
            if correct:
                quiet()
        else:
            signal_wait_until(arrived, ComparisonType.CMP_GE, 1)
            out[0] = inbox[0]

    @cuda.jit
    def refill(outbox, out):
        outbox[0] = 99  # second

    def main(world):
        inbox, outbox, arrived = arrays(world)
        got = result(world, send[1, 1], inbox, outbox, arrived)
        result(world, refill[1, 1], outbox)
        return got

    return main


@fault(
    DeadlockError,
    "waits for arrived[0] on rank 1 == 1, now 2",
    right=[[-1], [30]],
    delivery="unordered",
    seed=5,
)
def test_wait_for_a_value_that_is_passed_over(correct):
    """Two additions under way arrive between two looks: who waits for exactly 1 never sees it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put_signal_nbi(inbox[:1], outbox[:1], arrived, 1, SignalOp.SIGNAL_ADD, 1)
            put_signal_nbi(inbox[1:], outbox[1:], arrived, 1, SignalOp.SIGNAL_ADD, 1)
            quiet()
        else:
            if not correct:
                signal_wait_until(arrived, ComparisonType.CMP_EQ, 1)
            signal_wait_until(arrived, ComparisonType.CMP_EQ, 2)
            out[0] = inbox[0] + inbox[1]

    return lambda world: result(world, kernel[1, 1], *arrays(world))
