"""On how many multiprocessors (%smid) blocks within a budget are, measured by timelines; on any number of
ranks. On the emulator: test_sms.py."""

import gpu
import numpy as np
import pytest
from budgets import multiprocessors_at_once
from fast import in_turn, slow
from specification import ALL, calls

import shmemkit as sk

pytestmark = pytest.mark.gpu
MULTICAST = "multimem"
WAYS = [(name, m) for name, what in ALL.items() for m in what.kind.methods if MULTICAST not in m]
SIZES = [1 << 16, 300, 1 << 16]
FIRST = [way for i, way in enumerate(WAYS) if way[1] not in {method for _, method in WAYS[:i]}]


@pytest.fixture
def world():
    return gpu.world()


@pytest.mark.parametrize(
    "name, method, sms",  # a recorded kernel takes a second or more to compile
    [*in_turn(FIRST, [(8,), (33,)]), *slow(*((*way, 8) for way in WAYS if way not in FIRST))],
)
def test_collectives(world, name, method, sms):
    with sk.Timeline(world, records=20_000) as timeline:
        try:
            calls(name, method, SIZES, "int32", world=world, xp=world.xp, sms=sms)
        except ValueError as error:
            pytest.skip(str(error))
    assert 1 <= multiprocessors_at_once(timeline, world.rank) <= sms


def test_without_a_budget_there_are_more(world):
    """So the measurement can fail."""
    with sk.Timeline(world, records=20_000) as timeline:
        calls("AllReduce", "one_shot", [1 << 20], "int32", world=world, xp=world.xp)
    assert multiprocessors_at_once(timeline, world.rank) > 33


@pytest.mark.parametrize("method", ["auto", "sm90", "sm80", "simt"])
def test_products(world, method):
    xp, rng = world.xp, np.random.default_rng(0)
    a, b = (xp.asarray(rng.integers(-2, 3, (1024, 1024)).astype("float16")) for _ in "ab")
    with sk.Timeline(world, records=20_000) as timeline:
        try:
            out = sk.Gemm(method, sms=7)(a, b)
        except ValueError as error:
            pytest.skip(str(error))
    assert (
        world.asnumpy(out) == world.asnumpy(a).astype("float32") @ world.asnumpy(b).astype("float32")
    ).all()
    assert 1 <= multiprocessors_at_once(timeline, world.rank) <= 7


@pytest.mark.parametrize("method", sk.AllGatherGemm.methods)
def test_ag_gemm(world, method):
    xp, k = world.xp, 1024
    x, weight = xp.ones((512, k), "float16"), xp.ones((k, 1024), "float16")
    with sk.Timeline(world, records=20_000) as timeline:
        try:
            product = sk.AllGatherGemm(world, x.nbytes * world.n_ranks, method, sms=16)
        except ValueError as error:
            pytest.skip(str(error))
        out = product(x, weight)
    assert (world.asnumpy(out) == k).all()
    assert 1 <= multiprocessors_at_once(timeline, world.rank) <= 16
    product.free()


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [sk.GemmReduceScatter, sk.GemmAllReduce])
@pytest.mark.parametrize("method", ["auto", "one_shot", "ll128_overlap", "fused", "copy_engine"])
def test_sums_of_products(world, kind, method):
    if method not in ("auto", *kind.methods):
        pytest.skip("there is no such method")
    xp, m, k = world.xp, 64 if method == "one_shot" else 512, 64
    a, b = xp.ones((m, k), "float16"), xp.ones((k, 1024), "float16")
    with sk.Timeline(world, records=20_000) as timeline:
        try:
            product = kind(world, m, 1024, "float16", method=method, sms=16)
        except ValueError as error:
            pytest.skip(str(error))
        out = product(a, b)
    assert (world.asnumpy(out) == k * world.n_ranks).all()
    assert 1 <= multiprocessors_at_once(timeline, world.rank) <= 16
    product.free()


def test_beside_a_kernel_of_ones_own(world):
    """A product that leaves 8 multiprocessors, and an all-reduce on these, at the same time."""
    from numba import cuda

    xp, other, n = world.xp, cuda.stream(), world.n_ranks
    x, a = xp.full(1 << 20, world.rank + 1, "int32"), xp.ones((2048, 2048), "float16")
    sums, y = xp.empty_like(x), xp.empty((2048, 2048), "float16")
    reduce, multiply = sk.AllReduce(world, x.nbytes, sms=8), sk.Gemm(sms=world.backend.multiprocessors - 8)
    for _ in range(20):
        reduce(x, sums)
        multiply(a, a, y, stream=other)
    world.synchronize()
    assert (sums == n * (n + 1) // 2).all() and (y == 2048).all()
    reduce.free()
