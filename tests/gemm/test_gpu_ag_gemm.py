"""All-gather and matrix product on GPUs: 1, 2 and 4 ranks,
``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_ag_gemm``; and with several logical nodes:
``SHMEMKIT_LOCAL_SIZE=2 mpirun -n 4 ...``, and of 1 on 2 ranks."""

import gpu
import numpy as np
import pytest
from gemms import ERROR, moved
from small_kernels import spin

import shmemkit as sk
from shmemkit.gemm import gpu_of
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu


@pytest.fixture
def world():
    return gpu.world()


@pytest.fixture(
    params=[
        *("push by rows", "push by columns"),
        *("overlap by rows", "overlap by columns"),
        *("overlap_2d by rows", "overlap_2d by columns"),
        "sequential",
    ]
)
def method(request, world):
    """-> the method's name, and options"""
    name, _, by = request.param.partition(" by ")
    capabilities = world.host_allgather(gpu_of(world).compute_capability)
    if name != "sequential" and any(cc[0] != 9 for cc in capabilities):
        pytest.skip("needs compute capability 9.0")
    if name == "push" and world.n_nodes > 1:
        pytest.skip("needs one node")
    if name == "overlap_2d" and world.n_nodes == 1:
        pytest.skip("needs several nodes: SHMEMKIT_LOCAL_SIZE")
    return name, {"by_columns": by == "columns"}


def rows_of(world, rank, m, k, dtype, call=0):
    """Those of any rank, on all ranks."""
    return world.xp.random.default_rng(1000 * call + rank).standard_normal((m, k), "float32").astype(dtype)


def weight_of(world, k, n, dtype, by_rows=False):
    shape = (k, n) if by_rows else (n, k)
    rng = world.xp.random.default_rng(10**6 + world.rank)
    weight = rng.standard_normal(shape, "float32").astype(dtype)
    return weight if by_rows else weight.T


def poisoned(world, shape, dtype):
    return world.xp.full(shape, np.nan, dtype)


def error(world, out, whole, weight, bias=None):
    """Relative, of the norm, against float32."""
    xp = world.xp
    reference = whole.astype("float32") @ weight.astype("float32")
    if bias is not None:
        reference = xp.maximum(reference + bias.astype("float32"), 0)
    return float(xp.linalg.norm(out.astype("float32") - reference) / xp.linalg.norm(reference))


