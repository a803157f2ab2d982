"""``bench ag_grouped_gemm`` and ``grouped_gemm_rs``: ``sk.AllGatherGroupedGemm`` and
``sk.GroupedGemmReduceScatter``, the layers of a tensor-parallel mixture of experts, compared with NCCL and
PyTorch's grouped product, and with NCCL and a loop of cuBLAS, both through PyTorch.

A shape is MxNxKxExTOPK: tokens of all ranks, columns of the whole weights and their inner dimension,
experts, and experts of a token. For ag_grouped_gemm a rank has M / n_ranks tokens and N / n_ranks columns;
for grouped_gemm_rs it has K / n_ranks. Each token's experts are random, all different. Alone, in the same
rounds: the products of rows that are gathered and sorted already, and what travels between the ranks. One
rank alone works, too: then nothing travels.

The peers know how many rows each expert has, and the order of the rows, in advance. Their results of the
first layer, and operands of the second, are sorted by expert: they move no rows for that.
"""

import functools
from typing import Any

import numpy as np

import shmemkit as sk

from . import collectives, grouped_gemm
from .ag_gemm import Copies, Gathering
from .cases import CASES, Checked, negate
from .measure import Contender
from .product_cases import ERROR, found, random
from .results import TORCH_EXPERTS, TORCH_EXPERTS_LOOP
from .shapes import Entry, measure_shapes
from .torch_peer import TorchCall, tensor_of

METHODS = {
    "ag_grouped_gemm": ("auto", *sk.AllGatherGroupedGemm.methods),
    "grouped_gemm_rs": ("auto", *sk.GroupedGemmReduceScatter.methods),
}
PEERS = {
    "torch": "torch (NCCL and torch._grouped_mm)",
    "loop": "loop (NCCL and a product of cuBLAS for each expert)",
}
DTYPES = ("bfloat16", "float16")
SHAPES = ",".join(
    ("8192x8192x8192x32x4", "8192x8192x8192x8x2", "8192x8192x8192x32x3", "8192x14336x4096x8x2")
    + ("8192x1408x2048x64x6",)
)
SAMPLES = 64  # rows that are checked


