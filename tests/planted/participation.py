"""Planted bugs: calls for a whole warp or block that some of its threads do not make, or make otherwise."""

from numba import cuda

from shmemkit.device import (
    ComparisonType,
    SignalOp,
    copy_block,
    copy_warp,
    fcollect_warp,
    grid_barrier,
    num_ranks,
    put_block,
    put_signal_warp,
    rank,
    signal_wait_until,
    wait_block,
    wait_warp,
)
from shmemkit.emu import EmulatorError

from .plant import SAME_CALLS, ints, launches, planted, private, signals

X = ints(64)


@planted(
    EmulatorError,
    SAME_CALLS,
    "copy_block(): all threads",
    "threads 0 to 31: called",
    "32",
    right=[[7] * 4],
    ranks=1,
)
def copy_by_the_first_warp(correct):
    """The copy for the block stands in the branch of one warp."""

    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        if correct or t < 32:
            copy_block(x[4:8], x[:4])
        cuda.syncthreads()
        if t < 4:
            out[t] = x[4 + t] + 7

    return launches(kernel, ints(16), threads=40, out=4)


@planted(
    EmulatorError, SAME_CALLS, "wait_warp(): all threads of the warp", "wait_block", right=[[1] * 2], ranks=1
)
def a_warp_waits_before_the_block(correct):
    """One warp waits for a signal of its own before it comes to the wait of the block, where the other is
    already; half of it does not."""

    @cuda.jit
    def kernel(signals, out):
        t = cuda.threadIdx.x
        if t < (32 if correct else 16):
            wait_warp(signals, 1, "sys", "acquire", 0)
        wait_block(signals[1:], 1, "sys", "acquire", 0)
        if t % 32 == 0:
            out[t // 32] = 1

    return launches(kernel, signals(2), threads=64, out=2)


@planted(
    EmulatorError,
    SAME_CALLS,
    "copy_warp(): all threads of the warp",
    "src=",
    "not 16 bytes from",
    right=[[0] * 4],
    ranks=1,
)
def copy_of_different_sources(correct):
    """Each lane copies a part that it has cut out itself; copy_warp cuts it again."""

    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        copy_warp(x[:4], x[16:20] if correct else x[16 + 4 * t : 20 + 4 * t])
        cuda.syncwarp()
        out[t] = x[t]

    return launches(kernel, X, threads=4, out=4)


@planted(EmulatorError, SAME_CALLS, "wait_warp()", "value=1, not 2", right=[[1] * 4], ranks=1)
def wait_for_different_values(correct):
    """A value that differs from lane to lane: those that wait for more wait alone."""

    @cuda.jit
    def kernel(signal, out):
        t = cuda.threadIdx.x
        if t == 0:
            signal[0] = 2
        cuda.syncthreads()
        wait_warp(signal, 1, "gpu", "acquire", 1 if correct else 1 + t // 2)
        out[t] = 1

    return launches(kernel, signals(), threads=4, out=4)


@planted(EmulatorError, SAME_CALLS, "put_block()", "returned", right=[[1] * 3, [1] * 3])
def put_after_some_have_returned(correct):
    """The threads without an element of their own return before the put that all of them make."""

    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        if t >= 3 and not correct:
            return
        put_block(x[:4], x[4:8], (rank() + 1) % num_ranks())
        if t < 3:
            out[t] = 1

    return launches(kernel, X, threads=6, out=3)


@planted(EmulatorError, SAME_CALLS, "fcollect_warp()", "thread 0", right=[[1], [1]])
def collective_by_the_first_lane(correct):
    """A collective for the warp stands in the branch of one lane."""

    @cuda.jit
    def kernel(x, y, out):
        t = cuda.threadIdx.x
        if correct or t == 0:
            fcollect_warp(0, x, y)
        if t == 0:
            out[0] = 1

    return launches(kernel, X, ints(8), threads=4)


@planted(EmulatorError, SAME_CALLS, "put_signal_warp()", "in syncwarp", right=[[0] * 3, [0] * 3])
def put_beside_a_barrier_of_the_warp(correct):
    """One lane is at a barrier of the warp while the others put."""

    @cuda.jit
    def kernel(x, signal, out):
        t = cuda.threadIdx.x
        if correct or t != 1:
            put_signal_warp(x[:4], x[4:8], signal, 1, SignalOp.SIGNAL_SET, (rank() + 1) % num_ranks())
        else:
            cuda.syncwarp()
        if t == 0:
            signal_wait_until(signal, ComparisonType.CMP_GE, 1)
        cuda.syncwarp()
        out[t] = x[t]

    return launches(kernel, X, signals(), threads=3, out=3)


@planted(
    EmulatorError,
    SAME_CALLS,
    "syncthreads(): all lanes of a warp",
    "different places",
    right=[[33, 1]],
    ranks=1,
)
def barrier_in_both_branches(correct):
    """Whole warps may be at two barriers of the code; lanes of one warp may not. The others have ended."""

    @cuda.jit
    def kernel(x, out):
        t = cuda.threadIdx.x
        if t >= 64:
            return
        if t < (32 if correct else 16):
            x[t] = t
            cuda.syncthreads()
            if t == 0:
                out[0] = x[33]
        else:
            x[t] = t
            cuda.syncthreads()
            if t == 40:
                out[1] = x[1]

    return launches(kernel, X, threads=96, out=2)


@planted(EmulatorError, SAME_CALLS, "syncthreads()", "different places", right=[[1] * 4], ranks=1)
def a_function_with_a_barrier_called_in_both_branches(correct):
    """Lanes of one warp call it at two places."""

    @cuda.jit(device=True)
    def meet():
        cuda.syncthreads()

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if correct or t < 2:
            meet()
        else:
            meet()
        out[t] = 1

    return launches(kernel, threads=4, out=4)


@planted(EmulatorError, SAME_CALLS, "with the mask 0x3", "not among these", right=[[1] * 4], ranks=1)
def barrier_of_other_lanes(correct):
    """Lanes 2 and 3 meet with a mask that they are not in."""

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if correct:
            cuda.syncwarp(0x3 if t < 2 else 0xC)
        else:
            cuda.syncwarp(0x3)
        out[t] = 1

    return launches(kernel, threads=4, out=4)


@planted(EmulatorError, SAME_CALLS, "with the mask", "instead", right=[[1] * 4], ranks=1)
def barrier_with_different_masks(correct):
    """All lanes that meet give the same mask."""

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        cuda.syncwarp(0xF if correct or t == 0 else 0x7)
        out[t] = 1

    return launches(kernel, threads=4, out=4)


@planted(EmulatorError, SAME_CALLS, "grid barrier", "returned", right=[[1]], ranks=1)
def barrier_of_a_grid_of_which_a_block_has_returned(correct):
    """Block 0 returns without the barrier of the grid."""

    @cuda.jit
    def kernel(state, out):
        if correct or cuda.blockIdx.x:
            grid_barrier(state)
        if cuda.blockIdx.x + cuda.threadIdx.x == 0:
            out[0] = 1

    return launches(kernel, private(2, "uint32"), blocks=3, threads=2)


@planted(EmulatorError, SAME_CALLS, "wait_block()", "threads 0 to 31: called", right=[[1, 0]], ranks=1)
def a_wait_of_the_block_in_a_kernel_of_special_warps(correct):
    """A consumer warp waits alone: with `wait`, not for the block."""

    @cuda.jit
    def kernel(signal, out):
        t = cuda.threadIdx.x
        if t < 32:
            if correct:
                wait_warp(signal, 1, "gpu", "acquire", 0)
            else:
                wait_block(signal, 1, "gpu", "acquire", 0)
            if t == 0:
                out[0] = 1
        else:
            cuda.syncwarp()
            if t == 32:
                out[1] = 0

    return launches(kernel, signals(), threads=64, out=2)
