"""All-gather and matrix product on the emulator: the overlapping kernel with small tiles, all ways to call
it, and what goes wrong when one of its waits or fences is taken away."""

import functools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from fast import slow
from gemms import ACTIVATE, check
from mutations import argument, goes_wrong, omit, omit_store, store
from numba import cuda
from small_kernels import fill, take

import shmemkit as sk
from shmemkit.gemm import all_gather
from shmemkit.gemm.all_gather import column_hooks, sm90, sm90_host
from shmemkit.gemm.sm90 import Tile
from shmemkit.runtime import stream_barrier

BF16 = np.dtype(ml_dtypes.bfloat16)


def small(by_columns=False, splits=1, **others):
    """Options of AllGatherGemm: small tiles, parts of K, and whether x comes by columns."""
    return {"tile": (64, 32), "splits": splits, "by_columns": by_columns, **others}


SMALL = small()


def integers(*shape, seed=0, dtype=BF16):
    """Small ones, of which products are exact."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


def words(array):
    return array.reshape(-1).view(f"uint{8 * array.itemsize}")


def weight_of(rank, k, n, by_rows=False, seed=0, dtype=BF16):
    weight = integers(k, n, seed=[seed, rank], dtype=dtype)
    return weight if by_rows else np.ascontiguousarray(weight.T).T


def in_a_row(
    calls, rows, k, n, given=None, method="overlap", sms=2, dtype=BF16, by_rows=False, options=SMALL
):
    """Calls, each with other x, without a wait of the host. -> how many were right, on this rank

    given    None, "symmetric", "private", or "in place": where the gathered rows go
    options  of AllGatherGemm
    """
    world = sk.init()
    world.backend.multiprocessors = sms
    ranks, stream = world.n_ranks, world.stream
    xs = integers(calls, ranks, rows, k, dtype=dtype)
    weight = weight_of(world.rank, k, n, by_rows, dtype=dtype)
    object_ = sk.AllGatherGemm(world, xs[0].nbytes, method, options=options)
    x, out = np.zeros((rows, k), dtype), np.zeros((ranks * rows, n), "float32")
    seen, rows_seen = np.zeros((calls, *out.shape), "float32"), np.zeros((calls, ranks * rows, k), dtype)
    gathered = None
    if given == "private":
        gathered = np.zeros((ranks * rows, k), dtype)
    elif given is not None:
        gathered = object_.output((ranks * rows, k), dtype)
        if given == "in place":
            x = gathered[world.rank * rows : (world.rank + 1) * rows]
    for call in range(calls):
        take[1, 32, stream](words(xs[call, world.rank]), words(x))
        fill[1, 32, stream](words(out), 0x7FC00000)
        object_(x, weight, out, gathered=gathered)
        take[1, 32, stream](words(out), words(seen[call]))
        if gathered is not None:
            take[1, 32, stream](words(gathered), words(rows_seen[call]))
        if given != "in place":
            fill[1, 32, stream](words(x), 0x7FC0)
    world.synchronize()
    whole = xs.reshape(calls, ranks * rows, k)
    right = (seen == whole.astype("float32") @ weight.astype("float32")).all(axis=(1, 2))
    if gathered is not None:
        right &= (words(rows_seen) == words(whole)).reshape(calls, -1).all(axis=1)
    object_.free()
    return int(right.sum())


by_parts = functools.partial(in_a_row, options=small(by_columns=True))


@pytest.mark.every(2)
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize(
    ("n_ranks", "rows", "k", "sms"),
    [
        (1, 70, 72, 2),
        (2, 64, 8, 1),  # one block: in the order of the tiles
        *slow((2, 64, 72, 1), (3, 64, 72, 2)),
        *slow((3, 40, 72, 2)),  # tiles in several segments: mine is copied first
        *slow((5, 16, 72, 1)),
    ],
)
def test_overlap(pes, n_ranks, rows, k, sms):
    assert pes(n_ranks).run(in_a_row, 2, rows, k, 16, None, "overlap", sms) == [2] * n_ranks


@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize(
    ("n_ranks", "rows", "k"),
    [
        (1, 70, 72),
        *slow((2, 64, 136)),  # the last part has no columns
        *slow((3, 40, 200), (5, 16, 72)),
    ],
)
def test_by_columns(pes, n_ranks, rows, k):
    assert pes(n_ranks).run(by_parts, 2, rows, k, 16, None, "overlap", 2) == [2] * n_ranks


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("given", ["symmetric", "private", "in place"])
@pytest.mark.parametrize("rows", [24, *slow(64)])
def test_gathered_rows(pes, rows, given):
    assert pes(2).run(in_a_row, 2, rows, 64, 16, given, "overlap", 2) == [2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("by_columns", [False, True])
def test_parts_of_k(pes, by_columns):
    options = small(by_columns, 2)
    assert pes(2).run(in_a_row, 2, 64, 264, 32, None, "overlap", 4, BF16, True, options) == [2, 2]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("n_ranks", "given", "method"),
    [
        (1, None, "auto"),
        (2, "symmetric", "sequential"),
        (2, "private", "auto"),
        *slow((3, None, "sequential")),
    ],
)
def test_sequential(pes, n_ranks, given, method):
    assert pes(n_ranks).run(in_a_row, 2, 10, 24, 9, given, method) == [2] * n_ranks


def test_what_the_kernel_cannot_compute(pes):
    """Is computed when all rows are there."""
    assert pes(2).run(in_a_row, 3, 10, 7, 9, None, "overlap", 2, np.dtype("float32")) == [3, 3]


def test_on_several_nodes(pes):
    assert pes(2, local_size=1).run(in_a_row, 2, 3, 8, 8, None, "auto") == [2] * 2
    with pytest.raises(ValueError, match="method='overlap': .* on another node"):
        pes(2, local_size=1).run(in_a_row, 2, 3, 8, 8, None, "overlap")


@pytest.mark.slow
def test_several_weights(pes):
    """One of them is not for the kernel, and one has no columns."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = 2
        xs, widths = integers(2, 32, 16), (16, 40, 14, 0)
        weights = [weight_of(world.rank, 16, n, seed=i) for i, n in enumerate(widths)]
        biases = [None, *(integers(n, dtype="float32") for n in widths[1:])]
        with_rows = sk.AllGatherGemm(world, xs.nbytes, "overlap", options=small())
        for _ in range(2):
            outs = with_rows(xs[world.rank], tuple(weights), bias=biases, activation="relu")
            assert isinstance(outs, tuple)
            world.synchronize()
            for out, weight, bias in zip(outs, weights, biases, strict=True):
                want = xs.reshape(64, 16).astype("float64") @ weight.astype("float64")
                check(out, ACTIVATE["relu"](want if bias is None else want + bias))
        given = [np.zeros((64, n), "float32") for n in widths]
        assert with_rows(xs[world.rank], weights, given) == tuple(given)
        one, other = with_rows(xs[world.rank], weights[:2], (None, given[1]))
        world.synchronize()
        assert other is given[1] and np.array_equal(one, given[0])
        world.synchronize()
        check(given[1], xs.reshape(64, 16).astype("float64") @ weights[1].astype("float64"))

    pes(2).run(main)


