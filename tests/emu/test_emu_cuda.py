"""The CUDA side of the emulator: grids, barriers, shared memory, warps, atomics, device functions."""

import enum
import math
from collections import namedtuple

import numba
import numpy as np
import pytest
from emulated import untyped
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, float32, int32, types, uint32
from numba.cuda import atomic, libdevice, syncthreads
from numba.cuda import threadIdx as thread_index
from numba.cuda.cg import this_grid

import shmemkit as sk
from shmemkit.device import grid_barrier, rank, symm_at

FULL = 0xFFFFFFFF


@pytest.fixture
def world():
    with sk.init("emulator") as world:
        yield world


def launch(kernel, grid, block, *args, shared=0):
    """Run it on one PE of its own."""
    with sk.init("emulator"):
        kernel[grid, block, 0, shared](*args)
    return args


# ---- grids and blocks


@cuda.jit
def indices_3d(out, sizes):
    x, y, z = cuda.grid(3)
    nx, ny, nz = cuda.gridsize(3)
    out[x, y, z, 0] += 1
    out[x, y, z, 1] = cuda.threadIdx.x + cuda.blockDim.x * (
        cuda.threadIdx.y + cuda.blockDim.y * cuda.threadIdx.z
    )
    out[x, y, z, 2] = cuda.blockIdx.x + cuda.gridDim.x * (cuda.blockIdx.y + cuda.gridDim.y * cuda.blockIdx.z)
    if x == 0 and y == 0 and z == 0:
        sizes[0], sizes[1], sizes[2] = nx, ny, nz


@examples(20)
@given(st.tuples(*[st.integers(1, 3)] * 3), st.tuples(*[st.integers(1, 4)] * 3))
def test_3d(grid, block):
    size = tuple(g * b for g, b in zip(grid, block, strict=True))
    out, sizes = launch(indices_3d, grid, block, np.zeros(size + (3,), "int64"), np.zeros(3, "int64"))
    x, y, z = np.indices(size)
    assert (out[..., 0] == 1).all() and tuple(sizes) == size
    np.testing.assert_array_equal(
        out[..., 1], x % block[0] + block[0] * (y % block[1] + block[1] * (z % block[2]))
    )
    np.testing.assert_array_equal(
        out[..., 2], x // block[0] + grid[0] * (y // block[1] + grid[1] * (z // block[2]))
    )


@cuda.jit
def indices_2d(out):
    i, j = cuda.grid(2)
    if i < out.shape[0] and j < out.shape[1]:
        n, m = cuda.gridsize(2)
        out[i, j] = i * 1000 + j + (n * m) * 1000000


def test_2d_and_1d():
    (out,) = launch(indices_2d, (2, 3), (4, 2), np.zeros((7, 5), "int64"))
    i, j = np.indices((7, 5))
    np.testing.assert_array_equal(out, i * 1000 + j + 48 * 1000000)

    @cuda.jit
    def one(out):
        out[cuda.grid(1)] = cuda.gridsize(1)

    (out,) = launch(one, 3, 5, np.zeros(15))
    assert (out == 15).all()


def test_forall_covers_every_element(world):
    @cuda.jit
    def fill(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] = i + 1

    x = np.zeros(300)
    fill.forall(300)(x)
    np.testing.assert_array_equal(x, np.arange(300) + 1)
    fill.forall(0)(x)


@pytest.mark.parametrize("grid, block", [(0, 1), (1, 0), (1, 1025), (1, (32, 33)), ((1, 0, 1), 1)])
def test_impossible_configurations(world, grid, block):
    with pytest.raises(ValueError, match="1 to 1024 threads"):
        indices_2d[grid, block](np.zeros((1, 1)))


# ---- barriers of a block


@cuda.jit
def rotate(x, out):
    """Needs the barrier: every thread reads what its neighbour wrote, many times."""
    buffer = cuda.shared.array(64, float32)
    t, n = cuda.threadIdx.x, cuda.blockDim.x
    buffer[t] = x[t]
    for _ in range(n):
        cuda.syncthreads()
        value = buffer[(t + 1) % n]
        cuda.syncthreads()
        buffer[t] = value
    out[t] = buffer[t]


