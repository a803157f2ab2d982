"""Grouped products on the emulator: counts of all kinds, layouts, dtypes, epilogues, errors, graphs, and what
goes wrong when one of their barriers is taken away."""

import numpy as np
import pytest
from emulated import spmd
from fast import examples, slow
from gemms import check, expected
from hypothesis import given
from hypothesis import strategies as st
from mutations import argument, goes_wrong, omit

import shmemkit as sk
from shmemkit.emu import EmulatorError
from shmemkit.gemm.grouped import METHODS, expert_tiles, sm90
from shmemkit.runtime.symmetric_memory import as_dtype

SMALL = {"sm90": {"tile": (64, 64)}}
ROOM = 3  # rows of out that no expert has


class Product:
    """Of small integers, which is exact, in a poisoned out."""

    def __init__(
        self, counts, n, k, dtype="bfloat16", out_dtype=None, columns="", bias=None, activation=None
    ):
        rng, dtype, rows = np.random.default_rng([n, k]), as_dtype(dtype), sum(counts) + ROOM
        self.x = rng.integers(-2, 3, (rows, k)).astype(dtype)
        self.w = rng.integers(-2, 3, (len(counts), n, k)).astype(dtype)
        if "x" in columns:
            self.x = np.asfortranarray(self.x)
        if "w" in columns:
            self.w = np.ascontiguousarray(self.w.transpose(0, 2, 1)).transpose(0, 2, 1)
        self.out = np.empty((rows, n), as_dtype(out_dtype or dtype))
        self.counts, self.options = np.array(counts, np.int32), {"activation": activation}
        if bias:
            self.options["bias"] = rng.integers(-3, 4, bias).astype(self.out.dtype)

    def compute(self, grouped):
        self.out[:] = 77
        assert grouped(self.x, self.w, self.counts, self.out, **self.options) is self.out

    def check(self):
        first, bias, activation = 0, self.options.get("bias"), self.options["activation"]
        for expert, count in enumerate(self.counts):
            of_expert, mine = slice(first, first + count), bias
            if bias is not None and bias.ndim == 2:
                mine = bias[expert]
            if count:
                check(self.out[of_expert], expected(self.x[of_expert], self.w[expert].T, mine, activation))
            first += count
        assert (self.out[first:] == 77).all()


def run(method, *args, tile=None, races=False, **options):
    def main(world):
        product = Product(*args, **options)
        given = {"tile": tile} if tile else SMALL.get(method)
        product.compute(sk.GroupedGemm(method, options=given))
        world.synchronize()
        product.check()

    spmd(1, main, races=races)


COUNTS = [[3, 0, 70, 1], [0, 66, 0], [1] * 5, [0, 0], [64, 128], [int(i in (3, 22, 69)) for i in range(70)]]


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: str(counts)[:20])
def test_counts(method, counts):
    """An expert with no rows, with all, with one; several to a slot of the table."""
    run(method, counts, 72, 40, races=len(counts) < 9)


@pytest.mark.every(3)
@pytest.mark.parametrize("tile", [(128, 256), (128, 96), (64, 32)], ids=str)
@pytest.mark.parametrize("rows", [9, *slow(130)])
def test_sm90_tiles(tile, rows):
    """Pieces of 128 and 64 bytes; of 128 rows and 64, whole and ragged."""
    run("sm90", [rows, 0, 17], 104, 72, tile=tile, races=True)


@pytest.mark.each_value
@pytest.mark.parametrize("columns", ["", "w"])
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_sm90_layouts(columns, out_dtype):
    run("sm90", [20, 3], 40, 64, "float16", out_dtype, columns, bias=(2, 40), activation="relu")


@pytest.mark.every(3)
@pytest.mark.parametrize("columns", ["", "x", "w", "xw"])
def test_sm80_layouts_of_odd_sizes(columns):
    run("sm80", [5, 0, 7, 66], 41, 33, "float16", "float32", columns, bias=(41,), activation="relu")


@examples(8)
@given(st.lists(st.integers(0, 80), min_size=1, max_size=4), st.sampled_from(list(METHODS)))
def test_any_counts(counts, method):
    run(method, counts, 16, 24)


def test_auto_takes_what_there_is():
    run("auto", [5, 3], 9, 11)


@pytest.mark.slow
def test_counts_that_change_between_calls_and_replays():
    def main(world):
        product, grouped = Product([40, 0, 25], 24, 16), sk.GroupedGemm("sm90", options=SMALL["sm90"])
        product.compute(grouped)
        world.stream.begin_capture()
        grouped(product.x, product.w, product.counts, product.out)
        graph = world.stream.end_capture()
        for counts in ([40, 0, 25], [0, 68, 0], [1, 2, 3], [0, 0, 0]):
            product.counts[:] = counts
            product.compute(grouped)
            world.synchronize()
            product.check()
            product.out[:] = 77
            graph.launch(world.stream)
            world.synchronize()
            product.check()

    spmd(1, main)


