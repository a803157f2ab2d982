"""Bad input of the emulator raises at once, and says what is allowed."""

import numpy as np
import pytest
from emulated import spmd
from numba import cuda

import shmemkit as sk


@cuda.jit
def nothing():
    pass


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: sk.zeros(True), TypeError, "shape is True"),
        (lambda x: sk.empty((4, False)), TypeError, "an integer of 0 or more"),
        (lambda x: sk.zeros(4, ">f4"), ValueError, "Use 'float32', and convert"),
        (lambda x: sk.array([1], np.dtype(">i8")), ValueError, "Use 'int64'"),
        (lambda x: sk.peer_view(x, "1"), TypeError, "rank is '1'; it must be an integer"),
        (lambda x: sk.peer_view(x, None), TypeError, "an integer"),
        (lambda x: nothing[1, 1, 0, (227 << 10) + 1](), ValueError, "0 to 232448"),
        (lambda x: nothing[1, 1, 0, -1](), ValueError, "0 to 232448"),
        (lambda x: nothing[1, 1, 0, 1.5](), TypeError, "an integer"),
        (lambda x: sk.bind(nothing, 1, 1, (), shared=1 << 20)(), ValueError, "0 to 232448"),
    ],
)
def test_refused(call, error, words):
    def main(world):
        x = sk.zeros(4)
        with pytest.raises(error, match=words):
            call(x)
        nothing[1, 1, 0, 227 << 10]()
        return sk.array(np.array([1, 2], ">i4")).tolist()

    assert spmd(2, main, heap_size=1 << 14) == [[1, 2]] * 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"heap_size": 0}, ValueError, "heap_size=0: at least one byte"),
        ({"heap_size": -4096}, ValueError, "at least one byte"),
        ({"heap_size": "1G"}, TypeError, "heap_size='1G': a number of bytes"),
        ({"heap_size": True}, TypeError, "a number of bytes"),
        ({"heap_size": 1e6}, TypeError, "a number of bytes"),
        ({"heap_size": 1 << 60}, MemoryError, "a smaller NVSHMEM_SYMMETRIC_SIZE"),
        ({"heap_size": 1 << 80}, MemoryError, "a smaller NVSHMEM_SYMMETRIC_SIZE"),
        ({"n_pes": 10**9}, ValueError, "at most 1024"),
        ({"n_pes": True}, ValueError, "at least one PE"),
        ({"n_pes": 1000, "heap_size": 1 << 40}, MemoryError, "fewer ranks"),
    ],
)
@pytest.mark.parametrize("call", [sk.emu.run, sk.emu.explore])
def test_refused_sizes(call, options, error, words):
    with pytest.raises(error, match=words):
        result = call(sk.init, **{"n_pes": 2, **options})
        raise result.failure  # of `explore`


@pytest.mark.parametrize("size", ["1024P", str(1 << 60), "100000000T"])
def test_refused_symmetric_size(monkeypatch, size):
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", size)
    with pytest.raises((ValueError, MemoryError), match="NVSHMEM_SYMMETRIC_SIZE"):
        sk.emu.run(sk.init, 2)
    with pytest.raises((ValueError, MemoryError), match="NVSHMEM_SYMMETRIC_SIZE"):
        sk.init(backend="emulator")
    assert sk.current() is None
