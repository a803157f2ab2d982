"""Products of float8 with a scale for each block, by the kernel of sm90.py.

    out[m, n] = activation(sum over blocks s of K of
                               a_scales[m, s] * b_scales[n // 128, s] * (sum over k in s of A[m, k] B[n, k])
                           + bias[n])

A and B are float8_e4m3fn, stored by rows. A scale of A is for 128 of K of a row, one of B for 128 of K by 128
columns of the result.

Sums are in two levels. The tensor cores add up a block of K: their sums of float8 keep about 14 bits, and
drop the rest. The threads then multiply these sums by both scales, and add them to float32 registers:

  a warpgroup, for each slab, which is a block of K, and each part of the tile's columns (of more than 128
  there are two):
          1. start the products           they set the first level: 64 x 128 are 64 registers of a thread
          2. ask for the scales of the next slab
          3. wait for the products; behind the last ones of the slab: arrive at empty of its slot
          4. multiply by the scales, and add to the second level: 128 registers of 64 x 256

Tiles of 256 columns have registers for one first level. During 4, the tensor cores have no work of this
warpgroup, only that of the other one. Narrower tiles of two parts have two first levels: they start the
products of both parts, and do 4 of the left part during the products of the right one.

A compiler may move arithmetic past a `wait`. So sums that must be done before the next `wait` pass through
one that waits for nothing.

Scales are read a slab ahead: between two slabs, nothing would hide the time of a load.

Tiles are as wide as WIDTHS say: so a block of 128 columns ends, in each tile, at a multiple of 32.

The machine code must keep (docs/machine_code.md): whole warpgroup.
"""

import functools

from numba import cuda, uint32

from shmemkit.device.cuda.register_tuples import combine_parts
from shmemkit.device.cuda.subarrays import span
from shmemkit.device.cuda.wgmma import ROW_BYTES, warpgroup_mma

from .epilogue import inline
from .problem import FLOAT8, flat
from .sm90 import Accumulation, Kinds, Tile, gemm_body, hand_back, ordered, table_entry

BLOCK = 128  # of K, and columns, that a scale is for
MAX_REACH = 1 << 34  # bytes from the first scale to the last, which is found by 32 bits
WIDTHS = (256, 192, 128, 64, 32)  # columns of a tile


# ---- in the kernel. `scales` is what ``scale_arguments`` returns


@inline
def first_scales(row, expert, n, slab, scales):
    """-> where the scales are: of this row, of that 8 below, of the block of column `n`, of the next block.
    Behind the last row or block it is the last one's, which no result takes."""
    (_, rows, row_step, slab_step), (_, blocks, expert_step, block_step, step) = scales
    of_expert, of_slab = expert * expert_step, slab * slab_step
    return (
        uint32(min(row, rows - 1) * row_step + of_slab),
        uint32(min(row + 8, rows - 1) * row_step + of_slab),
        uint32(of_expert + min(n >> 7, blocks - 1) * block_step + slab * step),
        uint32(of_expert + min((n >> 7) + 1, blocks - 1) * block_step + slab * step),
    )


@inline
def next_scales(at, rest, scales):
    """Those of the next slab, if there are `rest` slabs."""
    (_, _, _, of_a), (_, _, _, _, of_b) = scales
    of_a, of_b = uint32(of_a if rest > 0 else 0), uint32(of_b if rest > 0 else 0)
    return uint32(at[0] + of_a), uint32(at[1] + of_a), uint32(at[2] + of_b), uint32(at[3] + of_b)


@inline
def load_scales(at, scales):
    (of_a, _, _, _), (of_b, _, _, _, _) = scales
    return of_a[at[0]], of_a[at[1]], of_b[at[2]], of_b[at[3]]


@functools.cache
def promotion(first):
    """-> ``promote(sums, products, (scales, end))``, sums with a part's products from column `first` of the
    tile on, of which those from `end` on are in the second block."""

    @inline
    def add_scaled(sums, products, i, given):
        (low, high, left, right), end = given
        of_columns = left if (first + 8 * i & ~31) < end else right
        low, high = low * of_columns, high * of_columns
        return (
            sums[0] + products[0] * low,
            sums[1] + products[1] * low,
            sums[2] + products[2] * high,
            sums[3] + products[3] * high,
        )

    return combine_parts(4, add_scaled)


