"""The Hopper GEMM on the emulator: results at ragged edges, of all layouts and tiles; and what goes wrong
when one of its waits or fences is taken away."""

import ml_dtypes
import numpy as np
import pytest
from kernel_types import types_of
from mutations import argument, callee, delay, goes_wrong, omit, omit_store, store
from numba import cuda, types
from ptx import compile_ptx, resources

import shmemkit as sk
from shmemkit.device import st_release, wait
from shmemkit.device.cuda import wgmma
from shmemkit.device.cuda.tma import bulk_wait_group, fence_proxy_async_global, tensor_map
from shmemkit.device.swizzle import quotient
from shmemkit.emu import EmulatorError
from shmemkit.gemm import sm90, sm90_host
from shmemkit.gemm.problem import Gpu, Problem
from shmemkit.gemm.sm90 import Tile
from shmemkit.gemm.sm90_host import Choice, Sm90, bind_gemm, choose, estimate

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype("float16"), np.dtype("float32")


def stored(matrix, by_rows, dtype):
    """-> `matrix` with consecutive rows (or columns), which begin at multiples of 16 bytes, and the memory
    that it is in, of NaN."""
    values = matrix if by_rows else matrix.T
    rows, columns = values.shape
    n_bytes = rows * (-(-columns // 8) * 8 + 8) * dtype.itemsize
    memory = np.full(n_bytes + 16, 0xFF, np.uint8)
    whole = memory[-memory.ctypes.data % 16 :][:n_bytes].view(dtype).reshape(rows, -1)
    whole[:, :columns] = values
    values = whole[:, :columns]
    return values if by_rows else values.T, memory


class Product:
    """Of small integers, which is exact."""

    def __init__(self, size, majors="kk", dtype=BF16, out_dtype=F32, bias=None, activation=None):
        m, n, k = size
        rng = np.random.default_rng(m + n + k)
        a, b = rng.integers(-2, 3, (m, k)), rng.integers(-2, 3, (k, n))
        self.a, self.b = stored(a, majors[0] == "k", dtype)[0], stored(b, majors[1] != "k", dtype)[0]
        want = (a @ b).astype(np.float32)
        self.bias, self.activation = bias, activation
        if bias is not None:
            self.bias = rng.integers(-3, 4, n).astype(bias)
            want += self.bias.astype(np.float32)
        if activation == "relu":
            want = np.maximum(want, 0)
        self.out, self.memory = stored(np.zeros((m, n)), True, out_dtype)
        self.untouched = self.memory.copy()  # but for the result
        self.want = want.astype(out_dtype)

    @property
    def problem(self):
        return Problem(self.a, self.b, self.out, self.bias, self.activation)

    def is_right(self):
        right = np.array_equal(self.out, self.want)
        self.out[:] = 0
        return right and np.array_equal(self.memory, self.untouched)

    def compute(self, tile, splits=1, sms=2, calls=1, **options):
        """-> whether it is right, each time"""

        def main():
            world, right = sk.init(), []
            choice = Choice(Tile(*tile), splits)
            gemm = Sm90(self.problem, Gpu((9, 0), sms, sm90.SHARED, np), choice)
            for _ in range(calls):
                self.out[:] = np.nan
                gemm()
                world.stream.synchronize()
                right.append(self.is_right())
            return right

        return all(sk.emu.run(main, 1, **options)[0])


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("tile", "majors"),
    [
        ((128, 80), ("k", "mn")),
        ((128, 80), ("mn", "mn")),
        ((64, 48), ("k", "k")),
        ((64, 48), ("mn", "k")),
    ],
    ids=str,
)
def test_ragged_edges_in_all_layouts(tile, majors):
    """Also of B's columns in two boxes, of which the second has 64 for 16 of the tile's."""
    assert Product((130, 88, 100), majors).compute(tile)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("tile", "dtypes", "bias", "activation"),
    [
        ((64, 96), (BF16, BF16), F32, "relu"),  # 64 bytes of out at a time, an odd number of times
        ((64, 16), (F16, F16), F16, None),  # 32 bytes
        ((64, 64), (BF16, F32), BF16, "relu"),
        ((128, 256), (F16, BF16), None, "relu"),
    ],
    ids=str,
)
def test_dtypes_bias_and_activation(tile, dtypes, bias, activation):
    product = Product((70, 104, 72), "kk", *dtypes, bias, activation)
    assert product.compute(tile, sms=3)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activations_of_floats(activation):
    product = Product((3, 8, 8), activation=activation)
    x = product.want.astype(np.float64)
    erf = np.vectorize(__import__("math").erf)
    want = x * (1 + erf(x / 2**0.5)) / 2 if activation == "gelu" else x / (1 + np.exp(-x))
    product.is_right = lambda: np.allclose(product.out, want, rtol=1e-6, atol=1e-6)
    assert product.compute((64, 16))


