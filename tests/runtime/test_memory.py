"""Symmetric arrays on the emulator: what they hold, agreement of the ranks, freeing, views of peers,
errors."""

import gc
import re

import ml_dtypes
import numpy as np
import pytest
from emulated import spmd
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

import shmemkit as sk
from shmemkit.device import rank, symm_at
from shmemkit.runtime.symmetric_memory import DTYPES, as_dtype, as_shape


@pytest.fixture
def world():
    with sk.init("emulator") as world:
        yield world


# ---- what they hold


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(world, dtype):
    x, y = sk.zeros((2, 3), dtype), sk.full(4, 1, dtype)
    z, u = sk.array(np.arange(3), dtype), sk.empty(5, dtype)
    assert x.dtype == y.dtype == z.dtype == u.dtype == as_dtype(dtype) and type(x) is np.ndarray
    assert x.shape == (2, 3) and (x == 0).all() and (y == 1).all() and u.shape == (5,)
    np.testing.assert_array_equal(z, np.arange(3).astype(as_dtype(dtype)))
    assert set(u.view("uint8").tolist()) == {0xFF, 0xA5}, "undefined content shows"
    assert x.ctypes.data % 256 == 0 and x.flags.c_contiguous


def test_xp_allocates_no_float8(world):
    """As CuPy, which has views alone: of bytes, or of symmetric arrays."""
    kind, bytes_ = ml_dtypes.float8_e4m3fn, world.xp.full(3, 0x38, "uint8")
    given = np.ones(3, kind)
    for make in (
        lambda: world.xp.empty(3, kind),
        lambda: world.xp.asarray(given),
        lambda: world.xp.array(given),
        lambda: world.xp.zeros_like(given),
    ):
        with pytest.raises(ValueError, match="Unsupported dtype float8_e4m3fn"):
            make()
    x, view = sk.array(given), bytes_.view(kind)
    assert (x == view).all()
    assert all(np.shares_memory(world.xp.asarray(a), a) for a in (x, view))


@pytest.mark.parametrize(
    "given, meant",
    [
        ("bfloat16", ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16),
        (np.float32, "float32"),
        (np.dtype("int8"), "int8"),
        (float, "float64"),
        (bool, "bool"),
        ("f2", "float16"),
    ],
)
def test_names_of_dtypes(given, meant):
    assert as_dtype(given) == np.dtype(meant) and as_dtype(given).isnative


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("float8", "'float8'"),
        ("U3", "<U3"),
        (object, "object"),
        ("S1", r"\|S1"),
        ("M8[s]", r"datetime64\[s\]"),
        (np.longdouble, "float128"),
        (None, "None"),
        (3, "3"),
    ],
)
def test_wrong_dtypes(world, dtype, text):
    kind = TypeError if dtype in (None, 3) else ValueError
    with pytest.raises(kind, match=rf"zeros\(\): dtype is {text}; it must be float16, .* or complex128"):
        sk.zeros(3, dtype)


@pytest.mark.parametrize(
    "shape, meant", [(3, (3,)), ([2, 3], (2, 3)), ((), ()), (0, (0,)), (np.int64(4), (4,)), ((2, 0), (2, 0))]
)
def test_shapes(world, shape, meant):
    assert as_shape(shape) == meant
    x = sk.full(shape, 7)
    assert x.shape == meant and (x == 7).all()
    sk.free(x)


@pytest.mark.parametrize("shape", [-1, (2, -3), 2.0, "3", (2, None)])
def test_wrong_shapes(world, shape):
    kind = ValueError if shape in (-1, (2, -3)) else TypeError
    for call in (sk.zeros, sk.empty, sk.signals):
        argument = "n" if call is sk.signals else "shape"
        text = f"{call.__name__}(): {argument} is {shape!r}; it must be an integer of 0 or more, or a tuple"
        with pytest.raises(kind, match=re.escape(text)):
            call(shape)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, "x"), TypeError, "fill_value is 'x'; it must be a number of float32, or an array of shape"),
        ((3, None), TypeError, "fill_value is None; it must be"),
        ((3, 300, "uint8"), ValueError, "fill_value is 300; it must be a number of uint8"),
        ((3, float("nan"), "int32"), ValueError, "fill_value is nan"),
        ((3, [1, 2]), ValueError, r"fill_value is int64 \(2,\); it must be .* of shape \(3,\)"),
    ],
)
def test_wrong_fills(world, arguments, error, message):
    with pytest.raises(error, match=rf"full\(\): {message}"):
        sk.full(*arguments)
    assert sk.full((2, 3), [1, 2, 3], "int8").tolist() == [[1, 2, 3]] * 2