def graphs_and_streams(method, **others):
    """That calls are right in graphs, which are captured on two streams, and beside them."""
    world = sk.init()
    world.backend.multiprocessors = 4
    me, streams = world.rank, [world.stream, cuda.stream()]
    xs, weight = integers(6, 2, 64, 8), weight_of(me, 8, 16)
    product = sk.AllGatherGemm(world, xs[0].nbytes, method, options=small(**others))
    x, out = np.zeros((64, 8), BF16), np.zeros((128, 16), "float32")
    seen = np.zeros((6, *out.shape), "float32")
    gathered = [None, product.output((128, 8), "bfloat16")]
    graphs = []
    for i, stream in enumerate(streams):
        stream.begin_capture()
        product(x, weight, out, gathered=gathered[i], stream=stream)
        product(x, weight, out, gathered=gathered[1 - i], stream=stream)
        graphs.append(stream.end_capture())
    for call in range(6):
        stream = streams[call % 2]
        stream.wait_event(streams[1 - call % 2].record())
        take[1, 32, stream](words(xs[call, me]), words(x))
        if call % 3:
            graphs[call % 2].launch(stream)
        else:
            product(x, weight, out, gathered=gathered[call % 2], stream=stream)
        take[1, 32, stream](words(out), words(seen[call]))
    world.synchronize()
    assert (seen == xs.reshape(6, 128, 8).astype("float32") @ weight.astype("float32")).all()


@pytest.mark.slow
def test_graphs_and_streams(pes):
    pes(2).run(graphs_and_streams, "overlap")


# ---- what is needed


def found_out(rows, k=64, calls=1, method="overlap", sms=2, options=SMALL, **how):
    """Whether it is seen that something is wrong: by the result, or by a report."""
    arguments = calls, rows, k, 32, None, method, sms, BF16, False, options
    ran = functools.partial(sk.emu.run, in_a_row, 2, arguments, delivery="unordered", **how)
    return goes_wrong(lambda: ran() == [calls] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "change"),
    [
        (64, omit("wait")),
        (64, argument("wait", 3, "'relaxed'")),
        (64, omit("fence_proxy_async_global")),
        (64, omit("tensormap_acquire")),
        (40, store("wanted", "0", 3)),  # a tile of rows of the last rank and of the own ones
        (64, omit_store("wanted", 2)),
    ],
)
def test_each_part_of_the_kernel_is_needed(mutate, rows, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    mutate(sm90, change)
    assert found_out(rows, races=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "change"),
    [
        (64, omit("wait")),
        (64, argument("wait", 3, "'relaxed'")),
        (64, omit("fence_proxy_async_global")),
        (128, omit_store("extra.come[]", inside="none_known")),
        (40, store("k", "last + 1", 3, "before_slab")),
        (64, store("extra.come[]", "ALL", inside="before_slab")),
    ],
)
def test_each_part_of_the_kernel_by_columns_is_needed(mutate, rows, change):
    mutate(column_hooks, change)
    assert found_out(rows, 136, options=small(by_columns=True), races=True)


