"""Order by OpenSHMEM's signals: what a signal says, and for which message it stands."""

from numba import cuda

import shmemkit as sk
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

from .case import RACE, RIGHT, case

OWN_DATA = (
    "OpenSHMEM, shmem_put_signal, notes: the signal indicates only the delivery of its own dest data; "
    "there is no "
    "implied ordering with another data transfer"
)
SEEN = (
    "OpenSHMEM, point-to-point synchronization: a wait orders what precedes an update that satisfies it, "
    "not later ones"
)
SAME_OPERATOR = (
    "OpenSHMEM, Atomicity Guarantees for Signaling Operations: atomic with respect to others that use the "
    "same operator"
)
GE, EQ = ComparisonType.CMP_GE, ComparisonType.CMP_EQ
SET, ADD = SignalOp.SIGNAL_SET, SignalOp.SIGNAL_ADD


def boxes(world, n=1):
    """inbox, outbox, two signals and what a kernel returns"""
    return sk.zeros(n, "int32"), sk.full(n, 5, "int32"), sk.signals(2), world.xp.zeros(n, "int32")


@case(RIGHT, OWN_DATA, gives=[[5]] * 2)
def put_signal_and_wait(world):
    """The signal stands for the data of its own put."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put_signal(inbox, outbox, arrived, 1, SET, 1 - rank())
        signal_wait_until(arrived, GE, 1)
        out[0] = inbox[0]

    arrays = boxes(world)
    send[1, 1, world.stream](*arrays)
    return world.asnumpy(arrays[-1]).tolist()


@case(RACE, OWN_DATA)
def signal_of_the_last_of_two_puts(world):
    """The put before the put_signal is another message, which its signal does not stand for."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put(inbox[0:1], outbox, 1 - rank())  # first
        put_signal(inbox[1:2], outbox, arrived, 1, SET, 1 - rank())
        signal_wait_until(arrived, GE, 1)
        out[0] = inbox[0]  # second
        out[1] = inbox[1]

    arrays = boxes(world, 2)
    send[1, 1, world.stream](*arrays)
    return world.asnumpy(arrays[-1]).tolist()


@case(RIGHT, OWN_DATA + "; shmem_fence", gives=[[5, 5]] * 2)
def signal_of_the_last_of_two_puts_with_a_fence(world):
    """The fence delivers the first put before the second one and its signal."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put(inbox[0:1], outbox, 1 - rank())
        fence()
        put_signal(inbox[1:2], outbox, arrived, 1, SET, 1 - rank())
        signal_wait_until(arrived, GE, 1)
        out[0] = inbox[0]
        out[1] = inbox[1]

    arrays = boxes(world, 2)
    send[1, 1, world.stream](*arrays)
    return world.asnumpy(arrays[-1]).tolist()


@case(RACE, OWN_DATA)
def counter_of_two_messages_awaited_for_one(world):
    """Two messages add to one counter; a count of 1 may be the other message's."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put_signal_nbi(inbox[0:1], outbox, arrived, 1, ADD, 1 - rank())  # first
        put_signal_nbi(inbox[1:2], outbox, arrived, 1, ADD, 1 - rank())  # first
        signal_wait_until(arrived, GE, 1)
        out[0] = inbox[0]  # second
        out[1] = inbox[1]  # second
        quiet()

    arrays = boxes(world, 2)
    send[1, 1, world.stream](*arrays)
    return world.asnumpy(arrays[-1]).tolist()


