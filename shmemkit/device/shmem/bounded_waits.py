"""Waits that give up: how a kernel's waits are bounded in time, and what they leave behind.

Only kernels that are compiled *armed* have this: with SHMEMKIT_TIMEOUT set, or by ``bind(timeout=)``.

An armed wait polls as always. After its first polls, and every EVERY polls from then on, it reads the
clock and a word in device memory, `stopped`. When its time is up it sets `stopped`. Then all waits of this
process's kernels end, and each of them leaves a record in host memory. Until the host has raised the
exception, no wait waits, and `notify`, `notify_at` and `signal_op` send nothing. So kernels run to their
end with wrong values but do not announce them, and a rank that waits for this one's signals reaches its
own timeout. The same holds for LL, LL128 and Lamport, whose packets are data and signal at once: what
receives them waits as `wait` does, and what sends them sends nothing.

  device memory    stopped, number of records
  host memory      flag (not 0: there are records), 7 words unused, CAPACITY records of WORDS words:
                   written (not 0), what (see _what) | module << 32, block x | y << 32,
                   block z | thread << 32, address, expected, seen, nanoseconds waited
  constant memory  of each module: address of the device memory, of the host memory, limit in nanoseconds,
                   number of the module
"""

import contextlib
import ctypes
import operator
import re
import struct
import threading
from typing import Any, NamedTuple

from numba import cuda

from shmemkit.compiler.bounded_compile import armed, recording
from shmemkit.compiler.ptx import asm, constant_words, gpu_function, types
from shmemkit.support import kernel_reports, timeouts
from shmemkit.support.host_program import current_world

from ..cuda.thread_index import warp_threads
from ..cuda.timeline_records import nanoseconds as _clock
from ..cuda.timeline_records import waiting
from ..enums import ComparisonType, comparison_name
from .ordered_access import load, store

__all__ = [
    "armed",
    "block_stopped",
    "bounded",
    "bounded_by_number",
    "bounded_change",
    "check",
    "checked",
    "clock",
    "ended",
    "overdue",
    "set_limit",
    "stopped",
    "warp_stopped",
]

CAPACITY = 256  # records
WORDS = 8  # of a record
FIRST, EVERY = 8, 64  # polls before the first look at the clock, and between later ones
PRIMITIVES = (
    "wait",
    "wait_warp",
    "wait_block",
    "signal_wait_until",
    "barrier_all_block",
    "grid_barrier",
    "ll_load",
    "ll_recv_block",
    "ll_recv_warp",
    "ll_recv_pack_block",
    "ll_recv_pack_warp",
    "ll128_load_tiles",
    "multimem_ll_recv_pack_block",
    "multimem_ll_recv_pack_warp",
    "ll128_load_some",
    "lamport_load",
)

_DTYPES = (types.uint64, types.int64, types.uint32, types.int32)
_NAME = "shmemkit_deadline"
_EXPIRED = 1 << 24


# ---- in the kernel


def _what(primitive, dtype, compare=0):
    """Bits 0-7: the comparison; 8-15: the dtype of the signal; 16-23: the primitive; 24: expired."""
    return compare | _DTYPES.index(dtype) << 8 | PRIMITIVES.index(primitive) << 16


_look, _set = load(types.uint64, "relaxed", "gpu"), store(types.uint64, "gpu")
_take = asm("atom.add.relaxed.gpu.global.u64 $0, [$1], 1;", types.uint64, (types.uint64,))
_write = asm("st.relaxed.sys.global.u64 [$0], $1;", types.void, (types.uint64, types.uint64))
_publish = store(types.uint64, "sys")


@gpu_function
def clock():
    """Nanoseconds, for the `since` of `overdue`."""
    return _clock()


@gpu_function
def stopped():
    """Whether a wait of this process's kernels has expired, and the host has not yet said so."""
    return _look(_word(0)) != 0


@gpu_function
def warp_stopped():
    """`stopped`, with the same answer for all threads of the warp, which synchronize."""
    return cuda.any_sync(0xFFFFFFFF >> (32 - warp_threads()), stopped())


