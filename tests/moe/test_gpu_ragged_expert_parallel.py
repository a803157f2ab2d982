"""ExpertParallel with max_rows on GPUs: ``mpirun -n 4 python3 -m pytest -m gpu -k
test_gpu_ragged_expert_parallel``, 1 and 2 too."""

import numpy as np
import pytest
from gpu import on_gpus

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.ranks
CALLS, TOKENS, HIDDEN = on_gpus((500, 300, 1024), (4, 4, 16))


def tokens_of(call, rank, tokens, n_experts, top_k, hidden):
    """-> x, experts, weights of a rank in `call`: whole numbers, whose sums are exact."""
    rng = np.random.default_rng([call, rank])
    x = rng.integers(-3, 4, (tokens, hidden), "int8")
    experts = rng.random((tokens, n_experts)).argsort(axis=1)[:, :top_k].astype("int32")
    experts[rng.random(experts.shape) < 0.1] = -1
    return x, experts, rng.integers(1, 3, experts.shape).astype("float32")


def received_rows(of_all, first, n_local):
    """-> rows, and how many each of the local experts has"""
    found = [
        [x[(experts == e).any(axis=1)] for x, experts, _ in of_all] for e in range(first, first + n_local)
    ]
    counts = [sum(map(len, of_expert)) for of_expert in found]
    return np.concatenate([rows for of_expert in found for rows in of_expert]), counts


@pytest.mark.gpu("test_ragged_expert_parallel.py has other sizes")
@pytest.mark.parametrize(
    "tokens, hidden, n_local, top_k, dtype, sms",
    [
        (4096, 7168, 64, 8, "bfloat16", None),
        (1000, 2048, 5, 4, "float16", 24),
        (77, 20, 1, 1, "float32", 2),
        (4096, 512, 3, 8, "float32", None),
    ],
)
def test_shapes(world, tokens, hidden, n_local, top_k, dtype, sms):
    n, me, xp, dtype = world.n_ranks, world.rank, world.xp, as_dtype(dtype)
    n_experts, top_k = n * n_local, min(top_k, n * n_local)
    max_rows = n * tokens * min(top_k, n_local) if n_local < 8 else 2 * tokens * top_k
    ep = sk.ExpertParallel(world, tokens, hidden, n_experts, top_k, dtype, max_rows=max_rows, sms=sms)
    for call in range(3):
        some = [tokens, *np.random.default_rng(call).integers(0, tokens + 1, n - 1)] if call else [tokens] * n
        of_all = [tokens_of(call, r, some[r], n_experts, top_k, hidden) for r in range(n)]
        x, experts, weights = of_all[me]
        received = ep.dispatch(*map(xp.asarray, (x.astype(dtype), experts, weights)))
        wanted, counts = received_rows(of_all, me * n_local, n_local)
        assert world.asnumpy(received.counts).tolist() == counts
        y = received.rows.copy()
        assert not (y[: len(wanted)].view("uint8") != xp.asarray(wanted.astype(dtype).view("uint8"))).any()
        y.view("uint8")[len(wanted) :] = 255  # NaN
        out = world.asnumpy(ep.combine(y)).astype("float32")
        np.testing.assert_array_equal(out, (weights * (experts >= 0)).sum(axis=1)[:, None] * x)
    ep.free()


def test_bytes_with_scales(world):
    n, me, xp = world.n_ranks, world.rank, world.xp
    tokens, hidden, n_scales = on_gpus((512, 7168, 56), (6, 32, 2))
    sizes = tokens, hidden, 8 * n, 4, "bfloat16", "uint8", n_scales
    ep = sk.ExpertParallel(world, *sizes, max_rows=n * tokens * 4)
    of_all = [tokens_of(0, r, tokens, 8 * n, 4, hidden) for r in range(n)]
    scales = [x[:, :n_scales].astype("float32") / 8 for x, _, _ in of_all]
    x, experts, weights = of_all[me]
    received = ep.dispatch(*map(xp.asarray, (x.view("uint8"), experts, weights, scales[me])))
    wanted, counts = received_rows(of_all, 8 * me, 8)
    came, _ = received_rows([(s, *rest[1:]) for s, rest in zip(scales, of_all, strict=True)], 8 * me, 8)
    assert world.asnumpy(received.counts).tolist() == counts
    np.testing.assert_array_equal(world.asnumpy(received.rows[: len(wanted)]).view("int8"), wanted)
    np.testing.assert_array_equal(world.asnumpy(received.scales[: len(wanted)]), came)
    ep.free()


