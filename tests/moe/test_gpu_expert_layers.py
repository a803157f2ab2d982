"""Layers of a mixture of experts on GPUs: 1, 2 and 4 ranks,
``mpirun -n 2 python3 -m pytest -m gpu -k test_gpu_expert_layers``."""

import gpu
import numpy as np
import pytest
from gemms import ERROR
from gemms import error as error_of
from routed import routing

import shmemkit as sk
from shmemkit.gemm import gpu_of
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu
KINDS = ["random", "some have none", "one expert", "an expert without tokens", "none"]


@pytest.fixture
def world():
    return gpu.world()


def check_method(world, method):
    capabilities = world.host_allgather(gpu_of(world).compute_capability)
    if method != "sequential" and any(cc[0] != 9 for cc in capabilities):
        pytest.skip("needs compute capability 9.0")
    if method != "sequential" and world.n_nodes > 1:
        pytest.skip("needs one node")


def random(seed, *shape, dtype="bfloat16"):
    return np.random.default_rng(seed).standard_normal(shape, "float32").astype(as_dtype(dtype))


def transposed(xp, w, columns):
    """w on the GPU; with `columns`, stored by columns"""
    if columns:
        return xp.asarray(np.ascontiguousarray(w.transpose(0, 2, 1))).transpose(0, 2, 1)
    return xp.asarray(w)


def pairs_product(x, w, ids, rows_of):
    """-> float64 (pairs, N); NaN where there is no expert"""
    out, flat = np.full((ids.size, w.shape[1]), np.nan), ids.reshape(-1)
    x = x.astype("float64")
    for expert in range(len(w)):
        (pairs,) = np.nonzero(flat == expert)
        out[pairs] = x[pairs // rows_of] @ w[expert].astype("float64").T
    return out


SHAPES = [(40, 2, 3, 72, 136), (256, 4, 8, 520, 1032), (300, 6, 20, 256, 512), (1, 3, 4, 64, 64)]


@pytest.mark.parametrize("method", ["overlap", "sequential"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "columns"), [("bfloat16", False), ("float16", True)])
def test_first_layer(world, method, shape, dtype, columns):
    check_method(world, method)
    m, topk, experts, n, k = shape
    k = -(-k // 64) * 64 if columns else k
    xp, tokens = world.xp, world.n_ranks * m
    w = random(100 + world.rank, experts, n, k, dtype=dtype)
    first = sk.AllGatherGroupedGemm(world, tokens * k * 2, method)
    x, ids = xp.empty((m, k), as_dtype(dtype)), xp.empty((tokens, topk), "int32")
    out, on_gpu = xp.empty((tokens * topk, n), as_dtype(dtype)), transposed(xp, w, columns)
    for call, kind in enumerate(KINDS):
        whole, chosen = random(call, tokens, k, dtype=dtype), routing(kind, tokens, topk, experts, call)
        x.set(whole[world.rank * m :][:m])
        ids.set(chosen)
        out.fill(np.nan)
        xp.cuda.runtime.deviceSynchronize()
        first(x, on_gpu, ids, out)
        world.synchronize()
        want, got = pairs_product(whole, w, chosen, topk), out.get().astype("float64")
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        assert error_of(np.nan_to_num(got), np.nan_to_num(want)) < ERROR[dtype]
    first.free()


@pytest.mark.parametrize("method", ["gathered", "sequential"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "columns"), [("bfloat16", False), ("float16", True)])
def test_second_layer(world, method, shape, dtype, columns):
    """The same bits in every run, too."""
    check_method(world, method)
    m, topk, experts, n, k = shape
    k = -(-k // 64) * 64 if columns else k
    xp, tokens = world.xp, world.n_ranks * m
    ws = [random(100 + rank, experts, n, k, dtype=dtype) for rank in range(world.n_ranks)]
    second = sk.GroupedGemmReduceScatter(world, tokens, topk, n, dtype, method)
    x, ids = xp.empty((tokens * topk, k), as_dtype(dtype)), xp.empty((tokens, topk), "int32")
    weights, out = xp.empty((tokens, topk), "float32"), xp.empty((m, n), as_dtype(dtype))
    on_gpu = transposed(xp, ws[world.rank], columns)
    for call, kind in enumerate(KINDS):
        chosen = routing(kind, tokens, topk, experts, call)
        factors = np.random.default_rng(call).random((tokens, topk), "float32")
        want = np.zeros(1)
        for rank, w in enumerate(ws):
            rows = random([call, rank], tokens * topk, k, dtype=dtype)
            products = np.nan_to_num(pairs_product(rows, w, chosen, 1)).reshape(tokens, topk, n)
            want = want + (products * factors[..., None]).sum(axis=1)
            if rank == world.rank:
                x.set(rows)
        ids.set(chosen)
        weights.set(factors)
        seen = []
        for _ in range(3):
            out.fill(np.nan)
            xp.cuda.runtime.deviceSynchronize()
            second(x, on_gpu, ids, weights, out)
            world.synchronize()
            seen.append(out.get())
        assert all((some.view("uint16") == seen[0].view("uint16")).all() for some in seen)
        want = want[world.rank * m :][:m]
        if kind == "none":
            assert not seen[0].any()
        else:
            assert error_of(seen[0], want) < 2 * ERROR[dtype]
    second.free()


def test_a_layer_in_a_graph(world):
    """Both products with one index, whose routing changes between replays; many replays in a row."""
    check_method(world, "gathered")
    xp, stream, m, topk, experts, k, width = world.xp, world.stream, 128, 4, 8, 512, 256
    tokens, me = world.n_ranks * m, world.rank
    of_ranks = [
        (random(10 + r, experts, width, k), random(20 + r, experts, k, width)) for r in range(world.n_ranks)
    ]
    w1, w2 = (xp.asarray(w) for w in of_ranks[me])
    x, ids, weights = (
        xp.zeros((m, k), w1.dtype),
        xp.zeros((tokens, topk), "int32"),
        xp.zeros((tokens, topk), "float32"),
    )
    h, out = xp.zeros((tokens * topk, width), w1.dtype), xp.zeros((m, k), w1.dtype)
    first = sk.AllGatherGroupedGemm(world, tokens * k * 2, "overlap")
    second = sk.GroupedGemmReduceScatter(world, tokens, topk, k, method="gathered")
    index = sk.ExpertIndex(world, ids, experts)

    def layer():
        index.update()
        first(x, w1, index, h)
        second(h, w2, index, weights, out)

    layer()
    stream.begin_capture()
    layer()
    graph = stream.end_capture()
    for call in range(4):
        whole, chosen = random(call, tokens, k), routing(KINDS[call], tokens, topk, experts, call)
        factors = np.random.default_rng(call).random((tokens, topk), "float32")
        x.set(whole[me * m :][:m])
        ids.set(chosen)
        weights.set(factors)
        xp.cuda.runtime.deviceSynchronize()
        world.host_barrier()
        for _ in range(20):
            graph.launch(stream)
        world.synchronize()
        want = np.zeros(1)
        for first_w, second_w in of_ranks:
            hidden = np.nan_to_num(pairs_product(whole, first_w, chosen, topk)).astype(as_dtype("bfloat16"))
            products = np.nan_to_num(pairs_product(hidden, second_w, chosen, 1))
            want = want + (products.reshape(tokens, topk, k) * factors[..., None]).sum(axis=1)
        assert error_of(out.get(), want[me * m :][:m]) < 3 * ERROR["bfloat16"]
    first.free()
    second.free()
