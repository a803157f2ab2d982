"""Grouped product, top-k sum and reduce-scatter on the emulator: routings of all kinds that change from call
to call, graphs, a whole layer, errors, and what goes wrong without one of its waits, fences or barriers."""

import numpy as np
import pytest
from emulated import spmd
from fast import full, slow
from mutations import argument, goes_wrong, omit, omit_store, seeds, single_buffer
from routed import BF16, POISON, integers, products, routing, sums, words
from small_kernels import fill, take

import shmemkit as sk
from shmemkit.moe import expert_layer, weighted_rows

SMALL = {"columns": 32}


def factors(seed, tokens, topk):
    return np.random.default_rng([3, seed]).integers(-1, 3, (tokens, topk)).astype("float32")


def expected(world, xs, routings, weights, call, experts, n, k):
    """-> float32: this rank's tokens"""
    total = np.zeros((routings.shape[1], n), "float32")
    for rank in range(world.n_ranks):
        w = integers([2, rank], experts, n, k, dtype=xs.dtype)
        total += sums(xs[call, rank], w, routings[call], weights[call])
    rows = len(total) // world.n_ranks
    return total[world.rank * rows :][:rows].astype(xs.dtype).astype("float32")


def in_a_row(world, method, kinds, m, topk, experts, n, k, sms=3, columns=False, dtype=BF16, options=SMALL):
    """A call for each of `kinds` of routing, with other rows, without a wait of the host."""
    world.backend.multiprocessors = sms
    ranks, stream, tokens = world.n_ranks, world.stream, world.n_ranks * m
    xs = integers(1, len(kinds), ranks, tokens * topk, k, dtype=dtype)
    routings = np.stack([routing(kind, tokens, topk, experts, i) for i, kind in enumerate(kinds)])
    factors_of = np.stack([factors(i, tokens, topk) for i in range(len(kinds))])
    w = integers([2, world.rank], experts, n, k, dtype=dtype)
    if columns:
        w = np.ascontiguousarray(w.transpose(0, 2, 1)).transpose(0, 2, 1)
    second = sk.GroupedGemmReduceScatter(world, tokens, topk, n, dtype, method, options=options)
    assert second.used == method
    x, ids = np.zeros((tokens * topk, k), dtype), np.zeros((tokens, topk), "int32")
    weights, out = np.zeros((tokens, topk), "float32"), np.zeros((m, n), dtype)
    seen = np.zeros((len(kinds), *out.shape), dtype)
    for call in range(len(kinds)):
        for source, to in ((xs[call, world.rank], x), (routings[call], ids), (factors_of[call], weights)):
            take[1, 32, stream](words(source), words(to))
        fill[1, 32, stream](words(out), 0x7FC0)
        assert second(x, w, ids, weights, out) is out
        take[1, 32, stream](words(out), words(seen[call]))
        fill[1, 32, stream](words(x), 0x7FC0)
        fill[1, 32, stream](words(ids), 0x7FFFFFFF)
        fill[1, 32, stream](words(weights), 0x7FC00000)
    world.synchronize()
    for call, got in enumerate(seen):
        want = expected(world, xs, routings, factors_of, call, experts, n, k)
        np.testing.assert_array_equal(got.astype("float32"), want)
    second.free()


def run(n_ranks, *arguments, delivery="unordered", races=True, seed=None, **options):
    def main(world):
        in_a_row(world, *arguments, **options)

    spmd(n_ranks, main, delivery=delivery, races=races, seed=seed)


CHANGING = ["random", "some have none", "one expert", "none", "an expert without tokens"]


@pytest.mark.parametrize(
    ("n_ranks", "m", "topk", "experts", "n", "k"),
    [
        (2, 1, 2, 2, 16, 16),
        *slow((1, 19, 2, 3, 104, 72), (2, 3, 2, 3, 40, 72), (3, 1, 3, 4, 104, 16)),
        *full((2, 17, 5, 6, 328, 16)),  # chunks of several columns of tiles
        *full((3, 25, 4, 2, 72, 136)),  # tiles of 128 rows
        *full((4, 17, 2, 3, 40, 72)),
    ],
)
def test_gathered(n_ranks, m, topk, experts, n, k):
    calls = CHANGING if 1 < m < 20 else CHANGING[:2]  # five large ones take a minute
    run(n_ranks, "gathered", calls, m, topk, experts, n, k)


