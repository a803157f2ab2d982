"""ExpertParallel on the emulator: ranks, tokens, experts, dtypes, repeats, streams and graphs, with races
checked and messages late."""

import numpy as np
import pytest
from fast import slow

import shmemkit as sk
from shmemkit.emu.stream import Stream
from shmemkit.moe import ExpertParallel
from shmemkit.moe.combine import Combine
from shmemkit.moe.routing import MAX_EXPERTS, SHIFT, reciprocal_of
from shmemkit.runtime.symmetric_memory import as_dtype

HIDDEN = 16


@pytest.fixture
def few_blocks(monkeypatch):
    """A block has several tokens."""
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=2")


TWO_WARPS = {"threads": 64}  # of a block: on the emulator, methods have one warp


def tokens_of(call, rank, tokens, n_experts, top_k, hidden=HIDDEN, missing=0.2):
    """-> x, experts, weights of a rank in `call`: whole numbers, whose sums are exact."""
    rng = np.random.default_rng([call, rank])
    x = rng.integers(-4, 5, (tokens, hidden))
    experts = np.zeros((tokens, top_k), "int64")
    for row in experts:
        row[:] = rng.permutation(n_experts)[:top_k]
    experts = np.where(rng.random(experts.shape) < missing, -1, experts)
    return x, experts, rng.integers(1, 4, experts.shape).astype("float32")


def check_received(received, of_all, first):
    """The local experts, from `first` on, have the rows of their tokens, by rank and token."""
    counts = received.counts.tolist()
    for local, count in enumerate(counts):
        wanted = [x[t] for x, experts, _ in of_all for t in range(len(x)) if first + local in experts[t]]
        assert count == len(wanted)
        if wanted:
            np.testing.assert_array_equal(received.rows[local, :count].astype("float64"), wanted)


def through(received, first):
    """What expert e makes of its rows: e + 1 times as much."""
    y = received.rows.copy()
    for local, count in enumerate(received.counts.tolist()):
        y[local, :count] *= y.dtype.type(first + local + 1)
        y[local, count:] = np.nan  # nobody reads them
    return y


def combined(x, experts, weights):
    factors = (weights * np.where(experts >= 0, experts + 1, 0)).sum(axis=1)
    return factors[:, None] * x


def route(calls, n_local, top_k, dtype="float32", index="int32", max_tokens=None, missing=0.2):
    """`calls`: for each, how many tokens each rank has, one after another, by one object."""
    world = sk.init()
    n, me = world.n_ranks, world.rank
    most = max_tokens or max(map(max, calls))
    ep = ExpertParallel(world, most, HIDDEN, n * n_local, top_k, dtype)
    first = me * n_local
    for call, tokens in enumerate(calls):
        of_all = [tokens_of(call, r, tokens[r], n * n_local, top_k, HIDDEN, missing) for r in range(n)]
        x, experts, weights = of_all[me]
        received = ep.dispatch(x.astype(as_dtype(dtype)), experts.astype(index), weights)
        world.synchronize()
        check_received(received, of_all, first)
        out = ep.combine(through(received, first))
        world.synchronize()
        assert out.shape == x.shape and out.dtype == as_dtype(dtype)
        wanted = combined(x, experts, weights)
        np.testing.assert_array_equal(out.astype("float64"), wanted.astype(out.dtype).astype("float64"))
    ep.free()
    with pytest.raises(RuntimeError, match="freed"):
        ep.dispatch(x, experts)


@pytest.mark.every(2)
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_ranks", [1, 2, *slow(3, 4)])
def test_any_number_of_ranks(pes, few_blocks, n_ranks):
    calls = [[3, 0, 2, 1], [0, 0, 0, 0], [1, 3, 3, 2], [2, 2, 0, 3]]
    pes(n_ranks).run(route, [tokens[:n_ranks] for tokens in calls], 2, 2)


@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_ranks, n_local, top_k", [*slow((8, 1, 4)), (2, 5, 3), (3, 1, 1)])
def test_ranks_and_experts(pes, few_blocks, n_ranks, n_local, top_k):
    tokens = (np.arange(n_ranks) + 1) % 3
    pes(n_ranks).run(route, [tokens.tolist(), tokens[::-1].tolist()], n_local, top_k)


@pytest.mark.slow
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
def test_blocks_with_several_tokens(pes, few_blocks):
    pes(2).run(route, [[7, 4], [0, 7]], 3, 4, "float32", "int64", 9)


@pytest.mark.slow
def test_more_experts_to_count_than_a_block_loads_at_once(pes):
    pes(1, gpu="H200,sms=24").run(route, [[40]], 5, 5)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype, index", [("float16", "int32"), ("bfloat16", "int64"), ("float32", "int64")])
