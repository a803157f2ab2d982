"""Order by fence, which keeps messages to one PE in order, and by quiet, which completes them."""

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
    p,
    put,
    put_nbi,
    quiet,
    rank,
    signal_op,
    signal_wait_until,
    threadfence,
    wait,
)

from .case import RACE, RIGHT, case

FENCE = (
    "OpenSHMEM, shmem_fence: puts, AMOs and stores issued to one PE before it are delivered before those "
    "issued to the "
    "same PE after it; it guarantees order of delivery, not completion"
)
QUIET = (
    "OpenSHMEM, shmem_quiet: puts, AMOs, stores and nonblocking operations before it are complete, and "
    "visible to all PEs"
)
THREADS = (
    "OpenSHMEM, shmem_fence and shmem_quiet, notes: the program has to order operations of several "
    "threads of a PE and "
    "the call, by the rules of the threads' memory model"
)
GE = ComparisonType.CMP_GE
SET = SignalOp.SIGNAL_SET


@case(RACE, FENCE)
def signal_op_after_a_put_without_fence(world):
    """The put and the signal are two messages, which may be delivered in either order."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put(inbox, outbox, 1 - rank())  # first
        signal_op(arrived, 1, SET, 1 - rank())
        signal_wait_until(arrived, GE, 1)
        out[0] = inbox[1]  # second

    inbox, outbox = sk.zeros(2, "int32"), sk.full(2, 5, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RACE, FENCE)
def the_fence_comes_before_the_put(world):
    """The fence orders what is before it; the put comes after it, and has no order with the signal."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        fence()
        put(inbox, outbox, 1 - rank())  # first
        signal_op(arrived, 1, SET, 1 - rank())
        signal_wait_until(arrived, GE, 1)
        out[0] = inbox[1]  # second

    inbox, outbox = sk.zeros(2, "int32"), sk.full(2, 5, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RACE, FENCE)
def the_second_put_comes_after_the_fence(world):
    """The fence is between the two puts: it orders the first one before the signal, and not the second
    one."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put(inbox[0:1], outbox, 1 - rank())
        fence()
        put(inbox[1:2], outbox, 1 - rank())  # first
        signal_op(arrived, 1, SET, 1 - rank())
        signal_wait_until(arrived, GE, 1)
        out[0] = inbox[0]
        out[1] = inbox[1]  # second

    inbox, outbox = sk.zeros(2, "int32"), sk.full(1, 5, "int32")
    out = world.xp.zeros(2, "int32")
    send[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, FENCE, gives=[[5, 6]] * 2)
def one_fence_behind_two_puts(world):
    """Both puts, blocking or not, are before the fence, and the signal behind it."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put(inbox[0:1], outbox[0:1], 1 - rank())
        put_nbi(inbox[1:2], outbox[1:2], 1 - rank())
        fence()
        signal_op(arrived, 1, SET, 1 - rank())
        signal_wait_until(arrived, GE, 1)
        out[0] = inbox[0]
        out[1] = inbox[1]

    inbox, outbox = sk.zeros(2, "int32"), sk.array([5, 6], "int32")
    out = world.xp.zeros(2, "int32")
    send[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RACE, FENCE, ranks=3)
def fence_between_messages_to_two_pes(world):
    """Rank 0 puts to rank 1 and, behind a fence, signals rank 2, which fetches from rank 1: a fence orders
    for each PE by itself."""

    @cuda.jit
    def relay(inbox, outbox, ready, copy):
        if rank() == 0:
            put(inbox, outbox, 1)  # first
            fence()
            signal_op(ready, 1, SET, 2)
        if rank() == 2:
            signal_wait_until(ready, GE, 1)
            get(copy, inbox, 1)  # second

    inbox, outbox, copy = sk.zeros(1, "int32"), sk.full(1, 5, "int32"), sk.zeros(1, "int32")
    relay[1, 1, world.stream](inbox, outbox, sk.signals(1), copy)
    return world.asnumpy(copy).tolist()


@case(RIGHT, QUIET, ranks=3, gives=[[0], [0], [5]])
def quiet_between_messages_to_two_pes(world):
    """Quiet has completed the put to rank 1, for all PEs, when rank 2 is signalled."""

    @cuda.jit
    def relay(inbox, outbox, ready, copy):
        if rank() == 0:
            put(inbox, outbox, 1)
            quiet()
            signal_op(ready, 1, SET, 2)
        if rank() == 2:
            signal_wait_until(ready, GE, 1)
            get(copy, inbox, 1)

    inbox, outbox, copy = sk.zeros(1, "int32"), sk.full(1, 5, "int32"), sk.zeros(1, "int32")
    relay[1, 1, world.stream](inbox, outbox, sk.signals(1), copy)
    return world.asnumpy(copy).tolist()


@case(RIGHT, FENCE, ranks=3, gives=[[0], [5], [5]])
def one_fence_for_two_pes_each_of_which_is_signalled(world):
    """The fence orders the messages to rank 1 among themselves, and those to rank 2 among themselves."""

    @cuda.jit
    def scatter(inbox, outbox, arrived, out):
        if rank() == 0:
            for pe in range(1, 3):
                put(inbox, outbox, pe)
            fence()
            for pe in range(1, 3):
                signal_op(arrived, 1, SET, pe)
        else:
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 5, "int32")
    out = world.xp.zeros(1, "int32")
    scatter[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RACE, THREADS)
