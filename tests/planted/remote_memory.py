"""Bugs on the memory of other ranks: puts, gets, stores and loads through symm_at."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    atomic_add,
    barrier_all,
    barrier_all_block,
    copy_block,
    fence,
    g,
    get,
    num_ranks,
    p,
    put,
    put_block,
    put_nbi,
    quiet,
    rank,
    symm_at,
)
from shmemkit.emu import RaceError

from .plant import BARRIERS, PUTS, RACE, THREADS, filled, ints, launches, planted


@planted(RaceError, RACE, "box", right=[[0, 1, 2], [-1] * 3, [-1] * 3], ranks=3)
def ranks_store_to_one_cell_of_another(correct):
    """Nothing orders the stores of ranks 1 and 2 to rank 0."""

    @cuda.jit
    def kernel(box, out):
        if rank() > 0:
            symm_at(box, 0)[rank() if correct else 1] = rank()  # first second
        barrier_all()
        if rank() == 0:
            for i in range(3):
                out[i] = box[i]

    return launches(kernel, ints(3), out=3)


@planted(RaceError, PUTS, "rows", right=[[1, 2], [-1] * 2, [-1] * 2], ranks=3)
def two_ranks_put_to_one_row(correct):
    """Both put three elements into the same row of rank 0; quiet completes each put, but orders none after
    the other."""

    @cuda.jit
    def kernel(rows, mine, out):
        if rank() > 0:
            put(rows[rank() - 1 if correct else 0], mine, 0)  # first second
            quiet()
        barrier_all()
        if rank() == 0:
            out[0], out[1] = rows[0, 2], rows[1, 2]

    return launches(kernel, ints((2, 3)), filled(0, 3, step=1), out=2)


@planted(RaceError, BARRIERS, "value", right=[[-1], [42]])
def get_while_the_owner_computes(correct):
    """Rank 1 fetches an element that rank 0 writes in the same phase."""

    @cuda.jit
    def kernel(value, copy, out):
        if rank() == 0:
            value[0] = 42  # first
        if correct:
            barrier_all()
        if rank() == 1:
            get(copy, value, 0)  # second
            out[0] = copy[0]
        barrier_all()

    return launches(kernel, ints(), ints())


def refilled(send):
    """Three items through one buffer; ``send(inbox, buffer)`` puts it to the other rank."""
    send = cuda.jit(device=True)(send)

    @cuda.jit
    def kernel(inbox, buffer, out):
        for i in range(3):
            buffer[0] = 10 + i  # first
            send(inbox[i : i + 1], buffer)
        barrier_all()
        for i in range(3):
            out[i] = inbox[i]

    return launches(kernel, ints(3), ints(), out=3)


def put_nbi_once(inbox, buffer):
    put_nbi(inbox, buffer, 1 - rank())  # second


def put_nbi_and_quiet(inbox, buffer):
    put_nbi(inbox, buffer, 1 - rank())
    quiet()


def put_once(inbox, buffer):
    put(inbox, buffer, 1 - rank())


THREE = [[10, 11, 12]] * 2


@planted(RaceError, PUTS, "buffer", right=THREE, source=(refilled, put_nbi_once))
def source_of_put_nbi_is_overwritten_in_a_loop(correct):
    """The loop fills its buffer again while the put of the round before may still read it."""
    return refilled(put_nbi_and_quiet if correct else put_nbi_once)


@planted(RaceError, PUTS, "buffer", right=THREE, source=(refilled, put_nbi_once))
def put_nbi_in_the_place_of_put(correct):
    """A blocking put has read its source when it returns, so that the buffer may be filled again."""
    return refilled(put_once if correct else put_nbi_once)


@planted(RaceError, PUTS, "box", right=[[7]] * 2)
def p_and_then_g_of_the_same_element(correct):
    """The put need not have been delivered, so that g may come first."""

    @cuda.jit
    def kernel(box, out):
        p(box, 7, 1 - rank())  # first
        if correct:
            quiet()
        out[0] = g(box, 1 - rank())  # second
        barrier_all()

    return launches(kernel, ints())


@planted(RaceError, PUTS, "box", right=[[2]] * 2)
def two_puts_of_one_thread_to_one_place(correct):
    """Two puts of one thread to the same element may be delivered in either order."""

    @cuda.jit
    def kernel(box, old, new, out):
        put(box, old, 1 - rank())  # first
        if correct:
            fence()
        put(box, new, 1 - rank())  # second
        barrier_all()
        out[0] = box[0]

    return launches(kernel, ints(), filled(1), filled(2))


@planted(RaceError, RACE, "row", right=[[2, 0, 1], [0, 1, 2], [1, 2, 0]], ranks=3)
def halo_of_both_neighbours_is_one_element_too_wide(correct):
    """Both neighbours store to the element in the middle, which is the owner's."""

    @cuda.jit
    def kernel(row, out):
        me, n = rank(), num_ranks()
        to_left, to_right = symm_at(row, (me + n - 1) % n), symm_at(row, (me + 1) % n)
        if correct:
            row[1] = me
        for i in range(1 if correct else 2):
            to_right[i] = me  # first
            to_left[2 - i] = me  # second
        barrier_all()
        for i in range(3):
            out[i] = row[i]

    return launches(kernel, ints(3), out=3)


