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

from typing import Any

import numpy as np

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

from . import grouped_gemm
from .ag_gemm import Copies, Gathering
from .cases import CASES
from .command import Command, Entry
from .measure import Ours
from .product_cases import BY_SIZE, ERROR, Counted, found, random
from .results import TORCH_EXPERTS, TORCH_EXPERTS_LOOP
from .shapes import Shapes, text_of
from .torch_peer import TorchCall, tensor_of, transposed

HOSTS = {"ag_grouped_gemm": "AllGatherGroupedGemm", "grouped_gemm_rs": "GroupedGemmReduceScatter"}
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
                f"--shapes has {text_of(shape)}; {' and '.join(sizes)} must be multiples of "
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
        self.rows, self.operations, self.result = rows, 2 * rows * n * k, (rows, n)

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
        self.make_counts()


class Layer(Counted):
    """Both. A subclass has its result's shape, make() and `_expected`, of the rows `checked`."""

    signs, error = ("x", "_expected"), 1
    op: str
    checked: Any
    _expected: Any

    def __init__(self, shape, products, n_bytes):
        self.products, self.world, self.dtype = products, products.world, products.dtype
        self.bytes, self.operations, self.shape_text = n_bytes, products.operations, text_of(shape)

    def choice(self, host, symmetric):
        return host.used

    def _found(self, out):
        allowed = self.error * ERROR[self.dtype.name]
        return found(self.world.xp, out[self.checked], self._expected, allowed)


class FirstLayer(Layer):
    op, host, given = "ag_grouped_gemm", "AllGatherGroupedGemm", ("x", "w", "ids")

    def __init__(self, shape, products, n_bytes):
        super().__init__(shape, products, n_bytes)
        self.result, self.made_of = products.result, (self.world, n_bytes)

    def make(self):
        xp, products = self.world.xp, self.products
        self.x, self.w, self.ids = products.mine.copy(), products.w, products.ids
        self.checked = np.unique(np.linspace(0, products.rows - 1, SAMPLES).astype(int))
        experts = products.on_cpu.reshape(-1)[self.checked]
        self._expected = xp.stack(
            [
                products.w[int(expert)].astype("float32")
                @ products.whole[int(pair) // products.topk].astype("float32")
                for pair, expert in zip(self.checked, experts, strict=True)
            ]
        )


class SecondLayer(Layer):
    op, error, host = "grouped_gemm_rs", 2, "GroupedGemmReduceScatter"
    given = "x", "w", "ids", "weights"
    weights: Any

    def __init__(self, shape, products, n_bytes):
        super().__init__(shape, products, n_bytes)
        m, n, world = products.m, products.shape.n, self.world
        self.result, self.made_of = (m // world.n_ranks, n), (world, m, products.topk, n, self.dtype)

    def make(self):
        xp, products, world = self.world.xp, self.products, self.world
        self.x, self.w, self.ids, topk = products.mine.copy(), products.w, products.ids, products.topk
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


class Indexed(Ours):
    """One method, which finds its index made."""

    def start(self, case):
        super().start(case)
        products = case.products
        index = sk.ExpertIndex(self.world, products.ids, products.shape.experts)
        index.update()
        self._arguments = tuple(index if x is products.ids else x for x in self._arguments)


class _Torch(TorchCall):
    """A layer by PyTorch; `loop`: the products one expert after another."""

    def __init__(self, world, loop=False):
        super().__init__(world)
        self.loop, self.method = loop, TORCH_EXPERTS_LOOP if loop else TORCH_EXPERTS

    def multiplying(self, torch, products, like):
        """-> a function of rows, a tensor as `like`: their products"""
        w, ends = transposed(torch, products.w), torch.from_dlpack(products.ends)
        if not self.loop:
            return lambda rows: torch._grouped_mm(rows, w, offs=ends)
        made, counts = like.new_empty((products.rows, products.shape.n)), products.on_host

        def multiply(rows):
            for x, of_expert, out in zip(rows.split(counts), w, made.split(counts), strict=True):
                if len(x):
                    torch.mm(x, of_expert, out=out)
            return made

        return multiply

    def index_of(self, torch, numbers):
        return torch.from_dlpack(self.world.xp.asarray(numbers))


class TorchFirst(_Torch):
    _back: Any = None  # from sorted rows to those of our result

    def prepare(self, torch, case):
        products, x = case.products, tensor_of(torch, case.x)
        multiply = self.multiplying(torch, products, x)
        self._back = self.index_of(torch, np.argsort(products.order))
        tokens = self.index_of(torch, products.order // products.topk)
        whole = x.new_empty((products.m, products.shape.k))

        def run():
            torch.distributed.all_gather_into_tensor(whole, x)
            return multiply(whole.index_select(0, tokens))

        return run

    def shown(self, result):
        return result[self._back]

    def stop(self):
        super().stop()
        self._back = None


class TorchSecond(_Torch):
    def prepare(self, torch, case):
        products, x = case.products, tensor_of(torch, case.x)
        multiply, order = self.multiplying(torch, products, x), self.index_of(torch, products.order)
        inverse = self.index_of(torch, np.argsort(products.order))
        given = x.index_select(0, order)  # as the first layer leaves them
        factors = torch.from_dlpack(case.weights)[..., None].to(x.dtype)
        out = self.writes(torch, case)
        self.fill = lambda: given.copy_(x.index_select(0, order))

        def run():
            of_tokens = multiply(given).index_select(0, inverse).view(*factors.shape[:2], -1)
            torch.distributed.reduce_scatter_tensor(out, (of_tokens * factors).sum(dim=1))

        return run


def plan(world, options):
    op = options.command
    host = getattr(sk, HOSTS[op])
    if op == "ag_grouped_gemm":
        peer, alone = TorchFirst, Entry(Copies(world), "gathering")
    else:
        peer, alone = TorchSecond, Entry(Ours(world), "reduction", "ReduceScatter")
    entries = [Entry(Ours(world), "product", "GroupedGemm"), alone]
    entries += [Entry(peer(world, name == "loop")) for name in options.vs]
    methods = options.methods or ("auto", *host.methods_for(world.n_nodes))
    entries += [Entry(Ours(world, method)) for method in methods]
    for method in methods:
        if method in ("overlap", "gathered"):
            entries.append(Entry(Indexed(world, method), name=f"{method}, index made before"))
    return entries, [_cases_of(world, op, shape, as_dtype(options.dtype)) for shape in options.shapes]


def _cases_of(world, op, shape, dtype):
    products = Products(world, op, shape, dtype)
    m, n, k, *_ = shape
    if op == "ag_grouped_gemm":
        whole = FirstLayer(shape, products, m * k * dtype.itemsize)
        return {"product": products, "gathering": Gathering(products, m, k), None: whole}
    whole = SecondLayer(shape, products, m * n * dtype.itemsize)
    reduction = CASES["reduce_scatter"](world, whole.bytes, dtype, unit=1)
    return {"product": products, "reduction": reduction, None: whole}


_shape = "of the whole layer, experts, and experts of a token"
COMMANDS = [
    Command(
        op,
        f"every method of {host}, and NCCL with torch._grouped_mm and with a loop of cuBLAS",
        plan,
        shapes=Shapes(SHAPES, "8x16x16x2x2", _shape, "MxNxKxExTOPK"),
        dtypes=("bfloat16", "float16"),
        host=host,
        peers={"torch": "NCCL and torch._grouped_mm", "loop": "NCCL and a product of cuBLAS for each expert"},
        iters=BY_SIZE,
    )
    for op, host in HOSTS.items()
]