@pytest.mark.parametrize("n", [1, 2, 31, 33, 64])
def test_syncthreads(n):
    x, out = launch(rotate, 1, n, np.arange(n, dtype="f4"), np.zeros(n, "f4"))
    np.testing.assert_array_equal(out, x)


@cuda.jit
def votes_of_block(keep, flags, out):
    t = cuda.threadIdx.x
    if t >= keep:
        return  # a whole warp, that does not take part any more
    out[t, 0] = cuda.syncthreads_count(flags[t])
    out[t, 1] = cuda.syncthreads_and(flags[t])
    out[t, 2] = cuda.syncthreads_or(flags[t])
    syncthreads()
    out[t, 3] = 7


@examples(25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.data())
def test_votes_of_a_block_without_threads_that_returned(flags, data):
    keep = min(len(flags), 32 * data.draw(st.integers(1, 3)))
    out = np.zeros((len(flags), 4), "int64")
    launch(votes_of_block, 1, len(flags), keep, np.array(flags, "int32"), out)
    kept = np.array(flags[:keep]) != 0
    np.testing.assert_array_equal(out[:keep], np.tile([kept.sum(), kept.all(), kept.any(), 7], (keep, 1)))
    assert (out[keep:] == 0).all()


@cuda.jit
def return_while_others_wait(out):
    t = cuda.threadIdx.x
    for _ in range(t // 32):  # warp w takes part in w barriers
        cuda.syncthreads()
    out[t] = cuda.syncthreads_count(1)


def test_threads_that_return_release_the_others():
    """The thread that ends may be the one that all others wait for."""
    (out,) = launch(return_while_others_wait, 1, 1, np.zeros(1, "int64"))

    @cuda.jit
    def last_returns(out):
        t = cuda.threadIdx.x
        if t < 32:
            for _ in range(5):
                cuda.nanosleep(10)
            return
        if cuda.blockIdx.x == 0:
            cuda.syncthreads()
        else:
            out[t] = cuda.syncthreads_count(1)

    (out,) = launch(last_returns, 2, 40, np.zeros(40, "int64"))
    assert (out[32:] == 8).all() and (out[:32] == 0).all()


# ---- shared and local memory


@cuda.jit(device=True)
def scratch(t, value):
    buffer = cuda.shared.array(8, float32)
    buffer[t] = value
    cuda.syncthreads()
    result = buffer[(t + 1) % 8]
    cuda.syncthreads()
    return result


@cuda.jit
def several_sites(out):
    t = cuda.threadIdx.x
    a = cuda.shared.array(8, int32)
    b = cuda.shared.array((8, 2), float32)
    for turn in range(3):
        c = cuda.shared.array(shape=8, dtype=np.float32)  # the same array in every turn
        if turn == 0:
            c[t] = t
        else:
            c[t] += 1
    a[t], b[t, 0], b[t, 1] = t, 10 + t, 20 + t
    cuda.syncthreads()
    other = (t + 3) % 8
    out[t, 0], out[t, 1], out[t, 2], out[t, 3] = a[other], b[other, 0], b[other, 1], c[other]
    out[t, 4], out[t, 5] = scratch(t, t * 1.0), scratch(t, t * 2.0)


def test_static_shared_arrays():
    (out,) = launch(several_sites, 2, 8, np.zeros((8, 6)))
    t = np.arange(8)
    o, n = (t + 3) % 8, (t + 1) % 8
    np.testing.assert_array_equal(out, np.stack([o, 10 + o, 20 + o, o + 2, n, 2 * n], 1))


def shared_of(dtype):
    @cuda.jit(device=True)
    def function():
        return cuda.shared.array(4, dtype)

    return function


floats, integers = shared_of(float32), shared_of(int32)


@untyped
def test_functions_of_one_factory_have_their_own_shared_arrays():
    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        x, i = floats(), integers()
        x[t], i[t] = t + 0.5, t
        cuda.syncthreads()
        out[t] = x[3 - t] + i[3 - t]

    (out,) = launch(kernel, 1, 4, np.zeros(4))
    np.testing.assert_array_equal(out, [6.5, 4.5, 2.5, 0.5])


@cuda.jit
def dynamic_aliases(out, n):
    """Every array of shape 0 is the same memory."""
    t = cuda.threadIdx.x
    words = cuda.shared.array(0, uint32)
    bytes_ = cuda.shared.array(shape=(0,), dtype=np.uint8)
    halves = cuda.shared.array(0, "uint16")
    if t < n:
        words[t] = 0x04030201 * (t + 1)
    cuda.syncthreads()
    if t < n:
        out[t, 0], out[t, 1], out[t, 2] = bytes_[4 * t + 1], halves[2 * t + 1], words.size


def test_dynamic_shared_memory():
    out, _ = launch(dynamic_aliases, 1, 8, np.zeros((8, 3), "int64"), 8, shared=35)
    t = np.arange(1, 9)
    np.testing.assert_array_equal(out, np.stack([2 * t, 0x0403 * t, 0 * t + 8], 1))


def test_too_little_dynamic_shared_memory_is_out_of_bounds():
    with pytest.raises(sk.emu.OutOfBoundsError, match=r"words\[4\] is out of bounds: words is uint32 \(4,\)"):
        launch(dynamic_aliases, 1, 8, np.zeros((8, 3), "int64"), 8, shared=16)


@cuda.jit
def local_arrays(out):
    t = cuda.threadIdx.x
    mine = cuda.local.array(4, float32)
    table = cuda.local.array((2, 2), types.int16)
    for i in range(4):
        mine[i] = t * 10 + i
    table[1, 1] = 70000
    cuda.syncthreads()
    total = 0.0
    for i in range(4):
        total += mine[i]
    out[t], out[t + 32] = total, table[1, 1]


def test_local_arrays():
    (out,) = launch(local_arrays, 1, 32, np.zeros(64))
    np.testing.assert_array_equal(out[:32], np.arange(32) * 40 + 6)
    assert (out[32:] == 70000 - 65536).all()


def test_fresh_memory_is_poisoned():
    @cuda.jit
    def read(out):
        out[0] = cuda.local.array(1, float32)[0]
        out[1] = cuda.shared.array(1, float32)[0]

    (out,) = launch(read, 1, 1, np.zeros(2))
    assert np.isnan(out).all()


# ---- warps


@cuda.jit
def shuffles(x, source, delta, mask, out):
    t = cuda.threadIdx.x
    out[t, 0] = cuda.shfl_sync(FULL, x[t], source)
    out[t, 1] = cuda.shfl_up_sync(FULL, x[t], delta)
    out[t, 2] = cuda.shfl_down_sync(FULL, x[t], delta)
    out[t, 3] = cuda.shfl_xor_sync(FULL, x[t], mask)


@examples(40)
@given(
    st.integers(1, 70), st.integers(0, 40), st.integers(0, 33), st.integers(0, 31), st.sampled_from("ilfd")
)
def test_shuffles(n, source, delta, mask, dtype):
    """Lanes that do not exist give back one's own value, which is one of the values CUDA may give."""
    x = np.random.default_rng(n).integers(-(2**31), 2**31, n).astype(dtype)
    out = np.zeros((n, 4), dtype)
    launch(shuffles, 1, n, x, source, delta, mask, out)
    for first in range(0, n, 32):
        warp = x[first : first + 32]
        lanes = np.arange(len(warp))

        def take(lane, warp=warp, lanes=lanes):
            exists = (0 <= lane) & (lane < len(warp))
            return np.where(exists, warp[np.where(exists, lane, 0)], warp[lanes])

        expected = [
            take(lanes * 0 + source % 32),
            take(lanes - delta),
            take(lanes + delta),
            take(lanes ^ mask),
        ]
        np.testing.assert_array_equal(out[first : first + 32], np.stack(expected, 1))


@cuda.jit
def votes(x, out):
    t = cuda.threadIdx.x
    out[t, 0] = cuda.all_sync(FULL, x[t] > 0)
    out[t, 1] = cuda.any_sync(FULL, x[t] > 0)
    out[t, 2] = cuda.eq_sync(FULL, x[t] > 0)
    out[t, 3] = cuda.ballot_sync(FULL, x[t] > 0)
    out[t, 4] = cuda.popc(cuda.ballot_sync(FULL, x[t] > 0))
    out[t, 5] = cuda.match_any_sync(FULL, x[t])
    same, equal = cuda.match_all_sync(FULL, x[t])
    out[t, 6], out[t, 7] = same, equal
    out[t, 8], out[t, 9], out[t, 10] = cuda.activemask(), cuda.lanemask_lt(), cuda.laneid


@examples(40)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=70))
def test_votes_and_matches(values):
    x = np.array(values, "int32")
    out = np.zeros((len(x), 11), "int64")
    launch(votes, 1, len(x), x, out)

    def mask(lanes):  # an int32, as Numba types it
        return int(np.uint32(sum(1 << int(i) for i in np.flatnonzero(lanes))).astype("int32"))

    for first in range(0, len(x), 32):
        warp = x[first : first + 32]
        up, all_equal = warp > 0, (warp == warp[0]).all()
        for lane, row in enumerate(out[first : first + 32]):
            expected = [
                up.all(),
                up.any(),
                up.all() or not up.any(),
                mask(up),
                up.sum(),
                mask(warp == warp[lane]),
            ]
            expected += [mask(warp == warp) if all_equal else 0, all_equal]
            expected += [2 ** len(warp) - 1, 2**lane - 1, lane]
            np.testing.assert_array_equal(row, expected)


