"""The methods of GemmAllReduce for few rows, "one_shot" and "two_shot", on the emulator: results at ragged
edges, with K split, repeats, graphs, with races checked, messages late, in random schedules; and what goes
wrong when one of their waits, halves or flags is taken away."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from fast import examples, slow
from gemms import check_graphs_and_streams, error, is_missed
from hypothesis import given as drawn
from hypothesis import strategies as st
from mutations import argument, condition, omit, omit_store, single_buffer, store
from numba import cuda, types

import shmemkit as sk
from shmemkit.device import padding, span
from shmemkit.device.cuda.unroll import tuple_of
from shmemkit.emu import DeadlockError, RaceError
from shmemkit.gemm import all_reduce, last_block
from shmemkit.gemm.all_reduce import ll128
from shmemkit.gemm.sm90 import Kinds, Layout, Tile, shared_bytes
from shmemkit.gemm.sm90_host import choices_of
from shmemkit.runtime.symmetric_memory import as_dtype

METHODS = ("one_shot", "two_shot")
BFLOAT16 = as_dtype("bfloat16")
methods = pytest.mark.parametrize("method", METHODS)
late = pytest.mark.schedules(deliveries="unordered", seeds=[None])
skewed = pytest.mark.schedules(deliveries="unordered", seeds=[0, 1])


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=2")


def tiles(width, splits=1):
    """Options of GemmAllReduce."""
    return {"tile": (64, width), "splits": splits}


NARROW = tiles(32)


def given(call, size, rank, majors="kn", dtype=BFLOAT16):
    """Small integers, whose sums are exact in 16 bits, as all that is computed of them."""
    (m, n, k), rng = size, np.random.default_rng([call, rank])

    def matrix(rows, columns, by_rows):
        values = rng.integers(-1, 2, (rows, columns) if by_rows else (columns, rows)).astype(dtype)
        return values if by_rows else values.T

    return matrix(m, k, majors[0] == "k"), matrix(k, n, majors[1] == "n")


def expected(call, size, world, majors="kn", dtype=BFLOAT16):
    pairs = [given(call, size, rank, majors, dtype) for rank in range(world.n_ranks)]
    return sum(a.astype("float32") @ b.astype("float32") for a, b in pairs).astype(dtype)


def compute(method, sizes, majors="kn", part_dtype=None, dtype="bfloat16", options=NARROW):
    """Calls of one object, one after another, which nothing is between. -> whether each is right"""
    world = sk.init()
    max_tokens, max_n, _ = (max(column) for column in zip(*sizes, strict=True))
    product = sk.GemmAllReduce(world, max_tokens, max_n, dtype, part_dtype, method, options=options)
    calls, right = [], []
    for call, size in enumerate(sizes):
        want = expected(call, size, world, majors, as_dtype(dtype))
        room = np.full(want.size + 8, np.nan, as_dtype(dtype))
        out = room[: want.size].reshape(want.shape)
        calls.append((*given(call, size, world.rank, majors, as_dtype(dtype)), out, want, room))
        assert product(*calls[-1][:3]) is out
    world.synchronize()
    for *_, out, want, room in calls:
        right.append(np.array_equal(out, want) and np.isnan(room[want.size :].astype("float32")).all())
    product.free()
    return right


def all_right(pes, *args, options=NARROW):
    main = functools.partial(compute, options=options)
    return all(all(of_rank) for of_rank in pes.run(main, *args))


SIZES = [(1, 40, 72), (17, 8, 8), (3, 40, 8)]


@pytest.mark.each_value
@pytest.mark.every(2)
@late
@methods
@pytest.mark.parametrize("n_ranks", [1, 2, *slow(3, 4, 5)])
def test_sizes(pes, method, n_ranks):
    assert all_right(pes(n_ranks), method, SIZES)


@pytest.mark.slow
@skewed
@methods
def test_some_ranks_are_ahead(pes, method):
    assert all_right(pes(3, gpu="H200,sms=1"), method, [(3, 72, 8)] * 4)


@pytest.mark.each_value
@pytest.mark.every(2)
@late
@methods
@pytest.mark.parametrize(
    "width, size",
    [
        (32, (16, 24, 8)),
        *slow((96, (64, 104, 72)), (64, (100, 72, 8))),
        (128, (17, 136, 8)),
        *slow((32, (128, 8, 8))),
    ],
    ids=str,
)
def test_tiles(pes, method, width, size):
    """Rows for one warp or several, and for two tiles; of one piece, two and three; the last ones cut."""
    assert all_right(pes(2), method, [size], options=tiles(width))


@pytest.mark.slow
@pytest.mark.each_value
@late
@methods
@pytest.mark.parametrize(
    "width, n_ranks, majors, dtype",
    [(32, 2, "kk", "bfloat16"), (64, 3, "mn", "float16"), *slow((96, 2, "mk", "bfloat16"))],
)
def test_parts_of_float32_and_layouts(pes, method, width, n_ranks, majors, dtype):
    sizes = [(24, 104, 72)]
    assert all_right(pes(n_ranks), method, sizes, majors, "float32", dtype, options=tiles(width))


@pytest.mark.each_value
@skewed
@methods
@pytest.mark.parametrize(
    "splits, sms, sizes",
    [(2, 1, [(3, 24, 136)]), *slow(*((*how, [(17, 40, 200), (3, 72, 136)]) for how in ((2, 1), (3, 8))))],
)
def test_parts_of_k(pes, method, splits, sms, sizes):
    """By fewer blocks than there are, and by one each."""
    blocks = pes(2, gpu=f"H200,sms={sms}")
    assert all_right(blocks, method, sizes, options=tiles(32, splits))


@examples(6, derandomize=True)
@drawn(
    st.sampled_from(METHODS),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 12), st.integers(1, 30)), min_size=2, max_size=3),
    st.sampled_from(ll128.WIDTHS),
    st.integers(1, 3),
    st.sampled_from([None, "float32"]),
)
def test_any_sizes_in_a_row(method, n_ranks, sizes, width, splits, part_dtype):
    sizes = [(m, 8 * n + width - 32, 8 * k) for m, n, k in sizes]
    arguments = method, sizes, "kn", part_dtype, "bfloat16", tiles(width, splits)
    assert all(map(all, sk.emu.run(compute, n_ranks, arguments, gpu="H200,sms=2")))


@pytest.mark.slow
@late
@methods
def test_graphs_and_streams(pes, method):

    def main():
        world = sk.init()
        product, sizes = (
            sk.GemmAllReduce(world, 17, 40, method=method, options=NARROW),
            [(3, 40, 16), (17, 8, 72)],
        )
        calls = []
        for call, size in enumerate(sizes):
            want = expected(call, size, world)
            calls.append((*given(call, size, world.rank), np.empty(want.shape, BFLOAT16), want))
        check_graphs_and_streams(world, product, calls)

    pes(2).run(main)


def results_of(part_dtype, names=METHODS, options=NARROW):
    """-> bits of each call, by method; and the result's error"""
    world = sk.init()
    numbers = [np.random.default_rng(r).standard_normal((2, 8, 192)).astype(BFLOAT16) for r in range(3)]
    a, b = numbers[world.rank][0], numbers[world.rank][1].T
    bits, out = set(), None
    for method in names:
        product = sk.GemmAllReduce(world, 8, 8, "bfloat16", part_dtype, method, options=options)
        for _ in range(2):
            out = product(a, b)
            world.synchronize()
            bits.add(out.tobytes())
        product.free()
    exact = np.add.reduce([x[0].astype("float64") @ x[1].T.astype("float64") for x in numbers])
    return bits, error(out, exact)


