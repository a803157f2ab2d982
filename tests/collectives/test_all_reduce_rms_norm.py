"""All-reduce with residual and RMSNorm."""

import ml_dtypes
import numpy as np
import pytest
from emulated import spmd
from hypothesis import given
from hypothesis import strategies as st

import shmemkit as sk

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def inputs(rng, n, tokens, hidden, dtype):
    """-> x of all ranks, residual, weight"""
    x = rng.standard_normal((n, tokens, hidden)).astype(dtype)
    return x, rng.standard_normal((tokens, hidden)).astype(dtype), rng.uniform(0.5, 2, hidden).astype(dtype)


def expected(x, residual, weight, eps):
    """-> (out in float64, new residual): of bits that are those of AllReduce and one addition"""
    total = np.zeros(residual.shape, "float32")
    for of_rank in x:
        total += of_rank.astype("float32")
    total = total.astype(residual.dtype)
    new = (total.astype("float32") + residual.astype("float32")).astype(residual.dtype)
    wide = new.astype("float64")
    return wide / np.sqrt((wide**2).mean(1, keepdims=True) + eps) * weight.astype("float64"), new


def check(
    n,
    method,
    calls,
    hidden=64,
    dtype="bfloat16",
    in_place=False,
    max_tokens=None,
    eps=1e-6,
    of=None,
    sms=None,
    **options,
):
    """`calls`: the tokens of each; all ranks get the same bits"""
    rng = np.random.default_rng(0)
    given = [inputs(rng, n, tokens, hidden, DTYPES[dtype]) for tokens in calls]

    def main(world):
        op = sk.AllReduceRMSNorm(world, max_tokens or max(calls), hidden, dtype, method, options=of, sms=sms)
        found = []
        for x, residual, weight in given:
            mine, old = x[world.rank].copy(), residual.copy()
            places = {"out": mine, "new_residual": old} if in_place else {}
            found.append(op(mine, old, weight, eps, **places))
        world.synchronize()
        op.free()
        return found

    of_ranks = spmd(n, main, **options)
    for i, (x, residual, weight) in enumerate(given):
        out, new = expected(x, residual, weight, eps)
        for found in of_ranks:
            np.testing.assert_array_equal(found[i][1].view("uint16"), new.view("uint16"))
            np.testing.assert_array_equal(found[i][0].view("uint16"), of_ranks[0][i][0].view("uint16"))
        error = np.abs(of_ranks[0][i][0].astype("float64") - out)
        assert (
            error <= np.abs(out) * np.finfo("float16").eps * (8 if dtype == "bfloat16" else 1) + 1e-6
        ).all()