@cuda.jit
def two_halves(out):
    """The halves of a warp go their own ways, and meet only in the end."""
    t = cuda.threadIdx.x
    value = t
    if t < 16:
        for _ in range(3):
            value = cuda.shfl_xor_sync(0x0000FFFF, value, 1)
            cuda.syncwarp(0x0000FFFF)
    else:
        value = cuda.shfl_sync(0xFFFF0000, value, 31)
        out[t, 1] = cuda.ballot_sync(0xFFFF0000, t % 2)
    cuda.syncwarp()
    out[t, 0] = value


def test_partial_masks():
    (out,) = launch(two_halves, 1, 32, np.zeros((32, 2), "int64"))
    t = np.arange(32)
    np.testing.assert_array_equal(out[:, 0], np.where(t < 16, t ^ 1, 31))
    assert (out[16:, 1] == np.int32(np.uint32(0xAAAA0000).astype("int32"))).all()


def test_warp_reduction_after_lanes_have_returned():
    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if t % 32 >= 20:
            return
        out[t, 0] = cuda.popc(cuda.ballot_sync(FULL, 1))
        out[t, 1] = cuda.shfl_sync(cuda.activemask(), 20, 0)

    (out,) = launch(kernel, 1, 64, np.zeros((64, 2), "int64"))
    np.testing.assert_array_equal(out, np.repeat(np.arange(64) % 32 < 20, 2).reshape(64, 2) * 20)


