"""Bugs of collectives and barriers of ranks inside of kernels."""

from numba import cuda

from shmemkit.device import (
    Teams,
    alltoall,
    alltoall_block,
    barrier_all,
    barrier_all_block,
    broadcast,
    fcollect,
    notify,
    put,
    put_nbi,
    quiet,
    rank,
    reduce,
    symm_at,
    sync,
    sync_all,
    wait,
)
from shmemkit.emu import DeadlockError, EmulatorError, RaceError

from .plant import (
    BARRIERS,
    COLLECTIVES,
    OWNERS,
    PROGRESS,
    SAME_CALLS,
    filled,
    ints,
    launches,
    planted,
    private,
    signals,
)

WORLD = Teams.TEAM_WORLD


@planted(
    DeadlockError, SAME_CALLS, "rank 1 in a barrier, sync or collective of ranks 0 to 1", right=[[1], [1]]
)
def collective_that_a_rank_leaves_out(correct):
    """Rank 1 does not take part in the second sum."""

    @cuda.jit
    def kernel(total, mine, out):
        reduce(WORLD, total, mine, "sum")
        if rank() == 0 or correct:
            reduce(WORLD, total, mine, "max")
        out[0] = total[0]

    return launches(kernel, ints(), filled(0, step=1))


@planted(EmulatorError, SAME_CALLS, "broadcast", "fcollect", right=[[1, 0, 1], [1, 0, 1]])
def collectives_in_different_orders(correct):
    """Rank 0 gathers, then broadcasts; rank 1 the other way round."""

    @cuda.jit
    def kernel(root, parts, mine, out):
        if rank() == 1 and not correct:
            broadcast(WORLD, root, mine, 1)
        fcollect(WORLD, parts, mine)
        if rank() == 0 or correct:
            broadcast(WORLD, root, mine, 1)
        out[0], out[1], out[2] = root[0], parts[0], parts[1]

    return launches(kernel, ints(), ints(2), filled(0, step=1), out=3)


@planted(EmulatorError, SAME_CALLS, "broadcast", "root", right=[[1], [1]])
def broadcast_from_different_roots(correct):
    """Each rank takes itself for the root."""

    @cuda.jit
    def kernel(root, mine, out):
        broadcast(WORLD, root, mine, 1 if correct else rank())
        out[0] = root[0]

    return launches(kernel, ints(), filled(0, step=1))


@planted(
    DeadlockError,
    SAME_CALLS,
    "in a barrier, sync or collective of ranks 0 to 1",
    "in a barrier, sync or collective of ranks 0 to 3",
    right=[[0], [1], [2], [3]],
    ranks=4,
    local_size=2,
)
def different_teams(correct):
    """Rank 0 meets its node, the others meet the world."""

    @cuda.jit
    def kernel(out):
        sync(WORLD if rank() > 0 or correct else Teams.TEAM_NODE)
        out[0] = rank()

    return launches(kernel)


@planted(RaceError, COLLECTIVES, "total", right=[[5], [1]])
def result_overwritten_while_peers_receive_it(correct):
    """A collective that returns here may still be running elsewhere."""

    @cuda.jit
    def kernel(total, mine, out):
        reduce(WORLD, total, mine, "sum")  # first second
        if rank() == 1:
            out[0] = total[0]
        if correct:
            sync_all()
        if rank() == 1:
            symm_at(total, 0)[0] = 5  # first second
        sync_all()
        if rank() == 0:
            out[0] = total[0]

    return launches(kernel, ints(), filled(0, step=1))


@planted(RaceError, COLLECTIVES, "mine", right=[[3], [3]])
def source_stored_while_a_collective_reads_it(correct):
    """A peer's part of the sum is stored by another thread of it, which nobody has waited for."""

    @cuda.jit
    def kernel(total, mine, out):
        if cuda.threadIdx.x == 1:
            mine[0] = rank() + 1  # first second
        if correct:
            cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            reduce(WORLD, total, mine, "sum")  # first second
            out[0] = total[0]

    return launches(kernel, ints(), ints(), threads=2)


@planted(RaceError, COLLECTIVES, "parts", right=[[0, 1], [0, 7]])
def result_of_fcollect_overwritten_by_a_peer(correct):
    """Rank 0 has all parts, and stores into the array of rank 1, which may be without."""

    @cuda.jit
    def kernel(parts, mine, out):
        fcollect(WORLD, parts, mine)  # first second
        if correct:
            sync_all()
        if rank() == 0:
            symm_at(parts, 1)[1] = 7  # first second
        sync_all()
        out[0], out[1] = parts[0], parts[1]

    return launches(kernel, ints(2), filled(0, step=1), out=2)


@planted(RaceError, BARRIERS, "inbox", "syncthreads", right=[[-1, 11], [-1, 10]])
def barrier_of_one_thread_per_rank(correct):
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

    return launches(kernel, ints(), threads=2, out=2)


@planted(RaceError, BARRIERS, "inbox", "quiet", right=[[11], [10]])
def barrier_over_nvlink_with_puts_under_way(correct):
    """barrier_all_block(arrivals, epoch) orders loads and stores; it completes no put."""

    @cuda.jit
    def kernel(inbox, outbox, arrivals, epoch, out):
        put_nbi(inbox, outbox, 1 - rank())  # first
        if correct:
            quiet()
        barrier_all_block(arrivals, epoch)
        out[0] = inbox[0]  # second

    return launches(kernel, ints(), filled(10, step=1), signals(2), private(1, "uint64"))