class Products(grouped_gemm.GroupedCase):
    """A rank's products alone, of sorted rows; and what both layers have of the routing: `ids` (M, topk), and
    `order`, the pairs sorted by expert."""

    def __init__(self, world, op, shape, dtype):
        self.m, n, k, experts, self.topk = shape
        ranks = world.n_ranks
        sizes = {"M": self.m, **({"N": n} if op == "ag_grouped_gemm" else {"K": k})}
        if any(size % ranks for size in sizes.values()) or self.topk > experts:
            raise SystemExit(
                f"--shapes has {'x'.join(map(str, shape))}; {' and '.join(sizes)} must be multiples of "
                f"{ranks}, the number of ranks, and TOPK must be E at most"
            )
        self.of_first = op == "ag_grouped_gemm"
        n, k = (n // ranks, k) if self.of_first else (n, k // ranks)
        chosen = np.random.default_rng(0).random((self.m, experts)).argsort(axis=1)
        self.on_cpu = chosen[:, : self.topk].astype("int32")
        self.order = np.argsort(self.on_cpu.reshape(-1), kind="stable")
        rows = self.m * self.topk
        super().__init__(world, grouped_gemm.Shape(experts, rows // experts, n, k, ""), dtype)
        self.on_host = np.bincount(self.on_cpu.reshape(-1), minlength=experts).tolist()
        self.rows, self.operations = rows, 2 * rows * n * k

    def operands(self, rank):
        """-> rows and weights of any rank, on all ranks: of the first layer, its tokens"""
        shape, rows = self.shape, self.m // self.world.n_ranks if self.of_first else self.rows
        sizes = (rows, shape.k), (shape.experts * shape.n, shape.k)
        x, w = random(self.world.xp, rank, self.dtype, *sizes)
        return x, w.reshape(shape.experts, shape.n, shape.k)

    def make(self):
        xp, world = self.world.xp, self.world
        self.ids, order = xp.asarray(self.on_cpu), xp.asarray(self.order)
        self.mine, self.w = self.operands(world.rank)
        if self.of_first:
            self.whole = xp.concatenate([self.operands(rank)[0] for rank in range(world.n_ranks)])
            self.x = self.whole[order // self.topk]
        else:
            self.x = self.mine[order]
        self.counts = xp.asarray(np.array(self.on_host, "int32"))
        self.ends = xp.asarray(np.cumsum(self.on_host).astype("int32"))


class First:
    """What ``ag_gemm.Gathering`` takes of a product."""

    def __init__(self, products):
        self.products, self.world, self.dtype = products, products.world, products.dtype
        self.shape = products.m, products.shape.n, products.shape.k

    @property
    def mine(self):
        return self.products.mine.copy()

    @property
    def x(self):
        return self.products.whole


class Layer(Checked):
    """Both."""

    x: Any
    _expected: Any

    def __init__(self, op, products, n_bytes):
        self.op, self.products, self.world, self.dtype = op, products, products.world, products.dtype
        self.bytes, self.operations = n_bytes, products.operations

    def flip(self):
        """All signs change."""
        negate(self.x)
        negate(self._expected)


class FirstLayer(Layer):
    def make(self):
        xp, products = self.world.xp, self.products
        self.x = products.mine.copy()
        self.checked = np.unique(np.linspace(0, products.rows - 1, SAMPLES).astype(int))
        experts = products.on_cpu.reshape(-1)[self.checked]
        self._expected = xp.stack(
            [
                products.w[int(expert)].astype("float32")
                @ products.whole[int(pair) // products.topk].astype("float32")
                for pair, expert in zip(self.checked, experts, strict=True)
            ]
        )

    def output(self, empty=None):
        return (empty or self.world.xp.empty)((self.products.rows, self.products.shape.n), self.dtype)

    def _found(self, out):
        return found(self.world.xp, out[self.checked], self._expected, ERROR[self.dtype.name])


class SecondLayer(Layer):
    def make(self):
        xp, products, world = self.world.xp, self.products, self.world
        self.x, topk = products.mine.copy(), products.topk
        rows = products.m // world.n_ranks
        factors = np.random.default_rng(1).random(products.on_cpu.shape, "float32")
        self.weights = xp.asarray(factors / factors.sum(axis=1, keepdims=True))
        self.checked = np.unique(np.linspace(0, rows - 1, SAMPLES // 4).astype(int))
        self._expected = xp.zeros((len(self.checked), products.shape.n), "float32")
        for rank in range(world.n_ranks):
            x, w = products.operands(rank)
            for i, token in enumerate(self.checked + world.rank * rows):
                for j in range(topk):
                    expert = int(products.on_cpu[token, j])
                    part = w[expert].astype("float32") @ x[int(token) * topk + j].astype("float32")
                    self._expected[i] += self.weights[int(token), j] * part

    def output(self, empty=None):
        shape = self.products.m // self.world.n_ranks, self.products.shape.n
        return (empty or self.world.xp.empty)(shape, self.dtype)

    def _found(self, out):
        return found(self.world.xp, out[self.checked], self._expected, 2 * ERROR[self.dtype.name])


class Ours(Contender):
    """One method of a host object, which makes its index in each call; or, `indexed`, finds it made."""

    _object: Any = None
    _index: Any = None

    def __init__(self, world, method, indexed=False):
        super().__init__(world)
        self._method, self._indexed = method, indexed
        self.method = f"{method}, index made before" if indexed else method

    def start(self, case):
        products, world = case.products, self.world
        if products.of_first:
            self._object = sk.AllGatherGroupedGemm(world, case.bytes, self._method)
        else:
            sizes = products.m, products.topk, products.shape.n, case.dtype
            self._object = sk.GroupedGemmReduceScatter(world, *sizes, self._method)
        super().start(case)
        self._index = products.ids
        if self._indexed:
            self._index = sk.ExpertIndex(world, products.ids, products.shape.experts)
            self._index.update()
        self.took = self._object.used if self._method == "auto" else None

    def call(self):
        case = self._case
        more = () if case.products.of_first else (case.weights,)
        self._object(case.x, case.products.w, self._index, *more, self.out)

    def stop(self):
        super().stop()
        if self._object is not None:
            self._object.free()
        self._object = self._index = None


class _Torch(TorchCall):
    """A layer by PyTorch; `loop`: the products one expert after another."""

    _result: Any = None
    _back: Any = None  # from sorted rows to those of our result
    _w: Any = None
    _made: Any = None
    _order: Any = None

    def __init__(self, world, loop=False):
        super().__init__(world)
        self.loop, self.method = loop, TORCH_EXPERTS_LOOP if loop else TORCH_EXPERTS

    @property
    def out(self):
        if self._result is None:
            return None
        with self._torch.cuda.stream(self._stream):
            result = self._result if self._back is None else self._result[self._back]
            return self.world.xp.from_dlpack(result.view(self._torch.int16)).view(self._case.dtype)

    def prepare(self):
        torch, products = self._torch, self._case.products
        self._x, shape = tensor_of(torch, self._case.x), products.w.shape
        self._w = tensor_of(torch, products.w.reshape(-1, shape[2])).view(shape).transpose(1, 2)
        self._ends = torch.from_dlpack(products.ends)
        self._inverse = torch.from_dlpack(self.world.xp.asarray(np.argsort(products.order)))
        self._order = torch.from_dlpack(self.world.xp.asarray(products.order))
        self._made = torch.empty((products.rows, shape[1]), dtype=self._x.dtype, device=self._x.device)

    def multiply(self, rows):
        torch = self._torch
        if not self.loop:
            return torch._grouped_mm(rows, self._w, offs=self._ends)
        counts = self._case.products.on_host
        for x, w, out in zip(rows.split(counts), self._w, self._made.split(counts), strict=True):
            if len(x):
                torch.mm(x, w, out=out)
        return self._made

    def stop(self):
        super().stop()
        self._w = self._ends = self._inverse = self._order = self._made = self._result = self._back = None


class TorchFirst(_Torch):
    _whole: Any = None
    _tokens: Any = None

    def prepare(self):
        super().prepare()
        products = self._case.products
        self._back = self._inverse
        self._tokens = self._order // products.topk
        shape = products.m, products.shape.k
        self._whole = self._torch.empty(shape, dtype=self._x.dtype, device=self._x.device)

    def run(self):
        self._torch.distributed.all_gather_into_tensor(self._whole, self._x)
        self._result = self.multiply(self._whole.index_select(0, self._tokens))

    def stop(self):
        super().stop()
        self._tokens = self._whole = None


class TorchSecond(_Torch):
    _sorted: Any = None
    _factors: Any = None
    _sums: Any = None

    def prepare(self):
        super().prepare()
        case, torch = self._case, self._torch
        self._sorted = self._x.index_select(0, self._order)  # as the first layer leaves them
        self._factors = torch.from_dlpack(case.weights)[..., None].to(self._x.dtype)
        self._sums = torch.empty(
            (case.products.m // self.world.n_ranks, case.products.shape.n),
            dtype=self._x.dtype,
            device=self._x.device,
        )

    def run(self):
        products = self.multiply(self._sorted).index_select(0, self._inverse)
        of_tokens = products.view(*self._factors.shape[:2], -1)
        sums = (of_tokens * self._factors).sum(dim=1)
        self._torch.distributed.reduce_scatter_tensor(self._sums, sums)
        self._result = self._sums

    def repeat(self, replay):
        with self._torch.cuda.stream(self._stream):
            self._sorted.copy_(self._x.index_select(0, self._order))
        replay()

    def stop(self):
        super().stop()
        self._sorted = self._factors = self._sums = None


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    op = options.command
    of_first = op == "ag_grouped_gemm"
    peer = TorchFirst if of_first else TorchSecond
    entries = [Entry(grouped_gemm.Ours(world, "auto"), "product", "GroupedGemm")]
    if of_first:
        entries.append(Entry(Copies(world), "gathering"))
    else:
        entries.append(Entry(collectives.Ours(world, "auto"), "reduction", "ReduceScatter"))
    entries += [Entry(peer(world, name == "loop")) for name in options.vs]
    methods = options.methods or ("auto", *_host(op).methods_for(world.n_nodes))
    entries += [Entry(Ours(world, method)) for method in methods]
    entries += [Entry(Ours(world, method, True)) for method in methods if method in ("overlap", "fused")]
    measure_shapes(world, results, options, progress, entries, functools.partial(_cases_of, world, op))


def _host(op):
    return sk.AllGatherGroupedGemm if op == "ag_grouped_gemm" else sk.GroupedGemmReduceScatter


def _cases_of(world, op, shape, dtype):
    products = Products(world, op, shape, dtype)
    m, n, k, *_ = shape
    if op == "ag_grouped_gemm":
        n_bytes = m * k * dtype.itemsize
        return {
            "product": products,
            "gathering": Gathering(First(products)),
            None: FirstLayer(op, products, n_bytes),
        }
    n_bytes = m * n * dtype.itemsize
    return {
        "product": products,
        "reduction": CASES["reduce_scatter"](world, n_bytes, dtype, unit=1),
        None: SecondLayer(op, products, n_bytes),
    }
