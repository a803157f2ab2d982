"""Grouped products: the rows of each expert times the expert's own weight, as in a mixture-of-experts layer.

    y = sk.grouped_matmul(x, w, counts)                      # x sorted by expert; counts on the GPU

    grouped = sk.GroupedGemm("sm80")                         # one that keeps a method
    grouped(x, w, counts, y)

Methods, of which "auto" takes the first that can compute what is given (on the emulator sm80, which is
emulated faster):

  sm90   wgmma, TMA: sm90.py
  sm80   mma.sync, cp.async: sm80.py

The host never reads the counts: kernels find their tiles by them (expert_tiles.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shmemkit.operations.operation import Given, nothing
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.support.settings import array_text, one_of
from shmemkit.typing import Activation, AnyArray, AnyStream, ArrayT, GroupedGemmMethod

from .. import SCALES, Product, chosen, kept
from ..block_scales import BLOCK
from ..distributed import checked_options
from ..problem import FLOAT8, HALVES, Problem
from .expert_tiles import MAX_EXPERTS, MAX_ROWS, report_address
from .sm80 import GroupedSm80
from .sm90 import GroupedSm90

__all__ = ["METHODS", "GroupedGemm", "grouped_matmul"]

METHODS = {"sm90": GroupedSm90, "sm80": GroupedSm80}


class GroupedProblem(NamedTuple):
    """Arrays as of `grouped_matmul`, which have been checked; `report`: as of ``report_counts``."""

    x: Any
    w: Any
    counts: Any
    out: Any
    bias: Any
    activation: str | None
    report: int
    scales: tuple[Any, Any] | None = None

    @property
    def dense(self):
        """The Problem of one expert that has all rows."""
        bias = self.bias if self.bias is None or self.bias.ndim == 1 else self.bias[0]
        return Problem(self.x, self.w[0].T, self.out, bias, self.activation, self.scales)


class GroupedGemm(Product):
    """Grouped products of one method: `grouped_matmul` keeps such objects.

    method   as of `grouped_matmul`
    options  {"tile": (rows, columns)} of "sm90", for tuning: 64 or 128, and a multiple of 16 up to 256, of
             float8 one of 32, 64, 128, 192 and 256. Default: by the sizes
    sms      as of `grouped_matmul`

    It keeps kernels by the arrays' addresses, shapes, strides and dtypes, and must live as long as its calls,
    and graphs that captured some.
    """

    ARRAYS = {
        "x": Given("rows k", contiguous=False, align=0),
        "w": Given("experts n k", "x", contiguous=False, align=0),
        "counts": Given("experts", "int32", align=0),
        "out": Given("rows n", contiguous=False, align=0, new=True),
        "bias": Given(align=0, optional=True),
        SCALES[0]: Given(f"rows k/{BLOCK}", "float32", contiguous=False, align=0, optional=True),
        SCALES[1]: Given(f"experts n/{BLOCK} k/{BLOCK}", "float32", contiguous=False, align=0, optional=True),
    }
    OPERANDS = tuple(map(as_dtype, (*HALVES, FLOAT8)))
    options: dict[str, Any] = {"tile": None}

    def __init__(
        self,
        method: GroupedGemmMethod = "auto",
        *,
        options: dict[str, Any] | None = None,
        sms: int | None = None,
    ):
        one_of("GroupedGemm", "method", method, ("auto", *METHODS))
        super().__init__(sms)
        self.method = method
        self.options = checked_options("GroupedGemm", self.options, options)
        if method == "sm80" and self.options["tile"]:
            raise ValueError("GroupedGemm: options['tile'] is given; method 'sm80' has no options")

    def __call__(
        self,
        x: ArrayT,
        w: AnyArray,
        counts: AnyArray,
        out: ArrayT | None = None,
        *,
        bias: AnyArray | None = None,
        activation: Activation | None = None,
        scales: tuple[AnyArray, AnyArray] | None = None,
        stream: AnyStream | None = None,
    ) -> ArrayT:
        """Enqueue ``out[r] = activation(x[r] @ w[e].T + bias[e])``, e the expert of row r. -> out

        Arguments, result, bits, capture and errors are those of `grouped_matmul`.
        """
        arrays = {"x": x, "w": w, "counts": counts, "out": out, "bias": bias}
        return self._product(arrays, scales, activation, stream)

    def _compute(self, gpu, x, w, bias, **others):
        (n_experts, n, k), rows = w.shape, x.shape[0]
        if not 1 <= n_experts <= MAX_EXPERTS or rows > MAX_ROWS or n_experts * max(n, k) > MAX_ROWS:
            raise ValueError(
                f"GroupedGemm: x is {x.shape} and w is {w.shape}; w must have 1 to {MAX_EXPERTS} experts, "
                "with less than 2**31 rows and columns together, and x less than 2**31 rows"
            )
        if not k:
            raise ValueError(f"GroupedGemm: x is {x.shape}; K must be 1 or more")
        if bias is not None and bias.shape not in ((n_experts, n), (n,)):
            raise ValueError(
                f"GroupedGemm: bias is {array_text(bias)}; it must be {(n_experts, n)} or {(n,)}"
            )
        if not rows * n:
            return nothing
        emulated = gpu.arrays.ndarray is np.ndarray
        report = 0 if emulated else report_address()
        problem = GroupedProblem(x=x, w=w, bias=bias, report=report, **others)
        usual = ["sm90"] if problem.scales else ["sm80"] if emulated else [*METHODS]
        method = chosen("GroupedGemm", METHODS, self.method, usual, problem, gpu)
        return METHODS[method](problem, gpu, **self.options if method == "sm90" else {})


def grouped_matmul(
    x: ArrayT,
    w: AnyArray,
    counts: AnyArray,
    out: ArrayT | None = None,
    *,
    bias: AnyArray | None = None,
    activation: Activation | None = None,
    scales: tuple[AnyArray, AnyArray] | None = None,
    stream: AnyStream | None = None,
    method: GroupedGemmMethod = "auto",
    sms: int | None = None,
) -> ArrayT:
    """Enqueue ``out[r] = activation(x[r] @ w[e].T + bias[e])``, e the expert of row r, on this rank's GPU.
    -> out

    x           (rows, K), sorted by expert: the rows of expert 0, then those of expert 1, ...; bfloat16,
                float16, or float8_e4m3fn with `scales`. Rows, or columns, are contiguous; rows at multiples
                of 16 bytes are fastest
    w           (E, N, K), x's dtype: the weight of each expert, as of a linear layer. Rows, or columns, of an
                expert are contiguous: (E, K, N) is given as w.transpose(0, 2, 1). E is up to 32768
    counts      int32 (E,), contiguous, on the GPU: how many rows each expert has, 0 or more. The host does
                not read it: a kernel before may write it, and a replayed graph sees what is there then
    out         (rows, N), contiguous rows, which overlaps no other argument: bfloat16, float16 or float32.
                Rows from the sum of the counts on are left as they are. Default: a new array of x's kind and
                dtype, of float8 bfloat16, where these rows may hold anything
    bias        (E, N), a row for each expert, or (N,) for all; contiguous, of out's dtype or float32
    activation  None, "relu", "gelu" (exact, by erf) or "silu", as in PyTorch
    scales      of float8: those of x, (rows, ceil(K / 128)), and of w, (E, ceil(N / 128), ceil(K / 128)),
                float32, strides of 0 or more, as of `matmul`
    stream      as of `matmul`
    method      "auto", the first of these that can compute the product (on the emulator the last), or
                  sm90  wgmma and the TMA: compute capability 9.0. Rows of x and out, which are contiguous,
                        and rows or columns of w begin at multiples of 16 bytes; a row of out has a multiple
                        of 16 bytes. The experts of w lie one after another. If the columns of an expert are
                        contiguous, K is a multiple of 64. float8, where rows of K are contiguous
                  sm80  mma.sync and cp.async: from 8.0 on
    sms         the most multiprocessors that it uses, 1 or more; None: all that help

    Arrays, streams, capture, sums and bits are as of `matmul`.

    If counts add up to more than the rows of x, or one is negative, nothing is written. ValueError is raised
    when the program next synchronizes with the GPU (`World.synchronize`, `World.asnumpy`, ...) or launches a
    kernel through shmemkit; the emulator raises EmulatorError. Nobody looks at the counts of a result without
    elements.

    TypeError or ValueError for wrong arguments; RuntimeError without GPU and World.
    """
    one_of("grouped_matmul()", "method", method, ("auto", *METHODS))
    grouped = kept(GroupedGemm, method, sms)
    return grouped(x, w, counts, out, bias=bias, activation=activation, scales=scales, stream=stream)
