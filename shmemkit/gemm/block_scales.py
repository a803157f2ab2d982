"""Products of float8 with a scale for each block, by the kernel of sm90.py.

    out[m, n] = activation(sum over blocks s of K of
                               a_scales[m, s] * b_scales[n // 128, s] * (sum over k in s of A[m, k] B[n, k])
                           + bias[n])

A and B are float8_e4m3fn, stored by rows. A scale of A is for 128 of K of a row, one of B for 128 of K by 128
columns of the result.

Sums are in two levels. The tensor cores add up a block of K: their sums of float8 keep about 14 bits, and
lose what is less. The threads then multiply these sums by both scales, and add them to float32 registers:

  a warpgroup, for each slab, which is a block of K:
          1. load the scales
    and for each 128 columns of the tile:
          2. start the products                    they set the first level: 64 registers of a thread
          3. wait for the products; behind the last ones of the slab: arrive at empty of its slot
          4. multiply by the scales, and add to the second level: 128 registers of 64 x 256

The tensor cores have no work of this warpgroup during 4. They have that of the other one, which is ahead of
it or behind: products take longer than 4.

Tiles begin at multiples of 128 columns or lie in 128, so a part of one has one scale of B.
"""

import functools

from numba import cuda, types, uint32, uint64

from shmemkit.device.cuda.register_tuples import combine_parts
from shmemkit.device.cuda.subarrays import span
from shmemkit.device.cuda.wgmma import ROW_BYTES, warpgroup_mma

from .epilogue import inline
from .problem import FLOAT8, flat
from .sm90 import Accumulation, Kinds, Tile, gemm_body, hand_back, ordered, signature

BLOCK = 128  # of K, and columns, that a scale is for
MAX_SCALES = 1 << 30
WIDTHS = (256, 128, 64, 32)  # columns of a tile


# ---- in the kernel. `scales` is what ``scale_arguments`` returns


@inline
def scale_of_row(m, slab, scales):
    """Of A; of the last row for those behind it, which are in no result."""
    (of_a, rows, row_step, slab_step), _ = scales
    return of_a[uint64(uint32(min(m, rows - 1) * row_step)) + uint64(slab * slab_step)]


@inline
def scale_of_columns(expert, n, slab, scales):
    """Of B; of the last block for columns behind it."""
    _, (of_b, blocks, expert_step, block_step, slab_step) = scales
    block = expert * expert_step + min(n >> 7, blocks - 1) * block_step
    return of_b[uint64(uint32(block)) + uint64(slab * slab_step)]


@functools.cache
def two_levels(tile, scale_of_a, scale_of_b):
    """-> the Accumulation, where device functions find the scales:

    scale_of_a(m, slab, extra)     of row m of out
    scale_of_b(m, n, slab, extra)  of the columns from n on, for the tile with row m

    The sums are a tuple of the second level, in parts of up to 128 columns, and of the first one of a part,
    which is the last element. So the first levels of all parts are in the same registers.
    """
    width = min(tile.n, BLOCK)
    none, multiply, wait = warpgroup_mma(width, FLOAT8)

    @inline
    def before(m, n, slab, lane, extra):
        row = m + (lane >> 2)
        return (  # 1
            scale_of_a(row, slab, extra),
            scale_of_a(row + 8, slab, extra),
            scale_of_b(m, n, slab, extra),
            scale_of_b(m, n + BLOCK, slab, extra),
        )

    @inline
    def add_scaled(sums, products, i, scales):
        low, high = scales
        return (
            sums[0] + products[0] * low,
            sums[1] + products[1] * low,
            sums[2] + products[2] * high,
            sums[3] + products[3] * high,
        )

    promote = combine_parts(4, add_scaled)

    @inline
    def zeros_of_one():
        return none(), none()

    @inline
    def add_one(sums, a, b, scales, more, empty, slot, last, lane):
        sums, products = sums
        low, high, scale, _ = scales
        products = wait(multiply(products, a, b, 0))  # 2, 3
        hand_back(empty, slot, lane)
        return promote(sums, products, (low * scale, high * scale)), products  # 4

    @inline
    def finish_one(sums, empty, last, lane):
        return sums[0]

    @inline
    def zeros_of_two():
        return none(), none(), none()

    @inline
    def add_two(sums, a, b, scales, more, empty, slot, last, lane):
        left_sums, right_sums, products = sums
        low, high, left, right = scales
        products = wait(multiply(products, a, b, 0))
        left_sums = promote(left_sums, products, (low * left, high * left))
        products = wait(multiply(products, a, span(b, BLOCK * ROW_BYTES, BLOCK * ROW_BYTES), 0))
        hand_back(empty, slot, lane)
        return left_sums, promote(right_sums, products, (low * right, high * right)), products

    @inline
    def finish_two(sums, empty, last, lane):
        return sums[0] + sums[1]

    if tile.n > BLOCK:
        return Accumulation(zeros_of_two, before, add_two, finish_two)
    return Accumulation(zeros_of_one, before, add_one, finish_one)


@functools.cache
def scaled_kernel(tile, kinds, order=None):
    """-> the kernel for tiles like `tile` of products like `kinds`, in an `order` as of ``ordered``."""

    @inline
    def scale_of_b(m, n, slab, scales):
        return scale_of_columns(0, n, slab, scales)

    gemm = gemm_body(tile, kinds, ordered(order), accumulation=two_levels(tile, scale_of_row, scale_of_b))

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def scaled_gemm_sm90(map_a, map_b, map_out, bias, m, n, k, splits, partials, arrivals, scales):
        """As of ``gemm_kernel``; scales: as of ``scale_arguments``."""
        gemm(map_a, map_b, map_out, bias, m, n, k, splits, partials, arrivals, scales)

    return scaled_gemm_sm90


# ---- on the host


def scale_arguments(of_rows, of_columns):
    """-> what kernels get of scales: those of A (M, blocks of K), and of B (blocks of N, blocks of K), or of
    each expert's. Their strides may be any that are not negative."""
    steps = [step // 4 for step in (*of_rows.strides, *of_columns.strides)]
    if of_columns.ndim == 2:
        steps.insert(2, 0)
    of_a = flat(of_rows, "float32"), of_rows.shape[0], *steps[:2]
    return of_a, (flat(of_columns, "float32"), of_columns.shape[-2], *steps[2:])


# ---- for tests

_ints = (types.int64,)
SCALES = types.Tuple(
    (types.Tuple((types.float32[::1], *_ints * 3)), types.Tuple((types.float32[::1], *_ints * 4)))
)


def _listed(tile, *kinds):
    tile, kinds = Tile(*tile), Kinds(*kinds)
    return scaled_kernel(tile, kinds), signature(kinds, SCALES)


MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": _listed((128, 256), FLOAT8, "k", "k", "bfloat16"),
    "128x128 split": _listed((128, 128, 8, True), FLOAT8, "k", "k", "float32"),
    "128x64": _listed((128, 64), FLOAT8, "k", "k", "float16", "float16", "silu"),
    "64x128": _listed((64, 128), FLOAT8, "k", "k", "bfloat16", "float32", "gelu"),
}
