"""Matrix products on the emulator: methods, shapes, layouts, dtypes, epilogues, errors, arrays of others."""

import numpy as np
import pytest
from emulated import spmd
from fast import examples, slow
from gemms import LAYOUTS, ROWS, check, error, expected, operand
from hypothesis import given
from hypothesis import strategies as st
from mutations import argument, omit

import shmemkit as sk
from shmemkit.emu import RaceError
from shmemkit.emu.stream import Stream
from shmemkit.gemm import METHODS, PLANS, Gemm, gpu_of, simt, sm80, sm90_host
from shmemkit.gemm.problem import Gpu, Problem
from shmemkit.gemm.sm80 import NARROW, Sm80, Tile, choose_tile, grouping, resident
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.support.gpus import n_gpus

SMALL = Tile(64, 64, 32, 3, 2, 2)


def product(method, m, n, k, dtype="float32", out_dtype=None, layouts=ROWS, pads=(0, 0, 0), **options):
    """Compute one, in a poisoned out, and check it. `options`: bias (a dtype), activation"""
    world, rng = sk.current(), np.random.default_rng([m, n, k])
    a, b = (operand(rng, *s, dtype, *how) for s, *how in zip(((m, k), (k, n)), layouts, pads, strict=False))
    room = np.full((m + 1, n + pads[2]), 77, as_dtype(out_dtype or dtype))
    out = room[:m, :n]
    if "bias" in options:
        options["bias"] = operand(rng, 1, n, options["bias"])[0]
    assert method(a, b, out, **options) is out
    world.synchronize()
    check(out, expected(a, b, **options))
    assert (room[m:] == 77).all() and (room[:, n:] == 77).all()


def bound(kind, *how):
    """A method by itself, for `product`: on one multiprocessor, whose blocks compute several tiles each."""

    def run(a, b, out, bias=None, activation=None):
        gpu = gpu_of(sk.current())._replace(multiprocessors=1)
        problem = Problem(a, b, out, bias, activation)
        assert kind.unsupported(problem, gpu) is None
        kind(problem, gpu, *how)()
        return out

    return run


def run(*args, races=False, **options):
    spmd(1, lambda world: product(*args, **options), races=races)


small = bound(Sm80, SMALL, grouping(2))


# ---- an order of one's own


@pytest.mark.every(3)
@pytest.mark.parametrize("method", METHODS)
def test_an_order(method):
    """Each method asks for every tile: the host once, then the kernel."""
    asked = []

    def backwards(turn, n_m, n_n):
        asked.append((turn, n_m, n_n))
        return n_m - 1 - turn // n_n, n_n - 1 - turn % n_n

    run(sk.Gemm(method, order=backwards), 140, 72, 8, "bfloat16")
    _, n_m, n_n = asked[0]
    turns = [turn for turn, *_ in asked]
    assert n_m > 1 and turns[: n_m * n_n] == list(range(n_m * n_n)) == sorted(set(turns[n_m * n_n :]))


