"""Data races: two accesses to the same memory, one of them a write, that nothing orders.

What orders: a thread's own program; barriers of warps, blocks, grids and PEs; streams, events and host
collectives; and a release that an acquire takes the value of. What a thread released to a word of memory is
kept with the word (`published`), by scope; who waits for the word learns it, if the scopes of both contain
the other.

Messages have a life of their own. The data of a put under way is written, and the source of a non-blocking
one read, at some moment after the call: the `Operation` accesses them, not the thread. Who sees the signal of
put_signal knows that its own data is there, and what its thread did itself before; not what else is under
way. A fence puts earlier operations to a PE before later ones to it; quiet completes operations. Both
concern the operations of the PE that the calling thread knows to have been issued. These are the rules of the
memory model of NVSHMEM and, for what goes over NVLink directly, of PTX.
"""

import itertools
import weakref
from bisect import bisect_right

import numpy as np

from .arrays import address, device_view
from .clock import (
    BLOCK,
    STREAM,
    Moment,
    forget_superseded,
    join,
    joined,
    operation_done,
    operation_fenced,
    operation_of,
)
from .errors import RaceError
from .race_report import describe, line_of
from .shadow import Region, Tracked, kernel_site, tracked

MOST = 20  # different races; then the program is ended
_LEVEL = {"block": 0, "gpu": 1, "sys": 2}


class Operation:
    """The accesses of a put, get or signal under way, issued by `thread` at `issued`."""

    __slots__ = (
        *("serial", "pe", "target", "thread", "issued", "site", "what", "clock", "flag", "applied"),
        "__weakref__",
    )

    def __init__(self, serial, thread, target, site, what, flag):
        self.serial, self.thread, self.pe, self.target = serial, thread, thread.pe, target
        self.site, self.what, self.flag, self.applied = site, what, flag, False
        self.issued = thread.moment or thread.now()

    # as Moments of threads, for reports
    block = property(lambda self: self.thread.block)