def test_gathered_on_a_group():
    """Also its last steps mean the group's ranks."""

    def main(world):
        group = world.group([2, 0])
        if group is not None:
            in_a_row(group, "gathered", ["random"], 1, 1, 2, 16, 16)

    spmd(3, main, races=True, delivery="unordered", seed=None)


@pytest.mark.slow
def test_all_experts_of_a_token():
    run(2, "gathered", ["all experts"], 17, 4, 4, 24, 64)


@pytest.mark.slow
def test_chunks_of_several_tiles():
    run(2, "gathered", ["random"] * 2, 5, 2, 2, 104, 16, options={"columns": 16, "chunks": 2})


@pytest.mark.slow
@pytest.mark.parametrize("sms", [2, 4])
def test_columns_of_w_and_float16(sms):
    run(2, "gathered", ["one expert", "random"], 20, 1, 2, 72, 64, sms, True, np.dtype("float16"))


@pytest.mark.parametrize(("n_ranks", "n", "k"), [(1, 5, 7), *slow((2, 6, 10), (3, 8, 16))])
def test_sequential(n_ranks, n, k):
    run(n_ranks, "sequential", ["some have none", "one expert"], 3, 2, 3, n, k, races=False)


@pytest.mark.slow
def test_sizes_that_change():
    """Other tokens and columns than the largest ones, by one object."""

    def main(world):
        second = sk.GroupedGemmReduceScatter(world, 12, 3, 104, method="gathered", options=SMALL)
        for tokens, topk, n in [(12, 3, 104), (2, 1, 8), (12, 3, 104)]:
            ids, weights = routing("random", tokens, topk, 2), factors(0, tokens, topk)
            xs, w = integers(1, 1, 2, tokens * topk, 16), integers([2, world.rank], 2, n, 16)
            out = second(xs[0, world.rank], w, ids, weights)
            world.synchronize()
            want = expected(world, xs, ids[None], weights[None], 0, 2, n, 16)
            np.testing.assert_array_equal(out.astype("float32"), want)

    spmd(2, main, races=True)


@pytest.mark.slow
def test_a_layer_in_a_graph():
    """Both products of a layer with one index, of a routing that changes."""

    def main(world):
        world.backend.multiprocessors = 3
        m, topk, experts, tokens, k, width = 5, 2, 3, 10, 16, 24
        x, ids = np.zeros((m, k), BF16), np.zeros((tokens, topk), "int32")
        weights = np.zeros((tokens, topk), "float32")
        w1, w2 = integers([world.rank, 1], experts, width, k), integers([2, world.rank], experts, 40, width)
        h, out = np.zeros((ids.size, width), BF16), np.zeros((m, 40), BF16)
        first = sk.AllGatherGroupedGemm(world, tokens * k * 2, "overlap")
        second = sk.GroupedGemmReduceScatter(world, tokens, topk, 40, method="gathered")
        index = sk.ExpertIndex(world, ids, experts)

        def layer():
            index.update()
            first(x, w1, index, h)
            second(h, w2, index, weights, out)

        layer()
        world.stream.begin_capture()
        layer()
        graph = world.stream.end_capture()
        world.synchronize()
        for call in range(3):
            whole = integers(call, tokens, k)
            x[:] = whole[world.rank * m :][:m]
            ids[:], weights[:] = (
                routing(CHANGING[call], tokens, topk, experts, call),
                factors(call, tokens, topk),
            )
            h[:] = POISON
            graph.launch(world.stream)
            world.synchronize()
            hs = [
                products(whole, integers([rank, 1], experts, width, k), ids, topk).astype(BF16)
                for rank in range(world.n_ranks)
            ]
            want = expected(world, np.stack(hs)[None], ids[None], weights[None], 0, experts, 40, width)
            np.testing.assert_array_equal(out.astype("float32"), want)

    spmd(2, main)


@pytest.mark.slow
def test_a_new_result_and_auto():
    def main(world):
        second = sk.GroupedGemmReduceScatter(world, 4, 2, 8)
        ids, weights, xs = routing("random", 4, 2, 2), factors(0, 4, 2), integers(1, 1, 2, 8, 8)
        w = integers([2, world.rank], 2, 8, 8)
        out = second(xs[0, world.rank], w, ids, weights)
        world.synchronize()
        want = expected(world, xs, ids[None], weights[None], 0, 2, 8, 8)
        np.testing.assert_array_equal(out.astype("float32"), want)
        assert out.dtype == BF16 and second.used == "sequential"
        assert second(xs[0, 0, :0], w, ids[:0], weights[:0]).shape == (0, 8)
        assert world.is_symmetric(second.output((2, 8)))

    spmd(2, main)


