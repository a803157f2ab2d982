"""ExpertParallel on GPUs: ``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_expert_parallel``, 1 and 2
too."""

import numpy as np
import pytest
from gpu import on_gpus
from small_kernels import spin

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.ranks
CALLS, REPEATS = on_gpus((2000, 30), (8, 4))
TOKENS, HIDDEN = on_gpus((64, 512), (6, 16))


def tokens_of(call, rank, tokens, n_experts, top_k, hidden):
    """-> x, experts, weights of a rank in `call`: whole numbers, whose sums are exact."""
    rng = np.random.default_rng([call, rank])
    x = rng.integers(-3, 4, (tokens, hidden))
    experts = rng.random((tokens, n_experts)).argsort(axis=1)[:, :top_k].copy()
    experts[rng.random(experts.shape) < 0.1] = -1
    return x, experts, rng.integers(1, 3, experts.shape).astype("float32")


def received_rows(of_all, expert):
    return np.concatenate([x[(experts == expert).any(axis=1)] for x, experts, _ in of_all])


@pytest.mark.gpu("test_expert_parallel.py has other sizes")
@pytest.mark.parametrize(
    "hidden, n_local, top_k, dtype, index",
    [
        (7168, 8, 8, "bfloat16", "int64"),
        (256, 3, 4, "float16", "int32"),
        (20, 1, 1, "float32", "int32"),
        (2048, 16, 6, "float32", "int64"),
    ],
)
def test_shapes(world, hidden, n_local, top_k, dtype, index):
    n, me, xp, dtype = world.n_ranks, world.rank, world.xp, as_dtype(dtype)
    n_experts, top_k = n * n_local, min(top_k, n * n_local)
    ep = sk.ExpertParallel(world, 200, hidden, n_experts, top_k, dtype)
    first = me * n_local
    for call in range(6):
        tokens = np.random.default_rng(call).integers(0, 201, n) * (call != 3)
        of_all = [tokens_of(call, r, tokens[r], n_experts, top_k, hidden) for r in range(n)]
        x, experts, weights = of_all[me]
        received = ep.dispatch(
            xp.asarray(x.astype(dtype)), xp.asarray(experts.astype(index)), xp.asarray(weights)
        )
        counts, rows = world.asnumpy(received.counts), world.asnumpy(received.rows).astype("float32")
        for local in range(n_local):
            wanted = received_rows(of_all, first + local)
            assert counts[local] == len(wanted)
            np.testing.assert_array_equal(rows[local, : len(wanted)], wanted)
        y = rows * (1 + (first + np.arange(n_local)) % 2)[:, None, None]
        out = world.asnumpy(ep.combine(xp.asarray(y.astype(dtype))))
        factors = (weights * np.where(experts >= 0, 1 + experts % 2, 0)).sum(axis=1)
        np.testing.assert_array_equal(out.astype("float32"), factors[:, None] * x)
    ep.free()


