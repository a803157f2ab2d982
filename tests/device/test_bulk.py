"""Bulk copies on the emulator: sizes, dtypes, announced steps, and what they refuse."""

import numpy as np
import pytest
from emulated import untyped
from fast import slow
from numba import cuda, uint64

import shmemkit as sk
from shmemkit.device import BULK_WORDS, bulk_copy_warp, bulk_put_warp, rank, symm_at, wait


@pytest.mark.parametrize(
    "dtype, size", [("uint8", 0), ("uint8", 1), ("int16", 4097), *slow(("float64", 5000))]
)
def test_bulk_copy(pes, dtype, size):
    @cuda.jit
    def kernel(y, x):
        buffer = cuda.shared.array(BULK_WORDS, uint64)
        bulk_copy_warp(symm_at(y, 1 - rank()), x, buffer)

    def main():
        world = sk.init()
        y = world.zeros(size + 1, dtype)
        kernel[1, 32, world.stream](y[:size], (np.arange(size) % 100 + world.rank).astype(dtype))
        world.barrier()
        assert (y[:size] == np.arange(size) % 100 + 1 - world.rank).all() and y[size] == 0

    pes(2).run(main)


@pytest.mark.parametrize("size", [0, 1, 8192, *slow(20_000)])
def test_bulk_put(pes, size):
    """Each step is there when the signal says so."""

    @cuda.jit
    def kernel(y, x, signal, seen):
        buffer = cuda.shared.array(BULK_WORDS, uint64)
        if cuda.blockIdx.x == 0:
            bulk_put_warp(y, x, buffer, signal, 7, 8192, 1 - rank())
        else:
            step = 0
            while step == 0 or step * 8192 < y.size:
                wait(signal, 1, "sys", "acquire", 8 + step)
                for i in range(step * 8192 + cuda.threadIdx.x, min((step + 1) * 8192, y.size), 32):
                    seen[i] = y[i]
                step += 1

    def main():
        world = sk.init()
        y, signal, seen = world.zeros(size, "uint8"), world.signals(1), np.zeros(size, "uint8")
        kernel[2, 32](y, (np.arange(size) % 100 + world.rank).astype("uint8"), signal, seen)
        world.synchronize()
        assert (seen == np.arange(size) % 100 + 1 - world.rank).all()
        assert signal[0] == 7 + max(1, -(-size // 8192))

    pes(2).run(main)


@untyped
@pytest.mark.parametrize("primitive", [bulk_copy_warp, bulk_put_warp])
def test_wrong_buffers_of_bulk_copies(pes, primitive):
    @cuda.jit
    def kernel(y, x, buffer, signal):
        if primitive is bulk_copy_warp:
            bulk_copy_warp(y, x, buffer)
        else:
            bulk_put_warp(y, x, buffer, signal, 0, 8192, 0)

    def main(size, dtype):
        world = sk.init()
        y, signal = world.zeros(8192, "uint8"), world.signals(1)
        kernel[1, 32](y, np.ones(8192, "uint8"), np.empty(size, dtype), signal)
        world.synchronize()
        assert y.all()

    pes(1).run(main, BULK_WORDS, "uint64")
    for size, dtype in ((BULK_WORDS - 1, "uint64"), (BULK_WORDS, "int64")):
        wrong = f"has {size} elements" if dtype == "uint64" else f"is a 1-D array of {dtype}"
        message = rf"{primitive.__name__}\(\): buffer {wrong}; it must "
        with pytest.raises(sk.emu.EmulatorError, match=message):
            pes(1).run(main, size, dtype)
