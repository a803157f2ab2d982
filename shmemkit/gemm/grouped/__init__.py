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

from shmemkit.device.cuda.float_storage import ELEMENTS
from shmemkit.support.arrays import check_contiguous
from shmemkit.support.settings import array_text, listed, one_of
from shmemkit.typing import Activation, AnyArray, AnyStream, ArrayT, GroupedGemmMethod

from .. import Product, check_memory, check_scales, chosen, kept
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

    _who = "GroupedGemm"
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
        given = {"x": x, "w": w, "counts": counts, "out": out, "bias": bias}

        def bind(arrays, scales, gpu):
            return self._bind(arrays, scales, gpu, activation)

        return self._enqueue(given, scales, _shape_of, bind, activation, stream)

    def _bind(self, arrays, scales, gpu, activation):
        _check(**arrays, scales=scales)
        if not arrays["out"].size:
            return lambda stream: None
        emulated = gpu.arrays.ndarray is np.ndarray
        report = 0 if emulated else report_address()
        problem = GroupedProblem(**arrays, activation=activation, report=report, scales=scales)
        usual = ["sm90"] if scales else ["sm80"] if emulated else [*METHODS]
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


def _shape_of(x, w, counts):
    if x.ndim != 2 or w.ndim != 3:
        raise ValueError(_shapes(x, w))
    return x.shape[0], w.shape[1]


def _shapes(x, w):
    hint = ""
    if x.ndim == 3:
        hint = ". The rows of all experts follow each other without gaps, as of sk.ExpertParallel(max_rows=)"
    elif x.ndim == 2 and w.ndim == 3 and x.shape[1] == w.shape[1]:
        hint = ". Give a weight of shape (E, K, N) as w.transpose(0, 2, 1)"
    return f"GroupedGemm: x and w are {x.shape} and {w.shape}; they must be (rows, K) and (E, N, K){hint}"


def _check(x, w, counts, out, bias, scales):
    """ValueError for arrays that no method can compute with."""
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(_shapes(x, w))
    allowed = (*HALVES, FLOAT8)
    if w.dtype != x.dtype or x.dtype.name not in allowed:
        raise ValueError(f"GroupedGemm: x is {x.dtype} and w is {w.dtype}; both must be {listed(allowed)}")
    (n_experts, n, k), rows = w.shape, x.shape[0]
    if not 1 <= n_experts <= MAX_EXPERTS or rows > MAX_ROWS or n_experts * max(n, k) > MAX_ROWS:
        raise ValueError(
            f"GroupedGemm: x is {x.shape} and w is {w.shape}; w must have 1 to {MAX_EXPERTS} experts, with "
            "less than 2**31 rows and columns together, and x less than 2**31 rows"
        )
    if not k:
        raise ValueError(f"GroupedGemm: x is {x.shape}; K must be 1 or more")
    if counts.dtype != "int32" or counts.shape != (n_experts,):
        raise ValueError(
            f"GroupedGemm: counts is {array_text(counts)}; it must be int32 {(n_experts,)}, "
            f"since w is {w.shape}"
        )
    if out.shape != (rows, n) or out.dtype.name not in ELEMENTS:
        raise ValueError(
            f"GroupedGemm: out is {array_text(out)}; it must be {(rows, n)}, of {listed(ELEMENTS)}"
        )
    check_contiguous("GroupedGemm", "counts", counts)
    n_blocks, k_blocks = (-(-size // BLOCK) for size in (n, k))
    check_scales("GroupedGemm", x, scales, (rows, k_blocks), (n_experts, n_blocks, k_blocks), out)
    if bias is not None:
        allowed = list(dict.fromkeys((out.dtype.name, "float32")))
        if bias.shape not in ((n_experts, n), (n,)) or bias.dtype.name not in allowed:
            raise ValueError(
                f"GroupedGemm: bias is {array_text(bias)}; it must be {listed(allowed)}, {(n_experts, n)} or "
                f"{(n,)}"
            )
        check_contiguous("GroupedGemm", "bias", bias)
    check_memory("GroupedGemm", out, x=x, w=w, counts=counts, bias=bias)
