"""Products of float8 in ``bench gemm`` and ``grouped_gemm``: numbers with scales of blocks, and what they are
compared with: PyTorch's products of float8 (of scales of 1, which cost it nothing), and products of bfloat16.
"""

import numpy as np

from shmemkit.gemm.block_scales import BLOCK
from shmemkit.gemm.problem import FLOAT8
from shmemkit.support.dtypes import numpy_dtype

from .product_cases import ERROR, GemmCase, found, random
from .torch_peer import TorchCall, tensor_of, transposed

LARGEST, DEVIATION = 448, 100
ALLOWED = ERROR["bfloat16"] + 3e-4  # with what sums of a block lose
CUBLAS_TWO_LEVELS = "cuBLAS, no fast accumulation"


def narrowed(xp, x):
    """float32 as float8, by way of float16: CuPy does not convert to it."""
    halves = np.arange(1 << 16, dtype="uint16").view("float16").astype("float32")
    table = np.clip(np.nan_to_num(halves), -LARGEST, LARGEST).astype(numpy_dtype(FLOAT8)).view("uint8")
    return xp.asarray(table)[x.astype("float16").view("uint16")].view(numpy_dtype(FLOAT8))


def numbers(xp, seed, *shapes):
    """-> random arrays of `shapes`, the same of one seed on all ranks"""
    return [narrowed(xp, DEVIATION * x) for x in random(xp, seed, "float32", *shapes)]


def widened(xp, x):
    table = np.arange(256, dtype="uint8").view(numpy_dtype(FLOAT8)).astype("float32")
    return xp.asarray(table)[x.view("uint8")]


def scaled(xp, x, scales):
    """(rows, K), in float32, times the scales (rows or blocks of them, blocks of K)"""
    scales = scales.repeat(BLOCK, 1)[:, : x.shape[1]]
    if scales.shape[0] != x.shape[0]:
        scales = scales.repeat(BLOCK, 0)[: x.shape[0]]
    return widened(xp, x) * scales


def random_scales(xp, shape, ones):
    """From 2**-9 to 2**-7; or, for others, 1."""
    scales = np.exp2(np.random.default_rng(len(shape)).uniform(-9, -7, shape)).astype("float32")
    return xp.ones(shape, "float32") if ones else xp.asarray(scales)


def blocks(size):
    return -(-size // BLOCK)


class Float8Case(GemmCase):
    """A product of float8, whose scales are random, or `ones`."""

    def __init__(self, world, shape, layout, ones=False):
        super().__init__(world, shape, numpy_dtype("bfloat16"), layout)
        self.ones, (m, n, k) = ones, shape
        self.bytes = m * k + n * k + 2 * m * n

    def make(self):
        (m, n, k), xp = self.shape, self.world.xp
        if self.layout != "tn":
            raise ValueError(f"{FLOAT8} needs rows of K")
        self.x, w = numbers(xp, self.world.rank, (m, k), (n, k))
        self.b = w.T
        self.of_x = random_scales(xp, (m, blocks(k)), self.ones)
        self.of_w = random_scales(xp, (blocks(n), blocks(k)), self.ones)
        self.options = {"scales": (self.of_x, self.of_w.T)}

    def _found(self, out):
        xp, step = self.world.xp, max(1, self.shape[0] // 64)
        reference = scaled(xp, self.x[::step], self.of_x[::step]) @ scaled(xp, self.b.T, self.of_w).T
        return found(xp, out[::step], reference, ALLOWED if not self.ones else 1)


class ScaledMm(TorchCall):
    """``torch._scaled_mm``: cuBLAS, one scale of each operand, with or without fast accumulation."""

    distributed = False

    def __init__(self, world, method, fast):
        super().__init__(world)
        self.method, self.fast = method, fast

    def prepare(self, torch, case):
        x, b = tensor_of(torch, case.x), tensor_of(torch, case.b)
        one = torch.ones((), device="cuda")
        given = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": self.fast}
        return lambda: torch._scaled_mm(x, b, **given)


class ScaledGroupedMm(TorchCall):
    """``torch._scaled_grouped_mm``: a scale of each row of x and w, with fast accumulation."""

    method, distributed = "torch._scaled_grouped_mm", False

    def prepare(self, torch, case):
        x, w = tensor_of(torch, case.x), transposed(torch, case.w)
        scales = [torch.ones(size, device="cuda") for size in (case.rows, case.w.shape[:2])]
        given = {"offs": torch.from_dlpack(case.ends), "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch._scaled_grouped_mm(x, w, *scales, **given)
