"""The method "push" of all-gather and matrix product on the emulator: sizes, ranks, several calls, graphs,
and what goes wrong when one of its steps is taken away."""

import functools

import numpy as np
import pytest
from fast import slow
from gemms import changed, check, moved
from test_ag_gemm import BF16, found_out, graphs_and_streams, in_a_row, integers, weight_of

import shmemkit as sk
from shmemkit.emu import EmulatorError
from shmemkit.gemm import all_gather
from shmemkit.gemm.all_gather import column_hooks, push
from shmemkit.gemm.sm90 import Tile
from shmemkit.gemm.sm90_host import Choice

SMALL = (64, 32)


@pytest.fixture
def tiles(monkeypatch):
    """-> use(tile, splits, by_columns): the kernel's tiles are these, and x comes by columns, or by rows.
    There are few senders, and parts of few columns."""

    def use(tile, splits=1, by_columns=True):
        monkeypatch.setattr(column_hooks, "ROUNDS", 1e9 if by_columns else -1)
        monkeypatch.setattr(push, "choose", lambda m, n, k, sms: Choice(Tile(*tile), splits))

    monkeypatch.setattr(push, "SENDERS", (1, 2))
    monkeypatch.setattr(push, "WIDTH", 128)
    monkeypatch.setattr(push, "AT_ONCE", 1)
    use(SMALL)
    return use


orders = pytest.mark.parametrize("by_columns", [True, False], ids=["columns", "rows"])
pushed = functools.partial(in_a_row, method="push", sms=4)


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize(
    ("n_pes", "rows", "k"),
    [
        *slow((1, 70, 72)),
        (2, 64, 72),
        (3, 40, 72),  # tiles with rows of several ranks, which all come from staged
        *slow((5, 3, 8)),
        *slow((2, 3, 1160)),  # the columns are more than 16 parts of the least width
    ],
)
@orders
def test_sizes(pes, tiles, n_pes, rows, k, by_columns):
    tiles(SMALL, 1, by_columns)
    calls = 3 if n_pes == 2 else 2
    assert pes(n_pes).run(pushed, calls, rows, k, 48) == [calls] * n_pes


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("given", ["symmetric", "private", "in place"])
@pytest.mark.parametrize("rows", [24, *slow(64)])
@orders
def test_gathered_rows(pes, tiles, rows, given, by_columns):
    tiles(SMALL, 1, by_columns)
    assert pes(2).run(pushed, 3, rows, 72, 16, given) == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, np.dtype("float16")])
@orders
def test_parts_of_k(pes, tiles, dtype, by_columns):
    tiles((64, 32, 8, True), 2, by_columns)
    assert pes(2).run(in_a_row, 2, 64, 136, 32, None, "push", 4, dtype, True) == [2, 2]


def test_wide_rows(pes):
    """As they are on GPUs: two parts, and the last one narrow."""
    assert pes(2).run(in_a_row, 2, 3, 1032, 16, None, "push", 9) == [2, 2]


