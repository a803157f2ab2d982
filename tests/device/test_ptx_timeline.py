"""Records of a timeline, as PTX and on memory: in kernels compiled for one; in all others not a trace."""

import re

import numpy as np
import pytest
from kernel_types import listed
from numba import cuda
from ptx import AMPERE, HOPPER, compile_ptx, instructions, link, resources
from ptx_in_python import Gpu
from test_ptx_timeouts import LINES, TYPES, WAITS

from shmemkit import device as sk
from shmemkit.collectives import queue
from shmemkit.collectives.schedules import two_shot
from shmemkit.compiler.bounded_compile import arming, surrounded
from shmemkit.device.cuda import timeline_records
from shmemkit.device.cuda.marks import begin_kernel, end_kernel
from shmemkit.device.cuda.timeline_records import BEGIN, END, MARK, WAIT, Record
from shmemkit.gemm import sm90
from shmemkit.gemm.all_gather import push
from shmemkit.runtime import gpu_timeline

TRACE = "shmemkit_timeline"


def recorded_ptx(kernel, argument_types=TYPES, cc=HOPPER):
    """As a kernel that is bound while a timeline is recorded."""
    if hasattr(kernel, "py_func"):
        kernel = cuda.jit(**kernel.targetoptions)(surrounded(kernel, begin_kernel, end_kernel))
    with arming(recorded=True):
        return compile_ptx(kernel, argument_types, cc)


def code(ptx):
    """The instructions, without the kernel's name and types in its parameters' names."""
    return [re.sub(r"\[\w+_param_(\d+)", r"[param_\1", line) for line in instructions(ptx)]


def bare(signals, n, value):
    for i in range(n):
        sk.notify(signals[i:], 0, value)


def with_phases(signals, n, value):
    sk.begin_phase("all")
    for i in range(n):
        sk.begin_phase("one")
        sk.notify(signals[i:], 0, value)
        sk.mark("sent")
        sk.end_phase("one")
    sk.end_phase("all")


def test_phases_and_marks_leave_no_trace():
    assert code(compile_ptx(with_phases, TYPES)) == code(compile_ptx(bare, TYPES))
    recorded = recorded_ptx(with_phases)
    assert TRACE in recorded and recorded.count("%globaltimer") >= 5
    assert code(compile_ptx(with_phases, TYPES)) == code(compile_ptx(bare, TYPES))


@pytest.mark.parametrize("kernel", WAITS, ids=lambda k: k.__name__)
def test_waits_record_themselves(kernel):
    """Not those of kernels with a limit alone, nor of others; whichever is compiled first."""
    plain = compile_ptx(kernel, TYPES)
    recorded = recorded_ptx(kernel)
    with arming():
        bounded = compile_ptx(kernel, TYPES)
    assert TRACE in recorded and TRACE not in bounded and TRACE not in plain
    assert "shmemkit_deadline" in bounded and code(plain) == code(compile_ptx(kernel, TYPES))


@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
def test_registers(cc):
    kernel, argument_types, _ = next(iter(listed(queue).values()))
    recorded = resources(recorded_ptx(kernel, argument_types, cc), cc)
    assert (recorded.spills, recorded.stack) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("module, phase", [(push, "product"), (two_shot, "all-gather"), (sm90, "product")])
def test_library_kernels_with_records(module, phase):
    kernel, argument_types, _ = next(iter(listed(module).values()))
    recorded = recorded_ptx(kernel, argument_types)
    needed = resources(recorded, HOPPER, kernel.targetoptions.get("max_registers"))
    assert (needed.spills, needed.stack) == (0, 0)
    assert timeline_records.number_of(phase) >= 0 and TRACE in recorded


@pytest.mark.parametrize("kernel", [with_phases, LINES[0], LINES[3]], ids=lambda k: k.__name__)
@pytest.mark.parametrize("lto", [True, False], ids=["lto", "no-lto"])
def test_linked(kernel, lto):
    plain = link(kernel, TYPES, lto)
    with arming(recorded=True):
        recorded = link(kernel, TYPES, lto)
    assert TRACE.encode() in recorded and TRACE.encode() not in plain


def test_kernels_keep_their_parameters():
    """Whatever those are called."""

    @cuda.jit
    def kernel(begin, end, body):
        for i in range(end):
            sk.notify(begin[i:], 0, body)

    recorded, bounded = recorded_ptx(kernel), compile_ptx(kernel, TYPES)
    assert recorded.count(".param .u64 kernel_param") == bounded.count(".param .u64 kernel_param")
    assert recorded.count("%globaltimer") == 2 and TRACE not in bounded


def record(kind, time, category="kernel", name="k", block=0, warp=0, sm=3, length=0, module=1):
    return Record(sm, kind, category, name, block, warp, module, time, 0, length)


def spans_of(*records):
    spans, _ = gpu_timeline.spans_of(list(records), 0, lambda address: {})
    return [(s.kind, s.name, s.begin, s.end) for s in spans]


def test_launches_that_overlap():
    """The next one begins early, on the same or on another multiprocessor; another kernel runs long after."""
    for sm in (3, 4):
        found = spans_of(
            record(BEGIN, 0), record(BEGIN, 90, sm=sm), record(END, 100), record(END, 200, sm=sm),
            record(BEGIN, 9000, name="other", module=2), record(END, 10000, name="other", module=2),
        )  # fmt: skip
        assert found == [("kernel", "k", 0, 100), ("kernel", "k", 90, 200), ("kernel", "other", 9000, 10000)]


