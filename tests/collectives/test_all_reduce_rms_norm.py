"""All-reduce with residual and RMSNorm, also to float8."""

import ml_dtypes
import numpy as np
import pytest
from emulated import spmd
from fast import examples, slow
from hypothesis import given
from hypothesis import strategies as st
from reduced import float8

import shmemkit as sk

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
F8 = np.dtype(ml_dtypes.float8_e4m3fn)


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


@pytest.mark.every(4)
@pytest.mark.parametrize("method", ["one_shot", "two_shot", "auto"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_rows(n, method):
    check(n, method, [5, 1, 0, 5, 3], in_place=n == 3)


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 264, 1024, *slow(4104)])
@pytest.mark.parametrize("method", ["one_shot", "two_shot"])
def test_sizes_of_rows(method, hidden, dtype):
    check(2, method, [3, 2], hidden, dtype)


@pytest.mark.every(3)
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


@pytest.mark.every(3)
@pytest.mark.parametrize("method", ["one_shot", "two_shot"])
@pytest.mark.parametrize("delivery", ["ordered", "unordered"])
def test_races_and_delivery(method, delivery):
    check(3, method, [4, 4, 2, 4], in_place=True, races=True, delivery=delivery, seed=3)


@pytest.mark.slow
@examples(30)
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


def quantized(out, scale=None):
    """-> float8 of `out`, which is of 16 bits, and its scales, of blocks of 128 unless one is given"""
    tokens, hidden = out.shape
    wide = np.zeros((tokens, -hidden % 128 + hidden), "float32")
    wide[:, :hidden] = out
    blocks = wide.reshape(tokens, -(-hidden // 128), 128)
    scales = np.float32(scale)
    if scale is None:
        scales = np.maximum(np.abs(blocks).max(2), np.float32(1e-12)) / np.float32(448)
    inverse = np.float32(1) / (scales if scale is not None else scales[..., None])
    return float8(blocks * inverse, F8).reshape(wide.shape)[:, :hidden], scales


def check_float8(n, method, calls, hidden=64, dtype="bfloat16", changed=None, sms=None, **options):
    """Out as a kernel of its own would round it. A rank's scales are those of the others."""
    rng = np.random.default_rng(0)
    given = [inputs(rng, n, tokens, hidden, DTYPES[dtype]) for tokens in calls]
    for x, residual, _ in given if changed else ():
        changed(x, residual)

    def main(world):
        op = sk.AllReduceRMSNorm(world, max(calls), hidden, dtype, method, sms=sms)
        for x, residual, weight in given:
            mine = x[world.rank].copy()
            out, new = op(mine, residual, weight)
            one, same = op(mine, residual, weight, scale=np.float32([0.03]))
            scales = np.empty((len(x[0]), -(-hidden // 128)), "float32")
            several, _ = op(mine, residual, weight, out=np.empty(out.shape, F8), scales=scales)
            world.synchronize()
            np.testing.assert_array_equal(new.view("uint16"), same.view("uint16"))
            np.testing.assert_array_equal(one.view("uint8"), quantized(out, 0.03)[0].view("uint8"))
            wanted, of_blocks = quantized(out)
            np.testing.assert_array_equal(scales, of_blocks)
            np.testing.assert_array_equal(several.view("uint8"), wanted.view("uint8"))
        op.free()

    spmd(n, main, **options)


@pytest.mark.every(3)
@pytest.mark.parametrize("method", ["one_shot", "two_shot"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_to_float8(n, method):
    check_float8(n, method, [3, 1, 0, 2])


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 136, 1024])
def test_blocks_with_a_scale(hidden, dtype):
    check_float8(2, "one_shot", [2], hidden, dtype)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value")
def test_float8_of_special_numbers():
    """Zeros, numbers that saturate, an infinity and NaN: each only in its own row, or block."""

    def changed(x, residual):
        x[:, 0], residual[0] = 0, 0
        x[:, 1, 5], residual[1, 5] = 0, 3e4
        x[:, 2], residual[2, 200] = 0, np.inf
        residual[3, 130] = np.nan

    check_float8(2, "one_shot", [5], 264, changed=changed)


@pytest.mark.slow
def test_races_of_float8():
    check_float8(2, "two_shot", [3, 1], 136, sms=2, races=True, delivery="unordered", seed=3)


def test_a_graph_to_float8():
    """The scale is read on the GPU, whenever the graph runs."""
    x, residual, weight = inputs(np.random.default_rng(0), 2, 3, 32, DTYPES["bfloat16"])

    def main(world):
        op, scale = sk.AllReduceRMSNorm(world, 3, 32), np.float32([1])
        mine = x[world.rank].copy()
        plain, _ = op(mine, residual, weight)
        world.stream.begin_capture()
        out, _ = op(mine, residual, weight, scale=scale)
        graph = world.stream.end_capture()
        for number in (0.5, 0.01):
            scale[:] = number
            graph.launch(world.stream)
            world.synchronize()
            np.testing.assert_array_equal(out.view("uint8"), quantized(plain, number)[0].view("uint8"))
        op.free()

    spmd(2, main)


@pytest.mark.slow
def test_a_product_of_what_it_returns():
    """Its float8 and scales are what sk.matmul takes."""
    rng = np.random.default_rng(0)
    x, residual, weight = inputs(rng, 2, 64, 256, DTYPES["bfloat16"])
    w = rng.standard_normal((128, 256)).astype("float32")
    of_w = np.abs(w.reshape(128, 2, 128)).max((0, 2))[None] / 448
    w8 = float8(w / np.repeat(of_w, 128, 1), F8)

    def main(world):
        op, scales = sk.AllReduceRMSNorm(world, 64, 256), np.empty((64, 2), "float32")
        out, _ = op(x[world.rank].copy(), residual, weight, scales=scales)
        y = sk.matmul(out, w8.T, scales=(scales, of_w.T))
        world.synchronize()
        op.free()
        wanted = expected(x, residual, weight, 1e-6)[0] @ w.T
        assert np.linalg.norm(y.astype("float64") - wanted) < 0.04 * np.linalg.norm(wanted)

    spmd(2, main)


def test_a_wrong_call_to_float8():
    def main(world):
        op = sk.AllReduceRMSNorm(world, 4, 264, "float16")
        rows, row, one = np.ones((4, 264), "float16"), np.ones(264, "float16"), np.ones(1, "float32")
        scales = np.ones((4, 3), "float32")
        for more, said in (
            ({"scale": one, "scales": scales}, "scale and scales are given"),
            ({"scale": scales}, r"scale is float32 \(4, 3\); it must be float32 of one element"),
            ({"scale": one.astype("float64")}, r"scale is float64 \(1,\); it must be float32"),
            ({"scale": one, "out": rows.copy()}, "out is float16 .*; it must be float8_e4m3fn"),
            ({"out": np.ones(rows.shape, F8)}, "out is float8_e4m3fn .*; it must be float16"),
            ({"scale": one, "out": rows.view(F8).reshape(-1)[: rows.size].reshape(rows.shape)}, "overlap"),
        ):
            with pytest.raises(ValueError, match=said):
                op(rows, rows.copy(), row, **more)

    spmd(1, main)


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
        for eps, said in (
            (-1.0, "eps is -1.0; it must be a number of 0 or more"),
            (10**400, "it must be a number of 0 or more"),
            ([1e-6], "eps is a list"),
        ):
            with pytest.raises(ValueError, match=said):
                op(rows, rows.copy(), row, eps)

    spmd(2, main)
