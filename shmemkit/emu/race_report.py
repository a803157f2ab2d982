"""What the emulator says of a data race: who accessed what, on which lines, and what would order it."""

from __future__ import annotations

import functools
import itertools
import linecache
import sys
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any

from shmemkit.support.agreement import ranks_text
from shmemkit.support.call_site import shown_place
from shmemkit.support.notebook import html_table, html_text

from .host_arrays import HostAccess
from .mbarriers import Load
from .multicast_aliases import AliasedStore
from .report import other_name, place, shown_line, user_frame, who
from .vector_clock import BLOCK, operation_done

# What a thread does that others may wait for.
SIGNALS = frozenset(["release", "signal_op", "p", "put_signal", "put_signal_nbi"])


# By the thread of this key and number, at its time; the word's address, and its value, if that is known.
Signal = namedtuple("Signal", "key thread time site word value")
# A wait, the number of the event; what it learnt, and who had released that: keys of block and thread, time;
# the word that it read; its block's barriers so far. `by_block` is None if it learnt nothing, `by`, too, of a
# word that nobody wrote.
Wait = namedtuple("Wait", "event key thread site clock by_block by at word value phase")


@dataclass(frozen=True)
class Access:
    """One side of a race.

    what                  what it did, as "reads" or "its put_nbi, under way, writes"
    rank, block, thread   who did it; block and thread as in reports
    kernel                the kernel, or the operation of a stream
    file, line, source    where; "", 0 and "" if no line of the program does it, as a stream's copy
    """

    what: str
    rank: int
    block: str
    thread: str
    kernel: str
    file: str
    line: int
    source: str

    @property
    def is_write(self) -> bool:
        return self.what.endswith("writes")

    def __str__(self):
        by = f"rank {self.rank} block {self.block} thread {self.thread} in {self.kernel}"
        if not self.block:
            by = f"rank {self.rank}'s host program"
        at = f"\n      {shown_line(self.file, self.line)}" if self.line else ""
        return f"  {by}: {self.what} it{at}"


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders.

    first, second   the accesses, in the order in which this schedule made them
    array, index    the element that they access
    rank            the rank whose memory it is in
    element         the same in words
    missing         what would order them, in one sentence
    note            the name of the array on the other rank, if that is another one; else ""
    also            the other ranks on which the same lines race
    """

    element: str
    array: str
    index: str
    rank: int
    first: Access
    second: Access
    missing: str
    note: str = ""  # the name of the array on the other rank, if that is another one
    also: tuple[int, ...] = ()  # the other ranks on which the same lines race

    def __str__(self):
        return f"{self._where()}\n{self.second}\n{self.first}\n    {self.missing}"

    def _where(self):
        also = f" (the same lines also race on {ranks_text(self.also)})" if self.also else ""
        return f"race on {self.element}{self.note}{also}"

    def _repr_html_(self):
        rows = []
        for a in (self.second, self.first):
            line = shown_place(a.file, a.line) if a.line else ""
            rows.append((a.rank, a.block, a.thread, a.kernel, a.what, line, a.source))
        head = "rank", "block", "thread", "kernel", "access", "line", "source"
        return html_text(self._where(), self.missing, html_table(head, rows))


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
        other_name(races.machine, thread.pe, at) or other_name(races.machine, _thread(earlier[0].of).pe, at),
    )
    if races.machine.timeline is not None:
        races.machine.timeline.race(race, earlier[0], access[0])
    return race, pair if kind is None and pair.may_say_more() else None


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
        # By which reports name memory when the kernels have ended.
        self.arrays = {**_thread(self.a.of).block.launch.arrays, **_thread(self.b.of).block.launch.arrays}
        self.nothing_tells = False  # no other reason is known

    # -- what is known when the program has ended: also the signals and waits that came too late
    def may_say_more(self):
        """Whether both are ordinary accesses that threads of two blocks make themselves, or one is a store of
        another rank's thread, and the other one of a host program."""
        a, b = self.a.of, self.b.of
        if "atomic" in (self.a_what, self.b_what):
            return False
        threads = [of for of in (a, b) if _thread(of) is of and hasattr(of.block, "waits")]
        if len(threads) == 2:
            return a.block is not b.block
        return len(threads) == 1 and HostAccess in (type(a), type(b)) and a.pe != b.pe

    def told_in_full(self, race):
        """`race`, with what the signals and waits of both blocks show to be missing."""
        a, b = (self.a, self.a_access, self.a_line), (self.b, self.b_access, self.b_line)
        store, other = (b, a) if self.a_what == "read" else (a, b)
        missing = None
        if not isinstance(store[0].of, HostAccess):
            missing = self._not_waited_for(store, other)
        if missing is None and HostAccess not in (type(self.a.of), type(self.b.of)):
            if self.a_what == "read" and not self._has_waited_before():
                missing = self._untold(b, a) or self._untold(a, b)
            else:
                missing = self._untold(a, b)
            if missing is None and self.a_what == "read":
                missing = self._too_early_a_value(self.a, self.b)
        return race if missing is None else replace(race, missing=missing)

    def _too_early_a_value(self, x, y):
        """A signal tells of `x`, but the rank of `y` waits for an earlier value of it."""
        signal, wait, sure = self._signal_and_wait(x, y)
        return f"{self._two_values(x, signal, wait)}: wait for {signal.value}" if wait and sure else None

    def _not_waited_for(self, x, y):
        """A signal tells of `x`, but the rank of `y` waits for an earlier value of it, or not at all."""
        (x, _, x_line), (y, _, y_line) = x, y
        signal, wait, sure = self._signal_and_wait(x, y)
        if signal is None:
            return None
        if wait is not None:
            grows = signal.value != wait.value
            remedy = f"wait for {signal.value}" if grows else "let the value grow, and wait for the new one"
            if not sure and isinstance(y.of, HostAccess):
                remedy, sure = f"{remedy}, or world.barrier() between {x_line} and {y_line}", True
            return f"{self._two_values(x, signal, wait)}: {remedy}" if sure else None
        if not self.nothing_tells:
            return None
        array = self._word(signal.word)
        array = array.removesuffix("[0]") if array.endswith("[0]") else array.replace("]", ":]")
        text = (
            f"rank {x.of.pe} announces it with the signal of line {_line((None, *signal.site))}, but "
            f"{self._side(y)} does not wait for that: wait({array}, ...) "
        )
        if isinstance(y.of, HostAccess):
            return f"{text}in a kernel, or world.barrier() between {x_line} and {y_line}"
        return f"{text}before {y_line}"

    def _signal_and_wait(self, x, y) -> tuple[Any, Any, bool]:
        """-> (the signal by which the rank of `y` could know of `x`; the last wait for that word before `y`,
        or None; whether that took an old value, and not that of a round before `x`). The first is None where
        there is none, or where the wait is not to blame."""
        nothing, pe, phase = (None, None, False), _thread(y.of).pe, x.phase
        all_waits = self.races.waits[pe] if isinstance(y.of, HostAccess) else y.of.block.waits
        events, phase_of_y = self.events if y is self.b else y.events, y.phase
        found = nothing
        for s in x.of.block.signals:
            if s.word is None or self.races.pe_of(s.word) != pe or s.time < x.time and s.key == x.thread:
                continue
            if s.key != x.thread and s.time >> 32 <= phase:
                if s.time >> 32 == phase:
                    return nothing  # of a thread that may not have met that of `x`
                continue
            waits = [w for w in all_waits if w.word == s.word]
            if not waits:
                found = (s, None, False) if found is nothing else found
                continue
            before = [w for w in waits if w.event <= events]
            if not before or (before[-1].by, before[-1].at) == (s.key, s.time):
                return nothing
            w = before[-1]
            if s.value is None or w.value > int(s.value):
                return nothing
            came_later = [o for o in waits if (o.by, o.at) == (s.key, s.time)]
            if any(o.key != y.thread and o.phase <= phase_of_y for o in came_later):
                return nothing  # another thread has waited for it
            if self._is_of_an_earlier_launch(w, x):
                return nothing
            same = w.key, w.site, w.by, w.at
            again = any((o.key, o.site, o.by, o.at) == same for o in before[:-1])
            first = w.by is None or not any(o.by_block == x.block and o.event <= events for o in all_waits)
            return s, w, first or again and not came_later
        return found

    def _two_values(self, x, signal, wait):
        """What the wait took, and what it should have."""
        word, pe = self._word(signal.word), self.races.pe_of(signal.word)
        what = "read" if "read" == (self.a_what if x is self.a else self.b_what) else "store"
        return (
            f"the wait of line {_line((None, *wait.site))} on rank {pe} was satisfied by {word} = "
            f"{wait.value}; rank {x.of.pe} announces this {what} with {word} = {signal.value} (line "
            f"{_line((None, *signal.site))})"
        )

    def _side(self, moment):
        """ "rank 1", or its block, if there are several."""
        thread = _thread(moment.of)
        alone = isinstance(thread, HostAccess) or thread.block.launch.n_blocks == 1
        return f"rank {thread.pe}" if alone else who(thread, alone=False)

    def _word(self, at):
        """ "flag[0]" """
        thread = _thread(self.b.of)
        return place(self.races.machine, thread, at, arrays=self.arrays).partition(" on rank ")[0]

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
        for w in [w for w in waits if x.before(w.clock)]:
            line = f"line {_line((None, *w.site))}"
            is_later = w.key == y.thread and w.site[0] is y_access[1] and w.site[1] > y_access[2]
            if not before and (is_later or w.phase > y.phase):
                same = [o for o in y.of.block.waits if o.word == w.word and o.event <= events]
                given = next((s for s in x.of.block.signals if (s.key, s.time) == (w.by, w.at)), None)
                if same and given is not None and given.value is not None and same[-1].value < given.value:
                    return f"{self._two_values(x, given, same[-1])}: wait for {given.value}"
                return f"{y_line} comes before the wait of {line}, which is for {x_line}: wait first"
            if w.site not in mine and w.phase <= y.phase:  # else it is of another round
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
                signal, wait, _ = self._signal_and_wait(x, y)
                if wait is not None and signal.value != wait.value:
                    remedy = self._another_round(x_line, y_line, signal.value)
                    return f"{self._two_values(x, signal, wait)}. {remedy}"
                text = f"{y_line} follows the signal of {line}, but {x_line} runs again after that"
                return f"{text}. {self._another_round(x_line, y_line)}"
        return None if waits else self._of_an_earlier_launch(x, y, events)

    def _of_an_earlier_launch(self, x, y, events):
        """`y`'s thread has waited for a signal that a kernel before that of `x` had given."""
        for w in y.of.block.waits:
            if w.event <= events and self._is_of_an_earlier_launch(w, x):
                return (
                    f"the wait of line {_line((None, *w.site))} took the signal of an earlier launch: let "
                    "its value grow with each launch, or reset it, with a barrier of the ranks behind that"
                )
        return None

    def _is_of_an_earlier_launch(self, wait, x):
        stream, kernel = self.races.kernel_of_block.get(wait.by_block, (None, 0))
        return stream == x.stream and kernel < x.kernel

    @staticmethod
    def _another_round(x_line, y_line, signal="the next signal"):
        return (
            f"If {y_line} needs what was there before, notify after {y_line}, and wait for that before "
            f"{x_line}, or use another slot; if it needs what comes then, wait for {signal} before {y_line}"
        )

    def missing(self) -> Any:
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
            stream = f"what the host program of rank {host.pe} does on its stream"
            text = f"nothing orders {stream} with rank {other.pe}"
            if isinstance(other, HostAccess) or (self.a_what if host is a else self.b_what) != "read":
                return f"{text}: world.barrier() {between}"
            self.nothing_tells = True
            line = self.b_line if host is a else self.a_line
            return (
                f"{text}: a notify after {line} and a wait for it in a kernel of rank {host.pe}, or "
                f"world.barrier() {between}"
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
            text = f"rank {thread.pe} has waited for the {message.what} of {self.a_line} before this one"
            return f"{text}. {self._one_round()}"
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
            # One that has ended gives no other signal.
            releaser: Any = next((t for t in a.block.threads if t.key == key and not t.dead), None)
            release = releaser and next((r for r in reversed(releaser.noted) if r[0] <= time), None)
            if not release:
                continue
            line = _line((None, *release[1]))
            if releaser is a and release[1][0] is self.a_access[1] and release[1][1] > self.a_access[2]:
                text = f"{self.b_line} follows the signal of line {line}"
                return f"{text}, but {self.a_line} runs again after that. {self._one_round()}"
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
        self.nothing_tells = True
        done = {"read": "read", "write": "written", "atomic": "accessed"}[self.a_what]
        remedy = "or another buffer" if self.a_what == "read" else "between kernels, a barrier of the ranks"
        return (
            f"nothing tells rank {b.pe} that rank {a.pe} has {done} it: a notify after {self.a_line}, and a "
            f"wait for it before {self.b_line}; {remedy}"
        )
