"""GemmReduceScatter and GemmAllReduce on the emulator: results at ragged edges, repeats, graphs, with races
checked and messages late; and what goes wrong when one of their waits or fences is taken away."""

import functools
import itertools

import numpy as np
import pytest
from fast import slow
from gemms import check_graphs_and_streams, error
from hypothesis import given as over
from hypothesis import strategies as st
from mutations import argument, callee, goes_wrong, omit, omit_store, single_buffer

import shmemkit as sk
from shmemkit.gemm import last_block
from shmemkit.gemm.reduce_scatter import fused, methods
from shmemkit.gemm.reduce_scatter.tile_order import schedule
from shmemkit.gemm.sm90 import Kinds, Layout
from shmemkit.runtime.symmetric_memory import as_dtype

OBJECTS = {"rs": sk.GemmReduceScatter, "ar": sk.GemmAllReduce}
BFLOAT16 = as_dtype("bfloat16")


SMALL = {"tile": (64, 32)}


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=2")


def given(call, size, rank, majors="kn"):
    """Small integers, whose sums are exact in bfloat16, as all that is computed of them."""
    (m, n, k), rng = size, np.random.default_rng([call, rank])

    def matrix(rows, columns, by_rows):
        values = rng.integers(-1, 2, (rows, columns) if by_rows else (columns, rows)).astype(BFLOAT16)
        return values if by_rows else values.T

    return matrix(m, k, majors[0] == "k"), matrix(k, n, majors[1] == "n")


def expected(op, call, size, world, majors="kn"):
    pairs = [given(call, size, rank, majors) for rank in range(world.n_ranks)]
    whole = sum(a.astype("float32") @ b.astype("float32") for a, b in pairs).astype(BFLOAT16)
    rows = size[0] // world.n_ranks
    return whole if op == "ar" else whole[world.rank * rows : (world.rank + 1) * rows]


def compute(op, sizes, method="fused", majors="kn", symmetric=False, part_dtype=None, options=SMALL):
    """Calls of one object, one after another. -> whether each is right"""
    world = sk.init()
    max_tokens, max_n, _ = (max(column) for column in zip(*sizes, strict=True))
    product = OBJECTS[op](world, max_tokens, max_n, "bfloat16", part_dtype, method, options=options)
    inside, right = product.output((max_tokens * max_n,)) if symmetric else None, []
    for call, size in enumerate(sizes):
        want = expected(op, call, size, world, majors)
        room = inside if symmetric else np.empty(want.size + 8, BFLOAT16)
        room[:] = np.nan
        out = room[: want.size].reshape(want.shape)
        assert product(*given(call, size, world.rank, majors), out) is out
        world.synchronize()
        right.append(np.array_equal(out, want) and np.isnan(room[want.size :].astype("float32")).all())
    product.free()
    return right


def all_right(pes, *args):
    return all(all(of_rank) for of_rank in pes.run(compute, *args))


SIZES = [(12, 40, 8), (6, 40, 8), (6, 8, 136)]
late = pytest.mark.schedules(deliveries="unordered", seeds=[None])


@late
@pytest.mark.parametrize(
    "op, n_ranks, sizes", [(op, 2, SIZES[1:]) for op in OBJECTS] + slow(("rs", 3, SIZES))
)
def test_sizes(pes, op, n_ranks, sizes):
    assert all_right(pes(n_ranks), op, sizes)


@late
@pytest.mark.parametrize(
    "op, n_ranks, chunk, sizes",
    [
        ("ar", 2, 3, SIZES[1:2]),
        *slow(*((*how, [*SIZES, (12, 136, 8)]) for how in itertools.product(("rs", "ar"), (2, 3), (1, 3)))),
    ],
)
def test_parts_that_are_copied(pes, op, n_ranks, chunk, sizes):
    main = functools.partial(compute, options={**SMALL, "copied_tiles": chunk})
    assert all(map(all, pes(n_ranks).run(main, op, sizes, "copy_engine")))


@pytest.mark.slow
@late
def test_five_ranks(pes):
    assert all_right(pes(5), "rs", [(5, 16, 8)] * 2)


