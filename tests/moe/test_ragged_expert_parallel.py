"""ExpertParallel with max_rows on the emulator: rows without gaps, bounds, kept routings, backward passes,
with races checked and messages late."""

import numpy as np
import pytest
from fast import slow
from mutations import argument, goes_wrong, omit
from routed import routing

import shmemkit as sk
from shmemkit.emu import EmulatorError
from shmemkit.moe import ragged
from shmemkit.moe.ragged import combine, dispatch, plan
from shmemkit.operations.method import Method
from shmemkit.runtime.symmetric_memory import as_dtype

HIDDEN = 16
TWO_WARPS = {"threads": 64}  # of a block: groups of two tokens
LATE = pytest.mark.schedules(deliveries="unordered", seeds=[0])


@pytest.fixture
def few_blocks(monkeypatch):
    """A block has several groups of tokens."""
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=3")


def tokens_of(call, rank, tokens, n_experts, top_k, kind="random", hidden=HIDDEN):
    """-> x, experts, weights of a rank in `call`: whole numbers, whose sums are exact."""
    rng = np.random.default_rng([call, rank])
    x = rng.integers(-4, 5, (tokens, hidden))
    experts = rng.random((tokens, n_experts)).argsort(axis=1)[:, :top_k]  # all different
    if kind == "some have none":
        experts = np.where(rng.random(experts.shape) < 0.3, rng.choice([-1, n_experts, 1 << 30]), experts)
    elif kind != "random":
        experts = routing(kind, tokens, top_k, n_experts, 10 * call + rank)
    experts = experts.astype("int32")
    return x, experts, rng.integers(1, 4, experts.shape).astype("float32")


def rows_for(of_all, local_experts):
    """-> [(rank, token), ...] of each expert, in the order in which it has their rows"""
    return [
        [(r, t) for r, (x, experts, _) in enumerate(of_all) for t in range(len(x)) if e in experts[t]]
        for e in local_experts
    ]


def check_received(received, of_all, local_experts):
    """-> how many rows came"""
    wanted = rows_for(of_all, local_experts)
    assert received.counts.tolist() == [len(of_expert) for of_expert in wanted]
    i = 0
    for e, of_expert in zip(local_experts, wanted, strict=True):
        for r, t in of_expert:
            x, experts, weights = of_all[r]
            np.testing.assert_array_equal(received.rows[i].astype("float64"), x[t])
            assert received.weights[i] == weights[t][experts[t] == e].sum()
            i += 1
    return i


def through(received, local_experts, dtype):
    """What expert e makes of its rows: e + 1 times as much."""
    factors = np.repeat(np.array(local_experts) + 1.0, received.counts)[:, None]
    y = np.full(received.rows.shape, np.nan).astype(dtype)  # nobody reads what is behind
    y[: len(factors)] = (received.rows[: len(factors)].astype("float32") * factors).astype(dtype)
    return y


def combined(x, experts, weights, n_experts):
    valid = (0 <= experts) & (experts < n_experts)
    return (weights * np.where(valid, experts + 1, 0)).sum(axis=1)[:, None] * x


def route(calls, n_local, top_k, kinds, dtype="float32", index="int32", max_rows=None, sms=None):
    """`calls`: for each, how many tokens each rank has, one after another, by one object."""
    world = sk.init()
    n, me, dtype = world.n_ranks, world.rank, as_dtype(dtype)
    n_experts, mine = n * n_local, range(me * n_local, (me + 1) * n_local)
    most = max(map(max, calls))
    max_rows = max_rows or n * most * min(top_k, n_local)
    sizes = most, HIDDEN, n_experts, top_k, dtype
    ep = sk.ExpertParallel(world, *sizes, max_rows=max_rows, sms=sms, options=TWO_WARPS)
    for call, tokens in enumerate(calls):
        kind = kinds[call % len(kinds)]
        of_all = [tokens_of(call, r, tokens[r], n_experts, top_k, kind) for r in range(n)]
        x, experts, weights = of_all[me]
        received = ep.dispatch(x.astype(dtype), experts.astype(index), weights)
        world.synchronize()
        assert check_received(received, of_all, mine) <= max_rows
        out = ep.combine(through(received, mine, dtype))
        world.synchronize()
        wanted = combined(x, experts, weights, n_experts).astype(dtype)
        np.testing.assert_array_equal(out.astype("float64"), wanted.astype("float64"))
    ep.free()
    with pytest.raises(RuntimeError, match="freed"):
        ep.dispatch(x, experts)


