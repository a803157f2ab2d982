"""The method "push" of all-gather and matrix product on the emulator: sizes, ranks, several calls, graphs,
and what goes wrong when one of its steps is taken away."""

import functools

import numpy as np
import pytest
from fast import slow
from gemms import check, moved
from mutations import argument, condition, omit, single_buffer, store
from test_ag_gemm import BF16, found_out, graphs_and_streams, in_a_row, integers, small, weight_of

import shmemkit as sk
from shmemkit.emu import EmulatorError
from shmemkit.gemm.all_gather import push


def columns(by_columns=True, splits=1):
    """Options of AllGatherGemm: few senders, and parts of few columns, or x by rows."""
    return small(by_columns, splits, senders=2, part_bytes=128)


orders = pytest.mark.parametrize("by_columns", [True, False], ids=["columns", "rows"])


def pushed(by_columns):
    return functools.partial(in_a_row, method="push", sms=4, options=columns(by_columns))


@pytest.mark.each_value
@pytest.mark.every(2)
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize(
    ("n_ranks", "rows", "k"),
    [
        *slow((1, 70, 72)),
        (2, 3, 16),
        *slow((2, 64, 72)),
        *slow((3, 40, 72)),  # tiles with rows of several ranks, which all come from staged
        *slow((5, 3, 8)),
        *slow((2, 3, 1160)),  # the columns are more than 16 parts of the least width
    ],
)
@orders
def test_sizes(pes, n_ranks, rows, k, by_columns):
    calls = 3 if n_ranks == 2 and rows == 64 else 2
    assert pes(n_ranks).run(pushed(by_columns), calls, rows, k, 48) == [calls] * n_ranks


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("given", ["symmetric", "private", "in place"])
@pytest.mark.parametrize("rows", slow(24, 64))
@orders
def test_gathered_rows(pes, rows, given, by_columns):
    assert pes(2).run(pushed(by_columns), 3, rows, 72, 16, given) == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, np.dtype("float16")])
@orders
def test_parts_of_k(pes, dtype, by_columns):
    arguments = 2, 64, 136, 32, None, "push", 4, dtype, True, columns(by_columns, 2)
    assert pes(2).run(in_a_row, *arguments) == [2, 2]


@pytest.mark.slow
def test_wide_rows(pes):
    """As they are on GPUs: two parts, and the last one narrow."""
    assert pes(2).run(in_a_row, 2, 3, 1032, 16, None, "push", 9, BF16, False, None) == [2, 2]


@pytest.mark.slow
def test_any_arrays_and_sizes_in_turn(pes):
    """Several weights, one of them of no columns; operands and results that the TMA does not take, on one
    rank alone; another size in each call."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = 4
        me, product = world.rank, sk.AllGatherGemm(world, 2 * 64 * 136 * 2, "push", options=columns())
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
def test_graphs_and_streams(pes):
    pes(2).run(functools.partial(graphs_and_streams, **columns()), "push")


COLUMNS, ROWS = True, False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "by_columns", "change"),
    [
        (64, COLUMNS, omit("notify_at", inside="tell")),
        (64, COLUMNS, omit("store_vec16", inside="store_piece")),
        (64, COLUMNS, omit("mbarrier_wait", inside="send_columns")),
        (64, COLUMNS, omit("mbarrier_arrive", inside="send_columns")),
        (64, COLUMNS, omit("store_piece", 2, "send")),
        (64, COLUMNS, omit("tensormap_acquire")),
        (64, COLUMNS, single_buffer()),
        (64, COLUMNS, store("epoch", "epochs[0]")),  # signals of the epoch before
        (40, COLUMNS, store("reads_x", "True", inside="Push._launch")),
        (64, ROWS, argument("tell", 2, "part", inside="send_rows")),  # one word of a part
        (64, ROWS, omit("cuda.syncthreads", inside="send_rows")),
        (40, ROWS, condition("to.and_mine", "peer != to.me", inside="send_rows")),
        (40, ROWS, store("come[]", "parts")),
    ],
)
def test_each_part_is_needed(mutate, rows, by_columns, change):
    mutate(push, change)
    assert found_out(rows, 72, 3, "push", 4, columns(by_columns), races=True)


def test_parts_without_columns_are_counted(mutate):
    """Or the next call, of longer rows, waits for ever."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = 4
        product = sk.AllGatherGemm(world, 2 * 8 * 264 * 2, "push", options=columns())
        for k in (8, 264):
            product(integers(8, k), weight_of(world.rank, k, 16))
        world.synchronize()

    mutate(push, omit("tell", 2, "send_columns"))
    with pytest.raises(EmulatorError, match="deadlock"):
        sk.emu.run(main, 2)


def test_plans():
    """Few senders, where the product takes no longer without more; of one round of tiles, all at once."""

    def of(*sizes):
        plan = push.plan_of(*sizes, 132, sk.AllGatherGemm.options)
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
