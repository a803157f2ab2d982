"""Budgets of multiprocessors: no launch has more blocks than `sms`, and the results are as without it."""

import numpy as np
import pytest
from budgets import least_budget, most_blocks
from emulated import spmd
from fast import slow
from routed import BF16, integers, products, routing, sums

import shmemkit as sk

N, TOKENS, TOPK, EXPERTS, COLUMNS, K = 2, 8, 2, 3, 40, 16


@pytest.mark.parametrize("sms", slow(2, 3, 5, 64))
def test_expert_parallel(sms):
    def main(world):
        rng = np.random.default_rng(0)
        experts = np.stack([rng.permutation(4)[:2] for _ in range(6)]).astype("int32")
        x = integers(world.rank, 6, 16, dtype="float32")
        given = least_budget(lambda sms: sk.ExpertParallel(world, 6, 16, 4, 2, "float32", sms=sms), 1)
        assert given == 2
        ep = sk.ExpertParallel(world, 6, 16, 4, 2, "float32", sms=sms)
        with sk.Timeline(world) as timeline:
            for _ in range(2):
                received = ep.dispatch(x, experts)
                out = ep.combine(received.rows)
        assert 2 <= most_blocks(timeline) <= sms
        np.testing.assert_array_equal(out, 2 * x)
        ep.free()

    spmd(N, main, races=True)


@pytest.mark.parametrize("method", ["overlap", *slow("sequential")])
@pytest.mark.parametrize("sms", [1, *slow(2, 3, 64)])
def test_first_layer(method, sms):
    ids = routing("random", TOKENS, TOPK, EXPERTS)
    xs = [integers(rank, TOKENS // N, K) for rank in range(N)]

    def main(world):
        def make(sms):
            return sk.AllGatherGroupedGemm(world, TOKENS * K * 2, method, sms=sms)

        given = least_budget(make, sms)
        layer, w = make(given), integers(9 + world.rank, EXPERTS, COLUMNS, K)
        with sk.Timeline(world) as timeline:
            out = layer(xs[world.rank], w, ids)
        assert 1 <= most_blocks(timeline) <= given
        np.testing.assert_array_equal(out.astype("float32"), products(np.concatenate(xs), w, ids, TOPK))

    spmd(N, main)


@pytest.mark.parametrize("method", ["gathered", *slow("sequential")])
@pytest.mark.parametrize("sms", [1, *slow(2, 3, 64)])
def test_second_layer(method, sms):
    ids, weights = routing("random", TOKENS, TOPK, EXPERTS), np.ones((TOKENS, TOPK), "float32")
    xs = [integers(rank, TOKENS * TOPK, K) for rank in range(N)]
    ws = [integers(9 + rank, EXPERTS, COLUMNS, K) for rank in range(N)]

    def main(world):
        def make(sms):
            return sk.GroupedGemmReduceScatter(world, TOKENS, TOPK, COLUMNS, BF16, method, sms=sms)

        given = least_budget(make, sms)
        layer = make(given)
        with sk.Timeline(world) as timeline:
            out = layer(xs[world.rank], ws[world.rank], ids, weights)
        assert 1 <= most_blocks(timeline) <= given
        wanted = sum(sums(x, w, ids, weights) for x, w in zip(xs, ws, strict=True)).astype(BF16)
        np.testing.assert_array_equal(out, np.split(wanted, N)[world.rank])

    spmd(N, main)
