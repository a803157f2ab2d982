"""The garbage collector: off while kernels are compiled and threads made; large kernels are frozen."""

import gc
import sys
import threading

import pytest
from emulated import untyped
from numba import cuda

import shmemkit as sk
from shmemkit.support.garbage_collection import uncollected


@cuda.jit
def count(found, fails):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i == 0:
        found[0] = gc.get_freeze_count()
        if fails:
            found[found.size] = 0


@pytest.mark.every(2)
@untyped
@pytest.mark.parametrize("theirs", [False, True])
def test_what_others_have_frozen_stays_so(theirs):
    """Large kernels freeze, but not then."""

    def main(fails):
        found = sk.init().zeros(1, "int64")
        count[40, 32](found, fails)
        return found[0]

    gc.unfreeze()
    try:
        if theirs:
            gc.freeze()
        assert sk.emu.run(main, 1, (False,))[0] > 0
        assert (gc.get_freeze_count() > 0) == theirs
        with pytest.raises(sk.emu.EmulatorError):
            sk.emu.run(main, 1, (True,))
        assert (gc.get_freeze_count() > 0) == theirs
    finally:
        gc.freeze()


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_several_threads(many_switches):
    def use():
        for _ in range(10_000):
            with uncollected():
                pass

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.isenabled()


def test_one_in_another():
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
