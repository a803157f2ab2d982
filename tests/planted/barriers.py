"""Bugs of barriers of ranks: in kernels, of teams, on streams and between hosts."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    Teams,
    barrier,
    barrier_all,
    num_ranks,
    put,
    put_nbi,
    quiet,
    rank,
    symm_at,
    sync,
    sync_all,
)
from shmemkit.emu import RaceError

from .plant import BARRIERS, STREAMS, filled, ints, launches, planted


@planted(RaceError, BARRIERS, "box", right=[[11], [10]])
def conflict_before_the_first_barrier(correct):
    """The owner sets its box while the neighbour may already have stored to it."""

    @cuda.jit
    def kernel(box, out):
        box[0] = -1  # first
        if correct:
            barrier_all()
        symm_at(box, 1 - rank())[0] = 10 + rank()  # second
        barrier_all()
        out[0] = box[0]

    return launches(kernel, ints())


@planted(RaceError, BARRIERS, "box", right=[[1], [0]])
def conflict_after_the_last_barrier(correct):
    """The barrier is before both accesses, and orders neither before the other."""

    @cuda.jit
    def kernel(box, out):
        box[0] = rank()
        barrier_all()
        out[0] = symm_at(box, 1 - rank())[0]  # first
        if correct:
            barrier_all()
        box[0] = 7  # second

    return launches(kernel, ints())


@planted(RaceError, BARRIERS, "box", right=[[2, 12, 22], [0, 10, 20], [1, 11, 21]], ranks=3)
def iterations_with_one_barrier_each(correct):
    """A box is stored again in the next round, whose store has no order with this round's load. Of two boxes
    in turn, the barrier of the round between is behind the load."""

    @cuda.jit
    def kernel(box, out):
        right = (rank() + 1) % num_ranks()
        for i in range(3):
            k = i % 2 if correct else 0
            symm_at(box, right)[k] = 10 * i + rank()  # first
            barrier_all()
            out[i] = box[k]  # second

    return launches(kernel, ints(2), out=3)


@planted(RaceError, BARRIERS, "inbox", right=[[11], [10]])
def sync_all_after_a_put(correct):
    """sync_all completes a store through symm_at, which is a memory store, and no put."""

    @cuda.jit
    def kernel(inbox, outbox, out):
        if correct:
            symm_at(inbox, 1 - rank())[0] = outbox[0]
        else:
            put(inbox, outbox, 1 - rank())  # first
        sync_all()
        out[0] = inbox[0]  # second

    return launches(kernel, ints(), filled(10, step=1))


@planted(RaceError, BARRIERS, "inbox outbox", right=[[11], [10]])
def sync_all_after_put_nbi(correct):
    """barrier_all completes non-blocking puts, too; then their source may be overwritten."""

    @cuda.jit
    def kernel(inbox, outbox, out):
        put_nbi(inbox, outbox, 1 - rank())  # first
        if correct:
            barrier_all()
        else:
            sync_all()
        outbox[0] = 0  # second
        out[0] = inbox[0]  # second

    return launches(kernel, ints(), filled(10, step=1))


@planted(RaceError, BARRIERS, "box", right=[[11], [10]])
def thread_0_meets_the_ranks_for_threads_that_it_has_not_met(correct):
    """Thread 1's store is before the block's barrier, that before thread 0's, and so on to thread 1's
    load."""

    @cuda.jit
    def kernel(box, out):
        i = cuda.threadIdx.x
        if i == 1:
            symm_at(box, 1 - rank())[0] = 10 + rank()  # first
        if correct:
            cuda.syncthreads()
        if i == 0:
            barrier_all()
        cuda.syncthreads()
        if i == 1:
            out[0] = box[0]  # second

    return launches(kernel, ints(), threads=2)


@planted(RaceError, BARRIERS, "inbox", right=[[12], [13], [10], [11]], ranks=4, local_size=2)
def barrier_of_the_node_for_a_rank_on_another_node(correct):
    """Ranks r and (r + 2) % 4 are on different nodes. They have the same local rank, so that they are in one
    team SAME_MYPE_NODE."""

    @cuda.jit
    def kernel(inbox, outbox, out):
        put(inbox, outbox, (rank() + 2) % 4)  # first
        quiet()
        if correct:
            sync(Teams.TEAM_SAME_MYPE_NODE)
        else:
            barrier(Teams.TEAM_NODE)
        out[0] = inbox[0]  # second

    return launches(kernel, ints(), filled(10, step=1))


@cuda.jit
def send(box):
    symm_at(box, 1 - rank())[0] = 10 + rank()  # first


@cuda.jit
def receive(box, out):
    out[0] = box[0]  # second


def between_kernels(meet, early=lambda world: None):
    """``meet(world)`` stands between the kernels that send and receive, ``early(world)`` before them."""

    def main(world):
        box, out = sk.zeros(1, "int32"), np.zeros(1, "int32")
        early(world)
        send[1, 1, world.stream](box)
        meet(world)
        receive[1, 1, world.stream](box, out)
        world.barrier()
        world.stream.synchronize()
        return out.tolist()

    return main


@planted(RaceError, STREAMS, "box", right=[[11], [10]], source=(send, receive))
def the_worlds_barrier_comes_one_kernel_too_early(correct):
    """The barrier is before both kernels: it orders neither before the other rank's."""
    meet = lambda world: world.barrier()  # noqa: E731
    return between_kernels(meet) if correct else between_kernels(lambda world: None, early=meet)


@planted(RaceError, STREAMS, "box", right=[[11], [10]], source=(send, receive))
def host_barrier_without_synchronize(correct):
    """The hosts meet while the sending kernel may still run: a launch does not wait for its kernel."""

    def meet(world):
        if correct:
            world.stream.synchronize()
        world.host_barrier()

    return between_kernels(meet)