def test_syncwarp_orders_a_warp():
    @cuda.jit
    def kernel(out):
        buffer = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        value = float32(t)
        step = 16
        while step:
            buffer[t] = value
            cuda.syncwarp()
            value += buffer[t ^ step]
            cuda.syncwarp()
            step //= 2
        out[t] = value

    (out,) = launch(kernel, 1, 32, np.zeros(32))
    assert (out == 31 * 16).all()


# ---- atomics

ATOMICS = {
    "add": lambda a, v: a + v,
    "sub": lambda a, v: a - v,
    "and_": lambda a, v: a & v,
    "or_": lambda a, v: a | v,
    "xor": lambda a, v: a ^ v,
    "exch": lambda a, v: v,
    "max": max,
    "min": min,
    "nanmax": max,
    "nanmin": min,
    "inc": lambda a, v: 0 if a >= v else a + 1,
    "dec": lambda a, v: v if a == 0 or a > v else a - 1,
}


def atomic_kernel(name):
    function = getattr(cuda.atomic, name)

    @cuda.jit
    def kernel(x, flat, values, old):
        t = cuda.threadIdx.x
        old[t, 0] = function(x, (t % 2, 1), values[t])
        old[t, 1] = function(flat, 2, values[t])

    return kernel


FOR_FLOATS = ("add", "sub", "max", "min", "nanmax", "nanmin")


