"""Memory primitives on the emulator compute as on the GPU."""

import numpy as np
import pytest
from emulated import untyped
from numba import cuda

import shmemkit as sk
from shmemkit.device import load_vec16, store_vec16


@cuda.jit
def compute(x, out):
    a, b, c, d = load_vec16(x, 0)
    out[0], out[1], out[2] = a + 1, a << 4, a - 5 < 0
    store_vec16(x, 0, (a + 1, -1, c, d))


@cuda.jit
def at(x, index):
    x[0] = load_vec16(x, index)[0]


@untyped
def test_words_of_vectors_are_computed_in_64_bits_and_wrap_when_stored():
    def main():
        world = sk.init()
        x, out = sk.array(np.array([0xFFFFFFFF, 1, 2, 3], "uint32")), np.zeros(3, "int64")
        compute[1, 1, world.stream](x, out)
        assert out.tolist() == [0x100000000, 0xFFFFFFFF0, 0]
        assert x.tolist() == [0, 0xFFFFFFFF, 2, 3]

    sk.emu.run(main, 1)


@untyped
def test_16_bytes_at_no_integer():
    with pytest.raises(
        sk.emu.EmulatorError, match=r"load_vec16\(\): index is of type float64; it must be an integer"
    ):
        sk.emu.run(lambda: at[1, 1, sk.init().stream](np.zeros(8, "uint32"), 4.0), 1)
