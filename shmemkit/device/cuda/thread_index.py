"""Which thread of its warp and block a thread of a kernel is, whatever the block's shape."""

from numba import cuda

from shmemkit.compiler.ptx import gpu_function


@gpu_function
def block_thread():
    """The thread's number in its block: x runs fastest."""
    return cuda.threadIdx.x + cuda.blockDim.x * (cuda.threadIdx.y + cuda.blockDim.y * cuda.threadIdx.z)


@gpu_function
def block_threads():
    """Threads of a block."""
    return cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z


@gpu_function
def warp_thread():
    """The thread's number in its warp."""
    return block_thread() & 31


@gpu_function
def warp_threads():
    """Threads of the warp: 32, or fewer in the last one of a block."""
    return min(32, block_threads() - (block_thread() & ~31))


@gpu_function
def one_thread():
    """For operations of a single thread, instead of block_thread."""
    return 0


@gpu_function
def one():
    """For operations of a single thread, instead of block_threads."""
    return 1


@gpu_function
def no_sync():
    """For operations of a single thread, instead of syncthreads."""


@gpu_function
def sync_block():
    cuda.syncthreads()


@gpu_function
def sync_warp():
    cuda.syncwarp()


SHARES = {
    "thread": (one_thread, one, no_sync),
    "warp": (warp_thread, warp_threads, sync_warp),
    "block": (block_thread, block_threads, sync_block),
}
"""Who works together -> the thread's number among them, how many they are, what synchronizes them."""