@planted(RaceError, OWNERS, "epoch", right=[[0, 1], [0, 1]])
def two_blocks_share_the_arrays_of_a_barrier(correct):
    """barrier_all_block is for one block of each rank; the arrays count how often that one has come."""

    @cuda.jit
    def kernel(arrivals, epoch, out):
        block = cuda.blockIdx.x
        row = block if correct else 0
        barrier_all_block(arrivals[row], epoch[row : row + 1])  # first second
        out[block] = block

    return launches(kernel, ints((2, 2), "uint64"), private(2, "uint64"), blocks=2, out=2)


@planted(RaceError, BARRIERS, "inbox", right=[[11], [10]])
def barrier_too_early(correct):
    """The ranks meet before they store, not after."""

    @cuda.jit
    def kernel(inbox, out):
        if not correct:
            barrier_all()
        symm_at(inbox, 1 - rank())[0] = 10 + rank()  # first second
        if correct:
            barrier_all()
        out[0] = inbox[0]  # first second

    return launches(kernel, ints())


@planted(DeadlockError, PROGRESS, "waits for flag[0] on rank 0", "rank 0 in a barrier", right=[[0], [1]])
def waits_for_a_rank_that_waits_in_a_barrier(correct):
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

    return launches(kernel, signals())


@planted(RaceError, COLLECTIVES, "dst", right=[[3]] * 3, ranks=3)
def read_another_ranks_broadcast(correct):
    """This rank's destination is complete, and its source may be overwritten; others need not have theirs."""

    @cuda.jit
    def kernel(dst, src, out):
        broadcast(WORLD, dst, src, 0)  # first
        src[0] = -1
        out[0] = dst[0] if correct else symm_at(dst, (rank() + 1) % 3)[0]  # second

    return launches(kernel, ints(), filled(3, step=1))


@planted(RaceError, COLLECTIVES, "dst", right=[[3], [3], [3]], ranks=3)
def read_another_ranks_result(correct):
    """That fcollect has returned here does not say that it has on the next rank."""

    @cuda.jit
    def kernel(dst, src, out):
        fcollect(WORLD, dst, src)  # first
        if correct:
            sync_all()
        out[0] = symm_at(dst, (rank() + 1) % 3)[0]  # second

    return launches(kernel, ints(3), filled(3, step=1))


@planted(RaceError, COLLECTIVES, "dst", right=[[5]] * 3, ranks=3)
def broadcast_again_while_others_read_the_first_result(correct):
    """The root may be in the second broadcast while another rank still reads its destination of the first."""

    @cuda.jit
    def kernel(dst, src, out):
        for _ in range(2):
            broadcast(WORLD, dst, src, 0)  # first
            out[0] += dst[0]  # second
            if correct:
                sync_all()

    return launches(kernel, ints(), filled(3, step=1))


@planted(RaceError, COLLECTIVES, "src", right=[[10, 11], [20, 21]])
def one_thread_exchanges_what_another_stores(correct):
    """Thread 1 stores while thread 0 is in alltoall. alltoall_block begins with a barrier of the block."""

    @cuda.jit
    def kernel(dst, src, out):
        i = cuda.threadIdx.x
        src[i] = 10 * (i + 1) + rank()  # first
        if correct:
            alltoall_block(WORLD, dst, src)
        elif i == 0:
            alltoall(WORLD, dst, src)  # second
        cuda.syncthreads()
        out[1 - i] = dst[1 - i]

    return launches(kernel, ints(2), ints(2), threads=2, out=2)


@planted(RaceError, COLLECTIVES, "src", right=[[16]] * 2)
def a_peer_puts_to_the_source_of_a_reduction(correct):
    """The put is under way when the target enters the reduction, which reads its source."""

    @cuda.jit
    def kernel(dst, src, mine, out):
        put(src, mine, 1 - rank())  # first
        if correct:
            barrier_all()
        reduce(WORLD, dst, src, "sum")  # second
        out[0] = dst[0]

    return launches(kernel, ints(), filled(3, step=1), filled(8))


@planted(RaceError, COLLECTIVES, "dst", right=[[18, 72]] * 4, ranks=4)
def result_cleared_for_a_peer_that_reduces_it_again(correct):
    """The second reduction reads each rank's own result of the first one."""

    @cuda.jit
    def kernel(dst, src, out):
        reduce(WORLD, dst[0:1], src, "sum")  # first second
        if not correct:
            symm_at(dst, (rank() + 1) % 4)[0] = 0  # first second
        reduce(WORLD, dst[1:2], dst[0:1], "sum")  # first second
        out[0], out[1] = dst[0], dst[1]  # first second

    return launches(kernel, ints(2), filled(3, step=1), out=2)


@planted(RaceError, COLLECTIVES, "box", right=[[-1], [-1], [5]], ranks=3)
def broadcast_in_the_place_of_a_barrier(correct):
    """Rank 1 stores on rank 2, and neither is the root: what rank 2 gets from the root says nothing about
    rank 1."""

    @cuda.jit
    def kernel(dst, src, box, out):
        if rank() == 1:
            symm_at(box, 2)[0] = 5  # first
        if correct:
            sync_all()
        else:
            broadcast(WORLD, dst, src, 0)
        if rank() == 2:
            out[0] = box[0]  # second

    return launches(kernel, ints(), filled(3), ints())


@planted(RaceError, COLLECTIVES, "box", right=[[3]] * 2)
def fcollect_does_not_complete_a_put(correct):
    """The put before the collective is still under way when the target reads."""

    @cuda.jit
    def kernel(dst, src, box, out):
        put(box, src, 1 - rank())  # first
        if correct:
            quiet()
        fcollect(WORLD, dst, src)
        out[0] = box[0]  # second

    return launches(kernel, ints(2), filled(3), ints())
