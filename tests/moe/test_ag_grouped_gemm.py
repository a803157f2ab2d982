"""All-gather and grouped product on the emulator: routings of all kinds that change from call to call,
graphs, an index of several layers, errors, and what goes wrong without one of its waits, fences or
barriers."""

import numpy as np
import pytest
from emulated import spmd
from fast import full, slow
from mutations import argument, goes_wrong, omit, seeds
from routed import BF16, POISON, integers, products, routing, words
from small_kernels import fill, take

import shmemkit as sk
from shmemkit.emu.stream import Stream
from shmemkit.moe import expert_layer, gathered_rows


def in_a_row(world, method, kinds, m, topk, experts, n, k, sms=2, columns=False, dtype=BF16):
    """A call for each of `kinds` of routing, with other rows, without a wait of the host."""
    world.backend.multiprocessors = sms
    ranks, stream, tokens = world.n_ranks, world.stream, world.n_ranks * m
    xs = integers(1, len(kinds), ranks, m, k, dtype=dtype)
    routings = np.stack([routing(kind, tokens, topk, experts, i) for i, kind in enumerate(kinds)])
    w = integers([2, world.rank], experts, n, k, dtype=dtype)
    if columns:
        w = np.ascontiguousarray(w.transpose(0, 2, 1)).transpose(0, 2, 1)
    first = sk.AllGatherGroupedGemm(world, xs[0].nbytes, method)
    assert first.used == method
    x, ids = np.zeros((m, k), dtype), np.zeros((tokens, topk), "int32")
    out = np.zeros((ids.size, n), dtype)
    seen = np.zeros((len(kinds), *out.shape), dtype)
    poison = int(np.array(POISON, dtype).view("uint16"))
    for call in range(len(kinds)):
        take[1, 32, stream](words(xs[call, world.rank]), words(x))
        take[1, 32, stream](words(routings[call]), words(ids))
        fill[1, 32, stream](words(out), poison)
        assert first(x, w, ids, out) is out
        take[1, 32, stream](words(out), words(seen[call]))
        fill[1, 32, stream](words(x), 0x7FC0)
        fill[1, 32, stream](words(ids), 0x7FFFFFFF)
    world.synchronize()
    for call, got in enumerate(seen):
        want = products(xs[call].reshape(tokens, k), w, routings[call], topk)
        np.testing.assert_array_equal(got.astype("float32"), want)
    first.free()


def run(n_ranks, *arguments, delivery="unordered", races=True, seed=None, **options):
    def main(world):
        in_a_row(world, *arguments, **options)

    spmd(n_ranks, main, delivery=delivery, races=races, seed=seed)


CHANGING = ["random", "some have none", "one expert", "none", "an expert without tokens"]


@pytest.mark.parametrize(
    ("n_ranks", "m", "topk", "experts", "n", "k"),
    [
        (2, 3, 2, 2, 16, 16),
        *slow((1, 35, 2, 3, 40, 72), (2, 9, 2, 3, 40, 72)),
        *full((3, 25, 4, 2, 72, 136)),  # tiles of 128 rows
        *slow((3, 5, 3, 4, 16, 64)),
        *full((4, 33, 2, 3, 40, 72)),
    ],
)
def test_overlap(n_ranks, m, topk, experts, n, k):
    run(n_ranks, "overlap", CHANGING if m > 3 else CHANGING[:2], m, topk, experts, n, k)


@pytest.mark.slow
def test_all_experts_of_a_token():
    run(2, "overlap", ["all experts"], 17, 4, 4, 24, 64)


@pytest.mark.slow
@pytest.mark.parametrize("sms", [1, 3])
def test_tiles_of_several_ranks(sms):
    """An expert's tiles have rows of one rank, of two, of all."""
    run(3, "overlap", ["one expert", "random"], 50, 1, 2, 32, 64, sms, columns=True)


@pytest.mark.slow
def test_float16():
    run(2, "overlap", ["random"], 9, 2, 3, 40, 72, dtype=np.dtype("float16"))


@pytest.mark.parametrize(
    ("n_ranks", "n", "k"),
    [
        (1, 5, 7),
        *slow((2, 6, 10), (3, 8, 16)),
    ],
)
def test_sequential(n_ranks, n, k):
    run(n_ranks, "sequential", ["some have none", "one expert"], 3, 2, 3, n, k, races=False)


@pytest.mark.slow
def test_graphs_streams_and_one_index():
    """Two layers with one routing, in a graph, whose routing changes."""

    def main(world):
        world.backend.multiprocessors = 3
        m, topk, experts, tokens = 6, 2, 3, 2 * 6
        x, ids = np.zeros((m, 16), BF16), np.zeros((tokens, topk), "int32")
        ws = [integers([world.rank, i], experts, n, 16) for i, n in enumerate((24, 40))]
        outs = [np.zeros((ids.size, w.shape[1]), BF16) for w in ws]
        first = sk.AllGatherGroupedGemm(world, tokens * 32, "overlap")
        index = sk.ExpertIndex(world, ids, experts)

        def layers(stream):
            index.update(stream=stream)
            for w, out in zip(ws, outs, strict=True):
                first(x, w, index, out, stream=stream)

        other = Stream(world.stream.machine, world.rank)
        layers(world.stream)
        other.begin_capture()
        layers(other)
        graph = other.end_capture()
        world.synchronize()
        for call in range(3):
            whole = integers(call, tokens, 16)
            x[:] = whole[world.rank * m :][:m]
            ids[:] = routing(CHANGING[call], tokens, topk, experts, call)
            for out in outs:
                out[:] = POISON
            if call == 1:
                layers(None)
            else:
                graph.launch(world.stream)
            world.synchronize()
            for w, out in zip(ws, outs, strict=True):
                np.testing.assert_array_equal(out.astype("float32"), products(whole, w, ids, topk))

    spmd(2, main)