@pytest.mark.parametrize("method", ["one_shot", "two_shot", "auto"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_rows(n, method):
    check(n, method, [5, 1, 0, 5, 3], in_place=n == 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 264, 1024, 4104])
@pytest.mark.parametrize("method", ["one_shot", "two_shot"])
def test_sizes_of_rows(method, hidden, dtype):
    check(2, method, [3, 2], hidden, dtype)


@pytest.mark.parametrize("method", ["one_shot", "two_shot"])
@pytest.mark.parametrize("sms", [1, 2, 5])
def test_blocks_of_several_rows(method, sms):
    check(2, method, [5, 2, 7], sms=sms, races=True)


def test_auto_takes_both():
    check(3, "auto", [4, 1, 2, 4, 1], in_place=True, of={"one_shot": 2 * 128 * 2})

    def main(world):
        op = sk.AllReduceRMSNorm(world, 4, 64, options={"one_shot": 2 * 128 * 2})
        assert [op.method_for(tokens) for tokens in (1, 2, 3, 4)] == ["one_shot"] * 2 + ["two_shot"] * 2
        op.free()

    spmd(3, main)


def test_arrays_that_are_read_only():
    x, residual, weight = inputs(np.random.default_rng(0), 1, 2, 8, np.float16)
    for array in (x, residual, weight):
        array.flags.writeable = False

    def main(world):
        op = sk.AllReduceRMSNorm(world, 2, 8, "float16")
        _, new = op(x[0], residual, weight)
        world.synchronize()
        assert (new == expected(x, residual, weight, 1e-6)[1]).all()
        op.free()

    spmd(1, main)


@pytest.mark.parametrize("method", ["one_shot", "two_shot"])
@pytest.mark.parametrize("delivery", ["ordered", "unordered"])
def test_races_and_delivery(method, delivery):
    check(3, method, [4, 4, 2, 4], in_place=True, races=True, delivery=delivery, seed=3)


@given(
    st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.integers(0, 99)
)
def test_any_calls(n, calls, two_shots, seed):
    check(n, "two_shot" if two_shots else "one_shot", calls, 16, seed=seed, max_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["one_shot", "two_shot"])
def test_in_every_schedule(method):
    """Of two ranks and three calls of a row."""
    rng = np.random.default_rng(0)
    given = [inputs(rng, 2, 1, 8, DTYPES["bfloat16"]) for _ in range(3)]

    def main():
        with sk.init() as world:
            op = sk.AllReduceRMSNorm(world, 1, 8, method=method)
            found = [op(x[world.rank].copy(), residual, weight) for x, residual, weight in given]
            world.synchronize()
            op.free()
            for (x, residual, weight), (_, new) in zip(given, found, strict=True):
                assert (expected(x, residual, weight, 1e-6)[1] == new).all()

    found = sk.emu.explore(main, 2, exhaustive=True)
    assert found.finished and found.failure is None, str(found)


def test_a_graph():
    """Replayed with other content of the same arrays."""
    rng = np.random.default_rng(0)
    given = [inputs(rng, 2, 3, 32, DTYPES["bfloat16"]) for _ in range(3)]

    def main(world):
        op = sk.AllReduceRMSNorm(world, 3, 32)
        x, residual, weight = (a.copy() for a in (given[0][0][0], *given[0][1:]))
        out, new = np.empty_like(x), np.empty_like(x)
        world.stream.begin_capture()
        op(x, residual, weight, out=out, new_residual=new)
        graph = world.stream.end_capture()
        for of_ranks, old, factors in given:
            x[:], residual[:], weight[:] = of_ranks[world.rank], old, factors
            graph.launch(world.stream)
            world.synchronize()
            wanted, wanted_new = expected(of_ranks, old, factors, 1e-6)
            assert (new == wanted_new).all()
            assert np.abs(out.astype("float64") - wanted).max() < 0.05
        op.free()

    spmd(2, main)


def test_a_wrong_call():
    def main(world):
        with pytest.raises(ValueError, match=r"hidden is 12; it must be a multiple of 8"):
            sk.AllReduceRMSNorm(world, 4, 12)
        with pytest.raises(ValueError, match=r"dtype is float32; it must be bfloat16 or float16"):
            sk.AllReduceRMSNorm(world, 4, 8, "float32")
        with pytest.raises(ValueError, match="the same max_tokens on all ranks"):
            sk.AllReduceRMSNorm(world, 4 + world.rank, 8)
        op = sk.AllReduceRMSNorm(world, 4, 8, "float16", "two_shot")
        assert op.method_for(4) == "two_shot"
        rows, row = np.ones((4, 8), "float16"), np.ones(8, "float16")
        for arguments, said in (
            (
                (np.ones((5, 8), "float16"), np.ones((5, 8), "float16"), row),
                "x has 5 rows, more than max_tokens=4",
            ),
            ((rows, rows[:3].copy(), row), r"residual is float16 \(3, 8\); it must be float16 \(4, 8\)"),
            ((rows, rows.astype("float32"), row), "residual is float32"),
            ((rows, rows.copy(), rows[0, :4]), r"weight is float16 \(4,\)"),
            ((rows, rows.copy(), row, -1.0), "eps is -1.0; it must be a number of 0 or more"),
            ((rows, rows.copy(), row, 10**400), "it must be a number of 0 or more"),
            ((rows, rows.copy(), row, [1e-6]), "eps is a list"),
            ((rows, rows.copy(), row, 1e-6, rows[::-1]), "out is"),
        ):
            with pytest.raises(ValueError, match=said):
                op(*arguments)
        more = np.ones((5, 8), "float16")
        with pytest.raises(ValueError, match="out and x overlap; they must lie apart"):
            op(more[:4], rows, row, out=more[1:])
        op.free()
        with pytest.raises(RuntimeError, match="it was freed"):
            op(rows, rows.copy(), row)

    spmd(2, main)
