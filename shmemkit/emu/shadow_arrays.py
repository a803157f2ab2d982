"""Arrays that remember who touched each of their elements, and where in the kernel.

A `Region` is a stretch of memory: a symmetric allocation of one PE, an array of a kernel's arguments, a
shared array of a block. For each cell of it (as large as the smallest element it has been accessed as) it
keeps the last write, the reads since then that no other read follows, and the atomic accesses since then. An
access is (Moment, code, instruction).
"""

import ctypes
import itertools
import math
import sys
import zlib

import numpy as np

from .device_arrays import DeviceView, Fields, Record, RecordArray, SizedArray, address, device_view, loaded
from .report import is_kernel_code
from .vector_clock import Moment
from .workers import current

_view, _set = np.ndarray.view, np.ndarray.__setitem__
_getframe = sys._getframe
_kernel_files = {}  # file -> whether its code is the user's


# What stands for the last write to memory that nobody has written: no access comes after it.
UNWRITTEN = Moment(None, 1 << 62, None, 1 << 62, None, 1 << 62, None), None, 0


class Region:
    """The accesses to the bytes from `base` on. `races` is told about conflicts."""

    __slots__ = ("races", "base", "n_bytes", "grain", "simple", "writes", "reads", "atomics")

    def __init__(self, races, base, n_bytes, itemsize):
        self.races, self.base, self.n_bytes = races, base, n_bytes
        grain = 16 if itemsize == 1 else itemsize  # bytes are mostly made to be viewed as something else
        self.grain = grain  # bytes of a cell
        # The same, while there are no atomic accesses; None if all stores are looked at.
        self.simple = None if races.all_schedules else grain
        self.writes = [None] * -(-n_bytes // grain)  # the last one
        self.reads = [None] * len(self.writes)  # one, or several in a dictionary by thread
        self.atomics = {}  # cell -> {thread: (access, scope, whether it writes)}

    def fingerprint(self):
        """A number that changes when the memory does."""
        return zlib.crc32(ctypes.string_at(self.base, self.n_bytes))

    def refine(self, grain):
        """Make cells small enough for elements of `grain` bytes."""
        grain = math.gcd(self.grain, grain)
        times = self.grain // grain
        self.grain = grain
        self.simple = None if self.atomics or self.simple is None else grain
        self.writes, self.reads = (
            list(itertools.chain.from_iterable(zip(*[cells] * times, strict=True)))
            for cells in (self.writes, self.reads)
        )
        if dict in map(type, self.reads):
            self.reads = [dict(r) if type(r) is dict else r for r in self.reads]
        self.atomics = {at * times + i: dict(a) for at, a in self.atomics.items() for i in range(times)}

    def cells(self, offset, n_bytes):
        """The range of cells of these bytes."""
        if offset % self.grain or n_bytes % self.grain:
            self.refine(math.gcd(offset, n_bytes))
        return offset // self.grain, (offset + n_bytes) // self.grain

    # -- one cell, by a thread at a line of its kernel
    def read_cell(self, at, thread, moment, frame):
        access = moment, frame.f_code, frame.f_lasti
        write = self.writes[at]
        if write is not None:
            if _follows(moment, thread.clock, write):
                thread.known_write = write[0]
            else:
                self.races.conflict(self, at, "read", access, thread.clock, "write", write)
        if at in self.atomics:
            self.check_atomics(at, thread.clock, "read", access)
        read = self.reads[at]
        mine = read.get(moment.thread) if type(read) is dict else read
        if mine is not None and mine[0] is moment or write is not None and write[0] is moment:
            thread.reads_again += 1
            if thread.reads_again == thread.looks_at:
                thread.look_for_spin()
        if type(read) is tuple and _follows(moment, thread.clock, read):
            thread.known_read, self.reads[at] = read[0], access
        else:
            self.add_read(at, thread.clock, access)

    def write_cell(self, at, thread, moment, frame):
        access = moment, frame.f_code, frame.f_lasti
        write, read = self.writes[at], self.reads[at]
        if write is not None:
            if _follows(moment, thread.clock, write):
                thread.known_write = write[0]
            else:
                self.races.conflict(self, at, "write", access, thread.clock, "write", write)
        if read is not None:
            for one in (read,) if type(read) is tuple else read.values():
                if _follows(moment, thread.clock, one):
                    thread.known_read = one[0]
                else:
                    self.races.conflict(self, at, "write", access, thread.clock, "read", one)
            self.reads[at] = None
        if at in self.atomics:
            self.check_atomics(at, thread.clock, "write", access)
        self.writes[at] = access

    # -- many cells at once; `clock` is what the access knows
    def read(self, offset, n_bytes, clock, access, known=None):
        """`known`: of who asks for it, if that is another clock; so which earlier reads it comes after."""
        if n_bytes <= 0:
            return
        lo, hi = self.cells(offset, n_bytes)
        moment, reads = access[0], self.reads
        self._check("writes", lo, hi, clock, moment, "read", access)
        if self.atomics:
            self._check_atomics(lo, hi, clock, "read", access)
        known = clock if known is None else known
        part = reads[lo:hi]
        first = part[0]
        if _is_one(part) and (first is None or _follows(moment, known, first)):
            reads[lo:hi] = [access] * len(part)
            return
        for at in range(lo, hi):
            self.add_read(at, known, access)

    def write(self, offset, n_bytes, clock, access):
        if n_bytes <= 0:
            return
        lo, hi = self.cells(offset, n_bytes)
        self._check("writes", lo, hi, clock, access[0], "write", access)
        self._check("reads", lo, hi, clock, access[0], "write", access)
        if self.atomics:
            self._check_atomics(lo, hi, clock, "write", access)
        self.writes[lo:hi] = [access] * (hi - lo)
        self.reads[lo:hi] = [None] * (hi - lo)

    def check_reads(self, offset, n_bytes, clock, access):
        """Whether a write would come after all reads."""
        if n_bytes > 0:
            lo, hi = self.cells(offset, n_bytes)
            self._check("reads", lo, hi, clock, access[0], "write", access)

    def add_read(self, at, clock, access):
        """Another thread has read cell `at` before, perhaps at the same time."""
        before, moment = self.reads[at], access[0]
        if before is None or (type(before) is tuple and _follows(moment, clock, before)):
            self.reads[at] = access
        elif type(before) is tuple:
            self.reads[at] = {before[0].thread: before, moment.thread: access}
        else:
            n = len(before)
            # Now and then, where it grows: those that this one follows.
            if n >= 16 and n & n - 1 == 0 and moment.thread not in before:
                for key in [k for k, r in before.items() if _follows(moment, clock, r)]:
                    del before[key]
            before[moment.thread] = access

    def _check(self, which, lo, hi, clock, moment, what, access):
        part = getattr(self, which)[lo:hi]
        if _is_one(part):
            distinct = part[:1]
        else:
            distinct = {id(a): a for a in part}.values()
        for earlier in distinct:
            if earlier is None:
                continue
            if earlier is UNWRITTEN and hi - lo > 1 and not _is_one(self.writes):
                continue  # rows and buffers are sent with padding
            for one in (earlier,) if type(earlier) is tuple else list(earlier.values()):
                if not _follows(moment, clock, one):
                    at = lo + next(i for i, a in enumerate(part) if a is earlier)
                    self.races.conflict(self, at, what, access, clock, which[:-1], one)

    def _check_atomics(self, lo, hi, clock, what, access):
        for at in range(lo, hi) if hi - lo < len(self.atomics) else list(self.atomics):
            if lo <= at < hi and at in self.atomics:
                self.check_atomics(at, clock, what, access)

    def check_atomics(self, at, clock, what, access):
        """`access`, an ordinary one, to a cell that is accessed atomically, too."""
        moment, all_before = access[0], True
        for other in list(self.atomics[at].values()):
            if not other.before(moment, clock):
                all_before = False
                if other.writes or what == "write":
                    self.races.conflict(self, at, what, access, clock, "atomic", other.access)
        if what == "write" and all_before:
            del self.atomics[at]
            self.races.overwritten(self.base + at * self.grain, self.grain)

    # -- atomic accesses
    def atomic(self, offset, dtype, n, clock, access, scope, reads, writes, unread=(), signal=None):
        """One of `n` elements of `dtype`, which reads, writes or does both. Not in conflict with others of
        the same elements, if the scope of each contains the other's thread.

        unread  (thread, time) of writes that it has not read, although they were made before
        signal  "set" or "add", of a signal: of two unordered ones, of which one sets it, one may be lost
        """
        size = dtype.itemsize
        lo, hi = self.cells(offset, n * size)
        moment = access[0]
        word = offset % size, size, dtype.kind == "f"
        mine = Atomic(access, scope, writes, signal, word)
        self.simple = None
        for at in range(lo, hi):
            if self.writes[at] is UNWRITTEN:
                if not writes and hi - lo == 1:
                    self.races.read_unwritten(self, at, access)
                if self.writes[at] is UNWRITTEN:
                    self.writes[at] = None
            self._check("writes", at, at + 1, clock, moment, "atomic", access)
            if writes:
                self._check("reads", at, at + 1, clock, moment, "atomic", access)
            others = self.atomics.setdefault(at, {})
            for key, other in list(others.items()):
                if other.before(moment, clock):
                    if writes or not other.writes:
                        del others[key]  # what is in conflict with it is so with this one, too
                    continue
                if not (writes or other.writes):
                    continue
                before = other.access[0]
                if not _in_scope(moment, before, scope, other.scope):
                    self.races.conflict(self, at, "atomic", access, clock, "atomic", other.access)
                elif other.word != word and (other.word[:2] != word[:2] or writes and other.writes):
                    self.races.conflict(self, at, "atomic", access, clock, "atomic", other.access, "words")
                elif signal and other.signal and "set" in (signal, other.signal):
                    self.races.conflict(self, at, "atomic", access, clock, "atomic", other.access, "sets")
                elif reads and other.writes and (before.thread, before.time) not in unread:
                    if not getattr(before.of, "applied", True):
                        pass  # it is under way
                    elif writes:  # who comes after this access comes after what it has read
                        del others[key]
                    else:
                        other.readers.setdefault(moment.thread, access)
            before = others.get(moment.thread)
            # What is in conflict with a load is so with a write.
            if before is None or writes or not before.writes:
                others[moment.thread] = mine


class Atomic:
    """An atomic access of a cell; `readers` are loads of others that took its value, by thread. `word`: where
    the accessed element begins, its size, and whether it is a float."""

    __slots__ = ("access", "scope", "writes", "signal", "word", "readers")

    def __init__(self, access, scope, writes, signal, word):
        self.access, self.scope, self.writes, self.signal, self.word = access, scope, writes, signal, word
        self.readers = {}

    def before(self, moment, clock):
        """Whether it comes before `moment`: its thread does, or one that has read its value."""
        return _follows(moment, clock, self.access) or any(
            _follows(moment, clock, reader) for reader in self.readers.values()
        )


def _is_one(part):
    """Whether it is the same access everywhere, or none. Where a dictionary comes first: no, without a
    comparison of what is in them."""
    first = part[0]
    return part[-1] is first and type(first) is not dict and part.count(first) == len(part)


def _follows(moment, clock, earlier):
    before = earlier[0]
    return before is moment or before.thread == moment.thread or before.before(clock)


def _in_scope(a, b, *scopes):
    """Whether the threads of two moments are within each other's scope."""
    if a.of.pe != b.of.pe:
        return all(s == "sys" for s in scopes)
    return a.block == b.block or all(s != "block" for s in scopes)


def kernel_site():
    """(code, instruction) of the innermost line of the user's code that runs."""
    frame = _getframe(2)
    while frame is not None:
        code = frame.f_code
        users = _kernel_files.get(code.co_filename)
        if users is None:
            users = _kernel_files[code.co_filename] = is_kernel_code(frame)
        if users:
            return code, frame.f_lasti
        frame = frame.f_back
    return None, 0


class Tracked(DeviceView):
    """A view of device memory whose accesses are remembered. `plain` is the same memory as other kernels see
    it, `region` what it is part of, `first` the offset there of its first byte."""

    __slots__ = ("plain", "region", "first", "grain", "cell", "step", "take")

    def __getitem__(self, index):
        return self._get(index, _getframe(1))

    def __setitem__(self, index, value):
        self._set(index, value, _getframe(1))

    def _get(self, index, frame):
        value = self.plain[index]
        if isinstance(value, np.ndarray):
            return self._part(index, value)
        at = self._cell(index)
        if at is None:
            self._all("read", index)
        else:
            thread = current().thread
            self.region.read_cell(at, thread, thread.moment or thread.now(), frame)
        return value

    def _part(self, index, plain):
        """`plain`, which `index` names, with the record of its accesses."""
        kind = type(index)
        if kind is slice:
            start, _, _ = index.indices(len(self))
        elif kind is int:
            start = index if index >= 0 else index + len(self)
        else:
            return tracked(plain, self.region)
        return _tracked(plain, self.region, self.first + start * self.strides[0])

    def _set(self, index, value, frame):
        value = loaded(value)
        at = self._cell(index)
        if at is not None:
            self._store(index, value)
            thread = current().thread
            self.region.write_cell(at, thread, thread.moment or thread.now(), frame)
            return
        if isinstance(value, Tracked):
            value._all("read")
            value = value.plain
        self._all("write", index)
        self._store(index, value)

    def _store(self, index, value):
        if not self.region.races.all_schedules:
            self.plain[index] = value
            return
        before = np.array(self.plain[index])
        self.plain[index] = value
        if not np.array_equal(before, self.plain[index]):
            current().thread.block.effects += 1  # a spin loop that does this is not where it was

    def _cell(self, index):
        """The cell of the element that `index` names; None when it is not one cell."""
        if self.grain != self.region.grain:
            self.locate()
        if self.itemsize != self.region.grain:
            return None
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != self.ndim:
            return None
        at = self.cell
        for i, n, stride in zip(indices, self.shape, self.strides, strict=True):
            if not isinstance(i, (int, np.integer)):
                return None
            at += (int(i) if i >= 0 else int(i) + n) * (stride // self.itemsize)
        return at

    def locate(self):
        """Where the first element and the next one are, in cells of the region."""
        region = self.region
        if self.itemsize % region.grain or self.first % region.grain:
            region.refine(math.gcd(self.itemsize, self.first))
        self.grain = region.grain if region.grain == self.itemsize else None
        self.cell = self.first // region.grain
        self.step = self.strides[0] // region.grain if self.ndim else 0

    def _all(self, what, index=...):
        """An ordinary access of the running thread to all that `index` names."""
        thread = current().thread
        access = (thread.moment or thread.now(), *kernel_site())
        self.touch(what, thread.clock, access, index)

    def touch(self, what, clock, access, index=..., limit=None):
        """`access` reads or writes what `index` names, `limit` elements at most."""
        part = _view(self.plain, np.ndarray)
        if index is not ...:
            index = index if isinstance(index, tuple) else (index,)
            # Slices, so that an element is an array, too.
            part = part[tuple(slice(i, i + 1 or None) if hasattr(i, "__index__") else i for i in index)]
        region = self.region
        act = region.read if what == "read" else region.write
        if part.flags.c_contiguous:
            n = part.size if limit is None else min(part.size, limit)
            act(address(part) - region.base, n * part.itemsize, clock, access)
        else:
            for row in np.ndindex(part.shape[:-1]):
                line = part[row]
                for i in range(line.shape[0]):
                    act(address(line[i : i + 1]) - region.base, part.itemsize, clock, access)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    # -- other views of the same memory
    def view(self, dtype):
        return tracked(self.plain.view(dtype), self.region)

    def reshape(self, *shape):
        return tracked(self.plain.reshape(*shape), self.region)

    def ravel(self, order="C"):
        return self.reshape(-1)

    def transpose(self, *axes):
        return tracked(self.plain.transpose(*axes), self.region)

    T = property(lambda self: self.transpose())

    def copy(self, order="C"):
        self._all("read")
        return self.plain.copy()


class TrackedVector(Tracked):
    """One dimension, indexed fast: the usual cases of Region.read_cell and write_cell are repeated here.

    They are those where the earlier access is known to come before by what the thread knows of its block, or
    because it belongs to the same moment as the one looked at before (`known_write`, `known_read`).
    """

    __slots__ = ()

    def __getitem__(self, index):
        region = self.region
        if type(index) is not int or index < 0 or self.grain != region.simple:
            return self._get(index, _getframe(1))
        value = self.take(index)
        at = self.cell + index * self.step
        thread = current().thread
        moment = thread.moment or thread.now()
        write = region.writes[at]
        if write is not None:
            before = write[0]
            if before is moment:  # who comes after this write comes after this read
                thread.reads_again += 1
                if thread.reads_again == thread.looks_at:
                    thread.look_for_spin()
                return value
            if before is not thread.known_write and before.thread != moment.thread:
                if thread.clock.get(before.block, 0) <= before.phase:
                    region.read_cell(at, thread, moment, _getframe(1))
                    return value
                thread.known_write = before
        read = region.reads[at]
        if read is not None:
            if type(read) is dict:
                region.read_cell(at, thread, moment, _getframe(1))
                return value
            before = read[0]
            if before is moment:
                thread.reads_again += 1
                if thread.reads_again == thread.looks_at:
                    thread.look_for_spin()
                return value
            if before is not thread.known_read and before.thread != moment.thread:
                if thread.clock.get(before.block, 0) <= before.phase:
                    region.read_cell(at, thread, moment, _getframe(1))
                    return value
                thread.known_read = before
        frame = _getframe(1)
        region.reads[at] = moment, frame.f_code, frame.f_lasti
        return value

    def __setitem__(self, index, value):
        region = self.region
        if type(index) is not int or index < 0 or self.grain != region.simple:
            self._set(index, value, _getframe(1))
            return
        try:
            _set(self, index, value)
        except OverflowError:
            self.plain[index] = value  # wraps
        at = self.cell + index * self.step
        thread = current().thread
        moment = thread.moment or thread.now()
        write = region.writes[at]
        if write is not None:
            before = write[0]
            if before is not moment and before is not thread.known_write and before.thread != moment.thread:
                if thread.clock.get(before.block, 0) <= before.phase:
                    region.write_cell(at, thread, moment, _getframe(1))
                    return
                thread.known_write = before
        read = region.reads[at]
        if read is not None:
            if type(read) is dict:
                region.write_cell(at, thread, moment, _getframe(1))
                return
            before = read[0]
            if before is not moment and before is not thread.known_read and before.thread != moment.thread:
                if thread.clock.get(before.block, 0) <= before.phase:
                    region.write_cell(at, thread, moment, _getframe(1))
                    return
                thread.known_read = before
            region.reads[at] = None
        frame = _getframe(1)
        region.writes[at] = moment, frame.f_code, frame.f_lasti


class TrackedRecords(Fields, Tracked):
    """Elements of a structured dtype: an access is one of a field."""

    __slots__ = ("fields",)

    def __getitem__(self, index):
        if isinstance(index, str):
            return self.field(index)
        value = self.plain[index]
        return self._part(index, value) if isinstance(value, np.ndarray) else Record(self, index)

    _get = None  # a record that is named is not read

    def field(self, name):
        """That part of each record."""
        try:
            known = self.fields
        except AttributeError:
            known = self.fields = {}
        if name not in known:
            plain = self.plain.field(name)
            self.region.refine(math.gcd(plain.itemsize, address(plain) - self.region.base, *plain.strides))
            known[name] = tracked(plain, self.region)
        return known[name]

    def field_of(self, name, index, frame):
        part = self.field(name)
        return part[index] if isinstance(part, TrackedRecords) else part._get(index, frame)

    def set_field_of(self, name, index, value, frame):
        self.field(name)._set(index, value, frame)

    def whole(self, index):
        self._all("read", index)
        return self.plain.whole(index)


def tracked(array, region):
    """`array`, which lies in `region`, as a kernel sees it."""
    plain = array if isinstance(array, DeviceView) else device_view(array)
    return _tracked(plain, region, address(plain) - region.base if plain.size else 0)


def _tracked(plain, region, first):
    if isinstance(plain, RecordArray):
        result = _view(plain, TrackedRecords)
    elif plain.ndim == 1:
        result = _view(plain, TrackedVector)
        signed = plain.dtype.kind in "ib" and not isinstance(plain, SizedArray)
        result.take = plain.item if signed else plain.__getitem__
    else:
        result = _view(plain, Tracked)
    result.plain, result.region, result.first = plain, region, first
    if result.itemsize % region.grain or first % region.grain:
        result.grain = 0  # located, and the region refined, when an element is used
    else:
        result.locate()
    return result


def touch(what, array, clock, access, limit=None):
    """`access` reads or writes at most `limit` elements of `array`, if that is tracked."""
    if isinstance(array, Tracked):
        array.touch(what, clock, access, limit=limit)


def untracked(array):
    return array.plain if isinstance(array, Tracked) else array
