"""Bugs of atomic operations: what they are atomic with, what they order, and protocols that are built of
them."""

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
    red_release,
    st_release,
    symm_at,
    threadfence,
)
from shmemkit.emu import RaceError

from .plant import ATOMICS, COUNTS, RACE, RELEASE, filled, ints, launches, planted, private, result, signals


@planted(RaceError, ATOMICS, "counter", right=[[3, 3, 3]] * 2)
def counter_is_read_without_order(correct):
    """Blocks read by an ordinary load what the others add to atomically."""

    @cuda.jit
    def kernel(counter, state, out):
        cuda.atomic.add(counter, 0, 1)  # first
        if correct:
            grid_barrier(state)
        out[cuda.blockIdx.x] = counter[0]  # second

    return launches(kernel, private(), private(2, "uint32"), blocks=3, out=3)


@planted(RaceError, RELEASE, "parts", right=[[6]] * 2)
def last_block_adds_up_without_fences(correct):
    """The ticket tells which block is the last one, but relaxed atomics order no other memory."""

    @cuda.jit
    def kernel(parts, tickets, out):
        parts[cuda.blockIdx.x] = cuda.blockIdx.x + 1  # first
        if correct:
            cuda.threadfence()
        if cuda.atomic.add(tickets, 0, 1) == 2:
            if correct:
                cuda.threadfence()
            out[0] = parts[0] + parts[1] + parts[2]  # second

    return launches(kernel, private(3), private(), blocks=3)


@planted(RaceError, COUNTS, "items", right=[[-1], [15]], seed=0)
def item_at_the_tail_is_taken_too(correct):
    """The consumer takes all items up to the tail that it has acquired; the one at the tail is stored
    later."""

    @cuda.jit
    def kernel(items, tail, out):
        if rank() == 0:
            for i in range(6):
                symm_at(items, 1)[i] = i  # first
                st_release(symm_at(tail, 1), 0, i + 1)
        else:
            head = out[0] = 0
            while head < 6:
                end = ld_acquire(tail, 0)
                if not correct:
                    end = min(end + 1, 6)
                while head < end:
                    out[0] += items[head]  # second
                    head += 1

    return launches(kernel, ints(6), signals())


@planted(RaceError, ATOMICS, "values", right=[[9, 9]] * 2)
def atomic_fetch_beside_an_ordinary_write(correct):
    """The owner stores by an ordinary store what the other rank fetches atomically; to read it is no race."""

    @cuda.jit
    def kernel(values, out):
        if correct:
            out[1] = values[0]
        else:
            values[0] = rank()  # first
        out[0] = atomic_fetch(values, 1 - rank())  # second

    return launches(kernel, filled(9), out=2)


@planted(RaceError, ATOMICS, "counter", right=[[6], [-1], [-1]], ranks=3)
def local_increment_beside_a_remote_atomic(correct):
    """The owner adds by an ordinary load and store, the others atomically."""

    @cuda.jit
    def kernel(counter, out):
        if rank() == 0 and not correct:
            counter[0] += 1  # first
        else:
            atomic_add(counter, rank() + 1, 0)  # second
        barrier_all()
        if rank() == 0:
            out[0] = counter[0]

    return launches(kernel, ints(1, "int64"))


@planted(RaceError, ATOMICS, "whole", right=[[2], [-1]])
def atomics_of_two_sizes_on_the_same_bytes(correct):
    """Rank 0 adds to a word of 8 bytes, rank 1 to its lower half, as a word of 4."""

    @cuda.jit
    def kernel(whole, halves, out):
        if rank() == 0 or correct:
            atomic_add(whole, 1, 0)  # first
        else:
            atomic_add(halves, 1, 0)  # second
        barrier_all()
        if rank() == 0:
            out[0] = whole[0]

    def main(world):
        whole = sk.zeros(1, "int64")
        return result(world, kernel[1, 1], whole, whole.view("int32"))

    return main