def pairs_of_rows(turn, n_m, n_n):
    """For an even number of rows."""
    pair, turn = divmod(turn, 2 * n_n)
    return 2 * pair + turn % 2, turn // 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "order, gives",
    [
        (lambda turn, n_m, n_n: (0, 0), r"\(0, 0\) for turn 1"),
        (lambda turn, n_m, n_n: (turn // n_n, -1), r"\(0, -1\) for turn 0"),
        (lambda turn, n_m, n_n: (turn // n_n, turn / n_n), r"\(0, 0.0\) for turn 0"),
        (lambda turn, n_m, n_n: turn, "0 for turn 0"),
        (pairs_of_rows, r"\(\d, 0\) for turn \d+"),
    ],
)
def test_orders_that_are_no_permutation(method, order, gives):
    with pytest.raises(ValueError, match=f"order gives {gives} of . by . tiles; it must give each tile"):
        run(sk.Gemm(method, order=order), 300, 136, 24, "bfloat16")


def test_an_order_for_some_sizes():
    """The product's own tiles count, not those of other sizes."""
    run(sk.Gemm("simt", order=pairs_of_rows), 256, 70, 3, "float32")


def test_an_order_that_is_no_function():
    with pytest.raises(TypeError, match="Gemm: order is 8; it must be a function"):
        sk.Gemm(order=8)


# ---- simt


@pytest.mark.parametrize("dtype", simt.DTYPES)
def test_simt_dtypes(dtype):
    run(sk.matmul, 17, 66, 19, dtype)


@pytest.mark.every(3)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_simt_layouts(layouts):
    run(sk.matmul, 70, 5, 33, "float32", layouts=layouts, pads=(1, 3, 2), races=True)


def test_simt_any_strides():
    def main(world):
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((40, 60))[::-2, ::3], np.broadcast_to(rng.standard_normal(30), (20, 30))
        out = np.zeros((30, 20)).T
        sk.matmul(a, b, out)
        world.synchronize()
        check(out, expected(a, b))

    spmd(1, main)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("bfloat16", "float32"), ("float16", "bfloat16"), ("int8", "int32"), ("uint8", "int64")],
)
def test_simt_other_results(dtype, out_dtype):
    run(sk.matmul, 20, 9, 40, dtype, out_dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_simt_epilogue(dtype, activation):
    run(sk.matmul, 6, 10, 5, dtype, bias=dtype, activation=activation)


def of_one(a, b, out_dtype, bias=None, activation=None):
    """activation(a * b + bias), of arrays of one element"""
    given = np.array([[b]], a.dtype)

    def main(world):
        out = np.zeros((1, 1), as_dtype(out_dtype))
        sk.matmul(a, given, out, bias=bias and np.array([bias], out_dtype), activation=activation)
        world.synchronize()
        return out[0, 0]

    return spmd(1, main)[0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_silu_of_large_numbers(dtype):
    """As in PyTorch, by x / (1 + exp(-x))."""
    largest = float(np.finfo("float64").max) if dtype == "float64" else 3e38
    wants = {-30.0: -30 / (1 + np.exp(30)), -1e3: -0.0, -largest: -0.0, -np.inf: np.nan, largest: largest}
    for x, want in {**wants, np.inf: np.inf, np.nan: np.nan}.items():
        got = float(of_one(np.array([[x]], as_dtype(dtype)), 1, dtype, activation="silu"))
        np.testing.assert_allclose(got, want, 1e-2 if dtype == "bfloat16" else 1e-6)
        assert np.isnan(got) or np.signbit(got) == np.signbit(want), (x, got)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "out_dtype", "bias", "activation", "want"),
    [
        ("uint8", 100, 3, "int32", -1, None, 299),
        ("uint8", 100, 3, "int8", 1, None, 45),
        ("uint8", 1, 1, "int32", -5, "relu", 0),
        ("int8", 1, -1, "uint64", None, "relu", 0),
        ("uint64", 1, 1, "int64", -5, "relu", 0),
        ("uint64", 2**62 + 1, 1, "int64", 1, None, 2**62 + 2),
        ("uint64", 2**63 + 1, 1, "uint64", 1, "relu", 2**63 + 2),
        ("uint64", 2**63 + 1, 2, "uint64", 2**64 - 1, "relu", 1),
        ("uint32", 2**32 - 1, 2**32 - 1, "uint64", None, "relu", (2**32 - 1) ** 2),
        ("int64", 1, 1, "uint64", 2**63 + 1, None, 2**63 + 2),
        ("int64", -(2**63), 1, "int64", -1, None, 2**63 - 1),
    ],
)
def test_simt_integers(dtype, a, b, out_dtype, bias, activation, want):
    """Modulo 2**64, whatever has a sign; relu of what has one."""
    assert of_one(np.array([[a]], dtype), b, out_dtype, bias, activation) == want


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1)])
def test_empty_and_tiny(shape):
    run(sk.matmul, *shape, "float32", bias="float32")


# ---- sm80


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("ragged", [(0, 0, 0), (8, 0, 8), (2, 2, 2), (1, 3, 1)])
def test_sm80_layouts(layouts, ragged):
    """16, 4 and 2 bytes are copied at once; edges in all directions."""
    m, n, k = 64, 64, 96
    if any(ragged):
        m, n, k = 72 + ragged[0], 64 + ragged[1], 32 + ragged[2]
    out_dtype = "bfloat16" if ragged[0] == 1 else "float32"
    run(small, m, n, k, "bfloat16", out_dtype, layouts)


@pytest.mark.every(3)
@pytest.mark.parametrize("stages, k", [*((3, k) for k in (1, 31, 32, 33, 65, 160)), (4, 250), (6, 250)])
def test_sm80_depths(stages, k):
    """Fewer slabs than stages, as many, and more; each with a whole last slab and without."""
    method = bound(Sm80, SMALL._replace(stages=stages), grouping(2))
    run(method, 5, 16, k, "float16", "float32", ("rows", "columns"), (-k % 8, -k % 8, 0), races=True)


def test_sm80_few_rows_of_columns():
    """What is copied beyond an operand's rows is not read."""
    run(small, 5, 3, 33, "float16", "float32", ("columns", "rows"), races=True)


@pytest.mark.parametrize("tile", [SMALL._replace(k=16), SMALL._replace(k=128), SMALL._replace(stages=10)])
def test_sm80_tiles_that_it_does_not_have(tile):
    with pytest.raises(ValueError, match="k must be 32 or 64, and stages 3 to 9"):
        run(bound(Sm80, tile), 8, 8, 8, "float16")


