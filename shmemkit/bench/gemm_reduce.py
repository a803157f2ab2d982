"""``bench gemm_rs`` and ``gemm_ar``: ``sk.GemmReduceScatter`` and ``sk.GemmAllReduce`` compared with cuBLAS
and then NCCL's collective operation, the first one with PyTorch's fused_matmul_reduce_scatter, too.

The layer is the one before: each rank has M rows of N / n_ranks, and as much of the weights, stored by
columns; the result is M by K. Random operands, checked against float32 by the relative error of the norm.
Alone, in the same rounds: the products (``Gemm``, cuBLAS) and the reduction (our collective operation by
"auto", NCCL's).
"""

from . import gemm, layers, product_cases
from .cases import CASES
from .command import Entry
from .layers import Step
from .measure import Ours
from .nccl import Nccl
from .shapes import text_of
from .torch_peer import TorchProductScatter

OPS = {
    "gemm_rs": ("reduce_scatter", "GemmReduceScatter"),
    "gemm_ar": ("all_reduce", "GemmAllReduce"),
}
ERROR = 3  # times that of a product: each rank's part is rounded, too


class Both(product_cases.GemmCase):
    """The product and its reduction."""

    signs = "x", "_expected"

    def __init__(self, op, product, reduction):
        super().__init__(product.world, product.shape, product.dtype)
        self.op, self.product, self.reduction = op, product, reduction
        (m, n, k), world = product.shape, self.world
        self.shape_text = text_of((m, k * world.n_ranks, n))
        self.host, self.made_of = OPS[op][1], (world, m, n, self.dtype)
        self.bytes, self._rows = reduction.bytes, range(m)
        if op == "gemm_rs":
            self._rows = self._rows[world.rank * m // world.n_ranks :][: m // world.n_ranks]
        self.result = len(self._rows), n

    def output_for(self, host, symmetric):
        return host.output(self.result) if self.op == "gemm_ar" else self.output()

    def choice(self, host, symmetric):
        m, n, k = self.shape
        return host.method_for(m, k, n)

    def make(self):
        (m, n, k), world = self.shape, self.world
        self._checked = slice(None, None, max(1, len(self._rows) // 64))
        rows, self._expected = self._rows[self._checked], 0
        for rank in range(world.n_ranks):
            a, b = product_cases.random(world.xp, rank, self.dtype, (m, k), (n, k))
            if rank == world.rank:
                self.x, self.b = a, b.T
            part = a[rows.start : rows.stop : rows.step].astype("float32") @ b.T.astype("float32")
            self._expected = self._expected + part

    def steps(self, empty):
        product = self.product.output(empty)
        yield gemm.Cublas, Step(self.x, product, self.b)
        yield Nccl, Step(product, self.output(empty), nccl=self.reduction.nccl)

    def _found(self, out):
        allowed = ERROR * product_cases.ERROR[self.dtype.name]
        return product_cases.found(self.world.xp, out[self._checked], self._expected, allowed)


def plan(world, options):
    op, (collective, host) = options.command, OPS[options.command]

    def cases(shape, dtype):
        m, n, k = layers.share(world, op, shape)
        alone = product_cases.GemmCase(world, (m, k, n), dtype)
        reduction = CASES[collective](world, m * k * dtype.itemsize, dtype, unit=1)
        return {"product": alone, "reduction": reduction, None: Both(op, alone, reduction)}

    ours = Entry(Ours(world), "reduction", collective)
    return layers.plan(world, options, ours, "reduction", host, TorchProductScatter, cases)


_fused = {"gemm_rs": "fused_matmul_reduce_scatter"}
COMMANDS = [
    layers.command(op, host, plan, "cuBLAS and then NCCL", "N", _fused.get(op))
    for op, (_, host) in OPS.items()
]