@pytest.mark.every(3)
@LATE
@pytest.mark.parametrize("n_ranks", [1, 2, 3, *slow(4, 8)])
def test_any_number_of_ranks(pes, few_blocks, n_ranks):
    calls = [[3, 0, 5, 1, 2, 0, 1, 4], [0] * 8, [1, 3, 3, 2, 0, 0, 5, 1]]
    pes(n_ranks).run(route, [tokens[:n_ranks] for tokens in calls], 2, 2, ("random",))


@pytest.mark.every(2)
@LATE
@pytest.mark.parametrize(
    "kind", ["some have none", "one expert", *slow("random", "an expert without tokens", "none")]
)
def test_skewed_routings(pes, few_blocks, kind):
    pes(2).run(route, [[5, 2], [3, 7]], 2, 3, (kind, "random"))


@LATE
def test_all_experts_of_every_token(pes, few_blocks):
    pes(2).run(route, [[3, 4]], 3, 6, ("all experts",))


@pytest.mark.parametrize(
    "dtype, index", [("float16", "int64"), ("bfloat16", "int32"), *slow(("float32", "int64"))]
)
def test_dtypes(pes, few_blocks, dtype, index):
    pes(2).run(route, [[5, 3]], 2, 3, ("some have none",), dtype, index)


@pytest.mark.slow
def test_many_experts_and_blocks_that_count(pes):
    """More experts than a warp adds up at once; counts of more blocks than a thread loads at once."""
    pes(1, gpu="H200,sms=24").run(route, [[44]], 40, 3, ("random",))


def test_a_row_of_more_than_a_warp_loads_at_once(pes, few_blocks):
    def main():
        world = sk.init()
        hidden = 4 * 32 * 4 + 20
        of_all = [tokens_of(0, r, 2, 4, 3, hidden=hidden) for r in range(2)]
        x, experts, weights = of_all[world.rank]
        ep = sk.ExpertParallel(world, 2, hidden, 4, 3, "float32", max_rows=12)
        received = ep.dispatch(x.astype("float32"), experts, weights)
        world.synchronize()
        mine = range(2 * world.rank, 2 * world.rank + 2)
        check_received(received, of_all, mine)
        out = ep.combine(through(received, mine, "float32"))
        world.synchronize()
        np.testing.assert_array_equal(out, combined(x, experts, weights, 4))

    pes(2).run(main)


@LATE
def test_exactly_as_many_rows_as_there_is_room_for(pes, few_blocks):
    pes(2).run(route, [[4, 3]], 2, 2, ("one expert",), "float32", "int32", 7)


def test_more_rows_than_there_is_room_for(pes, few_blocks):
    """Rank 1 would receive 7: each rank says so, though rank 0 has room."""
    text = "ExpertParallel: rank 1 would receive 7 rows, more than max_rows=6. Nothing was sent"
    with pytest.raises(EmulatorError, match=text):
        pes(2).run(route, [[4, 3]], 2, 2, ("one expert",), "float32", "int32", 6)


def test_more_rows_than_a_group_has_room_for(pes):
    """Reports name ranks of the World."""

    def main():
        group = sk.init().group([2, 0])
        if group is not None:
            ep = sk.ExpertParallel(group, 4, HIDDEN, 4, 2, "float32", max_rows=2, options=TWO_WARPS)
            x, experts, weights = tokens_of(0, group.rank, 4, 4, 2)
            ep.dispatch(x.astype("float32"), 2 + experts % 2, weights)
            group.synchronize()

    with pytest.raises(EmulatorError, match="ExpertParallel: rank 0 would receive 12 rows"):
        pes(3).run(main)


