"""Atomic operations: what they are atomic with, what they order, and protocols that are built of them."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    atomic_add,
    atomic_fetch,
    atomic_fetch_add,
    atomic_inc,
    atomic_set,
    barrier_all,
    grid_barrier,
    ld_acquire,
    num_ranks,
    rank,
    st_release,
    symm_at,
    threadfence,
    wait,
)

from .case import RACE, RIGHT, case

GUARANTEES = (
    "OpenSHMEM, Atomicity Guarantees: none for concurrent accesses by other datatypes (1), by non-atomic "
    "routines (2) or "
    "by loads and stores (3)"
)
RELAXED = (
    "PTX, Release and Acquire Patterns: an atomic operation is relaxed, and orders something only with a "
    "fence"
)
WEAK = (
    "PTX, Morally strong operations: a weak load or store is not strong, so that it races with any "
    "unordered write"
)
MIXED = "PTX, Limitations on Mixed-size Data-races: operations that overlap in part are not morally strong"


@case(RACE, WEAK)
def counter_is_read_without_order(world):
    """Block 1 reads by an ordinary load what block 0 adds to atomically."""

    @cuda.jit
    def count(counter, out):
        if cuda.blockIdx.x == 0:
            cuda.atomic.add(counter, 0, 1)  # first
        else:
            out[0] = counter[0]  # second

    counter, out = world.xp.zeros(1, "int32"), world.xp.zeros(1, "int32")
    count[2, 1, world.stream](counter, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "shmemkit grid_barrier: what each thread did before it, all threads of the grid see after it",
    gives=[[3, 3, 3]] * 2,
)
def counter_is_read_behind_a_barrier_of_the_grid(world):
    """All additions are before the barrier, all ordinary loads behind it."""

    @cuda.jit
    def count(counter, state, out):
        cuda.atomic.add(counter, 0, 1)
        grid_barrier(state)
        out[cuda.blockIdx.x] = counter[0]

    counter, out = world.xp.zeros(1, "int32"), world.xp.zeros(3, "int32")
    count[3, 1, world.stream](counter, world.xp.zeros(2, "uint32"), out)
    return world.asnumpy(out).tolist()


@case(RACE, RELAXED)
def last_block_adds_up_without_fences(world):
    """The ticket tells which block is the last one, but relaxed atomics order no other memory."""

    @cuda.jit
    def add_up(parts, tickets, out):
        parts[cuda.blockIdx.x] = cuda.blockIdx.x + 1  # first
        if cuda.atomic.add(tickets, 0, 1) == 2:
            out[0] = parts[0] + parts[1] + parts[2]  # second

    xp = world.xp
    parts, tickets, out = xp.zeros(3, "int32"), xp.zeros(1, "int32"), xp.zeros(1, "int32")
    add_up[3, 1, world.stream](parts, tickets, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, RELAXED, gives=[[6]] * 2)
def last_block_adds_up_between_fences(world):
    """A fence before each ticket and one behind it make it a release and an acquire pattern: CUDA's
    threadFenceReduction."""

    @cuda.jit
    def add_up(parts, tickets, out):
        parts[cuda.blockIdx.x] = cuda.blockIdx.x + 1
        cuda.threadfence()
        if cuda.atomic.add(tickets, 0, 1) == 2:
            cuda.threadfence()
            out[0] = parts[0] + parts[1] + parts[2]

    xp = world.xp
    parts, tickets, out = xp.zeros(3, "int32"), xp.zeros(1, "int32"), xp.zeros(1, "int32")
    add_up[3, 1, world.stream](parts, tickets, out)
    return world.asnumpy(out).tolist()


@case(RACE, RELAXED)
def lock_without_fences(world):
    """The lock excludes, but what its holder has stored is not ordered before the next holder's accesses."""

    @cuda.jit
    def deposit(lock, account):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        account[0] += 10  # first second
        cuda.atomic.exch(lock, 0, 0)

    lock, account = world.xp.zeros(1, "int32"), world.xp.zeros(1, "int32")
    deposit[3, 1, world.stream](lock, account)
    return world.asnumpy(account).tolist()


@case(RIGHT, RELAXED, gives=[[30]] * 2)
def lock_with_fences(world):
    """The fence behind the taking acquires, the one before the giving back releases."""

    @cuda.jit
    def deposit(lock, account):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        cuda.threadfence()
        account[0] += 10
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)

    lock, account = world.xp.zeros(1, "int32"), world.xp.zeros(1, "int32")
    deposit[3, 1, world.stream](lock, account)
    return world.asnumpy(account).tolist()


