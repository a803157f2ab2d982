"""Combining partial attention."""

import ml_dtypes
import numpy as np
import pytest
from emulated import spmd
from fast import slow
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, float32, uint32

import shmemkit as sk
from shmemkit.device import load_piece, store_piece

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
EPSILON = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-20}


def inputs(rng, n, batch, heads, head_dim, dtype, without=()):
    """-> partials and lse of all ranks; those `without` tokens have NaN"""
    x = rng.standard_normal((n, batch, heads, head_dim)).astype(DTYPES[dtype])
    lse = rng.normal(0, 5, (n, batch, heads)).astype("float32")
    for r in without:
        x[r], lse[r] = np.nan, -np.inf
    return x, lse


def expected(x, lse):
    """In float64."""
    x, lse = x.astype("float64"), lse.astype("float64")
    most = lse.max(0)
    with np.errstate(all="ignore"):
        weights = np.where(lse == -np.inf, 0, np.exp(lse - most))
    total = weights.sum(0)
    weights = weights / np.where(total == 0, 1, total)
    return (np.where(weights[..., None] == 0, 0, x) * weights[..., None]).sum(0)


def segment(wanted, n, rank, form):
    heads = wanted.shape[1] // n
    return wanted if form == "all_gather" else wanted[:, rank * heads : (rank + 1) * heads]


def check(
    n,
    form,
    calls,
    heads=4,
    head_dim=32,
    dtype="bfloat16",
    in_place=False,
    max_batch=None,
    without=(),
    **options,
):
    """`calls`: the batch of each"""
    rng = np.random.default_rng(0)
    given = [inputs(rng, n, batch, heads, head_dim, dtype, without) for batch in calls]

    def main(world):
        op = sk.AttentionCombine(world, max_batch or max(calls), heads, head_dim, dtype, form)
        found = []
        for x, lse in given:
            mine = x[world.rank].copy()
            found.append(op(mine, lse[world.rank].copy(), mine if in_place else None))
        world.synchronize()
        op.free()
        return found

    of_ranks = spmd(n, main, **options)
    for i, (x, lse) in enumerate(given):
        for rank, found in enumerate(of_ranks):
            wanted = segment(expected(x, lse), n, rank, form)
            assert found[i].shape == wanted.shape
            error = np.abs(found[i].astype("float64") - wanted)
            assert (error <= EPSILON[dtype] * np.abs(wanted) + 1e-6).all(), error.max()
            if form == "all_gather":
                np.testing.assert_array_equal(found[i].view("uint8"), of_ranks[0][i].view("uint8"))


@pytest.mark.every(3)
@pytest.mark.parametrize("form", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_batches(n, form):
    check(n, form, [3, 1, 0, 3, 2], heads=2 * n, in_place=n == 3 and form == "all_gather")


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 128, 512])
@pytest.mark.parametrize("form", ["all_gather", "all_to_all"])
def test_heads(form, head_dim, dtype):
    check(2, form, [1, 2], 2, head_dim, dtype)


@pytest.mark.parametrize("without", [(1,), (0, 2), (0, 1, 2)])
def test_ranks_without_tokens(without):
    check(3, "all_gather", [2, 2], without=without)