def same_bits(pes, *args):
    found = pes.run(results_of, *args)
    return len(set.union(*(bits for bits, _ in found))) == 1, found[0][1]


@pytest.mark.slow
def test_the_same_bits_on_all_ranks_every_time_and_added_up_in_float32(pes):
    same, rounded = same_bits(pes(3), None, METHODS, tiles(32, 3))
    also_same, wide = same_bits(pes(3), "float32", METHODS, tiles(32, 3))
    assert same and also_same
    assert wide < 3e-3 and wide <= rounded < 8e-3  # one rounding, and two


# ---- what is refused, and what is chosen


@methods
def test_wrong_arguments_and_sizes(pes, method):
    def main():
        world = sk.init()
        for arguments, reason in [
            (dict(dtype="float32"), "it is for bfloat16 and float16"),
            (dict(dtype="float64"), "it is for bfloat16 and float16"),
        ]:
            with pytest.raises(ValueError, match=f"GemmAllReduce {method} cannot be used here: .*{reason}"):
                sk.GemmAllReduce(world, 8, 8, method=method, **arguments)
        product = sk.GemmAllReduce(world, 200, 16, method=method)
        x = np.zeros((200, 16), BFLOAT16)
        said = f"method '{method}' does not compute 200 by 16 by 16: M is 200; it is for 128 rows"
        with pytest.raises(ValueError, match=said):
            product(x, x[:16])
        product.free()

    pes(2).run(main)


