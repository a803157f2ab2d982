"""``bench grouped_gemm``: ``sk.grouped_matmul`` on one GPU, compared with PyTorch's grouped product, a loop
of cuBLAS, and cuBLAS on one dense product of as many operations.

A shape is ExROWSxNxK: E experts with so many rows each, on average. "zipf" behind it: expert i has a number
of rows proportional to 1 / i, in random order. Random operands; w (E, N, K). Checked against float32, by some
rows of each expert. All contenders of a shape are timed in the same rounds.

The dense product is the limit where the tensor cores are busy. With few rows for each expert the memory is,
and the column of GB/s counts the weights alone.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from shmemkit.gemm import grouped
from shmemkit.gemm.problem import FLOAT8
from shmemkit.runtime.symmetric_memory import as_dtype

from . import float8, shapes
from .command import Command, Entry
from .gemm import HALF, TILES, Cublas
from .measure import Ours
from .product_cases import BY_SIZE, ERROR, Counted, GemmCase, found, random
from .results import CUBLAS, CUBLAS_LOOP, TORCH_GROUPED
from .shapes import Shapes, text_of
from .torch_peer import TorchCall, tensor_of, transposed

METHODS = ("auto", *grouped.METHODS)
DTYPES = ("bfloat16", "float16", FLOAT8)
SHAPES = ",".join(
    [
        *(f"{experts}x1024x4096x4096" for experts in (8, 16, 32, 64)),
        *(f"{experts}x1024x4096x4096zipf" for experts in (8, 16, 32, 64)),
        *(f"{experts}x1024x7168x2048" for experts in (8, 16, 32)),
        *("32x4x4096x4096", "32x4x7168x2048", "128x16x4096x2048zipf"),
    ]
)
SAMPLES = 8  # rows of each expert that are checked


class Shape(NamedTuple):
    experts: int
    rows: int
    n: int
    k: int
    spread: str

    def __str__(self):
        return "x".join(map(str, self[:4])) + f" {self.spread}" * bool(self.spread)

    @property
    def counts(self):
        """The rows of each expert."""
        if not self.spread:
            return [self.rows] * self.experts
        shares = np.random.default_rng(0).permutation(1 / np.arange(1, self.experts + 1))
        ends = np.rint(np.cumsum(shares) / shares.sum() * self.experts * self.rows)
        return np.diff(ends, prepend=0).astype(int).tolist()


def parse_shapes(text):
    """ "ExROWSxNxK,ExROWSxNxKzipf" -> [Shape, ...]"""
    found = []
    for part in text.lower().split(","):
        spread = "zipf" if part.strip().endswith("zipf") else ""
        (sizes,) = shapes.parse_shapes(part.strip().removesuffix(spread), "ExROWSxNxK")
        found.append(Shape._make((*sizes, spread)))
    return found


class GroupedCase(Counted):
    """A grouped product: `x`, `w`, and `counts`, `ends` on the GPU."""

    op, host, given, signs = "grouped_gemm", "GroupedGemm", ("x", "w", "counts"), ("x",)
    w: Any

    def __init__(self, world, shape, dtype: Any):
        self.world, self.shape, self.dtype, self.on_host = world, shape, dtype, shape.counts
        self.rows, self.weights = sum(self.on_host), math.prod((shape.experts, shape.n, shape.k))
        self.shape_text, self.result = str(shape), (self.rows, shape.n)
        self.operations = 2 * self.rows * shape.n * shape.k
        self.weight_bytes = sum(map(bool, self.on_host)) * shape.n * shape.k * dtype.itemsize
        self.bytes = (self.rows * (shape.n + shape.k) + self.weights) * dtype.itemsize
        self.allowed = ERROR.get(dtype.name, 0.0)

    def rates(self, us, entry):
        weights = None if entry.case else self.weight_bytes / us * 1e-3
        return super().rates(us, entry) | {"weights_GBps": weights}

    def make(self):
        xp, shape = self.world.xp, self.shape
        sizes = (self.rows, shape.k), (shape.experts * shape.n, shape.k)
        self.x, w = random(xp, self.world.rank, self.dtype, *sizes)
        self.w = w.reshape(shape.experts, shape.n, shape.k)
        self.make_counts()

    def make_counts(self):
        xp = self.world.xp
        self.counts = xp.asarray(np.array(self.on_host, "int32"))
        self.ends = xp.asarray(np.cumsum(self.on_host).astype("int32"))

    def _found(self, out):
        xp, first, parts, rows = self.world.xp, 0, [], []
        for expert, count in enumerate(self.on_host):
            some = np.unique(np.linspace(first, first + count - 1, SAMPLES).astype(int)) if count else []
            parts.append(self.reference(some, expert))
            rows += list(some)
            first += count
        return found(xp, out[np.array(rows)], xp.concatenate(parts), self.allowed)

    def reference(self, rows, expert):
        """In float32, of these rows of an expert."""
        return self.x[rows].astype("float32") @ self.w[expert].astype("float32").T


class GroupedFloat8Case(GroupedCase):
    """A grouped product of float8, whose scales are random, or `ones`."""

    def __init__(self, world, shape, ones=False):
        super().__init__(world, shape, as_dtype(FLOAT8))
        self.ones, self.dtype = ones, as_dtype(HALF)  # of the result
        self.bytes += self.rows * shape.n

    def make(self):
        xp, (experts, _, n, k, _) = self.world.xp, self.shape
        self.make_counts()
        (self.x,) = float8.numbers(xp, 0, (self.rows, k))
        self.w = xp.empty((experts, n, k), "uint8").view(as_dtype(FLOAT8))
        for i in range(experts):
            (w,) = float8.numbers(xp, i + 1, (n, k))
            self.w.view("uint8")[i] = w.view("uint8")
        self.of_x = float8.random_scales(xp, (self.rows, float8.blocks(k)), self.ones)
        self.of_w = float8.random_scales(xp, (experts, float8.blocks(n), float8.blocks(k)), self.ones)
        self.options = {"scales": (self.of_x, self.of_w)}
        self.allowed = 1 if self.ones else float8.ALLOWED

    def reference(self, rows, expert):
        """In float32, of these rows of an expert."""
        x = float8.scaled(self.world.xp, self.x.view("uint8")[rows], self.of_x[rows])
        return x @ float8.scaled(self.world.xp, self.w[expert], self.of_w[expert]).T


class Loop(TorchCall):
    """A product of cuBLAS for each expert, through PyTorch. The host knows the counts."""

    method, distributed = CUBLAS_LOOP, False

    def prepare(self, torch, case):
        x, out = tensor_of(torch, case.x), self.writes(torch, case)
        experts = zip(x.split(case.on_host), case.w, out.split(case.on_host), strict=True)
        parts = [(rows, tensor_of(torch, w).T, to) for rows, w, to in experts if len(rows)]

        def run():
            for rows, w, to in parts:
                torch.mm(rows, w, out=to)

        return run


class TorchGrouped(TorchCall):
    """``torch._grouped_mm``, whose output is PyTorch's."""

    method, distributed = TORCH_GROUPED, False

    def prepare(self, torch, case):
        x, w, ends = tensor_of(torch, case.x), transposed(torch, case.w), torch.from_dlpack(case.ends)
        return lambda: torch._grouped_mm(x, w, offs=ends)


