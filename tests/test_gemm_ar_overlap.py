"""GemmAllReduce's "two_shot_overlap" on the emulator: results at ragged edges, by blocks of several tiles,
with repeats, graphs, races checked, messages late, in random schedules; and what goes wrong when one of its
waits is taken away."""

from types import SimpleNamespace

import numpy as np
import pytest
from gemms import changed, check_graphs_and_streams
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from numba import cuda, types
from test_gemm_ar import BFLOAT16, all_right, compute, expected, given, is_missed, same_bits

import shmemkit as sk
from shmemkit.device import padding, span
from shmemkit.device.fragments import fragment_store
from shmemkit.kernels.gemm.sm90 import Kinds, Layout, Tile, shared_bytes
from shmemkit.kernels.gemm_ar import ll128, overlap

METHOD = "two_shot_overlap"
late = pytest.mark.schedules(deliveries="unordered", seeds=[None])
skewed = pytest.mark.schedules(deliveries="unordered", seeds=[0, 1])


@pytest.fixture
def blocks(monkeypatch):
    def only(sms, width=64):
        monkeypatch.setattr("shmemkit.emu.backend.EmulatorBackend.multiprocessors", sms)
        monkeypatch.setattr(overlap, "WIDTHS", {2: (width,), 4: (width,)})

    return only


@late
@pytest.mark.parametrize("n_pes", [1, 2, 3, 4, 5])
def test_sizes(pes, blocks, n_pes):
    """Three tiles of one block, then one of each, the second one cut; then a part of one."""
    blocks(1 if n_pes < 4 else 2)
    assert all_right(pes(n_pes), METHOD, [(17, 136, 8), (130, 8, 72), (3, 40, 8)])


@late
@pytest.mark.parametrize(
    "width, sms, size, part_dtype, majors, dtype",
    [
        (128, 1, (20, 264, 8), None, "kk", "bfloat16"),
        (128, 2, (130, 136, 72), None, "mn", "float16"),
        (64, 2, (24, 200, 72), "float32", "mk", "bfloat16"),
        (64, 1, (136, 72, 8), "float32", "kn", "float16"),
    ],
)
def test_tiles_layouts_and_parts_of_float32(pes, blocks, width, sms, size, part_dtype, majors, dtype):
    blocks(sms, width)
    assert all_right(pes(2), METHOD, [size], majors, part_dtype, dtype)


@skewed
def test_some_ranks_are_ahead(pes, blocks):
    blocks(1)
    assert all_right(pes(3), METHOD, [(3, 136, 8)] * 3)


@settings(max_examples=5, deadline=None, derandomize=True)
@drawn(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 260), st.integers(1, 20), st.integers(1, 10)), min_size=2, max_size=3),
    st.sampled_from([(None, 128), (None, 64), ("float32", 64)]),
)
def test_any_sizes_in_a_row(n_pes, sms, sizes, parts):
    part_dtype, width = parts
    sizes = [(m, 8 * n, 8 * k) for m, n, k in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "WIDTHS", {2: (width,), 4: (width,)})
        patch.setattr("shmemkit.emu.backend.EmulatorBackend.multiprocessors", sms)
        assert all(map(all, sk.emu.run(compute, n_pes, (METHOD, sizes, "kn", part_dtype))))


@late
def test_graphs_and_streams(pes, blocks):
    blocks(1)

    def main():
        world = sk.init()
        product, sizes = sk.GemmAllReduce(world, 17, 136, method=METHOD), [(3, 136, 16), (17, 8, 72)]
        calls = []
        for call, size in enumerate(sizes):
            want = expected(call, size, world)
            calls.append((*given(call, size, world.rank), np.empty(want.shape, BFLOAT16), want))
        check_graphs_and_streams(world, product, calls)

    pes(2).run(main)


def test_the_same_bits_on_all_ranks_every_time_and_as_of_two_shots(pes, blocks):
    blocks(2)
    same, rounded = same_bits(pes(3), None, [METHOD, "two_shot"])
    also_same, wide = same_bits(pes(3), "float32", [METHOD, "two_shot"])
    assert same and also_same
    assert wide < 3e-3 and wide <= rounded < 8e-3  # one rounding, and two


# ---- what is refused, and what is chosen


def test_what_is_not_allowed_is_refused(pes, monkeypatch):
    def main():
        world = sk.init()
        with pytest.raises(
            ValueError, match=f"GemmAllReduce {METHOD} cannot be used here: .*float16 is allowed"
        ):
            sk.GemmAllReduce(world, 8, 8, "float32", method=METHOD)
        product = sk.GemmAllReduce(world, 600, 16, method=METHOD)
        x = np.zeros((600, 16), BFLOAT16)
        said = "M is 600: up to 512 are allowed for max_n=16"
        with pytest.raises(ValueError, match=f"'{METHOD}': {said}"):
            product(x, x[:16])
        product.free()
        world.host_barrier()
        monkeypatch.setattr(overlap, "MOST_RANKS", 1)
        world.host_barrier()
        with pytest.raises(ValueError, match="2 ranks: up to 1 are allowed"):
            sk.GemmAllReduce(world, 8, 8, method=METHOD)

    monkeypatch.setattr(overlap, "MOST_BYTES", 520 * 32)
    pes(2).run(main)


def test_ranks_without_nvlink_are_refused(pes):
    def main():
        with pytest.raises(ValueError, match=f"{METHOD} cannot be used here: .*another node"):
            sk.GemmAllReduce(sk.init(), 8, 8, method=METHOD)

    pes(2, local_size=1).run(main)