@functools.cache
def two_levels(tile, place, scales_of, sets=None):
    """-> the Accumulation

    place(m, extra)    -> (row, expert) of row m of out, for scales
    scales_of(extra)   -> what ``scale_arguments`` returns
    sets               of registers for first levels, of tiles of two parts
    """
    parts = 1 if tile.n <= BLOCK else 2
    width = tile.n // parts
    sets = sets or (2 if parts == 2 and tile.n < 256 else 1)
    none, multiply, wait = warpgroup_mma(width, FLOAT8)
    whole, of_b = tile.n % BLOCK == 0 or parts == 1, width * ROW_BYTES
    promote_left, promote_right = promotion(0), promotion(width)

    @inline
    def begin_scales(m, n, slab, lane, extra):
        scales, (row, expert) = scales_of(extra), place(m, extra)
        at = first_scales(row + (lane >> 2), expert, n, slab, scales)
        end = BLOCK if whole else BLOCK - (n & BLOCK - 1)
        return at, load_scales(at, scales), end

    @inline
    def begin_one(m, n, slab, lane, extra):
        at, now, end = begin_scales(m, n, slab, lane, extra)
        return none(), none(), at, now, end

    @inline
    def add_one(state, a, b, more, rest, empty, slot, last, lane, extra):
        sums, products, at, now, end = state
        scales = scales_of(extra)
        products = multiply(products, a, b, 0)
        at = next_scales(at, rest, scales)
        coming = load_scales(at, scales)
        products = wait(products)
        hand_back(empty, slot, lane)
        return promote_left(sums, products, (now, end)), products, at, coming, end

    @inline
    def finish_one(state, empty, last, lane):
        return state[0]

    @inline
    def begin_two(m, n, slab, lane, extra):
        at, now, end = begin_scales(m, n, slab, lane, extra)
        return none(), none(), none(), at, now, end

    @inline
    def add_two(state, a, b, more, rest, empty, slot, last, lane, extra):
        left_sums, right_sums, products, at, now, end = state
        scales = scales_of(extra)
        products = multiply(products, a, b, 0)
        at = next_scales(at, rest, scales)
        coming = load_scales(at, scales)
        products = wait(products)
        left_sums = promote_left(left_sums, products, (now, end))
        products = wait(multiply(products, a, span(b, of_b, of_b), 0))
        hand_back(empty, slot, lane)
        return left_sums, promote_right(right_sums, products, (now, end)), products, at, coming, end

    @inline
    def finish_two(state, empty, last, lane):
        return state[0] + state[1]

    @inline
    def begin_sets(m, n, slab, lane, extra):
        at, now, end = begin_scales(m, n, slab, lane, extra)
        return none(), none(), none(), none(), at, now, end

    @inline
    def add_sets(state, a, b, more, rest, empty, slot, last, lane, extra):
        left_sums, right_sums, left, right, at, now, end = state
        scales = scales_of(extra)
        left = multiply(left, a, b, 0)
        right = multiply(right, a, span(b, of_b, of_b), 0)
        at = next_scales(at, rest, scales)
        coming = load_scales(at, scales)
        left = wait(left, 1)
        left_sums = wait(promote_left(left_sums, left, (now, end)), 1)  # before right is waited for
        right = wait(right)
        hand_back(empty, slot, lane)
        return left_sums, promote_right(right_sums, right, (now, end)), left, right, at, coming, end

    if sets == 2:
        return Accumulation(begin_sets, add_sets, finish_two)
    if parts == 2:
        return Accumulation(begin_two, add_two, finish_two)
    return Accumulation(begin_one, add_one, finish_one)


@inline
def as_in_out(m, extra):
    return m, 0


@inline
def all_of_them(extra):
    return extra


@functools.cache
def scaled_kernel(tile, kinds, order=None):
    """-> the kernel for tiles like `tile` of products like `kinds`, in an `order` as of ``ordered``."""

    gemm = gemm_body(tile, kinds, ordered(order), accumulation=two_levels(tile, as_in_out, all_of_them))

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def scaled_gemm_sm90(operands, size, split, scales):
        """As of ``gemm_kernel``; scales: as of ``scale_arguments``."""
        gemm(operands, size, split, scales)

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


def _listed(tile, *kinds):
    kinds = Kinds(*kinds)
    return table_entry(scaled_kernel(Tile(*tile), kinds), kinds)


MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": _listed((128, 256), FLOAT8, "k", "k", "bfloat16"),
    "128x192": _listed((128, 192), FLOAT8, "k", "k", "bfloat16"),
    "128x128 split": _listed((128, 128, 8, True), FLOAT8, "k", "k", "float32"),
    "128x64": _listed((128, 64), FLOAT8, "k", "k", "float16", "float16", "silu"),
    "64x128": _listed((64, 128), FLOAT8, "k", "k", "bfloat16", "float32", "gelu"),
}