def test_new_results_and_kept_calls():
    def main(world):
        product = Product([7], 8, 16)
        out = sk.grouped_matmul(product.x, product.w, product.counts)
        assert out.shape == (10, 8) and out.dtype == product.x.dtype
        sk.grouped_matmul(product.x, product.w, product.counts, product.out)
        sk.grouped_matmul(product.x, product.w, product.counts, product.out)
        world.synchronize()
        np.testing.assert_array_equal(out[:7], product.out[:7])
        assert len(world.kept[sk.GroupedGemm, "auto", None]._plans) == 2

    spmd(1, main)


# ---- errors


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([30, 31], "counts add up to 61, and x has 10 rows"),
        ([-1, 3], "counts has a negative number, and x has 10 rows"),
        ([2**31 - 1, 2**31 - 1], f"counts add up to {2**32 - 2}, "),
    ],
)
def test_counts_that_do_not_fit(method, counts, text):
    product = Product([4, 3], 8, 16)
    product.counts[:] = counts
    product.out[:] = 77

    def main(world):
        sk.grouped_matmul(product.x, product.w, product.counts, product.out, method=method)
        world.synchronize()

    with pytest.raises(EmulatorError, match=text):
        spmd(1, main)
    assert (product.out == 77).all()


def zeros(*shape, dtype="float16"):
    return np.zeros(shape, as_dtype(dtype))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"w": zeros(2, 16, 8)},
            r"w is float16 .*; it must be float16 \(experts, n, 16\)\. Give w.swapaxes\(-2, -1\)",
        ),
        (
            {"x": zeros(4, 16, dtype="float32")},
            "x is float32 .*; it must be bfloat16, float16 or float8_e4m3fn",
        ),
        ({"w": zeros(0, 8, 16), "counts": zeros(0, dtype="int32")}, "w must have 1 to 32768 experts"),
        ({"x": zeros(4, 0), "w": zeros(2, 8, 0)}, "K must be 1 or more"),
        ({"out": zeros(4, 8, dtype="int32")}, "out is int32 .*; it must be float16, bfloat16 or float32"),
        ({"out": zeros(4, 16)[:, ::2]}, "Method 'sm80' cannot be used: out has strides"),
        ({"bias": zeros(3, 8)}, r"bias is float16 .*; it must be \(2, 8\) or \(8,\)"),
        ({"bias": zeros(8, dtype="bfloat16")}, "bias is bfloat16 .*; it must be float16 or float32"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"x": zeros(4, 32)[:, ::2], "w": zeros(2, 8, 16)}, "x and w have strides"),
        ({"method": "sm70"}, "method is 'sm70'"),
        ({"method": "sm90", "w": zeros(4, 8, 16)[::2]}, "its experts must lie one after another"),
        ({"method": "sm90", "w": zeros(2, 16, 8).transpose(0, 2, 1)}, "K must be a multiple of 64"),
        ({"method": "sm90", "w": zeros(2, 9, 16)}, "its rows must be a multiple of 16 bytes"),
        ({"method": "sm90", "x": zeros(16, 4).T}, "x has strides .* rows must be contiguous"),
    ],
)
def test_what_is_refused(change, text):
    arrays = {"x": zeros(4, 16), "w": zeros(2, 8, 16), "counts": zeros(2, dtype="int32"), **change}
    with pytest.raises(ValueError, match=text):
        spmd(1, lambda world: sk.grouped_matmul(**arrays))


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        ("auto", {"tile": (64, 300)}, r"options\['tile'\] is \(64, 300\); it must be \(rows, columns\)"),
        ("sm90", {"stages": 3}, "stages"),
        ("sm80", {"tile": (64, 64)}, "method 'sm80' has no options"),
        ("sm70", None, "method is 'sm70'"),
    ],
)
def test_options_that_are_refused(method, options, text):
    with pytest.raises(ValueError, match=text):
        sk.GroupedGemm(method, options=options)


# ---- what is needed

RAGGED = [70, 5], 136, 40


def is_wrong():
    return goes_wrong(run, "sm90", *RAGGED, each=[{"races": False}, {"races": True}])


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (expert_tiles, omit("cuda.syncthreads", inside="plan")),
        (expert_tiles, argument("cuda.shfl_sync", 2, "0", 2)),
        (sm90, argument("tma_store", 2, "0")),
    ],
)
def test_each_part_is_needed(mutate, module, change):
    assert not is_wrong()
    mutate(module, change)
    assert is_wrong()
