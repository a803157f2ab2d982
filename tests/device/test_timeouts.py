"""Timeouts where there is no GPU: the variable, bind(timeout=), the errors' text; and what an armed wait
does, step by step, on memory of this process in the place of the GPU's."""

import ctypes
import dataclasses
import os
import struct
import subprocess
import sys
from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import pytest
from bounded_memory import Memory
from numba import cuda
from numba.cuda import types

import shmemkit as sk
from shmemkit.device.packets import ll
from shmemkit.device.shmem import bounded_waits
from shmemkit.support import timeouts


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), (" 0.25 ", 0.25), ("1e3", 1000.0), ("", None)])
def test_variable(monkeypatch, text, seconds):
    monkeypatch.setenv("SHMEMKIT_TIMEOUT", text)
    assert timeouts.default.__wrapped__() == seconds


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan", "1e10", "5s"])
def test_bad_variable(monkeypatch, text):
    monkeypatch.setenv("SHMEMKIT_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"SHMEMKIT_TIMEOUT is '{text}'.*greater than 0.*Unset it"):
        timeouts.default.__wrapped__()


@pytest.mark.slow
@pytest.mark.parametrize(
    "begin", ["sk.init(backend='emulator')", "sk.bind(cuda.jit(lambda x: None), 1, 1, ())"]
)
def test_bad_variable_is_refused_at_once(begin):
    code = f"import shmemkit as sk; from numba import cuda; {begin}"
    environment = os.environ | {"SHMEMKIT_TIMEOUT": "never"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "ValueError: SHMEMKIT_TIMEOUT is 'never'; it must be a number of seconds" in done.stderr


@cuda.jit
def store(x, value):
    x[0] = value


def test_bind_on_the_emulator():
    def main():
        world = sk.init()
        x = world.xp.zeros(1, "int64")
        for bad in (0, -1.0, float("nan"), float("inf"), 2e9):
            with pytest.raises(ValueError, match=r"bind\(\): timeout is .*greater than 0"):
                sk.bind(store, 1, 1, (x, 7), timeout=bad)
        for bad in ("1", b"1", True, [1], 1j):
            with pytest.raises(TypeError, match=r"bind\(\): timeout is .*; it must be a number of seconds"):
                sk.bind(store, 1, 1, (x, 7), timeout=bad)
        sk.bind(store, 1, 1, (x, 7), timeout=np.float32(1))
        sk.bind(store, 1, 1, (x, 7), timeout=0.5)()
        return world.asnumpy(x)[0]

    assert sk.emu.run(main, 2) == [7, 7]


def test_kernel_names():
    assert (
        bounded_waits.kernel_name("_ZN8shmemkit7kernels5queue12queue_kernelB2v1B102cw51c5ArrayIfE")
        == "queue_kernel"
    )
    assert bounded_waits.kernel_name("_ZN4test12_3clocals_3e6kernelB2v1") == "kernel"
    assert bounded_waits.kernel_name("hand_written") == "hand_written"


# ---- an armed wait, on memory of this process


def test_a_wait_that_is_satisfied_leaves_nothing(monkeypatch):
    memory = Memory(monkeypatch, limit=10**9)
    memory.signal.value = 5
    assert bounded_waits.bounded("wait", types.uint64, memory.read, "ge")(memory.address, 5) == 5
    assert (memory.polls, memory.now) == (1, 10**18), "it looked at the clock"

    def read(address):
        memory.signal.value += 1
        return memory.read(address)

    assert bounded_waits.bounded("wait", types.uint64, read, "ge")(memory.address, 500) == 500
    assert not any(memory.table) and not any(memory.control)


@pytest.mark.every(3)
@pytest.mark.parametrize("compare", ["ge", "eq", "ne", "gt", "le", "lt"])
def test_a_wait_that_expires(monkeypatch, compare):
    memory = Memory(monkeypatch, limit=10**6)
    memory.signal.value = seen = {"ge": 6, "eq": 8, "ne": 7, "gt": 7, "le": 8, "lt": 7}[compare]
    poll = bounded_waits.bounded("wait_block", types.uint64, memory.read, compare)
    assert poll(memory.address, 7) == seen
    assert memory.control[:] == [1, 1] and memory.table[0] == 1
    (record,) = memory.records()
    assert record.waited >= 1e-3
    assert record == timeouts.WaitRecord(
        rank=1, kernel="a_kernel", primitive="wait_block", block=(70000, 3, 65534), thread=(37, 5, 63),
        address=memory.address, signal="flags", index=(2, 3), owner=0, compare=compare, expected=7, seen=seen,
        waited=record.waited, expired=True,
    )  # fmt: skip
    # From now on nobody waits: neither one that begins now, which leaves no record...
    before = memory.polls
    poll(memory.address, 7)
    assert memory.polls - before <= bounded_waits.FIRST
    assert memory.control[1] == 1 and bounded_waits.stopped()


def test_a_wait_that_ends_because_another_has_expired(monkeypatch):
    memory = Memory(monkeypatch, limit=10**9)
    memory.control[0] = 0

    def read(address):
        if memory.polls == 300:
            memory.control[0] = 1
        return memory.read(address)

    memory.signal.value = 2**64 - 5
    bounded_waits.bounded("wait", types.int64, read, "eq")(memory.address, 2**64 - 3)
    (record,) = memory.records()
    assert not record.expired
    assert (record.expected, record.seen) == (-3, -5)


def test_full_table(monkeypatch):
    memory = Memory(monkeypatch, limit=10**6)
    memory.control[1] = bounded_waits.CAPACITY - 1
    bounded_waits.bounded("wait", types.uint64, memory.read, "ge")(memory.address, 7)
    assert (
        memory.control[1] == bounded_waits.CAPACITY
        and memory.table[8 + (bounded_waits.CAPACITY - 1) * bounded_waits.WORDS]
    )
    memory.control[0] = 0
    bounded_waits.bounded("wait", types.uint64, memory.read, "ge")(memory.address, 7)
    assert memory.control[1] == bounded_waits.CAPACITY + 1


def test_grid_barrier_tells_how_many_have_arrived(monkeypatch):
    memory = Memory(monkeypatch, limit=10**6)
    arrived = ctypes.c_uint64(3)
    poll = bounded_waits.bounded_change(types.uint64, memory.read)
    poll(memory.address, 0, ctypes.addressof(arrived), 4)
    (record,) = memory.records()
    assert (record.primitive, record.expected, record.seen) == ("grid_barrier", 4, 3)
    assert record.address == ctypes.addressof(arrived)


def test_comparison_by_number(monkeypatch):
    memory = Memory(monkeypatch, limit=10**6)
    poll = bounded_waits.bounded_by_number("signal_wait_until", types.uint64, memory.read)
    holding = {"EQ": 7, "NE": 6, "GT": 8, "GE": 7, "LT": 6, "LE": 7}
    for name, value in holding.items():
        memory.signal.value = value
        assert poll(memory.address, 7, sk.device.ComparisonType[f"CMP_{name}"].value) == value
    assert not any(memory.table)
    memory.signal.value = 9
    poll(memory.address, 7, sk.device.ComparisonType.CMP_LE.value)
    assert memory.records()[0].compare == "le"


# ---- LL and LL128


def test_all_that_receive_lines_have_a_number():
    receive = {name for name in sk.device.__all__ if "_recv_" in name or name == "ll_load"}
    assert {name for name in bounded_waits.PRIMITIVES if "_recv_" in name or name == "ll_load"} == receive
    assert set(bounded_waits.PRIMITIVES) <= set(sk.device.__all__)


class Lines(Memory):
    """A thread that waits for the flag 7 in the two words of its line of LL."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch, limit=10**6)
        self.words, self.late = (ctypes.c_uint64 * 2)(), {}
        self.arrived = ll.arriving("ll_recv_pack_warp", armed=True, recorded=False)

    def set(self, which, flag):
        self.words[which] = flag << 32

    def read_memory(self, address, size):
        """What is polled is a word, of the two of the line."""
        if size == 8 and 0 <= address - ctypes.addressof(self.words) < 16:
            if self.polls in self.late:
                self.set(self.late[self.polls], 7)
            self.polls += 1
        return super().read_memory(address, size)

    def receive(self):
        return self.arrived(types.uint64(ctypes.addressof(self.words)), 7)


@pytest.fixture
def lines(monkeypatch):
    return Lines(monkeypatch)


@pytest.mark.every(2)
@pytest.mark.parametrize("late", [0, 1])
def test_lines_that_do_not_come(lines, late):
    lines.set(late, 6)
    lines.set(1 - late, 7)
    assert lines.receive()[1::2] == ((6, 7), (7, 6))[late]
    (record,) = lines.records()
    assert record.primitive == "ll_recv_pack_warp"
    assert record.address == ctypes.addressof(lines.words) + 8 * late
    assert (record.compare, record.expected, record.seen, record.expired) == ("eq", 7, 6, True)
    for name in (record.primitive, "ll_load", "ll128_load_tiles", "ll128_load_some"):
        assert dataclasses.replace(record, primitive=name).sought() == "flag 7 in flags[2, 3] of rank 0"
    before = lines.polls
    lines.receive()  # from now on nobody waits, and nothing is recorded
    assert lines.polls - before <= bounded_waits.FIRST and lines.control[:] == [1, 1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_lines_that_come_late(lines, order):
    lines.step, lines.late = 1, {5: order[0], 100: order[1]}
    assert lines.receive() == (0, 7, 0, 7)
    assert 100 < lines.polls < 110
    assert not any(lines.table) and not any(lines.control)


# ---- the host's side, with a driver that works on memory of this process


class Driver:
    """What the table needs of cuda.bindings.driver. `constants`: library -> the words of its table."""

    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUlibrary = staticmethod(int)
    SUCCESS = IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_ILLEGAL_ADDRESS": 700})

    def __init__(self):
        self.buffers, self.constants, self.state = [], {}, self.SUCCESS(0)

    def cuMemHostAlloc(self, size, flags=0):
        self.buffers.append(ctypes.create_string_buffer(size))
        return self.SUCCESS(0), ctypes.addressof(self.buffers[-1])

    cuMemAlloc = cuMemHostAlloc

    def cuMemHostGetDevicePointer(self, address, flags):
        return self.SUCCESS(0), address

    def cuStreamCreate(self, flags):
        return self.SUCCESS(0), "stream"

    def cuStreamSynchronize(self, stream):
        return (self.SUCCESS(0),)

    def cuCtxSynchronize(self):
        return (self.state,)

    def cuMemsetD32Async(self, address, value, n, stream):
        ctypes.memmove(address, struct.pack("<I", value) * n, 4 * n)
        return (self.SUCCESS(0),)

    def cuMemcpyAsync(self, to, source, size, stream):
        ctypes.memmove(to, source, size)
        return (self.SUCCESS(0),)

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync = cuMemcpyAsync

    def cuLibraryGetGlobal(self, library, name):
        assert name == b"shmemkit_deadline"
        self.constants[library] = words = (ctypes.c_uint64 * 4)()
        return self.SUCCESS(0), ctypes.addressof(words), 32

    def cuLibraryEnumerateKernels(self, n, library):
        return self.SUCCESS(0), [library]

    def cuKernelGetName(self, library):
        return self.SUCCESS(0), f"_ZN8__main__7kernel{library}B2v1".encode()


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr("cuda.bindings.driver", driver)
    return driver


@pytest.fixture
def expire(monkeypatch, driver):
    """``expire(library)``: a wait of the kernel in `library` expires."""

    def expire(library):
        memory = Memory(monkeypatch, limit=0, constants=driver.constants[library])
        bounded_waits.bounded("wait", types.uint64, memory.read, "ge")(memory.address, 7)

    return expire


def test_from_the_kernel_to_the_exception(driver, expire):
    waits = bounded_waits.ExpiredWaits()
    waits.check()  # nothing is there yet
    for library in (7, 8, 8):
        waits.loaded(SimpleNamespace(handle=library))
    waits.set_limit(8, 1e-3)
    waits.set_limit(99, 1e-3)  # a module without waits
    assert [driver.constants[library][2] for library in (7, 8)] == [10**18, 10**6]
    waits.check()
    for _ in range(2):
        expire(8)
        with pytest.raises(
            sk.SignalTimeout, match="rank 0: 1 wait in kernels took longer than 0.001 s"
        ) as caught:
            waits.check()
        assert [r.kernel for r in caught.value.records] == ["kernel8"]
        waits.check()  # told, and cleared
        assert not any(waits.table.words)
    waits.unloaded(SimpleNamespace(handle=8))
    waits.loaded(SimpleNamespace(handle=8))
    assert driver.constants[8][3] == 2, "another module at the same address"


def test_a_context_that_has_failed(driver, expire):
    waits = bounded_waits.ExpiredWaits()
    waits.loaded(SimpleNamespace(handle=8))
    waits.set_limit(8, 1e-3)
    expire(8)
    driver.state = Driver.SUCCESS(700)
    failure = RuntimeError("illegal address")
    with pytest.raises(sk.SignalTimeout, match="The GPU says: CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        with waits.checked():
            raise failure
    assert caught.value.__cause__ is failure and len(caught.value.records) == 1


# ---- the message


def record(**changes):
    values = dict(
        rank=1, kernel="push", primitive="wait", block=(3, 0, 0), thread=(32, 0, 0), address=0x7F00,
        signal="full", index=(3,), owner=1, compare="ge", expected=7, seen=6, waited=5.0, expired=True,
    )  # fmt: skip
    return timeouts.WaitRecord(**values | changes)


def test_message():
    records = [
        record(),
        record(owner=0, index=(1, 2), compare="eq", expired=False, waited=2.5),
        record(signal=None, index=None, owner=None),
        record(primitive="grid_barrier", signal=None, index=None, owner=None, expected=20, seen=19),
        record(signal="World.barrier", index=(2,)),
        record(primitive="ll128_load_some", signal="lines", index=(1, 15), compare="eq"),
        record(primitive="lamport_load", signal="lines", index=(4,), compare="ne", expected=6),
    ]
    error = timeouts.signal_timeout(1, records, 9, 5.0)
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    assert lines[:9] == [
        "rank 1: 6 waits in kernels took longer than 5 s",
        "waited kernel block thread in for seen",
        "5 s push (3, 0, 0) (32, 0, 0) wait full[3] >= 7 6",
        "2.5 s * push (3, 0, 0) (32, 0, 0) wait full[1, 2] of rank 0 == 7 6",
        "5 s push (3, 0, 0) (32, 0, 0) wait 0x7f00 >= 7 6",
        "5 s push (3, 0, 0) (32, 0, 0) grid_barrier 20 blocks, at 0x7f00 19",
        "5 s push (3, 0, 0) (32, 0, 0) wait World.barrier[2] >= 7 6",
        "5 s push (3, 0, 0) (32, 0, 0) ll128_load_some flag 7 in lines[1, 15] 6",
        "5 s push (3, 0, 0) (32, 0, 0) lamport_load a piece in lines[4] 6",
    ]
    assert lines[9] == "rank 2 has not come to World.barrier"
    assert "and 2 more" in str(error)
    assert isinstance(error, sk.SignalTimeout) and isinstance(error, RuntimeError)
    assert (error.rank, error.records) == (1, records)


def test_names_of_symmetric_arrays():
    """World.locate, with a backend that maps three ranks' heaps 2**40 bytes apart."""

    def main():
        world = sk.init()
        sk.zeros((4, 5), "int32", name="other")
        flags = sk.signals(10, name="flags")
        start = flags.__array_interface__["data"][0]

        def locate(address, find):
            for rank, offset in enumerate((0, 2**40, 2**41)):
                if found := find(address - offset):
                    return rank, found
            return None, None

        world.backend.locate = locate
        assert world.locate(start + 24) == ("flags", (3,), 0)
        assert world.locate(start + 2**41 + 72) == ("flags", (9,), 2)
        assert world.locate(start + 24 + 4) == (None, None, None)
        assert world.locate(12345) == (None, None, None)

    sk.emu.run(main, 1)