@pytest.mark.slow
@late
@pytest.mark.parametrize(
    "tile, size, majors, part_dtype",
    [
        *slow(((128, 32), (260, 40, 72), "kn", None)),  # two rows of tiles
        *slow(((64, 48), (136, 72, 72), "mk", "float32")),
        *slow(((64, 192), (8, 384, 72), "mn", None)),  # three pieces of a part, two places for them
        ((128, 64), (4, 64, 72), "kk", "float32"),
    ],
)
def test_tiles(pes, tile, size, majors, part_dtype):
    blocks = pes(2, gpu=f"H200,sms={2 if tile[1] < 64 else 1}")
    sizes = [size] * (1 + (size[0] == 8))
    assert all_right(blocks, "rs", sizes, "fused", majors, False, part_dtype, {"tile": tile})


@pytest.mark.slow
@late
def test_a_symmetric_result(pes):
    assert all_right(pes(3), "ar", SIZES[:2], "fused", "kn", True)


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize("op", OBJECTS)
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_one_after_the_other(pes, op, n_ranks):
    assert all_right(pes(n_ranks), op, [(4, 3, 9)], "auto", "kn", False, None, None)


@late
@pytest.mark.parametrize("op, method", slow(("rs", "fused"), ("ar", "fused"), ("rs", "copy_engine")))
def test_graphs_and_streams(pes, op, method):

    def main():
        world = sk.init()
        product, sizes = OBJECTS[op](world, 4, 40, method=method, options=SMALL), [(4, 40, 16), (4, 8, 72)]
        calls = []
        for call, size in enumerate(sizes):
            want = expected(op, call, size, world)
            calls.append((*given(call, size, world.rank), np.empty(want.shape, BFLOAT16), want))
        check_graphs_and_streams(world, product, calls)

    pes(2).run(main)


@pytest.mark.slow
def test_the_same_bits_every_time_and_added_up_in_float32(pes):

    def main():
        world = sk.init()
        numbers = [np.random.default_rng(r).standard_normal((2, 8, 64)).astype(BFLOAT16) for r in range(3)]
        results = {}
        for part in (None, "float32"):
            product = sk.GemmReduceScatter(world, 6, 8, "bfloat16", part, "fused", options=SMALL)
            a, b = numbers[world.rank][0, :6], numbers[world.rank][1].T
            results[part] = [product(a, b) for _ in range(2)]
            world.synchronize()
            product.free()
            assert len({out.tobytes() for out in results[part]}) == 1
        mine = slice(2 * world.rank, 2 * world.rank + 2)
        sums = [(x[0, mine].astype("float64") @ x[1].T.astype("float64")) for x in numbers]
        exact = np.add.reduce(sums)
        assert error(results["float32"][0], exact) < 3e-3  # one rounding
        assert error(results["float32"][0], exact) <= error(results[None][0], exact) < 8e-3

    pes(3).run(main)


# ---- what is refused


def test_wrong_arguments(pes):
    def main():
        world = sk.init()
        refused = [
            (dict(max_tokens=0, max_n=8), "max_tokens is 0; it must be 1 or more"),
            (dict(max_tokens=8, max_n=8, dtype="int32"), "dtype is 'int32'; it must be .* or 'float64'"),
            (
                dict(max_tokens=8, max_n=8, part_dtype="float16"),
                "part_dtype is 'float16'; it must be 'bfloat16' or",
            ),
            (dict(max_tokens=8, max_n=8, method="fast"), "or 'auto'"),
            (
                dict(max_tokens=8 + world.rank, max_n=8),
                "rank 0 gives max_tokens=8, rank 1 gives max_tokens=9",
            ),
            (dict(max_tokens=8, max_n=8, dtype="float32", method="fused"), "it is for bfloat16 and float16"),
            (
                dict(max_tokens=8, max_n=8, part_dtype="float32", method="sequential"),
                "part_dtype is float32; with .* it must be the dtype, bfloat16",
            ),
        ]
        for arguments, reason in refused:
            with pytest.raises(ValueError, match=reason):
                sk.GemmReduceScatter(world, **arguments)
        with pytest.raises(TypeError, match="world is .*; it must be the World"):
            sk.GemmAllReduce(8, 8, 8)
        product = sk.GemmReduceScatter(world, 8, 16, method="fused")
        x = np.zeros((8, 16), BFLOAT16)
        for arrays, reason in [
            ((x[:7], x.T), "m is 7; it must be a multiple of n_ranks, 2"),
            ((x[:, :0], x.T[:0]), "K is 0"),
        ]:
            with pytest.raises(ValueError, match=reason):
                product(*arrays)
        product.free()

    pes(2).run(main)


def test_one_rank_has_nothing_to_exchange(pes):
    def main():
        with pytest.raises(ValueError, match="it is for 2 to 16"):
            sk.GemmReduceScatter(sk.init(), 8, 8, method="fused")

    pes(1).run(main)


