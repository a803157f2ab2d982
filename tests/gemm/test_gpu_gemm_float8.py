"""Products of float8 on a GPU: against float64, by every tile; and how sums in one level lose bits, as the
emulator has it."""

import numpy as np
import pytest
from gemms import error, expected
from gpu import world
from test_gemm_float8 import FLOAT8, ONE_LEVEL, Operands, check, one_level, rows_of

import shmemkit as sk
from shmemkit.emu.tensor_cores import KEPT
from shmemkit.gemm import gpu_of
from shmemkit.gemm.block_scales import WIDTHS
from shmemkit.gemm.problem import Problem
from shmemkit.gemm.sm90 import Tile
from shmemkit.gemm.sm90_host import Choice, Sm90
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    if gpu_of(world()).compute_capability[0] != 9:
        pytest.skip("needs compute capability 9.0")


def on_gpu(array):
    """Rows that begin at multiples of 16 bytes, as those of `array`."""
    room = array if array.base is None else array.base
    return (
        world().xp.asarray(np.ascontiguousarray(room).view("uint8")).view(array.dtype)[..., : array.shape[-1]]
    )


@pytest.mark.parametrize("tile", [(m, n) for m in (64, 128) for n in WIDTHS], ids=str)
@pytest.mark.parametrize("size", [(130, 264, 300), (1, 8, 16), (300, 1032, 2064), (777, 520, 1000)], ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_tiles_and_edges(size, tile, splits):
    xp, operands, gpu = world().xp, Operands(size), gpu_of(world())
    x, w = map(on_gpu, (operands.x, operands.w))
    of_x, of_w = map(xp.asarray, operands.scales)
    out = xp.full(size[:2], np.nan, "float32")
    splits = min(splits, -(-size[2] // 128))
    choice = Choice(Tile(*tile, split=splits > 1), splits)
    gemm = Sm90(Problem(x, w.T, out, None, None, (of_x, of_w.T)), gpu, choice)
    for _ in range(2):
        out.fill(np.nan)
        xp.cuda.runtime.deviceSynchronize()
        gemm()
        world().synchronize()
        check(out.get(), expected(operands.wide[0], operands.wide[1].T))


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("order", "CF")
def test_matmul(out_dtype, activation, order):
    xp, operands = world().xp, Operands((513, 776, 1040), deviation=1)
    bias = np.linspace(-2, 2, 776).astype(as_dtype(out_dtype))
    scales = [xp.asarray(x, order=order) for x in operands.scales]
    out = sk.matmul(
        on_gpu(operands.x),
        on_gpu(operands.w).T,
        xp.empty((513, 776), as_dtype(out_dtype)),
        bias=xp.asarray(bias),
        activation=activation,
        scales=(scales[0], scales[1].T),
    )
    world().synchronize()
    check(out.get(), expected(operands.wide[0], operands.wide[1].T, bias, activation))


@pytest.mark.parametrize("counts", [[64, 128, 300, 1], [0, 0, 5, 0, 1000, 0], [1] * 70], ids=str)
@pytest.mark.parametrize("tile", [None, (64, 128), (128, 256), (128, 64)], ids=str)
def test_grouped(counts, tile):
    xp, rows = world().xp, sum(counts) + 3
    operands = Operands((rows, 264, 1040), len(counts))
    given = [on_gpu(x) for x in (operands.x, operands.w)]
    on_device = xp.asarray(np.array(counts, "int32"))
    out = xp.full((rows, 264), np.nan, "float32")
    grouped = sk.GroupedGemm("sm90", options=tile and {"tile": tile})
    grouped(*given, on_device, out, scales=tuple(map(xp.asarray, operands.scales)))
    world().synchronize()
    for rows, (x, w) in rows_of(operands, counts):
        check(out[rows].get(), expected(x, w.T))
    assert np.isnan(out[-3:].get()).all()


def test_tensors():
    torch = pytest.importorskip("torch")
    operands = Operands((96, 128, 256))
    x, w = (
        torch.from_numpy(x.view("uint8").copy()).cuda().view(torch.float8_e4m3fn)
        for x in (operands.x, operands.w)
    )
    of_x, of_w = (torch.from_numpy(x).cuda() for x in operands.scales)
    out = sk.matmul(x, w.T, scales=(of_x, of_w.T))
    torch.cuda.synchronize()
    world().synchronize()
    assert out.dtype == torch.bfloat16
    reference = expected(operands.wide[0], operands.wide[1].T)
    assert error(out.float().cpu().numpy(), reference) < 4e-3


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("apart", [1, 40])
def test_bits_of_one_level(sign, apart):
    """A product of 1 and, in the same instruction or the next, one of 2**-i, of i to 18: as the emulator has
    it."""
    x, w = np.zeros((64, 128), FLOAT8), np.zeros((32, 128), FLOAT8)
    x[:, 0] = w[:, 0] = 1
    w[:, apart] = sign * 2.0**-9
    x[:, apart] = np.exp2(9 - np.arange(64.0).clip(1, 18)).astype(FLOAT8)
    out = world().xp.empty((64, 32), "float32")
    one_level(on_gpu(x), on_gpu(w), out, gpu_of(world()))()
    world().synchronize()
    lost = np.arange(64) > KEPT
    print(np.log2(np.abs(out.get()[:19, 0] - 1)))
    np.testing.assert_array_equal(
        out.get()[:, 0], 1 + np.where(lost, 0, sign * np.exp2(-np.arange(64.0).clip(1, 18)))
    )


def test_one_level_of_random_numbers():
    """The error is that of the emulator (test_gemm_float8.py)."""
    operands, out = Operands((64, 32, 4096), deviation=100), world().xp.empty((64, 32), "float32")
    one_level(on_gpu(operands.x), on_gpu(operands.w), out, gpu_of(world()))()
    world().synchronize()
    wide = expected(operands.x.astype("float64"), operands.w.astype("float64").T)
    print("one level, K = 4096:", error(out.get(), wide))
    assert 0.5 < error(out.get(), wide) / ONE_LEVEL[4096] < 2