SHAPES = [
    (128, 256, 64),
    (1, 8, 8),
    (200, 520, 200),  # rows that are no multiple of a tile
    (130, 264, 136),
    (16, 1024, 2048),
    (512, 1024, 1024),
    (2048, 3584, 512),
    (512, 1024, 8192),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("given", [None, "symmetric", "private"])
def test_products(world, method, shape, given):
    (m, n, k), dtype = shape, as_dtype("bfloat16")
    multiply = sk.AllGatherGemm(world, world.n_ranks * m * k * 2, method[0], options=method[1])
    weight, bias = weight_of(world, k, n, dtype, m % 3 == 0), world.xp.arange(n, dtype="float32") / n
    x, out = world.xp.empty((m, k), dtype), poisoned(world, (world.n_ranks * m, n), dtype)
    gathered, whole = None, world.xp.empty((world.n_ranks * m, k), dtype)
    if given is not None:
        gathered = (
            multiply.output(whole.shape, dtype)
            if given == "symmetric"
            else poisoned(world, whole.shape, dtype)
        )
    for call in range(4):
        parts = [rows_of(world, rank, m, k, dtype, call) for rank in range(world.n_ranks)]
        whole[...], x[...], out[...] = world.xp.concatenate(parts), parts[world.rank], np.nan
        multiply(x, weight, out, gathered=gathered, bias=bias, activation="relu")
        x.fill(np.nan)
        assert error(world, out, whole, weight, bias) < ERROR["bfloat16"]
        assert gathered is None or bool((gathered.view("uint16") == whole.view("uint16")).all())
    world.synchronize()
    multiply.free()


def test_rows_at_an_odd_address_on_one_rank(world, method):
    """The others do not notice."""
    multiply = sk.AllGatherGemm(world, world.n_ranks * 512 * 512 * 2, method[0], options=method[1])
    parts = [rows_of(world, rank, 512, 512, as_dtype("bfloat16")) for rank in range(world.n_ranks)]
    weight, x = weight_of(world, 512, 1024, as_dtype("bfloat16")), parts[world.rank]
    x = moved(x, "at an odd address") if world.rank == 0 else x
    for _ in range(3):
        out = multiply(x, weight)
        assert error(world, out, world.xp.concatenate(parts), weight) < ERROR["bfloat16"]
    world.synchronize()
    multiply.free()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(world, method, dtype):
    """Of float32 the kernel computes nothing: the copies are there, the product comes after them."""
    if method[0] == "push" and dtype == "float32":
        pytest.skip("of halves")
    multiply = sk.AllGatherGemm(world, world.n_ranks * 64 * 128 * 4, method[0], options=method[1])
    parts = [rows_of(world, rank, 64, 128, dtype) for rank in range(world.n_ranks)]
    weight = weight_of(world, 128, 72, dtype)
    for _ in range(3):
        out = multiply(parts[world.rank], weight)
        assert error(world, out, world.xp.concatenate(parts), weight) < ERROR[dtype]
    world.synchronize()
    multiply.free()


def test_several_weights_and_a_graph(world, method):
    m, k, dtype = 256, 512, as_dtype("bfloat16")
    multiply = sk.AllGatherGemm(world, world.n_ranks * m * k * 2, method[0], options=method[1])
    weights = [weight_of(world, k, n, dtype) for n in (1024, 256, 130)]
    outs = tuple(poisoned(world, (world.n_ranks * m, w.shape[1]), dtype) for w in weights)
    x = world.xp.empty((m, k), dtype)
    multiply(x, weights, outs)
    world.synchronize()
    world.host_barrier()
    world.stream.begin_capture()
    multiply(x, weights, outs)
    multiply(x, weights, outs)
    graph = world.stream.end_capture()
    for call in range(6):
        parts = [rows_of(world, rank, m, k, dtype, call) for rank in range(world.n_ranks)]
        x[...] = parts[world.rank]
        for out in outs:
            out.fill(np.nan)
        if call % 3 == 2:
            multiply(x, weights, outs)
        else:
            graph.launch(world.stream)
        for out, weight in zip(outs, weights, strict=True):
            assert error(world, out, world.xp.concatenate(parts), weight) < ERROR["bfloat16"]
    world.synchronize()
    multiply.free()


def test_500_calls_of_ranks_that_are_apart(world, method):
    """Now and then a rank is late. Whole numbers, whose products are exact, checked on the GPU."""
    n_ranks, xp, (m, n, k) = world.n_ranks, world.xp, (256, 512, 512)
    dtype, delay = as_dtype("bfloat16"), np.random.default_rng(world.rank)
    multiply = sk.AllGatherGemm(world, n_ranks * m * k * 2, method[0], options=method[1])
    parts = [xp.random.default_rng(rank).integers(-2, 3, (m, k)).astype("float32") for rank in range(n_ranks)]
    weight = xp.random.default_rng(99 + world.rank).integers(-1, 2, (n, k)).astype("float32").T
    expected, wrong = xp.concatenate(parts) @ weight, xp.zeros(1, "int64")
    x, out = xp.empty((m, k), dtype), poisoned(world, (n_ranks * m, n), "float32")
    mine, weight = parts[world.rank], weight.T.astype(dtype).T
    late = sk.bind(spin, 1, 1, (0,))
    for call in range(500):
        if delay.random() < 0.1:
            late.set(0, int(delay.integers(1000, 300_000)))
            late()
        factor = (1 + call % 4) * (1 - 2 * (call % 2))
        x[...] = mine * factor
        out.fill(np.nan)
        multiply(x, weight, out)
        x.fill(np.nan)
        wrong += (out != expected * factor).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    multiply.free()