@pytest.mark.gpu("the emulator ends with the first error of a kernel")
def test_too_many_rows_raise_on_all_ranks_and_write_nothing(world):
    n, me, xp = world.n_ranks, world.rank, world.xp
    t, hidden = on_gpus((64, 256), (4, 16))
    ep = sk.ExpertParallel(world, t, hidden, 2 * n, 2, "float32", max_rows=t * n - 1)
    x, experts = xp.ones((t, hidden), "float32"), xp.zeros((t, 2), "int32")
    experts[:, 1] = -1
    ep.received.rows[:] = 77
    ep.dispatch(x, experts)
    out = ep.combine(ep.received.rows)
    with pytest.raises(
        ValueError, match=f"rank 0 would receive {t * n} rows, more than max_rows={t * n - 1}"
    ):
        world.synchronize()
    assert not (ep.received.rows != 77).any() and not out.any() and not ep.received.counts.any()
    experts[:1, 0] = -1
    out = ep.combine(ep.dispatch(x, experts).rows)
    assert int(world.asnumpy(ep.received.counts).sum()) == ((t - 1) * n if me == 0 else 0)
    assert not world.asnumpy(out)[0].any() and (world.asnumpy(out)[1:] == 1).all()
    ep.free()


def test_many_calls_in_graphs_with_kept_routings(world):
    """Forward and backward in one graph; other routings each time, now and then from the host."""
    n, me, xp = world.n_ranks, world.rank, world.xp
    ep = sk.ExpertParallel(world, TOKENS, HIDDEN, 4 * n, 4, "float32", max_rows=n * TOKENS * 4)
    x, experts = xp.zeros((TOKENS, HIDDEN), "float32"), xp.zeros((TOKENS, 4), "int32")
    weights, out, back = xp.ones((TOKENS, 4), "float32"), xp.empty_like(x), xp.empty_like(x)
    handle = None

    def both():
        rows = ep.dispatch(x, experts, weights).rows
        ep.keep(handle)
        ep.combine(rows, out)
        ep.dispatch(out, handle=handle)
        ep.combine(rows, back, handle=handle, weighted=False)

    ep.dispatch(x, experts, weights)
    handle = ep.keep()
    both()
    world.synchronize()
    world.stream.begin_capture()
    both()
    graph = world.stream.end_capture()
    sets = [tokens_of(which, me, TOKENS, 4 * n, 4, HIDDEN) for which in range(5)]
    on_gpu = [tuple(map(xp.asarray, of_set)) for of_set in sets]
    wrong = xp.zeros(1, "int64")
    for call in range(CALLS):
        of_set = on_gpu[call % 5]
        x[:], experts[:], weights[:] = of_set
        graph.launch(world.stream) if call % 7 else both()
        valid = experts >= 0
        wanted = (weights * valid).sum(axis=1)[:, None] * x
        wrong += (out != wanted).sum() + (back != valid.sum(axis=1)[:, None] * wanted).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    ep.free()


def test_the_same_bits_in_every_run(world):
    n, me, xp = world.n_ranks, world.rank, world.xp
    rng = np.random.default_rng(me)
    tokens, hidden = on_gpus((1024, 2048), (4, 32))
    x = rng.standard_normal((tokens, hidden)).astype(as_dtype("bfloat16"))
    experts = rng.random((tokens, 8 * n)).argsort(axis=1)[:, :8].astype("int32")
    weights = rng.random((tokens, 8)).astype("float32")
    ep = sk.ExpertParallel(world, tokens, hidden, 8 * n, 8, "bfloat16", max_rows=n * tokens * 8)
    bits = set()
    for _ in range(on_gpus(20, 3)):
        found = world.asnumpy(ep.combine(ep.dispatch(*map(xp.asarray, (x, experts, weights))).rows))
        bits.add(found.tobytes())
    assert len(bits) == 1
    wanted = weights.astype("float64").sum(axis=1)[:, None] * x.astype("float64")
    assert np.linalg.norm(found.astype("float64") - wanted) <= 4e-3 * np.linalg.norm(wanted)
    ep.free()


@pytest.mark.gpu("measures")
def test_bench(world):
    from shmemkit.bench.__main__ import measure, parse

    arguments = "expert_parallel --tokens 512 --hidden 1024 --experts 64 --max-rows 8192 --replays 3".split()
    found = measure(world, parse(arguments))
    assert not found.failed, [row.note for row in found.rows if row.wrong]
    for row in found.rows:
        assert row.us or row.note.startswith("refused")
        assert row.us or row.method != "ExpertParallel"