def test_more_ranks_than_registers_are_for(pes):
    def main():
        world = sk.init()
        for method in METHODS:
            with pytest.raises(ValueError, match="there are 17 ranks; it is for 1 to 16"):
                sk.GemmAllReduce(world, 8, 8, method=method)

    pes(17).run(main)


def test_ranks_without_nvlink_are_refused(pes):
    def main():
        world = sk.init()
        for method in METHODS:
            with pytest.raises(ValueError, match=f"{method} cannot be used here: .*another node"):
                sk.GemmAllReduce(world, 8, 8, method=method)
        assert sk.GemmAllReduce(world, 8, 8).method_for(1, 8, 8) == "sequential"

    pes(2, local_size=1).run(main)


def chosen(n_ranks, m, k, n, part_dtype="bfloat16", emulated=False):
    backend = SimpleNamespace(name="emulator" if emulated else "nvshmem")
    for name in METHODS:
        method = object.__new__(all_reduce.GemmAllReduce.METHODS[name])
        method.world = SimpleNamespace(n_ranks=n_ranks, backend=backend)
        method.rows, method.part_dtype = 128, part_dtype
        if method.refuses(m, k, n) is None and method.is_for(m, k, n):
            return name
    return None


def test_few_rows_by_one_shot_and_more_by_two():
    assert [chosen(2, m, 4096, 8192) for m in (1, 7, 64, 128, 129)] == ["one_shot"] * 4 + [None]
    assert [chosen(8, m, 4096, 8192) for m in (1, 64, 128)] == ["one_shot", "two_shot", "two_shot"]
    assert chosen(8, 8, 4096, 8192, "float32") == "two_shot"
    for refused in [(2, 1, 4095, 8192), (2, 1, 4096, 8196), (2, 128, 64, 1 << 20), (1, 1, 4096, 8192)]:
        assert chosen(*refused) is None
    assert chosen(2, 1, 4096, 8192, emulated=True) is None


