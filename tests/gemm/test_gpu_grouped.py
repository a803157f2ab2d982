"""Grouped products on a GPU: every method, against float64, in graphs whose counts change, and the error of
counts that do not fit."""

import numpy as np
import pytest
from gemms import ERROR, error, expected
from gpu import world

import shmemkit as sk
from shmemkit.gemm import gpu_of
from shmemkit.gemm.grouped import METHODS
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu


def product(
    method, counts, n, k, dtype="bfloat16", out_dtype=None, columns=False, bias=None, rows=0, **options
):
    """Compute one, in a poisoned out; the relative error of each expert must be that of one rounding."""
    if method == "sm90" and gpu_of(world()).compute_capability[0] != 9:
        pytest.skip("needs compute capability 9.0")
    tile = options.pop("tile", None)
    xp, rng, dtype = world().xp, np.random.default_rng([n, k]), as_dtype(dtype)
    out_dtype, rows = as_dtype(out_dtype or dtype), rows or sum(counts)
    x = rng.standard_normal((rows, k)).astype(dtype)
    w = rng.standard_normal((len(counts), k, n) if columns else (len(counts), n, k)).astype(dtype)
    on_gpu = xp.asarray(w).transpose(0, 2, 1) if columns else xp.asarray(w)
    w = w.transpose(0, 2, 1) if columns else w
    out = xp.full((rows, n), np.nan, out_dtype)
    if bias is not None:
        bias = rng.standard_normal(bias).astype(out_dtype)
        options["bias"] = xp.asarray(bias)
    grouped = sk.GroupedGemm(method, options=tile and {"tile": tile})
    grouped(xp.asarray(x), on_gpu, xp.asarray(np.array(counts, "int32")), out, **options)
    world().synchronize()
    got, first = out.get(), 0
    options.pop("bias", None)
    for expert, count in enumerate(counts):
        of_expert = slice(first, first + count)
        mine = bias if bias is None or bias.ndim == 1 else bias[expert]
        reference = expected(x[of_expert], w[expert].T, mine, **options)
        assert not count or error(got[of_expert], reference) < ERROR[out_dtype.name], expert
        first += count
    assert np.isnan(got[first:].astype("float32")).all()


FEW, MANY = [64, 128, 300, 1], [i * 37 % 130 for i in range(70)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("counts", [FEW, [0, 0, 5, 0, 1000, 0], [1] * 200, [17]], ids=lambda x: str(x)[:20])
def test_counts(method, counts):
    product(method, counts, 264, 200, rows=sum(counts) + 3)


@pytest.mark.parametrize("tile", [(64, 32), (128, 96), (128, 224)], ids=str)
@pytest.mark.parametrize("counts", [FEW, MANY], ids=["few", "many"])
def test_sm90_tiles(tile, counts):
    product("sm90", counts, 520, 1032, tile=tile)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "columns", "bias", "activation"),
    [
        ("bfloat16", "float32", False, (4, 264), "silu"),
        ("float16", "float16", True, (264,), "gelu"),
        ("float16", "bfloat16", False, None, "relu"),
    ],
)
def test_dtypes_layouts_and_epilogues(method, dtype, out_dtype, columns, bias, activation):
    product(method, [100, 3, 0, 65], 264, 192, dtype, out_dtype, columns, bias, activation=activation)


def test_odd_sizes():
    product("auto", [100, 3, 0, 65], 41, 33)


def test_a_graph_sees_new_counts():
    xp, rng = world().xp, np.random.default_rng(0)
    x, w = (xp.asarray(rng.standard_normal(shape).astype("float16")) for shape in ((512, 256), (8, 128, 256)))
    counts, out = xp.zeros(8, "int32"), xp.zeros((512, 128), "float16")
    grouped, stream = sk.GroupedGemm(), world().stream
    grouped(x, w, counts, out)
    stream.begin_capture()
    grouped(x, w, counts, out)
    graph = stream.end_capture()
    for seed in range(5):
        given = np.random.default_rng(seed).multinomial(400 + 28 * seed, np.ones(8) / 8).astype("int32")
        counts.set(given)
        out.fill(0)
        xp.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        world().synchronize()
        experts = np.repeat(np.arange(8), given)
        reference = np.zeros((512, 128))
        reference[: given.sum()] = np.einsum(
            "rk,rnk->rn", x.get()[: given.sum()].astype("float64"), w.get().astype("float64")[experts]
        )
        assert error(out.get(), reference) < ERROR["float16"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("counts", [[500, 13], [-1, 5], [2**31 - 1, 2**31 - 1]], ids=str)
def test_counts_that_do_not_fit(method, counts):
    """An error, nothing is written, and what follows works."""
    if method == "sm90" and gpu_of(world()).compute_capability[0] != 9:
        pytest.skip("needs compute capability 9.0")
    xp = world().xp
    x, w, out = xp.ones((512, 64), "float16"), xp.ones((2, 64, 64), "float16"), xp.zeros((512, 64), "float16")
    on_gpu = xp.asarray(np.array(counts, "int32"))
    sk.grouped_matmul(x, w, on_gpu, out, method=method)
    with pytest.raises(ValueError, match="GroupedGemm: counts"):
        world().synchronize()
    assert not out.any()
    on_gpu[:] = 256
    sk.grouped_matmul(x, w, on_gpu, out, method=method)
    world().synchronize()
    assert (out == 64).all()