@pytest.mark.parametrize(
    ("m", "majors", "loaded"),
    [(1, "kk", 8), (9, "kk", 16), (32, "kk", 32), (33, "kk", None), (8, ("mn", "k"), None)],
)
def test_rows_that_a_does_not_have_are_not_loaded(monkeypatch, m, majors, loaded):
    kernel, tiles = sm90_host.gemm_kernel, []
    monkeypatch.setattr(
        sm90_host, "gemm_kernel", lambda tile, kinds, order: tiles.append(tile) or kernel(tile, kinds)
    )
    assert Product((m, 40, 72), majors).compute((64, 32), delivery="unordered")
    assert [tile.loaded for tile in tiles] == [loaded]


@pytest.mark.every(2)
@pytest.mark.parametrize(("splits", "sms"), [(2, 2), (5, 64)])
def test_parts_of_k(splits, sms):
    assert Product((70, 72, 300)).compute((64, 96, 8, True), splits, sms, calls=2)


@pytest.mark.every(2)
@pytest.mark.parametrize(("tile", "splits"), [((128, 192), 1), ((64, 32, 8, True), 2)], ids=str)
def test_races_and_schedules(tile, splits):
    assert Product((70, 60, 400)).compute(tile, splits, races=True, delivery="unordered", seed=1)


# ---- kernels that compute more

CHAINED = Tile(64, 32), sm90.Kinds("bfloat16", "k", "k", "float32")


@cuda.jit(device=True)
def columns_first(t, n_m, n_n, extra):
    column = quotient(t, n_m)
    return t - column * n_m, column


@cuda.jit(device=True)
def rows_are_there(m, n, extra):
    ready, _ = extra
    wait(ready[quotient(m, 64) :], 1, "gpu", "acquire", 1)
    fence_proxy_async_global()


@cuda.jit(device=True)
def rows_are_done(m, n, extra):
    bulk_wait_group(0)
    cuda.atomic.add(extra[1], quotient(m, 16), 1)


chained_gemm = sm90.gemm_body(*CHAINED, columns_first, rows_are_there, rows_are_done)


@cuda.jit(launch_bounds=(CHAINED[0].threads, 1))
def chained_kernel(operands, size, split, ready, done):
    """Another block says that the rows are there."""
    if cuda.blockIdx.x + 1 == cuda.gridDim.x:
        if cuda.threadIdx.x < ready.size:
            st_release(ready, cuda.threadIdx.x, 1, "gpu")
    chained_gemm(operands, size, split, (ready, done))


@pytest.mark.slow
def test_a_kernel_of_its_own_with_functions_for_order_and_waiting():
    product = Product((130, 72, 100))

    def main():
        sk.init()
        ready, done, choice = np.zeros(3, np.uint64), np.zeros(12, np.int32), Choice(CHAINED[0], 1)
        bind_gemm(lambda tile, kinds: chained_kernel, product.problem, choice, 2, ready, done)()
        sk.current().stream.synchronize()
        return done.tolist()

    assert sk.emu.run(main, 1) == [[3] * 12]
    assert product.is_right()


def test_it_compiles_as_it_does_alone():
    of_gemm = types_of(*sm90.table_entry(sm90.gemm_kernel(*CHAINED), CHAINED[1]))
    needed = resources(compile_ptx(chained_kernel, (*of_gemm, types.uint64[::1], types.int32[::1])))
    assert needed.spills == needed.stack == 0


# ---- waits that are not there

