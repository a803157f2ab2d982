"""Pieces that say themselves that they have arrived: the device functions, on the emulator and as
PTX."""

import contextlib
import ctypes
import re

import numpy as np
import pytest
from bounded_memory import Memory
from emulated import untyped
from numba import cuda, types
from ptx import compile_ptx, resources

import shmemkit as sk
from shmemkit.compiler.bounded_compile import arming
from shmemkit.device import lamport_load, lamport_store, load_piece, rank, store_piece
from shmemkit.device.packets import lamport


def test_the_pattern_is_drawn_once_for_all_ranks(pes):
    """And anew for each object."""

    def main():
        world = sk.init()
        patterns = [sk.AllToAll._maker("lamport")(world, 100).channel[2:] for _ in range(2)]
        assert world.host_allgather(patterns) == [patterns] * 3 and patterns[0] != patterns[1]
        assert all(0 <= word < 1 << 63 for pattern in patterns for word in pattern)

    pes(3).run(main)


# ---- pieces, on the emulator


@cuda.jit
def copy_pieces(out, x, n):
    i = cuda.threadIdx.x
    while i < n:
        store_piece(out, i, load_piece(x, i))
        i += cuda.blockDim.x


@pytest.mark.parametrize(
    "dtype, size, first", [("complex128", 47, 1), ("uint64", 131, 1), ("uint8", 1003, 3), ("uint8", 8, 5)]
)
def test_loaded_and_stored(pes, dtype, size, first):
    def main():
        world = sk.init()
        x = (np.arange(first + size) + 1).astype(dtype)[first:]
        room = np.zeros(first + size + 70, dtype)
        out = room[first : first + size]
        copy_pieces[1, 32](out, x, -(-x.nbytes // 16))
        world.synchronize()
        assert (out == x).all() and not room[:first].any() and not room[first + size :].any()

    pes(1).run(main)


@pytest.mark.parametrize(
    "x, message",
    [
        (
            np.zeros(9, "float32"),
            "x is a 1-D array of float32; .* of complex128, uint64 or uint8. Pass a view",
        ),
        (np.zeros((2, 60), "uint64"), "it must be a contiguous 1-D array of"),
        (np.zeros(120, "uint64")[::2], "contiguous"),
        (np.zeros(1, "uint64"), r"load_piece\(\): i is 1; x has pieces 0 to 0"),
    ],
)
@untyped
def test_wrong_data(pes, x, message):
    def main():
        sk.init()
        copy_pieces[1, 32](np.zeros(60, "uint64"), x, 2)

    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(1).run(main)


LOW, HIGH = 5, 7


@cuda.jit
def swap(x, out, lines, calls, halves):
    """Two pieces of x to the other rank, which takes them in another order."""
    call = 1
    while call <= calls:
        at = 2 * (call % halves)
        lamport_store(lines, at, load_piece(x, 0), LOW, HIGH, 1 - rank())
        lamport_store(lines, at + 1, load_piece(x, 1), LOW, HIGH, 1 - rank())
        b, a = lamport_load(lines, (at + 1, at), LOW, HIGH)
        store_piece(out, 0, a)
        store_piece(out, 1, b)
        call += 1


def swapped(calls=1, halves=2, places=4, first=(LOW, HIGH), data=0):
    world = sk.init()
    x, out = np.arange(4, dtype="uint64") + 1000 * world.rank, np.zeros(4, "uint64")
    x[2:] += np.uint64(data)
    lines = world.zeros((2 * places,), "uint64", "lines")
    lines.reshape(-1, 2)[:] = first
    world.barrier()
    swap[1, 1, world.stream](x, out, lines, calls, halves)
    world.barrier()
    world.synchronize()
    assert (out[:2] == np.arange(2) + 1000 * (1 - world.rank)).all()
    assert (lines.reshape(-1, 2) == (LOW, HIGH)).all()  # empty again


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_pieces_for_the_other_rank(pes):
    pes(2).run(swapped, 2)


@pytest.mark.parametrize("halves, right", [(2, True), (1, False)])
def test_one_half_is_not_enough_for_two_calls(halves, right):
    """The second call's pieces may come before the first one's have been taken."""
    found = sk.emu.explore(swapped, 2, (2, halves), exhaustive=True, heap_size=1 << 16)
    if right:
        assert found.finished and found.failure is None, str(found)
    else:
        assert re.search(
            r"lines\[\d\] on rank \d (is not empty|was made empty by a launch)", str(found.failure)
        )


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_what_comes_of_a_launch_does_not_say_that_it_has_made_places_empty(pes):
    """Two halves are enough for calls of a launch each, not for three in one."""
    with pytest.raises(sk.emu.EmulatorError, match="was made empty by a launch that is still running"):
        pes(2).run(swapped, 3)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"places": 3}, r"lamport_store\(\): the place is 3; lines has places 0 to 2"),
        ({"first": (0, 0)}, r"lamport_store\(\): lines\[4\] on rank [01] is not empty"),
        ({"first": (LOW, 0)}, "is not empty; it must be. Its receiver has not taken"),
    ],
)
def test_wrong(pes, wrong, message):
    arguments = {"calls": 1, "halves": 2, "places": 4, "first": (LOW, HIGH), **wrong}
    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(2).run(swapped, *arguments.values())


