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


M = np.ones((4, 4), "float32")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda w: sk.zeros(4, name=np.zeros(2)), TypeError, "name is a numpy.ndarray; it must be a string"),
        (lambda w: sk.full(4, 1j), TypeError, "fill_value is 1j; it must be a number of float32"),
        (lambda w: w.is_symmetric([1]), TypeError, r"is_symmetric\(\): array is a list"),
        (lambda w: w.place_of(None), TypeError, r"place_of\(\): array is None"),
        (lambda w: w.check_reach("x", ranks=1), TypeError, "ranks is 1; it must be a list of ranks"),
        (lambda w: sk.peer_view(M, w.rank), ValueError, "is not in symmetric memory"),
        (lambda w: sk.peer_view([1], w.rank), TypeError, "array is a list; it must be a symmetric array"),
        (lambda w: sk.array(None), TypeError, "values is None; it must be an array, a PyTorch tensor or a"),
        (lambda w: sk.array("abc"), TypeError, "values is 'abc'; it must be an array"),
        (lambda w: sk.all_reduce(np.ma.ones(4)), TypeError, "x is a numpy.ma.*; it must be another array"),
        (
            lambda w: sk.matmul(M, M.view(np.matrix)),
            TypeError,
            "w is a numpy.matrix; it must be another array",
        ),
        (lambda w: sk.Timer(3), TypeError, "Timer: world is 3"),
        (lambda w: sk.Queue(None, 2, 4), TypeError, "Queue: world is None"),
        (lambda w: sk.matmul(M, M, method=["simt"]), TypeError, "method is a list; it must be 'auto', "),
        (lambda w: sk.matmul(M, M, activation=[]), TypeError, "activation is a list; it must be None, "),
        (lambda w: sk.AllReduce(w, 64, ["sum"]), TypeError, "AllReduce: op is a list; it must be 'sum', "),
        (lambda w: sk.all_reduce(M, "mean"), ValueError, "AllReduce: op is 'mean'"),
        (lambda w: sk.AllGather(w, 64)(M, stream=M), TypeError, "stream is a numpy.ndarray; "),
        (lambda w: sk.bind(nothing, 1, 1, ())(M), TypeError, "stream is a numpy.ndarray; it must be"),
        (lambda w: sk.Gemm(1), TypeError, "Gemm: method is 1; it must be 'auto'"),
        (lambda w: sk.AllGatherGemm(w, 64, ["push"]), TypeError, "AllGatherGemm: method is a list"),
        (lambda w: sk.AllGatherGemm(w, 64).method_for(3, "int8", 1), ValueError, r"shape is \(3,\)"),
        (lambda w: sk.AllGatherGemm(w, 64)(M, (M, M), M), TypeError, "out is a numpy.ndarray; it must be a"),
        (lambda w: sk.GemmAllReduce(w, 8, 8).method_for(-1, 1, 1), ValueError, "m is -1; it must be 0"),
        (lambda w: sk.GemmAllReduce(w, 8, 8, part_dtype=3), TypeError, "GemmAllReduce: part_dtype is 3"),
    ],
)
def test_refused_on_all_ranks(call, error, words):
    """At once: all ranks raise, and meet afterwards."""

    def main(world):
        with pytest.raises(error, match=words):
            call(world)
        return world.host_allgather(world.rank)

    assert spmd(2, main) == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"heap_size": 0}, ValueError, "heap_size is 0; it must be 1 or more"),
        ({"heap_size": -4096}, ValueError, "heap_size is -4096; it must be 1"),
        ({"heap_size": "1G"}, TypeError, "heap_size is '1G'; it must be an integer"),
        ({"heap_size": True}, TypeError, "heap_size is True; it"),
        ({"heap_size": 1e6}, TypeError, "heap_size is 1000000.0"),
        ({"heap_size": 1 << 60}, MemoryError, "a smaller NVSHMEM_SYMMETRIC_SIZE"),
        ({"heap_size": 1 << 80}, MemoryError, "a smaller NVSHMEM_SYMMETRIC_SIZE"),
        ({"n_ranks": 10**9}, ValueError, "it must be 1 to 1024"),
        ({"n_ranks": True}, TypeError, "n_ranks is True; it must be an integer"),
        ({"n_ranks": 1000, "heap_size": 1 << 40}, MemoryError, "fewer ranks"),
    ],
)
@pytest.mark.parametrize("call", [sk.emu.run, sk.emu.explore])
def test_refused_sizes(call, options, error, words):
    with pytest.raises(error, match=words):
        result = call(sk.init, **{"n_ranks": 2, **options})
        raise result.failure  # of `explore`


@pytest.mark.parametrize("size", ["1024P", str(1 << 60), "100000000T"])
def test_refused_symmetric_size(monkeypatch, size):
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", size)
    with pytest.raises((ValueError, MemoryError), match="NVSHMEM_SYMMETRIC_SIZE"):
        sk.emu.run(sk.init, 2)
    with pytest.raises((ValueError, MemoryError), match="NVSHMEM_SYMMETRIC_SIZE"):
        sk.init(backend="emulator")
    assert sk.current() is None