def test_sm80_one_column_of_rows_that_go_backwards():
    def main(world):
        a, b, out = np.ones((8, 16), "float16"), np.ones((16, 1), "float16"), np.zeros((8, 1), "float16")
        with pytest.raises(ValueError, match="must have contiguous rows"):
            sk.matmul(a, b, out[::-1], method="sm80")

    spmd(1, main)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "tile",
    [
        Tile(64, 64, 64, 4, 2, 2),
        Tile(64, 128, 64, 3, 2, 2),
        Tile(128, 128, 32, 4, 2, 2),
        *slow(Tile(128, 256, 64, 3, 2, 4), Tile(256, 128, 32, 3, 4, 2)),
    ],
    ids=str,
)
def test_sm80_tiles(tile):
    tile = Tile(*tile)
    layouts = ("columns", "rows") if tile.n == 128 else ("rows", "columns")
    run(bound(Sm80, tile), tile.m, tile.n + 8, tile.k + 8, "bfloat16", layouts=layouts)


@pytest.mark.parametrize(
    ("out_dtype", "bias", "activation"),
    [("bfloat16", "bfloat16", "relu"), ("float32", "float32", "gelu"), ("float16", "float32", "silu")],
)
def test_sm80_epilogue(out_dtype, bias, activation):
    run(
        small, 20, 33 if bias == "float32" else 40, 16, "float16", out_dtype, bias=bias, activation=activation
    )


@examples(8)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 70), st.sampled_from(LAYOUTS))
def test_sm80_any_sizes(m, n, k, layouts):
    run(small, m, n, k, "float16", "float32", layouts)


def sm80_error(races):
    """The error of a product."""

    def main(world):
        rng = np.random.default_rng(0)
        a, b = operand(rng, 640, 160, "float16"), operand(rng, 160, 64, "float16", "columns")
        out = np.zeros((640, 64), "float32")  # several tiles for a block
        bound(Sm80, SMALL)(a, b, out)
        world.synchronize()
        return error(out, expected(a, b))

    return spmd(1, main, races=races)[0]


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("k", [16, *slow(170)])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_sm80_several_tiles_of_a_block(k, out_dtype):
    """Each begins to load the next one before it stores: whole tiles and edges, two blocks."""
    run(small, 140, 132, k, "bfloat16", out_dtype, bias="bfloat16", activation="relu", races=True)


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize(("n", "pad"), [(64, 0), (66, 0), (65, 0), (64, 1), (66, 2), (68, 4)])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_sm80_stores(n, pad, out_dtype):
    """8 bytes at once where columns and rows allow it, else one element."""
    run(small, 70, n, 32, "float16", out_dtype, ROWS, (0, 0, pad), bias="float32")


@pytest.mark.parametrize("first, width", [(0, 4), (1, 1), (2, 1), (4, 4)])
def test_sm80_stores_where_8_bytes_may_begin(first, width, monkeypatch):
    made, kernel = [], sm80.sm80_kernel
    monkeypatch.setattr(sm80, "sm80_kernel", lambda *given: made.append(given[2]) or kernel(*given))

    def main(world):
        a, b = np.ones((8, 16), "float16"), np.ones((16, 64), "float16")
        out = np.zeros(first + 8 * 64, "float16")[first:].reshape(8, 64)
        sk.matmul(a, b, out, method="sm80")
        world.synchronize()
        assert (out == 16).all() and made == [width]

    spmd(1, main)


@pytest.mark.parametrize("which", ["but_first", "but_second"])
def test_sm80_needs_its_waits(mutate, which):
    """If it waits for a group less, it multiplies what is not there."""
    assert sm80_error(races=True) < 1e-5
    mutate(sm80, argument("cp_async_wait", 0, f"{which} + 1", 1 if which == "but_first" else 2))
    assert np.isnan(sm80_error(races=False))
    with pytest.raises(RaceError):
        sm80_error(races=True)


@pytest.mark.parametrize("which", [1, 2, 3])
def test_sm80_needs_its_barriers(mutate, which):
    mutate(sm80, omit("cuda.syncthreads", which))
    with pytest.raises(RaceError):
        sm80_error(races=True)


def test_tiles_fit_the_gpu():
    def tile(m, n, k, shared=232448):
        return choose_tile(m, n, k, Gpu((9, 0), 132, shared, np))

    assert tile(8192, 8192, 4096) == (256, 128, 32, 6, 4, 2)
    assert tile(8192, 8192, 1024) == (128, 128, 32, 6, 2, 2)  # by two blocks, of which one stores
    assert tile(64, 7168, 8192)[:2] == (64, 64)  # enough blocks for all multiprocessors
    assert choose_tile(8192, 8192, 4095, Gpu((9, 0), 132, 232448, np), NARROW).m == 64
    alone = (256, 128), (64, 64)  # on its multiprocessor
    for shared in (232448, 166912, 101376):
        for m in (1, 64, 300, 4096):
            chosen = tile(m, 7168, 512, shared)
            assert chosen.shared_bytes <= shared and chosen.stages >= 3
            assert resident(chosen, Gpu((9, 0), 132, shared, np)) == (1 if chosen[:2] in alone else 2)