def test_nothing_is_written_then(mutate, pes, few_blocks):
    """As on a GPU, where the kernel goes on: counts are 0, combine gives zeros; the next call is right."""
    mutate(plan, omit("report_rows"))

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        ep = sk.ExpertParallel(world, 4, HIDDEN, 4, 2, "float32", max_rows=6, options=TWO_WARPS)
        ep.received.rows[:], ep.received.weights[:] = 77, 77
        x, experts, weights = tokens_of(0, me, 4, 4, 2, "one expert")
        received = ep.dispatch(x.astype("float32"), experts, weights)
        out = ep.combine(received.rows)
        handle = ep.keep()
        ep.dispatch(x.astype("float32"), handle=handle)
        world.synchronize()
        assert (received.rows == 77).all() and (received.weights == 77).all() and not received.counts.any()
        assert not out.any()
        of_all = [tokens_of(1, r, 1, 4, 2) for r in range(n)]
        x, experts, weights = of_all[me]
        ep.dispatch(x.astype("float32"), experts, weights)
        world.synchronize()
        check_received(received, of_all, range(2 * me, 2 * me + 2))

    pes(2).run(main)


@pytest.mark.slow
@LATE
def test_bytes_with_scales(pes, few_blocks):
    """As fp8: what the experts return is bfloat16."""

    def main(tokens):
        world = sk.init()
        n, me = world.n_ranks, world.rank
        sizes = 5, 32, 2 * n, 2, "bfloat16", "uint8", 37
        ep = sk.ExpertParallel(world, *sizes, max_rows=30, options=TWO_WARPS)
        mine = range(2 * me, 2 * me + 2)
        for call in range(2):
            of_all = [tokens_of(call, r, tokens[r], 2 * n, 2, hidden=32) for r in range(n)]
            scales = [np.tile(x, 2)[:, :37].astype("float32") / 8 for x, _, _ in of_all]
            x, experts, weights = of_all[me]
            received = ep.dispatch(x.astype("uint8"), experts, weights, scales[me])
            world.synchronize()
            count = check_received(received, [(a & 255, e, w) for a, e, w in of_all], mine)
            came = [scales[r][t] for of_expert in rows_for(of_all, mine) for r, t in of_expert]
            assert len(came) == count
            np.testing.assert_array_equal(received.scales[:count], np.reshape(came, (count, 37)))
            out = ep.combine(received.rows.view("int8").astype(as_dtype("bfloat16")))
            world.synchronize()
            np.testing.assert_array_equal(out.astype("float64"), weights.sum(axis=1)[:, None] * x)

    pes(3).run(main, [3, 0, 5])


@pytest.mark.slow
def test_a_layer_of_float8(pes, few_blocks):
    """Rows and scales as they arrive are what a grouped product of float8 takes."""

    def main():
        world = sk.init()
        n, me, float8 = world.n_ranks, world.rank, as_dtype("float8_e4m3fn")
        ep = sk.ExpertParallel(world, 3, 128, n, 2, "bfloat16", "uint8", 1, max_rows=3 * n)
        x, experts, weights = tokens_of(0, me, 3, n, 2, hidden=128)
        scales = np.array([[0.5], [1], [2]], "float32")
        received = ep.dispatch(x.astype(float8).view("uint8"), experts, weights, scales)
        w = np.random.default_rng(me).integers(-1, 2, (1, 128, 128))
        of_w = np.full((1, 1, 1), 2, "float32")
        rows = received.rows.view(float8)
        y = sk.grouped_matmul(rows, w.astype(float8), received.counts, scales=(received.scales, of_w))
        out = ep.combine(y)
        world.synchronize()
        of_all = [2 * of_rank[0].T for of_rank in world.host_allgather(w)]
        for t in range(3):
            wanted = sum(
                weight * (scales[t] * (x[t] @ of_all[e])).astype(y.dtype).astype("float32")
                for e, weight in zip(experts[t], weights[t], strict=True)
            )
            np.testing.assert_allclose(out[t].astype("float32"), wanted, rtol=2**-7, atol=0.5)

    pes(2).run(main)


