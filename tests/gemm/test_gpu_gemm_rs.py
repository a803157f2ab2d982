"""GemmReduceScatter and GemmAllReduce on GPUs: relative errors, poisoned outputs, skewed repeats, graphs;
``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_gemm_rs``, and with several logical nodes:
``SHMEMKIT_LOCAL_SIZE=2 mpirun -n 4 ...``, and of 1 on 2 ranks."""

import importlib.util
import time

import numpy as np
import pytest
from gemms import error, moved
from gpu import world

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu
OBJECTS = {"rs": sk.GemmReduceScatter, "ar": sk.GemmAllReduce}
BFLOAT16 = as_dtype("bfloat16")


def fused_is_there():
    w = world()
    reasons = w.host_allgather(w.backend.unreached(nvlink=False))
    if w.n_ranks < 2 or w.backend.compute_capability[0] != 9 or any(reasons):
        pytest.skip("needs 2 or more GPUs of compute capability 9.0 that reach each other")


class Case:
    """Operands of this rank, and what is expected, in float64 of the rounded operands."""

    def __init__(self, op, m, n, k):
        w, xp = world(), world().xp
        self.op, self.w, self.size = op, w, (m, k, n)
        parts = []
        for rank in range(w.n_ranks):
            rng = xp.random.default_rng(1000 * rank + m + n + k)
            a, b = (rng.standard_normal(s, dtype="float32").astype(BFLOAT16) for s in ((m, k), (n, k)))
            if rank == w.rank:
                self.a, self.b = a, b.T
            parts.append(a.astype("float32") @ b.astype("float32").T)
        whole = sum(parts).get()
        self.rows = m // w.n_ranks if op == "rs" else m
        self.want = whole[w.rank * self.rows :][: self.rows] if op == "rs" else whole
        self.room = xp.full((self.rows + 1, n), np.nan, BFLOAT16)
        self.out = self.room[: self.rows]

    def compute(self, product, out=None):
        out = self.out if out is None else out
        out.fill(np.nan)
        self.w.xp.cuda.get_current_stream().synchronize()
        assert product(self.a, self.b, out) is out
        self.w.synchronize()
        return out.get()

    def check(self, got):
        assert error(got, self.want) < 1e-2
        assert np.isnan(self.room[self.rows :].get().astype("float32")).all()


@pytest.mark.parametrize("op", OBJECTS)
@pytest.mark.parametrize(
    "rows, n, k, tile",
    [
        (128, 256, 64, None),
        (1024, 1024, 1024, None),
        (200, 1000, 520, None),
        (33, 520, 264, None),
        (5, 24, 72, None),
        (512, 1120, 512, (128, 224)),
        (64, 512, 512, (64, 128)),
        (300, 1000, 200, (128, 192)),
    ],
    ids=str,
)
def test_sizes_and_tiles(op, rows, n, k, tile):
    fused_is_there()
    case = Case(op, rows * world().n_ranks, n, k)
    product = OBJECTS[op](world(), rows * world().n_ranks, n, method="fused", options={"tile": tile})
    for _ in range(3):
        case.check(case.compute(product))
    product.free()


@pytest.mark.parametrize(
    "rows, n, k", [(128, 8192, 1024), (200, 1000, 520), (33, 520, 264), (5, 24, 72), (256, 6000, 128)]
)
def test_overlap(rows, n, k):
    """By part of a tile, some blocks, and several tiles of each."""
    fused_is_there()
    case = Case("rs", rows * world().n_ranks, n, k)
    product = sk.GemmReduceScatter(world(), rows * world().n_ranks, n, method="ll128_overlap")
    for _ in range(3):
        case.check(case.compute(product))
    product.free()


@pytest.mark.parametrize("op", OBJECTS)
@pytest.mark.parametrize("method", ["fused", "copy_engine"])
@pytest.mark.parametrize("n, k, on_rank", [(1024, 520, 0), (1000, 263, None), (1003, 512, None)])
def test_arrays_that_the_tma_does_not_take(op, method, n, k, on_rank):
    """On one rank alone; and of N and K of which no row, or column, is a multiple of 16 bytes."""
    fused_is_there()
    w = world()
    case, product = Case(op, 300 * w.n_ranks, n, k), OBJECTS[op](w, 300 * w.n_ranks, n, method=method)
    if on_rank in (None, w.rank):
        case.a, case.b = moved(case.a, "odd columns"), moved(case.b, "odd rows")
    odd = moved(case.out, "at an odd address") if on_rank in (None, w.rank) else None
    for out in (None, odd):
        for _ in range(3):
            case.check(case.compute(product, out))
    product.free()


