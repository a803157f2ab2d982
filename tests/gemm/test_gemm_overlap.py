"""Products that are exchanged by LL128 while the next tile is computed, "ll128_overlap" of GemmReduceScatter
and "two_shot_overlap" of GemmAllReduce, on the emulator: results at ragged edges, by blocks of several tiles,
with repeats, graphs, races checked, messages late, in random schedules; and what goes wrong when one of their
waits is taken away."""

from types import SimpleNamespace

import numpy as np
import pytest
from fast import examples, slow
from gemms import check_graphs_and_streams, error, is_missed
from hypothesis import given as drawn
from hypothesis import strategies as st
from mutations import argument, condition, omit, omit_store, single_buffer, store
from numba import cuda, types
from test_gemm_ar import BFLOAT16, copies, expected, given

import shmemkit as sk
from shmemkit.device import padding, span
from shmemkit.device.cuda.accumulators import fragment_store
from shmemkit.emu import DeadlockError
from shmemkit.gemm import last_block
from shmemkit.gemm.ll128_packets import Pieces, slot_words
from shmemkit.gemm.reduce_scatter import ll128
from shmemkit.gemm.sm90 import Kinds, Layout, Tile, shared_bytes
from shmemkit.runtime.symmetric_memory import as_dtype

METHODS = {"rs": "ll128_overlap", "ar": "two_shot_overlap"}
OBJECTS = {"rs": sk.GemmReduceScatter, "ar": sk.GemmAllReduce}
ops = pytest.mark.parametrize("op", METHODS)
late = pytest.mark.schedules(deliveries="unordered", seeds=[None])
skewed = pytest.mark.schedules(deliveries="unordered", seeds=[0, 1])


NARROW = {"tile": (128, 64)}


def rows_wanted(op, call, size, world, majors="kn", dtype=BFLOAT16):
    """The result on this rank."""
    whole, rows = expected(call, size, world, majors, dtype), size[0] // world.n_ranks
    return whole if op == "ar" else whole[world.rank * rows : (world.rank + 1) * rows]


def compute(op, sizes, majors="kn", part_dtype=None, dtype="bfloat16", options=NARROW):
    """Calls of one object, one after another, which nothing is between. -> whether each is right"""
    world = sk.init()
    max_tokens, max_n, _ = (max(column) for column in zip(*sizes, strict=True))
    product = OBJECTS[op](world, max_tokens, max_n, dtype, part_dtype, METHODS[op], options=options)
    calls, right, dtype = [], [], as_dtype(dtype)
    for call, size in enumerate(sizes):
        want = rows_wanted(op, call, size, world, majors, dtype)
        room = np.full(want.size + 8, np.nan, dtype)
        out = room[: want.size].reshape(want.shape)
        calls.append((*given(call, size, world.rank, majors, dtype), out, want, room))
        assert product(*calls[-1][:3]) is out
    world.synchronize()
    for *_, out, want, room in calls:
        right.append(np.array_equal(out, want) and np.isnan(room[want.size :].astype("float32")).all())
    product.free()
    return right


def all_right(pes, n_ranks, sms, op, sizes, *args):
    """Of a reduce-scatter so many rows for each rank."""
    sizes = [(m if op == "ar" else m * n_ranks, *more) for m, *more in sizes]
    return all(all(of_rank) for of_rank in pes(n_ranks, gpu=f"H200,sms={sms}").run(compute, op, sizes, *args))


FEW, MANY = [(17, 136, 8), (130, 8, 72), (3, 40, 8)], [(17, 72, 8), (3, 40, 8)]  # ranks


@pytest.mark.each_value
@pytest.mark.every(2)
@late
@ops
@pytest.mark.parametrize(
    "n_ranks, sizes", [(2, [(5, 40, 8)]), *slow((1, FEW), (2, FEW), (3, MANY), (5, MANY))]
)
def test_sizes(pes, op, n_ranks, sizes):
    """Columns of tiles of few blocks; of few ranks, two rows of them, the second one cut; a part of one."""
    assert all_right(pes, n_ranks, 1 if n_ranks < 3 else 3, op, sizes)


@pytest.mark.slow
@pytest.mark.each_value
@late
@ops
@pytest.mark.parametrize(
    "width, sms, size, part_dtype, majors, dtype",
    [
        (128, 1, (20, 264, 8), None, "kk", "bfloat16"),
        *slow((128, 2, (130, 136, 72), None, "mn", "float16")),
        (64, 2, (24, 200, 72), "float32", "mk", "bfloat16"),
        *slow((64, 1, (136, 72, 8), "float32", "kn", "float16")),
    ],
)
def test_tiles_layouts_and_parts_of_float32(pes, op, width, sms, size, part_dtype, majors, dtype):
    options = {"tile": (128, width)}
    assert all_right(pes, 2, sms, op, [size], majors, part_dtype, dtype, options)