@gpu_function
def block_stopped():
    """`stopped`, with the same answer for all threads of the block, which synchronize."""
    return cuda.syncthreads_or(types.int32(stopped())) != 0


@gpu_function
def _pair(low, high):
    return types.uint64(types.uint64(low) | (types.uint64(high) << types.uint64(32)))


@gpu_function
def _record(what, address, expected, seen, waited):
    slot = _take(_word(0) + types.uint64(8))
    if slot < types.uint64(CAPACITY):
        host = _word(1)
        record = types.uint64(host + types.uint64(64) + slot * types.uint64(8 * WORDS))
        thread = cuda.threadIdx.x | cuda.threadIdx.y << 10 | cuda.threadIdx.z << 20
        _write(record + types.uint64(8), _pair(what, _word(3)))
        _write(record + types.uint64(16), _pair(cuda.blockIdx.x, cuda.blockIdx.y))
        _write(record + types.uint64(24), _pair(cuda.blockIdx.z, thread))
        _write(record + types.uint64(32), address)
        _write(record + types.uint64(40), types.uint64(expected))
        _write(record + types.uint64(48), types.uint64(seen))
        _write(record + types.uint64(56), waited)
        _publish(record, types.uint64(1))
        _publish(host, types.uint64(1))


@gpu_function
def _is_over(since, what, address, expected, seen):
    """Whether a wait under way since `since` (0: its first look) must end; it has left its record then."""
    now = _clock()
    waited = types.uint64(now - since)
    if stopped():
        if since != 0:
            _record(what, address, expected, seen, waited)
        return True
    if since == 0 or waited < _word(2):
        return False
    _set(_word(0), types.uint64(1))
    _record(what | _EXPIRED, address, expected, seen, waited)
    return True


def bounded(primitive, dtype, read, compare):
    """A function ``poll(address, wanted) -> the value seen``, of `dtype`, that gives up when its time is up.

    read     load(dtype, ...)
    compare  "ge", ...: what the value must be to `wanted`
    """
    what = _what(primitive, dtype, ComparisonType[f"CMP_{compare.upper()}"].value)
    holds, waited = getattr(operator, compare), ended(primitive)

    @gpu_function
    def poll(address, wanted):
        seen = read(address)
        left, since = FIRST, types.uint64(0)
        while not holds(seen, wanted):
            left -= 1
            if left == 0:
                if _is_over(since, what, address, wanted, seen):
                    break
                if since == 0:
                    since = _clock()
                left = EVERY
            seen = read(address)
        waited(since, address)
        return seen

    return poll


def bounded_by_number(primitive, dtype, read):
    """The same, ``poll(address, wanted, compare)``: `compare` is the number of a ComparisonType."""
    polls = tuple(bounded(primitive, dtype, read, comparison_name(i)) for i in range(6))
    eq, ne, gt, le, lt, ge = polls

    @gpu_function
    def poll(address, wanted, compare):
        if compare == 0:
            return eq(address, wanted)
        if compare == 1:
            return ne(address, wanted)
        if compare == 2:
            return gt(address, wanted)
        if compare == 3:
            return le(address, wanted)
        if compare == 4:
            return lt(address, wanted)
        return ge(address, wanted)

    return poll


def bounded_change(dtype, read):
    """A function ``poll(address, before, arrived, blocks)``: waits, as a grid barrier, for the word at
    `address` to differ from `before`; what it notes is how many of the `blocks` have arrived."""
    what, waited = _what("grid_barrier", dtype, ComparisonType.CMP_EQ.value), ended("grid_barrier")

    @gpu_function
    def poll(address, before, arrived, blocks):
        left, since = FIRST, types.uint64(0)
        while read(address) == before:
            left -= 1
            if left == 0:
                if _is_over(since, what, arrived, blocks, read(arrived)):
                    break
                if since == 0:
                    since = _clock()
                left = EVERY
        waited(since, arrived)

    return poll


