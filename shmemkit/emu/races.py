"""Data races: two accesses to the same memory, one of them a write, that nothing orders.

What orders: a thread's own program; barriers of warps, blocks, grids and PEs; streams, events and host
collectives; and a release that an acquire takes the value of. The writes of a word by which threads signal
each other are kept in order, each with what it releases (``signal_history.py``). A thread that waits for the
word learns what the first write released that satisfies its condition and that it may still read, if the
scopes of both contain the other. An acquire load or an atomic has no condition: it learns what the last
write released.

Messages have a life of their own. The data of a put under way is written, and the source of a non-blocking
one read, at some moment after the call: the `Operation` accesses them, not the thread. Who sees the signal of
put_signal knows that its own data is there, and what its thread did itself before; not what else is under
way. A fence puts earlier operations to a PE before later ones to it; quiet completes operations. Both
concern the operations of the PE that the calling thread knows to have been issued. These are the rules of the
memory model of NVSHMEM and, for what goes over NVLink directly, of PTX.
"""

import collections
import itertools
import sys
import weakref
from dataclasses import replace

import numpy as np

from shmemkit.support.arrays import is_tensor
from shmemkit.support.settings import switch

from . import report
from .device_arrays import DeviceView, address, device_view
from .errors import RaceError, UninitializedReadError
from .heap import EMPTY
from .race_report import describe, line_of
from .shadow_arrays import UNWRITTEN, Region, Tracked, kernel_site, touch, tracked, untracked
from .signal_history import History
from .vector_clock import (
    BLOCK,
    MBARRIER,
    STREAM,
    OperationMoment,
    delivered,
    fence_of,
    forget_superseded,
    join,
    joined,
    operation_done,
    quiet_of,
)

MOST = 20  # different races; then the program is ended
NOTED = 128  # waits of a rank that are remembered for reports
_LEVEL = {"block": 0, "gpu": 1, "sys": 2}


class Operation:
    """The accesses of a put, get or signal under way, issued by `thread` at `issued`."""

    __slots__ = (
        *("serial", "pe", "target", "thread", "issued", "site", "what", "clock", "flag", "applied"),
        *("fenced", "completed", "__weakref__"),
    )

    def __init__(self, serial, thread, target, site, what, flag):
        self.serial, self.thread, self.pe, self.target = serial, thread, thread.pe, target
        self.site, self.what, self.flag, self.applied = site, what, flag, False
        self.issued = thread.moment or thread.now()
        self.fenced = self.completed = 0  # the numbers of the first fence and quiet that were about it

    def is_over(self, clock):
        """Whether a fence or a quiet that `clock` knows has ended it."""
        ended = (self.completed and clock.get(quiet_of(self.pe), 0) >= self.completed) or (
            self.fenced and clock.get(delivered(self.pe, self.target), 0) >= self.fenced
        )
        return bool(ended) and self.issued.before(clock)

    # as Moments of threads, for reports
    block = property(lambda self: self.thread.block)