def test_calls_of_ranks_that_are_apart(world):
    """Now and then a rank is late; each result is checked, on the GPU."""
    n, me, xp, delay = world.n_ranks, world.rank, world.xp, np.random.default_rng(world.rank)
    ep = sk.ExpertParallel(world, TOKENS, HIDDEN, 4 * n, 4, "float32")
    sets = [
        tokens_of(which, me, tokens, 4 * n, 4, HIDDEN)
        for which, tokens in enumerate((TOKENS, 1, 0, TOKENS // 4 + me, TOKENS))
    ]
    sets = [(x.astype("float32"), e, w) for x, e, w in sets]
    on_gpu = [tuple(xp.asarray(array) for array in arrays) for arrays in sets]
    factors = [xp.asarray((w * (e >= 0)).sum(axis=1)[:, None]) for _, e, w in sets]
    wrong = xp.zeros(1, "int64")
    for call in range(CALLS):
        if delay.random() < 0.05:
            spin[1, 1, world.stream](int(delay.integers(1000, on_gpus(300_000, 20_000))))
        which = (7 * call) % len(sets)
        x, experts, weights = on_gpu[which]
        x = x + call % 50
        received = ep.dispatch(x, experts, weights)
        out = ep.combine(received.rows)
        wrong += (out != factors[which] * x).sum()
        if call % 7 == 0:
            wrong += (ep.combine(received.rows) != out).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    ep.free()


def test_graphs_interleaved(world):
    n, me, xp = world.n_ranks, world.rank, world.xp
    tokens, hidden = TOKENS // 2, 2 * HIDDEN
    ep = sk.ExpertParallel(world, tokens, hidden, 2 * n, 2, "bfloat16")
    xs = [xp.asarray(np.zeros((tokens, hidden), ep.sizes.dtype)) for tokens in (tokens, 2)]
    tables = [xp.zeros((len(x), 2), "int32") for x in xs]
    outs = [xp.empty_like(x) for x in xs]
    graphs = []
    for x, experts, out in zip(xs, tables, outs, strict=True):
        ep.combine(ep.dispatch(x, experts).rows, out)
        world.synchronize()
        world.stream.begin_capture()
        for _ in range(3):
            ep.combine(ep.dispatch(x, experts).rows, out)
        graphs.append(world.stream.end_capture())
    for repeat in range(REPEATS):
        which = repeat % 2
        x, experts, out = xs[which], tables[which], outs[which]
        given, routed, _ = tokens_of(repeat, me, len(x), 2 * n, 2, hidden)
        x[...] = xp.asarray(given.astype(ep.sizes.dtype))
        experts[...] = xp.asarray(routed.astype("int32"))
        if repeat % 5:
            graphs[which].launch(world.stream)
        else:
            ep.combine(ep.dispatch(x, experts).rows, out)
        wanted = (routed >= 0).sum(axis=1)[:, None] * given
        np.testing.assert_array_equal(world.asnumpy(out).astype("float32"), wanted)
    ep.free()


def test_two_objects_on_two_streams(world):
    """Calls run in the order of the host's, the same on all ranks; now one stream is late, now the other."""
    n, me, xp = world.n_ranks, world.rank, world.xp
    order, delays = np.random.default_rng(0), np.random.default_rng(me)
    x, experts, weights = tokens_of(0, me, TOKENS, 4 * n, 4, HIDDEN)
    given = [xp.asarray(array) for array in (x.astype("float32"), experts, weights)]
    wanted = xp.asarray((weights * (experts >= 0)).sum(axis=1)[:, None] * x)
    eps = [sk.ExpertParallel(world, TOKENS, HIDDEN, 4 * n, 4, "float32") for _ in range(2)]
    streams = [world.backend.new_stream() for _ in eps]
    outs = [xp.empty_like(given[0]) for _ in eps]
    late = sk.bind(spin, 1, 1, (1000,))
    world.synchronize()
    for _ in range(on_gpus(300, 3)):
        for which in order.permutation(2).tolist():
            if delays.random() < 0.3:
                late.with_args(int(delays.integers(1000, on_gpus(200_000, 20_000))))(stream=streams[which])
            received = eps[which].dispatch(*given, stream=streams[which])
            eps[which].combine(received.rows, outs[which], stream=streams[which])
    for ep, stream, out in zip(eps, streams, outs, strict=True):
        stream.synchronize()
        np.testing.assert_array_equal(world.asnumpy(out), world.asnumpy(wanted))
        ep.free()


def test_bytes_with_scales(world):
    n, me, xp = world.n_ranks, world.rank, world.xp
    tokens, hidden, n_scales = on_gpus((128, 7168, 56), (6, 32, 2))
    ep = sk.ExpertParallel(world, tokens, hidden, 8 * n, 4, "bfloat16", "uint8", n_scales)
    of_all = [tokens_of(0, r, tokens, 8 * n, 4, hidden) for r in range(n)]
    scales = [x[:, :n_scales].astype("float32") / 8 for x, _, _ in of_all]
    x, experts, weights = of_all[me]
    given = x.astype("int8").view("uint8"), experts, weights, scales[me]
    received = ep.dispatch(*map(xp.asarray, given))
    counts, rows = world.asnumpy(received.counts), world.asnumpy(received.rows).view("int8")
    came = world.asnumpy(received.scales)
    of_scales = [(s, *rest) for s, (_, *rest) in zip(scales, of_all, strict=True)]
    for local in range(8):
        assert counts[local] == len(wanted := received_rows(of_all, 8 * me + local))
        np.testing.assert_array_equal(rows[local, : len(wanted)], wanted)
        np.testing.assert_array_equal(came[local, : len(wanted)], received_rows(of_scales, 8 * me + local))
    ep.free()


@pytest.mark.parametrize("dtype, error", [("float16", 5e-4), ("bfloat16", 4e-3), ("float32", 1e-6)])
def test_close_to_float64_and_the_same_bits_in_every_run(world, dtype, error):
    n, me, xp = world.n_ranks, world.rank, world.xp
    rng = np.random.default_rng(me)
    tokens, hidden = on_gpus((128, 2048), (4, 32))
    x = rng.standard_normal((tokens, hidden)).astype(as_dtype(dtype))
    experts = rng.random((tokens, 8 * n)).argsort(axis=1)[:, :8].copy()
    weights = rng.random((tokens, 8)).astype("float32")
    ep = sk.ExpertParallel(world, tokens, hidden, 8 * n, 8, dtype)
    bits = set()
    for _ in range(on_gpus(50, 3)):
        out = ep.combine(ep.dispatch(*map(xp.asarray, (x, experts, weights))).rows)
        found = world.asnumpy(out)
        bits.add(found.tobytes())
    assert len(bits) == 1
    wanted = weights.astype("float64").sum(axis=1)[:, None] * x.astype("float64")
    difference = np.linalg.norm(found.astype("float64") - wanted)
    assert difference <= error * np.linalg.norm(wanted)
    ep.free()


@pytest.mark.gpu("measures")
def test_bench(world):
    from shmemkit.bench.__main__ import measure, parse

    found = measure(world, parse(["expert_parallel", "--tokens", "32", "--hidden", "1024", "--replays", "3"]))
    assert not found.failed, [row.note for row in found.rows if row.wrong]
    for row in found.rows:
        assert row.us or row.note.startswith("refused")
        assert row.us or row.method != "ExpertParallel"