@pytest.mark.parametrize(
    "name, dtype",
    [(name, dtype) for name in ATOMICS for dtype in ("int32", "uint32", "int64", "uint64")]
    + [(name, dtype) for name in FOR_FLOATS for dtype in ("float32", "float64")],
)
@untyped
def test_atomics_return_the_old_value(name, dtype):
    floating = dtype.startswith("float")
    values = np.random.default_rng(3).integers(1, 2**31 - 1, 20).astype(dtype)
    x, flat, old = np.full((2, 3), 5, dtype), np.full(3, 5, dtype), np.zeros((20, 2), dtype)
    launch(atomic_kernel(name), 1, 20, x, flat, values, old)

    bits = np.dtype(dtype).itemsize * 8

    def step(a, v):
        if floating:
            return np.dtype(dtype).type(ATOMICS[name](a, v))
        return np.array([ATOMICS[name](int(a), int(v)) & (2**bits - 1)], f"u{bits // 8}").view(dtype)[0]

    cells = {0: x.dtype.type(5), 1: x.dtype.type(5), "flat": x.dtype.type(5)}
    for t in range(20):  # threads of a block run in order
        for column, cell in enumerate((t % 2, "flat")):
            assert old[t, column] == cells[cell]
            cells[cell] = step(cells[cell], values[t])
    assert [x[0, 1], x[1, 1], flat[2]] == list(cells.values())
    assert (x[:, [0, 2]] == 5).all() and (flat[:2] == 5).all()


@cuda.jit
def swaps(x, out):
    out[0] = cuda.atomic.cas(x, 1, -1, 7)  # -1 is converted to uint32
    out[1] = cuda.atomic.cas(x, 1, 6, 9)
    out[2] = cuda.atomic.compare_and_swap(x, 3, 4)
    out[3] = atomic.add(x, -1, 5)  # the last one


@untyped
def test_compare_and_swap():
    x, out = launch(swaps, 1, 1, np.array([3, 2**32 - 1, 10], "uint32"), np.zeros(4, "uint32"))
    np.testing.assert_array_equal(out, [2**32 - 1, 7, 3, 10])
    np.testing.assert_array_equal(x, [4, 7, 15])


def test_atomic_max_with_nan():
    @cuda.jit
    def kernel(x):
        cuda.atomic.max(x, 0, 1.0)
        cuda.atomic.nanmax(x, 1, 1.0)
        cuda.atomic.max(x, 2, math.nan)
        cuda.atomic.nanmin(x, 3, math.nan)

    (x,) = launch(kernel, 1, 1, np.array([np.nan, np.nan, 2, 2], "float32"))
    np.testing.assert_array_equal(x, [np.nan, 1, 2, 2])


def test_atomics_of_many_blocks_add_up():
    @cuda.jit
    def kernel(x):
        cuda.atomic.add(x, cuda.threadIdx.x % 3, 1)
        shared = cuda.shared.array(1, int32)
        if cuda.threadIdx.x == 0:
            shared[0] = 0
        cuda.syncthreads()
        cuda.atomic.add(shared, 0, 1)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            cuda.atomic.max(x, 3, shared[0])

    (x,) = launch(kernel, 7, 33, np.zeros(4, "int32"))
    np.testing.assert_array_equal(x, [77, 77, 77, 33])


def test_atomic_needs_all_indices():
    @cuda.jit
    def kernel(x):
        cuda.atomic.add(x, (0,), 1)

    with pytest.raises(sk.emu.EmulatorError, match=r"the index is \(0,\); it must have 2 numbers"):
        launch(kernel, 1, 1, np.zeros((2, 2), "int32"))


# ---- device functions, closures, globals

SCALE = np.float32(3)
TABLE = np.array([250, 251], "uint8")
OFFSET = 2


@cuda.jit(device=True)
def inner(x):
    return x * SCALE + OFFSET


@cuda.jit(device=True)
def outer(x):
    if x > 100:
        return outer(x - 100)  # recursion, as Numba allows it
    return inner(x) + numba.uint32(-1) // numba.uint32(2**31)