def chosen(n_ranks, m, k, n, emulated=False, max_n=8192):
    method = object.__new__(overlap.TwoShotOverlap)
    backend = SimpleNamespace(name="emulator" if emulated else "nvshmem")
    method.world, method.part_dtype = SimpleNamespace(n_ranks=n_ranks, backend=backend), "bfloat16"
    method.max_n, method.rows = max_n, 512
    return method.refuses(m, k, n) is None and method.is_for(m, k, n)


def test_it_is_for_some_megabytes():
    assert [chosen(4, m, 7168, 8192) for m in (64, 128, 129, 256, 512, 513)] == [False] * 2 + [True] * 3 + [
        False
    ]
    assert [chosen(2, 256, 7168, n) for n in (4088, 4096)] == [False, True]
    for refused in [(4, 256, 7164, 8192), (4, 256, 7168, 8188), (1, 256, 7168, 8192)]:
        assert not chosen(*refused)
    assert not chosen(4, 256, 7168, 8192, emulated=True)


@settings(max_examples=60, deadline=None)
@drawn(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from(["bfloat16", "float32"]), st.data())
def test_what_is_allowed_has_room(max_m, columns, part_dtype, data):
    """In the lines, by tiles of any width."""
    max_n = 8 * columns
    rows = overlap.rows_allowed(max_m, max_n, part_dtype)
    assert 1 <= rows <= max_m
    m, n = data.draw(st.integers(1, rows)), 8 * data.draw(st.integers(1, columns))
    room = overlap.room_for(rows, max_n, part_dtype)
    for tile in overlap.tiles_for(part_dtype):
        assert overlap.packets_of(m, n, tile, part_dtype) <= room


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("part_dtype", ["bfloat16", "float32"])
def test_parts_fit_in_shared_memory(part_dtype, out_dtype):
    for tile in overlap.tiles_for(part_dtype):
        for majors in ("kk", "kn", "mk", "mn"):
            kinds = Kinds(out_dtype, *("k" if major == "k" else "mn" for major in majors), out_dtype)
            layout, pieces = Layout(tile, kinds), ll128.Pieces(tile, part_dtype)
            assert tile.warps * pieces.count * 16 * pieces.row_bytes <= layout.bytes - layout.at_pieces
            assert layout.stages >= 3 and shared_bytes(tile, kinds) <= 232448


# ---- waits that are not there

SEVERAL = (1, 64), [(24, 136, 8)] * 2
AGAIN = (2, 64), [(3, 72, 8)] * 3
BELOW = (2, 64), [(130, 8, 8)]


@pytest.mark.parametrize(
    "case, line, change",
    [
        (SEVERAL, "call, step = calls[0] + 1,", "call, step = 1,"),
        (SEVERAL, "                calls[0] = call", "                pass"),
        (AGAIN, "                done[0] = 0\n", ""),
        (SEVERAL, "mbarrier_wait(extra.posts, SENT, (state & 1) ^ 1)", "pass"),
        (SEVERAL, "            mbarrier_wait(extra.posts, FULL, parity)\n", ""),
        (SEVERAL, "            mbarrier_wait(extra.posts, FULL, state & 1)\n", ""),
        (SEVERAL, "part_bytes - of_warp),))  # 1\n        cuda.syncwarp()\n", "part_bytes - of_warp),))\n"),
        (SEVERAL, "            parity ^= 1\n", ""),
        (SEVERAL, "while t + step < tiles:", "while t < tiles:"),
        (SEVERAL, "i = t * packets + j", "i = j"),
        (SEVERAL, "first + n_ranks - 1 - me, n_ranks)", "first, n_ranks)"),
        (SEVERAL, "where = rank() * step,", "where = step,"),
        (SEVERAL, "step, n_ranks * step\n", "step, step\n"),
        (SEVERAL, "place += warps", "place += warps + 1"),
        (BELOW, "(warp < of_tile) & ", ""),
    ],
)
def test_each_line_is_needed(blocks, monkeypatch, case, line, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    monkeypatch.setattr(overlap, "overlap_kernel", changed(overlap, line, change).overlap_kernel)
    blocks(*case[0])
    assert is_missed(METHOD, case, 8)


# ---- the exchange of a tile alone, in all schedules


def exchange(n_calls, module=overlap):
    """What a warp does with a tile of three packets, again and again."""
    world = sk.init()
    me, n_ranks, tile = world.rank, world.n_ranks, Tile(16, 32)
    send = module.sending(tile, "bfloat16", n_ranks, 1)
    add = module.adding(tile, "bfloat16", n_ranks, 1)
    receive = module.receiving(tile, "bfloat16", "bfloat16", 1)
    step = -(-module.packets_of_tile(tile, "bfloat16") // n_ranks)
    store = fragment_store("bfloat16", 64)

    @cuda.jit
    def kernel(number, call, lines, out):
        part, lane = cuda.shared.array(2048, types.uint8), cuda.threadIdx.x
        part = span(part, padding(part, 1024), 1024)
        extra = module.Given(lines, call, me * step, step, n_ranks * step, (), 1, 1, 16, out, 8)
        for i in range(2):
            store(part, i, (number,) * 8)
        cuda.syncwarp()
        send(0, part, 0, lane, extra)
        add(0, 0, extra)
        receive(0, 0, lane, extra)

    lines = world.zeros((ll128.line_words(3, n_ranks, 2),), "uint64", "lines")
    for call in range(1, n_calls + 1):
        out = np.zeros(16 * 32, BFLOAT16)
        kernel[1, 32](np.float32(call + 8 * me), call, lines, out.view("uint64"))
        world.synchronize()
        assert (out == n_ranks * call + 4 * n_ranks * (n_ranks - 1)).all()


def test_the_exchange_is_right_in_every_schedule():
    found = sk.emu.explore(exchange, 2, (2,), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)
