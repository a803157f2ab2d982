"""``bench gemm_rs`` and ``gemm_ar``: ``sk.GemmReduceScatter`` and ``sk.GemmAllReduce`` compared with cuBLAS
and then NCCL's collective operation, the first one with PyTorch's fused_matmul_reduce_scatter, too.

The layer is the one before: each rank has M rows of N / n_ranks, and as much of the weights, stored by
columns; the result is M by K. Random operands, checked against float32 by the relative error of the norm.
Alone, in the same rounds: the products (``Gemm``, cuBLAS) and the reduction (our collective operation by
"auto", NCCL's).
"""

import shmemkit as sk

from . import collectives, gemm, layers, product_cases
from .cases import CASES, Checked, negate
from .layers import NCCL_PEERS, Step, by_nccl
from .measure import budgets
from .nccl import Nccl
from .shapes import Entry, measure_shapes
from .torch_peer import TorchProductScatter

OPS = {
    "gemm_rs": ("reduce_scatter", sk.GemmReduceScatter),
    "gemm_ar": ("all_reduce", sk.GemmAllReduce),
}
PEERS = {  # what --vs takes
    "gemm_rs": {**NCCL_PEERS, "torch": "torch (fused_matmul_reduce_scatter)"},
    "gemm_ar": NCCL_PEERS,
}
ERROR = 3  # times that of a product: each rank's part is rounded, too


def methods(op):
    """The names that --methods takes."""
    return ("auto", *OPS[op][1].methods)


class Both(Checked):
    """The product and its reduction."""

    def __init__(self, op, product, reduction):
        self.op, self.product, self.reduction = op, product, reduction
        self.world, self.dtype, self.operations = product.world, product.dtype, product.operations
        (m, n, _), world = product.shape, self.world
        self.bytes, self._rows = reduction.bytes, range(m)
        if op == "gemm_rs":
            self._rows = self._rows[world.rank * m // world.n_ranks :][: m // world.n_ranks]
        self.shape = len(self._rows), n

    def make(self):
        (m, n, k), world = self.product.shape, self.world
        self._checked = slice(None, None, max(1, len(self._rows) // 64))
        rows, self._expected = self._rows[self._checked], 0
        for rank in range(world.n_ranks):
            a, b = product_cases.random(world.xp, rank, self.dtype, (m, k), (n, k))
            if rank == world.rank:
                self.x, self.b = a, b.T
            part = a[rows.start : rows.stop : rows.step].astype("float32") @ b.T.astype("float32")
            self._expected = self._expected + part

    def output(self, empty=None):
        return (empty or self.world.xp.empty)(self.shape, self.dtype)

    def flip(self):
        """All signs change."""
        for array in (self.x, self._expected):
            negate(array)

    def steps(self, empty):
        product = self.product.output(empty)
        yield gemm.Cublas, Step(self.x, product, self.b)
        yield Nccl, Step(product, self.output(empty), nccl=self.reduction.nccl)

    def _found(self, out):
        allowed = ERROR * product_cases.ERROR[self.dtype.name]
        return product_cases.found(self.world.xp, out[self._checked], self._expected, allowed)


class Ours(layers.Ours):
    """One method of the host object."""

    def make(self, case, **chosen):
        m, n, _ = case.product.shape
        return OPS[case.op][1](self.world, m, n, case.dtype, **chosen)

    def start(self, case):
        super().start(case)
        if case.op == "gemm_ar":
            self.out = self._object.output(case.shape)

    def choice(self, case):
        m, n, k = case.product.shape
        return self._object.method_for(m, k, n)


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    op, (collective, host) = options.command, OPS[options.command]
    parts, in_turn = by_nccl(world, options, "reduction")
    entries = [Entry(gemm.Ours(world, "auto"), "product", "Gemm")]
    entries += [Entry(collectives.Ours(world, "auto"), "reduction", collective), *parts]
    entries += [Entry(TorchProductScatter(world))] if "torch" in options.vs else []
    methods = options.methods or ("auto", *host.methods_for(world.n_nodes))
    entries += in_turn + [Entry(Ours(world, method, sms)) for sms in budgets(options) for method in methods]

    def cases_of(shape, dtype):
        m, n, k = layers.share(world, op, shape)
        alone = product_cases.GemmCase(world, (m, k, n), dtype)
        reduction = CASES[collective](world, m * k * dtype.itemsize, dtype, unit=1)
        return {"product": alone, "reduction": reduction, None: Both(op, alone, reduction)}

    measure_shapes(world, results, options, progress, entries, cases_of)
