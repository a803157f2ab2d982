"""What the emulator says of a data race: who accessed what, on which lines, and what would order it."""

import functools
import itertools
import linecache
import sys
from collections import namedtuple
from dataclasses import dataclass, replace

from .aliases import AliasedStore
from .clock import BLOCK, operation_done
from .host_arrays import HostAccess
from .mbarriers import Load
from .report import other_name, place, shown_line, user_frame, who

# What a thread does that others may wait for.
SIGNALS = frozenset(["release", "signal_op", "p", "put_signal", "put_signal_nbi"])


Signal = namedtuple("Signal", "key thread time site")  # by the thread of this key and number, at its time
# A wait, the number of the event; what it learnt, and who had released that: keys of block and thread, time.
Wait = namedtuple("Wait", "event key thread site clock by_block by at")


@dataclass(frozen=True)
class Access:
    """One side of a race. `what` it did, as in "reads" or "its put_nbi, under way, writes"; `rank`, and
    `block` and `thread` as in reports; `kernel`, or what it is of a stream; `file`, `line` and its `source`:
    "", 0 and "" of what no line of the program does, as a stream's copy."""

    what: str
    rank: int
    block: str
    thread: str
    kernel: str
    file: str
    line: int
    source: str

    @property
    def is_write(self):
        return self.what.endswith("writes")

    def __str__(self):
        by = f"rank {self.rank} block {self.block} thread {self.thread} in {self.kernel}"
        if not self.block:
            by = f"rank {self.rank}'s host program"
        at = f"\n      {shown_line(self.file, self.line)}" if self.line else ""
        return f"  {by}: {self.what} it{at}"


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders: `first` and `second`, in the order in which this schedule made them,
    to ``array[index]`` on `rank` (`element` is its name, index and rank in words), and what is `missing` in
    one sentence."""

    element: str
    array: str
    index: str
    rank: int
    first: Access
    second: Access
    missing: str
    note: str = ""  # the name of the array on the other rank, if that is another one

    def __str__(self):
        return f"race on {self.element}{self.note}\n{self.second}\n{self.first}\n    {self.missing}"


def describe(races, at, what, access, clock, earlier_what, earlier, kind=None):
    """-> the Race of `access`, which knows `clock`, with the `earlier` one, at address `at`, and what may say
    more of it later, or None"""
    thread = _thread(access[0].of)
    frame = sys._getframe(1)
    if isinstance(thread, HostAccess):
        frame = user_frame(frame)
    element = place(races.machine, thread, at, frame)
    array, _, rest = element.partition("[")
    index, _, rank = rest.partition("] on rank ")
    pair = _Pair(races, at, what, access, clock, earlier_what, earlier)
    race = Race(
        element,
        array,
        index,
        int(rank) if rank else thread.pe,
        _access(earlier_what, earlier),
        _access(what, access),
        pair.missing() if kind is None else _ATOMIC[kind](pair),
        other_name(races.machine, thread.pe, at)
        or other_name(races.machine, _thread(earlier[0].of).pe, at),
    )
    return race, pair if kind is None and pair.is_between_threads() else None


def _thread(of):
    return getattr(of, "thread", of)


def _line(access):
    """The line number of an access."""
    return line_of(*access[1:])


def _line_text(access):
    """ "line 12", or the kind of operation, as "the copy", of what no line of the program does."""
    line = _line(access)
    return f"line {line}" if line else "the " + _thread(access[0].of).block.launch.name.removeprefix("a ")


@functools.cache
def line_of(code, instruction):
    if code is None:
        return 0
    for start, stop, line in code.co_lines():
        if start <= instruction < stop and line is not None:
            return line
    return code.co_firstlineno


def _access(what, access):
    of = access[0].of
    thread = _thread(of)
    verb = {"read": "reads", "write": "writes", "atomic": "atomically accesses"}[what]
    if thread is not of:
        verb = f"its {of.what}, under way, {verb}"
    _, block, number = (0, "", "") if isinstance(thread, HostAccess) else who(thread, split=True)
    code, line = access[1], _line(access)
    file = code.co_filename if code is not None else ""
    source = linecache.getline(file, line).strip() if file else ""
    return Access(verb, thread.pe, block, number, thread.block.launch.name, file, line, source)


def _two_sets(pair):
    lines = f"line {_line(pair.a_access)}"
    of_a, of_b = pair.a.of, pair.b.of
    if of_a is not _thread(of_a) and of_b is not _thread(of_b) and of_a.thread is of_b.thread:
        which = f"{lines} and {pair.b_line}" if pair.a_line != pair.b_line else f"{lines}, one and the next,"
        return (
            f"the sets of one signal by {which} may arrive in any order, so that the first may remain: "
            "fence() between them, or a wait for an answer of the receiver"
        )
    if pair.a_line != pair.b_line:
        lines += f" and {pair.b_line}"
    return (
        f"{lines}: one signal is set, and set or added to again. Nothing orders the two, so that one may be "
        "lost: let one thread set it, after cuda.syncthreads() if it speaks for others, or let all add"
    )


def _two_words(pair):
    return (
        f"{pair.a_line} and {pair.b_line} access these bytes by atomics of different sizes or types. They "
        "are not atomic for each other: use arrays of one dtype"
    )


def _p_and_g(pair):
    return f"the p of {pair.a_line} may still be under way at {pair.b_line}: quiet() between them"


_ATOMIC = {"p and g": _p_and_g, "sets": _two_sets, "words": _two_words}  # kinds of two atomic accesses


class _Pair:
    """Two unordered accesses: `b` came after `a`, and knows `clock`."""

    def __init__(self, races, at, b_what, b, clock, a_what, a):
        self.races, self.at, self.clock, self.events = races, at, clock, races.events
        self.a_what, self.b_what, self.a_access, self.b_access = a_what, b_what, a, b
        self.a, self.b = a[0], b[0]
        self.a_line, self.b_line = _line_text(a), _line_text(b)

    # -- what is known when the program has ended: also the signals and waits that came too late
    def is_between_threads(self):
        """Whether both are accesses that threads of two blocks make themselves, ordinary ones."""
        a, b = self.a.of, self.b.of
        of_threads = all(_thread(of) is of and hasattr(of.block, "waits") for of in (a, b))
        return of_threads and a.block is not b.block and "atomic" not in (self.a_what, self.b_what)

    def told_in_full(self, race):
        """`race`, with what the signals and waits of both blocks show to be missing."""
        a, b = (self.a, self.a_access, self.a_line), (self.b, self.b_access, self.b_line)
        if self.a_what == "read" and not self._has_waited_before():
            missing = self._untold(b, a) or self._untold(a, b)
        else:
            missing = self._untold(a, b)
        return race if missing is None else replace(race, missing=missing)

    def _has_waited_before(self):
        """`a`, a read, follows a wait for an earlier signal of `b`'s block: `b` is of the next round."""
        return any(w.by_block == self.b.block and w.event <= self.a.events for w in self.a.of.block.waits)

    def _untold(self, x, y):
        """Why the thread of `y` does not know of `x`, as far as signals from the one's block to the other's
        tell."""
        (x, x_access, x_line), (y, y_access, y_line) = x, y
        events = self.events if y is self.b else y.events
        waits = [w for w in y.of.block.waits if w.by_block == x.block]
        before = [w for w in waits if w.event <= events]
        mine = {w.site for w in y.of.block.waits if w.key == y.thread}
        for w in [w for w in before or waits if x.before(w.clock)]:
            line = f"line {_line((None, *w.site))}"
            if w.key == y.thread and w.site[0] is y_access[1] and w.site[1] > y_access[2]:
                return f"{y_line} comes before the wait of {line}, which is for {x_line}: wait first"
            if w.site not in mine:  # else it is of another round
                return (
                    f"the wait of {line} is thread {w.thread}'s, and thread {y.of.thread_id} has not met it "
                    f"since: cuda.syncthreads() after {line} and before {y_line}"
                )
        signals = x.of.block.signals
        for w in reversed(before):
            given = next((s for s in signals if (s.key, s.time) == (w.by, w.at)), None)
            if given is None:
                continue
            line = f"line {_line((None, *given.site))}"
            again = any(s.site == given.site and s.key == given.key and s.time > w.at for s in signals)
            is_before = given.site[0] is x_access[1] and given.site[1] < x_access[2]
            if w.by != x.thread and w.at >> 32 == x.phase and not is_before:
                return (
                    f"thread {given.thread} gives the signal of {line} without having met thread "
                    f"{x.of.thread_id} after {x_line}: cuda.syncthreads() between them"
                )
            if is_before and not again:
                after = "after" if w.by == x.thread else "after, behind cuda.syncthreads()"
                return (
                    f"the signal of {line}, which {y_line} follows, is given before {x_line}: give it {after}"
                )
            if again:
                return f"{x_line} comes a round after the signal of {line} that {y_line} follows: " + (
                    self._another_round(x_line, y_line)
                )
        return None if waits else self._of_an_earlier_launch(x, y, events)

    def _of_an_earlier_launch(self, x, y, events):
        """`y`'s thread has waited for a signal that a kernel before that of `x` had given."""
        for w in y.of.block.waits:
            stream, kernel = self.races.kernel_of_block.get(w.by_block, (None, 0))
            if w.event <= events and stream == x.stream and kernel < x.kernel:
                return (
                    f"the wait of line {_line((None, *w.site))} took the signal of an earlier launch: let "
                    "its value grow with each launch, or reset it, with a barrier of the ranks behind that"
                )
        return None

    @staticmethod
    def _another_round(x_line, y_line):
        return (
            f"to read what was there, a notify after {y_line}, and a wait for that before {x_line}, or "
            f"another slot; to read what comes then, a wait for the next signal before {y_line}"
        )

    def missing(self):
        """What would order them, in one sentence."""
        store, thread = self.a.of, _thread(self.b.of)
        if HostAccess in (type(store), type(thread)):
            return self._of_hosts(_thread(store), thread)
        if isinstance(store, AliasedStore):
            if store.known(thread, self.clock):
                return (
                    f"{self.a_line} stores through a multicast view, another address of the memory than that "
                    f"of {self.b_line}: multimem_fence() between them, and after the wait if there is one"
                )
            self.a = store.issued
        of_a, of_b = self.a.of, self.b.of
        if isinstance(of_b, Load) and (of_a is thread or self.a.before(thread.clock)):
            return (
                f"the {of_b.what} of {self.b_line} may not see what its thread does: "
                "fence_proxy_async_global() before it"
            )
        a_under_way = not isinstance(of_a, Load) and of_a is not _thread(of_a)
        b_under_way = not isinstance(of_b, Load) and of_b is not thread
        if not b_under_way and self._known_to_another():
            return self._known_to_another()
        if a_under_way:
            return self._after_message(of_a)
        if isinstance(of_a, Load):
            return self._after_load(of_a, thread)
        before, launch = _thread(self.a.of).block.launch, _thread(self.b.of).block.launch
        if launch.pdl and launch is not before and launch.stream_key == before.stream_key:
            return f"the kernel begins early, with pdl=True: griddepcontrol_wait() before {self.b_line}"
        if "atomic" in (self.a_what, self.b_what):
            if b_under_way and self.b.of.what == "p" and self.a_what == "read":  # of data, not of a signal
                return self._across_ranks(_thread(self.a.of), _thread(self.b.of))
            return self._atomic()
        return self._missed() or self._released_early() or self._by_place(b_under_way)

    def _of_hosts(self, a, b):
        """One of them, or both, is of a host program."""
        between = f"between {self.a_line} and {self.b_line}"
        if a.pe != b.pe:
            host = a if isinstance(a, HostAccess) else b
            other = b if host is a else a
            return (
                f"nothing orders what the host program of rank {host.pe} does on its stream with rank "
                f"{other.pe}: world.barrier() {between}"
            )
        return (
            "the host's accesses are operations of the current stream (the World's), which does not wait for "
            f"other streams: synchronize the stream of the other, or join both by an event ({between})"
        )

    def _known_to_another(self):
        """Another thread of `b`'s block knows of `a`, but has not met `b`'s since."""
        b = _thread(self.b.of)
        for other in b.block.threads:
            if other is not b and other is not self.a.of and self.a.before(other.clock):
                return (
                    f"thread {other.thread_id} of the block has waited for it, but has not met thread "
                    f"{b.thread_id} since: cuda.syncthreads() before {self.b_line}"
                )
        return None

    def _after_load(self, load, thread):
        """`a` is a read of the TMA."""
        name = f"the {load.what} of {self.a_line} may still read its source at {self.b_line}"
        if thread.block is load.block:
            return f"{name}: mbarrier_wait() between them"
        return f"{name}: mbarrier_wait() after the one, and then what the other waits for"

    # -- `a` belongs to a message under way
    def _after_message(self, message):
        thread, clock = _thread(self.b.of), self.clock
        known = message.issued.thread == getattr(thread, "key", None) or message.issued.before(clock)
        name = f"the {message.what} of {self.a_line}"
        to_itself = self.a_what != "read" and thread.pe == message.target and self._signal_after(message)
        if known and thread.pe == message.pe and not to_itself:
            if self.b.of is not thread and self.a_what != "read" and self.b.of.target == message.target:
                return (
                    f"{name} may still write when that of {self.b_line} does: fence() between them, and not "
                    f"before rank {message.target} has taken the first"
                )
            does = "read its source" if self.a_what == "read" else "write"
            return f"{name} may still {does} at {self.b_line}: quiet() between them"
        other = self._same_counter(message)
        if other:
            return (
                f"{name} is still under way: its signal and that of the {other} go to one word, and the "
                "wait cannot tell them apart: a signal for each message, or fence() between them"
            )
        if known:
            release = self._release_after(message.thread, message.issued.time)
            if release is not None:
                _, site, what, target = release
                by = "the signal" if what in ("release", "signal_op") else f"the {what}"
                # A fence orders what goes to one PE, and nothing that does not go through NVSHMEM.
                order = "fence()" if target == message.target else "quiet()"
                line = _line((None, *site))
                return (
                    f"{name} is not ordered before {by} of line {line}: {order} between them, or put_signal"
                )
            return (
                f"{name} is not ordered before what rank {thread.pe} has waited for: fence() after it, or "
                "put_signal"
            )
        if thread.pe == message.target and self.b_what == "read" and self._round_before(message):
            return f"{name} comes a round after the one that rank {thread.pe} waited for: {self._one_round()}"
        if message.flag is not None:
            return f"rank {thread.pe} does not wait for the signal of {name} before {self.b_line}"
        return (
            f"nothing tells rank {thread.pe} that {name} has arrived: put_signal, or fence() and signal_op "
            f"after it, and a wait before {self.b_line}"
        )

    def _one_round(self):
        return self._another_round(self.a_line, self.b_line)

    def _same_counter(self, message):
        """Another message to the same signal word, whose signal was taken for that of `message`."""
        if message.flag is None:
            return None
        for serial, other in list(self.races.live.items()):
            if other is not message and other.flag == message.flag:
                if self.clock.get(operation_done(serial)):
                    return self._other(message, other.what, other.site)
        # Its data may have been overwritten since; the thread knows of a later signal of the same word.
        for time, site, what, _ in message.thread.noted:
            if time > message.issued.time and what.startswith("put_signal"):
                if self.clock.get(message.issued.thread, 0) >= time and site == message.site:
                    return self._other(message, what, site)
        return None

    @staticmethod
    def _other(message, what, site):
        return f"other {what} there" if site == message.site else f"{what} of line {_line((None, *site))}"

    def _release_after(self, thread, time):
        """The first release of `thread` after `time` that is known."""
        for release in thread.noted:
            if time < release[0] <= self.clock.get(thread.key, 0) and release[2] in SIGNALS:
                return release
        return None

    def _signal_after(self, message):
        """Whether the signal that tells of `message`, too late, goes the same way."""
        release = self._release_after(message.thread, message.issued.time)
        return release is not None and release[2] != "release" and release[3] == message.target

    def _round_before(self, message):
        """Whether an earlier message of the same line is known."""
        thread, get = message.thread, self.clock.get
        return any(
            site == message.site
            and time < message.issued.time
            and (get(thread.key, 0) >= time or get(thread.block.key, 0) > time >> 32)
            for time, site, _, _ in thread.noted
        )

    # -- both, or only `b`, by threads themselves
    def _atomic(self):
        if self.a_what == self.b_what:
            return (
                "atomic accesses of scope 'gpu' are not atomic for threads of another rank: scope 'sys', or "
                "NVSHMEM's atomics"
            )
        ordinary, line = (self.a_what, self.a_line) if self.b_what == "atomic" else (self.b_what, self.b_line)
        use = "ld_acquire or wait" if ordinary == "read" else "st_release or notify"
        return (
            f"the {ordinary} of {line} is an ordinary one of a word that others use as a signal: {use}, or "
            "order it by a barrier"
        )

    def _missed(self):
        """`b`'s thread has seen a release that covers `a`, but did not acquire it."""
        thread, block = _thread(self.b.of), _thread(self.a.of).block
        mates = [] if block is thread.block else [t for t in thread.block.threads if t is not thread]
        missed = itertools.chain(*(reversed(t.missed) for t in (thread, *mates)))
        for kind, _, site, clock, released, acquired in missed:
            if self.a.before(clock):
                line = f"line {_line((None, *site))}"
                if kind == "relaxed":
                    return f"{line} reads the signal relaxed: semantic 'acquire', or threadfence() after it"
                return (
                    f"a release of scope {released!r} and the read of {line}, of scope {acquired!r}, do not "
                    f"reach {self._between()}: scope 'sys' on both sides"
                )
        return None

    def _between(self):
        a, b = _thread(self.a.of), _thread(self.b.of)
        if a.pe != b.pe:
            return f"from rank {a.pe} to rank {b.pe}"
        return "from one block to another"

    def _released_early(self):
        """`b` knows a release of `a`'s block, but one that does not cover `a`."""
        clock, a = self.clock, _thread(self.a.of)
        if a.block is _thread(self.b.of).block:
            return None
        # That of the same thread first, then the latest.
        for key, time in sorted(clock.items(), key=lambda entry: (entry[0] != a.key, -entry[1])):
            if key <= self.a.block or key >= self.a.block + BLOCK or time >> 32 != self.a.phase:
                continue
            releaser = next((t for t in a.block.threads if t.key == key), None)
            release = releaser and next((r for r in reversed(releaser.noted) if r[0] <= time), None)
            if not release:
                continue
            line = _line((None, *release[1]))
            if releaser is a and release[1][0] is self.a_access[1] and release[1][1] > self.a_access[2]:
                signal = f"the signal of line {line} that {self.b_line} follows"
                return f"{self.a_line} comes a round after {signal}: {self._one_round()}"
            if releaser is a:
                return (
                    f"the signal of line {line}, which {self.b_line} follows, is given before {self.a_line}: "
                    "give it after"
                )
            return (
                f"thread {releaser.thread_id} gives the signal of line {line} without having met thread "
                f"{a.thread_id} after {self.a_line}: cuda.syncthreads() between them"
            )
        return None

    def _by_place(self, b_under_way):
        a, b = _thread(self.a.of), _thread(self.b.of)
        lines = f"between {self.a_line} and {self.b_line}"
        if self.a_line == self.b_line:
            lines = f"between one access of {self.a_line} and the next, or one thread alone"
        if a.pe != b.pe or b_under_way:
            return self._across_ranks(a, b)
        if a.block is b.block:
            if a.thread_id >> 5 == b.thread_id >> 5:
                return f"cuda.syncwarp() or cuda.syncthreads() {lines}"
            return f"cuda.syncthreads() {lines}"
        if a.block.launch is b.block.launch:
            return (
                f"the blocks of a grid are not ordered: grid_barrier {lines}, or a release after the one and "
                "an acquire before the other"
            )
        streams = a.block.launch.stream, b.block.launch.stream
        if self.races.machine.defaults.get(a.pe) in streams:
            return (
                "the kernels run on different streams, the default one and a non-blocking one, which do not "
                f"wait for each other: launch both on world.stream, or join them by an event ({lines})"
            )
        return (
            "the kernels run on different streams: record an event after the one, and let the stream of the "
            f"other wait for it ({lines})"
        )

    def _waiting_mate(self, thread):
        """Another thread of `thread`'s block that waits for a signal now."""
        waiters = self.races.machine.scheduler.waiters.values()
        waiting = (w[0] for parked in waiters for w in parked)
        return next((t for t in waiting if t.block is thread.block and t is not thread), None)

    def _across_ranks(self, a, b):
        for thread, what, line in ((a, self.a_what, self.a_line), (b, self.b_what, self.b_line)):
            mate = self._waiting_mate(thread) if what == "read" else None
            if mate is not None:
                return (
                    f"thread {mate.thread_id} of the reader's block still waits for a signal: "
                    f"cuda.syncthreads() after its wait, before {line}"
                )
        done = {"read": "read", "write": "written", "atomic": "accessed"}[self.a_what]
        remedy = "or another buffer" if self.a_what == "read" else "between kernels, a barrier of the ranks"
        return (
            f"nothing tells rank {b.pe} that rank {a.pe} has {done} it: a notify after {self.a_line}, and a "
            f"wait for it before {self.b_line}; {remedy}"
        )