def another_thread_fences_without_having_met(world):
    """Thread 1 puts; thread 0 fences and signals, but nothing orders the put before thread 0's fence."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        i = cuda.threadIdx.x
        if i == 1:
            put(inbox, outbox, 1 - rank())  # first
        if i == 0:
            fence()
            signal_op(arrived, 1, SET, 1 - rank())
            signal_wait_until(arrived, GE, 1)
            out[0] = inbox[0]  # second

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 5, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 2, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, THREADS, gives=[[5, 5]] * 2)
def another_thread_calls_quiet_behind_syncthreads(world):
    """All threads put, meet, and thread 0 completes and signals for the block."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        i = cuda.threadIdx.x
        put(inbox[i : i + 1], outbox, 1 - rank())
        cuda.syncthreads()
        if i == 0:
            quiet()
            signal_op(arrived, 1, SET, 1 - rank())
            signal_wait_until(arrived, GE, 1)
        cuda.syncthreads()
        out[i] = inbox[1 - i]

    inbox, outbox = sk.zeros(2, "int32"), sk.full(1, 5, "int32")
    out = world.xp.zeros(2, "int32")
    send[1, 2, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RACE, FENCE)
def fence_before_the_source_is_overwritten(world):
    """A fence does not complete the non-blocking put, which may still read its source."""

    @cuda.jit
    def send(inbox, outbox):
        put_nbi(inbox, outbox, 1 - rank())  # first
        fence()
        outbox[0] = 0  # second
        quiet()

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 5, "int32")
    send[1, 1, world.stream](inbox, outbox)
    world.barrier()
    return world.asnumpy(inbox).tolist()


@case(RACE, FENCE)
def fence_after_get_nbi(world):
    """A fence says nothing about gets: their data need not be here."""

    @cuda.jit
    def fetch(values, copy, out):
        get_nbi(copy, values, 1 - rank())  # first
        fence()
        out[0] = copy[0]  # second

    values, copy = sk.full(1, 5, "int32"), sk.zeros(1, "int32")
    out = world.xp.zeros(1, "int32")
    fetch[1, 1, world.stream](values, copy, out)
    return world.asnumpy(out).tolist()


@case(RACE, "shmemkit notify: says nothing about puts still under way")
def notify_after_a_put(world):
    """The release orders the thread's own stores, not the put that NVSHMEM still carries."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put(inbox, outbox, 1 - rank())  # first
        notify(arrived, 1 - rank(), 1)
        wait(arrived, 1, "sys", "acquire", 1)
        out[0] = inbox[0]  # second

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 5, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, QUIET, gives=[[5]] * 2)
def notify_after_quiet(world):
    """Quiet completes the put; the release and the acquire then order it before the load."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put(inbox, outbox, 1 - rank())
        quiet()
        notify(arrived, 1 - rank(), 1)
        wait(arrived, 1, "sys", "acquire", 1)
        out[0] = inbox[0]

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 5, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, QUIET, gives=[[5]] * 2)
def thread_1_notifies_of_what_thread_0_has_completed(world):
    """Thread 0 puts and calls quiet, the block meets, thread 1 releases: causality is transitive."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        i = cuda.threadIdx.x
        if i == 0:
            put(inbox, outbox, 1 - rank())
            quiet()
        cuda.syncthreads()
        if i == 1:
            notify(arrived, 1 - rank(), 1)
            wait(arrived, 1, "sys", "acquire", 1)
            out[0] = inbox[0]

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 5, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 2, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RACE, "shmemkit threadfence: orders the thread's own loads and stores; it does not complete puts")
def threadfence_in_the_place_of_fence(world):
    """A fence of PTX knows nothing of the put that is under way."""

    @cuda.jit
    def send(inbox, outbox, arrived, out):
        put(inbox, outbox, 1 - rank())  # first
        threadfence("sys")
        signal_op(arrived, 1, SET, 1 - rank())
        signal_wait_until(arrived, GE, 1)
        out[0] = inbox[0]  # second

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 5, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, FENCE + "; shmemkit p: in one piece, so that it may be a flag", gives=[[5]] * 2)
def p_of_a_flag_behind_a_fence(world):
    """The flag is put behind the data, and the fence keeps them in order."""

    @cuda.jit
    def send(inbox, outbox, flag, out):
        put(inbox, outbox, 1 - rank())
        fence()
        p(flag, 1, 1 - rank())
        signal_wait_until(flag, GE, 1)
        out[0] = inbox[0]

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 5, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RACE, FENCE)
def p_of_a_flag_without_a_fence(world):
    """The two puts may be delivered in either order."""

    @cuda.jit
    def send(inbox, flag, out):
        p(inbox, 5, 1 - rank())  # first
        p(flag, 1, 1 - rank())
        signal_wait_until(flag, GE, 1)
        out[0] = inbox[0]  # second

    inbox, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, FENCE, ranks=3, gives=[[6], [0], [0]])
def atomic_inc_behind_a_fence_counts_arrivals(world):
    """Each sender's put is before its own fence, and its addition behind it; the receiver waits for all
    additions."""

    @cuda.jit
    def collect(inbox, outbox, arrivals, out):
        if rank() > 0:
            put(inbox[rank() - 1 : rank()], outbox, 0)
            fence()
            atomic_inc(arrivals, 0)
        else:
            signal_wait_until(arrivals, GE, 2)
            out[0] = inbox[0] + inbox[1]

    inbox, outbox = sk.zeros(2, "int32"), sk.full(1, 3, "int32")
    out = world.xp.zeros(1, "int32")
    collect[1, 1, world.stream](inbox, outbox, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, QUIET, gives=[[5, 0]] * 2)
def quiet_before_the_source_is_overwritten(world):
    """Quiet completes the non-blocking put, so that its source may be written, and barrier meets the
    ranks."""

    @cuda.jit
    def send(inbox, outbox):
        put_nbi(inbox, outbox, 1 - rank())
        quiet()
        outbox[0] = 0

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 5, "int32")
    send[1, 1, world.stream](inbox, outbox)
    world.barrier()
    return [int(world.asnumpy(inbox)[0]), int(world.asnumpy(outbox)[0])]