def test_an_expert_named_twice_counts_twice_in_the_sum(pes):
    def main():
        world = sk.init()
        ep = sk.ExpertParallel(world, 2, 4, 2, 2, "float32", max_rows=4)
        x = np.full((2, 4), 3 + world.rank, "float32")
        received = ep.dispatch(x, np.array([[1, 1], [0, 1]], "int32"), np.array([[1, 2], [4, 8]], "float32"))
        world.synchronize()
        assert received.counts.tolist() == [[2], [4]][world.rank]
        assert received.weights[: [2, 4][world.rank]].tolist() == [[4, 4], [3, 8, 3, 8]][world.rank]
        out = ep.combine(received.rows)
        world.synchronize()
        np.testing.assert_array_equal(out, x * [[3], [12]])

    pes(2).run(main)


@pytest.mark.slow
@LATE
@pytest.mark.parametrize("n_ranks", [2, *slow(3)])
def test_backward_is_the_transpose(pes, few_blocks, n_ranks):
    """<dispatch(x), g> = <x, combine(g) unweighted>; <combine(y), d> = <y, dispatch(d) * weights>; by a
    routing that was kept, after other dispatches."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        ep = sk.ExpertParallel(world, 3, HIDDEN, 2 * n, 3, "float32", max_rows=9 * n)
        rng = np.random.default_rng(me)
        layers = []
        for call in range(2):
            x, experts, weights = tokens_of(call, me, 3 - (me + call) % 3, 2 * n, 3, "some have none")
            received = ep.dispatch(x.astype("float32"), experts, weights)
            world.synchronize()
            rows, count = received.rows.copy(), received.counts.sum()
            y, g = (rng.integers(-3, 4, rows.shape).astype("float32") for _ in range(2))
            out = ep.combine(y)
            layers.append((x, experts, weights, rows, y, g, out, count, ep.keep()))
        for x, experts, weights, rows, y, g, out, count, handle in reversed(layers):
            d = rng.integers(-3, 4, out.shape).astype("float32")
            assert handle.tokens == len(x)
            of_d = ep.dispatch(d, handle=handle)
            world.synchronize()
            y_gradient = of_d.rows[:count] * of_d.weights[:count, None]
            assert of_d.counts.sum() == count
            values = np.full(len(y), np.nan, "float32")  # nobody reads what is behind
            values[:count] = (of_d.rows[:count] * y[:count]).sum(axis=1)
            nothing = np.zeros((0, HIDDEN), "float32"), np.zeros((0, 3), "int32")
            ep.dispatch(*nothing)  # another routing between
            weights_gradient = ep.combine_weights(values, handle=handle)
            x_gradient = ep.combine(g, handle=handle, weighted=False)
            world.synchronize()
            here = [
                (out * d).sum() - (y[:count] * y_gradient).sum(),
                (rows[:count] * g[:count]).sum() - (x * x_gradient).sum(),
            ]
            assert not weights_gradient[(experts < 0) | (experts >= 2 * n)].any()
            np.testing.assert_array_equal((weights * weights_gradient).sum(axis=1), (out * d).sum(axis=1))
            assert np.sum(world.host_allgather(here), axis=0).tolist() == [0, 0]
            again = ep.combine(y)  # of the handle's routing, which is the last one
            world.synchronize()
            np.testing.assert_array_equal(again, out)
        assert layers[0][-1] is ep.keep(layers[0][-1])

    pes(n_ranks).run(main)


@LATE
@pytest.mark.slow
def test_graphs(pes, few_blocks):
    """One graph of a dispatch, a combine and the backward pass; other tokens and experts at each launch."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        ep = sk.ExpertParallel(world, 4, HIDDEN, 2 * n, 2, "float32", max_rows=8 * n, options=TWO_WARPS)
        x, experts = np.zeros((3, HIDDEN), "float32"), np.zeros((3, 2), "int32")
        weights, out, back = np.ones((3, 2), "float32"), np.zeros_like(x), np.zeros_like(x)
        ep.dispatch(x, experts, weights)
        handle = ep.keep()
        world.stream.begin_capture()
        rows = ep.dispatch(x, experts, weights).rows
        ep.keep(handle)
        ep.combine(rows, out)
        ep.dispatch(out, handle=handle)
        ep.combine(rows, back, handle=handle, weighted=False)
        graph = world.stream.end_capture()
        for call in range(3):
            x[:], experts[:], weights[:] = tokens_of(call, me, 3, 2 * n, 2, "some have none")
            graph.launch(world.stream)
            world.synchronize()
            valid = (0 <= experts) & (experts < 2 * n)
            wanted = (weights * valid).sum(axis=1)[:, None] * x
            np.testing.assert_array_equal(out, wanted)
            np.testing.assert_array_equal(back, valid.sum(axis=1)[:, None] * wanted)

    pes(2).run(main)


