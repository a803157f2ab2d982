"""All-reduce by LL128: what test_every_method.py does not ask of its two methods, and the tiles that they
are made of (``shmemkit.device.packets.ll128``), on the emulator and as PTX."""

import contextlib
import ctypes
import re

import numpy as np
import pytest
from bounded_memory import Memory
from emulated import untyped
from fast import slow
from kernel_types import listed
from numba import cuda, types
from ptx import compile_ptx, resources
from ptx_code import LOAD, STORE, Code, is_lean

import shmemkit as sk
from shmemkit.collectives.schedules import exchange as exchanges
from shmemkit.collectives.schedules import two_shot
from shmemkit.compiler.bounded_compile import arming
from shmemkit.device import (
    TILE_BYTES,
    TILE_WORDS,
    ll128_load_some,
    ll128_load_tiles,
    ll128_store_tile,
    ll128_store_tiles,
    load_tile,
    rank,
    store_tile,
    tile_piece,
)
from shmemkit.device.packets import ll128
from shmemkit.device.shmem import bounded_waits

methods = pytest.mark.parametrize("method", ["one_shot_ll128", "two_shot_ll128"])


# ---- the methods


def in_few_slots(sizes, blocks):
    """Segments of more tiles than there are slots. Ranks have 1, 2 or 3 blocks, or what divides the slots."""
    world = sk.init()
    n, reduce = world.n_ranks, sk.AllReduce._maker("two_shot_ll128")(world, 8 * max(sizes), "sum", ring=2)
    assert reduce.channel[1] == 6
    for call, size in enumerate(sizes):
        x = np.arange(size, dtype="uint64") + 1000 * call + world.rank
        reduce.bind(x, x, True, x.dtype)
        for key in reduce.most:
            reduce.most[key] = blocks[world.rank]
        reduce.bind(x, x, True, x.dtype)(None)
        world.synchronize()
        assert (x == n * (np.arange(size) + 1000 * call) + n * (n - 1) // 2).all()


def test_two_shots_refuse_arrays_whose_packets_32_bits_do_not_count(pes):
    def main():
        with sk.init() as world, pytest.raises(ValueError, match="all_reduce two_shot_ll128: max_nbytes is"):
            sk.AllReduce(world, (1 << 34) + 1, method="two_shot_ll128")

    pes(2).run(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, blocks",
    [
        ([1400, 61], (1, 2, 3)),
        *slow(*(([3600, 200, 1081, 60, 2500], blocks) for blocks in ((1, 2, 3), (4, 5, 6), (64, 64, 64)))),
    ],
)
@pytest.mark.schedules(deliveries="unordered", seeds=[1])
def test_two_shots_in_few_slots(pes, sizes, blocks):
    pes(3, gpu="H200,sms=3").run(in_few_slots, sizes, blocks)


def few_calls(method, sizes, **settings):
    """Of one warp, which is little enough for all schedules."""
    world = sk.init()
    n, reduce = world.n_ranks, sk.AllReduce._maker(method)(world, 8 * max(sizes), "sum", **settings)
    for call, size in enumerate(sizes):
        x = np.full(size, 10 * call + world.rank, "uint64")
        reduce.bind(x, x, True, x.dtype)(None)
        world.synchronize()
        assert (x == 10 * call * n + n * (n - 1) // 2).all()


@pytest.mark.slow
def test_two_shots_in_one_slot_are_right_in_every_schedule(monkeypatch):
    """Two tiles of each segment, one after the other."""
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=1")
    found = sk.emu.explore(
        lambda: few_calls("two_shot_ll128", [240], ring=1), 2, exhaustive=True, heap_size=1 << 18
    )
    assert found.finished and found.failure is None, str(found)


@methods
def test_many_ranks_are_refused(pes, method):
    def main():
        with pytest.raises(ValueError, match=f"{method}: there are 17 ranks; it is for 16 at most"):
            sk.AllReduce(sk.init(), 64, "sum", method)

    pes(17).run(main)


# ---- tiles, on the emulator


@cuda.jit
def copy_tiles(out, x, n):
    i = cuda.threadIdx.x >> 5
    while i < n:
        store_tile(out, i, load_tile(x, i))
        i += cuda.blockDim.x >> 5


@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize(
    "dtype, size, first",
    [("complex128", 30, 0), ("complex128", 47, 1), ("uint64", 131, 1), ("uint8", 1003, 3)],
)
def test_loaded_and_stored(pes, dtype, size, first, threads):
    def main():
        world = sk.init()
        x = (np.arange(first + size) + 1).astype(dtype)[first:]
        room = np.zeros(first + size + 70, dtype)
        out = room[first : first + size]
        copy_tiles[1, threads](out, x, -(-x.nbytes // TILE_BYTES) + 1)  # one too many, which is nobody's
        world.synchronize()
        assert (out == x).all() and not room[:first].any() and not room[first + size :].any()

    pes(1).run(main)


@cuda.jit
def pieces(x, out, i):
    out[cuda.threadIdx.x, 0] = tile_piece(i)
    out[cuda.threadIdx.x, 1], _ = load_tile(x, i)


@pytest.mark.parametrize("i", [0, 2])
def test_pieces(pes, i):
    """Each thread's number is that of the piece its first word lies in."""

    def main():
        world, x, out = sk.init(), np.arange(180, dtype="uint64"), np.zeros((32, 2), "uint64")
        pieces[1, 32](x, out, i)
        world.synchronize()
        assert (out[:, 0] == out[:, 1] // 2).all()
        assert sorted({*out[:, 0]}) == list(range(30 * i, 30 * i + 30))

    pes(1).run(main)


@cuda.jit
def exchange(x, out, lines, rows, calls):
    """Rank k gets tile k of x, from each rank, in the row of the call."""
    for call in range(1, calls + 1):
        row = 2 * (call % rows)
        ll128_store_tiles(lines, row + rank(), 0, (load_tile(x, 0), load_tile(x, 1)), call)
        a, b = ll128_load_tiles(lines, row, 2, 0, call)
        store_tile(out, 0, a)
        store_tile(out, 1, b)


def exchanged(rows=2, calls=1, threads=32, words=TILE_WORDS, flags=0, first=0):
    world = sk.init()
    x = np.arange(120, dtype="uint64") + 1000 * world.rank
    out = np.zeros(120, "uint64")
    lines = world.zeros((2 * rows, words), "uint64", "lines")
    lines[:, 15] = flags
    world.barrier()
    exchange[1, threads, world.stream](x, out, lines[first:], rows, calls)
    world.synchronize()
    mine = np.arange(60) + 60 * world.rank
    assert (out == np.concatenate([mine, 1000 + mine])).all()


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_a_tile_for_each_rank(pes):
    pes(2).run(exchanged, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("rows, right", [*slow((2, True)), (1, False)])
def test_one_row_is_not_enough_for_two_calls(rows, right):
    found = sk.emu.explore(exchanged, 2, (rows, 2), exhaustive=True, heap_size=1 << 16)
    assert found.finished if right else isinstance(found.failure, sk.emu.DeadlockError), str(found)


@cuda.jit
def send_tiles(x, y, lines, n, early):
    """Tiles of x from rank 0 to rank 1, which waits for all of them at once."""
    if rank() == 0:
        i = 0
        while i < n:
            ll128_store_tile(lines, i, load_tile(x, i), 3, 1)
            i += 1
    elif early:
        y[cuda.threadIdx.x] = lines[cuda.threadIdx.x]
    else:
        a, b = ll128_load_some(lines, (0, n - 1), 3)
        store_tile(y, 0, a)
        store_tile(y, n - 1, b)


def sent_tiles(early):
    world = sk.init()
    x, y = np.arange(1, 111, dtype="uint64"), np.zeros(110, "uint64")
    send_tiles[1, 32](x, y, sk.zeros(2 * TILE_WORDS, "uint64"), 2, early)
    world.synchronize()
    assert early or world.rank == 0 or (y == x).all()


def test_a_line_is_stored_at_once_and_its_data_are_read_after_the_flag(pes):
    """Who reads a line before its flag is there has a race."""
    pes(2).run(sent_tiles, False)
    with pytest.raises(sk.emu.RaceError):
        sk.emu.run(sent_tiles, 2, (True,), races=True)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"flags": 1}, r"ll128_store_tiles\(\): lines\[[23], 15\] on rank [01] has the flag 1 already"),
        ({"threads": 33}, "the block has 33 threads; it must have a multiple of 32"),
        ({"words": 48}, "lines has 48 words; it must have 64"),
        ({"words": 72}, "multiple of 128 bytes"),
        ({"first": 2}, r"the rows are [23] to [23]; lines has rows 0 to 1"),
    ],
)
@untyped
def test_wrong_lines(pes, wrong, message):
    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(2).run(lambda: exchanged(**wrong))


@pytest.mark.parametrize(
    "x, message",
    [
        (np.zeros(9, "float32"), "is a 1-D array of float32; it must be .* of complex128, uint64 or uint8"),
        (np.zeros((2, 60), "uint64"), "x is a 2-D array of uint64; it must be a contiguous 1-D array"),
        (np.zeros(120, "uint64")[::2], "contiguous"),
        (np.zeros(800, "uint8")[8:-8].view("complex128"), "multiple of 16 bytes"),
    ],
)
@untyped
def test_wrong_data(pes, x, message):
    def main():
        sk.init()
        shifted = x if x.dtype != "complex128" or x.ctypes.data % 16 else x[:0]
        copy_tiles[1, 32](np.zeros(60, "uint64"), shifted, 1)

    if x.dtype == "complex128" and not x.ctypes.data % 16:
        pytest.skip("NumPy's memory happens to be at such an address")
    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(1).run(main)


# ---- on the GPU


@pytest.mark.each_value
@pytest.mark.parametrize("armed", [False, True], ids=["plain", "armed"])
@pytest.mark.parametrize(
    "kernel, shots",
    [
        (listed(exchanges)["ll128[False,sum,bfloat16,4,complex128]"], 1),
        (listed(two_shot)["ll128[sum,bfloat16,4,complex128]"], 2),
    ],
    ids=["one", "two"],
)
def test_lines_are_stored_and_loaded_by_whole_warps(kernel, shots, armed):
    """All stores to the ranks follow one another, and so do all loads that are looked at together."""
    with arming() if armed else contextlib.nullcontext():
        ptx = compile_ptx(*kernel[:2])
    needed = resources(ptx)
    assert is_lean(ptx) and (needed.spills, needed.stack) == (0, 0)
    code = Code(ptx)
    for pattern, times in ((STORE, 1), (LOAD, 2)):
        found = code.all(pattern)
        assert len(found) == times * 4 * shots and all(map(code.are_together, found))
        for i, k in zip(found, found[1:], strict=False):
            assert found.index(k) % 4 == 0 or code.are_neighbours(i + 1, k), code.steps[i : k + 1]
    looks = [m.start() for m in re.finditer(r"ld\.relaxed\.gpu", ptx)]
    assert bool(looks) == armed  # at whether the time is up, also before what is stored
    assert not armed or looks[0] < ptx.index("st.relaxed.sys.global.v2")


class Lines(Memory):
    """A thread that waits for the flag 7 in three rows."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch, limit=10**6)
        self.words, self.late = (ctypes.c_uint64 * 12)(), {}
        monkeypatch.setattr(cuda, "laneid", 7)

    def read_memory(self, address, size):
        if address == ctypes.addressof(self.words):
            self.polls += 1
            self.now += self.step
            if self.polls in self.late:
                self.words[4 * self.late[self.polls] + 1] = 7
        return super().read_memory(address, size)

    def receive(self):
        arrived, first = ll128.arriving(3, "ll128_load_tiles", True, False), ctypes.addressof(self.words)
        return arrived(tuple(types.uint64(first + 32 * row) for row in range(3)), types.uint32(7))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_row_that_does_not_come(monkeypatch, late):
    lines = Lines(monkeypatch)
    for row in range(3):
        lines.words[4 * row + 1] = 6 if row == late else 7
    assert [flag for _, flag in lines.receive()] == [6 if row == late else 7 for row in range(3)]
    (record,) = lines.records()
    assert record.primitive == "ll128_load_tiles"
    assert record.address == ctypes.addressof(lines.words) + 32 * late + 8
    assert (record.compare, record.expected, record.seen, record.expired) == ("eq", 7, 6, True)
    before = lines.polls
    lines.receive()  # from now on nobody waits, and nothing is recorded
    assert lines.polls - before <= bounded_waits.FIRST and lines.control[:] == [1, 1]


def test_rows_that_come_late(monkeypatch):
    lines = Lines(monkeypatch)
    lines.step, lines.late = 1, {5: 2, 9: 0, 100: 1}
    assert [flag for _, flag in lines.receive()] == [7, 7, 7]
    assert lines.polls == 101 and not any(lines.table) and not any(lines.control)