@cuda.jit
def send_nothing(lines):
    lamport_store(lines, 0, (LOW, HIGH), LOW, HIGH, 0)


def test_a_piece_that_would_not_arrive(pes):
    def main():
        world = sk.init()
        send_nothing[1, 1](world.zeros((2,), "uint64", "lines"))

    with pytest.raises(sk.emu.EmulatorError, match="the piece equals the pattern of an empty place"):
        pes(1).run(main)


def test_half_a_pattern_is_a_piece(pes):
    """Whichever half."""

    @cuda.jit
    def kernel(lines, out):
        lamport_store(lines, 0, (LOW, 0), LOW, HIGH, 0)
        lamport_store(lines, 1, (0, HIGH), LOW, HIGH, 0)
        (a, b), (c, d) = lamport_load(lines, (0, 1), LOW, HIGH)
        out[0], out[1], out[2], out[3] = a, b, c, d

    def main():
        world = sk.init()
        lines, out = world.zeros((4,), "uint64", "lines"), np.zeros(4, "uint64")
        lines[:] = LOW, HIGH, LOW, HIGH
        kernel[1, 1, world.stream](lines, out)
        world.synchronize()
        assert out.tolist() == [LOW, 0, 0, HIGH]

    pes(1).run(main)


# ---- on the GPU


@pytest.mark.parametrize("armed", [False, True])
def test_accesses(armed):
    """Two of 16 bytes that store pieces, two that look together, and two that make places empty."""
    data, lines = types.Array(types.complex128, 1, "C"), types.Array(types.uint64, 1, "C")
    with arming() if armed else contextlib.nullcontext():
        ptx = compile_ptx(swap, (data, data, lines, types.int64, types.int64))
    assert len(re.findall(r"st\.relaxed\.sys\.global\.b128", ptx)) == 4
    looks = len(re.findall(r"ld\.relaxed\.sys\.global\.b128", ptx))
    assert looks % 2 == 0 and looks >= 2
    assert ("globaltimer" in ptx) == armed
    needed = resources(ptx)
    assert (needed.spills, needed.stack) == (0, 0)


@cuda.jit
def store_one(lines, pe):
    lamport_store(lines, 0, (1, 2), LOW, HIGH, pe)


def test_nothing_is_stored_when_the_time_is_up():
    with arming():
        ptx = compile_ptx(store_one, (types.Array(types.uint64, 1, "C"), types.int64))
    assert re.search(r"ld\.relaxed\.gpu.*st\.relaxed\.sys\.global\.b128", ptx, re.DOTALL)


class Places(Memory):
    """A thread that waits for pieces in three places."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch, limit=10**6)
        self.words, self.late = (ctypes.c_uint64 * 6)(*[LOW, HIGH] * 3), {}

    def read_memory(self, address, size):
        if address == ctypes.addressof(self.words):
            self.polls += 1
            self.now += self.step
            if self.polls in self.late:
                self.words[2 * self.late[self.polls]] = 1
        return super().read_memory(address, size)

    def receive(self):
        first = ctypes.addressof(self.words)
        arrived = lamport.arriving(3, armed=True, recorded=False)
        return arrived(tuple(types.uint64(first + 16 * k) for k in range(3)), LOW, HIGH)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_piece_that_does_not_come(monkeypatch, late):
    places = Places(monkeypatch)
    for k in {0, 1, 2} - {late}:
        places.words[2 * k] = 1
    assert [low for low, _ in places.receive()] == [LOW if k == late else 1 for k in range(3)]
    (record,) = places.records()
    assert record.primitive == "lamport_load"
    assert record.address == ctypes.addressof(places.words) + 16 * late
    assert (record.compare, record.expected, record.seen, record.expired) == ("ne", LOW, LOW, True)


def test_pieces_that_come_late(monkeypatch):
    places = Places(monkeypatch)
    places.step, places.late = 1, {5: 2, 9: 0, 100: 1}
    assert [low for low, _ in places.receive()] == [1, 1, 1]
    assert places.polls == 100 and not any(places.table) and not any(places.control)