def overdue(primitive, dtype, compare):
    """A function ``over(since, address, wanted, seen) -> whether a wait must end``, for loops of their own:
    to be called after FIRST polls, with 0, and every EVERY polls from then on, with what ``clock()`` was
    after the first call. The rest as in `bounded`."""
    what = _what(primitive, dtype, ComparisonType[f"CMP_{compare.upper()}"].value)

    @gpu_function
    def over(since, address, wanted, seen):
        return _is_over(since, what, address, wanted, seen)

    return over


def ended(primitive):
    """A function ``waited(since, address)``, for the end of a wait that began at `since`: it records the wait
    in kernels that are compiled for a timeline, and is nothing in others."""
    return waiting(primitive) if recording() else _not_recorded


@gpu_function
def _not_recorded(since, address):
    pass


# ---- on the host


class _Table:
    """The memory that waits write to, of the GPU that is current when it is made."""

    BYTES = 64 + CAPACITY * WORDS * 8

    def __init__(self):
        from cuda.bindings import driver

        self.driver = driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        (self.host,) = _checked(driver.cuMemHostAlloc(self.BYTES, flags))
        ctypes.memset(self.host, 0, self.BYTES)
        self.words = (ctypes.c_uint64 * (self.BYTES // 8)).from_address(self.host)
        (self.device_view,) = _checked(driver.cuMemHostGetDevicePointer(self.host, 0))
        # Non-blocking, so that a copy waits for no kernel.
        (self.stream,) = _checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        (self.control,) = _checked(driver.cuMemAlloc(16))
        self.clear()

    def clear(self):
        ctypes.memset(self.host, 0, self.BYTES)
        _checked(self.driver.cuMemsetD32Async(self.control, 0, 4, self.stream))
        _checked(self.driver.cuStreamSynchronize(self.stream))

    def total(self):
        """How many records there were, with those for which there was no room."""
        control = (ctypes.c_uint64 * 2)()
        copy = self.driver.cuMemcpyDtoHAsync(ctypes.addressof(control), self.control, 16, self.stream)
        _checked(copy)
        _checked(self.driver.cuStreamSynchronize(self.stream))
        return control[1]

    def fill(self, library, limit, number):
        """Tell the module `library`, a CUlibrary's address, where the table is."""
        driver = self.driver
        address, _ = _checked(driver.cuLibraryGetGlobal(driver.CUlibrary(library), _NAME.encode()))
        nanoseconds = int(limit * 1e9)
        values = struct.pack("<4Q", int(self.control), int(self.device_view), nanoseconds, number)
        _checked(driver.cuMemcpyHtoDAsync(address, values, len(values), self.stream))
        _checked(driver.cuStreamSynchronize(self.stream))


def _checked(result):
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the table of timeouts could not be set up on the GPU: {error!r}")
    return values


def _kernel_of(library):
    """The name of the kernel in a module (numba puts one into each), "?" with drivers that do not tell."""
    from cuda.bindings import driver

    try:
        kernels = _checked(driver.cuLibraryEnumerateKernels(1, driver.CUlibrary(library)))[0]
        (mangled,) = _checked(driver.cuKernelGetName(kernels[0]))
    except (RuntimeError, AttributeError, IndexError):
        return "?"
    return kernel_name(mangled.decode())


def kernel_name(mangled):
    """The last name in a mangled one: ``_ZN8__main__6kernelB2v1...`` -> "kernel"."""
    name, at = mangled, 3
    while mangled.startswith("_ZN") and (length := re.match(r"\d+", mangled[at:])):
        start = at + length.end()
        at = start + int(length[0])
        name = mangled[start:at]
    return name


class Module(NamedTuple):
    """What has waits: the kernel's name, and how many seconds they take at most."""

    name: str
    limit: float


class ExpiredWaits:
    """The modules whose kernels have waits that expire, and the table for them all."""

    def __init__(self):
        self.table: Any = None
        self.modules = []  # by number; those that are gone, too: their records may come late
        self._lock = threading.RLock()  # the garbage collector may unload a module in the middle of a fill
        self._numbers = {}  # CUlibrary's address -> number of its module, while it is loaded

    def loaded(self, module):
        library = int(module.handle)
        with self._lock:
            if library in self._numbers:
                return
            if self.table is None:
                self.table = _Table()
            self._numbers[library] = len(self.modules)
            # bind(timeout=) says later, before the first launch, how long its own kernels wait.
            limit = timeouts.default() or timeouts.MOST
            self.modules.append(Module(_kernel_of(library), limit))
            self.table.fill(library, limit, self._numbers[library])

    def unloaded(self, module):
        with self._lock:
            self._numbers.pop(int(module.handle), None)

    def set_limit(self, library, seconds):
        """The waits of the kernels in `library` (a CUlibrary's address), if it has any, take at most
        `seconds`. None of its kernels is running."""
        with self._lock:
            number = self._numbers.get(library)
            if number is not None:
                self.modules[number] = self.modules[number]._replace(limit=seconds)
                self.table.fill(library, seconds, number)

    @contextlib.contextmanager
    def checked(self):
        """Around what waits for the GPU: `check` afterwards. If that fails, its error is our cause."""
        try:
            yield
        except Exception as error:
            self.check(error)
            raise
        self.check()
        kernel_reports.check_after_wait()

    def check(self, cause=None):
        """Raise the SignalTimeout of the waits that have expired, if any have, or what kernels have reported.
        Otherwise, one look at a word.

        Waits then for what is enqueued (its waits end at once), and clears the table, so that what is
        launched from now on waits again.
        """
        if self.table is not None and self.table.words[0]:
            raise self._collect(cause) from cause
        kernel_reports.check()

    def _collect(self, cause):
        world, table, trouble = current_world(), self.table, ""  # a World knows the names of symmetric arrays
        rank = 0 if world is None else world.rank
        with self._lock:
            (error,) = table.driver.cuCtxSynchronize()
            found = written(table.words)
            total = len(found)
            if int(error) == 0:
                total = table.total()
                table.clear()
            else:  # the context has failed, or a stream captures: then it is raised at the next occasion, too
                trouble = f"The GPU says: {error.name}"
            records = [decoded(words, self.modules, rank, world) for words in found]
            limits = [self.modules[words[1] >> 32].limit for words in found if words[1] & _EXPIRED]
        records.sort(key=lambda r: (not r.expired, -r.waited))
        return timeouts.signal_timeout(rank, records, total, min(limits, default=0.0), trouble)


_expired = ExpiredWaits()  # of this process
_word = constant_words(_NAME, 4, _expired.loaded, _expired.unloaded)
set_limit, checked, check = _expired.set_limit, _expired.checked, _expired.check


def written(words):
    """The words of each record in those of the table's host memory."""
    return [words[i : i + WORDS] for i in range(8, len(words), WORDS) if words[i]]


def decoded(words, modules, rank, world):
    """The WaitRecord of these words, of a wait of one of the `modules`."""
    _, head, xy, zt, address, expected, seen, waited = words
    what, low = head & 0xFFFFFFFF, 0xFFFFFFFF
    dtype, primitive = _DTYPES[what >> 8 & 0xFF], PRIMITIVES[what >> 16 & 0xFF]
    thread = zt >> 32
    name, index, owner = (None, None, None) if world is None else world.locate(address)
    return timeouts.WaitRecord(
        rank=rank,
        kernel=modules[head >> 32].name,
        primitive=primitive,
        block=(xy & low, xy >> 32, zt & low),
        thread=(thread & 1023, thread >> 10 & 1023, thread >> 20),
        address=address,
        signal=name,
        index=index,
        owner=owner,
        compare=comparison_name(what & 0xFF),
        expected=_signed(expected, dtype),
        seen=_signed(seen, dtype),
        waited=waited / 1e9,
        expired=bool(what & _EXPIRED),
    )


def _signed(word, dtype):
    return word - (1 << 64) if dtype.signed and word >> 63 else word