@case(RACE, RELAXED)
def lock_with_a_fence_on_the_way_in_only(world):
    """Without a fence before it, giving the lock back does not release what its holder has stored."""

    @cuda.jit
    def deposit(lock, account):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        cuda.threadfence()
        account[0] += 10  # first second
        cuda.atomic.exch(lock, 0, 0)

    lock, account = world.xp.zeros(1, "int32"), world.xp.zeros(1, "int32")
    deposit[3, 1, world.stream](lock, account)
    return world.asnumpy(account).tolist()


@case(
    RIGHT,
    "PTX, Release and Acquire Patterns: a batch is published by the release of a tail that is acquired",
    gives=[[0], [15]],
)
def batches_by_a_tail_index(world):
    """The consumer takes all items up to the tail that it has acquired, whatever that is."""

    @cuda.jit
    def stream_items(items, tail, out):
        if rank() == 0:
            for i in range(6):
                symm_at(items, 1)[i] = i
                st_release(symm_at(tail, 1), 0, i + 1)
        else:
            head = 0
            while head < 6:
                end = ld_acquire(tail, 0)
                while head < end:
                    out[0] += items[head]
                    head += 1

    items, out = sk.zeros(6, "int32"), world.xp.zeros(1, "int32")
    stream_items[1, 1, world.stream](items, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RACE, "PTX, Causality order: the item at the tail is stored after the tail was released")
def item_at_the_tail_is_taken_too(world):
    """The wait is satisfied by the first release, before which item 0 alone was stored; item 1 is read,
    too."""

    @cuda.jit
    def stream_items(items, tail, out):
        if rank() == 0:
            for i in range(2):
                symm_at(items, 1)[i] = i  # first
                st_release(symm_at(tail, 1), 0, i + 1)
        else:
            wait(tail, 1, "sys", "acquire", 1)
            out[0] = items[0] + items[1]  # second

    items, out = sk.zeros(2, "int32"), world.xp.zeros(1, "int32")
    stream_items[1, 1, world.stream](items, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, "PTX, Conflict and Data-races: reads do not conflict, atomic or not", gives=[[9, 9]] * 2)
def atomic_fetch_beside_an_ordinary_read(world):
    """Both only read."""

    @cuda.jit
    def read(values, out):
        out[0] = atomic_fetch(values, 1 - rank())
        out[1] = values[0]

    values, out = sk.full(1, 9, "int64"), world.xp.zeros(2, "int64")
    read[1, 1, world.stream](values, out)
    return world.asnumpy(out).tolist()


@case(RACE, GUARANTEES)
def atomic_fetch_beside_an_ordinary_write(world):
    """The owner stores by an ordinary store what the other rank fetches atomically."""

    @cuda.jit
    def step(values, out):
        values[0] = rank()  # first
        out[0] = atomic_fetch(values, 1 - rank())  # second

    values, out = sk.zeros(1, "int64"), world.xp.zeros(1, "int64")
    step[1, 1, world.stream](values, out)
    return world.asnumpy(out).tolist()


@case(RACE, GUARANTEES, ranks=3)
def local_increment_beside_a_remote_atomic(world):
    """The owner adds by an ordinary load and store, the others atomically: scenario 3 of the
    specification."""

    @cuda.jit
    def count(counter):
        if rank() == 0:
            counter[0] += 1  # first
        else:
            atomic_inc(counter, 0)  # second
        barrier_all()

    counter = sk.zeros(1, "int64")
    count[1, 1, world.stream](counter)
    return world.asnumpy(counter).tolist()


@case(RIGHT, GUARANTEES + "; shmem_barrier_all completes AMOs", ranks=3, gives=[[6], [0], [0]])
def all_ranks_add_atomically(world):
    """All use the same routine and datatype, the owner, too; the barrier completes them."""

    @cuda.jit
    def count(counter):
        atomic_add(counter, rank() + 1, 0)
        barrier_all()

    counter = sk.zeros(1, "int64")
    count[1, 1, world.stream](counter)
    return world.asnumpy(counter).tolist()


