"""Products of float8 with scales of blocks, on the emulator: edges, tiles, layouts of scales, grouped ones;
their error beside that of sums in one level; and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from emulated import spmd
from fast import slow
from gemms import ERROR, error, expected

import shmemkit as sk
from shmemkit.gemm import METHODS, bind_product, sm90
from shmemkit.gemm.problem import Gpu, Problem
from shmemkit.gemm.sm90 import Tile, gemm_kernel
from shmemkit.gemm.sm90_host import Choice, Sm90, bind_gemm
from shmemkit.runtime.symmetric_memory import as_dtype

FLOAT8, BLOCK = as_dtype("float8_e4m3fn"), 128


def blocks(size):
    return -(-size // BLOCK)


def stored(matrix):
    """`matrix`, of rows that begin at multiples of 16 bytes."""
    room = np.full((*matrix.shape[:-1], matrix.shape[-1] + 15 & ~15), 0x7F, "uint8").view(FLOAT8)
    room[..., : matrix.shape[-1]] = matrix
    return room[..., : matrix.shape[-1]]


def spread(scales, shape):
    """Scales of blocks as those of elements."""
    for axis in range(scales.ndim):
        if scales.shape[axis] != shape[axis]:
            scales = scales.repeat(BLOCK, axis)
    return scales[tuple(map(slice, shape))].astype("float64")


class Operands:
    """Random ones of a product of `size` (M, N, K), of scales from 2**-6 to 2**6, or, if the numbers have
    another `deviation`, of about its inverse."""

    def __init__(self, size, experts=None, deviation=None):
        m, n, k = size
        rng, of_w = np.random.default_rng([m, n, k]), () if experts is None else (experts,)
        self.x, self.w = (
            stored(((deviation or 1) * rng.standard_normal(shape)).clip(-448, 448).astype(FLOAT8))
            for shape in ((m, k), (*of_w, n, k))
        )
        low, high = (-6, 6) if deviation is None else np.log2([0.1 / deviation, 0.3 / deviation])
        self.scales = tuple(
            np.exp2(rng.uniform(low, high, shape)).astype("float32")
            for shape in ((m, blocks(k)), (*of_w, blocks(n), blocks(k)))
        )
        self.wide = [
            operand.astype("float64") * spread(scales, operand.shape)
            for operand, scales in zip((self.x, self.w), self.scales, strict=True)
        ]


def rows_of(operands, counts):
    """-> [(rows, (x, w)), ...] of each expert that has some, x and w in float64"""
    ends = np.cumsum(counts)
    slices = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
    x, w = operands.wide
    return [(rows, (x[rows], w[i])) for i, rows in enumerate(slices) if counts[i]]


def one_level(x, w, out, gpu):
    """-> the launch of a product of float8 (M, K) and (N, K) without scales, all of whose sums are the tensor
    cores'"""
    choice = Choice(Tile(64, 32), 1)
    return bind_gemm(gemm_kernel, Problem(x, w.T, out, None, None), choice, gpu.multiprocessors)


