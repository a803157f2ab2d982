"""Matrix products on a GPU: every method, against float64, and PyTorch where it is there."""

import importlib.util

import numpy as np
import pytest
from gemms import ERROR, LAYOUTS, ROWS, error, expected, operand
from gpu import world

import shmemkit as sk
from shmemkit.gemm import METHODS, Gemm, gpu_of
from shmemkit.gemm.problem import Problem
from shmemkit.gemm.sm80 import Sm80, Tile, grouping
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu
HALVES = ("sm90", "sm80")


def on_device(array):
    """A copy with the same strides."""
    by_row = array.T if array.strides[0] < array.strides[1] else array
    lines = by_row.base if by_row.base is not None and by_row.base.ndim == 2 else by_row
    lines = lines.T if lines.strides[0] < lines.strides[1] else lines
    there = world().xp.asarray(np.ascontiguousarray(lines))[:, : by_row.shape[1]]
    return there.T if by_row is not array else there


def product(method, m, n, k, dtype="bfloat16", out_dtype=None, layouts=ROWS, pads=(0, 0, 0), **options):
    """Compute one, in a poisoned out; its relative error must be that of one rounding."""
    if method == "sm90" and gpu_of(world()).compute_capability[0] != 9:
        pytest.skip("needs compute capability 9.0")
    rng, xp = np.random.default_rng([m, n, k]), world().xp
    a, b = (operand(rng, *s, dtype, *how) for s, *how in zip(((m, k), (k, n)), layouts, pads, strict=False))
    out_dtype = as_dtype(out_dtype or dtype)
    room = xp.full((m + 1, n + pads[2]), 77 if out_dtype.kind in "iu" else np.nan, out_dtype)
    bias = operand(rng, 1, n, options.pop("bias"))[0] if "bias" in options else None
    there = None if bias is None else xp.asarray(bias)
    run = method if callable(method) else Gemm(method)
    run(on_device(a), on_device(b), room[:m, :n], bias=there, **options)
    world().synchronize()
    got, reference = room.get(), expected(a, b, bias, **options)
    poison = np.concatenate([got[m:].ravel(), got[:, n:].ravel()])
    assert ((poison != poison) | (poison == 77)).all()
    if out_dtype.kind in "iu":
        np.testing.assert_array_equal(got[:m, :n], reference.astype(out_dtype))
        return
    assert error(got[:m, :n], reference) < ERROR[out_dtype.name]


@pytest.mark.parametrize("method", HALVES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("shape", [(128, 256, 64), (1000, 520, 200), (8, 1024, 2048), (136, 8, 24)], ids=str)
def test_layouts(method, layouts, shape):
    product(method, *shape, layouts=layouts)


@pytest.mark.parametrize("method", HALVES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(method, dtype, out_dtype):
    product(method, 264, 520, 104, dtype, out_dtype, bias=out_dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_epilogues(method, activation):
    product(method, 200, 136, 72, "float16", bias="float32", activation=activation)


@pytest.mark.parametrize("shape", [(1, 1, 1), (999, 1001, 1003), (130, 66, 34), (65, 7, 129)], ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_sm80_unaligned(shape, layouts):
    product("sm80", *shape, layouts=layouts, pads=(0, 0, 1))
    product("sm80", *shape, layouts=layouts, pads=(3, 5, 0))


@pytest.mark.parametrize(
    "tile",
    [
        Tile(128, 256, 64, 3, 2, 4),
        Tile(128, 256, 32, 4, 2, 4),
        Tile(256, 128, 32, 6, 4, 2),
        Tile(128, 128, 64, 3, 2, 2),
        Tile(64, 128, 64, 4, 2, 2),
    ],
    ids=str,
)
def test_sm80_tiles(tile):
    def run(a, b, out, bias, activation=None):
        Sm80(Problem(a, b, out, bias, activation), gpu_of(world()), Tile(*tile), grouping(4))()

    product(run, 1000, 1160, 520, layouts=("rows", "columns"))


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "int8", "uint8", "int32", "int64", "uint64"]
)
@pytest.mark.parametrize("layouts", [("rows", "rows"), ("columns", "columns")])
def test_simt(dtype, layouts):
    product("simt", 130, 70, 45, dtype, layouts=layouts, pads=(1, 2, 3))


def test_auto_takes_what_there_is():
    product("auto", 136, 72, 40)
    product("auto", 135, 71, 39)
    product("auto", 136, 70, 40, layouts=("rows", "columns"), pads=(0, 0, 10))  # not for the TMA's stores
    product("auto", 135, 71, 39, "float32")
    product("auto", 16, 16, 0, "float32", bias="float32")


@pytest.mark.parametrize("method", METHODS)
def test_an_order(method):
    if method == "sm90" and gpu_of(world()).compute_capability[0] != 9:
        pytest.skip("needs compute capability 9.0")
    product(Gemm(method, order=lambda turn, n_m, n_n: (n_m - 1 - turn // n_n, turn % n_n)), 1000, 520, 200)


def test_a_graph():
    xp = world().xp
    rng = np.random.default_rng(0)
    a, b = (xp.asarray(operand(rng, 256, 256, "float16")) for _ in range(2))
    out = xp.zeros((256, 256), "float16")
    for method in (m for m in METHODS if m != "sm90" or gpu_of(world()).compute_capability[0] == 9):
        gemm = Gemm(method)
        gemm(a, b, out)
        stream = sk.current().stream
        stream.begin_capture()
        gemm(a, b, out)
        graph = stream.end_capture()
        del gemm  # the graph uses what it had in the GPU's memory
        written_over = [xp.full(size, 255, "uint8") for size in (128, 512, 4096, 1 << 20) for _ in range(8)]
        out.fill(0)
        xp.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        world().synchronize()
        assert error(out.get(), expected(a.get(), b.get())) < ERROR["float16"]
        del written_over


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
@pytest.mark.parametrize("method", METHODS)
def test_torch(method):
    """Its tensors, also of bfloat16, and no larger error than 1.5 times its own."""
    import torch

    torch.manual_seed(0)
    a, b = (torch.randn(512, 512, device="cuda").to(torch.bfloat16) for _ in range(2))
    torch.cuda.synchronize()
    out = sk.matmul(a, b, method=method)
    world().synchronize()
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
    reference = a.double() @ b.double()
    errors = [float((x.double() - reference).norm() / reference.norm()) for x in (out, a @ b)]
    assert errors[0] <= min(2e-2, 1.5 * errors[1])