@examples(60)
@drawn(
    st.integers(1, 128),
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.sampled_from(["bfloat16", "float32"]),
    st.data(),
)
def test_choices_fit(max_tokens, max_n, k, part_dtype, data):
    """What they send, in the slots; their pieces, where the GEMM has them; and K, in parts."""
    m, n = data.draw(st.integers(1, max_tokens)), 8 * data.draw(st.integers(1, max_n))
    widths = [w for w in ll128.WIDTHS if w < 8 * max_n + 32]
    room = max(ll128.packets_of(max_tokens, 8 * max_n, Tile(64, w), part_dtype) for w in widths)
    for tile, splits in choices_of(ll128.tiles_for(n), m, n, 8 * k, 132):
        assert tile.n in widths and tile.split == (splits > 1) and splits <= -(-8 * k // 64)
        assert ll128.packets_of(m, n, tile, part_dtype) <= room
        kinds = Kinds("bfloat16", "k", "k", "bfloat16")
        assert 16 * ll128.Pieces(tile, part_dtype).row_bytes <= 2 * Layout(tile, kinds).piece
        assert Layout(tile, kinds).stages >= 3 and shared_bytes(tile, kinds) <= 232448


# ---- waits that are not there

SMALL = tiles(32), [(3, 40, 8)] * 3
PARTS = tiles(32, 3), [(17, 40, 200)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, case, change",
    [
        ("one_shot", SMALL, store("epoch", "1", inside="gemm_ll128")),
        ("one_shot", SMALL, omit_store("epochs[]")),
        ("one_shot", SMALL, (last_block, omit_store("done[]"))),
        ("one_shot", SMALL, (last_block, store("last", "cuda.atomic.add(done, 0, 1) >= 0"))),
        ("one_shot", SMALL, omit("cuda.syncwarp", 2, "send_piece")),
        ("one_shot", SMALL, argument("Given", 2, "parts + step")),  # one slot for all ranks
        ("one_shot", PARTS, store("first", "column * per_warp", inside="take")),  # and for all rows
        ("one_shot", SMALL, omit_store("peer", 2, "send_packet")),
        ("two_shot", SMALL, condition("rank()", "rank() == 0", inside="add_packet")),
        ("two_shot", SMALL, store("sums", "0", 2, "begin")),  # where the parts are
        ("two_shot", SMALL, omit_store("at", 2, "take")),
    ],
)
def test_each_line_is_needed(mutate, method, case, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    mutate(*(change if isinstance(change, tuple) else (ll128, change)))
    options, sizes = case
    assert is_missed(compute, (method, sizes, "kn", None, "bfloat16", options), 12)


def sum_of_three():
    """2**24 + 1 - 2**24 in float32: 0 in this order, and 1 if rank 0 does not come first."""
    world = sk.init()
    a, b = np.zeros((1, 8), BFLOAT16), np.ones((8, 8), BFLOAT16)
    a[0, 0] = (2**24, 1, -(2**24))[world.rank]
    product = sk.GemmAllReduce(world, 1, 8, "bfloat16", "float32", "one_shot", options=NARROW)
    out = product(a, b)
    world.synchronize()
    return float(out[0, 0])


def test_who_begins_with_his_own_has_other_bits(pes, mutate):
    """The order of the ranks is what makes their bits equal."""
    assert pes(3).run(sum_of_three) == [0, 0, 0]
    own_first = "(lambda parts: combining('sum', part_dtype, ranks)(parts[rank():] + parts[: rank()]))"
    mutate(ll128, store("combine", own_first, inside="receiving"))
    assert pes(3).run(sum_of_three) == [0, 1, 1]


# ---- the exchange alone, in all schedules


def copies(n):
    """-> ``of(number)``, for kernels: a tuple of it, n times; Numba repeats no tuple by *."""
    return tuple_of(n, cuda.jit(device=True)(lambda _, number: number))


def exchange(method, n_calls):
    """What one warp does with its rows of a tile, again and again."""
    shots, tile, n_ranks = 1 + METHODS.index(method), Tile(64, 32), sk.init().n_ranks
    take = ll128.exchanging(tile, "bfloat16", "bfloat16", n_ranks, shots).take
    begin, copies_of = ll128.beginning(n_ranks, shots), copies(16)

    @cuda.jit
    def kernel(number, call, lines, out):
        pieces = cuda.shared.array(2048, types.uint8)
        pieces = span(pieces, padding(pieces, 1024), 1024)
        given = begin(lines, 6, call, 1, out, 8)
        take(copies_of(number), 0, (), 0, 0, 0, pieces, 0, cuda.threadIdx.x, given)

    world = sk.current()
    lines = world.zeros((ll128.slot_words(6, n_ranks, shots),), "uint64", "lines")
    for call in range(1, n_calls + 1):
        out = np.zeros(32, BFLOAT16)
        kernel[1, 32](np.float32(call + 8 * world.rank), call, lines, out.view("uint64"))
        world.synchronize()
        assert (out == n_ranks * call + 4 * n_ranks * (n_ranks - 1)).all()


@pytest.mark.slow
@methods
def test_the_exchange_is_right_in_every_schedule(method):
    found = sk.emu.explore(exchange, 2, (method, 3), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("change", [single_buffer(), omit("cuda.syncwarp", 2, "send_piece")])
def test_and_only_so(mutate, change):
    """With one buffer only, a rank that is ahead overwrites what another waits for."""
    mutate(ll128, change)
    found = sk.emu.explore(exchange, 2, ("one_shot", 2), exhaustive=True, heap_size=1 << 18)
    assert isinstance(found.failure, (AssertionError, DeadlockError, RaceError)), str(found)