def test_operands_that_are_stored_otherwise_on_each_rank():
    """Small whole numbers, of which all is exact."""
    fused_is_there()
    w, (rows, n, k) = world(), (70, 72, 136)
    want = 0
    for rank in range(w.n_ranks):
        rng = w.xp.random.default_rng(rank)
        a, b = (rng.integers(-1, 2, s).astype("float32") for s in ((rows * w.n_ranks, k), (k, n)))
        want = want + (a @ b)[w.rank * rows :][:rows]
        if rank == w.rank:
            mine = [x if rank % 2 else w.xp.ascontiguousarray(x.T).T for x in (a, b)]
            mine = [x.astype(BFLOAT16) for x in mine]
    for part_dtype in (None, "float32"):
        product = sk.GemmReduceScatter(w, rows * w.n_ranks, n, part_dtype=part_dtype, method="fused")
        for _ in range(3):
            out = product(*mine)
            w.synchronize()
            assert (out.astype("float32") == want).all()
        product.free()


def test_several_objects_on_several_streams():
    """Each fills the GPUs and waits for other ranks: at the same time they would wait for ever."""
    fused_is_there()
    w, rng = world(), np.random.default_rng(world().rank)
    cases = [Case(op, 1024 * w.n_ranks, 2048, 256) for op in OBJECTS]
    products = [OBJECTS[case.op](w, 1024 * w.n_ranks, 2048, method="fused") for case in cases]
    first = [case.compute(product) for case, product in zip(cases, products, strict=True)]
    streams = [w.xp.cuda.Stream(non_blocking=True) for _ in cases]
    for _ in range(50):
        for case, product, stream in zip(cases, products, streams, strict=True):
            if rng.random() < 0.2:
                time.sleep(rng.random() * 1e-3)
            product(case.a, case.b, case.out, stream=stream)
    w.synchronize()
    for case, product, got in zip(cases, products, first, strict=True):
        assert case.out.get().tobytes() == got.tobytes()
        product.free()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_torch():
    import torch

    case = Case("rs", 40 * world().n_ranks, 72, 104)
    product = sk.GemmReduceScatter(world(), 40 * world().n_ranks, 72)
    a, b = (torch.from_dlpack(x.view("int16")).view(torch.bfloat16) for x in (case.a, case.b.T))
    out = product(a, b.T)
    world().synchronize()
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
    assert error(out.float().cpu().numpy(), case.want) < 1e-2
    product.free()


@pytest.mark.parametrize("op", OBJECTS)
def test_one_after_the_other(op):
    case = Case(op, 40 * world().n_ranks, 72, 104)
    product = OBJECTS[op](world(), 40 * world().n_ranks, 72, method="sequential")
    case.check(case.compute(product))
    product.free()


def test_parts_of_float32():
    fused_is_there()
    errors = {}
    for part in (None, "float32"):
        case = Case("rs", 128 * world().n_ranks, 512, 1024)
        product = sk.GemmReduceScatter(world(), 128 * world().n_ranks, 512, part_dtype=part, method="fused")
        errors[part] = error(case.compute(product), case.want)
        product.free()
    assert errors["float32"] < 2**-8 and errors["float32"] <= errors[None]


@pytest.mark.parametrize(
    "op, method, symmetric",
    [("rs", "fused", False), ("rs", "ll128_overlap", False), ("ar", "fused", False), ("ar", "fused", True)],
)
def test_many_times_with_skew(op, method, symmetric):
    """Equal bits, also where ranks come at different times."""
    fused_is_there()
    w, rng = world(), np.random.default_rng(world().rank)
    case = Case(op, 512 * w.n_ranks, 2048, 256)
    product = OBJECTS[op](w, 512 * w.n_ranks, 2048, method=method)
    out = product.output(case.out.shape) if symmetric else None
    first = case.compute(product, out)
    case.check(first)
    for _ in range(500):
        if rng.random() < 0.2:
            time.sleep(rng.random() * 1e-3)
        assert case.compute(product, out).tobytes() == first.tobytes()
    product.free()