@pytest.mark.parametrize("values", [["a"], [[1], [1, 2]], None, object()])
def test_wrong_values(world, values):
    with pytest.raises(
        (TypeError, ValueError), match=r"array\(\): .*values.* (dtype is|not an array|of numbers)"
    ):
        sk.array(values, "float32")


def test_array_copies(world):
    for values in (
        [[1, 2], [3, 4]],
        np.ones(3, ">f4"),
        np.arange(6).reshape(2, 3).T,
        3.5,
        np.float16(2),
        [True],
    ):
        x = sk.array(values)
        np.testing.assert_array_equal(x, values)
        assert x.dtype == np.asarray(values).dtype.newbyteorder("=") and x.flags.c_contiguous
    assert sk.array([1, 2], "float32").dtype == "float32"


def test_signals(world):
    x = sk.signals(4)
    assert x.dtype == np.uint64 and x.tolist() == [0] * 4


def test_functions_are_documented_once():
    for name in "empty full zeros array signals free peer_view".split():
        assert getattr(sk, name).__doc__ == getattr(sk.World, name).__doc__


def test_empty_arrays_are_different_arrays(world):
    x, y, z = sk.zeros(0), sk.zeros((0, 3)), sk.full(4, 9)
    assert len({a.ctypes.data for a in (x, y, z)}) == 3
    for empty in (x, y):
        sk.free(empty)
    assert sk.zeros(8).ctypes.data != z.ctypes.data and (z == 9).all()


# ---- every rank its own


def test_every_rank_has_its_own_and_sees_the_others():
    def main(world):
        x = sk.array(np.arange(4) + 10 * world.rank)
        y = sk.full((2, 2), world.rank)
        for r in range(world.n_ranks):
            assert (sk.peer_view(x, r) == np.arange(4) + 10 * r).all()  # there as soon as array() returns
            assert (sk.peer_view(y[1], r) == r).all() and sk.peer_view(y[:, 1:], r).shape == (2, 1)
        world.host_barrier()
        sk.peer_view(x, (world.rank + 1) % world.n_ranks)[1:3] = -world.rank
        world.host_barrier()
        return x.tolist()

    assert spmd(3, main) == [[0, -2, -2, 3], [10, 0, 0, 13], [20, -1, -1, 23]]


def test_peer_view_errors(world):
    x = sk.zeros(3)
    with pytest.raises(ValueError, match=r"peer_view\(\): rank is 1; it must be 0"):
        sk.peer_view(x, 1)
    with pytest.raises(ValueError, match="rank is -1; it must be 0"):
        sk.peer_view(x, -1)

    def main(world):
        sk.peer_view(np.zeros(3), 1 - world.rank)

    with pytest.raises(ValueError, match=r"peer_view\(\): array, float64 \(3,\), is not in symmetric memory"):
        spmd(2, main)


# ---- the ranks agree, or all raise

MISMATCHES = {
    "ranks 0 and 2 ask for float32 (3,), rank 1 asks for float32 (4,).": lambda w: sk.zeros(
        3 + (w.rank == 1)
    ),
    "rank 0 asks for float32 (3,), ranks 1 and 2 ask for int32 (3,).": lambda w: sk.empty(
        3, "int32" if w.rank else "float32"
    ),
    "rank 0 asks for int64 (1, 2), rank 1 asks for int64 (2, 1), rank 2 asks for int64 (2,).": lambda w: (
        sk.array(np.ones([(1, 2), (2, 1), (2,)][w.rank], int))
    ),
    "rank 0 asks for uint64 (1,), rank 1 asks for uint64 (2,), rank 2 asks for uint64 (3,).": lambda w: (
        sk.signals(w.rank + 1)
    ),
    "rank 2: full(): shape is -1; it must be": lambda w: sk.full(-1 if w.rank == 2 else 1, 5),
    "rank 1: empty(): dtype is None; it must be": lambda w: sk.empty(1, None if w.rank == 1 else "int8"),
}