@pytest.mark.slow
def test_any_arrays_and_sizes_in_turn(pes, tiles):
    """Several weights, one of them of no columns; operands and results that the TMA does not take, on one
    rank alone; another size in each call."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = 4
        me, product = world.rank, sk.AllGatherGemm(world, 2 * 64 * 136 * 2, "push")
        for call, (rows, k, *widths) in enumerate(
            [(64, 136, 16, 41, 0), (5, 72, 33), (64, 8, 9), (1, 64, 8)]
        ):
            xs = integers(2, rows, k, seed=call)
            weights = [weight_of(me, k, n, seed=i) for i, n in enumerate(widths)]
            biases = [np.repeat(integers(n, dtype="float32"), 3)[::3] for n in widths]
            outs = [np.full((2 * rows, n), np.nan, BF16) for n in widths]
            x = xs[me].copy()
            if me == 0:
                x = moved(x, "at an odd address")
                weights = [moved(w, "odd rows") for w in weights]
                outs = [moved(out, "odd rows") for out in outs]
            product(x, tuple(weights), tuple(outs), bias=tuple(biases))
            world.synchronize()
            for out, weight, bias in zip(outs, weights, biases, strict=True):
                want = xs.reshape(2 * rows, k).astype("float64") @ weight.astype("float64") + bias
                check(out, want.astype(BF16).astype("float64"))

    pes(2).run(main)


@pytest.mark.slow
def test_graphs_and_streams(pes, tiles):
    pes(2).run(graphs_and_streams, "push")


def without(line, change):
    """-> Push, of a module with other code."""
    module = changed(push, line, change)
    for name in ("choose", "SENDERS", "WIDTH", "AT_ONCE"):
        setattr(module, name, getattr(push, name))
    return module.Push


COLUMNS, ROWS = True, False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "by_columns", "line", "change"),
    [
        (64, COLUMNS, 'notify_at(to.arrived, to.me * PARTS + word, to.offsets, peer, shares, "add")', "pass"),
        (64, COLUMNS, "store_vec16(there, at, a)", "pass"),
        (64, COLUMNS, "mbarrier_wait(sent, i, 0)", "pass"),
        (64, COLUMNS, "store_piece(there, slot + at1, slot + last1, piece1)", "pass"),
        (64, COLUMNS, "tensormap_acquire(map_x)", "pass"),
        (40, COLUMNS, "while peer < to.n_ranks:  #", "while peer < to.n_ranks and peer != to.me:  #"),
        (40, COLUMNS, "to.n_ranks - 1 + to.and_mine", "to.n_ranks - 1"),
        (64, COLUMNS, "buffer * room + me", "0 * room + me"),
        (64, COLUMNS, "SHARES * epoch, together", "SHARES * (epoch - 1), together"),
        (40, COLUMNS, "rows % plan.choice.tile.m == 0", "True"),
        (64, ROWS, "tell(to, peer, part * words + cuda.threadIdx.x)", "tell(to, peer, part)"),
        (64, ROWS, "peer, 1, warps)\n            cuda.syncthreads()", "peer, 1, warps)"),
        (40, ROWS, "peer != to.me or to.and_mine", "peer != to.me"),
        (40, ROWS, "come[0] = parts if from_x[1] else 0", "come[0] = parts"),
    ],
)
def test_each_part_is_needed(monkeypatch, tiles, rows, by_columns, line, change):
    tiles(SMALL, 1, by_columns)
    monkeypatch.setattr(all_gather, "Push", without(line, change))
    assert found_out(rows, 72, 3, "push", 4, races=True)


def test_parts_without_columns_are_counted(monkeypatch, tiles):
    """Or the next call, of longer rows, waits for ever."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = 4
        product = sk.AllGatherGemm(world, 2 * 8 * 264 * 2, "push")
        for k in (8, 264):
            product(integers(8, k), weight_of(world.rank, k, 16))
        world.synchronize()

    monkeypatch.setattr(all_gather, "Push", without("while i < to.n_ranks * rest:", "while False:"))
    with pytest.raises(EmulatorError, match="deadlock"):
        sk.emu.run(main, 2)


def test_plans():
    """Few senders, where the product takes no longer without more; of one round of tiles, all at once."""

    def of(*sizes):
        plan = push.plan_of(*sizes, 132)
        return plan.senders, plan.by_columns, plan.together, plan.slabs

    assert of(256, 8192, 14336, 2) == (4, True, False, 16)
    assert of(128, 8192, 14336, 2) == of(128, 8192, 7168, 4) == (4, True, True, 32)
    assert of(4096, 4096, 7168, 2)[:2] == of(2048, 8192, 7168, 4)[:2] == (4, False)
    assert of(2048, 4096, 3584, 4)[:2] == of(2048, 8192, 1024, 8)[:2] == (16, False)  # it waits for rows


def test_refusals(pes):
    def main():
        world = sk.init()
        product = sk.AllGatherGemm(world, 2 * 8 * 16 * 4, "push")
        for dtype, k in (("float32", 16), ("bfloat16", 15)):
            with pytest.raises(
                ValueError, match=f"method 'push' .*: x is {dtype} and K is {k}; .* multiple of 8"
            ):
                product(integers(8, k, dtype=dtype), integers(k, 16, dtype=dtype))
        nothing = product(integers(0, 16), integers(16, 8))
        assert nothing.shape == (0, 8)
        assert (product(integers(4, 0), integers(0, 8)) == 0).all()

    pes(2).run(main)
    with pytest.raises(ValueError, match="method='push': .* on another node"):
        pes(4, local_size=2).run(in_a_row, 1, 3, 8, 8, None, "push")
