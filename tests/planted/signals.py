"""Bugs of waiting and notifying."""

from numba import cuda

from shmemkit.device import (
    ld_acquire,
    notify,
    num_ranks,
    rank,
    red_release,
    st_release,
    symm_at,
    threadfence,
    wait,
)
from shmemkit.emu import DeadlockError, EmulatorError, RaceError

from .plant import ATOMICS, BOUNDS, COUNTS, RELEASE, WAITS, ints, launches, planted, signals


@planted(RaceError, RELEASE, "slot", "wait", right=[[-1], [7]])
def missing_wait(correct):
    """The receiver reads its slot without waiting for the signal."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            notify(full, 1, 1)
        else:
            if correct:
                wait(full, 1, "sys", "acquire", 1)
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, RELEASE, "slot", "give it after", right=[[-1], [7]])
def signal_set_too_early(correct):
    """The sender notifies before it stores."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            if not correct:
                notify(full, 1, 1)
            symm_at(slot, 1)[0] = 7  # first
            if correct:
                notify(full, 1, 1)
        else:
            wait(full, 1, "sys", "acquire", 1)
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, RELEASE, "slots", right=[[-1, -1], [10, 11]])
def waits_for_the_signal_of_another_slot(correct):
    """Item 1 is read after a wait for the signal of slot 0."""

    @cuda.jit
    def kernel(slots, full, out):
        for i in range(2):
            if rank() == 0:
                symm_at(slots, 1)[i] = 10 + i  # first
                notify(full[i:], 1, 1)
            else:
                wait(full[i if correct else 0 :], 1, "sys", "acquire", 1)
                out[i] = slots[i]  # second

    return launches(kernel, ints(2), signals(2), out=2)


@planted(DeadlockError, COUNTS, "waits for full[0] on rank 1 == 0, now 1", right=[[-1] * 4, [10, 11, 12, 13]])
def wrong_parity(correct):
    """A flag that alternates between 1 and 0 is expected to begin with 0."""

    @cuda.jit
    def kernel(slot, full, empty, out):
        for i in range(4):
            parity = (i + 1) % 2
            if rank() == 0:
                symm_at(slot, 1)[0] = 10 + i
                notify(full, 1, parity)
                wait(empty, 1, "sys", "acquire", parity, "eq")
            else:
                wait(full, 1, "sys", "acquire", parity if correct else i % 2, "eq")
                out[i] = slot[0]
                notify(empty, 0, parity)

    return launches(kernel, ints(), signals(), signals(), out=4)


@planted(RaceError, COUNTS, "slot", right=[[-1] * 3, [10, 11, 12]], seed=8)
def waits_for_the_round_before(correct):
    """Off by one: the receiver of item i waits until the slot has been filled i times, not i + 1."""

    @cuda.jit
    def kernel(slot, full, empty, out):
        for i in range(3):
            if rank() == 0:
                wait(empty, 1, "sys", "acquire", i)
                symm_at(slot, 1)[0] = 10 + i  # second
                notify(full, 1, i + 1)
            else:
                wait(full, 1, "sys", "acquire", i + 1 if correct else i)
                out[i] = slot[0]  # first
                notify(empty, 0, i + 1)

    return launches(kernel, ints(), signals(), signals(), out=3)


@planted(RaceError, RELEASE, "inbox", right=[[12], [10], [11]], ranks=3)
def notifies_the_wrong_peer(correct):
    """In a ring, each rank stores to the next one and notifies itself."""

    @cuda.jit
    def kernel(inbox, arrived, out):
        following = (rank() + 1) % num_ranks()
        symm_at(inbox, following)[0] = 10 + rank()  # first second
        notify(arrived, following if correct else rank(), 1)
        wait(arrived, 1, "sys", "acquire", 1)
        out[0] = inbox[0]  # first second

    return launches(kernel, ints(), signals())


@planted(EmulatorError, BOUNDS, "rank 2", right=[[12], [10], [11]], ranks=3)
def ring_that_is_not_closed(correct):
    """The last rank's neighbour is a rank that there is not."""

    @cuda.jit
    def kernel(inbox, arrived, out):
        following = (rank() + 1) % num_ranks() if correct else rank() + 1
        symm_at(inbox, following)[0] = 10 + rank()
        notify(arrived, following, 1)
        wait(arrived, 1, "sys", "acquire", 1)
        out[0] = inbox[0]

    return launches(kernel, ints(), signals())


