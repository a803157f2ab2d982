"""Kernels of this library in a CuPy pipeline, and in a kernel of one's own.

    ./mpi_launch.sh -n 2 examples/17_kernels_in_a_pipeline.py

A layer of a tensor-parallel network: each rank has some of the inputs, and so a part of each sum. An
all-reduce adds up the parts; then come bias and ReLU. The example has it in two forms:

  pipeline    a kernel of CuPy, the all-reduce, two kernels of CuPy, in one CUDA graph. The all-reduce is
              ``kernels.all_reduce(...)``, launched by Numba's ``kernel[grid, block, stream]``
  one kernel  each block computes a tile of the sums, ends with the all-reduce of its tile, and stores what
              comes of it. The all-reduce is the same function, ``kernels.all_reduce(...).device``

On the emulator CuPy is NumPy, which no graph captures: there the pipeline runs step by step. With 2 ranks it
prints

    2 ranks (emulator), 24 float32
    pipeline: passed
    one kernel: passed
"""

import argparse

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit import kernels

CALLS = 3
TILE = 16  # sums of a block: a multiple of 16 bytes


def pipeline(world, x, weight, bias, transport):
    """-> run() -> the result"""
    xp, emulated = world.xp, world.backend.name == "emulator"
    part, out = xp.empty_like(x), xp.empty_like(x)
    all_reduce = kernels.all_reduce(world.n_ranks, "sum", "float32", transport=transport)
    scratch = all_reduce.scratch(world, part.nbytes)

    def layer():
        xp.multiply(x, weight, out=part)
        all_reduce[scratch.grid, scratch.block, world.stream](part, out, *scratch)
        if emulated:
            world.synchronize()  # NumPy does not wait for a stream
        xp.add(out, bias, out=out)
        xp.maximum(out, 0, out=out)

    layer()  # what CuPy and Numba do once, they do before the capture
    if emulated:
        return layer, out, scratch
    world.stream.begin_capture()
    layer()
    graph = world.stream.end_capture()
    return lambda: graph.launch(world.stream), out, scratch


def one_kernel(world, x, weight, bias, transport):
    """The same, in a kernel of one's own."""
    all_reduce = kernels.all_reduce(world.n_ranks, "sum", "float32", transport=transport)
    all_reduce_tile = all_reduce.device

    @cuda.jit
    def layer(x, weight, bias, out, scratch):
        """A tile in each block, of one-dimensional blocks of whole warps."""
        tile, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        first, last = tile * TILE, min(tile * TILE + TILE, x.size)
        mine = out[first:last]
        for i in range(thread, last - first, threads):
            mine[i] = x[first + i] * weight[first + i]
        all_reduce_tile(mine, mine, tile, scratch)  # in place
        for i in range(thread, last - first, threads):
            mine[i] = max(mine[i] + bias[first + i], np.float32(0))

    out, tiles = world.xp.empty_like(x), -(-x.size // TILE)
    scratch = all_reduce.tiles(world, TILE * x.itemsize, tiles)
    # All blocks wait for the other ranks: bind refuses a grid that does not fit on the GPU at once.
    args = x, weight, bias, out, scratch.args
    return sk.bind(layer, tiles, 32, args, co_resident=True), out, scratch


def main():
    parser = argparse.ArgumentParser(description="Kernels of this library in a CuPy pipeline.")
    parser.add_argument("--size", type=int, default=24, help="float32 of each rank (24)")
    parser.add_argument("--transport", default="ll128", help="ll, ll128 or lamport (ll128)")
    options = parser.parse_args()

    with sk.init() as world:
        n, size, xp = world.n_ranks, options.size, world.xp
        world.print(f"{n} ranks ({world.backend.name}), {size} float32", ranks=0)
        # Small whole numbers: their sums are exact in any order.
        data = np.random.default_rng(0).integers(-9, 9, (CALLS, n, size)).astype("float32")
        weights, bias = np.arange(n * size, dtype="float32").reshape(n, size) % 7, np.full(size, 3, "float32")
        x, weight, on_gpu = xp.empty(size, "float32"), xp.asarray(weights[world.rank]), xp.asarray(bias)
        for name, form in (("pipeline", pipeline), ("one kernel", one_kernel)):
            x.fill(0)
            run, out, scratch = form(world, x, weight, on_gpu, options.transport)
            for of_call in data:
                world.synchronize()  # x is written on the host
                x[:] = xp.asarray(of_call[world.rank])
                run()
                expected = np.maximum((of_call * weights).sum(axis=0) + bias, 0)
                wrong = int((world.asnumpy(out) != expected).sum())
                if wrong:
                    raise RuntimeError(f"{name}: {wrong} wrong elements on rank {world.rank}")
            world.print(f"{name}: passed", ranks=0)
            scratch.free()


if __name__ == "__main__":
    main()