@pytest.mark.slow
def test_a_new_result_and_auto():
    def main(world):
        first = sk.AllGatherGroupedGemm(world, 1 << 12)
        x, w, ids = integers(0, 4, 8), integers(1, 2, 8, 8), routing("random", 8, 2, 2)
        out = first(x, w, ids)
        world.synchronize()
        whole = np.concatenate([x, x])
        np.testing.assert_array_equal(out.astype("float32"), products(whole, w, ids, 2))
        assert out.dtype == BF16 and first.used == "sequential"
        assert first(x[:0], w, ids[:0]).shape == (0, 8)

    spmd(2, main)


# ---- errors


def test_refusals():
    def main(world):
        x, w, ids = integers(0, 4, 16), integers(1, 3, 8, 16), routing("random", 8, 2, 3)
        for method in ("overlap", "sequential"):
            first = sk.AllGatherGroupedGemm(world, 8 * 16 * 2, method)
            singles = x.astype("float32"), w[:, :0].astype("float32"), ids
            for arguments, text in [
                (singles, "x is float32; it must be bfloat16 or float16"),  # though there is nothing to do
                ((x[:, :0].copy(), w[:, :, :0].copy(), ids), r"x is \(4, 0\); K must be 1 or more"),
                ((integers(0, 8, 16), w, routing("random", 16, 2, 3)), "more than max_nbytes=256"),
                ((x, w, sk.ExpertIndex(world, ids, 4)), "the ExpertIndex is of 4 experts; it must be of 3"),
                ((x, w, sk.ExpertIndex(world, ids, 3)), r"the ExpertIndex is empty; call its update\(\)"),
            ]:
                with pytest.raises(ValueError, match=text):
                    first(*arguments)
            first.free()

    spmd(2, main)


REFUSED = [
    ({"w": integers(1, 3, 9, 16)}, "K is 16 and N is 9; they must be multiples of 8"),
    ({"w": integers(1, 6, 8, 16)[::2]}, "its experts must lie one after another"),
    ({"w": integers(1, 3, 16, 8).transpose(0, 2, 1)}, "then K must be a multiple of 64"),
    ({"x": np.zeros(65, BF16)[1:].reshape(4, 16)}, "x is at .*; it must be at a multiple of 16 bytes"),
]


def refused_arrays(change):
    arrays = {"x": integers(0, 4, 16), "w": integers(1, 3, 8, 16), **change}
    return arrays["x"][:, : arrays["w"].shape[2]], arrays["w"], routing("random", 8, 2, 3)


@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_what_overlap_refuses(change, text):
    def main(world):
        first = sk.AllGatherGroupedGemm(world, 1 << 10, "overlap")
        with pytest.raises(ValueError, match=f"{text}.*method='auto'"):
            first(*refused_arrays(change))

    spmd(2, main)


@pytest.mark.parametrize("change", [REFUSED[0][0], *slow(*(change for change, _ in REFUSED[1:]))])
def test_auto_computes_what_overlap_refuses(change, monkeypatch):
    monkeypatch.setattr(expert_layer, "SLOW", ())

    def main(world):
        world.backend.multiprocessors = 1
        first = sk.AllGatherGroupedGemm(world, 1 << 10)
        assert first.used == "overlap" and not first.refused
        x, w, ids = refused_arrays(change)
        out = first(x, w, ids)
        world.synchronize()
        np.testing.assert_array_equal(out.astype("float32"), products(np.concatenate([x, x]), w, ids, 2))

    spmd(2, main, races=True)


def test_overlap_needs_hopper(monkeypatch):
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "A100")
    monkeypatch.setattr(expert_layer, "SLOW", ())
    with pytest.raises(ValueError, match="compute capability 8.0; it must be 9.0"):
        spmd(2, lambda world: sk.AllGatherGroupedGemm(world, 64, "overlap"))

    def main(world):
        first = sk.AllGatherGroupedGemm(world, 64)
        assert first.used == "sequential" and "must be 9.0" in first.refused["overlap"]

    spmd(2, main)


# ---- what is needed


def is_wrong(k):
    return goes_wrong(run, 2, "overlap", ["one expert", "random"], 40, 1, 2, 32, k, each=seeds(2))


@pytest.mark.parametrize(
    ("change", "k"),
    [
        (omit("wait"), 72),
        (argument("wait", 3, "'relaxed'"), 72),
        (omit("cuda.syncwarp", inside="await_sources"), 72),
        (omit("fence_proxy_async"), 72),
        (argument("cp_async_wait", 0, "7"), 20 * 64),  # more slabs than slots
        (omit("mbarrier_wait"), 20 * 64),
    ],
)
def test_each_part_is_needed(mutate, change, k):
    mutate(gathered_rows, change)
    assert is_wrong(k)


@pytest.mark.slow
def test_more_slabs_than_slots():
    assert not is_wrong(20 * 64)