@pytest.mark.parametrize("message", MISMATCHES)
def test_different_requests_raise_on_every_rank(message):
    def main(world):
        try:
            MISMATCHES[message](world)
        except (TypeError, ValueError) as error:
            caught = str(error)
        x = sk.zeros(5)  # and all can go on
        assert sk.peer_view(x, 0).shape == (5,)
        return caught

    for me, caught in enumerate(spmd(3, main)):
        if message.startswith(f"rank {me}: "):
            assert caught.startswith(message.removeprefix(f"rank {me}: "))
        else:
            assert message in caught and ("ranks disagree: " in caught) == ("ask" in message)


def test_freeing_different_arrays_raises_on_every_rank():
    def main(world):
        x, y, wrong = sk.zeros(3, "int8"), sk.zeros(3, "int8"), np.zeros(3)
        messages = []
        for mine in ([x, y, x], [x, x, wrong]):
            with pytest.raises(ValueError) as caught:
                sk.free(mine[world.rank])
            messages.append(str(caught.value))
        sk.free(x)
        sk.free(y)
        return messages

    first, second, third = spmd(3, main)
    assert first[0] == (
        "ranks disagree: ranks 0 and 2 free array 1 (int8 (3,)), rank 1 frees array 2 (int8 (3,)). All ranks "
        "must free the same array"
    )
    assert first[1] == second[1] == f"rank 2: {third[1]}"
    assert third[1] == "free(): array is not in symmetric memory of this World, or it was freed before"


# ---- freeing


def test_free_errors(world):
    x = sk.zeros((4, 2))
    view, other = "is a view of the symmetric array 'array 1'. Give that", "not in symmetric memory"
    for wrong in (x[1:], x[:2], x.T, x.view("int32"), x.ravel()):
        with pytest.raises(ValueError, match=view):
            sk.free(wrong)
    with pytest.raises(ValueError, match=other):
        sk.free(np.zeros(3))
    for wrong in (3, None, [1]):
        with pytest.raises(
            TypeError, match=r"free\(\): array is .*; it must be a numpy.ndarray in symmetric"
        ):
            sk.free(wrong)
    sk.free(x)
    with pytest.raises(ValueError, match="freed before"):
        sk.free(x)


@pytest.mark.slow
def test_memory_is_used_again():
    def main(world):
        for _ in range(50):  # together five times the heap
            x, y = sk.zeros(12500), sk.zeros(12500)
            x[0] = 1
            sk.free(y)
            sk.free(x)
        a, b, c = (sk.zeros(64, "float32") for _ in range(3))
        hole = b.ctypes.data
        sk.free(b)
        assert sk.zeros(80).ctypes.data > c.ctypes.data
        again, tries = sk.zeros(60), 0
        while again.ctypes.data != hole:  # not before there is no other room
            again, tries = sk.zeros(60), tries + 1
        assert tries > 1000 and (again == 0).all()
        assert world.rank or sk.peer_view(a, 0) is a

    spmd(2, main, heap_size=1 << 20)


def test_free_waits_for_kernels():
    @cuda.jit
    def write_late(x):
        for _ in range(50):
            cuda.nanosleep(10)
        symm_at(x, 1 - rank())[0] = 5

    def main(world):
        x = sk.zeros(1)
        write_late[1, 1, cuda.stream()](x)
        sk.free(x)
        y = sk.zeros(1)
        world.host_barrier()
        return y[0]

    assert spmd(2, main) == [0, 0]


# ---- the end of the heap