@pytest.mark.parametrize("op, method", [("rs", "fused"), ("rs", "ll128_overlap"), ("ar", "fused")])
def test_a_graph(op, method):
    fused_is_there()
    w = world()
    case, other = Case(op, 256 * w.n_ranks, 512, 128), Case(op, 64 * w.n_ranks, 256, 512)
    product = OBJECTS[op](w, 256 * w.n_ranks, 512, method=method)
    want = [x.compute(product) for x in (case, other)]
    stream = w.stream
    stream.begin_capture()
    for _ in range(3):
        for x in (case, other):
            product(x.a, x.b, x.out)
    graph = stream.end_capture()
    for _ in range(5):
        for x in (case, other):
            x.out.fill(np.nan)
        w.xp.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        product(other.a, other.b, other.out)
        w.synchronize()
        assert [x.out.get().tobytes() for x in (case, other)] == [x.tobytes() for x in want]
    product.free()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_no_larger_error_than_torchs():
    """1.5 times that of rounding each rank's product, and the sum of those in float32."""
    fused_is_there()
    import torch

    case = Case("rs", 512 * world().n_ranks, 1024, 2048)
    product = sk.GemmReduceScatter(world(), 512 * world().n_ranks, 1024, method="fused")
    got = case.compute(product)
    tensors = [torch.from_dlpack(x.view("int16")).view(torch.bfloat16) for x in (case.a, case.b.T)]
    mine = (tensors[0] @ tensors[1].T).float().cpu().numpy()
    rows = slice(world().rank * 512, (world().rank + 1) * 512)
    sums = np.add.reduce(world().host_allgather(mine))[rows]
    theirs = torch.from_numpy(sums).to(torch.bfloat16).float().numpy()
    assert error(got, case.want) <= min(2e-2, 1.5 * error(theirs, case.want))
    product.free()


# ---- several nodes


def several_nodes():
    if world().n_nodes == 1:
        pytest.skip("needs several nodes: SHMEMKIT_LOCAL_SIZE")
    if world().local_size > 1:
        fused_is_there()


@pytest.mark.parametrize("op", OBJECTS)
@pytest.mark.parametrize(
    "rows, n, k",
    [(128, 256, 64), (1024, 1024, 1024), (200, 1000, 520), (33, 520, 264), (5, 24, 72), (1, 8, 8)],
)
def test_over_nodes(op, rows, n, k):
    several_nodes()
    m = rows * world().n_ranks
    errors = {}
    for part in (None, "float32"):
        case, product = Case(op, m, n, k), OBJECTS[op](world(), m, n, part_dtype=part, method="fused_2d")
        for _ in range(3):
            got = case.compute(product)
            case.check(got)
        errors[part] = error(got, case.want)
        product.free()
    assert errors["float32"] < 2**-8


@pytest.mark.parametrize("op, symmetric", [("rs", False), ("ar", False), ("ar", True)])
def test_over_nodes_many_times_with_skew(op, symmetric):
    """Equal bits; two sizes, so that some chunks have more calls than others."""
    several_nodes()
    w, rng = world(), np.random.default_rng(world().rank)
    cases = Case(op, 512 * w.n_ranks, 2048, 256), Case(op, 40 * w.n_ranks, 256, 128)
    product = OBJECTS[op](w, 512 * w.n_ranks, 2048, method="fused_2d")
    outs = [product.output(case.out.shape) if symmetric else None for case in cases]
    first = [case.compute(product, out) for case, out in zip(cases, outs, strict=True)]
    for case, got in zip(cases, first, strict=True):
        case.check(got)
    for call in range(500):
        if rng.random() < 0.2:
            time.sleep(rng.random() * 1e-3)
        which = call % 3 == 2
        assert cases[which].compute(product, outs[which]).tobytes() == first[which].tobytes()
    product.free()


@pytest.mark.parametrize("op", OBJECTS)
def test_a_graph_over_nodes(op):
    """Calls in a row, without the host between them."""
    several_nodes()
    w = world()
    cases = Case(op, 256 * w.n_ranks, 512, 128), Case(op, 64 * w.n_ranks, 256, 512)
    product = OBJECTS[op](w, 256 * w.n_ranks, 512, method="fused_2d")
    want = [case.compute(product) for case in cases]
    w.stream.begin_capture()
    for _ in range(5):
        for case in cases:
            product(case.a, case.b, case.out)
    graph = w.stream.end_capture()
    for _ in range(20):
        for case in cases:
            case.out.fill(np.nan)
        w.xp.cuda.get_current_stream().synchronize()
        graph.launch(w.stream)
        product(cases[1].a, cases[1].b, cases[1].out)
        w.synchronize()
        assert [case.out.get().tobytes() for case in cases] == [x.tobytes() for x in want]
    product.free()
