"""Bugs of buffers that are used again: acknowledgements, double buffers, wrap-around, flags with the data."""

import numpy as np
from numba import cuda

from shmemkit.device import (
    barrier_all_block,
    copy_block,
    ld_acquire,
    notify,
    num_ranks,
    rank,
    st_release,
    symm_at,
    wait,
)
from shmemkit.emu import DeadlockError, OutOfBoundsError, RaceError

from .plant import (
    BARRIERS,
    BOUNDS,
    CREDITS,
    DOUBLE_BUFFER,
    PACKETS,
    PROGRESS,
    RELEASE,
    WORDS,
    WRONG,
    ints,
    launches,
    planted,
    private,
    signals,
)


def queue(acknowledge=True, slot_of=lambda i: i % 2, round_of=lambda i: i // 2):
    """Five items of two elements from rank 0 to rank 1 through two slots, as the Queue sends them."""
    slot_of, round_of = cuda.jit(device=True)(slot_of), cuda.jit(device=True)(round_of)

    @cuda.jit
    def kernel(slots, full, empty, out):
        thread = cuda.threadIdx.x
        for i in range(5):
            slot, turn = slot_of(i), i // 2
            if rank() == 0:
                if acknowledge:
                    wait(empty[slot:], 1, "sys", "acquire", round_of(i))
                symm_at(slots, 1)[slot, thread] = 10 * i + thread  # first second
                cuda.syncthreads()
                if thread == 0:
                    notify(full[slot:], 1, turn + 1)
            else:
                wait(full[slot:], 1, "sys", "acquire", turn + 1)
                out[2 * i + thread] = slots[slot, thread]  # first second
                cuda.syncthreads()
                if thread == 0:
                    notify(empty[slot:], 0, turn + 1)

    return launches(kernel, ints((2, 2)), signals(2), signals(2), threads=2, out=10)


ITEMS = [[-1] * 10, [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]]


@planted(RaceError, CREDITS, "slots", right=ITEMS, source=[queue])
def reuse_before_consumption(correct):
    """The sender does not wait until a slot has been emptied."""
    return queue(acknowledge=correct)


@planted(RaceError, CREDITS, "slots", right=ITEMS, source=[queue])
def off_by_one_wrap(correct):
    """The sender takes the third item for one of the first round."""
    return queue(round_of=(lambda i: i // 2) if correct else (lambda i: i // 3))


@planted(DeadlockError, PROGRESS, "waits for empty[1] on rank 0 >= 1, now 0", right=ITEMS)
def round_begins_too_early(correct):
    """The sender waits for slot 1 to be emptied before it has filled it."""
    return queue(round_of=(lambda i: i // 2) if correct else (lambda i: (i + 1) // 2))


@planted(OutOfBoundsError, BOUNDS, "empty[2] is out of bounds: empty is uint64 (2,) on rank 0", right=ITEMS)
def slot_that_there_is_not(correct):
    """The slots are counted from 0 to n_slots."""
    return queue(slot_of=(lambda i: i % 2) if correct else (lambda i: i % 3))


def all_gather(buffer_of):
    """Rounds of an all-gather by pushes: a rank in round r + 1 has seen everybody's part of round r."""
    buffer_of = cuda.jit(device=True)(buffer_of)

    @cuda.jit
    def kernel(inbox, arrived, out):
        me, n, thread = rank(), num_ranks(), cuda.threadIdx.x
        for r in range(4):
            b = buffer_of(r)
            symm_at(inbox, thread)[b, me] = 10 * r + me  # first second
            notify(arrived[me:], thread, r + 1)
            wait(arrived[thread:], 1, "sys", "acquire", r + 1)
            cuda.syncthreads()
            if thread == 0:
                out[r] = 0
                for i in range(n):
                    out[r] += inbox[b, i]  # first second
            cuda.syncthreads()

    return launches(kernel, ints((2, 3)), signals(3), threads=3, out=4)


SUMS = [[3, 33, 63, 93]] * 3


@planted(RaceError, DOUBLE_BUFFER, "inbox", right=SUMS, ranks=3, seed=0, source=[all_gather])
def missing_double_buffer(correct):
    """One buffer: the parts of the next round come while slower ranks still read those of this one."""
    return all_gather((lambda r: r % 2) if correct else (lambda r: 0))


@planted(RaceError, DOUBLE_BUFFER, "inbox", right=SUMS, ranks=3, seed=0, source=[all_gather])
def double_buffer_with_the_wrong_parity(correct):
    """Two rounds at a time use the same buffer."""
    return all_gather((lambda r: r % 2) if correct else (lambda r: r // 2 % 2))


@planted(RaceError, BARRIERS, "mine", right=[[11, 21, 31], [10, 20, 30]])
def refills_what_peers_still_pull(correct):
    """Ranks pull from each other; each goes on to the next round when it has what it wants."""

    @cuda.jit
    def kernel(mine, arrivals, epoch, out):
        thread = cuda.threadIdx.x
        for r in range(3):
            if thread == 0:
                mine[0] = 10 * (r + 1) + rank()  # first second
            barrier_all_block(arrivals, epoch)
            copy_block(out[r : r + 1], symm_at(mine, 1 - rank()))  # first second
            if correct:
                barrier_all_block(arrivals, epoch)

    return launches(kernel, ints(), signals(2), private(1, "uint64"), threads=2, out=3)


def exchange(flag_of, buffer_of):
    """Words of 32 bits of data and 32 bits of flag in one store: no other signal is needed."""
    flag_of, buffer_of = cuda.jit(device=True)(flag_of), cuda.jit(device=True)(buffer_of)

    @cuda.jit
    def kernel(words, out):
        for r in range(4):
            b = buffer_of(r)
            st_release(symm_at(words, 1 - rank()), b, flag_of(r) << 32 | (10 * r + rank()))
            word = ld_acquire(words, b)
            while word >> 32 != flag_of(r):
                word = ld_acquire(words, b)
            out[r] = word & 0xFFFFFFFF

    return launches(kernel, ints(2, "int64"), out=4)


EXCHANGED = [[1, 11, 21, 31], [0, 10, 20, 30]]


@planted(WRONG, PACKETS, right=EXCHANGED, seed=2)
def flag_that_does_not_change(correct):
    """What the slot holds from the round before is taken for new."""
    return exchange((lambda r: r + 1) if correct else (lambda r: 1), lambda r: r % 2)


@planted(DeadlockError, PACKETS, "waits for words[0]", right=EXCHANGED, seed=0)
def word_overwritten_by_the_next_round(correct):
    """Without a second buffer the next word may come before this one has been read."""
    return exchange(lambda r: r + 1, (lambda r: r % 2) if correct else (lambda r: 0))


@planted(RaceError, RELEASE, "data", right=[[-1], [7]])
def flag_and_data_in_two_words(correct):
    """The data is not in the word that holds the flag, and nothing orders the two stores."""

    @cuda.jit
    def kernel(data, words, out):
        if rank() == 0:
            st_release(symm_at(words, 1), 0, 1 << 32 | 7)
            symm_at(data, 1)[0] = 7  # first
        else:
            word = ld_acquire(words, 0)
            while word >> 32 != 1:
                word = ld_acquire(words, 0)
            if correct:
                out[0] = word & 0xFFFFFFFF
            else:
                out[0] = data[0]  # second

    return launches(kernel, ints(), ints(1, "int64"))


@planted(WRONG, WORDS, right=[[0, 1, 2, 3, 4]], ranks=1)
def dropped_tail(correct):
    """The elements are shared by whole turns of the block; what is left over is not copied."""

    @cuda.jit
    def kernel(x, out):
        n = x.shape[0]
        end = n if correct else n // cuda.blockDim.x * cuda.blockDim.x
        for i in range(cuda.threadIdx.x, end, cuda.blockDim.x):
            out[i] = x[i]

    return launches(kernel, lambda world: np.arange(5, dtype="int32"), threads=2, out=5)


@planted(
    OutOfBoundsError,
    BOUNDS,
    "x[5] is out of bounds: x is int32 (5,) on rank 0",
    right=[[0, 1, 2, 3, 4]],
    ranks=1,
)
def no_bound_on_the_tail(correct):
    """More threads than elements, and no condition."""

    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        if i < x.shape[0] or not correct:
            out[i] = x[i]

    return launches(kernel, lambda world: np.arange(5, dtype="int32"), blocks=3, threads=2, out=5)


@planted(WRONG, WORDS, right=[[0, 10, 20], [0, 10, 20], [0, 10, 20]], ranks=3)
def ring_forwards_the_wrong_part(correct):
    """Each step of a ring passes on the rank's own part instead of the one that has just come."""

    @cuda.jit
    def kernel(parts, arrived, out):
        me, n = rank(), num_ranks()
        following = (me + 1) % n
        parts[me] = 10 * me
        for step in range(n - 1):
            part = (me - step) % n if correct else me
            symm_at(parts, following)[part] = parts[part]
            notify(arrived, following, 1, "add")
            wait(arrived, 1, "sys", "acquire", step + 1)
        for i in range(n):
            out[i] = parts[i]

    return launches(kernel, ints(3), signals(), out=3)
