"""Grouped product by Hopper's tensor cores: the kernel of sm90.py, with other rows, weights and stores.

    out[r] = activation(x[r] @ w[e].T + bias[e])   for each row r of expert e

A block computes tiles t, t + gridDim.x, .. of all experts, which it finds in its table (``expert_tiles.py``).

B         w as one matrix: the rows of all experts below each other (where N is contiguous, their rows of K).
          The last tile of an expert may also load rows of the next one. Nobody stores these products
A         boxes of `loaded` rows, only as many as a tile has rows of its expert
Out       the pieces of sm90.py. A warp whose 16 rows are all the expert's stores a piece by the TMA. Where
          fewer are, the TMA would write over the next expert's rows: lanes store 16 bytes of a row each

No race: as in sm90.py. Lanes read a piece before the syncwarp after which it is overwritten. A warp commits a
group for each piece, an empty one where lanes have stored, so that waits for groups count pieces.
"""

import functools
from typing import Any

from numba import cuda, types

from shmemkit.device import load_vec16, store_vec16
from shmemkit.device.cuda.accumulators import ROW_BITS
from shmemkit.device.cuda.tma import tma_store
from shmemkit.support.settings import listed

from ..block_scales import WIDTHS, scale_arguments, two_levels
from ..epilogue import inline
from ..problem import FLOAT8, Problem, arrays_of, flat, not_of_tensor_cores
from ..sm90 import ALONE, ITEMSIZE, WARPGROUP, Kinds, Layout, Tile, gemm_body, table_entry
from ..sm90_host import (
    ALIGNED,
    DTYPES,
    SLAB,
    Choice,
    Sm90,
    as_rows,
    bind_gemm,
    major,
    rows_that_are_not_of_k,
    rows_that_cannot_be_stored,
    taken,
)
from .expert_tiles import TABLE, expert_of, expert_tiles, row_of, rows_in

FEW = 64  # rows of an expert, on average: up to so many the tiles have 64 rows
GROUP = 8  # rows of tiles that are computed column after column
BOX = {64: 16, 128: 64}  # rows of a tile: of a box of A