def test_exhausted(monkeypatch):
    def main(world):
        x = sk.zeros(100_000, "uint8")
        with pytest.raises(MemoryError) as caught:
            sk.zeros(1_000_000, "uint8")
        sk.free(x)
        sk.zeros(1_000_000, "uint8")
        return str(caught.value)

    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1M")
    for message in spmd(2, main):
        assert "symmetric heap is full: 1000000 bytes are asked for" in message
        assert "of 1048576 are in use on each rank. Set NVSHMEM_SYMMETRIC_SIZE, now 1048576, to " in message
        needed = int(message.split(" to ")[1].split()[0])
        assert 1_100_000 < needed < 1_110_000


def test_absurd_sizes(world):
    with pytest.raises(MemoryError):
        sk.zeros((2**40, 2**40))


@pytest.mark.parametrize(
    "text, size",
    [
        ("4096", 4096),
        ("64k", 65536),
        ("2M", 2 << 20),
        ("1.5G", 3 << 29),
        ("10 MiB", 10 << 20),
        ("5000", 8192),
    ],
)
def test_size_of_the_heap(monkeypatch, text, size):
    from shmemkit.emu.heap import heap_size

    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", text)
    assert heap_size() == size


@pytest.mark.parametrize("text", ["many", "12Q", "-5", "0", "I", "1e999", "M"])
def test_wrong_sizes_of_the_heap(monkeypatch, text):
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", text)
    with pytest.raises(ValueError, match="NVSHMEM_SYMMETRIC_SIZE is .*a number of bytes, with K, M or G"):
        sk.init("emulator")
    assert sk.current() is None


@examples(40)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=40))
def test_allocations_never_overlap(steps):
    """Random allocations and frees: each keeps its content until it is freed."""
    with sk.init("emulator"):
        live = []
        for number, (allocate, size) in enumerate(steps):
            if allocate or not live:
                live.append((sk.full(size, number % 100, "uint8"), number % 100))
            else:
                array, value = live.pop(size % len(live))
                assert (array == value).all()
                sk.free(array)
        assert all((array == value).all() for array, value in live)


# ---- leaks


@pytest.mark.slow
def test_dropped_arrays_are_reported(capfd):
    def main(world):
        kept = sk.zeros(2)
        sk.zeros((2, 3), "int8", name="lost")
        sk.free(sk.zeros(5))
        view = sk.zeros(7, name="seen")[2:]
        gc.collect()
        return kept, view

    spmd(2, main)
    lines = sorted(capfd.readouterr().err.splitlines())
    assert lines == [
        f"shmemkit: rank {r} dropped 1 symmetric array(s) without free: lost int8 (2, 3)" for r in (0, 1)
    ]


def test_many_leaks_are_summed_up(capfd):
    with sk.init("emulator"):
        for i in range(10):
            sk.zeros(1, name=f"x{i}")
    err = capfd.readouterr().err
    assert "dropped 10 symmetric array(s)" in err and "x7" in err and "x8" not in err and ", ..." in err


def test_names_appear_in_reports():
    from shmemkit.device import wait

    @cuda.jit
    def kernel(pair):
        wait(pair[0][1:], 1, "sys", "acquire", 1)

    with pytest.raises(sk.emu.DeadlockError, match=r"waits for my flags\[1\] on rank 0 >= 1, now 0"):
        spmd(1, lambda world: kernel[1, 1]((sk.signals(3, name="my flags"), 5)))


def test_asnumpy_is_a_copy(world):
    x = sk.zeros(3)
    copy = world.asnumpy(x)
    x[...] = 1
    assert (copy == 0).all()


def test_empty_is_there_before_anybody_writes_into_it():
    def main():
        world = sk.init()
        x = sk.empty(4, "int32")
        sk.peer_view(x, (world.rank + 1) % world.n_ranks)[...] = 7
        world.host_barrier()
        return x.tolist()

    assert sk.emu.run(main, 3) == [[7] * 4] * 3


def test_a_use_after_free_shows():
    def main():
        sk.init()
        x = sk.full(4, 1.0)
        sk.free(x)
        return np.isnan(x).all()

    assert sk.emu.run(main, 2) == [True, True]
