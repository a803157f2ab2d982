"""Rows that are moved to where a product of sorted rows takes them, and back: for "sequential" methods.

take_rows   sorted[i] = x[row of pairs[i]], as an ExpertIndex has the pairs
put_rows    out[pairs[i]] = sorted[i]
"""

from numba import cuda, int64

from shmemkit.device.swizzle import quotient
from shmemkit.gemm.grouped import GroupedGemm
from shmemkit.runtime.launch import bind
from shmemkit.support.arrays import address_of

BLOCKS = 8  # for each multiprocessor
WORDS = 8, 4, 2  # bytes


@cuda.jit
def take_rows(to, x, pairs, sizes, topk):
    """to, x   2-D arrays of words
    pairs, sizes   of an ExpertIndex; topk: pairs of a row
    grid           any number of blocks and threads
    """
    i = int64(cuda.blockIdx.x)
    while i < sizes[1]:
        row, j = quotient(int64(pairs[i]), topk), int64(cuda.threadIdx.x)
        while j < to.shape[1]:
            to[i, j] = x[row, j]
            j += cuda.blockDim.x
        i += cuda.gridDim.x


@cuda.jit
def put_rows(to, x, pairs, sizes):
    """As ``take_rows``."""
    i = int64(cuda.blockIdx.x)
    while i < sizes[1]:
        pair, j = int64(pairs[i]), int64(cuda.threadIdx.x)
        while j < to.shape[1]:
            to[pair, j] = x[i, j]
            j += cuda.blockDim.x
        i += cuda.gridDim.x


def threads_of(world):
    return 32 if world.backend.name == "emulator" else 256


def words_of(*arrays):
    """The 2-D `arrays` as such of the same, largest words."""
    given = [stride for x in arrays for stride in (x.strides[0], x.shape[1] * x.itemsize, address_of(x))]
    size = next(size for size in WORDS if not any(at % size for at in given))
    return [x.view(f"uint{8 * size}") for x in arrays]


def moved_product(world, gpu, index, topk, x, w, out):
    """-> the steps that compute out[pairs[i]] = x[row of pairs[i]] @ w[e].T, where `topk` pairs have a row"""
    n_pairs, xp = index.pairs.size, world.xp
    rows, results = xp.empty((n_pairs, x.shape[1]), x.dtype), xp.empty((n_pairs, w.shape[1]), x.dtype)
    blocks, threads = gpu.blocks(min(n_pairs, BLOCKS * gpu.multiprocessors)), threads_of(world)
    take = bind(take_rows, blocks, threads, (*words_of(rows, x), index.pairs, index.sizes, topk))
    arrays = {"x": rows, "w": w, "counts": index.counts, "out": results, "bias": None}
    product = GroupedGemm(sms=gpu.sms)._plan(arrays, {"activation": None, "world": world})
    put = bind(put_rows, blocks, threads, (*words_of(out, results), index.pairs, index.sizes))
    return [take, product, put]


GPU_KERNELS = {
    f"{name}_rows[{word}]": (kernel, {"to x": word})
    for name, kernel in (("take", take_rows), ("put", put_rows))
    for word in ("uint16", "uint32", "uint64")
}