@planted(RaceError, RACE, "counter", right=[[2]] * 2)
def owner_and_neighbour_add_to_one_counter(correct):
    """The owner's ordinary addition and the neighbour's, through symm_at, conflict."""

    @cuda.jit
    def kernel(counter, out):
        for pe in range(num_ranks()):
            if correct:
                atomic_add(counter, 1, pe)
            else:
                symm_at(counter, pe)[0] += 1  # first second
        barrier_all()
        out[0] = counter[0]

    return launches(kernel, ints())


@planted(RaceError, THREADS, "outbox", right=[[0, 1, 2, 3]] * 2)
def one_thread_puts_what_others_are_storing(correct):
    """Thread 0 puts a row that all threads of its block fill. put_block begins with a barrier of the
    block."""

    @cuda.jit
    def kernel(inbox, outbox, out):
        i = cuda.threadIdx.x
        outbox[i] = i  # first
        if correct:
            put_block(inbox, outbox, 1 - rank())
        elif i == 0:
            put(inbox, outbox, 1 - rank())  # second
        barrier_all_block()
        out[i] = inbox[i]

    return launches(kernel, ints(4), ints(4), threads=4, out=4)


@planted(RaceError, PUTS, "box", right=[[7]] * 2)
def the_kernels_end_does_not_deliver_p(correct):
    """The target's next kernel reads what p has sent. That the sending kernel has ended and the hosts have
    met completes no put; the World's barrier does."""

    @cuda.jit
    def send(box):
        p(box, 7, 1 - rank())  # first

    @cuda.jit
    def read(box, out):
        out[0] = box[0]  # second

    def main(world):
        box, out = sk.zeros(1, "int32"), np.zeros(1, "int32")
        send[1, 1, world.stream](box)
        world.stream.synchronize()
        world.barrier() if correct else world.host_barrier()
        read[1, 1, world.stream](box, out)
        world.stream.synchronize()
        return out.tolist()

    return main


@planted(RaceError, RACE, "table", right=[[3, 3]] * 3, ranks=3)
def source_of_all_ranks_is_written(correct):
    """All ranks may get the same source at once, as long as nobody writes it."""

    @cuda.jit
    def kernel(table, copy, out):
        if rank() == 0 and not correct:
            table[0] = 3  # first
        get(copy, table, 0)  # second
        out[0], out[1] = copy[0], copy[1]

    return launches(kernel, filled(3, 2), ints(2), out=2)


@planted(RaceError, BARRIERS, "row", right=[[10, 11, 12, 13], [0, 1, 2, 3]])
def pull_with_copy_block_before_the_owner_is_done(correct):
    """copy_block orders nothing: it loads the peer's row while the peer's block stores it."""

    @cuda.jit
    def kernel(row, out):
        i = cuda.threadIdx.x
        row[i] = 10 * rank() + i  # first
        if correct:
            barrier_all_block()
        else:
            cuda.syncthreads()
        copy_block(out, symm_at(row, 1 - rank()))  # second

    return launches(kernel, ints(4), threads=4, out=4)
