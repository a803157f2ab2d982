"""The end of a grid: which block comes there last, and then counts the epoch for all of them."""

from numba import cuda

from .epilogue import inline


@inline
def is_last_block(done):
    """Whether all other blocks of the grid have been here. One thread of each block calls it.

    done    int32 (1,), 0 at first: blocks that have been here. It is 0 again afterwards
    """
    cuda.threadfence()
    last = cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1
    if last:
        cuda.threadfence()
        done[0] = 0
    return last