@pytest.mark.parametrize("max_rows", [None, 12])
def test_out_of_fewer_tokens_after_a_capture(pes, few_blocks, max_rows):
    """The host does not know the last dispatch then; nothing is written behind the end of out."""

    def main():
        world = sk.init()
        ep = sk.ExpertParallel(world, 6, HIDDEN, 2, 2, "float32", max_rows=max_rows)
        x, experts = np.ones((6, HIDDEN), "float32"), np.tile(np.arange(2), (6, 1))
        ep.dispatch(x, experts)
        world.stream.begin_capture()
        ep.dispatch(x, experts)
        world.stream.end_capture()
        memory = np.full((6, HIDDEN), 77, "float32")
        ep.combine(ep.received.rows, memory[:4])
        world.synchronize()
        assert (memory[:4] == 2).all() and (memory[4:] == 77).all()

    pes(1).run(main)


@pytest.mark.parametrize("max_rows", [None, 12])
def test_sms_bound_the_blocks(pes, monkeypatch, max_rows):
    grids, launch = [], Method.launch

    def noted(self, kernel, grid, *args, **options):
        grids.append(grid)
        return launch(self, kernel, grid, *args, **options)

    monkeypatch.setattr(Method, "launch", noted)

    def main():
        world = sk.init()
        ep = sk.ExpertParallel(world, 6, HIDDEN, 2, 2, "float32", max_rows=max_rows, sms=3)
        x = np.ones((6, HIDDEN), "float32")
        out = ep.combine(ep.dispatch(x, np.tile(np.arange(2), (6, 1))).rows)
        world.synchronize()
        np.testing.assert_array_equal(out, 2 * x)

    pes(1).run(main)
    assert max(grids) == 3


def test_wrong_calls(pes):
    def main():
        world = sk.init()
        sizes = 4, 8, 2, 2, "float32"
        fixed = sk.ExpertParallel(world, *sizes)
        ep, other = (sk.ExpertParallel(world, *sizes, max_rows=16) for _ in range(2))
        x, experts, y = np.zeros((3, 8), "float32"), np.zeros((3, 2), "int32"), np.zeros((16, 8), "float32")
        with pytest.raises(ValueError, match=r"keep\(\) before any dispatch"):
            ep.keep()
        ep.dispatch(x, experts)
        other.dispatch(x, experts)
        handle = ep.keep()
        for call, arguments, options, message in [
            (fixed.keep, (), {}, r"keep\(\) needs max_rows, which is None"),
            (fixed.combine_weights, (y[:, 0],), {}, r"combine_weights\(\) needs max_rows"),
            (fixed.dispatch, (x,), {"handle": handle}, "handle is a shmemkit.moe.Handle; it must be one"),
            (fixed.combine, (np.zeros((1, 8, 8), "float32"), x), {"weighted": False}, "weighted is False"),
            (
                other.dispatch,
                (x,),
                {"handle": handle},
                r"it must be one that keep\(\) of this object has",
            ),
            (ep.dispatch, (x, experts), {"handle": handle}, "topk_ids and weights must be None"),
            (ep.dispatch, (x[:2],), {"handle": handle}, "x has 2 tokens; it must have 3, as the handle"),
            (ep.combine, (y, x[:2]), {"handle": handle}, "out has 2 tokens; it must have 3, as the handle"),
            (
                ep.combine_weights,
                (y.ravel()[:16], x[:2, :2].copy()),
                {},
                "out has 2 tokens; it must have 3, as the last",
            ),
            (
                ep.combine_weights,
                (y.ravel()[:16], x[:2, :2].copy()),
                {"handle": handle},
                "must have 3, as the handle",
            ),
            (ep.keep, (3,), {}, "handle is 3; it must be one"),
            (ep.combine, (y[:8], x), {}, r"y is float32 \(8, 8\); it must be float32 \(16, 8\)"),
            (ep.combine_weights, (y[0],), {}, r"values is float32 \(8,\); it must be float32 \(16,\)"),
        ]:
            with pytest.raises(ValueError, match=message):
                call(*arguments, **options)
        for wrong, message in [
            ({"max_rows": 0}, "max_rows is 0; it must be 1 to 2147483647"),
            ({"sms": 1}, "sms is 1; it must be 2"),
            ({"max_rows": 8 + world.rank}, "rank 0 gives max_rows=8, rank 1 gives max_rows=9"),
            ({"max_rows": 8, "options": {"threads": 544}}, "threads is 544; it must be 32 to 512"),
        ]:
            with pytest.raises(ValueError, match=message):
                sk.ExpertParallel(world, *sizes, **wrong)

    pes(2).run(main)


