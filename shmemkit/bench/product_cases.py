"""Products that are measured: random operands, and whether a result is right."""

import math
from typing import Any

from .cases import Checked
from .shapes import text_of

WORK = 2e12  # operations that a graph has, about: milliseconds
LEAST, MOST, BY_SIZE = 2, 50, "by their size, 2 to 50"  # calls in a graph

# The largest relative error in norm: twice that of one rounding, in float32 that of the sums.
ERROR = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-17}


def random(xp, seed, dtype, *shapes):
    """-> arrays of `shapes`, the same of one seed on all ranks"""
    rng = xp.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype="float32").astype(dtype) for shape in shapes]


def found(xp, out, reference, allowed):
    """-> "", or what is wrong with `out`"""
    error = float(xp.linalg.norm(out.astype(reference.dtype) - reference) / xp.linalg.norm(reference))
    return "" if error <= allowed else f"wrong: relative error {error:.1e}"


class Counted(Checked):
    """What has `operations`. The products alone have as many as all."""

    @property
    def iters(self):
        return min(max(math.ceil(WORK / self.operations), LEAST), MOST)

    def rates(self, us, entry):
        computes = entry.alone in (None, "product")
        return {"tflops": self.operations / us * 1e-6 if computes else None}


class GemmCase(Counted):
    """A product of one shape: `x`, (M, K), and `b`, (K, N)."""

    op, host, given, signs = "gemm", "Gemm", ("x", "b"), ("x",)
    b: Any

    def __init__(self, world, shape, dtype: Any, layout="tn"):
        self.world, self.shape, self.dtype, self.layout = world, shape, dtype, layout
        m, n, k = shape
        self.operations, self.result = 2 * m * n * k, (m, n)
        self.bytes, self.shape_text = (m * k + n * k + m * n) * dtype.itemsize, text_of(shape)

    def make(self):
        (m, n, k), by_k = self.shape, self.layout == "tn"
        shapes = (m, k), (n, k) if by_k else (k, n)
        self.x, b = random(self.world.xp, self.world.rank, self.dtype, *shapes)
        self.b = b.T if by_k else b

    def _found(self, out):
        """By some of the rows, from all over it."""
        wide, step = "float64" if self.dtype.name == "float32" else "float32", max(1, self.shape[0] // 64)
        reference = self.x[::step].astype(wide) @ self.b.astype(wide)
        return found(self.world.xp, out[::step], reference, ERROR[self.dtype.name])
