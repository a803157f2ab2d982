"""Products of float8 with scales of blocks, on the emulator: edges, tiles, layouts of scales, grouped ones; their
error beside that of sums in one level; and what is refused."""

import numpy as np
import pytest
from emulated import spmd
from gemms import ERROR, error, expected

import shmemkit as sk
from shmemkit.gemm import sm90
from shmemkit.gemm.problem import Gpu, Problem
from shmemkit.gemm.sm90 import Tile
from shmemkit.gemm.sm90_host import Choice, Sm90
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
    """Random ones of a product of `size` (M, N, K), of scales from 2**-6 to 2**6."""

    def __init__(self, size, experts=None):
        m, n, k = size
        rng, of_w = np.random.default_rng([m, n, k]), () if experts is None else (experts,)
        self.x = stored(rng.standard_normal((m, k)).astype(FLOAT8))
        self.w = stored(rng.standard_normal((*of_w, n, k)).astype(FLOAT8))
        self.scales = tuple(
            np.exp2(rng.uniform(-6, 6, shape)).astype("float32")
            for shape in ((m, blocks(k)), (*of_w, blocks(n), blocks(k)))
        )
        self.wide = [
            operand.astype("float64") * spread(scales, operand.shape)
            for operand, scales in zip((self.x, self.w), self.scales, strict=True)
        ]


def check(out, reference):
    """The first level of a block of K loses some bits."""
    assert error(out, reference) < ERROR[out.dtype.name] + 3e-4


@pytest.mark.parametrize(
    ("size", "tile"),
    [
        ((130, 264, 300), (128, 256)),
        ((3, 136, 80), (64, 128)),
        ((70, 40, 144), (64, 64)),
        ((65, 24, 130), (128, 32)),
        ((64, 384, 129), (64, 256)),
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
