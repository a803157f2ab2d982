"""cp.async, ldmatrix and mma.sync on the emulator: what they compute, and that a missing wait is found; and
what they become on the GPU."""

import ml_dtypes
import numpy as np
import pytest
from emulated import spmd
from numba import cuda, float32, types, uint16
from ptx import AMPERE, compile_ptx, instructions, position

import shmemkit as sk
from shmemkit.device.cuda.float_storage import ELEMENTS, element
from shmemkit.device.cuda.mma import (
    MMA_DTYPES,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    ldmatrix,
    ldmatrix_trans,
    warp_mma,
)
from shmemkit.emu import EmulatorError, RaceError


@cuda.jit
def copies(x, out):
    """Two groups of 16 bytes per thread; the first is stored before the second is there."""
    room = cuda.shared.array(512, types.uint16)
    i = cuda.threadIdx.x * 8
    cp_async(room, 2 * i, x, i, 16, 16)
    cp_async_commit()
    cp_async(room, 2 * i + 512, x, i + 256, 6, 8)
    cp_async_commit()
    cp_async_wait(1)
    for j in range(8):
        out[i + j] = room[i + j]
    cp_async_wait(0)
    for j in range(4):
        out[i + 256 + j] = room[i + 256 + j]


def test_copies_arrive_with_zeros_behind_them():
    def main(world):
        x, out = np.arange(1, 513, dtype="uint16"), np.zeros(512, "uint16")
        copies[1, 32](x, out)
        world.synchronize()
        assert (out[:256] == x[:256]).all()
        second = out[256:].reshape(32, 8)
        assert (second[:, :3] == x[256:].reshape(32, 8)[:, :3]).all() and not second[:, 3:].any()

    spmd(1, main, races=True)


@cuda.jit
def without_a_wait(x, out, wait, meet, keep):
    room = cuda.shared.array(64, types.uint16)
    i = cuda.threadIdx.x
    room[8 * i] = 7
    if keep:
        cuda.syncthreads()
    cp_async(room, 16 * i, x, 8 * i, 16, 16)
    cp_async_commit()
    if wait:
        cp_async_wait(0)
    if meet:
        cuda.syncthreads()
    out[i] = room[8 * (i ^ 1)]


def run_without(*flags, races=False):
    def main(world):
        x, out = np.arange(64, dtype="uint16"), np.zeros(8, "uint16")
        without_a_wait[1, 8](x, out, *flags)
        world.synchronize()
        return out.tolist()

    return spmd(1, main, races=races)[0]


def test_who_does_not_wait_does_not_see_them():
    expected = [8, 0, 24, 16, 40, 32, 56, 48]
    assert run_without(True, True, True, races=True) == expected
    assert run_without(False, True, True) == [0xFFFF] * 8
    with pytest.raises(RaceError):
        run_without(True, False, True, races=True)


@cuda.jit
def overwritten(x, out):
    """The copy may arrive before the other threads have read what was there."""
    room = cuda.shared.array(64, types.uint16)
    i = cuda.threadIdx.x
    room[8 * i] = i
    cuda.syncthreads()
    out[i] = room[8 * (i ^ 1)]
    cp_async(room, 16 * i, x, 8 * i, 16, 16)
    cp_async_commit()
    cuda.syncthreads()
    cp_async_wait(0)


def test_copies_over_what_others_read_are_a_race():
    def main(world):
        overwritten[1, 8](np.zeros(64, "uint16"), np.zeros(8, "uint16"))
        world.synchronize()

    with pytest.raises(RaceError):
        spmd(1, main, races=True)


@cuda.jit
def read_twice(x, out):
    """The source changes before it has been read."""
    room = cuda.shared.array(8, types.uint16)
    cp_async(room, 0, x, 0, 16, 16)
    cp_async_commit()
    x[0] = 99
    cp_async_wait(0)
    out[0] = room[0]


def test_the_source_is_read_late():
    def main(world):
        out = np.zeros(1, "uint16")
        read_twice[1, 1](np.zeros(8, "uint16"), out)
        world.synchronize()
        return out[0]

    assert spmd(1, main) == [99]


@cuda.jit
def transposing(x, out):
    room = cuda.shared.array(256, types.uint16)
    lane = cuda.threadIdx.x
    for i in range(8):
        room[8 * lane + i] = x[8 * lane + i]
    cuda.syncthreads()
    rows, columns = ldmatrix(room, 16 * lane), ldmatrix_trans(room, 16 * lane)
    out[0, 0, lane], out[0, 1, lane], out[0, 2, lane], out[0, 3, lane] = rows[0], rows[1], rows[2], rows[3]
    out[1, 0, lane], out[1, 1, lane] = columns[0], columns[1]
    out[1, 2, lane], out[1, 3, lane] = columns[2], columns[3]


def expected_matrices(x):
    matrices = x.reshape(4, 8, 8)
    both = np.stack([matrices, matrices.transpose(0, 2, 1)])
    return np.ascontiguousarray(both).view("uint32").reshape(2, 4, 32)


def test_ldmatrix():
    def main(world):
        x, out = np.arange(256, dtype="uint16"), np.zeros((2, 4, 32), "uint32")
        transposing[1, 32](x, out)
        world.synchronize()
        np.testing.assert_array_equal(out, expected_matrices(x))

    spmd(1, main, races=True)


