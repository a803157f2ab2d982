"""The barrier of all ranks on a stream, over NVLink. Its wait has a limit, and a timeout names the missing
ranks.

Signals   arrivals[k], on every rank: how many times rank k has arrived (only rank k adds to it)
Epoch     epoch[0], local. Device-resident, so graph-safe

  thread k, for rank k, if that is another:
             1. add 1 to arrivals[me] on rank k           release, sys: publishes all earlier work of the
                                                          stream
             2. wait until arrivals[k] >= epoch + 1       acquire, sys: sees what rank k did before
  block:     3. syncthreads, then thread 0 sets epoch += 1

No counter is ever reset. A rank is at most one epoch ahead of another: to leave an epoch, it needs the
arrival of all ranks in it. Arriving only adds, so it need not load the counter first. The early start of the
next launch (PDL) changes nothing: that launch accesses no memory until this one has ended.

Steps 1 and 3 run even when a wait of this rank has expired, unlike `notify` (``device.shmem.bounded_waits``).
So every rank counts each of its epochs exactly once, and an expired barrier does not disturb a later one.
"""

from numba import cuda

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    num_ranks,
    rank,
    red_release,
    symm_at,
    wait,
)

from .launch import MAX_THREADS, bind


@cuda.jit(device=True)
def arrive_and_wait(arrivals, there, epoch, first, end):
    """Steps 1 and 2 among the ranks from `first` to `end` - 1, by a block; syncthreads. -> epoch + 1

    there  arrivals on this thread's first rank: finding it may precede the end of earlier kernels
    """
    me, threads = rank(), cuda.blockDim.x
    peer = first + cuda.threadIdx.x
    while peer < end:
        if peer != me:
            red_release(there, me, 1, "sys")
        peer += threads
        there = symm_at(arrivals, min(peer, end - 1))
    target = epoch[0] + 1
    peer = first + cuda.threadIdx.x
    while peer < end:
        if peer != me:
            wait(arrivals[peer:], 1, "sys", "acquire", target)
        peer += threads
    cuda.syncthreads()
    return target


@cuda.jit
def barrier_kernel(arrivals, epoch):
    """Barrier of all ranks.

    arrivals  uint64 (n_ranks,), symmetric, zeros at first
    epoch     uint64 (1,), zero at first
    grid      1; any number of threads: best one for each rank
    """
    n = num_ranks()
    there = symm_at(arrivals, min(cuda.threadIdx.x, n - 1))
    griddepcontrol_wait(there, arrivals, epoch, n)
    griddepcontrol_launch_dependents()
    target = arrive_and_wait(arrivals, there, epoch, 0, n)
    if cuda.threadIdx.x == 0:
        epoch[0] = target


@cuda.jit
def team_barrier_kernel(arrivals, epoch, first, end, signals):
    """Barrier of the ranks from `first` to `end` - 1, of which this is one; not for PDL. Otherwise as
    ``barrier_kernel``.

    signals  uint64, equally many of each of these ranks, rank after rank: before this rank arrives at another
             rank, it resets that rank's signals here to 0; its own stay
    """
    each, peer = signals.size // (end - first), first + cuda.threadIdx.x
    while peer < end:
        if peer != rank():
            for i in range((peer - first) * each, (peer - first + 1) * each):
                signals[i] = 0
        peer += cuda.blockDim.x
    there = symm_at(arrivals, min(first + cuda.threadIdx.x, end - 1))
    target = arrive_and_wait(arrivals, there, epoch, first, end)
    if cuda.threadIdx.x == 0:
        epoch[0] = target


GPU_KERNELS = {"barrier": barrier_kernel, "team_barrier": team_barrier_kernel}


def bind_barrier(arrivals, epoch, n_ranks, stream, group=None):
    """The barrier of all ranks (of `group`), bound to `stream`. Of uint64: arrivals, symmetric, n_ranks
    zeros; epoch, local, one."""
    threads = min(n_ranks, MAX_THREADS)
    return bind(barrier_kernel, 1, threads, (arrivals, epoch), stream=stream, group=group)


def bind_team_barrier(arrivals, epoch, ranks, signals, world):
    """The barrier of `ranks` of `world`, a range that this one is in, which first sets `signals` to 0, as
    ``team_barrier_kernel`` says; arrivals has a zero for each rank of the World."""
    threads, given = min(len(ranks), MAX_THREADS), (arrivals, epoch, ranks.start, ranks.stop, signals)
    return bind(team_barrier_kernel, 1, threads, given, stream=world.stream, group=world)