# ---- errors


def test_refusals():
    def main(world):
        x, w = integers(0, 16, 16), integers(1, 3, 8, 16)
        ids, weights = routing("random", 8, 2, 3), factors(0, 8, 2)
        for method in ("gathered", "sequential"):
            second = sk.GroupedGemmReduceScatter(world, 8, 2, 8, method=method)
            for arguments, text in [
                ((x[:8], w, ids, weights), "x must have a row for each expert of each token"),
                ((x[:8], w, ids[:0], weights[:0]), r"x has 8 rows, and topk_ids is \(0, 2\)"),
                ((x[:6], w, ids[:3], weights[:3]), "tokens is 3; it must be a multiple of n_ranks, 2"),
                ((x, w, ids.astype("uint8"), weights), "topk_ids is uint8"),
                ((x, w, sk.ExpertIndex(world, ids, 4), weights), "ExpertIndex is of 4 experts"),
            ]:
                with pytest.raises(ValueError, match=text):
                    second(*arguments)
            second.free()
        for options, text in [
            ({"dtype": "float32"}, "dtype is 'float32'; it must be 'bfloat16' or 'float16'"),
            ({"max_tokens": 0}, "max_tokens is 0"),
            ({"options": {"columns": 24}}, "is 24; it must be a multiple of 16 up to 256"),
            ({"options": {"chunks": 9}}, r"options\['chunks'\] is 9"),
            ({"max_n": 8 + world.rank}, "same max_n on all ranks"),
        ]:
            with pytest.raises(ValueError, match=text):
                sk.GroupedGemmReduceScatter(world, **{"max_tokens": 8, "topk": 2, "max_n": 8, **options})

    spmd(2, main)


@pytest.mark.parametrize(("n", "k"), [(9, 3), *slow((16, 7), (1, 1), (70, 5))])
def test_auto_computes_what_gathered_refuses(n, k, monkeypatch):
    """Rows of any length, which are filled up between the product and the sums."""
    monkeypatch.setattr(expert_layer, "SLOW", ())

    def main(world):
        world.backend.multiprocessors = 1
        ids, weights, w = routing("random", 4, 2, 3), factors(0, 4, 2), integers([2, world.rank], 3, n, k)
        xs = integers(1, 1, 2, 8, k)
        x = xs[0, world.rank]
        second = sk.GroupedGemmReduceScatter(world, 8, 2, n, method="gathered")
        with pytest.raises(ValueError, match="must be multiples of 8. Use method='auto'"):
            second(x, w, ids, weights)
        second = sk.GroupedGemmReduceScatter(world, 8, 2, n)
        assert second.used == "gathered" and not second.refused
        out = second(x, w, ids, weights)
        world.synchronize()
        want = expected(world, xs, ids[None], weights[None], 0, 3, n, k)
        np.testing.assert_array_equal(out.astype("float32"), want)

    spmd(2, main, races=True, delivery="unordered", seed=None)


def test_gathered_needs_hopper(monkeypatch):
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "A100")
    with pytest.raises(ValueError, match="compute capability 8.0; it must be 9.0"):
        spmd(2, lambda world: sk.GroupedGemmReduceScatter(world, 8, 2, 8, method="gathered"))


# ---- what is needed


def is_wrong():
    return goes_wrong(run, 2, "gathered", ["random"] * 3, 20, 2, 2, 72, 16, each=seeds(2))


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (weighted_rows, omit("wait", 1)),
        (weighted_rows, argument("wait", 3, "'relaxed'", 1)),
        (weighted_rows, omit("cuda.syncthreads", 1)),
        (weighted_rows, omit("cuda.syncthreads", 2)),
        (weighted_rows, omit("cuda.threadfence", 1)),
        (weighted_rows, omit("cuda.threadfence", 2)),
        (weighted_rows, omit_store("sums.sent[]")),
        (weighted_rows, omit_store("epochs[]")),
        (weighted_rows, single_buffer()),
    ],
)
def test_each_part_is_needed(mutate, module, change):
    mutate(module, change)
    assert is_wrong()


@pytest.mark.slow
def test_nothing_is_wrong():
    assert not is_wrong()
