"""``bench gemm``: the methods of ``sk.Gemm`` on one GPU, compared with cuBLAS.

Random operands, which lie as ``--layout`` says: "tn", as in a linear layer of PyTorch (both by rows of K), or
"nn" (both by rows, as they are). Checked against float32 (float64 for float32), by the relative error of the
norm. All methods of a shape are timed in the same rounds.
"""

from typing import Any

import shmemkit as sk
from shmemkit import gemm

from .cases import Checked, negate
from .measure import Contender
from .results import CUBLAS
from .shapes import Entry, measure_shapes
from .torch_peer import refusing, stream_of, tensor_of

METHODS = ("auto", *gemm.METHODS)
PEERS = {"cublas": "cublas (through PyTorch where it is installed, else CuPy)"}  # what --vs takes
LAYOUTS = ("tn", "nn")
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = (
    "4096x4096x4096,8192x8192x8192,8192x8192x1024,4096x14336x4096,8192x3584x4096,8192x2048x8192,"
    "512x7168x8192,64x7168x8192"
)
ERROR = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-17}
"""Relative, of the norm, that is allowed: twice what rounding once gives; of float32, adding."""


def random(xp, seed, dtype, *shapes):
    """-> arrays of `shapes`, the same of one seed on all ranks"""
    rng = xp.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype="float32").astype(dtype) for shape in shapes]


def found(xp, out, reference, allowed):
    """-> "", or what is wrong with `out`"""
    error = float(xp.linalg.norm(out.astype(reference.dtype) - reference) / xp.linalg.norm(reference))
    return "" if error <= allowed else f"wrong: relative error {error:.1e}"


class GemmCase(Checked):
    """A product of one shape, like the cases of ``cases.py``: `x`, (M, K), and `b`, (K, N)."""

    op = "gemm"
    x: Any
    b: Any

    def __init__(self, world, shape, dtype: Any, layout="tn"):
        self.world, self.shape, self.dtype, self.layout = world, shape, dtype, layout
        m, n, k = shape
        self.operations = 2 * m * n * k
        self.bytes = (m * k + n * k + m * n) * dtype.itemsize

    def make(self):
        (m, n, k), by_k = self.shape, self.layout == "tn"
        shapes = (m, k), (n, k) if by_k else (k, n)
        self.x, b = random(self.world.xp, self.world.rank, self.dtype, *shapes)
        self.b = b.T if by_k else b

    def output(self, empty=None):
        return (empty or self.world.xp.empty)(self.shape[:2], self.dtype)

    def flip(self):
        """All signs change."""
        negate(self.x)

    def _found(self, out):
        """By some of the rows, from all over it."""
        wide, step = "float64" if self.dtype.name == "float32" else "float32", max(1, self.shape[0] // 64)
        reference = self.x[::step].astype(wide) @ self.b.astype(wide)
        return found(self.world.xp, out[::step], reference, ERROR[self.dtype.name])


class Ours(Contender):
    """``sk.Gemm``."""

    def __init__(self, world, method):
        super().__init__(world)
        self.method = method

    def start(self, case):
        super().start(case)
        self._gemm = sk.Gemm(self.method)

    def call(self):
        self._gemm(self._case.x, self._case.b, self.out)

    def stop(self):
        super().stop()
        self._gemm = None


class Cublas(Contender):
    """By PyTorch, or without it by CuPy."""

    method = CUBLAS
    _run: Any = None

    def start(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("cuBLAS needs a GPU")
        super().start(case)
        try:
            import torch
        except ImportError:
            self._run = self._by_cupy
            return
        torch.backends.cuda.matmul.allow_tf32 = False
        stream = stream_of(torch, self.world)
        x, b, out = (tensor_of(torch, array) for array in (case.x, case.b, self.out))

        def run():
            with refusing(), torch.cuda.stream(stream):
                torch.matmul(x, b, out=out)

        self._run = run

    def call(self):
        self._run()

    def stop(self):
        super().stop()
        self._run = None

    def _by_cupy(self):
        with self.world.stream:
            self.world.xp.matmul(self._case.x, self._case.b, out=self.out)


def run(world, results, options, progress):
    """Fill in the rows. Collective: each rank computes on its GPU, and the slowest counts."""
    entries = [Entry(Cublas(world))] if "cublas" in options.vs else []
    entries += [Entry(Ours(world, method)) for method in options.methods]

    def cases_of(shape, dtype):
        return {None: GemmCase(world, shape, dtype, options.layout)}

    measure_shapes(world, results, options, progress, entries, cases_of)
