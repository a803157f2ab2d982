"""Budgets of multiprocessors: no launch of a product has more blocks than `sms`, and the results are right.
Integers, so that every order of sums gives the same bits."""

import numpy as np
import pytest
from budgets import least_budget, most_blocks
from fast import slow

import shmemkit as sk

M, K, N = 40, 8, 72  # for each rank
OVER_NODES = ("overlap_2d", "fused_2d")
PRODUCTS = [
    (kind, method)
    for kind in (sk.AllGatherGemm, sk.GemmReduceScatter, sk.GemmAllReduce)
    for method in kind.methods
]
budgets = pytest.mark.parametrize("sms", [2, *slow(1, 3, 64)])


def of(rank, *shape):
    return np.random.default_rng([rank, *shape]).integers(-2, 3, shape).astype("float16")


@pytest.mark.each_value
@budgets
@pytest.mark.parametrize("kind, method", PRODUCTS, ids=lambda value: getattr(value, "__name__", value))
def test_blocks(kind, method, sms):
    n, local_size = 2, 1 if method in OVER_NODES else 2
    several = kind is not sk.AllGatherGemm
    rows = 64 if method in ("one_shot", "two_shot") else M

    def main():
        world = sk.init(local_size=local_size)
        size = (n * M * K * 2,) if not several else (n * rows, N, "float16")

        def make(sms):
            return kind(world, *size, method=method, sms=sms)

        given = least_budget(make, sms)
        product = make(given)
        a, b = (
            [of(rank, *shape) for rank in range(n)] for shape in ((n * rows if several else M, K), (K, N))
        )
        with sk.Timeline(world) as timeline:
            out = product(a[world.rank], b[world.rank])
        assert 1 <= most_blocks(timeline) <= given
        if several:
            wanted = sum(x.astype(int) @ y.astype(int) for x, y in zip(a, b, strict=True))
            wanted = wanted if kind is sk.GemmAllReduce else np.split(wanted, n)[world.rank]
        else:
            wanted = np.concatenate(a).astype(int) @ b[world.rank].astype(int)
        np.testing.assert_array_equal(out, wanted)

    sk.emu.run(main, n)


def test_copies_of_rows_that_the_tma_does_not_take():
    def main():
        world = sk.init()
        product = sk.GemmReduceScatter(world, 64, 36, "float16", method="fused", sms=2)
        a, b = of(0, 64, 35), of(1, 35, 36)
        with sk.Timeline(world) as timeline:
            out = product(a, b)
        assert most_blocks(timeline) == 2
        np.testing.assert_array_equal(out, np.split(2 * a.astype(int) @ b.astype(int), 2)[world.rank])

    sk.emu.run(main, 2)


@pytest.mark.parametrize("method", ["sm90", "sm80", "simt"])
@pytest.mark.parametrize("sms", [1, *slow(2, 3, 64)])
def test_gemm(method, sms):
    def main():
        world = sk.init()
        a, b = of(0, 70, K), of(1, K, 72)
        with sk.Timeline(world) as timeline:
            out = sk.Gemm(method, sms=sms)(a, b)
            again = sk.matmul(a, b, method=method, sms=sms)
        assert 1 <= most_blocks(timeline) <= sms
        for result in (out, again):
            np.testing.assert_array_equal(result, a.astype(int) @ b.astype(int))

    sk.emu.run(main, 1)


@pytest.mark.every(2)
@pytest.mark.parametrize("method", ["sm90", "sm80"])
@pytest.mark.parametrize("sms", [1, *slow(2, 3, 64)])
def test_grouped(method, sms):
    def main():
        world = sk.init()
        x, w, counts = of(0, 9, K), of(1, 3, 72, K), np.array([6, 0, 3], "int32")
        with sk.Timeline(world) as timeline:
            out = sk.GroupedGemm(method, sms=sms)(x, w, counts)
            again = sk.grouped_matmul(x, w, counts, method=method, sms=sms)
        assert 1 <= most_blocks(timeline) <= sms
        experts = np.repeat(np.arange(3), counts)
        wanted = np.einsum("rk,rnk->rn", x.astype(int), w.astype(int)[experts])
        for result in (out, again):
            np.testing.assert_array_equal(result, wanted)

    sk.emu.run(main, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sk.AllGatherGemm, sk.GemmReduceScatter])
def test_races(kind):
    def main():
        world = sk.init()
        size = (2 * M * K * 2,) if kind is sk.AllGatherGemm else (2 * M, N, "float16")
        product = kind(world, *size, method="push" if kind is sk.AllGatherGemm else "fused", sms=3)
        a, b = of(world.rank, M if kind is sk.AllGatherGemm else 2 * M, K), of(world.rank, K, N)
        for _ in range(2):
            product(a, b)

    sk.emu.run(main, 2, races=True)


def test_errors():
    def main():
        world = sk.init()
        for sms, error in ((0, ValueError), (True, TypeError), (2.5, TypeError), ("8", TypeError)):
            for make in (
                lambda: sk.Gemm(sms=sms),  # noqa: B023
                lambda: sk.GroupedGemm(sms=sms),  # noqa: B023
                lambda: sk.AllGatherGemm(world, 64, sms=sms),  # noqa: B023
                lambda: sk.GemmReduceScatter(world, 64, 64, sms=sms),  # noqa: B023
            ):
                with pytest.raises(error, match="sms is"):
                    make()
        with pytest.raises(ValueError, match="sms is 1; it must be 2 at least"):
            sk.AllGatherGemm(world, 64, "push", sms=1)
        with pytest.raises(ValueError, match="needs the same sms on all ranks"):
            sk.AllGatherGemm(world, 64, sms=2 + world.rank)

    sk.emu.run(main, 2)