@planted(DeadlockError, COUNTS, "waits for full[0] on rank 1 >= 2, now 1", right=[[-1], [23]])
def signal_never_reached(correct):
    """The sender sets the signal to 1 twice; the receiver waits for 2."""

    @cuda.jit
    def kernel(slots, full, out):
        if rank() == 0:
            for i in range(2):
                symm_at(slots, 1)[i] = 11 + i
                notify(full, 1, 1, "add" if correct else "set")
        else:
            wait(full, 1, "sys", "acquire", 2)
            out[0] = slots[0] + slots[1]

    return launches(kernel, ints(2), signals())


@planted(DeadlockError, COUNTS, "waits for full[0] on rank 1 >= 1, now 0", right=[[-1, -1], [10, 11]])
def signal_reset_after_the_next_one_has_come(correct):
    """The receiver sets the signal back to 0 for the next item, whose signal may be there already."""

    @cuda.jit
    def kernel(slots, full, out):
        for i in range(2):
            if rank() == 0:
                symm_at(slots, 1)[i] = 10 + i
                notify(full, 1, 1, "add")
            else:
                wait(full, 1, "sys", "acquire", i + 1 if correct else 1)
                out[i] = slots[i]
                if not correct:
                    st_release(full, 0, 0)

    return launches(kernel, ints(2), signals(), out=2)


@planted(RaceError, RELEASE, "slot", "relaxed", right=[[-1], [7]])
def relaxed_wait(correct):
    """A relaxed wait orders nothing."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            notify(full, 1, 1)
        else:
            wait(full, 1, "sys", "acquire" if correct else "relaxed", 1)
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, RELEASE, "slot", "relaxed", right=[[-1], [7]])
def relaxed_wait_without_a_fence(correct):
    """A fence after a relaxed wait would order."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            notify(full, 1, 1)
        else:
            wait(full, 1, "sys", "relaxed", 1)
            if correct:
                threadfence("sys", "acq_rel")
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, RELEASE, "full slot", "scope", right=[[-1], [7]])
def release_at_gpu_scope_for_a_peer(correct):
    """st_release to a peer's flag at scope "gpu"."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            st_release(symm_at(full, 1), 0, 1, "sys" if correct else "gpu")  # first
        else:
            wait(full, 1, "sys", "acquire", 1)  # second
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, RELEASE, "full slot", "scope", right=[[-1], [7]])
def addition_at_gpu_scope_for_a_peer(correct):
    """red_release to a peer's counter at scope "gpu"."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            red_release(symm_at(full, 1), 0, 1, "sys" if correct else "gpu")  # first
        else:
            wait(full, 1, "sys", "acquire", 1)  # second
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, RELEASE, "full slot", "scope", right=[[-1], [7]])
def wait_at_gpu_scope_for_a_peer(correct):
    """The signal comes from another GPU; the wait names scope "gpu"."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            notify(full, 1, 1)  # first
        else:
            wait(full, 1, "sys" if correct else "gpu", "acquire", 1)  # second
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, RELEASE, "full slot", "scope", right=[[-1], [7]])
def polling_at_gpu_scope_for_a_peer(correct):
    """The same with a loop of acquire loads."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            notify(full, 1, 1)  # first
        else:
            while ld_acquire(full, 0, "sys" if correct else "gpu") != 1:  # second
                pass
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, ATOMICS, "full slot", right=[[-1], [7]])
def ordinary_store_as_a_signal(correct):
    """An ordinary store publishes nothing, and is no store that others may poll for."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            if correct:
                notify(full, 1, 1)
            else:
                symm_at(full, 1)[0] = 1  # first
        else:
            wait(full, 1, "sys", "acquire", 1)  # second
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, ATOMICS, "full", right=[[-1], [0]])
def ordinary_load_of_a_signal(correct):
    """What is to be done next depends on a signal that is read by an ordinary load."""

    @cuda.jit
    def kernel(full, out):
        if rank() == 0:
            notify(full, 1, 1)  # first
        else:
            out[0] = 0
            if correct:
                ld_acquire(full, 0)
            elif full[0] == 2:  # second
                out[0] = 1

    return launches(kernel, signals())


@planted(RaceError, COUNTS, "inbox", right=[[60], [60], [60]], ranks=3)
def waits_for_one_of_several_signals(correct):
    """Everybody's part is read after a wait for one of the parts."""

    @cuda.jit
    def kernel(inbox, arrived, out):
        me = rank()
        for peer in range(num_ranks()):
            symm_at(inbox, peer)[me] = 10 * (me + 1)  # first second
            notify(arrived[me:], peer, 1)
        wait(arrived, num_ranks() if correct else 1, "sys", "acquire", 1)
        total = 0
        for i in range(num_ranks()):
            total += inbox[i]  # first second
        out[0] = total

    return launches(kernel, ints(3), signals(3))