@planted(RaceError, ATOMICS, "integers", right=[[1, 2]] * 2)
def atomics_of_two_types_on_the_same_bytes(correct):
    """Rank 0 adds integers, rank 1 sets floats: in the same four bytes, or in neighbouring ones."""

    @cuda.jit
    def kernel(integers, floats, out):
        for pe in range(num_ranks()):
            if rank() == 0:
                atomic_fetch_add(integers, 1, pe)  # first
            else:
                atomic_set(floats, 2.0, pe)  # second
        barrier_all()
        out[0], out[1] = integers[0], floats[0]

    def main(world):
        words = sk.zeros(2, "int32")
        floats = (words[1:] if correct else words[:1]).view("float32")
        return result(world, kernel[1, 1], words[:1], floats, out=2)

    return main


@planted(RaceError, ATOMICS, "box flag", right=[[5]] * 2)
def flag_is_stored_by_an_ordinary_store(correct):
    """The acquire load is strong, but the store that it polls for is weak: the flag is no signal."""

    @cuda.jit
    def kernel(box, flag, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        if correct:
            st_release(symm_at(flag, 1 - rank()), 0, 1)
        else:
            symm_at(flag, 1 - rank())[0] = 1  # first
        while ld_acquire(flag, 0) != 1:  # second
            pass
        out[0] = box[0]  # second

    return launches(kernel, ints(), signals())


@planted(RaceError, ATOMICS, "box flag", right=[[5]] * 2)
def spin_on_an_ordinary_load(correct):
    """The flag is released properly, but looked at by an ordinary load, which is weak and orders nothing."""

    @cuda.jit
    def kernel(box, flag, out):
        if cuda.blockIdx.x == 0:
            box[0] = 5  # first
            st_release(flag, 0, 1, "gpu")  # first
        else:
            while (ld_acquire(flag, 0, "gpu") if correct else flag[0]) != 1:  # second
                pass
            out[0] = box[0]  # second

    return launches(kernel, private(), private(), blocks=2)


@planted(RaceError, RELEASE, "box", right=[[5]] * 2)
def atomic_fetch_as_a_wait(correct):
    """The loop ends when the addition is there; neither it nor the fetches order the stores before it."""

    @cuda.jit
    def kernel(box, count, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        if correct:
            red_release(symm_at(count, 1 - rank()), 0, 1)
            while ld_acquire(count, 0) < 1:
                pass
        else:
            atomic_inc(count, 1 - rank())
            while atomic_fetch(count, rank()) < 1:
                pass
        out[0] = box[0]  # second

    return launches(kernel, ints(), ints(1, "int64"))


@planted(RaceError, RELEASE, "box", right=[[5]] * 2)
def relaxed_atomics_with_one_fence(correct):
    """Store, fence, atomic; atomic that reads it, fence, load: a release pattern, and an acquire pattern."""

    @cuda.jit
    def kernel(box, flag, out):
        if cuda.blockIdx.x == 0:
            box[0] = 5  # first
            threadfence("gpu", "acq_rel")
            cuda.atomic.exch(flag, 0, 1)
        else:
            while cuda.atomic.add(flag, 0, 0) != 1:
                pass
            if correct:
                threadfence("gpu", "acq_rel")
            out[0] = box[0]  # second

    return launches(kernel, private(), private(), blocks=2)


@planted(RaceError, RACE, "tickets", right=[list(range(6))] * 2)
def tickets_are_drawn_by_ordinary_accesses(correct):
    """No two blocks get one ticket of an atomic counter, so that they write different elements."""

    @cuda.jit
    def kernel(tickets, out):
        ticket = 0
        while ticket < 6:
            if correct:
                ticket = cuda.atomic.add(tickets, 0, 1)
            else:
                ticket = tickets[0]  # first second
                tickets[0] = ticket + 1  # first second
            if ticket < 6:
                out[ticket] = ticket

    return launches(kernel, private(), blocks=3, out=6)
