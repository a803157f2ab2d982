"""Bugs on the memory of one rank: shared and global memory, among threads, warps and blocks."""

import numpy as np
from numba import cuda, int32

from shmemkit.device import grid_barrier
from shmemkit.emu import RaceError

from .plant import RACE, THREADS, launches, planted, private


@planted(RaceError, THREADS, "x", right=[[1, 2, 3, 4, 5, 6, 7, 7]] * 2)
def neighbours_of_one_warp_in_lockstep(correct):
    """Threads of one warp do not run in lockstep: all must have loaded when the first one stores."""

    @cuda.jit
    def kernel(x, out):
        i = cuda.threadIdx.x
        value = x[min(i + 1, 7)]  # first
        if correct:
            cuda.syncwarp()
        x[i] = value  # second
        out[i] = value

    return launches(kernel, lambda world: world.xp.arange(8, dtype="int32"), threads=8, out=8)


@planted(RaceError, THREADS, "part", right=[[2016]] * 2)
def last_steps_of_a_reduction_without_syncwarp(correct):
    """The classic unrolled reduction: the last warp adds up shared memory without a barrier between the
    steps."""

    @cuda.jit
    def kernel(out):
        part = cuda.shared.array(64, int32)
        i = cuda.threadIdx.x
        part[i] = i
        cuda.syncthreads()
        if i < 32:
            part[i] += part[i + 32]
            cuda.syncwarp()
            step = 16
            while step > 0:
                if i < step:
                    part[i] += part[i + step]  # first second
                if correct:
                    cuda.syncwarp()
                step //= 2
            if i == 0:
                out[0] = part[0]

    return launches(kernel, threads=64)


@planted(RaceError, THREADS, "tile", right=[[7 - i + 10 * k for k in range(4) for i in range(8)]] * 2)
def one_tile_with_one_barrier_a_round(correct):
    """The loop has a barrier between store and load. One of two tiles is stored again two rounds later: the
    barrier of the round between is behind all loads of it."""

    @cuda.jit
    def kernel(out):
        tile = cuda.shared.array((2, 8), int32)
        i = cuda.threadIdx.x
        for k in range(4):
            buffer = k % 2 if correct else 0
            tile[buffer, i] = 10 * k + i  # first
            cuda.syncthreads()
            out[8 * k + i] = tile[buffer, 7 - i]  # second

    return launches(kernel, threads=8, out=32)


@planted(RaceError, RACE, "total", right=[[24]] * 2)
def blocks_count_with_ordinary_additions(correct):
    """`+=` on an array is a load and a store, and those of the blocks are not ordered."""

    @cuda.jit
    def kernel(total, state, out):
        if correct:
            cuda.atomic.add(total, 0, 1)
        else:
            total[0] += 1  # first second
        grid_barrier(state)
        if cuda.grid(1) == 0:
            out[0] = total[0]

    return launches(kernel, private(), private(2, "uint32"), blocks=3, threads=8)


@planted(RaceError, RACE, "out", right=[[1]] * 2)
def all_threads_set_a_flag_to_the_same_value(correct):
    """Two weak stores to one place conflict, whatever their values are."""

    @cuda.jit
    def kernel(x, out):
        if x[cuda.threadIdx.x] < 0:
            out[0] = 1  # first second

    x = [3, -1, 4, 1] if correct else [3, -1, -4, 1]
    return launches(kernel, lambda world: world.xp.array(x, "int32"), threads=4)


@planted(RaceError, RACE, "left", right=[[1, 1, 1, 1, 2, 2, 2, 2]] * 2)
def slices_that_overlap_by_one_element(correct):
    """Two blocks fill slices of one array of bytes. That they share a word and a cache line is no
    conflict."""

    @cuda.jit
    def fill(left, right):
        i = cuda.threadIdx.x
        if cuda.blockIdx.x == 0:
            left[i] = 1  # first
        else:
            right[i] = 2  # second

    def main(world):
        x = world.xp.zeros(8, "uint8")
        fill[2, 4, world.stream](x[:4] if correct else x[1:5], x[4:])
        return world.asnumpy(x).tolist()

    return main


@planted(RaceError, THREADS, "parts", right=[[6]] * 2)
def block_zero_adds_up_the_other_blocks_results(correct):
    """The barrier of a block says nothing about other blocks. The next kernel on the stream may add up."""

    @cuda.jit
    def compute(parts, out):
        parts[cuda.blockIdx.x] = cuda.blockIdx.x + 1  # first
        cuda.syncthreads()
        if cuda.blockIdx.x == 0 and not correct:
            out[0] = parts[0] + parts[1] + parts[2]  # second

    @cuda.jit
    def add_up(parts, out):
        out[0] = parts[0] + parts[1] + parts[2]

    def main(world):
        parts, out = np.zeros(3, "int32"), np.zeros(1, "int32")
        compute[3, 1, world.stream](parts, out)
        if correct:
            add_up[1, 1, world.stream](parts, out)
        world.synchronize()
        return out.tolist()

    return main


@planted(RaceError, THREADS, "bins", right=[[1, 3]] * 2)
def histogram_bins_are_read_before_all_have_added(correct):
    """The additions are atomic, but the bins are read by ordinary loads, and no barrier is before that."""

    @cuda.jit
    def kernel(x, out):
        bins = cuda.shared.array(2, int32)
        i = cuda.threadIdx.x
        if i < 2:
            bins[i] = 0
        cuda.syncthreads()
        cuda.atomic.add(bins, x[i], 1)  # first
        if correct:
            cuda.syncthreads()
        if i < 2:
            out[i] = bins[i]  # second

    return launches(kernel, lambda world: world.xp.array([0, 1, 1, 1], "int32"), threads=4, out=2)


@planted(RaceError, RACE, "mine", right=[[0, 2, 4, 6]] * 2)
def shared_array_in_the_place_of_a_local_one(correct):
    """Local arrays belong to one thread each; a shared array is one for all threads of the block."""

    @cuda.jit
    def kernel(out):
        if correct:
            mine = cuda.local.array(2, int32)
        else:
            mine = cuda.shared.array(2, int32)
        i = cuda.threadIdx.x
        mine[0] = i  # first second
        mine[1] = i  # first second
        out[i] = mine[0] + mine[1]  # first second

    return launches(kernel, threads=4, out=4)