@pytest.mark.slow
@skewed
@pytest.mark.parametrize("op, n_ranks", [("rs", 2), ("ar", 3)])
def test_some_ranks_are_ahead(pes, op, n_ranks):
    assert all_right(pes, n_ranks, 1, op, [(3, 72 * (2 if op == "ar" else 1), 8)] * 3)


@examples(5, derandomize=True)
@drawn(
    st.sampled_from(list(METHODS)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 260), st.integers(1, 20), st.integers(1, 10)), min_size=2, max_size=3),
    st.sampled_from([(None, 128), (None, 64), ("float32", 64)]),
)
def test_any_sizes_in_a_row(op, n_ranks, sms, sizes, parts):
    part_dtype, width = parts
    sizes = [(-(-m // n_ranks) * n_ranks, 8 * n, 8 * k) for m, n, k in sizes]
    arguments = op, sizes, "kn", part_dtype, "bfloat16", {"tile": (128, width)}
    assert all(map(all, sk.emu.run(compute, n_ranks, arguments, gpu=f"H200,sms={sms}")))


@pytest.mark.slow
@late
@pytest.mark.parametrize("op", [*slow("rs"), "ar"])
def test_graphs_and_streams(pes, op):
    def main():
        world = sk.init()
        product = OBJECTS[op](world, 18, 136, method=METHODS[op], options=NARROW)
        sizes = [(4, 72, 16), (18, 8, 72)]
        calls = []
        for call, size in enumerate(sizes):
            want = rows_wanted(op, call, size, world)
            calls.append((*given(call, size, world.rank), np.empty(want.shape, BFLOAT16), want))
        check_graphs_and_streams(world, product, calls)

    pes(2, gpu="H200,sms=1").run(main)


def results_of(part_dtype):
    """-> bits of each call, of all rows, by both and "two_shot"; and the result's error"""
    world = sk.init()
    numbers = [np.random.default_rng(r).standard_normal((2, 9, 192)).astype(BFLOAT16) for r in range(3)]
    a, b = numbers[world.rank][0], numbers[world.rank][1, :8].T
    bits, out = set(), None
    for op, method in (*METHODS.items(), ("ar", "two_shot")):
        product = OBJECTS[op](world, 9, 8, "bfloat16", part_dtype, method)
        for _ in range(2):
            out = product(a, b)
            world.synchronize()
            rows = world.host_allgather(out.tobytes())
            bits.add(b"".join(rows) if op == "rs" else rows[world.rank])
        product.free()
    exact = np.add.reduce([x[0].astype("float64") @ x[1, :8].T.astype("float64") for x in numbers])
    return bits, error(out, exact)


def same_bits(pes, part_dtype):
    found = pes(3, gpu="H200,sms=2").run(results_of, part_dtype)
    return len(set.union(*(bits for bits, _ in found))) == 1, found[0][1]


@pytest.mark.slow
def test_the_same_bits_on_all_ranks_every_time_and_as_of_two_shots(pes):
    same, rounded = same_bits(pes, None)
    also_same, wide = same_bits(pes, "float32")
    assert same and also_same
    assert wide < 3e-3 and wide <= rounded < 8e-3  # one rounding, and two


# ---- what is refused, and what is chosen


@ops
def test_what_is_not_allowed_is_refused(pes, op):
    kind, method = OBJECTS[op], METHODS[op]

    def main():
        world = sk.init()
        with pytest.raises(ValueError, match=f"{method} cannot be used here: .*for bfloat16 and float16"):
            kind(world, 8, 8, "float32", method=method)
        for tile in ((64, 64), (128, 256)):
            with pytest.raises(ValueError, match=r"must have 128 rows, and up to 128 columns"):
                kind(world, 8, 8, method=method, options={"tile": tile})
        product = kind(world, 64, 1 << 16, method=method)
        assert product.method_for(64, 16, 1 << 14) == method
        said = "64 by 65536 takes [0-9]+ bytes as bfloat16 in whole tiles .*; it is for 8388608 at most"
        said = f"method '{method}' does not compute 64 by 16 by 65536: {said}. Use method='auto'"
        with pytest.raises(ValueError, match=said):
            product.method_for(64, 16, 1 << 16)
        product.free()

    pes(2, heap_size=1 << 26).run(main)


@ops
def test_more_ranks_than_registers_are_for(pes, op):
    def main():
        with pytest.raises(ValueError, match="there are 17 ranks; it is for 1 to 16"):
            OBJECTS[op](sk.init(), 8, 8, method=METHODS[op])

    pes(17).run(main)


@ops
def test_ranks_without_nvlink_are_refused(pes, op):
    def main():
        with pytest.raises(ValueError, match=f"{METHODS[op]} cannot be used here: .*another node"):
            OBJECTS[op](sk.init(), 8, 8, method=METHODS[op])

    pes(2, local_size=1).run(main)


def chosen(op, n_ranks, m, k, n, emulated=False):
    method = object.__new__({"rs": ll128.Overlap, "ar": ll128.OverlapEverywhere}[op])
    backend = SimpleNamespace(name="emulator" if emulated else "nvshmem")
    method.world, method.part_dtype = SimpleNamespace(n_ranks=n_ranks, backend=backend), "bfloat16"
    method.shares, method.multiprocessors = n_ranks if op == "rs" else 1, 132
    method.most = ll128.most_bytes(n_ranks, op == "ar")
    return method.refuses(m, k, n) is None and method.is_for(m, k, n)


def test_they_are_for_some_megabytes():
    rows = 64, 128, 144, 192, 256, 384, 512, 513
    assert [m for m in rows if chosen("ar", 2, m, 7168, 8192)] == [192, 256, 384, 512]
    assert [m for m in rows if chosen("rs", 4, m, 7168, 8192)] == [384, 512]  # tiles are full, mostly
    rows = 1024, 2048, 2049
    assert [[m for m in rows if chosen(op, 2, m, 7168, 8192)] for op in METHODS] == [[], []]
    assert [m for m in rows if chosen("ar", 4, m, 7168, 8192)] == [1024, 2048]
    assert [k for k in (2048, 3584, 7168) if chosen("rs", 4, 1024, k, 8192)] == [2048, 3584]  # a long product
    for op in METHODS:
        assert [chosen(op, 2, 256, 7168, n) for n in (4088, 4096)] == [False, True]
        for refused in [(2, 256, 7164, 8192), (2, 256, 7168, 8188), (1, 256, 7168, 8192)]:
            assert not chosen(op, *refused)
        assert not chosen(op, 2, 256, 7168, 8192, emulated=True)


@examples(100)
@drawn(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 16),
    st.sampled_from(["bfloat16", "float32"]),
    st.data(),
)
def test_what_is_allowed_has_room(max_rows, columns, shares, part_dtype, data):
    """The slots hold every product that is not refused, by tiles of any width. They take 3 % more than the
    limit at most."""
    rows, n = data.draw(st.integers(1, max_rows)), 8 * data.draw(st.integers(1, columns))
    method = object.__new__(ll128.Overlap)
    method.part_dtype, method.shares, method.most = part_dtype, shares, 1 << 23
    room = ll128.room_for(max_rows, 8 * columns, method.tiles(), part_dtype, shares, method.most)
    assert shares * room * 480 <= 1.03 * method.most
    if method.refuses(shares * rows, 8, n) is None:
        for tile in method.tiles():
            assert tile.count(rows, n) * ll128.packets_of_tile(tile, part_dtype) <= room


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("part_dtype", ["bfloat16", "float32"])
def test_parts_fit_in_shared_memory(part_dtype, out_dtype):
    for tile in ll128.tiles_for(part_dtype):
        for majors in ("kk", "kn", "mk", "mn"):
            kinds = Kinds(out_dtype, *("k" if major == "k" else "mn" for major in majors), out_dtype)
            layout, pieces = Layout(tile, kinds), Pieces(tile, part_dtype)
            assert tile.warps * pieces.count * 16 * pieces.row_bytes <= layout.bytes - layout.at_pieces
            assert layout.stages >= 3 and shared_bytes(tile, kinds) <= 232448


# ---- waits that are not there

SEVERAL = "ar", 1, [(24, 136, 8)] * 2
EVEN = "ar", 1, [(24, 72, 8)]
AGAIN = "ar", 2, [(3, 72, 8)] * 3
BELOW = "ar", 2, [(130, 8, 8)]
SCATTERED = "rs", 1, [(48, 72, 8)] * 2
CUT = "(row < extra.rows) & (column < extra.width)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, change",
    [
        (SEVERAL, store("epoch", "1", inside="gemm_overlap")),
        (SEVERAL, omit_store("epochs[]")),
        (AGAIN, (last_block, omit_store("done[]"))),
        (AGAIN, (last_block, store("last", "cuda.atomic.add(done, 0, 1) >= 0"))),
        (SEVERAL, omit("mbarrier_wait", 1, "exchanging.take")),
        (SEVERAL, omit("mbarrier_wait", 2, "exchanging.take")),
        (EVEN, argument("mbarrier_wait", 2, "0", 2, "exchanging.take")),
        (SEVERAL, omit("cuda.syncwarp", inside="exchanging.take")),
        (SEVERAL, omit("mbarrier_wait", inside="exchanging.watch")),
        (SEVERAL, omit("cuda.syncwarp", inside="exchanging.watch")),
        (SEVERAL, omit_store("parity", 2, "exchanging.watch")),
        (SEVERAL, condition("tiles", "t < tiles", inside="exchanging.watch")),
        (SEVERAL, argument("mbarrier_init", 2, "1", 2)),
        (SEVERAL, store("slot", "j", inside="sending.send")),  # one for all tiles
        (SCATTERED, store("slot", "j", inside="sending.send")),
        (SEVERAL, store("begins", "(parts + step, parts, step, sums)")),  # and for all ranks
        (SEVERAL, store("sums", "0", 2, "begin")),  # where the parts are
        (BELOW, condition("of_tile", CUT, inside="store_packet")),
        (SCATTERED, condition("rank()", "True", inside="finish")),
    ],
)
def test_each_line_is_needed(mutate, case, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    op, sms, sizes = case
    mutate(*(change if isinstance(change, tuple) else (ll128, change)))
    assert is_missed(compute, (op, sizes), 12, f"H200,sms={sms}")


# ---- the exchange of a tile alone, in all schedules


def exchange(op, n_calls, rooms=(2, 2, 2)):
    """What a warp does with a tile of two packets, again and again; of a reduce-scatter with one for each
    rank."""
    world = sk.init()
    me, n_ranks, tile, everywhere = world.rank, world.n_ranks, Tile(16, 16), op == "ar"
    send = ll128.sending(tile, "bfloat16", n_ranks, everywhere, 1)
    finish = ll128.finishing(tile, "bfloat16", "bfloat16", n_ranks, everywhere, 1)
    begin, store = ll128.beginning(n_ranks, everywhere), fragment_store("bfloat16", 32)
    tiles, number, copies_of = 1 if everywhere else n_ranks, 3 + 8 * me, copies(8)

    @cuda.jit
    def kernel(room, call, lines, out):
        part, lane = cuda.shared.array(2048, types.uint8), cuda.threadIdx.x
        part = span(part, padding(part, 1024), 1024)
        extra = begin(lines, room, call, (), tiles, 1, 16, out, 4)
        for t in range(tiles):
            cuda.syncwarp()
            store(part, 0, copies_of(np.float32(number + call + t)))
            cuda.syncwarp()
            send(t, part, 0, lane, extra)
        for t in range(tiles):
            finish(t, 0, lane, extra)

    lines = world.zeros((slot_words(max(rooms), n_ranks, 1 + everywhere),), "uint64", "lines")
    for call in range(1, n_calls + 1):
        out = np.zeros(16 * 16, BFLOAT16)
        kernel[1, 32](rooms[call - 1], call, lines, out.view("uint64"))
        world.synchronize()
        assert (out == sum(3 + 8 * k + call + (0 if everywhere else me) for k in range(n_ranks))).all()


@pytest.mark.slow
@pytest.mark.parametrize("op, n_calls", [("ar", 2), ("rs", 3)])
def test_the_exchange_is_right_in_every_schedule(op, n_calls):
    found = sk.emu.explore(exchange, 2, (op, n_calls), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.slow
def test_and_only_with_two_buffers(mutate):
    """A rank that is ahead overwrites what another waits for."""
    mutate(ll128, single_buffer())
    found = sk.emu.explore(exchange, 2, ("rs", 2), exhaustive=True, heap_size=1 << 18)
    assert isinstance(found.failure, (AssertionError, DeadlockError)), str(found)


@pytest.mark.slow
def test_and_only_with_packets_at_the_same_places():
    """Or parts of a larger call come where sums of the one before have not been read."""
    found = sk.emu.explore(exchange, 2, ("ar", 2, (2, 6)), exhaustive=True, heap_size=1 << 18)
    assert isinstance(found.failure, (AssertionError, DeadlockError)), str(found)