class Races:
    def __init__(self, machine):
        self.machine = machine
        choice = machine.scheduler.choice
        self.all_schedules = choice is not None and not choice.takes_turns
        self.found = {}  # signature -> (Race, what may say more of it in the end)
        self.unwritten = {}  # array -> how a kernel has read of it what nobody has written
        self.looks_for_unwritten = switch("SHMEMKIT_UNINITIALIZED", True)
        self.events = 0  # signals and waits so far, for reports
        self.waits = {pe: collections.deque(maxlen=NOTED) for pe in machine.local_pes}  # the last, likewise
        self.ranks = collections.defaultdict(set)  # signature -> ranks on whose memory there were such
        self.told = set()  # signatures of those that were reported
        self.histories = {}  # address of a word by which threads signal each other -> History
        self.regions = {}  # (PE, offset) of a symmetric allocation, or id of a local array's owner -> Region
        self.serials, self.blocks, self.streams = itertools.count(1), itertools.count(1), itertools.count(0)
        self.live = weakref.WeakValueDictionary()  # serial -> Operation whose data somebody may still find
        # Those of `live` that no fence, and no quiet, has been about.
        self.unfenced = {pe: weakref.WeakValueDictionary() for pe in machine.local_pes}
        self.pending = {pe: weakref.WeakValueDictionary() for pe in machine.local_pes}
        self.fences = dict.fromkeys(machine.local_pes, 0)  # calls so far
        self.quiets = dict.fromkeys(machine.local_pes, 0)
        self.kernel_of_block = {}  # key of a block -> (key of its stream, number of its kernel there)
        self.hosts = {pe: {} for pe in machine.local_pes}  # what the host programs know
        self.limit = 256  # entries of a clock, before it is looked through

    # -- memory
    def tracked(self, array):
        """`array` with the record of its accesses."""
        if array.size == 0:
            return _seen(array)
        pe, offset = self.machine.located(address(array))
        region = self._of_owner(array) if pe is None else self._of_heap(pe, offset, array)
        return _seen(array) if region is None else tracked(array, region)

    def region_of(self, array):
        """The Region of the symmetric memory of `array`; None for other memory."""
        pe, offset = self.machine.located(address(array))
        return None if pe is None else self._of_heap(pe, offset, array)

    def _of_heap(self, pe, offset, array):
        allocation = self.machine.heaps[pe].at(offset)
        if allocation is None:
            self.machine.refuse_freed(pe, array, "a kernel accesses")
            return None
        region = self.regions.get((pe, allocation.offset))
        if region is None:
            base = self.machine.memory_address + pe * self.machine.heap_size + allocation.offset
            region = self.regions[pe, allocation.offset] = Region(self, base, allocation.size, array.itemsize)
            if allocation.empty and self.looks_for_unwritten:
                region.writes = [UNWRITTEN] * len(region.writes)
        return region

    def _of_owner(self, array):
        """The Region of an array that is not symmetric: of the one that owns its memory, or of the storage of
        PyTorch tensors, of which each launch makes a new array."""
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if is_tensor(owner.base):
            owner = owner.base.untyped_storage()
        known = self.regions.get(id(owner))
        if known is None:
            key, of_numpy = id(owner), isinstance(owner, np.ndarray)
            extent = (address(owner), owner.nbytes) if of_numpy else (owner.data_ptr(), owner.nbytes())
            region = Region(self, *extent, array.itemsize)
            known = weakref.ref(owner, lambda _: self._forget(key)), region
            self.regions[key] = known
        return known[1]

    def freed(self, pe, allocation):
        self._forget((pe, allocation.offset))

    def _forget(self, key):
        """The memory of region `key` is given back."""
        region = self.regions.pop(key, None)
        if isinstance(region, tuple):
            region = region[1]
        if region is not None and region.simple is None:  # there may have been atomic accesses
            self.overwritten(region.base, region.n_bytes)

    def overwritten(self, first, n_bytes):
        """The `n_bytes` bytes from address `first` on are no longer what was released there."""
        for key in [k for k in self.histories if 0 <= k - first < n_bytes]:
            del self.histories[key]

    def fingerprint(self):
        """A number that changes when memory that kernels access does."""
        regions = [r[1] if isinstance(r, tuple) else r for r in self.regions.values()]
        return hash(tuple(region.fingerprint() for region in regions))

    # -- words that threads signal each other with
    def history(self, key, n_bytes):
        """The History of the word at `key`, up to now: to be asked for before the word is written again."""
        history = self.histories.get(key)
        if history is None or history.is_stale(n_bytes):
            history = self.histories[key] = History(key, n_bytes)
        return history

    def wrote(self, history, moment, clocks, keep):
        """What was written at `moment` releases `clocks`, {(scope, PE, block): clock}; with `keep` also what
        the write before did, as a read-modify-write does."""
        if keep and clocks:
            clocks = _merged([history.last.clocks, clocks], joined)
            for clock in clocks.values():
                self.shorten(clock)
        elif keep:
            clocks = history.last.clocks
        history.add(moment, clocks)

    def released(self, thread, moment, history, scope, keep):
        """`thread` has written the word of `history` by a release."""
        who = scope, thread.pe, thread.block.key if scope == "block" else None
        self.wrote(history, moment, {who: thread.released()}, keep)

    def written_relaxed(self, thread, moment, history, scope, keep):
        """Likewise by a relaxed write: it releases what a fence of the thread came after."""
        clocks = {}
        for fence_scope, clock in thread.fences.items():
            narrower = min(scope, fence_scope, key=_LEVEL.__getitem__)
            if scope == "sys":  # NVSHMEM's: behind the fences of its puts
                clock = self.behind_fences(thread, dict(clock), self.pe_of(history.key))
            who = narrower, thread.pe, thread.block.key if narrower == "block" else None
            clocks[who] = joined(clocks[who], clock) if who in clocks else clock
        self.wrote(history, moment, clocks, keep)

    def pe_of(self, key):
        """The PE whose memory address `key` of the symmetric heap lies in."""
        return (key - self.machine.memory_address) // self.machine.heap_size

    def waited_for(self, thread, array, index, is_satisfied, scope, ordered):
        """`thread` has waited until ``is_satisfied(array[index])``. -> the element that it has read"""
        plain = untracked(array)
        history = self.history(address(plain) + index * plain.strides[0], plain.itemsize)
        i = history.first(thread, plain.dtype, is_satisfied)
        self.access_word(array, index, thread, scope, True, False, history.moments_after(i))
        self._learn(thread, history, i, scope, ordered, waits=ordered)
        return plain[index] if i == len(history.writes) - 1 else history.value(i, plain.dtype)

    def acquire(self, thread, key, scope, ordered=True):
        """`thread` has read the word at `key`, whatever it held."""
        history = self.histories.get(key)
        if history is not None:
            self._learn(thread, history, len(history.writes) - 1, scope, ordered)

    def _learn(self, thread, history, i, scope, ordered, waits=False):
        """`thread` has read write `i` of `history`. Not `ordered`, it learns what that releases at its next
        fence. `waits`: it has waited for it, perhaps for nothing new."""
        write = history.writes[i]
        if write.moment is not None:
            write.readers.setdefault(thread.key, thread.moment or thread.now())
        for (released, pe, block), clock in write.clocks.items():
            if not _reaches(thread, pe, block, released, scope):
                thread.missed.append(("scope", history.key, kernel_site(), clock, released, scope))
            elif ordered:
                if waits or clock is not thread.heard:
                    thread.note_wait(history.key, write, clock)
                    waits = False
                thread.learn(clock)
            else:
                who = released, pe, block, scope
                seen, last = thread.unfenced.get(who, (clock, None))
                if clock is not last:
                    # Others may have the same dictionary.
                    thread.unfenced = {**thread.unfenced, who: (joined(seen, clock), clock)}
                    thread.missed.append(("relaxed", history.key, kernel_site(), clock, released, scope))
        if waits:
            thread.note_wait(history.key, write)
        del thread.missed[:-8]

    def access_word(self, array, index, thread, scope, reads, writes, unread=(), signal=None):
        """An atomic access of `thread` to an element of a tracked array. See ``Region.atomic``."""
        if isinstance(array, Tracked):
            access = (thread.moment or thread.now(), *kernel_site())
            offset = array.first + index * array.strides[0]
            array.region.atomic(
                offset, array.dtype, 1, thread.clock, access, scope, reads, writes, unread, signal
            )

    def _words(self, array, operation, access, writes=True, n=1, signal=None):
        """`operation` accesses the first `n` elements of `array` by atomics."""
        if isinstance(array, Tracked):
            array.region.atomic(
                array.first, array.dtype, n, operation.clock, access, "sys", True, writes, (), signal
            )

    # -- messages
    def put(self, thread, target, source, pe, nbi, flag, op, word):
        what = "p" if word and not nbi else "put_signal" if flag is not None else "put"
        what += "_nbi" if nbi else ""
        operation, access = self._issue(thread, pe, what, flag)
        limit = min(target.size, source.size)
        if word and nbi:
            self._words(source, operation, access, False, limit)
        elif nbi:
            touch("read", source, operation.clock, access, limit)
        else:
            touch("read", source, thread.clock, (operation.issued, *operation.site), limit)
        if word:
            self._words(target, operation, access, n=limit)
        else:
            touch("write", target, operation.clock, access, limit)
        self._words(flag, operation, access, signal=op)
        return operation

    def signal(self, thread, flag, pe, op):
        """A signal or an atomic without data."""
        operation, access = self._issue(thread, pe, "signal_op", flag)
        self._words(flag, operation, access, signal=op)
        return operation

    def arrived(self, operation, history, op):
        """The signal of `operation` has been applied to the word of `history`."""
        operation.applied = True
        moment = OperationMoment(operation.serial, operation)
        self.wrote(history, moment, {("sys", operation.pe, None): operation.clock}, op == "add")

    def words_arrived(self, operation, histories, relaxed):
        """`operation` has stored the words of `histories`. Relaxed ones tell of nothing but themselves."""
        operation.applied = True
        for history in histories:
            if relaxed:
                self.wrote(history, OperationMoment(operation.serial, operation), {}, False)
            else:
                self.arrived(operation, history, "set")

    def get(self, thread, target, source, nbi, word):
        if word:
            source = source.reshape(-1)
            self.access_word(source, 0, thread, "sys", True, False)
            self._overtaken(thread, source)
            self.acquire(thread, address(source), "sys", ordered=False)
            return
        limit = min(target.size, source.size)
        if nbi:
            operation, access = self._issue(thread, thread.pe, "get_nbi", None)
            clock = operation.clock
        else:
            clock, access = thread.clock, (thread.moment or thread.now(), *kernel_site())
        touch("read", source, clock, access, limit)
        touch("write", target, clock, access, limit)

    def _overtaken(self, thread, source):
        """A g() of ``source[0]`` may come before what `thread` knows to have been sent there by p()."""
        if not isinstance(source, Tracked):
            return
        region, clock = source.region, thread.clock
        at, _ = region.cells(source.first, source.itemsize)
        access = (thread.moment or thread.now(), *kernel_site())
        for other in list(region.atomics.get(at, {}).values()):
            moment, of = other.access[0], other.access[0].of
            if isinstance(of, Operation) and of.pe == thread.pe and not moment.before(clock):
                if of.issued.thread == thread.key or of.issued.before(clock):
                    self.conflict(region, at, "atomic", access, clock, "atomic", other.access, "p and g")

    def _issue(self, thread, pe, what, flag):
        """-> a new Operation to `pe`, and what it leaves where it reads and writes."""
        serial, site = next(self.serials), kernel_site()
        where = None if flag is None else address(flag)
        operation = Operation(serial, thread, int(pe), site, what, where)
        thread.note_release(site, what, int(pe), where)
        clock = operation.clock = self.behind_fences(thread, thread.released(), operation.target)
        clock[operation_done(serial)] = 1
        self.live[serial] = self.pending[thread.pe][serial] = operation
        if what != "get_nbi":  # a fence says nothing about those
            self.unfenced[thread.pe][serial] = operation
        # Only what it has left in memory keeps the Operation, once it has arrived.
        return operation, (OperationMoment(serial, operation), *site)

    def behind_fences(self, thread, clock, target):
        """`clock`, for who sees what `thread` sends to PE `target` now: what its PE has sent there before a
        fence that it knows of comes first."""
        known = clock.get(fence_of(thread.pe))
        if known:
            clock[delivered(thread.pe, target)] = known
        return clock

    def _known(self, thread, operations):
        """Remove from `operations` those that `thread` knows to have been issued. -> them"""
        clock, me = thread.clock, thread.key
        known = [o for o in operations.values() if o.issued.thread == me or o.issued.before(clock)]
        for operation in known:
            del operations[operation.serial]
        return known

    def fence(self, thread):
        pe = thread.pe
        self.fences[pe] += 1
        for operation in self._known(thread, self.unfenced[pe]):
            operation.fenced = self.fences[pe]
        self._called(thread, fence_of(pe), self.fences[pe])

    def quiet(self, thread):
        pe = thread.pe
        self.quiets[pe] += 1
        for operation in self._known(thread, self.pending[pe]):
            operation.completed = self.quiets[pe]
        self._called(thread, quiet_of(pe), self.quiets[pe])

    def _called(self, thread, key, number):
        """`thread` knows of its PE's fence or quiet `number`, and of its own operations before."""
        thread.learn({key: number, thread.key: (thread.moment or thread.now()).time})
        self.threadfence(thread, "sys")

    def threadfence(self, thread, scope):
        """A fence of the PTX memory model: what precedes it is published by atomics that follow it; what
        relaxed loads before it have seen is known now."""
        left = {}
        for who, seen in thread.unfenced.items():
            released, pe, block, loaded = who
            if _reaches(thread, pe, block, released, min(scope, loaded, key=_LEVEL.__getitem__)):
                thread.learn(seen[0])
            else:
                left[who] = seen
        thread.unfenced = left
        thread.note_release(kernel_site(), "threadfence")
        thread.fences = {**thread.fences, scope: thread.released()}

    # -- threads that synchronize
    def barrier_of(self, threads):
        """Lanes of a warp, or other threads of a PE: each knows what all do."""
        clock = joined(*[t.clock for t in threads])
        for thread in threads:
            clock[thread.key] = (thread.moment or thread.now()).time
            thread.releases += 1
        self._met(threads, clock)

    def block_barrier(self, blocks):
        """A barrier of all threads of `blocks` (of one grid)."""
        threads = [t for b in blocks for t in b.threads if not t.dead]
        if not threads:
            return
        clock = joined(*[t.clock for t in threads])
        for block in blocks:
            block.phase += 1
            clock[block.key] = block.phase
        self.shorten(clock)
        self._met(threads, clock)

    def _met(self, threads, clock):
        """`threads` know `clock` now. What each has published by a fence, or read relaxed before one, counts
        for all: sequentially consistent fences of two threads are ordered by what other threads that these
        have met saw in between."""
        fences = _merged([t.fences for t in threads], joined)
        unfenced = _merged([t.unfenced for t in threads], lambda a, b: (joined(a[0], b[0]), None))
        for thread in threads:
            thread.adopt(clock)
            thread.fences, thread.unfenced = fences, unfenced

    def shorten(self, clock):
        """Forget what is superseded in `clock`, when it has become long."""
        if len(clock) > self.limit:
            forget_superseded(clock, self.kernel_of_block, self.live)
            self.limit = max(256, 2 * len(clock))

    # -- kernels, streams and hosts
    def new_stream(self, stream):
        stream.key, stream.kernels, stream.clock = STREAM + next(self.streams), 0, {}
        stream.early = None  # what a kernel knows that begins before the last one has ended
        stream.waited = {}  # as clock, without what kernels did that later ones need not have waited for

    def kernel_started(self, launch):
        """-> what its threads know at first"""
        stream = launch.stream
        stream.kernels += 1
        clock = joined(stream.clock, launch.told)
        forget_superseded(clock, self.kernel_of_block, self.live)
        launch.after = clock  # griddepcontrol_wait: that the kernels before have ended
        if launch.pdl and stream.early is not None:
            launch.after = joined(stream.waited, launch.told)
            clock = joined(stream.early, launch.told)
        else:
            stream.early = clock
        launch.has_waited = not launch.pdl
        launch.clock, launch.number, launch.final, launch.exits = clock, stream.kernels, clock, {}
        launch.stream_key = stream.key

    def new_block(self, block, launch):
        block.key, block.phase = next(self.blocks) * BLOCK, 0
        block.mbarrier_keys = itertools.count(block.key + MBARRIER)
        self.kernel_of_block[block.key] = launch.stream_key, launch.number

    def thread_ended(self, thread):
        launch = thread.block.launch
        if id(thread.clock) not in launch.exits:
            launch.exits[id(thread.clock)] = thread.clock  # which keeps it: another may not get its id
            if launch.final is launch.clock:
                launch.final = dict(launch.clock)
            join(launch.final, thread.clock)

    def kernel_ended(self, launch):
        launch.exits.clear()
        clock = dict(launch.final)
        join(clock, launch.stream.clock)
        clock[launch.stream_key] = launch.number
        forget_superseded(clock, self.kernel_of_block, self.live)
        launch.stream.clock = launch.stream.waited = clock
        if not launch.has_waited:  # it may have ended before the kernels before it
            ended = {block.key: 1 << 62 for block in launch.blocks}
            launch.stream.waited = launch.final | ended

    def waited(self, stream, clock):
        """`stream` has waited for an event that knows `clock`."""
        stream.clock = joined(stream.clock, clock)
        stream.waited, stream.early = stream.clock, None

    def synchronized(self, pe, clock):
        """The host program of `pe` has waited for work that knows `clock`."""
        self.hosts[pe] = joined(self.hosts[pe], clock)
        self.shorten(self.hosts[pe])

    def hosts_met(self, pes):
        """The host programs of `pes` have met."""
        clock = joined(*(self.hosts[pe] for pe in pes))
        if len(pes) == len(self.hosts):
            forget_superseded(clock, self.kernel_of_block, self.live)
        for pe in pes:
            self.hosts[pe] = clock

    def forget(self):
        """The program has ended: what is known of its accesses goes at once, not when it is found to be
        garbage."""
        self.regions.clear()
        self.histories.clear()
        self.waits.clear()
        self.kernel_of_block.clear()

    # -- reports
    def conflict(self, region, at, what, access, clock, earlier_what, earlier, kind=None):
        """`access` and `earlier` are unordered: remember the race, once. `kind`, of two atomic accesses:
        "sets" of one signal, different "words", or "p and g"."""
        lines = ((what, access), (earlier_what, earlier))
        signature = frozenset((w, a[1], line_of(a[1], a[2])) for w, a in lines)
        if self.machine.scheduler.failure is not None:
            return
        if earlier is UNWRITTEN:
            if what == "read":
                self.read_unwritten(region, at, access)
            return
        place = region.base + at * region.grain
        pe, _ = self.machine.located(place)
        self.ranks[signature].add(access[0].of.pe if pe is None else pe)
        known = self.found.get(signature)
        # A write that is read too early says more of what is missing than a read that comes before the write.
        if known is not None and (known[0].first.is_write or earlier_what != "write"):
            return
        self.found[signature] = describe(self, place, what, access, clock, earlier_what, earlier, kind)
        if len(self.found) >= MOST:
            raise RaceError(self.untold())

    def read_unwritten(self, region, at, access):
        """`access` reads a cell that no kernel, message or known access of a host has written: remember it,
        once for each array."""
        machine, thread = self.machine, getattr(access[0].of, "thread", access[0].of)
        if not hasattr(thread, "threadIdx"):
            return  # host programs print and copy whole arrays
        offset, n_bytes = region.base - machine.memory_address, len(region.writes) * region.grain
        memory = machine.memory[offset : offset + n_bytes]
        unwritten = [i for i, w in enumerate(region.writes) if w is UNWRITTEN]
        shape = -1, region.grain
        as_made = np.resize(np.array(EMPTY, np.uint8), n_bytes).reshape(shape)[unwritten]
        # Otherwise NumPy code of a host has written to it behind our back.
        if np.array_equal(memory.reshape(shape)[unwritten], as_made):
            pe, offset = divmod(offset, machine.heap_size)
            empty = next(a.empty for a in machine.heaps[pe].allocations if a.offset == offset)
            element = report.place(machine, thread, region.base + at * region.grain, sys._getframe(1))
            line = report.shown_line(access[1].co_filename, line_of(*access[1:])) if access[1] else "a copy"
            self.unwritten[element.partition("[")[0]] = (
                f"{element} is read, but nobody has written it\n"
                f"  {report.who(thread)} in {thread.block.launch.name} at {line}\n"
                f"  made by empty at {report.user_text(empty)}\n"
                "  Write it first, or make it with zeros; SHMEMKIT_UNINITIALIZED=0 turns this check off"
            )
        region.writes[:] = [None if w is UNWRITTEN else w for w in region.writes]

    def judge(self):
        """The program has ended: raise what was found."""
        if found := self.untold():
            raise RaceError(found)  # which may be why something is read too early
        if found := self.untold_unwritten():
            raise UninitializedReadError(found)

    def untold_unwritten(self):
        """-> the text of reads of unwritten memory that were not reported yet, or None"""
        texts, self.unwritten = list(self.unwritten.values()), {}
        return "\n".join(texts) or None

    def untold(self):
        """-> the races that were not reported yet; now they are"""
        races = [(found, s) for s, found in self.found.items() if s not in self.told]
        self.told.update(self.found)
        return [
            replace(race if pair is None else pair.told_in_full(race), also=self._others(race, signature))
            for (race, pair), signature in races
        ]

    def _others(self, race, signature):
        return tuple(sorted(self.ranks[signature] - {race.rank}))


def _merged(dictionaries, merge):
    """All entries of `dictionaries`; ``merge(a, b)`` is that of two for the same key."""
    result, *others = {id(d): d for d in dictionaries}.values()
    for other in others:
        result = dict(result)
        for key, value in other.items():
            known = result.get(key, value)
            result[key] = value if known is value else merge(known, value)
    return result


def _reaches(thread, pe, block, released, acquired):
    """Whether `thread`, with scope `acquired`, acquires what `block` of `pe` released with `released`."""
    if pe != thread.pe:
        return released == acquired == "sys"
    return block == thread.block.key or (released != "block" and acquired != "block")


def _seen(array):
    return array if isinstance(array, DeviceView) else device_view(array)
