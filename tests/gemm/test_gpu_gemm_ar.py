"""GemmAllReduce by LL128, "one_shot", "two_shot" and "two_shot_overlap", on GPUs: relative errors, poisoned
outputs, equal bits on all ranks, skewed repeats, graphs."""

import time

import numpy as np
import pytest
from gemms import error, moved
from gpu import world

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu
FEW_ROWS = ("one_shot", "two_shot")
METHODS = (*FEW_ROWS, "two_shot_overlap")
methods = pytest.mark.parametrize("method", METHODS)


def they_are_there():
    w = world()
    reasons = w.host_allgather(w.backend.unreached(nvlink=True))
    if w.backend.compute_capability[0] != 9 or any(reasons):
        pytest.skip("needs GPUs of compute capability 9.0 that NVLink connects")


class Case:
    """Operands of this rank, and what is expected, in float32 of the rounded operands."""

    def __init__(self, m, n, k, majors="kk", dtype="bfloat16"):
        self.w, self.size, dtype = world(), (m, k, n), as_dtype(dtype)
        xp, self.want = self.w.xp, 0
        for rank in range(self.w.n_ranks):
            rng = xp.random.default_rng(1000 * rank + m + n + k)
            a, b = (
                rng.standard_normal(s if by_rows else s[::-1], dtype="float32").astype(dtype)
                for s, by_rows in (((m, k), majors[0] == "k"), ((n, k), majors[1] == "k"))
            )
            a, b = a if majors[0] == "k" else a.T, b.T if majors[1] == "k" else b
            if rank == self.w.rank:
                self.a, self.b = a, b
            self.want = self.want + (a.astype("float32") @ b.astype("float32")).get()
        self.room = xp.full((m + 1, n), np.nan, dtype)
        self.out = self.room[:m]

    def compute(self, product):
        self.out.fill(np.nan)
        self.w.xp.cuda.get_current_stream().synchronize()
        assert product(self.a, self.b, self.out) is self.out
        self.w.synchronize()
        return self.out.get()

    def check(self, got):
        assert error(got, self.want) < 1e-2
        assert np.isnan(self.room[-1].get().astype("float32")).all()
        assert len(set(self.w.host_allgather(got.tobytes()))) == 1


@pytest.mark.parametrize("method", FEW_ROWS)
@pytest.mark.parametrize(
    "m, n, k, majors, options",
    [
        (1, 8, 8, "kk", None),
        (1, 8192, 4096, "kk", None),
        (3, 264, 520, "kk", None),
        (16, 1024, 1024, "mn", None),
        (17, 4096, 4096, "kn", None),
        (64, 8192, 2048, "kk", None),
        (100, 1000, 520, "kk", None),
        (128, 7168, 2048, "kk", None),
        (33, 1000, 1000, "kk", {"tile": (64, 96), "splits": 1}),
        (64, 2048, 4096, "kk", {"tile": (64, 128), "splits": 8}),
        (128, 12288, 1024, "kn", {"tile": (64, 32), "splits": 3}),  # several tiles for a block
    ],
    ids=str,
)
def test_sizes_and_tiles(method, m, n, k, majors, options):
    they_are_there()
    case = Case(m, n, k, majors)
    product = sk.GemmAllReduce(world(), m, n, method=method, options=options)
    for _ in range(3):
        case.check(case.compute(product))
    product.free()


@pytest.mark.parametrize(
    "m, n, k, majors, dtype",
    [
        (1, 8, 8, "kk", "bfloat16"),
        (3, 264, 520, "kn", "float16"),
        (130, 1000, 520, "mn", "bfloat16"),
        (256, 4096, 1024, "mk", "float16"),
        (300, 8192, 2048, "kk", "bfloat16"),
        (512, 8192, 7168, "kk", "bfloat16"),
        (2048, 2048, 256, "kn", "bfloat16"),
    ],
)
def test_overlap(m, n, k, majors, dtype):
    """By part of a tile, some blocks, and several tiles of each."""
    they_are_there()
    case = Case(m, n, k, majors, dtype)
    product = sk.GemmAllReduce(world(), m, n, dtype, method="two_shot_overlap")
    for _ in range(3):
        case.check(case.compute(product))
    product.free()


@methods
@pytest.mark.parametrize("m, n, k, on_rank", [(16, 1024, 520, 0), (17, 1003, 263, None)])
def test_arrays_that_the_tma_does_not_take(method, m, n, k, on_rank):
    """On one rank alone; and of N and K of which no row, or column, is a multiple of 16 bytes."""
    they_are_there()
    case, product = Case(m, n, k, "kn"), sk.GemmAllReduce(world(), m, n, method=method)
    if on_rank in (None, world().rank):
        case.a, case.b = moved(case.a, "odd columns"), moved(case.b, "odd rows")
        case.out = moved(case.out, "at an odd address")
    for _ in range(3):
        case.check(case.compute(product))
    product.free()


@methods
@pytest.mark.parametrize("dtype, rounded", [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_parts_of_float32(method, dtype, rounded):
    they_are_there()
    case, errors = Case(40, 1024, 1024, dtype=dtype), {}
    for part in (None, "float32"):
        product = sk.GemmAllReduce(world(), 40, 1024, dtype, part, method)
        got = case.compute(product)
        case.check(got)
        errors[part] = error(got, case.want)
        product.free()
    assert errors["float32"] < rounded and errors["float32"] <= errors[None]


def test_both_give_the_same_bits():
    they_are_there()
    case, found = Case(50, 2048, 1024), set()
    for method in FEW_ROWS:
        product = sk.GemmAllReduce(world(), 50, 2048, method=method)
        found.add(case.compute(product).tobytes())
        product.free()
    assert len(found) == 1


@methods
def test_many_times_with_skew(method):
    """Of several sizes, in turn, some enqueued together: equal bits, also where ranks come at different
    times."""
    they_are_there()
    w, mine, all_ranks = world(), np.random.default_rng(world().rank), np.random.default_rng(7)
    sizes = [(64, 4096, 512), (1, 8192, 512), (17, 520, 2048), (128, 1024, 64)]
    if method not in FEW_ROWS:
        sizes[1:3] = (512, 8192, 256), (300, 6000, 512)
    cases = [Case(*size) for size in sizes]
    product = sk.GemmAllReduce(w, 512, 8192, method=method)
    first = [case.compute(product) for case in cases]
    for case, got in zip(cases, first, strict=True):
        case.check(got)
    calls = 0
    while calls < 500:
        chosen = all_ranks.permutation(len(cases))[: all_ranks.integers(1, len(cases) + 1)]
        for i in chosen:
            cases[i].out.fill(np.nan)
        w.xp.cuda.get_current_stream().synchronize()
        for i in chosen:
            if mine.random() < 0.2:
                time.sleep(mine.random() * 1e-3)
            product(cases[i].a, cases[i].b, cases[i].out)
        w.synchronize()
        assert all(cases[i].out.get().tobytes() == first[i].tobytes() for i in chosen)
        calls += len(chosen)
    product.free()


@methods
def test_a_graph(method):
    they_are_there()
    w = world()
    case, other = Case(16, 4096, 1024), Case(100, 256, 4096)
    product = sk.GemmAllReduce(w, 128, 4096, method=method)
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
