"""The timeline of emulated kernels: what their threads do that others see, in logical time.

Each thread has a clock of its own. Every store, put, signal or atomic that another thread may see takes one
step of it. A wait ends one step after the action that satisfied it, or one step after it began if that action
came earlier. Threads that meet in a barrier go on at the time of the last. A kernel begins when the host
program has launched it and its stream is free. So the picture shows which thread waited for which, and not in
which order the emulator ran them. A message that is held back arrives after everything that has happened.
Ordinary loads and stores take no time.

The same program, delivery and seed give the same timeline.
"""

import contextlib
import ctypes
import functools
import sys
from collections import Counter, deque
from typing import Any

import numpy as np

from shmemkit.support.call_site import shown_place
from shmemkit.support.command_line import say
from shmemkit.support.trace_file import Arrow, Mark, Span, Track, save, trace

from .errors import add_text
from .report import is_kernel_code
from .thread import Thread
from .workers import running

STORES = 256  # to one word, that are known
RECORDS = 100_000  # spans and marks of a rank, by default


class Clock:
    """A thread's: its time; how often it has been at each line; its open phases; its last send or poll, which
    one of the same line continues; whether it ran before anything was recorded."""

    __slots__ = ("time", "visits", "phases", "last", "early")

    def __init__(self, time, early=False):
        self.time, self.visits, self.phases, self.last, self.early = time, Counter(), [], None, early