@over(st.integers(2, 6), st.integers(1, 40), st.integers(1, 50), st.integers(1, 3))
def test_schedule(n_ranks, part_tiles, stripe, lag):
    """All tiles; and none is sent after one of my own of the same number, or of a higher one: so that ranks
    which wait for parts never wait for each other."""
    for me in range(n_ranks):
        order = schedule(part_tiles, n_ranks, me, stripe, lag)
        assert sorted(order) == list(range(n_ranks * part_tiles))
        added = -1
        for owner, i in zip(*np.divmod(order, part_tiles), strict=True):
            if owner == me:
                added = i
            assert i > added or owner == me


def test_schedule_of_two_rounds():
    assert schedule(4, 2, 0, 2, 1).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert schedule(4, 3, 1, 2, 1).tolist() == [8, 9, 0, 1, 10, 11, 2, 3, 4, 5, 6, 7]


# ---- waits that are not there

FEW = (64, 32), [(2, 40, 8)] * 3
WIDE = (64, 192), [(4, 384, 72)] * 2
MANY = (128, 32), [(2, 136, 8)] * 2
RING = (64, 256), [(4, 768, 72)] * 2  # 5 slots, which are used again after parts
RELAXED = "(lambda array, i, value, scope: cuda.atomic.add(array, i, value))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, case, change",
    [
        ("rs", WIDE, omit("bulk_wait_group_read", inside="send_piece")),
        ("rs", FEW, omit("fence_proxy_async", inside="send_piece")),
        ("rs", FEW, omit("cuda.syncwarp", 2, "send_piece")),
        ("rs", FEW, omit("bulk_wait_group", inside="settle")),
        ("rs", MANY, omit("mbarrier_wait", inside="settle")),
        ("rs", FEW, omit("mbarrier_wait", inside="watch_tiles")),
        ("rs", FEW, omit("wait", inside="load")),
        ("rs", FEW, omit("fence_proxy_async_global", inside="load")),
        ("rs", RING, omit("mbarrier_wait", inside="load")),
        ("rs", FEW, omit("mbarrier_wait", inside="add_slot")),
        ("rs", RING, omit("hand_back", inside="add_slot")),
        ("rs", RING, omit("cuda.syncwarp", inside="add_slot")),
        ("rs", FEW, single_buffer()),
        ("rs", FEW, argument("mbarrier_init", 2, "1")),
        ("rs", FEW, omit_store("epochs[]")),
        ("rs", FEW, (last_block, omit_store("done[]"))),
        ("ar", FEW, omit("mbarrier_wait", inside="watch_tiles")),
        ("ar", FEW, omit("wait", inside="watch_tiles")),
        ("copied", FEW, callee("red_release", RELAXED)),
        ("copied", FEW, omit_store("staged_full[]")),
        ("copied", FEW, omit("cuda.syncthreads", inside="gemm_exchange")),
        ("copied", FEW, omit("st_release")),
    ],
)
def test_each_wait_is_needed(mutate, op, case, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    mutate(*(change if isinstance(change, tuple) else (fused, change)))
    tile, sizes = case
    options = {"tile": tile, "lag": 9 if case is RING else 1}  # its own tiles, one behind the other
    method = "copy_engine" if op == "copied" else "fused"
    arguments = "ar" if op == "ar" else "rs", sizes, method, "kn", False, None, options
    gpu = f"H200,sms={1 if case in (MANY, RING) else 2}"
    each = {}, {"races": True}, *({"seed": seed} for seed in (2, 0, 1, 3, 4, 5, 68))
    assert goes_wrong(sk.emu.run, compute, 2, arguments, delivery="unordered", gpu=gpu, each=each)


@pytest.mark.parametrize("part_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [8, 64, 65, 4096])
@pytest.mark.parametrize("n", [8, 32, 100, 8192])
@pytest.mark.parametrize("majors", [("k", "k"), ("mn", "mn")])
def test_parts_fit_the_slots_of_all_tiles(part_dtype, rows, n, majors):
    tiles = methods.tiles_for(rows, n, part_dtype)
    assert tiles
    for tile in tiles:
        parts, layout = fused.Parts(tile, part_dtype), Layout(tile, Kinds("bfloat16", *majors, "bfloat16"))
        assert parts.unit <= layout.b and parts.units <= layout.stages and parts.chunk <= layout.piece