def check(out, reference):
    """The first level of a block of K loses some bits."""
    assert error(out, reference) < ERROR[out.dtype.name] + 3e-4


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("size", "tile"),
    [
        *slow(((130, 264, 300), (128, 256))),
        ((3, 136, 80), (64, 128)),
        ((70, 40, 144), (64, 64)),
        ((65, 24, 130), (128, 32)),
        *slow(((64, 384, 129), (64, 256)), ((66, 400, 272), (128, 192))),
        ((66, 24, 130), (128, 32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("races", [False, True])
def test_tiles_and_edges(size, tile, races):
    def main():
        world, operands = sk.init(), Operands(size)
        (of_x, of_w), out = operands.scales, np.full(size[:2], np.nan, "float32")
        problem = Problem(operands.x, operands.w.T, out, None, None, (of_x, of_w.T))
        gemm = Sm90(problem, Gpu((9, 0), 2, sm90.SHARED, np), Choice(Tile(*tile), 1))
        for _ in range(2):
            out[:] = np.nan
            gemm()
            world.stream.synchronize()
            check(out, expected(operands.wide[0], operands.wide[1].T))

    sk.emu.run(main, 1, races=races)


def test_parts_of_k():
    def main():
        world, operands, size = sk.init(), Operands((70, 40, 600)), (70, 40)
        out = np.full(size, np.nan, "float32")
        problem = Problem(
            operands.x, operands.w.T, out, None, None, (operands.scales[0], operands.scales[1].T)
        )
        Sm90(problem, Gpu((9, 0), 4, sm90.SHARED, np), Choice(Tile(64, 64, split=True), 3))()
        world.stream.synchronize()
        check(out, expected(operands.wide[0], operands.wide[1].T))

    sk.emu.run(main, 1)


@pytest.mark.every(3)
@pytest.mark.parametrize("out_dtype", [None, "float16", "float32"])
@pytest.mark.parametrize("order", "CF")
def test_matmul(out_dtype, order):
    def main(world):
        operands = Operands((21, 48, 272), deviation=1)
        bias = np.linspace(-2, 2, 48).astype("float32")
        out = None if out_dtype is None else np.empty((21, 48), out_dtype)
        of_x, of_w = (np.array(scales, order=order) for scales in operands.scales)
        options = {"bias": bias, "activation": "relu", "scales": (of_x, of_w.T)}
        out = sk.matmul(operands.x, operands.w.T, out, **options)
        world.synchronize()
        assert out.dtype.name == (out_dtype or "bfloat16")
        check(out, expected(operands.wide[0], operands.wide[1].T, bias, "relu"))

    spmd(1, main)


def test_one_scale_for_all():
    def main(world):
        operands = Operands((16, 32, 144))
        one = np.float32([[0.5]])
        out = sk.matmul(
            operands.x, operands.w.T, scales=(np.broadcast_to(one, (16, 2)), np.broadcast_to(one, (2, 1)))
        )
        world.synchronize()
        check(out, expected(operands.x, operands.w.T) / 4)

    spmd(1, main)


@pytest.mark.parametrize("columns", [48, 96, 160])
def test_tiles_of_grouped_products_that_are_refused(columns):
    """Tiles of 48 and 96 columns had wrong scales."""

    def main(world):
        operands, grouped = (
            Operands((4, 272, 128), 2),
            sk.GroupedGemm("sm90", options={"tile": (64, columns)}),
        )
        grouped(operands.x, operands.w, np.zeros(2, "int32"), scales=operands.scales)

    with pytest.raises(ValueError, match="of float8 it must have 256, 192, 128, 64 or 32 columns"):
        spmd(1, main)


@pytest.mark.each_value
@pytest.mark.parametrize("counts", [[0, 6, 0], [0, 0], *slow([3, 0, 70, 1], [0, 66, 0], [1] * 5)], ids=str)
@pytest.mark.parametrize("tile", [(64, 64), (128, 256)], ids=str)
def test_grouped(counts, tile):
    def main(world):
        operands = Operands((sum(counts) + 3, 136, 144), len(counts))
        out, grouped = (
            np.empty((sum(counts) + 3, 136), "float32"),
            sk.GroupedGemm("sm90", options={"tile": tile}),
        )
        for _ in range(1 if sum(counts) < 10 else 2):
            out[:] = 77
            grouped(operands.x, operands.w, np.array(counts, "int32"), out, scales=operands.scales)
            world.synchronize()
            for rows, (x, w) in rows_of(operands, counts):
                check(out[rows], expected(x, w.T))
            assert (out[sum(counts) :] == 77).all()

    spmd(1, main, races=sum(counts) < 70)


def test_grouped_matmul():
    def main(world):
        operands, counts = Operands((7, 16, 48), 2), np.array([4, 3], "int32")
        out = sk.grouped_matmul(operands.x, operands.w, counts, scales=operands.scales)
        world.synchronize()
        assert out.dtype.name == "bfloat16"
        for rows, (x, w) in rows_of(operands, counts):
            check(out[rows], expected(x, w.T))

    spmd(1, main)


# ---- errors of sums

ONE_LEVEL = {128: 1.2e-4, 1024: 5.2e-4, 4096: 1.3e-3, 16384: 3.1e-3}
"""K: the relative error, of the norm, of sums of normal numbers by the tensor cores alone."""
TWO_LEVELS = 1.2e-4


@pytest.mark.parametrize("k", [128, 1024, *slow(4096, 16384)])
def test_two_levels_lose_no_more_than_one_block(k):
    def main():
        world, operands, gpu = (
            sk.init(),
            Operands((64, 32, k), deviation=100),
            Gpu((9, 0), 2, sm90.SHARED, np),
        )
        x, w = operands.x, operands.w
        wide = expected(x.astype("float64"), w.astype("float64").T)
        alone, both = np.empty((2, 64, 32), "float32")
        one_level(x, w, alone, gpu)()
        ones = np.ones((64, blocks(k)), "float32"), np.ones((blocks(k), 1), "float32")
        Sm90(Problem(x, w.T, both, None, None, ones), gpu, Choice(Tile(64, 32), 1))()
        world.stream.synchronize()
        return error(alone, wide), error(both, wide)

    alone, both = sk.emu.run(main, 1)[0]
    assert alone == pytest.approx(ONE_LEVEL[k], rel=0.1)
    assert both == pytest.approx(TWO_LEVELS, rel=0.1)


def test_table_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "float8.md").read_text()
    rows = [f"| {k} | {error:.1e} | {TWO_LEVELS:.1e} |" for k, error in ONE_LEVEL.items()]
    assert "\n".join(rows) in page


# ---- what is refused


def zeros(*shape, dtype="float8_e4m3fn"):
    return np.zeros(shape, as_dtype(dtype))


def scales(*shapes, dtype="float32"):
    return tuple(np.ones(shape, dtype) for shape in shapes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scales": None}, "x is float8_e4m3fn and scales is None; it must be a tuple of two arrays"),
        ({"scales": scales((4, 2))}, "scales is a tuple; it must be a tuple of two arrays"),
        ({"scales": scales((4, 3), (2, 1))}, r"scales\[0\] is float32 .*; it must be float32 \(4, 2\)"),
        ({"scales": scales((4, 2), (2, 1), dtype="float64")}, r"scales\[0\] is float64"),
        ({"scales": (np.ones((4, 2), "float32")[::-1], np.ones((2, 1), "float32"))}, "0 or more"),
        (
            {"x": zeros(4, 144, dtype="float16"), "w": zeros(144, 8, dtype="float16")},
            "only float8_e4m3fn has some",
        ),
        ({"w": zeros(144, 8)}, "Gemm: Method 'sm90' cannot be used: .*rows of K must be contiguous"),
        ({"method": "sm80"}, "Method 'sm80' cannot be used: the operands are float8_e4m3fn"),
        ({"out": zeros(4, 8, dtype="int32")}, "out is int32 .*; it must be bfloat16, float16 or float32"),
        (
            {"x": zeros(4, 24), "w": zeros(8, 24).T, "scales": scales((4, 1), (1, 1))},
            "begin at multiples of 16",
        ),
    ],
)
def test_what_is_refused(change, text):
    given = {"x": zeros(4, 144), "w": zeros(8, 144).T, "scales": scales((4, 2), (2, 1)), **change}
    with pytest.raises((ValueError, TypeError), match=text):
        spmd(1, lambda world: sk.matmul(**given))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scales": None}, "scales is None"),
        ({"scales": scales((4, 2), (2, 2, 1))}, r"scales\[1\] .* must be float32 \(2, 1, 2\)"),
        ({"w": zeros(2, 144, 16).transpose(0, 2, 1)}, "rows of K must be contiguous"),
        ({"method": "sm80"}, "Method 'sm80' cannot be used: the operands are float8_e4m3fn"),
    ],
)
def test_what_is_refused_of_grouped_products(change, text):
    given = {"x": zeros(4, 144), "w": zeros(2, 8, 144), "counts": np.zeros(2, "int32")}
    given |= {"scales": scales((4, 2), (2, 1, 2)), **change}
    with pytest.raises((ValueError, TypeError), match=text):
        spmd(1, lambda world: sk.grouped_matmul(**given))


def test_other_gpus_are_refused():
    def main():
        sk.init()
        problem = Problem(
            zeros(4, 144), zeros(8, 144).T, zeros(4, 8, dtype="float32"), None, None, scales((4, 2), (2, 1))
        )
        for kind in METHODS.values():
            assert kind.unsupported(problem, Gpu((8, 9), 2, sm90.SHARED, np))
        with pytest.raises(
            ValueError, match="Method 'sm90' cannot be used: .* capability 8.9; it must be 9.0"
        ):
            bind_product(problem, Gpu((8, 9), 2, sm90.SHARED, np))

    sk.emu.run(main, 1)
