"""A barrier in a kernel: block b of each rank with blocks b of all others."""

from numba import cuda

from shmemkit.device import notify, num_ranks, rank, wait


@cuda.jit(device=True)
def notify_all(signal, value):
    """Set signal[0], symmetric, on all others to `value`: release, sys. By the threads of a block."""
    me, n, y = rank(), num_ranks(), cuda.threadIdx.x + 1
    while y < n:
        notify(signal, me + y if me + y < n else me + y - n, value, "set", "sys")
        y += cuda.blockDim.x


@cuda.jit(device=True)
def block_barrier(signals, b, epoch):
    """Signal block b of all other ranks and wait for it. The threads of the block share the ranks.

    signals  uint64 (n_ranks, blocks), symmetric: signals[k, b], on every rank, is the last epoch in which
             rank k's block b has arrived (only rank k sets it)
    epoch    this epoch

    release and acquire, sys. The caller adds syncthreads between the barrier and the accesses that it
    orders, before and after.
    """
    me, n, threads = rank(), num_ranks(), cuda.blockDim.x
    notify_all(signals[me, b:], epoch)
    y = cuda.threadIdx.x + 1
    while y < n:
        wait(signals[me + y if me + y < n else me + y - n, b:], 1, "sys", "acquire", epoch)
        y += threads