class Races:
    def __init__(self, machine):
        self.machine = machine
        self.found = {}  # signature -> Race
        self.published = {}  # address -> {(scope, PE, block): clock}
        self.regions = {}  # (PE, offset) of a symmetric allocation, or id of a local array's owner -> Region
        self.serials, self.blocks, self.streams = itertools.count(1), itertools.count(1), itertools.count(0)
        self.live = weakref.WeakValueDictionary()  # serial -> Operation whose data somebody may still find
        self.pending = {pe: [] for pe in machine.local_pes}  # weak references to operations, until quiet
        self.fenced = False  # whether anybody ever called fence
        self.kernel_of_block = {}  # key of a block -> (key of its stream, number of its kernel there)
        self.hosts = {pe: {} for pe in machine.local_pes}  # what the host programs know
        self.limit = 256  # entries of a clock, before it is looked through

    # -- memory
    def tracked(self, array, pe):
        """`array`, in the memory of PE `pe`, with the record of its accesses."""
        if array.size == 0:
            return device_view(array)
        machine = self.machine
        offset = address(array) - machine.memory_address
        if 0 <= offset < machine.memory.size:
            region = self._of_heap(pe, offset % machine.heap_size, array)
        else:
            region = self._of_owner(array)
        return device_view(array) if region is None else tracked(array, region)

    def _of_heap(self, pe, offset, array):
        allocations = self.machine.heaps[pe].allocations
        found = bisect_right(allocations, offset, key=lambda a: a.offset) - 1
        if found < 0:
            return None
        allocation = allocations[found]
        region = self.regions.get((pe, allocation.offset))
        if region is None:
            base = self.machine.memory_address + pe * self.machine.heap_size + allocation.offset
            region = self.regions[pe, allocation.offset] = Region(self, base, allocation.size, array.itemsize)
        return region

    def _of_owner(self, array):
        """The Region of an array that is not symmetric: of the one that owns its memory."""
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        known = self.regions.get(id(owner))
        if known is None:
            key = id(owner)
            region = Region(self, address(owner), owner.nbytes, array.itemsize)
            known = weakref.ref(owner, lambda _: self.regions.pop(key, None)), region
            self.regions[key] = known
        return known[1]

    def freed(self, pe, allocation):
        region = self.regions.pop((pe, allocation.offset), None)
        if region is not None:
            for key in [k for k in self.published if 0 <= k - region.base < region.n_bytes]:
                del self.published[key]

    # -- words that threads signal each other with
    def publish(self, key, scope, thread_pe, block, clock, keep):
        """`clock` is what is known to who reads the word at `key`; with `keep` so is what was before."""
        who = scope, thread_pe, block if scope == "block" else None
        entries = self.published.get(key)
        if entries is None or not keep:
            self.published[key] = {who: clock}
        else:
            entries[who] = joined(entries[who], clock) if who in entries else clock

    def release(self, thread, key, scope, keep):
        self.publish(key, scope, thread.pe, thread.block.key, thread.released(), keep)

    def relaxed_write(self, thread, key, scope, keep):
        """It publishes what a fence of the thread came after."""
        if not keep:
            self.published.pop(key, None)
        for fence_scope, clock in thread.fences.items():
            narrower = min(scope, fence_scope, key=_LEVEL.get)
            self.publish(key, narrower, thread.pe, thread.block.key, clock, True)

    def acquire(self, thread, key, scope, ordered=True):
        """`thread` has read the word at `key`. Not `ordered`, it learns what that says at its next fence."""
        for (released, pe, block), clock in (self.published.get(key) or {}).items():
            if not _reaches(thread, pe, block, released, scope):
                thread.missed.append(("scope", key, kernel_site(), clock, released, scope))
            elif ordered:
                thread.learn(clock)
            elif all(clock is not seen[0] for seen in thread.unfenced):
                thread.unfenced.append((clock, released, pe, block, scope))
                thread.missed.append(("relaxed", key, kernel_site(), clock, released, scope))
        del thread.missed[:-8]

    def access_word(self, array, index, thread, scope, reads, writes):
        """An atomic access of `thread` to an element of a tracked array."""
        if isinstance(array, Tracked):
            access = (thread.moment or thread.now(), *kernel_site())
            offset = array.first + index * array.strides[0]
            array.region.atomic(offset, array.itemsize, thread.clock, access, scope, reads, writes)

    def _flag(self, flag, operation, access):
        """The signal of `operation` changes the first element of `flag`."""
        if isinstance(flag, Tracked):
            flag.region.atomic(flag.first, flag.itemsize, operation.clock, access, "sys", True, True)

    # -- messages
    def put(self, thread, target, source, pe, nbi, flag, word):
        what = ("p" if word else "put_signal" if flag is not None else "put") + ("_nbi" if nbi else "")
        operation, access = self._issue(thread, pe, what, flag)
        limit = min(target.size, source.size)
        if isinstance(source, Tracked):
            if nbi:
                source.touch("read", operation.clock, access, limit=limit)
            else:
                by_thread = operation.issued, *operation.site
                source.touch("read", thread.clock, by_thread, limit=limit)
        if word:
            self._flag(target, operation, access)
        elif isinstance(target, Tracked):
            target.touch("write", operation.clock, access, limit=limit)
        self._flag(flag, operation, access)
        return operation

    def signal(self, thread, flag, pe, op):
        """A signal or an atomic without data."""
        operation, access = self._issue(thread, pe, "signal_op", flag)
        self._flag(flag, operation, access)
        return operation

    def arrived(self, operation, key, op):
        """The signal of `operation` has been applied to the word at `key`."""
        operation.applied = True
        self.publish(key, "sys", operation.pe, None, operation.clock, op == "add")

    def get(self, thread, target, source, nbi, word):
        if word:
            self.access_word(source.reshape(-1), 0, thread, "sys", True, False)
            self.acquire(thread, address(source), "sys", ordered=False)
            return
        limit = min(target.size, source.size)
        if nbi:
            operation, access = self._issue(thread, thread.pe, "get_nbi", None)
            clock = operation.clock
        else:
            clock, access = thread.clock, (thread.moment or thread.now(), *kernel_site())
        if isinstance(source, Tracked):
            source.touch("read", clock, access, limit=limit)
        if isinstance(target, Tracked):
            target.touch("write", clock, access, limit=limit)

    def _issue(self, thread, pe, what, flag):
        """-> a new Operation to `pe`, and what it leaves where it reads and writes."""
        serial, site = next(self.serials), kernel_site()
        where = None if flag is None else address(flag)
        operation = Operation(serial, thread, int(pe), site, what, where)
        thread.note_release(site, what, int(pe))
        clock = operation.clock = thread.released()
        if self.fenced:
            for key in list(clock):
                if key < 0 and key == operation_fenced(operation_of(key)):
                    earlier = self.live.get(operation_of(key))
                    if earlier is not None and earlier.target == operation.target:
                        clock[operation_done(earlier.serial)] = 1
        clock[operation_done(serial)] = 1
        self.live[serial] = operation
        pending = self.pending[thread.pe]
        pending.append(weakref.ref(operation))
        if len(pending) > 256:
            pending[:] = [r for r in pending if r() is not None]
        # Only what it has left in memory keeps the Operation, once it has arrived.
        moment = Moment(operation_done(serial), 0, operation_done(serial), 1, None, 1, operation)
        return operation, (moment, *site)

    def _known_pending(self, thread):
        """The operations of the PE that `thread` knows to have been issued."""
        clock, me = thread.clock, thread.key
        for reference in self.pending[thread.pe]:
            operation = reference()
            if operation is not None and (operation.issued.thread == me or operation.issued.before(clock)):
                yield operation

    def fence(self, thread):
        self.fenced = True
        thread.learn({operation_fenced(o.serial): 1 for o in self._known_pending(thread)})
        self.threadfence(thread, "sys")

    def quiet(self, thread):
        thread.learn({operation_done(o.serial): 1 for o in self._known_pending(thread)})
        self.threadfence(thread, "sys")

    def threadfence(self, thread, scope):
        """A fence of the PTX memory model: what precedes it is published by atomics that follow it; what
        relaxed loads before it have seen is known now."""
        left = []
        for entry in thread.unfenced:
            clock, released, pe, block, loaded = entry
            if _reaches(thread, pe, block, released, min(scope, loaded, key=_LEVEL.get)):
                thread.learn(clock)
            else:
                left.append(entry)
        thread.unfenced = left
        thread.note_release(kernel_site(), "threadfence")
        thread.fences = {**thread.fences, scope: thread.released()}

    # -- threads that meet
    def meet(self, threads):
        """Lanes of a warp, or other threads of a PE: each knows what all do."""
        clock, fences = joined(*[t.clock for t in threads]), _joined_fences(threads)
        for thread in threads:
            clock[thread.key] = (thread.moment or thread.now()).time
        for thread in threads:
            thread.released()
            thread.adopt(clock)
            thread.fences = fences

    def block_barrier(self, blocks):
        """All threads of `blocks` (of one grid) meet."""
        threads = [t for b in blocks for t in b.threads if not t.dead]
        if not threads:
            return
        clock = joined(*[t.clock for t in threads])
        for block in blocks:
            block.phase += 1
            clock[block.key] = block.phase
        if len(clock) > self.limit:
            forget_superseded(clock, self.kernel_of_block, self.live)
            self.limit = max(256, 2 * len(clock))
        fences = _joined_fences(threads)
        for thread in threads:
            thread.adopt(clock)
            thread.fences = fences  # each thread's stores are visible by then: thread 0 may publish them

    # -- kernels, streams and hosts
    def new_stream(self, stream):
        stream.key, stream.kernels, stream.clock = STREAM + next(self.streams), 0, {}

    def kernel_started(self, launch):
        """-> what its threads know at first"""
        stream = launch.stream
        stream.kernels += 1
        clock = joined(stream.clock, self.hosts[launch.pe])
        forget_superseded(clock, self.kernel_of_block, self.live)
        launch.clock, launch.number, launch.final, launch.exits = clock, stream.kernels, clock, set()
        launch.stream_key = stream.key

    def new_block(self, block, launch):
        block.key, block.phase = next(self.blocks) * BLOCK, 0
        self.kernel_of_block[block.key] = launch.stream_key, launch.number

    def thread_ended(self, thread):
        launch = thread.block.launch
        if id(thread.clock) not in launch.exits:
            launch.exits.add(id(thread.clock))
            if launch.final is launch.clock:
                launch.final = dict(launch.clock)
            join(launch.final, thread.clock)

    def kernel_ended(self, launch):
        clock = dict(launch.final)
        join(clock, launch.stream.clock)
        clock[launch.stream_key] = launch.number
        forget_superseded(clock, self.kernel_of_block, self.live)
        launch.stream.clock = clock

    def waited(self, stream, clock):
        """`stream` has waited for an event that knows `clock`."""
        stream.clock = joined(stream.clock, clock)

    def synchronized(self, pe, clock):
        """The host program of `pe` has waited for work that knows `clock`."""
        self.hosts[pe] = joined(self.hosts[pe], clock)

    def hosts_met(self):
        """All host programs have met. What their kernels have done counts as waited for: a launch blocks here
        until the kernel has finished."""
        streams = [s.clock for streams in self.machine.streams.values() for s in streams]
        clock = joined(*self.hosts.values(), *streams)
        forget_superseded(clock, self.kernel_of_block, self.live)
        for pe in self.hosts:
            self.hosts[pe] = clock

    # -- reports
    def conflict(self, region, at, what, access, clock, earlier_what, earlier):
        """`access` and `earlier` are unordered: remember the race, once."""
        lines = ((what, access), (earlier_what, earlier))
        signature = frozenset((w, a[1], line_of(a[1], a[2])) for w, a in lines)
        if self.machine.scheduler.failure is not None:
            return
        known = self.found.get(signature)
        # A write that is read too early says more of what is missing than a read that comes before the write.
        if known is not None and (known.first.is_write or earlier_what != "write"):
            return
        place = region.base + at * region.grain
        self.found[signature] = describe(self, place, what, access, clock, earlier_what, earlier)
        if len(self.found) >= MOST:
            raise self.error()

    def error(self):
        """-> RaceError with all that were found"""
        return RaceError(list(self.found.values()))


def _joined_fences(threads):
    fences = {}
    for thread in threads:
        for scope, fenced in thread.fences.items():
            fences[scope] = joined(fences[scope], fenced) if scope in fences else fenced
    return fences


def _reaches(thread, pe, block, released, acquired):
    """Whether `thread`, with scope `acquired`, acquires what `block` of `pe` released with `released`."""
    if pe != thread.pe:
        return released == acquired == "sys"
    return block == thread.block.key or (released != "block" and acquired != "block")
