"""Flash decode over ranks."""

import math

import ml_dtypes
import numpy as np
import pytest
from budgets import most_blocks
from emulated import spmd
from fast import examples, slow
from hypothesis import given
from hypothesis import strategies as st

import shmemkit as sk
from shmemkit.attention import flash_decode

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class Case:
    """q, and of each rank k and v of its tokens, for `lengths[rank][sequence]`."""

    def __init__(self, lengths, kv_heads=2, group=1, head_dim=64, dtype="bfloat16", seed=0):
        rng = np.random.default_rng(seed)
        self.lengths = np.array(lengths, "int32")
        self.n, self.batch = self.lengths.shape
        self.heads = kv_heads, group, head_dim
        self.dtype = DTYPES[dtype]
        self.capacity = max(1, int(self.lengths.max()))
        self.q = self.random(rng, self.batch, kv_heads * group, head_dim)
        self.k, self.v = (
            self.random(rng, self.n, self.batch, self.capacity, kv_heads, head_dim) for _ in "kv"
        )

    def random(self, rng, *shape):
        return rng.standard_normal(shape).astype(self.dtype)

    def expected(self, scale=None, soft_cap=None):
        """In float64, over the joined cache."""
        kv_heads, group, head_dim = self.heads
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        q = self.q.astype("float64").reshape(self.batch, kv_heads, group, head_dim)
        out = np.zeros_like(q)
        for b in range(self.batch):
            k, v = (
                np.concatenate([x[r, b, : self.lengths[r, b]] for r in range(self.n)]).astype("float64")
                for x in (self.k, self.v)
            )
            if len(k):
                scores = np.einsum("hgd,thd->hgt", q[b], k) * scale
                if soft_cap:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                p = np.exp(scores - scores.max(2, keepdims=True))
                out[b] = np.einsum("hgt,thd->hgd", p / p.sum(2, keepdims=True), v)
        return out.reshape(self.q.shape)

    def cache(self, rank, page_size=None, heads_first=False):
        """-> k, v, block table: what is not of a token is NaN. Pages are in any order."""
        k, v = self.k[rank].copy(), self.v[rank].copy()
        for b, length in enumerate(self.lengths[rank]):
            k[b, length:] = v[b, length:] = np.nan
        table = None
        if page_size:
            rng, most = np.random.default_rng(rank), -(-self.capacity // page_size)
            table = rng.permutation(self.batch * most).astype("int32").reshape(self.batch, most)
            k, v = (self.in_pages(x, table, page_size) for x in (k, v))
            for b, length in enumerate(self.lengths[rank]):
                table[b, -(-length // page_size) :] = 1 << 30  # not read
        if heads_first:
            k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (k, v))
        return k, v, table

    @staticmethod
    def in_pages(x, table, page_size):
        pages = np.full((table.size, page_size, *x.shape[2:]), np.nan, x.dtype)
        for b, of_sequence in enumerate(table):
            for i, page in enumerate(of_sequence):
                tokens = x[b, i * page_size : (i + 1) * page_size]
                pages[page, : len(tokens)] = tokens
        return pages


def check(
    case,
    page_size=None,
    form="all_gather",
    scale=None,
    soft_cap=None,
    calls=1,
    heads_first=False,
    sms=None,
    **options,
):
    kv_heads, group, head_dim = case.heads

    def main(world):
        op = sk.FlashDecode(
            *(world, case.batch, kv_heads * group, kv_heads, head_dim),
            *(np.dtype(case.dtype).name, form),
            sms=sms,
        )
        k, v, table = case.cache(world.rank, page_size, heads_first)
        arguments = case.q.copy(), k, v, case.lengths[world.rank].copy(), table, scale, soft_cap
        with sk.Timeline(world) as timeline:
            found = [op(*arguments) for _ in range(calls)]
        assert sms is None or most_blocks(timeline) <= sms
        op.free()
        return found

    of_ranks = spmd(case.n, main, **options)
    wanted, share = case.expected(scale, soft_cap), kv_heads * group // case.n
    for rank, found in enumerate(of_ranks):
        here = wanted if form == "all_gather" else wanted[:, rank * share : (rank + 1) * share]
        for out in found:
            assert out.shape == here.shape
            np.testing.assert_array_equal(out.view("uint16"), found[0].view("uint16"))
            if form == "all_gather":
                np.testing.assert_array_equal(out.view("uint16"), of_ranks[0][0].view("uint16"))
        error = np.linalg.norm(found[0].astype("float64") - here) / max(1e-9, np.linalg.norm(here))
        assert error < 4e-3 if case.dtype == DTYPES["bfloat16"] else error < 1e-3, error


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize(
    "lengths",
    [
        [[1]],
        [[0]],
        [[33]],
        [[5], [0]],
        [[0], [40]],
        [[0, 3, 0], [17, 0, 1]],
        *slow([[0, 3, 0, 70], [17, 0, 0, 1]]),
    ],
)
@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
def test_lengths_and_pages(lengths, page_size):
    check(Case(lengths), page_size, calls=2)


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads(group, head_dim, dtype):
    check(Case([[37], [9]], 1, group, head_dim, dtype), 16)


@pytest.mark.parametrize("form", ["all_gather", "all_to_all"])
@pytest.mark.parametrize(
    "lengths, calls", [([[3], [0]], 2), *slow(([[3], [0], [1]], 2), ([[35, 0], [0, 18], [1, 0]], 3))]
)
def test_races_and_delivery(form, lengths, calls):
    gpu = "H200,sms=2,blocks=1"
    check(
        Case(lengths, len(lengths)), 16, form, calls=calls, races=True, delivery="unordered", seed=3, gpu=gpu
    )


def test_few_blocks_share_the_units():
    """Of more tiles than blocks: they have parts of several units."""
    check(Case([[33, 0, 17], [1, 20, 5]], 1), gpu="H200,sms=1,blocks=3", races=True)


@pytest.mark.slow
def test_many_blocks_share_a_unit():
    """Of more partials than a thread loads at once."""
    check(Case([[32 * 10 - 5]], 1, 4), gpu="H200,sms=10,blocks=1")


@pytest.mark.parametrize(("n", "batch"), slow((2, 33), (3, 64)))
def test_many_sequences(n, batch):
    """Of more sequences than a warp has lanes, most of them without tokens here. Rank 1 has none of any."""
    lengths = np.zeros((n, batch), int)
    for rank in range(0, n, 2):
        lengths[rank, np.random.default_rng(rank).choice(batch, 4, False)] = [1, 16, 17, 40]
        lengths[rank, -1] = 3
    check(Case(lengths, 1), 16, gpu="H200,sms=2,blocks=2")


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("scale", [None, 0.0, 0.5])
def test_scores(scale, soft_cap):
    check(Case([[30], [11]], 1, 4), scale=scale, soft_cap=soft_cap)


@pytest.mark.slow
def test_heads_before_tokens():
    check(Case([[18], [3]], 2, 2), heads_first=True)
    check(Case([[18], [3]], 2, 2), 16, heads_first=True)


@examples(12)
@given(
    st.integers(1, 3).flatmap(
        lambda n: st.integers(1, 2).flatmap(
            lambda batch: st.lists(
                st.lists(st.integers(0, 40), min_size=batch, max_size=batch), min_size=n, max_size=n
            )
        )
    ),
    st.sampled_from([None, 1, 3, 16]),
    st.integers(0, 99),
)
def test_any_lengths(lengths, page_size, seed):
    check(Case(lengths, 1, 2, seed=seed), page_size, gpu="H200,sms=2,blocks=1", seed=seed)


@pytest.mark.parametrize("given", [-5, -(2**31), 1 << 20, 2**31 - 1])
@pytest.mark.parametrize("page_size", [None, 16])
def test_lengths_that_cannot_be(given, page_size):
    """Less than none is none; more than there is room for is all of it."""
    case = Case([[32], [3]])
    k, v, table = case.cache(0, page_size)
    case.lengths[0] = 0 if given < 0 else 32

    def main(world):
        op = sk.FlashDecode(world, 1, 2, 2, 64)
        mine = (k, v, table) if world.rank == 0 else case.cache(1, page_size)
        lengths = np.array([given if world.rank == 0 else 3], "int32")
        out = op(case.q.copy(), *mine[:2], lengths, mine[2])
        world.synchronize()
        op.free()
        return out

    for out in spmd(2, main):
        assert np.abs(out.astype("float64") - case.expected()).max() < 0.02


@pytest.mark.parametrize("page", [-1, 4, 2**31 - 1])
def test_a_page_that_there_is_not(page):
    """The emulator says so."""
    case = Case([[40]], 1)
    k, v, _ = case.cache(0, 16)

    def main(world):
        op = sk.FlashDecode(world, 1, 1, 1, 64)
        op(case.q.copy(), k, v, case.lengths[0].copy(), np.array([[0, page, 1]], "int32"))
        world.synchronize()

    with pytest.raises(sk.emu.EmulatorError, match="the bytes must lie in array"):
        spmd(1, main)


@pytest.mark.every(3)
@pytest.mark.parametrize("of", ["q", "k", "v"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_that_are_none(of, number):
    """On one rank, in one head: only results that have it change, to what they are in float64."""
    case = Case([[20], [20]], 2)
    array = {"q": case.q, "k": case.k[0], "v": case.v[0]}[of]
    array[(0, 0, 5) if of == "q" else (0, 3, 0, 5)] = number
    with np.errstate(all="ignore"):
        wanted = case.expected()

    def main(world):
        op = sk.FlashDecode(world, 1, 2, 2, 64)
        k, v, _ = case.cache(world.rank)
        out = op(case.q.copy(), k, v, case.lengths[world.rank].copy())
        world.synchronize()
        op.free()
        return out

    for out in spmd(2, main):
        np.testing.assert_array_equal(np.isnan(out.astype("float64")), np.isnan(wanted))
        finite = np.isfinite(wanted)
        assert np.abs(out.astype("float64") - wanted)[finite].max() < 0.02


@pytest.mark.slow
def test_in_many_orders():
    """Of two ranks, of which one has no tokens, and two calls."""
    case = Case([[0], [20]], 1, 2)

    def main():
        with sk.init() as world:
            op = sk.FlashDecode(world, 1, 2, 1, 64)
            k, v, _ = case.cache(world.rank)
            found = [op(case.q.copy(), k, v, case.lengths[world.rank].copy()) for _ in range(2)]
            world.synchronize()
            op.free()
            for out in found:
                assert np.abs(out.astype("float64") - case.expected()).max() < 0.02

    found = sk.emu.explore(main, 2, seeds=range(10))
    assert found.failure is None, str(found)


@pytest.mark.slow
def test_a_graph_of_other_lengths():
    case = Case([[40, 3], [20, 64]], 1, 2)
    turns = [[[40, 3], [0, 64]], [[0, 0], [20, 1]]]

    def main(world):
        op = sk.FlashDecode(world, 2, 2, 1, 64)
        k, v, table = case.cache(world.rank, 16)
        q, lengths = case.q.copy(), case.lengths[world.rank].copy()
        world.stream.begin_capture()
        out = op(q, k, v, lengths, table)
        graph = world.stream.end_capture()
        found = []
        for turn in turns:
            lengths[:] = turn[world.rank]
            graph.launch(world.stream)
            found.append(world.asnumpy(out).astype("float64"))
        op.free()
        return found

    for found in spmd(2, main):
        for turn, out in zip(turns, found, strict=True):
            part = Case([[40, 3], [20, 64]], 1, 2)
            part.lengths = np.array(turn)
            assert np.abs(out - part.expected()).max() < 0.02


def test_a_wrong_call():
    def main(world):
        with pytest.raises(ValueError, match="dtype is bfloat16, head_dim 32; they must be"):
            sk.FlashDecode(world, 1, 2, 1, 32)
        with pytest.raises(ValueError, match="there are 34 heads of q and 2 of k and v"):
            sk.FlashDecode(world, 1, 34, 2)
        with pytest.raises(ValueError, match="the same kv_heads on all ranks"):
            sk.FlashDecode(world, 1, 4, 1 + world.rank)
        op = sk.FlashDecode(world, 1, 2, 1, 64, "float16")
        q, k, lengths = np.ones((1, 2, 64), "float16"), np.ones((1, 8, 1, 64), "float16"), np.ones(1, "int32")
        for changed, said in (
            (
                dict.fromkeys("kv", np.ones((2, 8, 1, 64), "float16")),
                "it must be float16 \\(1, tokens, 1, 64\\)",
            ),
            ({"k": k[:, ::-1]}, "k has strides .*; all but the last must be multiples of 16"),
            ({"v": np.ones((1, 8, 1, 128), "float16")[..., :64]}, "k has strides .*, v .*; they must be the"),
            ({"scale": -1.0}, "scale is -1.0; it must be 0 or more"),
            ({"soft_cap": 0.0}, "soft_cap is 0.0; it must be positive"),
        ):
            arguments = {"q": q, "k": k, "v": k.copy(), "lengths": lengths} | changed
            with pytest.raises(ValueError, match=said):
                op(**arguments)
        op(q, k, k, lengths, out=(out := q.copy()), scale=1.0)
        for scale, said in ((True, "True"), ([1.0], "a list")):
            with pytest.raises(TypeError, match=f"scale is {said}; it must be a number"):
                op(q, k, k, lengths, out=out, scale=scale)

    spmd(2, main)


@pytest.mark.every(2)
@pytest.mark.parametrize("sms", [1, 3])
def test_within_a_budget(sms):
    """A block has parts of several sequences, and a sequence has several blocks."""
    check(Case([[33, 3], [0, 17]], 1), calls=2, sms=sms, races=True)


@pytest.mark.parametrize("shared_bytes", [232448, 166912, 101376], ids=["9.0", "8.0", "8.9"])
def test_blocks_fit_into_shared_memory(shared_bytes):
    """Of each GPU, for any heads."""
    for head_dim in flash_decode.HEAD_DIMS:
        for group in range(1, flash_decode.ROWS + 1):
            tile = flash_decode.tile_of(group, head_dim, shared_bytes)
            static = tile.static_bytes(group, head_dim)
            assert static <= 48 << 10
            assert -(-static // 128) * 128 + tile.shared_bytes(head_dim) <= shared_bytes
    assert flash_decode.tile_of(1, 128).warps == 8  # as measured


@pytest.mark.slow
def test_a_block_table_of_more_room_than_lengths_can_say():
    """2**31 tokens: as a table has whose width is that of the longest sequence that a server allows."""
    case = Case([[3]], 1)

    def main(world):
        op = sk.FlashDecode(world, 1, 1, 1, 64)
        k, v = np.zeros((2, 1, 1 << 14, 1, 64), case.dtype)
        k[0, :3], v[0, :3] = case.k[0, 0], case.v[0, 0]
        return op(case.q, k, v, case.lengths[0], np.zeros((1, 1 << 17), "int32"))

    (found,) = spmd(1, main)
    np.testing.assert_allclose(found.astype("float64"), case.expected(), rtol=2e-2, atol=2e-2)
