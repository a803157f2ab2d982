"""``bench grouped_gemm``: ``sk.grouped_matmul`` on one GPU, compared with PyTorch's grouped product, a loop
of cuBLAS, and cuBLAS on one dense product of as many operations.

A shape is ExROWSxNxK: E experts with so many rows each, on average. "zipf" behind it: expert i has a number
of rows proportional to 1 / i, in random order. Random operands; w (E, N, K). Checked against float32, by some
rows of each expert. All contenders of a shape are timed in the same rounds.

The dense product is the limit where the tensor cores are busy. With few rows for each expert the memory is,
and the column of GB/s counts the weights alone.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

import shmemkit as sk
from shmemkit.gemm import grouped
from shmemkit.gemm.problem import FLOAT8
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.timer import Timer

from .cases import Checked, negate
from .float8 import (
    ALLOWED,
    DEVIATION,
    Float8Case,
    ScaledGroupedMm,
    ScaledMm,
    blocks,
    narrowed,
    random_scales,
    scaled,
)
from .gemm import HALF, Cublas
from .measure import Contender, measure_all
from .product_cases import ERROR, GemmCase, found, random
from .refusal import Refused, agreed
from .results import CUBLAS, CUBLAS_LOOP, METHOD_OF_ROUNDS, TORCH_GROUPED
from .shapes import EMULATED, LEAST, MOST, WORK
from .torch_peer import TorchCall, tensor_of

METHODS = ("auto", *grouped.METHODS)
PEERS = {
    "cublas": "cublas (one dense product, through PyTorch where it is installed, else CuPy)",
    "loop": "loop (a product of cuBLAS for each expert, through PyTorch)",
    "torch": "torch (torch._grouped_mm)",
}
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
    shapes = []
    for part in text.split(","):
        given = part.strip().lower()
        spread = "zipf" if given.endswith("zipf") else ""
        sizes = given.removesuffix(spread).split("x")
        if len(sizes) != 4 or not all(size.strip().isdecimal() and int(size) for size in sizes):
            raise ValueError(
                f"it has {part!r}; it must be ExROWSxNxK, of integers of 1 or more, perhaps with zipf"
            )
        experts, rows, n, k = map(int, sizes)
        shapes.append(Shape(experts, rows, n, k, spread))
    return shapes


def parse_tiles(text):
    """ "MxN,MxN" -> [(m, n), ...]"""
    tiles = []
    for part in text.split(",") if text else []:
        sizes = part.strip().lower().split("x")
        known = len(sizes) == 2 and all(map(str.isdecimal, sizes))
        rows, columns = map(int, sizes) if known else (0, 0)
        if rows not in (64, 128) or columns not in range(16, 257, 16):
            raise ValueError(f"it has {part!r}; it must be MxN, 64 or 128 rows by a multiple of 16 up to 256")
        tiles.append((rows, columns))
    return tiles


class GroupedCase(Checked):
    """A grouped product, like the cases of ``cases.py``: `x`, `w`, and `counts`, `ends` on the GPU."""

    op = "grouped_gemm"
    x: Any
    w: Any
    options: dict[str, Any] = {}  # of ours

    def __init__(self, world, shape, dtype: Any):
        self.world, self.shape, self.dtype, self.on_host = world, shape, dtype, shape.counts
        self.rows, self.weights = sum(self.on_host), math.prod((shape.experts, shape.n, shape.k))
        self.operations = 2 * self.rows * shape.n * shape.k
        self.weight_bytes = sum(map(bool, self.on_host)) * shape.n * shape.k * dtype.itemsize
        self.bytes = (self.rows * (shape.n + shape.k) + self.weights) * dtype.itemsize
        self.allowed = ERROR.get(dtype.name, 0.0)

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

    def output(self, empty=None):
        return (empty or self.world.xp.empty)((self.rows, self.shape.n), self.dtype)

    def flip(self):
        """All signs change."""
        negate(self.x)

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
        self.ones = ones
        self.bytes += self.rows * shape.n

    def make(self):
        xp, (experts, _, n, k, _) = self.world.xp, self.shape
        self.make_counts()
        self.x, _ = (narrowed(xp, DEVIATION * x) for x in random(xp, 0, "float32", (self.rows, k), (1, k)))
        self.w = xp.empty((experts, n, k), "uint8").view(as_dtype(FLOAT8))
        for i in range(experts):
            (w,) = random(xp, i + 1, "float32", (n, k))
            self.w.view("uint8")[i] = narrowed(xp, DEVIATION * w).view("uint8")
        self.of_x = random_scales(xp, (self.rows, blocks(k)), self.ones)
        self.of_w = random_scales(xp, (experts, blocks(n), blocks(k)), self.ones)
        self.options = {"scales": (self.of_x, self.of_w)}
        self.allowed = 1 if self.ones else ALLOWED

    def output(self, empty=None):
        return (empty or self.world.xp.empty)((self.rows, self.shape.n), as_dtype(HALF))

    def reference(self, rows, expert):
        """In float32, of these rows of an expert."""
        xp = self.world.xp
        return (
            scaled(xp, self.x.view("uint8")[rows], self.of_x[rows])
            @ scaled(xp, self.w[expert], self.of_w[expert]).T
        )


class Ours(Contender):
    """``sk.GroupedGemm``, by default tiles or others."""

    def __init__(self, world, method, tile=None, suffix=""):
        super().__init__(world)
        self._given = (method, tile)
        self.method = method + suffix if tile is None else f"{method} {'x'.join(map(str, tile))}"

    def start(self, case):
        super().start(case)
        method, tile = self._given
        self._grouped = sk.GroupedGemm(method, options=tile and {"tile": tile})

    def call(self):
        case = self._case
        self._grouped(case.x, case.w, case.counts, self.out, **case.options)

    def stop(self):
        super().stop()
        self._grouped = None


class Loop(TorchCall):
    """A product of cuBLAS for each expert, through PyTorch. The host knows the counts."""

    method, distributed = CUBLAS_LOOP, False
    out = None
    _parts: Any = None

    def prepare(self):
        torch, case = self._torch, self._case
        self.out = case.output()
        x, out = tensor_of(torch, case.x), tensor_of(torch, self.out)
        experts = zip(x.split(case.on_host), case.w, out.split(case.on_host), strict=True)
        self._parts = [(rows, tensor_of(torch, w).T, to) for rows, w, to in experts if len(rows)]

    def run(self):
        for rows, w, to in self._parts:
            self._torch.mm(rows, w, out=to)

    def stop(self):
        super().stop()
        self.out = self._parts = None


class TorchGrouped(TorchCall):
    """``torch._grouped_mm``, whose output is PyTorch's."""

    method, distributed = TORCH_GROUPED, False
    _result: Any = None
    _w: Any = None

    @property
    def out(self):
        if self._result is None:
            return None
        return self.world.xp.from_dlpack(self._result.view(self._torch.int16)).view(self._case.dtype)

    def prepare(self):
        torch, case = self._torch, self._case
        self._x = tensor_of(torch, case.x)
        shape = case.w.shape
        self._w = tensor_of(torch, case.w.reshape(-1, shape[2])).view(shape).transpose(1, 2)
        self._ends = torch.from_dlpack(case.ends)

    def run(self):
        self._result = self._torch._grouped_mm(self._x, self._w, offs=self._ends)

    def stop(self):
        super().stop()
        self._w = self._ends = self._result = None