@case(RACE, GUARANTEES + "; " + MIXED)
def atomics_of_two_sizes_on_the_same_bytes(world):
    """Rank 0 adds to a word of 8 bytes, rank 1 to its lower half, as a word of 4."""

    @cuda.jit
    def count(whole, halves):
        if rank() == 0:
            atomic_add(whole, 1, 0)  # first
        else:
            atomic_add(halves, 1, 0)  # second
        barrier_all()

    whole = sk.zeros(1, "int64")
    count[1, 1, world.stream](whole, whole.view("int32"))
    return world.asnumpy(whole).tolist()


@case(RACE, GUARANTEES)
def atomics_of_two_types_on_the_same_bytes(world):
    """One rank sets an integer, the other fetches and adds a float in the same four bytes."""

    @cuda.jit
    def count(floats, integers):
        if rank() == 0:
            atomic_fetch_add(integers, 1, 0)  # first
        else:
            atomic_set(floats, 1.0, 0)  # second
        barrier_all()

    floats = sk.zeros(1, "float32")
    count[1, 1, world.stream](floats, floats.view("int32"))
    return world.asnumpy(floats).tolist()


@case(RACE, WEAK)
def flag_is_stored_by_an_ordinary_store(world):
    """The acquire load is strong, but the store that it polls for is weak: the flag is no signal."""

    @cuda.jit
    def send(box, flag, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        symm_at(flag, 1 - rank())[0] = 1  # first
        while ld_acquire(flag, 0) != 1:  # second
            pass
        out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](box, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RACE, WEAK)
def spin_on_an_ordinary_load(world):
    """The flag is released properly, but looked at by an ordinary load, which is weak and orders nothing."""

    @cuda.jit
    def pass_on(box, flag, out):
        if cuda.blockIdx.x == 0:
            box[0] = 5  # first
            st_release(flag, 0, 1, "gpu")  # first
        else:
            while flag[0] != 1:  # second
                pass
            out[0] = box[0]  # second

    box, out = world.xp.zeros(1, "int32"), world.xp.zeros(1, "int32")
    pass_on[2, 1, world.stream](box, world.xp.zeros(1, "int32"), out)
    return world.asnumpy(out).tolist()


@case(RACE, "shmemkit atomics: atomic among each other; none orders anything else")
def atomic_fetch_as_a_wait(world):
    """The loop ends when the addition is there; neither it nor the fetches order the stores before it."""

    @cuda.jit
    def send(box, count, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        atomic_inc(count, 1 - rank())
        while atomic_fetch(count, rank()) < 1:
            pass
        out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](box, sk.zeros(1, "int64"), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, RELAXED, gives=[[5]] * 2)
def relaxed_atomics_between_fences(world):
    """Store, fence, atomic; atomic that reads it, fence, load: a release pattern and an acquire pattern."""

    @cuda.jit
    def pass_on(box, flag, out):
        if cuda.blockIdx.x == 0:
            box[0] = 5
            threadfence("gpu", "acq_rel")
            cuda.atomic.exch(flag, 0, 1)
        else:
            while cuda.atomic.add(flag, 0, 0) != 1:
                pass
            threadfence("gpu", "acq_rel")
            out[0] = box[0]

    box, out = world.xp.zeros(1, "int32"), world.xp.zeros(1, "int32")
    pass_on[2, 1, world.stream](box, world.xp.zeros(1, "int32"), out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "PTX, Atomicity: no two blocks get one ticket, so that they write different elements",
    gives=[list(range(6))] * 2,
)
def work_is_handed_out_by_tickets(world):
    """Each ticket is one block's alone, and so is the element that it writes."""

    @cuda.jit
    def work(tickets, out):
        ticket = cuda.atomic.add(tickets, 0, 1)
        while ticket < 6:
            out[ticket] = ticket
            ticket = cuda.atomic.add(tickets, 0, 1)

    tickets, out = world.xp.zeros(1, "int32"), world.xp.zeros(6, "int32")
    work[3, 1, world.stream](tickets, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, "PTX, Conflict and Data-races: these bytes do not overlap", gives=[[1, 2]] * 2)
def atomics_of_two_types_on_neighbouring_words(world):
    """Rank 0 adds to the lower half, rank 1 to the upper half of eight bytes, on all ranks."""

    @cuda.jit
    def count(low, high):
        for pe in range(num_ranks()):
            if rank() == 0:
                atomic_add(low, 1, pe)
            else:
                atomic_add(high, 2, pe)
        barrier_all()

    words = sk.zeros(2, "int32")
    count[1, 1, world.stream](words[:1], words[1:].view("uint32"))
    return np.asarray(world.asnumpy(words)).tolist()