class helpers:
    inner = inner


def scaled_by(factor):
    @cuda.jit(device=True)
    def scaled(x):
        return inner(x) * factor

    @cuda.jit
    def kernel(x, out):
        i = thread_index.x
        out[i, 0] = scaled(x[i])
        out[i, 1] = outer(x[i])
        out[i, 2] = math.sqrt(x[i]) + np.sqrt(x[i]) + math.floor(x[i]) + min(x[i], 2.0)
        out[i, 3] = helpers.inner(x[i])
        out[i, 4] = TABLE[0] + TABLE[1]

    return kernel


@pytest.mark.parametrize("factor", [2, 5])
@untyped
def test_device_functions(factor):
    x = np.array([1, 4, 9, 109], "float32")
    x, out = launch(scaled_by(factor), 1, 4, x, np.zeros((4, 5)))
    np.testing.assert_array_equal(out[:, 0], (x * 3 + 2) * factor)
    np.testing.assert_array_equal(out[:, 1], np.where(x > 100, x - 100, x) * 3 + 2 + 1)
    np.testing.assert_allclose(out[:, 2], 2 * np.sqrt(x) + x + np.minimum(x, 2), rtol=1e-6)
    np.testing.assert_array_equal(out[:, 3], x * 3 + 2)
    assert (out[:, 4] == 501).all()


def test_helper_operations():
    @cuda.jit
    def kernel(x, out):
        out[0], out[1], out[2] = cuda.popc(x[0]), cuda.ffs(x[0]), cuda.fma(2.0, 3.0, 4.0)
        out[3], out[4] = cuda.cbrt(27.0), cuda.selp(x[0] > 0, 1, 2)
        out[5] = cuda.popc(-1) + cuda.popc(x[1])

    x, out = launch(kernel, 1, 1, np.array([0b1011000, 2**64 - 1], "uint64"), np.zeros(6))
    np.testing.assert_allclose(out, [3, 4, 10, 3, 1, 128])


# ---- arguments

Pair = namedtuple("Pair", "first second")


class Color(enum.IntEnum):
    RED = 3


def test_arguments():
    @cuda.jit
    def kernel(flag, n, x, pair, things, color, wide, out):
        out[0] = flag + n
        out[1] = x
        out[2] = pair.first + pair.second[0]
        out[3] = things[0][1] + things[1]
        out[4] = color == Color.RED
        out[5] = wide - numba.uint64(1)

    pair, things = Pair(1, np.array([10.0])), (np.array([1, 2]), 3)
    *_, out = launch(kernel, 1, 1, True, 2, 0.5, pair, things, Color.RED, np.uint64(0), np.zeros(6))
    np.testing.assert_array_equal(out, [3, 0.5, 11, 5, 1, 2.0**64])


def test_views_of_other_dtypes():
    @cuda.jit
    def kernel(x, n, out):
        bits = x.view(np.uint32)
        out[0] = bits[0] - bits[1]
        out[1] = n.view(np.int8)[3]
        n.view(np.float32)[1] = 1.5
        out[2] = x[1:].view(types.int32)[0] >> 20
        out[3] = n.reshape(2, 2)[1, 1] + n.reshape((2, 2))[1][0]

    x, n, out = launch(
        kernel, 1, 1, np.array([0, -2], "f4"), np.array([2**32 - 1, 0, 7, 8], "u4"), np.zeros(4)
    )
    difference = float(2**64 - int(x.view("uint32")[1]))
    np.testing.assert_array_equal(out, [difference, -1, x.view("int32")[1] >> 20, 15])
    assert n.view("float32")[1] == 1.5


def test_wrong_arguments(world):
    with pytest.raises(TypeError, match="2 arguments are given; it takes 1: out"):
        indices_2d[1, 1](1, 2)
    with pytest.raises(TypeError, match="out is a dict; it must be an array"):
        indices_2d[1, 1]({})


# ---- the whole grid