def run(world, results, options, progress):
    """Fill in the rows. Collective: each rank computes on its GPU, and the slowest counts."""
    emulated = world.backend.name == "emulator"
    entries = _entries_of_float8(world, options) if options.dtype == FLOAT8 else _entries(world, options)
    if emulated and max(_operations(shape) for shape in options.shapes) > EMULATED:
        raise SystemExit(
            "grouped_gemm: --shapes has one that is too large for the emulator; it must have up to "
            f"{EMULATED} operations, as 8x16x128x128"
        )
    if not emulated:
        results.method = METHOD_OF_ROUNDS
    with progress(len(options.shapes) * len(entries)) as step:
        for shape in options.shapes:  # the data of one go before those of the next come
            _measure(world, results, options, step, shape, entries)
    for contender, _ in entries:
        contender.close()


def _operations(shape):
    return 2 * sum(shape.counts) * shape.n * shape.k


def _entries(world, options):
    """-> [(contender, shape -> its case), ...]"""
    dtype = as_dtype(options.dtype)

    @functools.lru_cache(1)
    def case(shape):
        return GroupedCase(world, shape, dtype)

    def dense(shape):
        return GemmCase(world, (sum(shape.counts), shape.n, shape.k), dtype)

    peers = {"cublas": (Cublas, dense), "loop": (Loop, case), "torch": (TorchGrouped, case)}
    entries = [(kind(world), of) for name, (kind, of) in peers.items() if name in options.vs]
    return entries + [(each, case) for each in _ours(world, options)]


def _ours(world, options):
    by_method = [Ours(world, method) for method in options.methods]
    return by_method + [Ours(world, "sm90", tile) for tile in options.tiles]


def _entries_of_float8(world, options):
    @functools.lru_cache(1)
    def case(shape):
        return GroupedFloat8Case(world, shape)

    def ones(shape):
        return GroupedFloat8Case(world, shape, ones=True)

    def dense(shape):
        return Float8Case(world, (sum(shape.counts), shape.n, shape.k), "tn", ones=True)

    def half(shape):
        return GroupedCase(world, shape, as_dtype(HALF))

    entries: list[Any] = [(Ours(world, "auto", suffix=f", {HALF}"), half)]
    if "cublas" in options.vs:
        entries.append((ScaledMm(world, CUBLAS, True), dense))
    if "torch" in options.vs:
        entries.append((ScaledGroupedMm(world), ones))
    return entries + [(each, case) for each in _ours(world, options)]


def _measure(world, results, options, step, shape, entries):
    pairs, name, operations = [(case(shape), each) for each, case in entries], str(shape), _operations(shape)
    iters = 1
    if world.backend.name != "emulator":
        iters = min(max(math.ceil(WORK / operations), LEAST), MOST)
    timer = Timer(world, options.iters or iters, options.replays)
    try:
        for each in dict.fromkeys(each for each, _ in pairs):
            agreed(world, each.make)
    except Refused as reason:
        measured = [(None, f"refused: {reason}")] * len(pairs)
    else:
        measured = measure_all(world, timer, pairs, lambda i: step(f"{name}, {entries[i][0].method}"))
    ours = pairs[-1][0]
    for (case, contender), (us, note) in zip(pairs, measured, strict=True):
        about = contender.about if us else {}
        about |= {"shape": name, "tflops": us and operations / us * 1e-6}
        about["weights_GBps"] = us and case is ours and case.weight_bytes / us * 1e-3 or None
        results.add("grouped_gemm", contender.method, ours.bytes, us, note=note, **about)