def weights_back(calls):
    """The numbers of rows are their weights: each comes back to where it was."""
    world = sk.init()
    n, me = world.n_ranks, world.rank
    ep = sk.ExpertParallel(world, 3, HIDDEN, 2 * n, 2, "float32", max_rows=6 * n)
    for call in range(calls):
        x, experts, weights = tokens_of(call, me, 3 - (me + call) % 2, 2 * n, 2, "some have none")
        received = ep.dispatch(x.astype("float32"), experts, weights)
        for factor in (1, 2):
            received.weights[:] *= factor
            back = ep.combine_weights(received.weights)
            world.synchronize()
            valid = (0 <= experts) & (experts < 2 * n)
            np.testing.assert_array_equal(back, np.where(valid, factor * weights, 0))


@LATE
def test_a_number_of_each_row_comes_back(pes, few_blocks):
    pes(2).run(weights_back, 2)


# ---- all schedules


def few_calls(calls):
    """Of few blocks, of one warp, and one token, of rank 0 for rank 1. Each "d" in `calls` is a dispatch, "c"
    a combine, "h" a dispatch with a handle."""
    world = sk.init()
    me = world.rank
    ep = sk.ExpertParallel(world, 1, 4, 2, 1, "float32", max_rows=1)
    x, experts = np.zeros((1 - me, 4), "float32"), np.ones((1 - me, 1), "int32")
    out, rows, handle = np.zeros_like(x), ep.received.rows, None
    for number, call in enumerate(calls):
        if call == "c":
            rows[:me] = number
            ep.combine(rows, out)
        else:
            x[:] = number
            ep.dispatch(x, None if call == "h" else experts, handle=handle if call == "h" else None)
            handle = ep.keep(handle)
        world.synchronize()
        assert ep.received.counts[0] == me
        assert (rows[:me] == number).all() and (call != "c" or (out == number).all())
    ep.free()


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["ddd", "dcc", "dhc"])
def test_right_in_every_schedule(monkeypatch, calls):
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=1")
    found = sk.emu.explore(few_calls, 2, (calls,), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


# ---- each step is needed


CHANGES = [
    (plan, omit("notify", 1)),
    (plan, omit("wait", 1)),
    (dispatch, omit("notify", 1)),
    (dispatch, omit("wait", 1)),
    (dispatch, argument("wait", 4, "epoch - 1")),
    (combine, omit("notify", 1)),
    (combine, omit("wait", 1)),
    (combine, omit("cuda.syncwarp", 1)),
    (combine, omit("cuda.syncwarp", 2)),
    (combine, omit("cp_async_wait", 1)),
    (ragged, omit("agree", 1, inside="Ragged.bind_weights.run")),
    (ragged, omit("agree", 2, inside="Ragged.bind_weights.run")),
]


def is_wrong():
    calls, options = [[3, 2], [2, 3], [1, 3]], {"races": True, "delivery": "unordered", "seed": 0}
    routed = goes_wrong(sk.emu.run, route, 2, (calls, 1, 2, ("random",)), **options)
    return routed or goes_wrong(sk.emu.run, weights_back, 2, (2,), **options)


@pytest.mark.parametrize("change", CHANGES)
def test_each_step_is_needed(mutate, few_blocks, change):
    mutate(*change)
    assert is_wrong()


def test_nothing_is_wrong_otherwise(few_blocks):
    assert not is_wrong()
