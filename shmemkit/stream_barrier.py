"""The barrier of all ranks on a stream, over NVLink, whose wait is bounded in time and names who is missing.

Signals   arrivals[k], on every rank: how many times rank k has arrived (only rank k adds to it)
Counter   epoch[0], local: calls so far

  thread k:  1. add one to arrivals[me] on rank k         release, sys: publishes what was before it on the
                                                          stream
             2. wait until arrivals[k] >= epoch + 1       acquire, sys: sees what rank k did before
  block:     3. syncthreads, then thread 0 sets epoch += 1

Step 1 and 3 are done even when a wait of this rank has expired, unlike `notify` (see ``device.deadline``): so
every rank counts each of its calls exactly once, and a barrier that has expired does not disturb a later one.
One block, at most 1024 ranks.
"""

from numba import cuda

from .device import num_ranks, rank, red_release, symm_at, wait
from .launch import bind


@cuda.jit
def barrier_kernel(arrivals, epoch):
    peer = cuda.threadIdx.x
    target = epoch[0] + 1
    if peer < num_ranks():
        red_release(symm_at(arrivals, peer), rank(), 1, "sys")
        wait(arrivals[peer:], 1, "sys", "acquire", target)
    cuda.syncthreads()
    if peer == 0:
        epoch[0] = target


def bind_barrier(arrivals, epoch, n_ranks, stream):
    """The barrier, bound to `stream`. Of uint64: arrivals, symmetric, n_ranks zeros; epoch, local, one."""
    return bind(barrier_kernel, 1, n_ranks, (arrivals, epoch), stream=stream)