class Timeline:
    def __init__(self, machine, records=RECORDS):
        self.machine, self.records = machine, records
        self.alone = machine.n_ranks == len(machine.local_pes)  # no other process stores here
        self.users = 0  # who have begun it, and not ended it
        self.spans, self.marks, self.arrows = [], [], {}
        self.dropped, self.recorded = Counter(), Counter()  # by rank
        self.latest = 0
        self.hosts = dict.fromkeys(machine.local_pes, 0)  # the time of each host program
        self.streams = Counter()  # id of a stream -> when what it has run was over
        self.stores = {}  # address -> the last stores there: (span, when, the bytes since then)
        self.arriving: Any = None
        self.arrived: Any = None  # likewise, of the message that is being delivered; the last one
        self.merged = {}  # block -> what the threads of a warp do together -> its span
        self.open = {}  # waits under way -> their spans
        self.periods = {}  # (thread, time of the race detector) -> when that began

    # -- spans
    def _room(self, rank):
        self.recorded[rank] += 1
        if self.recorded[rank] <= self.records:
            return True
        self.dropped[rank] += 1
        return False

    def _span(self, track, kind, name, begin, **args):
        span = Span(track, kind, name, begin, begin + 1, args)
        span.kept = self._room(track.rank)
        if span.kept:
            self.spans.append(span)
        return span

    def _together(self, thread, kind, name, begin, **args):
        """The span of what `thread` does: one for all threads of its warp that come to this line equally
        often."""
        block, clock = thread.block, thread.timeline
        primitive, place = _site()
        name = name or primitive
        site = kind, name, place
        clock.visits[site] += 1
        key, merged = (thread.thread_id >> 5, *site, clock.visits[site]), self.merged[block]
        span = merged.get(key)
        if span is None:
            if place:
                args["line"] = _shown(*place)
            args["thread"] = thread.thread_id
            span = merged[key] = self._span(self._track(thread), kind, name, begin, **args)
        else:
            span.begin = min(span.begin, begin)
            span.args["threads"] = span.args.get("threads", 1) + 1
            if "bytes" in args:
                span.args["bytes"] = span.args.get("bytes", 0) + args["bytes"]
        return span

    def _track(self, thread):
        return Track(thread.pe, thread.block.number, thread.thread_id >> 5)

    def _arrow(self, store, span, end):
        if store is not None and store[0].kept and span.kept:
            source, time, _ = store
            # One of those between the same two spans: of a packet, each of its words.
            self.arrows[id(source), id(span)] = Arrow(source.name, source, time - 0.5, span, end - 0.5)

    # -- kernels
    def kernel_starts(self, launch):
        launch.begins = launch.ends = max(launch.enqueued_at, self.streams[id(launch.stream)])

    def block_starts(self, block, after, early=False):
        """`after`: the thread whose end made room for the block, or None. `early`: it runs already."""
        begin = block.launch.begins if after is None else after.timeline.time
        block.span = self._span(Track(block.pe, block.number), "kernel", block.launch.name, begin)
        self.merged[block] = {}
        for thread in block.threads:
            thread.timeline = Clock(begin, early)

    def thread_ends(self, thread):
        block, clock = thread.block, thread.timeline
        for span in clock.phases:
            span.end = max(span.end, clock.time)
            span.args["not ended"] = True
        block.span.end = max(block.span.end, clock.time)
        block.launch.ends = max(block.launch.ends, block.span.end)
        self.latest = max(self.latest, block.span.end)
        if not block.alive:
            self.merged.pop(block, None)

    # -- what threads do
    def send(self, thread, n_bytes=0):
        """`thread` stores, puts or signals. -> (its span, when)"""
        clock = thread.timeline
        clock.time += 1
        self.latest = max(self.latest, clock.time)
        before = clock.last
        site = _site()
        if before is not None and before[1:] == (site, clock.time - 1):
            span = before[0]  # the same line again
            span.end = max(span.end, clock.time)
            if n_bytes:
                span.args["bytes"] = span.args.get("bytes", 0) + n_bytes
        else:
            more = {"bytes": n_bytes} if n_bytes else {}
            kind = "copy" if site[1] is None else "send"
            span = self._together(thread, kind, None, clock.time - 1, **more)
            span.end = max(span.end, clock.time)
        clock.last = span, site, clock.time
        return span, clock.time

    def stored(self, key):
        """The word at address `key` has been written, by a message or by the thread that runs."""
        store = self.arriving
        if store is None and isinstance(thread := running(), Thread):
            store = self.send(thread)
        if store is None:
            self.stores.pop(key, None)
            return
        stores = self.stores.get(key)
        if stores is None:
            stores = self.stores[key] = deque(maxlen=STORES)
        end, word = self.machine.memory_address + self.machine.memory.size, None
        if isinstance(key, (int, np.integer)) and key != end:  # where a put of no elements may go
            # Up to the next multiple of 8 bytes: there is no end of an allocation before that.
            word = ctypes.string_at(int(key), 8 - key % 8)
        stores.append((*store, word))

    def _satisfying(self, key, satisfies):
        """-> the store that a wait for the word at `key` has waited for: the first of the last ones that all
        satisfy it. None if none is known."""
        found = None
        for store in reversed(self.stores.get(key, ()) if self.alone else ()):
            word = store[2]
            if word is not None and satisfies is not None and not satisfies(np.frombuffer(word, np.uint8)):
                break
            found = store
            if store[2] is None or satisfies is None:
                break
        return found

    def carried(self, thread, arrive, n_bytes):
        """`arrive`, of a message that `thread` sends now."""
        span, time = self.send(thread, n_bytes)

        def arrives(by):
            late = by is None  # else it is delivered at once
            before, self.arriving = self.arriving, (span, max(time, self.latest) if late else time)
            try:
                arrive(by)
                self.arrived = self.arriving
            finally:
                self.arriving = before

        return arrives

    def completed(self, key):
        """The message that has just arrived was among those of `key`; it may be older than the timeline."""
        arrived, self.arrived = self.arrived, None
        if arrived is not None:
            self.stores[key] = [(*arrived, None)]

    def wait(self, thread, key, is_satisfied, why, satisfies, park):
        """``park(key, is_satisfied, why)``, and the span of it."""
        clock = thread.timeline
        clock.last, begin, store = None, clock.time, None
        what = why().partition(", now ")[0]
        span = self._together(thread, "wait", None, begin, **{"for": what})
        self.open[thread] = span

        def satisfied():
            nonlocal store
            if not is_satisfied():
                return False
            store = self._satisfying(key, satisfies)
            return True

        park(key, satisfied, why)
        self._waited(thread, span, store)

    def already_waits(self, key, thread, is_satisfied):
        """`thread` has begun to wait before anything was recorded. -> the same for the scheduler"""
        if not isinstance(thread, Thread):
            return thread, is_satisfied
        span = Span(self._track(thread), "wait", "wait", thread.timeline.time, thread.timeline.time)
        if self._room(thread.pe):
            self.spans.append(span)
        self.open[thread] = span

        def satisfied():
            if not is_satisfied():
                return False
            if thread in self.open:
                self._waited(thread, span, self._satisfying(key, None))
            return True

        return thread, satisfied

    def _waited(self, thread, span, store):
        clock = thread.timeline
        clock.time = max(clock.time, 0 if store is None else store[1]) + 1
        span.end = max(span.end, clock.time)
        self.latest = max(self.latest, clock.time)
        self.open.pop(thread, None)
        self._arrow(store, span, clock.time)

    def polled(self, thread, key, spun):
        """`thread` has loaded the word at `key`, in a loop if `spun`."""
        store, clock = self._satisfying(key, None), thread.timeline
        if not spun:
            clock.time = max(clock.time, 0 if store is None else store[1])
            return
        before, site = clock.last, (_site(), key)
        if before is not None and before[1:] == (site, clock.time):
            span = before[0]  # it polls again
        else:
            span = self._together(thread, "wait", None, clock.time)
        self._waited(thread, span, store)
        clock.last = span, site, clock.time

    def met(self, those):
        """Threads, or host programs, have come to a barrier."""
        threads = [t for t in those if isinstance(t, Thread)]
        time = max([t.timeline.time for t in threads] + [self.hosts[t.pe] for t in those if t.block is None])
        for t in those:
            if t.block is None:
                self.hosts[t.pe] = time
            else:
                t.timeline.time = time

    # -- what kernels say
    def begin_phase(self, thread, name):
        clock = thread.timeline
        clock.last = None
        clock.phases.append(self._together(thread, "phase", name, clock.time))
        self._tick(thread)

    def end_phase(self, thread, name):
        clock = thread.timeline
        clock.last = None
        for span in reversed(clock.phases):
            if span.name == name:
                clock.phases.remove(span)
                self._tick(thread)
                span.end = max(span.end, clock.time)
                return
        if clock.early:  # it may have begun before
            return
        raise ValueError(f'end_phase("{name}"): this thread has not called begin_phase("{name}") before')

    def mark(self, thread, name):
        clock, place = thread.timeline, _site()[1]
        clock.last = None
        site = "mark", name, place
        clock.visits[site] += 1
        key, merged = (thread.thread_id >> 5, *site, clock.visits[site]), self.merged[thread.block]
        if key not in merged:  # else another thread of the warp has marked it
            merged[key] = args = {"thread": thread.thread_id, **({"line": _shown(*place)} if place else {})}
            if self._room(thread.pe):
                self.marks.append(Mark(self._track(thread), "mark", name, clock.time, args))
        self._tick(thread)

    def _tick(self, thread):
        thread.timeline.time += 1
        self.latest = max(self.latest, thread.timeline.time)

    # -- host programs and streams
    def enqueued(self, pe, operation):
        begin = self.hosts[pe]
        operation.enqueued_at = self.hosts[pe] = begin + 1
        self._span(Track(pe), "host", f"launch {operation.name}", begin)

    def operation_ended(self, stream, operation):
        at = id(stream)
        if hasattr(operation, "ends"):  # a kernel or a copy
            self.streams[at] = max(self.streams[at], operation.ends)
        elif (marker := getattr(operation, "marker", None)) is not None:
            self.streams[at] = max(self.streams[at], self._reached(marker))
        else:
            operation.at = self, self.streams[at]

    def _reached(self, marker):
        """-> when a stream came to `marker`, an event's, in this timeline"""
        timeline, time = getattr(marker, "at", (self, 0))
        return time if timeline is self else 0

    def waited_for_event(self, pe, marker):
        """The host program of `pe` has."""
        begin = self.hosts[pe]
        self.hosts[pe] = max(begin, self._reached(marker)) + 1
        self._span(Track(pe), "host", "synchronize an event", begin).end = self.hosts[pe]

    def synchronized(self, stream):
        pe, begin = stream.pe, self.hosts[stream.pe]
        self.hosts[pe] = max(begin, self.streams[id(stream)]) + 1
        self._span(Track(pe), "host", "synchronize", begin).end = self.hosts[pe]

    # -- races and the end
    def period(self, thread, time):
        """The race detector begins a period of `thread`, of which it calls the time `time`."""
        self.periods[thread.key, time] = thread.timeline.time

    def race(self, race, first, second):
        """`race` was found, of accesses at these Moments of the race detector."""
        for access, moment in ((race.first, first), (race.second, second)):
            of: Any = getattr(moment.of, "thread", moment.of)
            args = {"array": race.element, "line": _shown(access.file, access.line), "cure": race.missing}
            if isinstance(of, Thread):
                time, track = self.periods.get((getattr(of, "key", None), moment.time), 0), self._track(of)
            else:
                time, track = self.hosts[of.pe], Track(of.pe)
            text = f"race: {access.what} {race.element}"
            self.marks.append(Mark(track, "race", text, time, args))

    def data(self, since=(0, 0)):
        """-> the file's dictionary; `since`: without the first so many spans and marks"""
        end, (spans, marks) = self.latest + 1, since
        for thread, span in self.open.items():
            span.end, span.args["never ended"] = max(span.end, end), True
            thread.block.span.end = max(thread.block.span.end, end)
        known = {id(span) for span in self.spans[spans:]}
        return trace(
            self.spans[spans:],
            self.marks[marks:],
            [a for a in self.arrows.values() if id(a.source) in known and id(a.target) in known],
            unit="step",
            dropped={str(pe): n for pe, n in self.dropped.items() if n},
        )


