"""When the garbage collector is off: while kernels of many threads run, and no longer."""

import gc

import pytest
from numba import cuda

import shmemkit as sk
from shmemkit import garbage
from shmemkit.emu.grid import MANY


@cuda.jit
def look(found, fails):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i == 0:
        found[0] = gc.isenabled()
        if fails:
            found[found.size] = 0


def run(threads, fails):
    def main():
        world = sk.init()
        found = world.zeros(1, "bool")
        look[threads // 32, 32, world.stream](found, fails)
        look[threads // 32, 32, world.stream](found, False)
        world.synchronize()
        return bool(found[0])

    return sk.emu.run(main, 2)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("threads", [32, -(-MANY // 32) * 32])
def test_kernels(threads, enabled):
    try:
        if not enabled:
            gc.disable()
        assert run(threads, False) == [enabled and threads < MANY] * 2
        with pytest.raises(sk.emu.EmulatorError):
            run(threads, True)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_one_in_another():
    with garbage.uncollected():
        with garbage.uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