@case(RIGHT, OWN_DATA, gives=[[5, 5]] * 2)
def counter_of_two_messages_awaited_for_both(world):
    """A count of 2 is reached when both messages have come, in whatever order."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put_signal_nbi(inbox[0:1], outbox, arrived, 1, ADD, 1 - rank())
        put_signal_nbi(inbox[1:2], outbox, arrived, 1, ADD, 1 - rank())
        signal_wait_until(arrived, GE, 2)
        out[0] = inbox[0]
        out[1] = inbox[1]
        quiet()

    arrays = boxes(world, 2)
    send[1, 1, world.stream](*arrays)
    return world.asnumpy(arrays[-1]).tolist()


@case(RACE, OWN_DATA)
def slot_is_reused_without_back_pressure(world):
    """The sender fills the slot again without knowing that the receiver has read it."""

    @cuda.jit
    def stream_items(slot, outbox, full, out):
        for i in range(3):
            if rank() == 0:
                put_signal(slot, outbox, full, i + 1, SET, 1)  # first
            else:
                signal_wait_until(full, GE, i + 1)
                out[i] = slot[0]  # second

    slot, outbox, full, out = boxes(world, 3)
    stream_items[1, 1, world.stream](slot[:1], outbox, full, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, SEEN, gives=[[0, 0, 0], [10, 11, 12]])
def slot_is_reused_after_an_acknowledgement(world):
    """The receiver acknowledges each item after it has read it, and the sender waits for that."""

    @cuda.jit
    def stream_items(slot, outbox, signals, out):
        full, empty = signals[0:1], signals[1:2]
        for i in range(3):
            if rank() == 0:
                signal_wait_until(empty, GE, i)
                outbox[0] = 10 + i
                put_signal(slot, outbox, full, i + 1, SET, 1)
            else:
                signal_wait_until(full, GE, i + 1)
                out[i] = slot[0]
                fence()
                signal_op(empty, i + 1, SET, 0)

    slot, outbox, signals, out = boxes(world, 3)
    stream_items[1, 1, world.stream](slot[:1], outbox, signals, out)
    return world.asnumpy(out).tolist()


@case(RACE, SEEN)
def acknowledgement_comes_before_the_read(world):
    """The receiver acknowledges as soon as the item is there, and reads it after that."""

    @cuda.jit
    def stream_items(slot, outbox, signals, out):
        full, empty = signals[0:1], signals[1:2]
        for i in range(3):
            if rank() == 0:
                signal_wait_until(empty, GE, i)
                put_signal(slot, outbox, full, i + 1, SET, 1)  # first
            else:
                signal_wait_until(full, GE, i + 1)
                signal_op(empty, i + 1, SET, 0)
                out[i] = slot[0]  # second

    slot, outbox, signals, out = boxes(world, 3)
    stream_items[1, 1, world.stream](slot[:1], outbox, signals, out)
    return world.asnumpy(out).tolist()


@case(RACE, SEEN)
def two_slots_with_a_wait_that_is_one_round_short(world):
    """Item i goes to slot i % 2, which is free when item i - 2 has been read; the sender waits for item i -
    3."""

    @cuda.jit
    def stream_items(slots, outbox, signals, out):
        full, empty = signals[0:1], signals[1:2]
        for i in range(4):
            if rank() == 0:
                signal_wait_until(empty, GE, max(i - 2, 0))
                put_signal(slots[i % 2 : i % 2 + 1], outbox, full, i + 1, SET, 1)  # first
                fence()
            else:
                signal_wait_until(full, GE, i + 1)
                out[i] = slots[i % 2]  # second
                signal_op(empty, i + 1, SET, 0)  # first, second: nothing orders two of them

    slots, outbox, signals, out = boxes(world, 4)
    stream_items[1, 1, world.stream](slots[:2], outbox, signals, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, SEEN, gives=[[0] * 4, [20, 21, 22, 23]])
def two_slots_with_acknowledgements(world):
    """The sender is two items ahead at most; a fence keeps the messages, and so the settings of one signal,
    in order."""

    @cuda.jit
    def stream_items(slots, outbox, signals, out):
        full, empty = signals[0:1], signals[1:2]
        for i in range(4):
            if rank() == 0:
                signal_wait_until(empty, GE, max(i - 1, 0))
                outbox[0] = 20 + i
                put_signal(slots[i % 2 : i % 2 + 1], outbox, full, i + 1, SET, 1)
                fence()
            else:
                signal_wait_until(full, GE, i + 1)
                out[i] = slots[i % 2]
                fence()
                signal_op(empty, i + 1, SET, 0)

    slots, outbox, signals, out = boxes(world, 4)
    stream_items[1, 1, world.stream](slots[:2], outbox, signals, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, SEEN, gives=[[0, 0, 0], [30, 31, 32]])
def flag_that_is_set_reset_and_set_again(world):
    """The receiver puts the flag back to 0 before it answers; the sender sets it again after the answer
    only."""

    @cuda.jit
    def stream_items(slot, outbox, signals, out):
        full, empty = signals[0:1], signals[1:2]
        for i in range(3):
            if rank() == 0:
                outbox[0] = 30 + i
                put_signal(slot, outbox, full, 1, SET, 1)
                signal_wait_until(empty, EQ, 1)
                signal_op(empty, 0, SET, 0)
                signal_wait_until(empty, EQ, 0)
            else:
                signal_wait_until(full, EQ, 1)
                out[i] = slot[0]
                signal_op(full, 0, SET, 1)
                signal_wait_until(full, EQ, 0)
                fence()
                signal_op(empty, 1, SET, 0)

    slot, outbox, signals, out = boxes(world, 3)
    stream_items[1, 1, world.stream](slot[:1], outbox, signals, out)
    return world.asnumpy(out).tolist()


@case(RACE, SEEN, ranks=3)
def counter_of_two_writers_awaited_for_the_first(world):
    """The receiver goes on when one of the two senders has arrived, and reads what both have sent."""

    @cuda.jit
    def collect(inbox, outbox, arrived, out):
        if rank() > 0:
            put_signal(inbox[rank() - 1 : rank()], outbox, arrived, 1, ADD, 0)  # first
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0] + inbox[1]  # second

    arrays = boxes(world, 2)
    collect[1, 1, world.stream](*arrays)
    return world.asnumpy(arrays[-1]).tolist()


@case(RIGHT, OWN_DATA, ranks=4, gives=[[15], [0], [0], [0]])
def counter_of_three_writers_awaited_for_all(world):
    """The additions are atomic among themselves, and a count of 3 needs each of them."""

    @cuda.jit
    def collect(inbox, outbox, arrived, out):
        if rank() > 0:
            put_signal(inbox[rank() - 1 : rank()], outbox, arrived, 1, ADD, 0)
        else:
            signal_wait_until(arrived, GE, 3)
            out[0] = inbox[0] + inbox[1] + inbox[2]

    inbox, outbox, signals, out = boxes(world, 3)
    collect[1, 1, world.stream](inbox, outbox, signals, out)
    return world.asnumpy(out[:1]).tolist()


@case(RACE, SAME_OPERATOR + "; of two sets nobody knows which one stays", ranks=3)
def two_ranks_set_one_signal(world):
    """Nothing orders the two sets of one word: which value stays, and which message it stood for, is left to
    chance."""

    @cuda.jit
    def collect(inbox, outbox, arrived, out):
        if rank() > 0:
            put_signal(inbox[rank() - 1 : rank()], outbox, arrived, rank(), SET, 0)  # first second

    arrays = boxes(world, 2)
    collect[1, 1, world.stream](*arrays)
    world.barrier()
    return world.asnumpy(arrays[-1]).tolist()


@case(RACE, SAME_OPERATOR, ranks=3)
def one_rank_sets_a_signal_that_another_adds_to(world):
    """Signals of different operators are not atomic with respect to each other."""

    @cuda.jit
    def mix(arrived):
        if rank() == 1:
            signal_op(arrived, 4, SET, 0)  # first
        if rank() == 2:
            signal_op(arrived, 1, ADD, 0)  # second

    arrived = sk.signals(1)
    mix[1, 1, world.stream](arrived)
    world.barrier()
    return world.asnumpy(arrived).tolist()


@case(RACE, OWN_DATA)
def waits_for_the_signal_of_the_other_slot(world):
    """Two messages have a signal each, and the receiver waits for the first one twice."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        for i in range(2):
            put_signal(inbox[i : i + 1], outbox, arrived[i:], 1, SET, 1 - rank())  # first
        for i in range(2):
            signal_wait_until(arrived, GE, 1)
            out[i] = inbox[i]  # second

    arrays = boxes(world, 2)
    send[1, 1, world.stream](*arrays)
    return world.asnumpy(arrays[-1]).tolist()


