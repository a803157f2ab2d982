"""Collectives in kernels: what is complete when one returns, and what has to be ready before."""

from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    Teams,
    alltoall,
    alltoall_block,
    broadcast,
    fcollect,
    put,
    rank,
    reduce,
    symm_at,
    sync_all,
)

from .case import RACE, RIGHT, case

LOCAL = (
    "OpenSHMEM, collectives: upon return the local PE's dest is updated and its source may be reused; PEs "
    "enter and exit "
    "at different times, so that remote accesses may require additional synchronization"
)
READY = (
    "OpenSHMEM, shmem_broadcast: before any PE calls, the dest array on all PEs must be ready to accept "
    "the result"
)
ACCESS = (
    "OpenSHMEM, collectives: concurrent accesses by a collective and any other means, one of them an "
    "update, are undefined"
)
TEAM = Teams.TEAM_WORLD


def arrays(world, n=1, m=1):
    """dst of n, src of m elements, and what a kernel returns"""
    return sk.zeros(n, "int32"), sk.full(m, 3 + world.rank, "int32"), world.xp.zeros(n, "int32")


@case(RIGHT, LOCAL, ranks=3, gives=[[3]] * 3)
def broadcast_and_read_my_own(world):
    """This rank's destination is complete, and its source may be overwritten."""

    @cuda.jit
    def share(dst, src, out):
        broadcast(TEAM, dst, src, 0)
        src[0] = -1
        out[0] = dst[0]

    dst, src, out = arrays(world)
    share[1, 1, world.stream](dst, src, out)
    return world.asnumpy(out).tolist()


@case(RACE, LOCAL, ranks=3)
def read_another_ranks_result(world):
    """That fcollect has returned here does not say that it has on the next rank."""

    @cuda.jit
    def share(dst, src, out):
        fcollect(TEAM, dst, src)  # first
        out[0] = symm_at(dst, (rank() + 1) % 3)[0]  # second

    dst, src, out = arrays(world, 3)
    share[1, 1, world.stream](dst, src, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, LOCAL + "; shmem_sync_all", ranks=3, gives=[[3, 0, 0]] * 3)
def read_another_ranks_result_after_sync_all(world):
    """All ranks have returned from fcollect when sync_all returns."""

    @cuda.jit
    def share(dst, src, out):
        fcollect(TEAM, dst, src)
        sync_all()
        out[0] = symm_at(dst, (rank() + 1) % 3)[0]

    dst, src, out = arrays(world, 3)
    share[1, 1, world.stream](dst, src, out)
    return world.asnumpy(out).tolist()


@case(RACE, READY, ranks=3)
def broadcast_again_while_others_read_the_first_result(world):
    """The root may be in the second broadcast while another rank still reads its destination of the first
    one."""

    @cuda.jit
    def rounds(dst, src, out):
        for _ in range(2):
            broadcast(TEAM, dst, src, 0)  # first
            out[0] += dst[0]  # second

    dst, src, out = arrays(world)
    rounds[1, 1, world.stream](dst, src, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, READY, ranks=3, gives=[[6]] * 3)
def broadcast_again_when_all_have_read(world):
    """sync_all is between the loads of the first result and the second broadcast."""

    @cuda.jit
    def rounds(dst, src, out):
        for _ in range(2):
            broadcast(TEAM, dst, src, 0)
            out[0] += dst[0]
            sync_all()

    dst, src, out = arrays(world)
    rounds[1, 1, world.stream](dst, src, out)
    return world.asnumpy(out).tolist()


@case(RACE, ACCESS)
def one_thread_collects_what_another_stores(world):
    """Thread 1 stores to the source while thread 0 is in alltoall: nothing orders the two threads."""

    @cuda.jit
    def exchange(dst, src):
        if cuda.threadIdx.x == 1:
            src[0] = 9  # first
        else:
            alltoall(TEAM, dst, src)  # second

    dst, src, _ = arrays(world, 2, 2)
    exchange[1, 2, world.stream](dst, src)
    return world.asnumpy(dst).tolist()


@case(
    RIGHT, "shmemkit: a _block call begins and ends with a barrier of the block", gives=[[10, 11], [20, 21]]
)
def the_block_exchanges_what_its_threads_have_stored(world):
    """The threads meet between their stores and the exchange; afterwards each reads the other's part."""

    @cuda.jit
    def exchange(dst, src, out):
        i = cuda.threadIdx.x
        src[i] = 10 * (i + 1) + rank()
        cuda.syncthreads()
        alltoall_block(TEAM, dst, src)
        cuda.syncthreads()
        out[1 - i] = dst[1 - i]

    dst, src, out = arrays(world, 2, 2)
    exchange[1, 2, world.stream](dst, src, out)
    return world.asnumpy(out).tolist()


@case(RACE, ACCESS)
def a_peer_puts_to_the_source_of_a_reduction(world):
    """The put is under way when the target enters the reduction, which reads its source."""

    @cuda.jit
    def add_up(dst, src, mine):
        put(src, mine, 1 - rank())  # first
        reduce(TEAM, dst, src, "sum")  # second

    dst, src, _ = arrays(world)
    add_up[1, 1, world.stream](dst, src, sk.full(1, 8, "int32"))
    return world.asnumpy(dst).tolist()


@case(RIGHT, LOCAL, ranks=4, gives=[[18, 72]] * 4)
def reductions_one_after_another(world):
    """The second one reads this rank's result of the first one into another destination."""

    @cuda.jit
    def add_up(dst, src, out):
        reduce(TEAM, dst[0:1], src, "sum")
        reduce(TEAM, dst[1:2], dst[0:1], "sum")
        out[0] = dst[0]
        out[1] = dst[1]

    dst, src, out = arrays(world, 2)
    add_up[1, 1, world.stream](dst, src, out)
    return world.asnumpy(out).tolist()


@case(
    RACE,
    "shmemkit, Collectives: this rank's part is complete, nothing else is certain; OpenSHMEM: no barrier",
    ranks=3,
)
def broadcast_in_the_place_of_a_barrier(world):
    """Rank 1 stores on rank 2, and neither is the root: what rank 2 gets from the root says nothing about
    rank 1."""

    @cuda.jit
    def share(dst, src, box, out):
        if rank() == 1:
            symm_at(box, 2)[0] = 5  # first
        broadcast(TEAM, dst, src, 0)
        if rank() == 2:
            out[0] = box[0]  # second

    dst, src, out = arrays(world)
    share[1, 1, world.stream](dst, src, sk.zeros(1, "int32"), out)
    return world.asnumpy(out).tolist()


@case(
    RACE,
    "OpenSHMEM, collectives: only shmem_barrier completes remote updates that other routines have issued",
)
def fcollect_does_not_complete_a_put(world):
    """The put before the collective is still under way when the target reads."""

    @cuda.jit
    def share(dst, src, box, out):
        put(box, src, 1 - rank())  # first
        fcollect(TEAM, dst, src)
        out[0] = box[0]  # second

    dst, src, out = arrays(world, 2)
    share[1, 1, world.stream](dst, src, sk.zeros(1, "int32"), out)
    return world.asnumpy(out).tolist()
