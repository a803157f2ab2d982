"""Bugs of signals that come with messages: what a signal says, and for which message it stands."""

from numba import cuda

from shmemkit.device import (
    ComparisonType,
    SignalOp,
    fence,
    get,
    put,
    put_signal,
    put_signal_nbi,
    quiet,
    rank,
    signal_op,
    signal_wait_until,
)
from shmemkit.emu import RaceError

from .plant import COUNTS, CREDITS, PUTS, SIGNALS, filled, ints, launches, planted, signals

GE, EQ = ComparisonType.CMP_GE, ComparisonType.CMP_EQ
SET, ADD = SignalOp.SIGNAL_SET, SignalOp.SIGNAL_ADD


def boxes(n=1):
    """inbox, outbox and two signals"""
    return ints(n), filled(5, n), signals(2)


@planted(RaceError, PUTS, "inbox", right=[[5]] * 2)
def put_signal_and_no_wait(correct):
    """The signal stands for the data of its own put, for who waits for it."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        put_signal(inbox, outbox, arrived, 1, SET, 1 - rank())  # first
        if correct:
            signal_wait_until(arrived, GE, 1)
        out[0] = inbox[0]  # second

    return launches(kernel, *boxes())


@planted(RaceError, COUNTS, "inbox", right=[[5, 5]] * 2)
def counter_of_two_messages_awaited_for_one(correct):
    """Two messages add to one counter; a count of 1 may be the other message's."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        put_signal_nbi(inbox[0:1], outbox, arrived, 1, ADD, 1 - rank())  # first
        put_signal_nbi(inbox[1:2], outbox, arrived, 1, ADD, 1 - rank())  # first
        signal_wait_until(arrived, GE, 2 if correct else 1)
        out[0] = inbox[0]  # second
        out[1] = inbox[1]  # second
        quiet()

    return launches(kernel, *boxes(2), out=2)


def items(n_slots, lead, acknowledge="after", wait=True):
    """Four items from rank 0 to rank 1 through slots, `lead` ahead at most. Rank 1 acknowledges each "after"
    it has read it, or "before"."""

    @cuda.jit
    def kernel(slots, outbox, signals, out):
        full, empty = signals[0:1], signals[1:2]
        for i in range(4):
            slot = i % n_slots
            if rank() == 0:
                if wait:
                    signal_wait_until(empty, GE, max(i + 1 - lead, 0))
                outbox[0] = 20 + i
                put_signal(slots[slot : slot + 1], outbox, full, i + 1, SET, 1)  # first
                fence()
            else:
                signal_wait_until(full, GE, i + 1)
                if acknowledge == "before":
                    signal_op(empty, i + 1, SET, 0)
                out[i] = slots[slot]  # second
                fence()
                if acknowledge == "after":
                    signal_op(empty, i + 1, SET, 0)

    return launches(kernel, *boxes(2), out=4)


ITEMS = [[-1] * 4, [20, 21, 22, 23]]


@planted(RaceError, CREDITS, "slots", right=ITEMS, source=[items])
def slot_is_reused_without_back_pressure(correct):
    """The sender fills the slot again without knowing that the receiver has read it."""
    return items(1, 1, wait=correct)


@planted(RaceError, CREDITS, "slots", right=ITEMS, source=[items])
def acknowledgement_comes_before_the_read(correct):
    """The receiver acknowledges as soon as the item is there, and reads it after that."""
    return items(1, 1, "after" if correct else "before")


@planted(RaceError, CREDITS, "slots", right=ITEMS, source=[items])
def two_slots_with_a_wait_that_is_one_round_short(correct):
    """Item i goes to slot i % 2, which is free when item i - 2 has been read; the sender waits for item i -
    3."""
    return items(2, 2 if correct else 3)