@case(
    RIGHT,
    "OpenSHMEM, shmem_put_signal: the signal indicates delivery; the wait and the next signal are in order",
    ranks=3,
    gives=[[0], [0], [5]],
)
def signal_is_passed_on_to_who_fetches(world):
    """Rank 1 has seen its data arrive when it signals rank 2, which fetches them from there."""

    @cuda.jit
    def relay(inbox, outbox, arrived, copy):
        if rank() == 0:
            put_signal(inbox, outbox, arrived, 1, SET, 1)
        elif rank() == 1:
            signal_wait_until(arrived, GE, 1)
            fence()
            signal_op(arrived, 1, SET, 2)
        else:
            signal_wait_until(arrived, GE, 1)
            get(copy, inbox, 1)

    inbox, outbox, copy = sk.zeros(1, "int32"), sk.full(1, 5, "int32"), sk.zeros(1, "int32")
    relay[1, 1, world.stream](inbox, outbox, sk.signals(1), copy)
    return world.asnumpy(copy).tolist()


@case(RACE, OWN_DATA, ranks=3)
def signal_of_a_third_rank_for_a_put_under_way(world):
    """Rank 0 puts to rank 2, then signals rank 1, which signals rank 2: that says nothing about the put to
    rank 2."""

    @cuda.jit
    def relay(inbox, outbox, arrived, out):
        if rank() == 0:
            put(inbox, outbox, 2)  # first
            fence()
            signal_op(arrived, 1, SET, 1)
        elif rank() == 1:
            signal_wait_until(arrived, GE, 1)
            signal_op(arrived, 1, SET, 2)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    arrays = boxes(world)
    relay[1, 1, world.stream](*arrays)
    return world.asnumpy(arrays[-1]).tolist()