def test_dtypes(pes, few_blocks, dtype, index):
    pes(2).run(route, [[2, 3], [3, 1]], 2, 3, dtype, index)


@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("expert", [0, 3, -1, 4, -7, 1 << 40])
def test_all_to_one_expert_or_to_none(pes, few_blocks, expert):
    """As many rows as there is room for; numbers that are no expert's."""

    def main():
        world = sk.init()
        ep = ExpertParallel(world, 3, 4, 4, 2, "float32")
        experts = np.full((3, 2), -1)
        experts[:, 1] = expert
        x = np.arange(12.0, dtype="float32").reshape(3, 4) + 100 * world.rank
        received = ep.dispatch(x, experts)
        world.synchronize()
        here = 2 * world.rank <= expert < 2 * world.rank + 2
        assert received.counts.tolist() == [6 * (here and expert % 2 == local) for local in range(2)]
        out = ep.combine(received.rows)
        world.synchronize()
        np.testing.assert_array_equal(out, x if 0 <= expert < 4 else 0 * x)

    pes(2).run(main)


def test_an_expert_named_twice_counts_twice_in_the_sum(pes):
    def main():
        world = sk.init()
        ep = ExpertParallel(world, 2, 4, 2, 2, "float32")
        x = np.full((2, 4), 3 + world.rank, "float32")
        experts = np.array([[1, 1], [0, 1]], "int32")
        received = ep.dispatch(x, experts, np.array([[1, 2], [4, 8]], "float32"))
        world.synchronize()
        assert received.counts.tolist() == [[2], [4]][world.rank]
        out = ep.combine(received.rows)
        world.synchronize()
        np.testing.assert_array_equal(out, x * [[3], [12]])

    pes(2).run(main)


@pytest.mark.schedules(deliveries="unordered", seeds=[0])
def test_bytes_with_scales(pes, few_blocks):
    """As fp8: what the experts return is bfloat16."""

    def main(tokens):
        world = sk.init()
        n, me = world.n_ranks, world.rank
        ep = ExpertParallel(world, 5, 32, 2 * n, 2, "bfloat16", "uint8", 131, options=TWO_WARPS)
        for call in range(2):
            of_all = [tokens_of(call, r, tokens[r], 2 * n, 2, 32) for r in range(n)]
            scales = [np.tile(x, 5)[:, :131].astype("float32") / 8 for x, _, _ in of_all]
            x, experts, weights = of_all[me]
            received = ep.dispatch(x.astype("uint8"), experts, weights, scales[me])
            world.synchronize()
            check_received(received, [((a & 255), e, w) for a, e, w in of_all], 2 * me)
            check_received(
                received._replace(rows=received.scales),
                [(s, *rest) for s, (_, *rest) in zip(scales, of_all, strict=True)],
                2 * me,
            )
            y = received.rows.view("int8").astype(as_dtype("bfloat16"))
            out = ep.combine(y)
            world.synchronize()
            wanted = (weights * (experts >= 0)).sum(axis=1)[:, None] * x
            np.testing.assert_array_equal(out.astype("float64"), wanted)
        with pytest.raises(TypeError, match="scales is None; it must be"):
            ep.dispatch(x.astype("uint8"), experts, weights)

    pes(2).run(main, [3, 0])


@pytest.mark.slow
def test_close_to_float64_and_the_same_bits_every_time(pes, few_blocks):
    """Rows of several tiles, the last one not full; more than a warp sends at once."""

    def main(dtype, error):
        world = sk.init()
        rng = np.random.default_rng(world.rank)
        x = rng.standard_normal((2, 600)).astype(as_dtype(dtype))
        experts = np.array([rng.permutation(8)[:6] for _ in range(2)])
        weights = rng.random((2, 6)).astype("float32")
        ep = ExpertParallel(world, 2, 600, 8, 6, dtype, options=TWO_WARPS)
        bits = set()
        for _ in range(2):
            out = ep.combine(ep.dispatch(x, experts, weights).rows)
            world.synchronize()
            bits.add(out.tobytes())
        assert len(bits) == 1
        wanted = weights.astype("float64").sum(axis=1)[:, None] * x.astype("float64")
        assert np.linalg.norm(out.astype("float64") - wanted) <= error * np.linalg.norm(wanted)

    for dtype, error in (("float16", 4e-4), ("bfloat16", 3e-3), ("float32", 1e-6)):
        pes(2).run(main, dtype, error)


