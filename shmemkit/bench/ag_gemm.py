"""``bench ag_gemm``: ``sk.AllGatherGemm`` compared with NCCL's all-gather and then cuBLAS, and with PyTorch's
fused_all_gather_matmul.

Each rank has M / n_ranks rows, and N / n_ranks columns of the weights, stored by columns as in a linear layer
of PyTorch. Random operands, checked against float32 by the relative error of the norm. Alone, in the same
rounds: the products (``Gemm``, cuBLAS) and the gathering (the copies that overlap takes, NCCL).
"""

from typing import Any

from shmemkit.collectives.all_gather.push_ahead import PushAhead

from . import gemm, layers, product_cases
from .cases import AllGatherCase
from .command import Entry
from .layers import Step
from .measure import Contender
from .nccl import Nccl
from .shapes import text_of
from .torch_peer import TorchGatherProduct


class Product(product_cases.GemmCase):
    """The product alone: of all rows, as if they were here already."""

    def make(self):
        (m, n, k), world, ranks = self.shape, self.world, self.world.n_ranks
        parts = [product_cases.random(world.xp, rank, self.dtype, (m // ranks, k)) for rank in range(ranks)]
        self.x = world.xp.concatenate([x for (x,) in parts])
        (b,) = product_cases.random(world.xp, ranks + world.rank, self.dtype, (n, k))
        self.b = b.T

    @property
    def mine(self):
        """This rank's rows."""
        rows = self.shape[0] // self.world.n_ranks
        return self.x[self.world.rank * rows : (self.world.rank + 1) * rows]

    @property
    def whole(self):
        return self.x


class Gathering(AllGatherCase):
    """The gathering alone, of M rows of K elements: the product's `whole`, of which each rank has `mine`."""

    def __init__(self, product, m, k):
        self.product = product
        super().__init__(product.world, m * k * product.dtype.itemsize, product.dtype, unit=1)

    def make(self):
        self.x = self.product.mine.copy().reshape(-1)
        self.expected = self.product.whole.copy().reshape(-1).view("uint8")


class Both(product_cases.GemmCase):
    """Both. The result is that of the product, and checked by its operands, which change when these do."""

    op, host = "ag_gemm", "AllGatherGemm"

    def __init__(self, product, gathering):
        super().__init__(product.world, product.shape, product.dtype)
        self.product, self.gathering, self.bytes = product, gathering, gathering.bytes
        m, n, k = product.shape
        self.shape_text = text_of((m, n * self.world.n_ranks, k))
        self._found, self.made_of = product._found, (self.world, self.bytes)

    def choice(self, host, symmetric):
        return host.method_for(self.x.shape, self.dtype, self.b.shape[1])

    def make(self):
        self.x, self.b = self.product.mine.copy(), self.product.b

    def steps(self, empty):
        gathered = empty(self.product.x.shape, self.dtype)
        yield Nccl, Step(self.x, gathered, nccl=self.gathering.nccl)
        yield gemm.Cublas, Step(gathered, self.output(), self.b)


class Copies(Contender):
    """The copies of "overlap", without a product."""

    method = "copies"
    _engine: Any = None

    def start(self, case):
        self._engine = PushAhead(self.world, case.bytes)
        self.out = self._engine.buffer[: case.bytes].view(case.dtype)
        self._transfer: Any = self._engine.overlap(case.x, self.out)

    def call(self):
        self._transfer.start()
        self._transfer.finish()

    def stop(self):
        super().stop()
        self._transfer = None
        if self._engine is not None:
            self._engine.free()
        self._engine = None


def plan(world, options):
    def cases(shape, dtype):
        alone = Product(world, layers.share(world, "ag_gemm", shape), dtype)
        gathering = Gathering(alone, shape[0], shape[2])
        return {"product": alone, "gathering": gathering, None: Both(alone, gathering)}

    copies = Entry(Copies(world), "gathering")
    return layers.plan(world, options, copies, "gathering", "AllGatherGemm", TorchGatherProduct, cases)


_fused, _other = "fused_all_gather_matmul", "NCCL's all-gather and then cuBLAS"
COMMANDS = [layers.command("ag_gemm", "AllGatherGemm", plan, _other, "M and N", _fused)]
