"""Grouped product by mma.sync: the kernel of ../sm80.py, whose tiles ``expert_tiles.py`` finds.

A tile's A is zero beyond its expert's rows, and nothing is stored there. Its B and its bias are the expert's.
"""

import functools
from typing import Any

from numba import cuda, types

from shmemkit.device.cuda.float_storage import element
from shmemkit.runtime.launch import bind

from ..epilogue import inline
from ..problem import flat, not_of_tensor_cores
from ..sm80 import (
    GROUP_ROWS,
    Tile,
    choose_tile,
    gemm_body,
    layout_of,
    out_that_cannot_be_stored,
    resident,
    stored,
    table_entry,
)
from .expert_tiles import TABLE, expert_of, expert_tiles, row_of, rows_in


@functools.cache
def grouped_kernel(dtype, out_dtype, width, a_layout, b_layout, tile, bias_dtype=None, activation=None):
    """-> the kernel; arguments as of ``sm80_kernel``"""
    tile_m, tile_n, *_ = tile
    plan, find = expert_tiles(tile_m, GROUP_ROWS // tile_m)

    @inline
    def place(turn, n_m, n_n, m, extra):
        (counts, firsts), b_step, bias_step = extra
        found, column = find(turn, n_n, counts, firsts)
        row, expert = row_of(found), expert_of(found)
        return row, row + rows_in(found), column * tile_n, expert * b_step, expert * bias_step

    gemm = gemm_body(dtype, out_dtype, width, a_layout, b_layout, tile, place, bias_dtype, activation)

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def grouped_gemm_sm80(a, b, out, bias, m, n, k, lda, ldb, ldo, counts, b_step, bias_step, report):
        """a to ldo            as of ``sm80_kernel``, b of all experts
        counts              int32: the rows of each expert
        b_step, bias_step   elements from one expert's to the next one's
        report              as of ``report_counts``
        """
        firsts = cuda.shared.array(TABLE, types.int32)
        n_m = plan(counts, m, firsts, report)
        if cuda.blockIdx.x < n_m * ((n + tile_n - 1) // tile_n):
            extra = (counts, firsts), b_step, bias_step
            gemm(a, b, out, bias, m, n, k, lda, ldb, ldo, n_m, extra)

    return grouped_gemm_sm80


# ---- on the host

NARROW = 64 * 64  # as in ../sm80.py: what finds the tiles takes registers, too


def layout_of_experts(w):
    """-> the layout of each expert's weight, as of ``layout_of``, by pieces that fit all of them; or None."""
    layout, step = layout_of(w[0]), w.strides[0]
    if layout is None or step < 0:
        return None
    if w.shape[0] > 1:
        layout = layout._replace(width=next(x for x in (16, 4, 2) if x <= layout.width and not step % x))
    return layout


def layout_of_rows(x):
    """-> that of x, of which an expert's rows may begin anywhere."""
    layout = layout_of(x)
    return layout._replace(width=2) if layout is not None and layout.major == "mn" else layout


class GroupedSm80:
    """A grouped product that is bound to the kernel: call it with a stream."""

    @staticmethod
    def unsupported(problem, gpu):
        """-> why it cannot compute `problem`, or None."""
        if gpu.compute_capability < (8, 0):
            return f"the GPU has compute capability {gpu.capability}; it must be 8.0 or newer"
        if reason := not_of_tensor_cores(problem.dense):
            return reason
        if layout_of_rows(problem.x) is None or layout_of_experts(problem.w) is None:
            return (
                f"x and w have strides {problem.x.strides} and {problem.w.strides}; rows or columns must be "
                "contiguous"
            )
        return out_that_cannot_be_stored(problem.out)

    def __init__(self, problem, gpu):
        x, w, counts, out, bias, activation, report, _ = problem
        (n_experts, n, k), rows = w.shape, x.shape[0]
        a_layout: Any = layout_of_rows(x)
        b_layout: Any = layout_of_experts(w)
        gpu = gpu._replace(shared_bytes=gpu.shared_bytes - 4 * TABLE)
        narrow = 2 in (a_layout.width, b_layout.width)
        of_mean = -(-rows // n_experts), n_experts * n, k
        tile = choose_tile(*of_mean, gpu, NARROW if narrow else None)
        to, width, ldo = stored(out)
        bias_dtype = None if bias is None else bias.dtype.name
        operands = flat(x, "uint16"), flat(w, "uint16")
        kernel = grouped_kernel(
            *(x.dtype.name, out.dtype.name, width),
            *(a_layout[:2], b_layout[:2], tile, bias_dtype, activation),
        )
        most = min(rows, rows // tile.m + n_experts) * -(-n // tile.n)
        bias_step = n if bias is not None and bias.ndim == 2 else 0
        bias = operands[0] if bias is None else bias.reshape(-1).view(element(bias_dtype).stored)
        self._launch = bind(
            kernel,
            gpu.blocks(min(most, gpu.multiprocessors * resident(tile, gpu))),
            tile.threads,
            (
                *(*operands, to, bias, rows, n, k, a_layout.ld, b_layout.ld, ldo, counts),
                *(w.strides[0] // w.itemsize if n_experts > 1 else 0, bias_step, report),
            ),
            shared=tile.shared_bytes,
        )
        self._launch.forget_arrays()

    def __call__(self, stream=None):
        self._launch(stream)


def _listed(tile, dtype, out_dtype, width, a_layout, b_layout, bias_dtype=None, activation=None):
    kernel = grouped_kernel(dtype, out_dtype, width, a_layout, b_layout, Tile(*tile), bias_dtype, activation)
    return table_entry(kernel, out_dtype, width, bias_dtype)


_BY_K, _BY_ROW = ("k", 16), ("mn", 16)
GPU_KERNELS = {
    "256x128": _listed((256, 128, 32, 6, 4, 2), "bfloat16", "bfloat16", 4, _BY_K, _BY_K),
    "128x128 columns": _listed(
        (128, 128, 32, 6, 2, 2), "float16", "float16", 4, _BY_K, _BY_ROW, "float32", "gelu"
    ),
    "64x64 odd": _listed((64, 64, 64, 4, 2, 2), "bfloat16", "bfloat16", 1, ("mn", 2), ("k", 2), "bfloat16"),
    "64x64": _listed((64, 64, 64, 4, 2, 2), "bfloat16", "bfloat16", 4, _BY_K, _BY_K, "bfloat16", "silu"),
}
