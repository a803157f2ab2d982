"""Bugs of collectives and barriers of ranks inside of kernels."""

import numpy as np
from fault import DeadlockError, EmulatorError, RaceError, fault, result
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    Teams,
    barrier_all,
    barrier_all_block,
    broadcast,
    fcollect,
    notify,
    put_nbi,
    quiet,
    rank,
    reduce,
    symm_at,
    sync,
    sync_all,
    wait,
)


@fault(DeadlockError, "rank 1 in a barrier, sync or collective of ranks 0 to 1", right=[[1], [1]])
def test_collective_that_a_rank_leaves_out(correct):
    """Rank 1 does not take part in the second sum."""

    @cuda.jit
    def kernel(total, mine, out):
        reduce(Teams.TEAM_WORLD, total, mine, "sum")
        if rank() == 0 or correct:
            reduce(Teams.TEAM_WORLD, total, mine, "max")
        out[0] = total[0]

    return lambda world: result(world, kernel[1, 1], sk.zeros(1, "int32"), sk.full(1, world.rank, "int32"))


@fault(EmulatorError, "broadcast", "fcollect", right=[[1, 0, 1], [1, 0, 1]])
def test_collectives_in_different_orders(correct):
    """Rank 0 gathers, then broadcasts; rank 1 the other way round."""

    @cuda.jit
    def kernel(root, parts, mine, out):
        if rank() == 1 and not correct:
            broadcast(Teams.TEAM_WORLD, root, mine, 1)
        fcollect(Teams.TEAM_WORLD, parts, mine)
        if rank() == 0 or correct:
            broadcast(Teams.TEAM_WORLD, root, mine, 1)
        out[0], out[1], out[2] = root[0], parts[0], parts[1]

    def main(world):
        mine = sk.full(1, world.rank, "int32")
        return result(world, kernel[1, 1], sk.zeros(1, "int32"), sk.zeros(2, "int32"), mine, out=3)

    return main


@fault(EmulatorError, "broadcast", "root", right=[[1], [1]])
def test_broadcast_from_different_roots(correct):
    """Each rank takes itself for the root."""

    @cuda.jit
    def kernel(root, mine, out):
        broadcast(Teams.TEAM_WORLD, root, mine, 1 if correct else rank())
        out[0] = root[0]

    return lambda world: result(world, kernel[1, 1], sk.zeros(1, "int32"), sk.full(1, world.rank, "int32"))


@fault(
    DeadlockError,
    "in a barrier, sync or collective of ranks 0 to 1",
    "in a barrier, sync or collective of ranks 0 to 3",
    right=[[0], [1], [2], [3]],
    pes=4,
    local_size=2,
)
def test_different_teams(correct):
    """Rank 0 meets its node, the others meet the world."""

    @cuda.jit
    def kernel(out):
        sync(Teams.TEAM_WORLD if rank() > 0 or correct else Teams.TEAM_NODE)
        out[0] = rank()

    return lambda world: result(world, kernel[1, 1])


@fault(RaceError, "total", right=[[5], [1]])
def test_result_overwritten_while_peers_receive_it(correct):
    """A collective that returns here may still be running elsewhere."""

    @cuda.jit
    def kernel(total, mine, out):
        reduce(Teams.TEAM_WORLD, total, mine, "sum")  # first second
        if rank() == 1:
            out[0] = total[0]
        if correct:
            sync_all()
        if rank() == 1:
            symm_at(total, 0)[0] = 5  # first second
        sync_all()
        if rank() == 0:
            out[0] = total[0]

    return lambda world: result(world, kernel[1, 1], sk.zeros(1, "int32"), sk.full(1, world.rank, "int32"))


@fault(RaceError, "mine", right=[[3], [3]])
def test_source_stored_while_a_collective_reads_it(correct):
    """A peer's part of the sum is stored by another thread of it, which nobody has waited for."""

    @cuda.jit
    def kernel(total, mine, out):
        if cuda.threadIdx.x == 1:
            mine[0] = rank() + 1  # first second
        if correct:
            cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            reduce(Teams.TEAM_WORLD, total, mine, "sum")  # first second
            out[0] = total[0]

    return lambda world: result(world, kernel[1, 2], sk.zeros(1, "int32"), sk.zeros(1, "int32"))


