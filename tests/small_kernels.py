"""Small kernels that several tests launch."""

from numba import cuda


@cuda.jit
def fill(x, value):
    for i in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        x[i] = value


@cuda.jit
def take(out, seen):
    for i in range(cuda.threadIdx.x, seen.size, cuda.blockDim.x):
        seen[i] = out[i]


@cuda.jit
def spin(clocks):
    for _ in range(clocks // 1000):
        cuda.nanosleep(1000)
