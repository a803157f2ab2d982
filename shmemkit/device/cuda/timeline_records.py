"""Records of a timeline on GPUs: what a kernel notes of its own work, and where.

Only kernels that are compiled *recorded* have this (``compiler.bounded_compile.recording``): one thread of a
warp takes the next place in the buffer of its multiprocessor, and stores the time and a tag there, 16 bytes,
relaxed, without a fence. What finds no place is counted.

  global memory    for each multiprocessor a counter of places taken (64 bytes), then `capacity` records of
                   WORDS words: time in nanoseconds (%globaltimer), tag. A wait takes two records: its begin
                   and tag; the address that it waited for and how long it took
  tag              bits 0-1: kind, 2-17: name, 18-41: block, 42-46: warp, 47-61: number of the module
  constant memory  of each module: address of the global memory, capacity (0: nothing is recorded), number of
                   the module, number of multiprocessors (PTX lets their numbers have gaps; what is beyond is
                   not recorded)
"""

import contextlib
import struct
import threading
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from shmemkit.compiler.ptx import asm, constant_words, gpu_function, types

from .thread_index import block_thread

BEGIN, END, MARK, WAIT = range(4)
WORDS, HEAD = 2, 64  # of a record; bytes before the records of a multiprocessor
_NAME = "shmemkit_timeline"

nanoseconds = asm("mov.u64 $0, %globaltimer;", types.uint64)  # the same clock for all multiprocessors
_sm = asm("mov.u32 $0, %smid;", types.uint32, pure=True)
_lower_lanes = asm("mov.u32 $0, %lanemask_lt;", types.uint32, pure=True)
_active = asm("activemask.b32 $0;", types.uint32)
_take = asm("atom.add.relaxed.gpu.global.u64 $0, [$1], $2;", types.uint64, (types.uint64, types.uint64))
_write = asm(
    "st.relaxed.gpu.global.v2.u64 [$0], {$1, $2};", types.void, (types.uint64, types.uint64, types.uint64)
)

_names = []  # by number: (category, name); of waits: the primitives
_lock = threading.Lock()


def number_of(name, category="phase"):
    """-> the number that stands for `name` in tags, when a kernel is compiled"""
    with _lock:
        if (category, name) not in _names:
            _names.append((category, name))
        return _names.index((category, name)) & 0xFFFF


@gpu_function
def _tag(kind, name):
    grid, index = cuda.gridDim, cuda.blockIdx
    block = index.x + grid.x * (index.y + grid.y * index.z)
    return (
        types.uint64(kind)
        | types.uint64(name) << types.uint64(2)
        | types.uint64(block & 0xFFFFFF) << types.uint64(18)
        | types.uint64(block_thread() >> 5) << types.uint64(42)
        | _word(2) << types.uint64(47)
    )


@gpu_function
def _places(n):
    """The address of the next `n` records of this multiprocessor; 0 if there is no room."""
    capacity, sm = _word(1), types.uint64(_sm())
    if capacity == 0 or sm >= _word(3):
        return types.uint64(0)
    mine = types.uint64(_word(0) + sm * (types.uint64(HEAD) + capacity * types.uint64(16)))
    place = _take(mine, types.uint64(n))
    if place + types.uint64(n) > capacity:
        return types.uint64(0)
    return types.uint64(mine + types.uint64(HEAD) + place * types.uint64(16))


@gpu_function
def _elected():
    """Whether this is the first of the threads of its warp that are here."""
    return (_active() & _lower_lanes()) == 0


@gpu_function
def _first_thread():
    return block_thread() == 0


def noting(name, kind, category="phase"):
    """A function of a kernel ``note()``: record `name` as `kind`, BEGIN, END or MARK, for the threads of a
    warp that call it together; of a "kernel" for the block. A phase does not have the time that recording
    takes: BEGIN reads the clock last, the others first."""
    number, elected = number_of(name, category), _first_thread if category == "kernel" else _elected

    @gpu_function
    def begin():
        if elected():
            at = _places(1)
            if at != 0:
                _write(at, nanoseconds(), _tag(kind, number))

    @gpu_function
    def note():
        if elected():
            now = nanoseconds()
            at = _places(1)
            if at != 0:
                _write(at, now, _tag(kind, number))

    return begin if kind == BEGIN else note