def test_nan_and_inf_pass(pes):
    def main():
        world = sk.init()
        for dtype in ("float16", "bfloat16", "float32"):
            ep = ExpertParallel(world, 1, 8, 2, 2, dtype)
            x = np.array([[np.nan, np.inf, -np.inf, 1, 0, -0.0, 2, 3]], as_dtype(dtype))
            out = ep.combine(ep.dispatch(x, np.array([[1, 0]])).rows)
            world.synchronize()
            np.testing.assert_array_equal(out.astype("float32"), 2 * x.astype("float32"))

    pes(2).run(main)


@pytest.mark.slow
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
def test_streams_and_graphs(pes, few_blocks):
    """One graph of both; combine again, and dispatch without it; no host waits in between."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        ep = ExpertParallel(world, 4, 4, n, 2, "float32")
        other = Stream(world.stream.machine, me)
        x, experts, out = np.zeros((3, 4), "float32"), np.zeros((3, 2), "int64"), np.zeros((3, 4), "float32")
        again, more = np.zeros_like(out), np.ones_like(out)
        world.stream.begin_capture()
        rows = ep.dispatch(x, experts).rows
        other.wait_event(world.stream.record())
        ep.combine(rows, out, stream=other)
        world.stream.wait_event(other.record())
        graph = world.stream.end_capture()
        empty, none = np.zeros((0, 4), "float32"), np.zeros((0, 2), "int64")
        for call in range(3):
            x[:] = 10 * call + me + np.arange(3)[:, None]
            experts[:] = np.array([[0, 1], [1, 0], [call % n, -1]])
            graph.launch(world.stream)
            other.wait_event(world.stream.record())  # of a graph, the object knows nothing
            ep.combine(rows, again, stream=(None, other)[call % 2])
            ep.dispatch(empty, none)
            assert ep.combine(rows).shape == (0, 4)
            ep.combine(rows, more)  # of more tokens than were dispatched
            world.synchronize()
            np.testing.assert_array_equal(out, x * [[2], [2], [1]])
            np.testing.assert_array_equal(again, out)
            assert not more.any()

    pes(2).run(main)


def few_calls(calls):
    """Of one block of each kind, of one warp, and one token, of rank 0 for rank 1: little enough for all
    schedules. Each "d" in `calls` is a dispatch, and each "c" a combine."""
    world = sk.init()
    me = world.rank
    ep = ExpertParallel(world, 1, 4, 2, 1, "float32")
    x, experts = np.zeros((1 - me, 4), "float32"), np.ones((1 - me, 1), "int32")
    out, rows = np.zeros_like(x), ep.received.rows
    for number, call in enumerate(calls):
        if call == "d":
            x[:] = number
            assert ep.dispatch(x, experts).rows is rows
        else:
            rows[0, :me] = number
            ep.combine(rows, out)
        world.synchronize()
        assert ep.received.counts[0] == me
        assert (rows[0, :me] == number).all() and (call == "d" or (out == number).all())
    ep.free()


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["ddd", "dccc"])
def test_right_in_every_schedule(monkeypatch, calls):
    """The last call reuses the buffer of two calls before."""
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=1")
    found = sk.emu.explore(few_calls, 2, (calls,), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 16, 4, 2), "max_tokens is 0; it must be 1 to 65536"),
        ((8, 15, 4, 2), "hidden is 15, and a row of bfloat16 has 30 bytes; it must have a multiple of 16"),
        ((8, 8, 4, 2, "bfloat16", "uint8"), "a row of uint8 has 8 bytes"),
        ((8, 16, 5, 2), "n_experts is 5; it must be a multiple of 2, the ranks"),
        ((8, 16, 4, 33), "topk is 33; it must be 1 to 32"),
        ((8, 16, 4, 5), "topk is 5; it must be at most n_experts, 4"),
        ((8, 16, 4, 2, "int32"), "dtype is int32; it must be float16, bfloat16 or float32"),
        (
            (8, 16, 4, 2, "float16", "float32"),
            "dispatch_dtype is float32; it must be float16, the dtype, or uint8",
        ),
        ((1 << 16, 16, 1 << 16, 2), "n_experts is 65536; it must be 1 to 1024"),
        (
            (1 << 16, 1 << 20, 4, 2, "float32"),
            "hidden=1048576 and n_scales=0 take 2290876416 slots, of 480 bytes",
        ),
        (("8", 16, 4, 2), "max_tokens is '8'; it must be an integer"),
        (lambda rank: (8 + rank, 16, 4, 2), "rank 0 gives max_tokens=8, rank 1 gives max_tokens=9"),
        (lambda rank: (8, 16, 4, 2 - 2 * rank), "topk is 0; it must be 1 to 32"),
    ],
)
def test_wrong_arguments(pes, arguments, message):
    def main():
        world = sk.init()
        given = arguments(world.rank) if callable(arguments) else arguments
        with pytest.raises((TypeError, ValueError), match=message):
            ExpertParallel(world, *given)

    pes(2).run(main)


@pytest.mark.parametrize("threads", [0, 48, 288])
def test_wrong_options(pes, threads):
    def main():
        with pytest.raises(ValueError, match=f"threads is {threads}; it must be"):
            ExpertParallel(sk.init(), 8, 16, 4, 2, options={"threads": threads})

    pes(1).run(main)


def test_the_rank_of_an_expert_by_a_multiplication():
    for n_local in range(1, MAX_EXPERTS + 1):
        numbers = np.arange(MAX_EXPERTS)
        assert (numbers * reciprocal_of(n_local) >> SHIFT == numbers // n_local).all()
        assert MAX_EXPERTS * reciprocal_of(n_local) < 1 << 31


def test_several_nodes_are_refused(pes):
    def main():
        with pytest.raises(ValueError, match="expert_parallel cannot be used here"):
            ExpertParallel(sk.init(), 8, 16, 4, 2)

    pes(4, local_size=2).run(main)


def test_too_little_memory_on_one_rank(pes, monkeypatch):
    """All refuse, and free what they have: another object has the room."""
    prepare = Combine.prepare

    def prepare_or_fail(combine, sizes, source):
        prepare(combine, sizes, source)
        if combine.world.rank == 1 and sizes.topk == 2:
            raise MemoryError("no more of it")

    def main():
        world = sk.init()
        with pytest.raises(MemoryError, match="no more of it"):
            ExpertParallel(world, 200, 16, 2, 2, "float32")
        ExpertParallel(world, 200, 16, 2, 1, "float32").free()

    monkeypatch.setattr(Combine, "prepare", prepare_or_fail)
    pes(2, heap_size=1 << 20).run(main)


def test_wrong_calls(pes):
    """Beside the wrong arrays of tests/operations/test_declared.py."""

    def main():
        world = sk.init()
        ep = ExpertParallel(world, 4, 8, 4, 2, "float32")
        x, ids, y = np.zeros((3, 8), "float32"), np.zeros((3, 2), "int32"), np.zeros((2, 8, 8), "float32")
        for call, given, message in [
            (ep.combine, (y,), r"combine\(\): out is None before any dispatch; call dispatch, or give out"),
            (ep.dispatch, (x, ids.astype("uint8")), "topk_ids is uint8 .*; it must be int32 or int64"),
            (ep.dispatch, (x, ids, None, np.zeros((3, 1), "float32")), r"scales is .*\(3, 0\)"),
            (ep.dispatch, (x[:2], ids), r"topk_ids is int32 \(3, 2\); it must be \(2, 2\)"),
            (ep.dispatch, (np.zeros(25, "float32")[1:].reshape(3, 8), ids), "x begins at .*multiple of 16"),
            (ep.dispatch, (ep.received.rows[0, :3], ids), "Received.rows and x overlap"),
            (ep.combine, (y[:, :4].copy(), x), r"y is .*; it must be float32 \(2, 8, 8\)"),
        ]:
            with pytest.raises(ValueError, match=message):
                call(*given)
        with pytest.raises(TypeError, match="world is 3; it must be the World"):
            ExpertParallel(3, 4, 8, 4, 2)
        ep.dispatch(x, ids)
        with pytest.raises(ValueError, match="out has 2 tokens; it must have 3, as the last"):
            ep.combine(y, x[:2])

    pes(2).run(main)


def test_ranks_that_make_other_calls(pes):
    def main():
        ep = ExpertParallel(sk.init(), 1, 8, 2, 1, "float32")
        ep.dispatch(np.zeros((0, 8), "float32"), np.zeros((0, 1), "int32"))
        if ep.world.rank:
            ep.dispatch(np.zeros((0, 8), "float32"), np.zeros((0, 1), "int32"))
        else:
            ep.combine(ep.received.rows)

    with pytest.raises(
        ValueError, match="rank 0 calls ExpertParallel.combine.*, rank 1 calls ExpertParallel.dispatch"
    ):
        pes(2).run(main)


def test_old_names(pes):
    def main():
        with pytest.warns(DeprecationWarning, match="ExpertParallel: top_k is now topk"):
            ep = ExpertParallel(sk.init(), 1, 8, 2, top_k=1, dtype="float32")
        with pytest.warns(DeprecationWarning, match="ExpertParallel.dispatch: experts is now topk_ids"):
            ep.dispatch(np.zeros((1, 8), "float32"), experts=np.zeros((1, 1), "int32"))

    pes(1).run(main)