@functools.cache
def storing_rows(tile, kinds, row_in_out):
    """-> ``store(piece, at, n, left, size_n, out, pitch, lane, extra)``, by a warp: store the first `left` of
    16 rows of a piece of the tile at `at`, columns from n on below size_n; a lane stores 16 bytes of a row.

    row_in_out(at, row, extra)   -> where row `row` of these is in out
    out, pitch                   uint8, 1-D; bytes from row to row
    """
    row_bytes, itemsize = Layout(tile, kinds).row_bytes, ITEMSIZE[kinds.out_dtype]
    (shift, mask), units = ROW_BITS[row_bytes], row_bytes // 16
    log_units = units.bit_length() - 1

    @inline
    def store(piece, at, n, left, size_n, out, pitch, lane, extra):
        unit = lane & (units - 1)
        to = n * itemsize + 16 * unit
        for i in range(units // 2):
            row = (lane >> log_units) + i * (32 // units)
            if row < left and to < size_n * itemsize:
                words = load_vec16(piece, row * row_bytes + ((unit ^ (row >> shift & mask)) << 4))
                store_vec16(out, row_in_out(at, row, extra) * pitch + to, words)

    return store


@functools.cache
def grouped_kernel(tile, kinds):
    """-> the kernel for tiles like `tile`, with `loaded` rows in a box, of products like `kinds`"""
    plan, find = expert_tiles(tile.m, tile.group)
    box, by_k = tile.rows_of_a, kinds.b_major == "k"

    @inline
    def row_in_out(found, row, extra):
        return row_of(found) + row

    store_rows = storing_rows(tile, kinds, row_in_out)

    @inline
    def order(t, n_m, n_n, extra):
        (counts, firsts), _, _, _ = extra
        return find(t, n_n, counts, firsts)

    @inline
    def rows(found, tile_m, extra):
        return found, found

    @inline
    def a_at(found, map_a, extra):
        return map_a, row_of(found)

    @inline
    def b_at(found, n, map_b, extra):
        _, (size_n, size_k, _), _, _ = extra
        if by_k:
            return map_b, 0, expert_of(found) * size_n + n
        return map_b, expert_of(found) * size_k, n

    @inline
    def bias_at(found, extra):
        _, (_, _, bias_step), _, _ = extra
        return expert_of(found) * bias_step

    @inline
    def boxes(found, extra):
        return (rows_in(found) + box - 1) // box

    @inline
    def send(piece, map_out, found, n, lane, extra):
        _, (size_n, _, _), (out, pitch), _ = extra
        left = rows_in(found) - 16 * ((cuda.threadIdx.x - WARPGROUP) >> 5)
        if left >= 16:
            if lane == 0:
                tma_store(map_out, n, row_of(found), piece)
        else:
            store_rows(piece, found, n, left, size_n, out, pitch, lane, extra)

    @inline
    def place(found, extra):
        return row_of(found), expert_of(found)

    @inline
    def scales_of(extra):
        _, _, _, scales = extra
        return scales

    gemm = gemm_body(
        tile,
        kinds,
        order,
        a_at=a_at,
        exchange=ALONE._replace(rows=rows),
        b_at=b_at,
        bias_at=bias_at,
        boxes=boxes,
        send=send,
        accumulation=two_levels(tile, place, scales_of) if kinds.dtype == FLOAT8 else None,
    )

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def grouped_gemm_sm90(operands, size, split, counts, bias_step, out, pitch, report, scales):
        """As of ``gemm_kernel``, where m is the number of x's rows, map_b that of w as one matrix, and K not
        split, and

        counts      int32: the rows of each expert
        bias_step   elements from one expert's bias to the next one's; 0 for one of all
        out, pitch  uint8, 1-D: from its first byte to its last; bytes from row to row
        report      as of ``report_counts``
        scales      as of ``scale_arguments``; () without
        """
        firsts = cuda.shared.array(TABLE, types.int32)
        m, n, k = size
        n_m = plan(counts, m, firsts, report)
        extra = (counts, firsts), (n, k, bias_step), (out, pitch), scales
        gemm(operands, (n_m * tile.m, n, k), split, extra)

    return grouped_gemm_sm90


# ---- on the host


def stacked(w):
    """w (E, N, K) as B's transpose (N, K) in ``bind_gemm``: (E * N, K) where K is contiguous, or (N, E * K)
    where N is; None if it is neither, or experts lie apart."""
    (n_experts, n, k), steps = w.shape, w.strides
    strided = arrays_of(w).lib.stride_tricks.as_strided
    if n_experts == 1 or steps[0] == n * steps[1]:
        if steps[2] == w.itemsize:
            return strided(w, (n_experts * n, k), steps[1:])
    if n_experts == 1 or steps[0] == k * steps[2]:
        if steps[1] == w.itemsize:
            return strided(w, (n, n_experts * k), steps[1:])
    return None


def weights_that_cannot_be_loaded(w):
    """-> why not, or None."""
    matrix = stacked(w)
    if matrix is None or not taken(as_rows(matrix)):
        return (
            f"w has strides {w.strides}; its experts must lie one after another, with rows or columns that "
            f"are contiguous and begin at multiples of {ALIGNED} bytes"
        )
    if major(matrix) == "mn" and w.shape[2] % SLAB:
        return f"K is {w.shape[2]}, and w's columns are contiguous; then K must be a multiple of {SLAB}"
    return None


def choose(rows, n_experts, n, sms, widths=(256, 224, 192, 160, 128, 96, 64)):
    """-> (m, n) of a tile, for so many rows of all experts: 64 where a mean expert has no more, and then as
    wide as leaves tiles for all multiprocessors; otherwise the largest one."""
    widths = [w for w in widths if w < n + 32] or [32]
    if rows > FEW * n_experts:
        return 128, widths[0]
    return 64, next((width for width in widths if n_experts * -(-n // width) >= sms), widths[-1])


class GroupedSm90(Sm90):
    """A grouped product that is bound to the kernel: call it with a stream."""

    @staticmethod
    def unsupported(problem, gpu):
        """-> why it cannot compute `problem`, or None."""
        if gpu.compute_capability[0] != 9:
            return f"the GPU has compute capability {gpu.capability}; it must be 9.0"
        x, w, out = problem.x, problem.w, problem.out
        if reason := not_of_tensor_cores(problem.dense, DTYPES) or rows_that_cannot_be_stored(out):
            return reason
        matrix = stacked(w)
        if problem.scales and matrix is not None and (reason := rows_that_are_not_of_k(x, matrix)):
            return reason
        if reason := weights_that_cannot_be_loaded(w):
            return reason
        for name, array in (("x", x), ("out", out)):
            if not taken(array):
                return (
                    f"{name} has strides {array.strides}; its rows must be contiguous, and begin at "
                    f"multiples of {ALIGNED} bytes"
                )
        return None

    def __init__(self, problem, gpu, tile=None):
        x, w, counts, out, bias, activation, report, scales = problem
        (n_experts, n, k), rows, sms = w.shape, x.shape[0], gpu.multiprocessors
        of_widths = (WIDTHS,) if scales else ()
        if scales and tile and tile[1] not in WIDTHS:
            raise ValueError(
                f"GroupedGemm: options['tile'] is {tile}; of float8 it must have {listed(WIDTHS)} columns"
            )
        tile = tile_of(*(tile or choose(rows, n_experts, n, sms, *of_widths)))
        bias_step = n if bias is not None and bias.ndim == 2 else 0
        matrix: Any = stacked(w)
        dense = Problem(x, matrix.T, out, None if bias is None else bias.reshape(-1), activation)
        most = min(rows, rows // tile.m + n_experts)  # rows of tiles
        self._launch = bind_gemm(
            grouped_kernel,
            dense,
            Choice(tile, 1),
            sms,
            *(counts, bias_step, flat(out, "uint8"), pitch_of(out), report),
            scale_arguments(*scales) if scales else (),
            n=n,
            k=k,
            n_tiles=most * -(-n // tile.n),
        )
        self._kept = self._emulated(gpu)


def tile_of(m, n):
    return Tile(m, n, GROUP, loaded=BOX[m])


def pitch_of(out):
    """Bytes from row to row."""
    return out.strides[0] if out.shape[0] > 1 else out.shape[1] * out.itemsize


def _listed(tile, *kinds):
    kinds = Kinds(*kinds)
    scales = {"scales": _SCALES} if kinds.dtype == FLOAT8 else {}
    return table_entry(grouped_kernel(tile_of(*tile), kinds), kinds, **scales)


_SCALES = types.Tuple([types.Tuple((types.float32[::1], *[types.int64] * n)) for n in (3, 4)])
MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": _listed((128, 256), "bfloat16", "k", "k", "bfloat16"),
    "128x256 columns": _listed((128, 256), "float16", "k", "mn", "float32", "float16", "gelu"),
    "128x224": _listed((128, 224), "bfloat16", "k", "k", "float16", "float32", "relu"),
    "64x256": _listed((64, 256), "bfloat16", "k", "k", "bfloat16", "bfloat16", "silu"),
    "64x128": _listed((64, 128), "bfloat16", "k", "k", "bfloat16"),
    "128x256 float8": _listed((128, 256), FLOAT8, "k", "k", "bfloat16"),
    "64x128 float8": _listed((64, 128), FLOAT8, "k", "k", "float32", "float32", "relu"),
}