@fault(RaceError, "parts", right=[[0, 1], [0, 7]])
def test_result_of_fcollect_overwritten_by_a_peer(correct):
    """Rank 0 has all parts, and stores into the array of rank 1, which may be without."""

    @cuda.jit
    def kernel(parts, mine, out):
        fcollect(Teams.TEAM_WORLD, parts, mine)  # first second
        if correct:
            sync_all()
        if rank() == 0:
            symm_at(parts, 1)[1] = 7  # first second
        sync_all()
        out[0], out[1] = parts[0], parts[1]

    def main(world):
        mine = sk.full(1, world.rank, "int32")
        return result(world, kernel[1, 1], sk.zeros(2, "int32"), mine, out=2)

    return main


@fault(RaceError, "inbox", "syncthreads", right=[[-1, 11], [-1, 10]])
def test_barrier_of_one_thread_per_rank(correct):
    """Thread 0 of each rank meets the other's; thread 1 goes on without it."""

    @cuda.jit
    def kernel(inbox, out):
        thread = cuda.threadIdx.x
        if thread == 0:
            symm_at(inbox, 1 - rank())[0] = 10 + rank()  # first second
            barrier_all()
        if correct:
            cuda.syncthreads()
        if thread == 1:
            out[1] = inbox[0]  # first second

    return lambda world: result(world, kernel[1, 2], sk.zeros(1, "int32"), out=2)


@fault(RaceError, "inbox", "quiet", right=[[11], [10]])
def test_barrier_over_nvlink_with_puts_under_way(correct):
    """barrier_all_block(arrivals, epoch) orders loads and stores; it completes no put."""

    @cuda.jit
    def kernel(inbox, outbox, arrivals, epoch, out):
        put_nbi(inbox, outbox, 1 - rank())  # first
        if correct:
            quiet()
        barrier_all_block(arrivals, epoch)
        out[0] = inbox[0]  # second

    return lambda world: result(
        world,
        kernel[1, 1],
        sk.zeros(1, "int32"),
        sk.full(1, 10 + world.rank, "int32"),
        sk.signals(2),
        np.zeros(1, "uint64"),
    )


@fault(RaceError, "epoch", right=[[0, 1], [0, 1]])
def test_two_blocks_share_the_arrays_of_a_barrier(correct):
    """barrier_all_block is for one block of each rank; the arrays count how often that one has come."""

    @cuda.jit
    def kernel(arrivals, epoch, out):
        block = cuda.blockIdx.x
        row = block if correct else 0
        barrier_all_block(arrivals[row], epoch[row : row + 1])  # first second
        out[block] = block

    return lambda world: result(world, kernel[2, 1], sk.zeros((2, 2), "uint64"), np.zeros(2, "uint64"), out=2)


@fault(RaceError, "inbox", right=[[11], [10]])
def test_barrier_too_early(correct):
    """The ranks meet before they store, not after."""

    @cuda.jit
    def kernel(inbox, out):
        if not correct:
            barrier_all()
        symm_at(inbox, 1 - rank())[0] = 10 + rank()  # first second
        if correct:
            barrier_all()
        out[0] = inbox[0]  # first second

    return lambda world: result(world, kernel[1, 1], sk.zeros(1, "int32"))


@fault(DeadlockError, "waits for flag[0] on rank 0", "rank 0 in a barrier", right=[[0], [1]])
def test_waits_for_a_rank_that_waits_in_a_barrier(correct):
    """Rank 0 waits for what rank 1 does after the barrier that rank 0 has not come to."""

    @cuda.jit
    def kernel(flag, out):
        if rank() == 0 and correct:
            barrier_all()
        if rank() == 0:
            wait(flag, 1, "sys", "acquire", 1)
        if rank() == 0 and not correct:
            barrier_all()
        if rank() == 1:
            barrier_all()
            notify(flag, 0, 1)
        out[0] = rank()

    return lambda world: result(world, kernel[1, 1], sk.signals(1))