@pytest.mark.parametrize(
    ("lse", "wanted"),
    [
        ((-np.inf, -np.inf), 0),
        ((np.nan, 0), np.nan),
        ((np.inf, 0), np.nan),
        ((np.inf, np.inf), np.nan),
        ((-3e38, 3e38), 2),
        ((3e38, -np.inf), 1),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_lse_that_are_special(lse, wanted):
    def main(world):
        op = sk.AttentionCombine(world, 1, 2, 8, "float32")
        out = op(np.full((1, 2, 8), world.rank + 1, "float32"), np.float32([[lse[world.rank], 0]]))
        world.synchronize()
        op.free()
        return out[0]

    for first, second in spmd(2, main):
        np.testing.assert_array_equal(first, wanted)
        assert (second == 1.5).all()


@pytest.mark.every(3)
@pytest.mark.parametrize("form", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("delivery", ["ordered", "unordered"])
def test_races_and_delivery(form, delivery):
    check(3, form, [2, 2, 1, 2], 3, races=True, delivery=delivery, seed=3)


@pytest.mark.slow
@given(
    st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.booleans(), st.integers(0, 99)
)
def test_any_calls(n, calls, to_all, seed):
    check(n, "all_gather" if to_all else "all_to_all", calls, n, 8, seed=seed, max_batch=3)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_gather", "all_to_all"])
def test_in_every_schedule(form):
    """Of two ranks and three calls of a row for each."""
    rng = np.random.default_rng(0)
    heads = 1 if form == "all_gather" else 2
    given = [inputs(rng, 2, 1, heads, 8, "bfloat16") for _ in range(3)]

    def main():
        with sk.init() as world:
            op = sk.AttentionCombine(world, 1, heads, 8, form=form)
            found = [op(x[world.rank].copy(), lse[world.rank].copy()) for x, lse in given]
            world.synchronize()
            op.free()
            for (x, lse), out in zip(given, found, strict=True):
                wanted = segment(expected(x, lse), 2, world.rank, form)
                assert np.abs(out.astype("float64") - wanted).max() < 0.02

    found = sk.emu.explore(main, 2, exhaustive=True)
    assert found.finished and found.failure is None, str(found)


def test_in_one_line_and_in_a_graph():
    rng = np.random.default_rng(0)
    given = [inputs(rng, 2, 3, 2, 16, "float32") for _ in range(3)]

    def main(world):
        x, lse = (a[world.rank].copy() for a in given[0])
        sk.attention_combine(x, lse, form="all_to_all")
        out = sk.attention_combine(x, lse)
        world.synchronize()
        world.stream.begin_capture()
        sk.attention_combine(x, lse, out=out)
        graph = world.stream.end_capture()
        for of_ranks, of_lse in given:
            x[:], lse[:] = of_ranks[world.rank], of_lse[world.rank]
            graph.launch(world.stream)
            world.synchronize()
            np.testing.assert_allclose(out, expected(of_ranks, of_lse), 1e-5, 1e-6)
        world.stream.begin_capture()
        with pytest.raises(RuntimeError, match="captures a graph"):
            sk.attention_combine(np.ones((1, 2, 64), "float32"), np.ones((1, 2), "float32"))
        world.stream.end_capture()

    spmd(2, main)


def ending_with(functions):
    lanes, _, send, receive = functions

    @cuda.jit
    def kernel(x, lse, out, packets):
        """Send all rows, the last one first, then receive all."""
        j, row = uint32(cuda.laneid & (lanes - 1)), uint32(cuda.threadIdx.x // lanes)
        rows = lse.size
        if row < rows:
            last = uint32(rows - 1 - row)
            send(packets, last, j, (load_piece(x, last * lanes + j),), float32(lse[last]))
        if row < rows:
            store_piece(out, row * lanes + j, receive(packets, row, j)[0])

    return kernel


@pytest.mark.parametrize("races", [False, *slow(True)])
def test_in_a_users_kernel(races):
    rng = np.random.default_rng(0)
    x, lse = inputs(rng, 2, 2, 3, 64, "bfloat16", without=(1,))

    def main(world):
        op = sk.AttentionCombine(world, 2, 3, 64)
        kernel = ending_with(op.functions)
        pieces = x[world.rank].reshape(-1).view("uint8").view("complex128").copy()
        out = np.zeros_like(pieces)
        for _ in range(3):
            out[:] = 0
            kernel[1, 64](pieces, lse[world.rank].reshape(-1).copy(), out, op.packets)
            world.synchronize()
            found = out.view(ml_dtypes.bfloat16).reshape(2, 3, 64).astype("float64")
            assert np.abs(found - expected(x, lse)).max() < 0.02
        op.free()

    spmd(2, main, races=races)


def test_wrong_arguments():
    def main(world):
        with pytest.raises(ValueError, match="head_dim is 12; of bfloat16 it must be a multiple of 8"):
            sk.AttentionCombine(world, 1, 2, 12)
        with pytest.raises(ValueError, match="there are 3 heads and 2 ranks"):
            sk.AttentionCombine(world, 1, 3, 8, form="all_to_all")
        with pytest.raises(ValueError, match="dtype is int32; it must be bfloat16, float16 or float32"):
            sk.AttentionCombine(world, 1, 3, 8, "int32")
        with pytest.raises(ValueError, match="the same heads on all ranks"):
            sk.AttentionCombine(world, 1, 3 + world.rank, 8)

    spmd(2, main)