def plan(world, options):
    """Each rank computes on its GPU, and the slowest counts."""
    narrow, dtype = options.dtype == FLOAT8, as_dtype(options.dtype)
    if narrow:
        entries = [Entry(Ours(world), name=f"auto, {HALF}", case=HALF)]
        peers = {"cublas": Entry(float8.ScaledMm(world, CUBLAS, True), case="dense")}
        peers["torch"] = Entry(float8.ScaledGroupedMm(world), case="ones")
    else:
        entries, peers = [], {"cublas": Entry(Cublas(world), case="dense")}
        peers |= {"loop": Entry(Loop(world)), "torch": Entry(TorchGrouped(world))}
    entries += [peer for name, peer in peers.items() if name in options.vs]
    entries += [Entry(Ours(world, method)) for method in options.methods]
    for tile in options.tiles:
        entries.append(Entry(Ours(world, "sm90", options={"tile": tile}), name=f"sm90 {text_of(tile)}"))

    def cases(shape):
        dense = sum(shape.counts), shape.n, shape.k
        if narrow:
            return {
                HALF: GroupedCase(world, shape, as_dtype(HALF)),
                "dense": float8.Float8Case(world, dense, "tn", ones=True),
                "ones": GroupedFloat8Case(world, shape, ones=True),
                None: GroupedFloat8Case(world, shape),
            }
        return {"dense": GemmCase(world, dense, dtype), None: GroupedCase(world, shape, dtype)}

    return entries, [cases(shape) for shape in options.shapes]


_shape = "experts, rows of each, N, K; with zipf, rows of a mean expert"
COMMANDS = [
    Command(
        "grouped_gemm",
        "GroupedGemm, torch._grouped_mm, a loop of cuBLAS, and one dense product, on each rank's GPU",
        plan,
        shapes=Shapes(SHAPES, "2x8x32x32", _shape, "ExROWSxNxK[zipf]", parse_shapes),
        dtypes=DTYPES,
        methods=METHODS,
        default="auto",
        peers={
            "cublas": "one dense product, through PyTorch where it is installed, else CuPy",
            "loop": "a product of cuBLAS for each expert, through PyTorch",
            "torch": "torch._grouped_mm",
        },
        iters=BY_SIZE,
        options=[("--tiles", TILES)],
    )
]