def begin(machine, records=None):
    """Record the timeline of `machine` from now on. -> the Timeline"""
    machine.timeline = machine.scheduler.timeline = timeline = Timeline(machine, records or RECORDS)
    for launch in machine.scheduler.launches:  # that run already
        timeline.kernel_starts(launch)
        for block in launch.blocks:
            timeline.block_starts(block, None, early=True)
    for key, waiting in machine.scheduler.waiters.items():
        waiting[:] = [timeline.already_waits(key, *waiter) for waiter in waiting]
    return timeline


def stop(machine):
    machine.timeline = machine.scheduler.timeline = None


@contextlib.contextmanager
def recorded(machine, path):
    """In it, record the timeline of `machine`, and write it to the file `path`, also if the program fails.
    None: record nothing."""
    if path is None:
        yield
        return
    timeline = begin(machine)
    timeline.users += 1
    try:
        yield
    except BaseException as error:
        try:
            save(timeline.data(), path)
        except OSError as failure:
            say(f"shmemkit: the timeline is not written: {failure}")
        else:
            if isinstance(error, Exception):
                how = f"open it at ui.perfetto.dev, or: shmemkit timeline {path}"
                add_text(error, f"the timeline: {path} ({how})")
        raise
    save(timeline.data(), path)


_shown = functools.cache(shown_place)


def _site():
    """-> (the primitive, (file, line)) that the thread is in; the line is None for what no kernel does"""
    frame, name = sys._getframe(1), ""
    while frame is not None and not is_kernel_code(frame):
        if not frame.f_code.co_name.startswith(("_", "<")):
            name = frame.f_code.co_name
        frame = frame.f_back
    return (name, None) if frame is None else (name, (frame.f_code.co_filename, frame.f_lineno))