@pytest.mark.parametrize("by_columns", [False, True])
def test_signals_are_those_of_this_call(mutate, by_columns):
    """Not of the one before it, where copies are late."""
    how = {"options": small(by_columns=by_columns), "races": True}
    assert not any(found_out(64, calls=2, seed=seed, **how) for seed in range(4))
    mutate(stream_barrier, omit_store("signals[]"))
    assert not found_out(64, **how)
    assert any(found_out(64, calls=2, seed=seed, **how) for seed in range(4))


@pytest.mark.parametrize("by_columns", [False, True])
def test_rows_of_tiles_of_several_ranks_do_not_come_from_x(mutate, by_columns):
    mutate(sm90_host, store("self.reads_x", "taken(x)"))
    assert found_out(40, options=small(by_columns=by_columns), races=True)


def test_own_rows_come_before_the_product(mutate):
    """Where they are not read from x."""
    mutate(all_gather, argument("engine.overlap", 2, "'never'"))
    assert not found_out(64) and found_out(40)


# ---- on the host


def test_which_method():
    auto = object.__new__(sk.AllGatherGemm)
    auto.world = SimpleNamespace(n_ranks=4, backend=SimpleNamespace(name="nvshmem"))
    auto.method, auto._preferred, auto._rooms = "auto", "overlap", {"push": "made", "overlap": "made"}
    auto._gpu = SimpleNamespace(multiprocessors=132)

    def methods(*rows, k=8192, dtype="bfloat16", n=7168):
        return [auto.method_for((m, k), dtype, n) for m in rows]

    assert methods(1 << 14, 512, 65, 64) == ["overlap", "push", "push", "sequential"]
    assert methods(256, dtype="float32") == methods(256, k=8193) == methods(1024, n=64) == ["overlap"]
    auto._rooms = {"overlap": "made"}
    assert methods(128, 64) == ["overlap", "sequential"]
    auto._rooms = {}
    assert methods(2048) == ["sequential"]
    gpu = SimpleNamespace(multiprocessors=132)
    sizes = (8192, 3584, 4096), (8192, 7168, 8192), (8192, 2048, 8192), (512, 7168, 8192), (64, 7168, 8192)
    rounds = [all_gather.rounds_of([SimpleNamespace(size=size)], gpu) for size in sizes]
    assert [number > column_hooks.ROUNDS for number in rounds] == [True] * 3 + [False] * 2


def test_groups_of_tiles_end_with_a_rank():
    for *rows, group in (
        (2048, 16),
        (3072, 12),
        (256, 2),
        (4608, 12),
        (200, 16),
        (1024, 2048, 8),
        (512, 1024, 8),
    ):
        assert sm90_host.aligned_groups(Tile(128, 256), *rows).group == group


def test_refusals(pes):
    def main():
        world = sk.init()
        with pytest.raises(
            ValueError, match="it must be 'push', 'overlap', 'overlap_2d', 'sequential' or 'auto'"
        ):
            sk.AllGatherGemm(world, 8, "fast")
        with pytest.raises(ValueError, match="rank 0 gives max_nbytes=8, rank 1 gives max_nbytes=9"):
            sk.AllGatherGemm(world, 8 + world.rank)
        with pytest.raises(TypeError, match="max_nbytes is '8'; it must be an integer"):
            sk.AllGatherGemm(world, "8")
        multiply, room = sk.AllGatherGemm(world, 512), np.zeros((16, 24), BF16)
        x, weight = integers(8, 16), integers(16, 24)
        several, short = (weight, weight), (weight, weight[:8])
        whole, other = integers(16, 16), 1 - world.rank
        theirs = whole[8 * other : 8 * other + 8]
        for arguments, options, text in [
            ((theirs, weight), {"gathered": whole}, "apart, or x must be this rank's rows of gathered"),
            ((integers(9, 16), weight), {}, "ranks have 576 bytes, more than max_nbytes=512. Make"),
            ((x, several, (room,)), {}, "out is a tuple of 1; it must be a tuple of 2, one for each weight"),
            ((x, several, (room, room)), {}, r"out\[0\] and out\[1\] overlap"),
            ((x, short), {}, r"w\[1\] is bfloat16 \(8, 24\); it must be bfloat16 \(16, n1\)"),
            ((x, (weight, None), (None, room)), {}, r"w\[1\] is None"),
            ((x, ()), {}, "w is an empty tuple"),
            ((x, weight), {"activation": "tanh"}, "activation is 'tanh'; it must be None, 'relu'"),
            ((x, weight), {"activation": ["relu"]}, r"activation is a list; it must be None"),
        ]:
            with pytest.raises((TypeError, ValueError), match=text):
                multiply(*arguments, **options)

    pes(2).run(main)