# ---- sm90


@pytest.mark.parametrize("layouts", [("rows", "rows"), ("columns", "columns")])
def test_sm90_by_name(layouts):
    run(sk.Gemm("sm90"), 72, 40, 80, "bfloat16", layouts=layouts, bias="bfloat16", activation="relu")


def test_sm90_tiles():
    """The fastest of those that were measured on an H200."""

    def choice(*size):
        tile, splits = sm90_host.choose(*size)
        return tile.m, tile.n, splits

    large = (8192, 8192, 8192), (8192, 8192, 1024), (4096, 14336, 4096), (8192, 3584, 4096), (512, 8192, 7168)
    assert {choice(*size) for size in large} == {(128, 256, 1)}
    assert choice(512, 7168, 8192) == (128, 224, 1)
    assert choice(64, 7168, 8192) == (64, 64, 1)
    assert choice(256, 4096, 7168) == (128, 64, 1)
    assert choice(256, 8192, 7168) == (128, 128, 1)
    assert choice(128, 4096, 7168) == (128, 64, 2)


# ---- the host object


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_methods(method):
    run(Gemm(method), 24, 16, 40, "bfloat16", "float32", ("rows", "columns"))


@pytest.mark.slow
def test_new_results_and_kept_calls():
    def main(world):
        rng = np.random.default_rng(0)
        a, b = operand(rng, 6, 7, "float16"), operand(rng, 7, 5, "float16")
        out = sk.matmul(a, b, activation="relu")
        assert out.dtype == "float16" and out.shape == (6, 5)
        kept = world.kept[Gemm, "auto", None]
        assert len(kept._plans) == 1
        sk.matmul(a, b, out)
        sk.matmul(a, b, out)
        assert len(kept._plans) == 2
        a += 1
        sk.matmul(a, b, out)  # the same memory, with other numbers
        world.synchronize()
        check(out, expected(a, b))
        assert len(kept._plans) <= PLANS

    spmd(1, main)


def test_streams():
    def main(world):
        rng = np.random.default_rng(0)
        other = Stream(world.backend.machine, world.rank)
        a, b = operand(rng, 6, 7, "float32"), operand(rng, 7, 5, "float32")
        out = sk.matmul(a, b, stream=other)
        other.synchronize()
        check(out, expected(a, b))

    spmd(1, main, races=True)


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, as_dtype(dtype))


@pytest.mark.parametrize(
    ("x", "w", "options", "text"),
    [
        (zeros(4, 5), zeros(3, 5), {}, r"w is float32 \(3, 5\); it must be float32 \(5, n\)\. Give w\.T\n"),
        (zeros(4, 5), zeros(3, 4), {}, r"w is float32 \(3, 4\); it must be float32 \(5, n\)\n"),
        (zeros(4, 5), zeros(5, 2), {"out": zeros(4, 2, dtype="float64")}, "it must be float32 "),
        (zeros(4, 5), zeros(5, 2), {"bias": zeros(2, dtype="float16")}, "float16 .* it must be float32 "),
        (zeros(4, 5), zeros(5, 2), {"activation": "tanh"}, "it must be None, 'relu', 'gelu' or 'silu'"),
        (
            zeros(4, 5, dtype="int8"),
            zeros(5, 2, dtype="int8"),
            {"activation": "gelu"},
            "None or 'relu'",
        ),
        (zeros(4, 5), zeros(5, 2), {"method": "sm80"}, "the operands are float32 .* Use method='auto'"),
        (
            zeros(8, 16, dtype="float16"),
            zeros(16, 70, dtype="float16"),
            {"method": "sm90"},
            r"out is float16 \(8, 70\); its rows must be a multiple of 16 bytes",
        ),
        (zeros(4, 5), zeros(5, 2), {"method": "sm100"}, "it must be 'auto', 'sm90', 'sm80' or 'simt'"),
    ],
)
def test_what_is_refused(x, w, options, text):
    with pytest.raises(ValueError, match=text):
        spmd(1, lambda world: sk.matmul(x, w, **options))


def test_earlier_names():
    def main(world):
        for product in (sk.matmul, sk.Gemm()):
            with pytest.warns(DeprecationWarning, match=": b is now w"):
                assert product(zeros(4, 5), b=zeros(5, 2)).shape == (4, 2)

    spmd(1, main)


def test_neither_gpu_nor_world():
    if n_gpus():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="no GPU, and no World"):
        sk.matmul(zeros(4, 5), zeros(5, 2))