@cuda.jit
def grid_rotation(x, state, out):
    """Blocks exchange values through global memory, several times."""
    g = this_grid()
    i, n = cuda.grid(1), cuda.gridsize(1)
    for _ in range(3):
        value = x[(i + 1) % n]
        cuda.cg.this_grid().sync()
        x[i] = value
        g.sync()
        grid_barrier(state)
    out[i] = x[i]


def test_grid_synchronisation():
    x, _, out = launch(grid_rotation, 5, 7, np.arange(35), np.zeros(2, "uint32"), np.zeros(35, "int64"))
    np.testing.assert_array_equal(out, (np.arange(35) + 3) % 35)


# ---- several PEs


@cuda.jit
def read_neighbour(x, out):
    neighbour = symm_at(x, (rank() + 1) % 3)
    out[cuda.threadIdx.x] = neighbour[cuda.threadIdx.x]


def test_one_kernel_on_several_pes():
    def main():
        world = sk.init()
        x = sk.array(np.arange(4) + 10 * world.rank)
        world.barrier()
        out = np.zeros(4, "int64")
        read_neighbour[1, 4, world.stream](x, out)
        return out

    for pe, out in enumerate(sk.emu.run(main, 3)):
        np.testing.assert_array_equal(out, np.arange(4) + 10 * ((pe + 1) % 3))


# ---- what is not emulated

NOT_EMULATED = {
    "cuda.libdevice.sometimes": lambda x: libdevice.sometimes(x[0]),
    "cuda.fp16.sometimes": lambda x: cuda.fp16.sometimes(x[0], x[0]),
    "cuda.atomic.sometimes": lambda x: cuda.atomic.sometimes(x, 0, 1),
    "cuda.shared.something": lambda x: cuda.shared.something(),
}


@pytest.mark.parametrize("name", NOT_EMULATED)
@untyped
def test_what_is_not_emulated_says_so(name):
    kernel = cuda.jit(NOT_EMULATED[name])
    with pytest.raises(sk.emu.EmulatorError, match=f"NotImplementedError: {name} is not emulated"):
        launch(kernel, 1, 1, np.zeros(1))


def test_what_numba_does_not_have_is_no_name_of_cuda():
    kernel = cuda.jit(lambda x: cuda.whatever(x))
    with pytest.raises(sk.emu.EmulatorError, match="no attribute 'whatever'"):
        launch(kernel, 1, 1, np.zeros(1))


# ---- host functions of numba.cuda


def test_host_side_of_numba_cuda(world):
    @cuda.jit
    def double(x):
        x[cuda.grid(1)] *= 2

    stream = cuda.stream()
    device = cuda.to_device(np.arange(4.0), stream=stream)
    begin, end = cuda.event(), cuda.event()
    begin.record(stream)
    with stream.auto_synchronize():
        double[1, 4, stream](device)
    end.record(stream)
    end.synchronize()
    assert cuda.event_elapsed_time(begin, end) >= 0
    np.testing.assert_array_equal(device.copy_to_host(stream=stream), np.arange(4) * 2)
    other = cuda.device_array_like(device)
    other.copy_to_device(np.ones(4))
    double[1, 4](other)
    cuda.synchronize()
    host = cuda.pinned_array(4)
    other.copy_to_host(host)
    assert (host == 2).all() and cuda.device_array((2, 3), np.int8).shape == (2, 3)


def test_arrays_that_host_and_kernels_share():
    @cuda.jit
    def double(x):
        x[cuda.threadIdx.x] *= 2

    def main():
        sk.init()
        arrays = [make(4, np.float32) for make in (cuda.mapped_array, cuda.managed_array, cuda.pinned_array)]
        arrays += [cuda.mapped_array_like(arrays[0]), cuda.pinned_array_like(arrays[0])]
        for x in arrays:
            x[:] = 3
            double[1, 4](x)
        cuda.synchronize()
        return [(x.dtype.name, x.tolist()) for x in arrays]

    assert sk.emu.run(main, 1) == [[("float32", [6, 6, 6, 6])] * 5]


def test_numba_is_itself_again_after_the_world(world):
    inside = cuda.stream, cuda.to_device
    world.finalize()
    assert cuda.stream is not inside[0] and cuda.to_device is not inside[1]
    assert "emu" not in cuda.stream.__module__