@planted(RaceError, SIGNALS, "signals", right=[[-1] * 3, [30, 31, 32]])
def message_flag_reset_after_the_answer(correct):
    """The receiver puts the flag back to 0 before it answers; the sender sets it again after the answer
    only."""

    @cuda.jit
    def kernel(slot, outbox, signals, out):
        full, empty = signals[0:1], signals[1:2]
        for i in range(3):
            if rank() == 0:
                outbox[0] = 30 + i
                put_signal(slot[:1], outbox, full, 1, SET, 1)  # first second
                signal_wait_until(empty, EQ, 1)
                signal_op(empty, 0, SET, 0)
                signal_wait_until(empty, EQ, 0)
            else:
                signal_wait_until(full, EQ, 1)
                out[i] = slot[0]
                if not correct:
                    fence()
                    signal_op(empty, 1, SET, 0)
                signal_op(full, 0, SET, 1)  # first second
                signal_wait_until(full, EQ, 0)
                if correct:
                    fence()
                    signal_op(empty, 1, SET, 0)

    return launches(kernel, *boxes(), out=3)


@planted(RaceError, COUNTS, "inbox", right=[[15], [-1], [-1], [-1]], ranks=4)
def counter_of_three_writers_awaited_for_the_first(correct):
    """The additions are atomic among themselves; the receiver goes on after one, and reads what all have
    sent."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() > 0:
            put_signal(inbox[rank() - 1 : rank()], outbox, arrived, 1, ADD, 0)  # first
        else:
            signal_wait_until(arrived, GE, 3 if correct else 1)
            out[0] = inbox[0] + inbox[1] + inbox[2]  # second

    return launches(kernel, ints(3), filled(5), signals())


@planted(RaceError, SIGNALS, "arrived", right=[[10], [-1], [-1]], ranks=3)
def two_ranks_set_one_signal(correct):
    """Nothing orders two sets of one word: which value stays, and which message it stood for, is left to
    chance."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() > 0:
            operator = ADD if correct else SET
            put_signal(inbox[rank() - 1 : rank()], outbox, arrived, 1, operator, 0)  # first second
        elif correct:
            signal_wait_until(arrived, GE, 2)
            out[0] = inbox[0] + inbox[1]

    return launches(kernel, ints(2), filled(5), signals())


@planted(RaceError, SIGNALS, "arrived", right=[[5], [-1], [-1]], ranks=3)
def one_rank_sets_a_signal_that_another_adds_to(correct):
    """Signals of different operators are not atomic with respect to each other."""

    @cuda.jit
    def kernel(arrived, out):
        if rank() == 1:
            signal_op(arrived, 4, ADD if correct else SET, 0)  # first
        if rank() == 2:
            signal_op(arrived, 1, ADD, 0)  # second
        if rank() == 0 and correct:
            signal_wait_until(arrived, GE, 5)
            out[0] = arrived[0]

    return launches(kernel, signals())


@planted(RaceError, PUTS, "inbox", right=[[5, 5]] * 2)
def waits_for_the_signal_of_the_other_message(correct):
    """Two messages have a signal each, and the receiver waits for the first one twice."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        for i in range(2):
            put_signal(inbox[i : i + 1], outbox, arrived[i:], 1, SET, 1 - rank())  # first
        for i in range(2):
            signal_wait_until(arrived[i:] if correct else arrived, GE, 1)
            out[i] = inbox[i]  # second

    return launches(kernel, *boxes(2), out=2)


@planted(RaceError, PUTS, "inbox", right=[[-1], [-1], [5]], ranks=3)
def signal_is_passed_on_before_the_data_have_come(correct):
    """Rank 1 has seen its data arrive when it signals rank 2, which fetches them from there."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, copy, out):
        if rank() == 0:
            put_signal(inbox, outbox, arrived, 1, SET, 1)  # first
        elif rank() == 1:
            if correct:
                signal_wait_until(arrived, GE, 1)
            signal_op(arrived, 1, SET, 2)
        else:
            signal_wait_until(arrived, GE, 1)
            get(copy, inbox, 1)  # second
            out[0] = copy[0]

    return launches(kernel, *boxes(), ints())


@planted(RaceError, PUTS, "inbox", right=[[-1], [-1], [5]], ranks=3)
def signal_of_a_third_rank_for_a_put_under_way(correct):
    """Rank 0 puts to rank 2, then signals rank 1, which signals rank 2: that says nothing about the put."""

    @cuda.jit
    def kernel(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox, outbox, 2)  # first
            if correct:
                quiet()
            else:
                fence()
            signal_op(arrived, 1, SET, 1)
        else:
            signal_wait_until(arrived, GE, 1)
            if rank() == 1:
                signal_op(arrived, 1, SET, 2)
            else:
                out[0] = inbox[0]  # second

    return launches(kernel, *boxes())