def test_a_block_ends_with_its_last_warp():
    found = spans_of(record(BEGIN, 0), record(WAIT, 5, "wait", "w", warp=1, length=100), record(END, 20))
    assert found == [("kernel", "k", 0, 105), ("wait", "w", 5, 105)]


def test_a_phase_has_the_name_of_its_kernel():
    found = spans_of(record(BEGIN, 0), record(BEGIN, 1, "phase"), record(END, 5), record(MARK, 9, "mark"))
    assert found == [("kernel", "k", 0, 9), ("phase", "k", 1, 9)]


def test_names_are_literals():
    def kernel(signals, n, value):
        sk.mark(n)

    with pytest.raises(Exception, match=r"mark\(\): name is a variable of type int64; it must be a lit"):
        compile_ptx(kernel, TYPES)


# ---- the records themselves


class Recording(Gpu):
    """Multiprocessor 1 of 2, lane 0 of warp 3 of a block of 128 x 2 threads."""

    SMS, CAPACITY = 2, 8

    def __init__(self, monkeypatch, active=1):
        super().__init__(monkeypatch)
        self.buffer = np.zeros(timeline_records.bytes_of_buffer(self.SMS, self.CAPACITY) // 8, "uint64")
        self.table = [self.buffer.ctypes.data, self.CAPACITY, 5, self.SMS]
        self.time, self.active = 1000, active
        for name, value in {"threadIdx": (96, 0, 0), "blockIdx": (2, 1, 0)}.items():
            monkeypatch.setattr(cuda, name, types_of(value))
        monkeypatch.setattr(cuda, "blockDim", types_of((128, 2, 1)), raising=False)
        monkeypatch.setattr(cuda, "gridDim", types_of((10, 4, 1)), raising=False)

    def run(self, ptx, *given):
        if "%smid" in ptx:
            return np.uint32(1)
        if "activemask" in ptx:
            return np.uint32(self.active)
        if "lanemask_lt" in ptx:
            return np.uint32(2)  # of lane 2
        if ptx.startswith("atom.add") and ", $2" in ptx:
            address, n = map(int, given)
            before = self.read_memory(address, 8)
            self.write_memory(address, int(before) + n, 8)
            return before
        return super().run(ptx, *given)

    def clock(self):
        self.time += 10
        return np.uint64(self.time)

    def constant(self, index):
        return self.table[index]

    def records(self):
        return timeline_records.decoded(self.buffer, self.SMS, self.CAPACITY)


def types_of(value):
    import types as python_types

    return python_types.SimpleNamespace(**dict(zip("xyz", map(np.int32, value), strict=True)))


def test_records(monkeypatch):
    gpu = Recording(monkeypatch)
    note = {kind: timeline_records.noting(f"name {kind}", kind) for kind in (BEGIN, END, MARK)}
    waited = timeline_records.waiting("wait_block")
    note[BEGIN]()
    waited(np.uint64(0), np.uint64(77))  # too short
    waited(np.uint64(900), np.uint64(77))
    note[MARK]()
    note[END]()
    records, lost = gpu.records()
    assert lost == 0 and {(r.sm, r.block, r.warp, r.module) for r in records} == {(1, 12, 3, 5)}
    assert [(r.kind, r.name, r.time) for r in records] == [
        (BEGIN, "name 0", 1010),
        (WAIT, "wait_block", 900),
        (MARK, "name 2", 1030),
        (END, "name 1", 1040),
    ]
    assert (records[1].address, records[1].length) == (77, 120)
    gpu.active = 3  # a lower lane is here, too: that one records
    note[MARK]()
    assert gpu.records() == (records, 0)


def test_what_finds_no_room_is_counted(monkeypatch):
    gpu = Recording(monkeypatch)
    note, waited = timeline_records.noting("m", MARK), timeline_records.waiting("wait")
    for _ in range(7):
        note()
    waited(np.uint64(1), np.uint64(2))  # there is room for one of its two records
    waited(np.uint64(1), np.uint64(2))
    note()
    records, lost = gpu.records()
    assert len(records) == 7 and lost == 4
    gpu.table[3] = 1  # there is no multiprocessor 1: a number that no buffer has room for
    before = gpu.buffer.copy()
    note()
    assert (gpu.buffer == before).all()
    gpu.table[3] = 2
    assert not gpu.buffer[: timeline_records.bytes_of_buffer(1, 8) // 8].any()  # of the other multiprocessor
    gpu.table[1] = 0  # nothing is recorded any more
    before = gpu.buffer.copy()
    note()
    assert (gpu.buffer == before).all()


def test_clocks():
    from shmemkit.runtime.gpu_timeline import offsets

    rng = np.random.default_rng(0)
    ahead = 123_456_789  # the rank's clock is ahead of rank 0's by this
    sent = np.cumsum(rng.integers(3000, 9000, 100)).astype("uint64") + np.uint64(1 << 60)
    there, back = rng.integers(1000, 4000, (2, 100)).astype("uint64")
    answered = sent + there - np.uint64(ahead)
    offset, uncertainty = offsets(answered, sent, sent + there + back)
    assert abs(offset - ahead) <= uncertainty <= (there + back).min() // 2 + 100  # and a tick
    coarse = [times // np.uint64(1000) * np.uint64(1000) for times in (answered, sent, sent + there + back)]
    offset, uncertainty = offsets(*coarse)
    assert abs(offset - ahead) <= uncertainty and uncertainty >= 1000