def waiting(primitive):
    """A function of a kernel ``waited(since, address)``: record a wait that began at `since` (0: it was too
    short to be recorded), and has just ended."""
    number = number_of(primitive, "wait")

    @gpu_function
    def waited(since, address):
        if since != 0 and _elected():
            now = nanoseconds()
            at = _places(2)
            if at != 0:
                _write(at, since, _tag(WAIT, number))
                _write(at + types.uint64(16), address, types.uint64(now - since))

    return waited


# ---- on the host


class Record(NamedTuple):
    """One that has been read back; `address` and `length` are of waits."""

    sm: int
    kind: int
    category: str
    name: str
    block: int
    warp: int
    module: int
    time: int
    address: int = 0
    length: int = 0


def checked(result):
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the timeline could not be recorded on the GPU: {error!r}")
    return values


class Modules:
    """The modules whose kernels are recorded, and the buffer that they write to."""

    def __init__(self):
        self._lock = threading.RLock()
        self._loaded: dict[int, int] = {}  # CUlibrary's address -> number of its module
        self._count = 0
        self._buffer: Any = None  # the array; None: nothing is recorded
        self._words = (0, 0, 0)  # its address, capacity, number of multiprocessors
        self._stream: Any = None
        self.recorder: Any = None  # of what is bound now: kernels, launches and copies

    def loaded(self, module):
        library = int(module.handle)
        with self._lock:
            if library not in self._loaded:
                self._loaded[library] = self._count & 0x7FFF
                self._count += 1
                self._fill(library)

    def unloaded(self, module):
        with self._lock:
            self._loaded.pop(int(module.handle), None)

    def record_to(self, buffer, address=0, capacity=0, sms=0):
        """From now on they record to `buffer`, an array that is kept alive for them; if None, nothing. No
        kernel of theirs is running. -> what they recorded to before, for another call"""
        with self._lock:
            before = self._buffer, *self._words
            self._words = address, capacity, sms
            for library in list(self._loaded):  # the garbage collector may unload some meanwhile
                self._fill(library)
            self._buffer = buffer
            return before

    def read(self):
        """-> the words of the buffer now, whether or not kernels write to it"""
        from cuda.bindings import driver

        words = np.zeros(self._buffer.size, "uint64")
        at = driver.CUdeviceptr(self._words[0])
        checked(driver.cuMemcpyDtoHAsync(words.ctypes.data, at, words.nbytes, self._stream))
        checked(driver.cuStreamSynchronize(self._stream))
        return words

    def _fill(self, library):
        from cuda.bindings import driver

        if self._stream is None:  # non-blocking, so that a copy waits for no kernel
            (self._stream,) = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        address, _ = checked(driver.cuLibraryGetGlobal(driver.CUlibrary(library), _NAME.encode()))
        at, capacity, sms = self._words
        values = struct.pack("<4Q", at, capacity, self._loaded.get(library, 0), sms)
        checked(driver.cuMemcpyHtoDAsync(address, values, len(values), self._stream))
        checked(driver.cuStreamSynchronize(self._stream))


modules: Any = Modules()  # of this process


@contextlib.contextmanager
def host_call(name):
    """What the host program does in it is recorded, if anything is."""
    begin = perf_counter_ns()
    yield
    if modules.recorder is not None:
        modules.recorder.called(name, begin, perf_counter_ns())


_word = constant_words(_NAME, 4, modules.loaded, modules.unloaded)


def bytes_of_buffer(sms, capacity):
    return sms * (HEAD + 16 * capacity)


def decoded(words, sms, capacity):
    """-> ([Record], how many had no room), of the buffer as a 1-D array of uint64"""
    size = bytes_of_buffer(1, capacity) // 8
    records, lost = [], 0
    for sm in range(sms):
        region = words[sm * size : (sm + 1) * size]
        taken = int(region[0])
        lost += max(taken - capacity, 0)
        i, pairs = 0, region[HEAD // 8 :].reshape(-1, WORDS)
        while i < min(taken, capacity):
            time, tag = map(int, pairs[i])
            i += 1
            if time == 0:  # taken for a wait that had no room for both
                continue
            kind = tag & 3
            category, name = _names[tag >> 2 & 0xFFFF]
            block, warp, module = tag >> 18 & 0xFFFFFF, tag >> 42 & 31, tag >> 47
            address = length = 0
            if kind == WAIT:
                address, length = map(int, pairs[i])
                i += 1
            records.append(Record(sm, kind, category, name, block, warp, module, time, address, length))
    return records, lost
