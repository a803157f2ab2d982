"""ExpertIndex on the emulator: every pair once, sorted, in tiles that come in the order in which ranks' rows
arrive."""

import numpy as np
import pytest
from emulated import spmd
from mutations import goes_wrong, omit
from routed import routing

import shmemkit as sk
from shmemkit.moe import expert_index


def check(index, ids, n_experts, me, n_ranks):
    flat = ids.reshape(-1)
    sources = (np.arange(flat.size) // ids.shape[1] // (len(ids) // n_ranks) - me) % n_ranks
    expected = [p for p in np.lexsort((sources, flat)) if 0 <= flat[p] < n_experts]
    n_tiles, n_pairs = index.sizes
    pairs = index.pairs[:n_pairs]
    assert sorted(pairs) == sorted(expected)
    assert [(flat[p], sources[p]) for p in pairs] == [(flat[p], sources[p]) for p in expected]
    assert index.counts.tolist() == [(flat == expert).sum() for expert in range(n_experts)]
    found, order = [], []
    for tile in map(int, index.tiles[:n_tiles]):
        rows = pairs[tile & 0xFFFFFFFF :][: tile >> 32 & 0xFF]
        order.append((tile >> 40 & 0xFF, tile >> 48))
        assert 0 < len(rows) <= index.tile_m and set(flat[rows]) == {tile >> 48}
        assert max(sources[rows]) == tile >> 40 & 0xFF
        found += list(rows)
    assert sorted(found) == sorted(expected) and order == sorted(order)
    assert n_tiles == sum(-(-count // index.tile_m) for count in index.counts) <= index.max_tiles


@pytest.mark.parametrize(
    ("tokens", "topk", "n_experts", "kind"),
    [
        (6, 2, 5, "random"),
        (6, 3, 40, "some have none"),
        (300, 4, 3, "some have none"),
        (150, 2, 3, "one expert"),
        (66, 3, 3, "all experts"),
        (6, 1, 4, "none"),
    ],
)
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_index(n_ranks, tokens, topk, n_experts, kind):
    def main(world):
        ids = routing(kind, tokens, topk, n_experts)
        index = sk.ExpertIndex(world, ids, n_experts)
        for seed in range(2):
            ids[:] = routing(kind, tokens, topk, n_experts, seed)
            index.update()
            world.synchronize()
            check(index, ids, n_experts, world.rank, world.n_ranks)

    spmd(n_ranks, main, races=True)


def test_ids_of_64_bits():
    def main(world):
        ids = routing("some have none", 20, 2, 3).astype("int64")
        ids[3, 1], ids[4, 0] = 2**40, -(2**40)
        index = sk.ExpertIndex(world, ids, 3)
        index.update()
        world.synchronize()
        check(index, ids, 3, 0, 1)

    spmd(1, main)


@pytest.mark.parametrize(
    ("ids", "n_experts", "text"),
    [
        (np.zeros((4, 2), "float32"), 3, "topk_ids is float32 .*; it must be int32 or int64"),
        (np.zeros(4, "int32"), 3, r"it must be int32 or int64 \(M, topk\)"),
        (np.zeros((4, 4), "int32")[:, ::2], 3, "C-contiguous"),
        (np.zeros((3, 2), "int32"), 3, "M must be a multiple of the number of ranks, 2"),
        (np.zeros((4, 0), "int32"), 3, "topk 1 or more"),
        (np.zeros((4, 2), "int32"), 0, "n_experts is 0"),
        (np.zeros((4, 2), "int32"), 16385, "n_experts is 16385, on 2 ranks; it must be 16384 at most"),
    ],
)
def test_refusals(ids, n_experts, text):
    with pytest.raises(ValueError, match=text):
        spmd(2, lambda world: sk.ExpertIndex(world, ids, n_experts))


def index_is_wrong():
    def main(world):
        ids = routing("random", 40, 3, 33)
        index = sk.ExpertIndex(world, ids, 33)
        index.update()
        world.synchronize()
        check(index, ids, 33, 0, 1)

    return goes_wrong(spmd, 1, main, races=True)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_each_barrier_is_needed(mutate, k):
    assert not index_is_wrong()
    mutate(expert_index, omit("cuda.syncthreads", k))
    assert index_is_wrong()