def multiplying(m, n, dtype):
    """A kernel: each lane gives its registers of a and b, of matrices 16 * m by 16 and 8 * n by 16."""
    zero, mma = warp_mma(m, n, dtype)

    @cuda.jit
    def kernel(a, b, out):
        lane = cuda.threadIdx.x
        acc = zero()
        for _ in range(2):
            acc = mma(acc, (a[lane, 0], a[lane, 1], a[lane, 2], a[lane, 3]), (b[lane, 0], b[lane, 1]))
        out[lane, 0], out[lane, 1], out[lane, 2], out[lane, 3] = acc[0], acc[1], acc[2], acc[3]

    return kernel


@pytest.mark.parametrize("dtype", MMA_DTYPES)
def test_mma(dtype):
    """By the definition of the layout in the PTX ISA."""
    kernel = multiplying(1, 1, dtype)

    def main(world):
        rng = np.random.default_rng(0)
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        a, b = (rng.standard_normal((r, 16)).astype(kind) for r in (16, 8))
        lane = np.arange(32)
        group, k = lane // 4, 2 * (lane % 4)

        def pair(x, row, column):
            return x.view("uint16")[row, column] | x.view("uint16")[row, column + 1].astype("uint32") << 16

        of_a = [pair(a, group + 8 * (i % 2), k + 8 * (i // 2)) for i in range(4)]
        of_b = [pair(b, group, k + 8 * i) for i in range(2)]
        out = np.zeros((32, 4), "float32")
        kernel[1, 32](np.stack(of_a, 1), np.stack(of_b, 1), out)
        world.synchronize()
        expected = 2 * (a.astype("float64") @ b.astype("float64").T)
        for i in range(4):
            np.testing.assert_allclose(out[:, i], expected[group + 8 * (i // 2), k + i % 2], rtol=1e-5)

    spmd(1, main)


def test_refusals():
    with pytest.raises(ValueError, match="dtype is 'float32'; it must be 'bfloat16' or 'float16'"):
        warp_mma(4, 8, "float32")
    with pytest.raises(RuntimeError, match="inside a kernel"):
        cp_async_commit()

    @cuda.jit
    def half_a_warp(out):
        room = cuda.shared.array(256, types.uint16)
        out[0] = ldmatrix(room, 0)[0]

    @cuda.jit
    def unaligned(x):
        room = cuda.shared.array(64, types.uint16)
        cp_async(room, 8, x, 0, 16, 16)

    for kernel, threads, text in (
        (half_a_warp, 16, "the warp has 16 threads; it must have 32"),
        (unaligned, 1, "offset is 8; it must"),
    ):
        with pytest.raises(EmulatorError, match=text):
            spmd(1, lambda world, k=kernel, t=threads: k[1, t](np.zeros(64, "uint32")))


def test_instructions():
    ptx = compile_ptx(copies, (uint16[::1], uint16[::1]), AMPERE)
    order = [
        position(ptx, pattern)
        for pattern in (
            r"cp\.async\.cg\.shared\.global.*, 16, ",
            r"cp\.async\.ca\.shared\.global.*, 8, ",
            r"wait_group 1",
            r"wait_group 0",
        )
    ]
    assert order == sorted(order)
    kernel = multiplying(1, 1, "float16")
    ptx = compile_ptx(kernel, (types.uint32[:, ::1], types.uint32[:, ::1], float32[:, ::1]), AMPERE)
    assert sum("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in i for i in instructions(ptx)) >= 1
    ptx = compile_ptx(transposing, (uint16[::1], types.uint32[:, :, ::1]), AMPERE)
    assert sum("ldmatrix" in i and ".trans" in i for i in instructions(ptx)) == 1


def converting(dtype):
    """A kernel that widens numbers, and narrows and packs them again."""
    _, _, widen, narrow, pack = element(dtype)

    @cuda.jit
    def kernel(x, singles, pairs):
        i = cuda.threadIdx.x
        y, z = widen(x[2 * i]), widen(x[2 * i + 1])
        singles[2 * i], singles[2 * i + 1] = narrow(y), narrow(z * z)
        pairs[i] = pack(y, z * z)

    return kernel


def check_converting(world, dtype, launch):
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    stored, pair, *_ = element(dtype)
    x = np.random.default_rng(0).standard_normal(64).astype(kind)
    x[:3] = np.inf, np.nan, 0
    on_device = world.xp.asarray(x.view(stored))
    singles, pairs = world.xp.zeros(64, stored), world.xp.zeros(32, pair)
    launch(on_device, singles, pairs)
    world.synchronize()
    expected = x.copy()
    with np.errstate(all="ignore"):
        expected[1::2] = (x[1::2].astype("float32") ** 2).astype(kind)
    for got in (singles, pairs):
        np.testing.assert_array_equal(world.asnumpy(got).view(kind).astype("f8"), expected.astype("f8"))


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_elements(dtype):
    kernel = converting(dtype)
    spmd(1, lambda world: check_converting(world, dtype, kernel[1, 32]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_elements_on_the_gpu(dtype):
    from gpu import world

    kernel = converting(dtype)
    check_converting(world(), dtype, lambda *arrays: sk.bind(kernel, 1, 32, arrays)())


@pytest.mark.gpu
def test_ldmatrix_on_the_gpu():
    from gpu import world

    x = np.arange(256, dtype="uint16")
    out = world().xp.zeros((2, 4, 32), "uint32")
    sk.bind(transposing, 1, 32, (world().xp.asarray(x), out))()
    world().synchronize()
    np.testing.assert_array_equal(out.get(), expected_matrices(x))