@planted(RaceError, COUNTS, "inbox", right=[[60], [60], [60]], ranks=3)
def waits_for_one_of_several_arrivals(correct):
    """All senders add to one counter; the receiver goes on after the first."""

    @cuda.jit
    def kernel(inbox, arrived, out):
        me = rank()
        for peer in range(num_ranks()):
            symm_at(inbox, peer)[me] = 10 * (me + 1)  # first second
            notify(arrived, peer, 1, "add")
        wait(arrived, 1, "sys", "acquire", num_ranks() if correct else 1)
        total = 0
        for i in range(num_ranks()):
            total += inbox[i]  # first second
        out[0] = total

    return launches(kernel, ints(3), signals())


@planted(RaceError, RELEASE, "slot", "relaxed", right=[[-1], [7]])
def fence_before_the_relaxed_wait(correct):
    """The fence has to follow the wait; before it, it orders other things."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            notify(full, 1, 1)
        else:
            if not correct:
                threadfence("sys")
            wait(full, 1, "sys", "relaxed", 1)
            if correct:
                threadfence("sys")
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, RELEASE, "slot", right=[[-1], [7]])
def fence_at_gpu_scope_for_a_peer(correct):
    """The wait is of scope "sys", but the fence behind it does not include the other GPU's thread."""

    @cuda.jit
    def kernel(slot, full, out):
        if rank() == 0:
            symm_at(slot, 1)[0] = 7  # first
            notify(full, 1, 1)
        else:
            wait(full, 1, "sys", "relaxed", 1)
            threadfence("sys" if correct else "gpu")
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, RELEASE, "slot", "relaxed", right=[[7]], ranks=1)
def relaxed_wait_of_a_block(correct):
    """Both blocks run on one GPU, which scope "gpu" includes; the wait has to acquire all the same."""

    @cuda.jit
    def kernel(slot, full, out):
        if cuda.blockIdx.x == 0:
            slot[0] = 7  # first
            st_release(full, 0, 1, "gpu")
        else:
            wait(full, 1, "gpu", "acquire" if correct else "relaxed", 1)
            out[0] = slot[0]  # second

    return launches(kernel, ints(), signals(), blocks=2)


@planted(RaceError, WAITS, "slots", right=[[-1], [13]])
def waits_for_the_first_of_two_releases(correct):
    """A wait for 1 may see the first release, which does not publish what was stored after it."""

    @cuda.jit
    def kernel(slots, full, out):
        if rank() == 0:
            for i in range(2):
                symm_at(slots, 1)[i] = 6 + i  # first
                notify(full, 1, i + 1)
        else:
            wait(full, 1, "sys", "acquire", 2 if correct else 1)
            out[0] = slots[0] + slots[1]  # second

    return launches(kernel, ints(2), signals())


@planted(RaceError, COUNTS, "parts", right=[[6]], ranks=1)
def first_of_several_releases(correct):
    """A count of 1 is one block's addition, and the others' stores are read, too."""

    @cuda.jit
    def kernel(parts, count, out):
        b = cuda.blockIdx.x
        if b < 3:
            parts[b] = b + 1  # first
            red_release(count, 0, 1, "gpu")
        else:
            wait(count, 1, "gpu", "acquire", 3 if correct else 1)
            out[0] = parts[0] + parts[1] + parts[2]  # second

    return launches(kernel, ints(3), signals(), blocks=4)


@planted(RaceError, RELEASE, "slot", right=[[1]], ranks=1, seed=2)
def data_is_read_whether_or_not_the_flag_is_set(correct):
    """One look at the flag: if the release has not been seen, the data are to be left alone."""

    @cuda.jit
    def kernel(slot, full, out):
        if cuda.blockIdx.x == 0:
            slot[0] = 7  # first
            st_release(full, 0, 1, "gpu")
        else:
            out[0] = 1
            is_set = ld_acquire(full, 0, "gpu") == 1
            if (is_set or not correct) and slot[0] != 7:  # second
                out[0] = 0

    return launches(kernel, ints(), signals(), blocks=2)