RING = (64, 256), (60, 40, 400)  # 5 slots for 7 slabs
ODD = (64, 96), (70, 200, 100)  # 3 pieces of the result per tile, 2 places for them
PARTS = (64, 32, 8, True), (70, 28, 200)
ALONE = (64, 256), (120, 300, 400)  # 4 tiles for one block: the loader is ahead when a tile ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "change"),
    [
        (RING, omit("mbarrier_wait", inside="load_tiles")),
        (RING, omit("mbarrier_wait", inside="multiply_tiles")),
        (RING, omit("wgmma_wait_group")),
        (RING, omit("wait", inside="one_level.finish")),
        (ALONE, delay("wait", inside="one_level.finish")),  # after its slot is handed back
        (RING, store("parity", "0", inside="load_tiles")),
        (RING, argument("mbarrier_init", 2, "2", 1)),
        (RING, argument("mbarrier_init", 2, "1", 2)),
        (RING, omit("fence_mbarrier_init")),
        (RING, omit("cuda.syncthreads", inside="gemm")),
        (RING, omit("tensormap_acquire", 2, "load_tiles")),
        (RING, omit("tensormap_acquire", inside="multiply_tiles")),
        (RING, omit("bulk_wait_group_read", 2, "store_piece")),
        (ODD, argument("bulk_wait_group_read", 0, "1", 1, "store_piece")),
        (RING, omit("fence_proxy_async", inside="store_piece")),
        (RING, omit("cuda.syncwarp", 1, "store_piece")),
        (RING, omit("cuda.syncwarp", 2, "store_piece")),
        (RING, omit("bulk_wait_group", inside="multiply_tiles")),
        (PARTS, omit("cuda.threadfence", 1, "add_up")),
        (PARTS, omit("cuda.threadfence", 2, "add_up")),
        (PARTS, omit("cuda.syncwarp", 1, "add_up")),
        (PARTS, omit("cuda.syncwarp", 2, "add_up")),
        (PARTS, omit_store("arrivals[]")),
    ],
)
def test_each_wait_is_needed(mutate, case, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    mutate(sm90, change)
    (tile, size), splits, sms = case, 3 if case is PARTS else 1, 1 if case is ALONE else 2
    product = Product(size)
    assert goes_wrong(product.compute, tile, splits, sms, each=[{"calls": 2}, {"races": True}])


@pytest.mark.every(3)
@pytest.mark.parametrize(("tile", "size"), [RING, ODD, PARTS, ALONE], ids=str)
def test_with_all_of_them_it_is_right(tile, size):
    splits, sms = 3 if tile is PARTS[0] else 1, 1 if (tile, size) == ALONE else 2
    assert Product(size).compute(tile, splits, sms, races=True)


# ---- on the host


def test_what_the_tma_cannot_take_is_refused():
    memory = np.zeros((8, 24), BF16)
    for array, box in [
        (memory[:, 1:9], (8, 64)),
        (memory[:, :8].T, (8, 64)),
        (memory.astype("float64"), (8, 16)),
        (memory[:, :10].copy(), (8, 64)),
        (memory, (8, 32 + 8)),
        (memory, (257, 64)),
        (memory[0], (8, 64)),
    ]:
        with pytest.raises(ValueError, match=r"tensor_map\(\): (array|box) is "):
            tensor_map(array, box)


@pytest.mark.parametrize(
    ("size", "measured"),
    [
        ((4096, 4096, 4096), [(201, 256), (222, 224)]),
        ((8192, 8192, 8192), [(1599, 256), (1580, 224)]),
        ((4096, 14336, 4096), [(715, 256), (723, 224)]),
        ((8192, 2048, 8192), [(410, 256), (445, 224)]),
        ((512, 7168, 8192), [(95, 256), (84, 224)]),
    ],
    ids=str,
)
def test_estimates_are_as_measured(size, measured):
    """Microseconds on an H200 of tiles of 128 rows, and their columns; those of 224, and 95, in clusters of
    two blocks, which were not the faster ones where both were measured."""
    cycles = [estimate(*size, Choice(Tile(128, n), 1)) for _, n in measured]
    rates = [c / us for c, (us, _) in zip(cycles, measured, strict=True)]
    assert max(rates) < 1.04 * min(rates)
    assert estimate(*size, choose(*size)) <= min(cycles)


@pytest.mark.parametrize(
    "size", [(4096,) * 3, (8192, 3584, 4096), (512, 7168, 8192), (64, 7168, 8192), (1, 8, 8)]
)
def test_choices_can_be_launched(size):
    m, n, k = size
    tile, splits = choose(*size)
    kinds = sm90.Kinds("bfloat16", "k", "k", "bfloat16")
    assert (
        tile.m in (64, 128) and tile.n % 16 == 0 and 1 <= splits <= -(-k // 64) and tile.split == (splits > 1)
    )
    assert sm90.Layout(tile, kinds).stages >= 3
    assert sm90.shared_bytes(tile, kinds) + 1024 <= sm90.SHARED


# ---- what the tensor cores and the TMA are told


def test_a_descriptor_has_no_more_of_the_address_than_its_place(monkeypatch, mutate):
    """In a cluster an address has the block's number in its upper bits, which once changed the distance of an
    operand's tiles in all blocks but the first."""
    product = Product((130, 80, 64), ("k", "mn"))
    mutate(sm90_host, callee("bind", "functools.partial(bind, cluster=2)"))
    assert product.compute((128, 80))
    monkeypatch.setattr(wgmma, "at_address", lambda descriptor, address: descriptor | address >> 4)
    with pytest.raises(EmulatorError, match="matrix descriptor .* leads to byte"):
        product.compute((128, 80))


def test_a_store_writes_whole_16_bytes():
    product = Product((8, 70, 16))
    assert "multiple of 16 bytes" in Sm90.unsupported(product.problem, Gpu((9, 0), 2, sm90.SHARED, np))
    with pytest.raises(EmulatorError, match="writes beyond the end of rows of 280 bytes"):
        product.compute((64, 32))


def test_threads_ask_for_no_more_registers_than_a_block_has():
    """They would wait for ever, and the emulator does not count them."""
    tile = sm90.Tile(128, 256)
    sm90.check_registers(tile, *sm90.REGISTERS)
    with pytest.raises(ValueError, match="threads would take 65536 registers; a block has 64512"):
        sm90.check_registers(tile, 64, 224)
