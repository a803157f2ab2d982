"""Where all ranks meet in a kernel, a block of each with those of the same number."""

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
    """Tell block b of all other ranks, and wait for it, the ranks shared by the threads of my block.

    signals  uint64 (n_ranks, blocks), symmetric: signals[k, b], on every rank, is the number of the last call
             of rank k's block b that has come here (only k sets it)
    epoch     the number of this call

    release and acquire, sys. Between it and what it is about come syncthreads, before and after.
    """
    me, n, threads = rank(), num_ranks(), cuda.blockDim.x
    notify_all(signals[me, b:], epoch)
    y = cuda.threadIdx.x + 1
    while y < n:
        wait(signals[me + y if me + y < n else me + y - n, b:], 1, "sys", "acquire", epoch)
        y += threads
