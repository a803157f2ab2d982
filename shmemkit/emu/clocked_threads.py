"""Threads and blocks whose accesses are checked for races: they keep clocks. See ``races.py``."""

import collections
import sys

from .errors import EmulatorError
from .grid import Block
from .race_report import SIGNALS, Signal, Wait
from .report import kernel_line, who
from .scheduler import COMPARE
from .shadow_arrays import Tracked, kernel_site, untracked
from .spin_loops import state_of
from .thread import Thread, address_of, converted
from .vector_clock import Moment, joined

LOOK = 256  # loads of the same, after which a thread looks whether it spins; then after twice as many
NOTED = 128  # signals, and waits, that a block remembers for reports
JOINED = 64  # pairs of clocks that a block remembers


class CheckedThread(Thread):
    __slots__ = (
        *("key", "clock", "releases", "moment", "fences", "unfenced", "missed", "heard"),
        *("known_write", "known_read", "noted", "proxy", "reads_again", "looks_at", "was"),
    )

    def __init__(self, block, index, thread_id):
        Thread.__init__(self, block, index, thread_id)
        self.key = block.key + 1 + thread_id
        self.clock = block.launch.clock  # others may have the same dictionary
        self.releases = 1  # so far, and one: times begin at 1
        self.moment = None  # of its accesses, until the next release or barrier
        self.fences = {}  # scope -> clock at the last fence
        self.unfenced = {}  # (scope, PE, block, scope of the load) -> what relaxed loads have seen since
        self.missed = []  # what was seen but not learnt, for reports
        self.heard = None  # the clock that was learnt last
        self.known_write = self.known_read = None  # Moments before its next access
        self.proxy = self.clock  # what its asynchronous copies know: its clock at its last fence of proxies
        self.reads_again, self.looks_at, self.was = 0, LOOK, None  # see look_for_spin
        self.noted = []  # (time, site, what, target PE) of the last releases, for reports

    # -- clocks
    def now(self):
        """Return the Moment of the thread's accesses until its next release or barrier."""
        block = self.block
        launch, time, events = block.launch, block.phase << 32 | self.releases, block.machine.races.events
        if block.machine.timeline is not None:
            block.machine.timeline.period(self, time)
        self.moment = Moment(
            block.key, block.phase, self.key, time, launch.stream_key, launch.number, self, events
        )
        return self.moment

    def released(self):
        """Return a clock for others, of all that the thread did and knows. Its next accesses are later."""
        clock = dict(self.clock)
        clock[self.key] = self.block.phase << 32 | self.releases
        self.releases += 1
        self.moment = None
        return clock

    def came(self):
        return self.moment or self.now(), self.released()

    def note_release(self, site, what, target=None, word=None, value=None):
        """`word`: the address of the signal, `value`: what it holds now, if that is known."""
        time = self.block.phase << 32 | self.releases
        self.noted.append((time, site, what, target))
        del self.noted[:-8]
        if what in SIGNALS:
            self.block.machine.races.events += 1
            self.block.signals.append(Signal(self.key, self.thread_id, time, site, word, value))

    def note_wait(self, word, write, clock=None):
        """The thread has seen `write` in the word at address `word`, and learnt `clock` from it, if any."""
        races, moment = self.block.machine.races, write.moment
        by = (None, None, None) if moment is None else (moment.block, moment.thread, moment.time)
        if clock is None:
            by, clock = (None, *by[1:]), {}
        races.events += 1
        value = int.from_bytes(write.bytes, sys.byteorder, signed=True)
        mine = self.key, self.thread_id, kernel_site()
        wait = Wait(races.events, *mine, clock, *by, word, value, self.block.phase)
        self.block.waits.append(wait)
        races.waits[self.pe].append(wait)
        self.moment = None  # the next accesses come after it

    def learn(self, clock):
        """From now on the thread knows what `clock` does."""
        if clock is not self.heard:
            self.clock, self.heard = self.block.clock_of_both(self.clock, clock), clock

    def adopt(self, clock):
        """After a barrier: `clock` is what all its threads know."""
        self.clock, self.moment, self.heard = clock, None, None

    def let_go(self):
        Thread.let_go(self)
        self.moment = self.known_write = self.known_read = None
        self.missed = self.noted = ()

    def griddepcontrol_wait(self):
        launch = self.block.launch
        launch.has_waited = True
        if self.clock is launch.clock:
            self.adopt(launch.after)
        else:
            self.learn(launch.after)

    def fence_proxy(self):
        self.proxy = self.released()

    # -- ordinary loads
    def look_for_spin(self):
        """The thread has read ordinary memory many times since its last release or barrier. If it stands
        where it stood, with the same variables and memory, it spins for ever: nobody else runs meanwhile."""
        moment, states = self.was or (None, None)
        if moment is not self.moment:
            self.was, self.reads_again, self.looks_at = (self.moment, {}), 0, LOOK
            return
        self.looks_at *= 2
        state = tuple(state_of(sys._getframe(2), True))
        if state in states:
            memory = self.block.machine.races.fingerprint()
            if states[state] == memory:
                raise EmulatorError(
                    f"{who(self)} spins on an ordinary load:\n      {kernel_line(sys._getframe(2))}\n    the "
                    "compiler may load it only once, and nothing is acquired: use wait() or ld_acquire()"
                )
            states[state] = memory
        else:
            states[state] = None

    # -- memory that others wait on
    def wait(self, array, index, compare, value, scope="sys", semantic="acquire"):
        plain, holds = untracked(array), COMPARE[compare]
        Thread.wait(self, plain, index, compare, value)
        value = converted(value, plain.dtype)
        races, ordered = self.block.machine.races, semantic == "acquire"
        return races.waited_for(self, array, index, lambda seen: holds(seen, value), scope, ordered)

    def wait_word(self, array, index, is_satisfied, why, shown=str):
        Thread.wait_word(self, untracked(array), index, is_satisfied, why, shown)
        return self.block.machine.races.waited_for(self, array, index, is_satisfied, "sys", False)

    def wait_line(self, line, is_satisfied, why):
        words = Thread.wait_line(self, line, is_satisfied, why)
        for i in range(line.size - 1):
            self.block.machine.races.access_word(line, i, self, "sys", True, False)
        return words

    def acquired(self, key):
        self.block.machine.races.acquire(self, key, "sys")

    def copy(self, dst, src, first, last):
        self.block.effects += 1
        access = (self.moment or self.now(), *kernel_site())
        for array, act in ((src, "read"), (dst, "write")):
            if isinstance(array, Tracked):
                size = array.itemsize
                offset, n_bytes = array.first + first * size, (last - first) * size
                getattr(array.region, act)(offset, n_bytes, self.clock, access)
        Thread.copy(self, untracked(dst), src, first, last)

    def bytes_of(self, what, array, first, last):
        if isinstance(array, Tracked) and last > first:
            access = (self.moment or self.now(), *kernel_site())
            getattr(array.region, what)(array.first + first, last - first, self.clock, access)
        return Thread.bytes_of(self, what, untracked(array), first, last)

    def touch_bytes(self, what, array, firsts, n_bytes):
        if isinstance(array, Tracked):
            access, act = (self.moment or self.now(), *kernel_site()), getattr(array.region, what)
            for first in firsts:
                act(array.first + int(first), n_bytes, self.clock, access)

    def touch(self, what, array, limit=None):
        if isinstance(array, Tracked):
            array.touch(what, self.clock, (self.moment or self.now(), *kernel_site()), limit=limit)

    def written_since(self, array, came):
        if isinstance(array, Tracked):
            moment, clock = came
            array.region.check_reads(array.first, array.nbytes, clock, (moment, *kernel_site()))

    def spin_load(self, array, index, scope="sys"):
        value = Thread.spin_load(self, untracked(array), index)
        races = self.block.machine.races
        races.access_word(array, index, self, scope, True, False)
        races.acquire(self, address_of(array, index), scope)
        return value

    def store(self, array, index, value, scope="sys", semantic="release", check=None):
        races, plain, key = self.block.machine.races, untracked(array), address_of(array, index)
        self.turn("write", key)
        if check is not None:
            check(self, plain, index)  # the emulator looks, not the program: no access
        history, is_release = races.history(key, plain.itemsize), semantic == "release"
        races.access_word(array, index, self, scope, False, True, signal="set" if is_release else None)
        moment = self.moment
        self.write(plain, index, value)
        if is_release:
            self.note_release(kernel_site(), "release", None, key, plain[index])
            races.released(self, moment, history, scope, keep=False)
        else:
            races.written_relaxed(self, moment, history, scope, keep=False)

    def store_line(self, line, words, check=None):
        races, plain = self.block.machine.races, untracked(line)
        keys = [address_of(plain, i) for i in range(plain.size)]
        histories = [races.history(key, plain.itemsize) for key in keys]
        Thread.store_line(self, plain, words, check)
        for i, history in enumerate(histories):
            races.access_word(line, i, self, "sys", False, True)
            races.written_relaxed(self, self.moment or self.now(), history, "sys", keep=False)

    def atomic(self, array, index, function, scope="gpu", semantic="relaxed"):
        races, key = self.block.machine.races, address_of(array, index)
        plain = untracked(array)
        self.turn()
        history = races.history(key, plain.itemsize)
        old, changed = self.update(plain, index, key, function)
        signal = "add" if semantic == "release" else None
        races.access_word(array, index, self, scope, True, function is not None, signal=signal)
        moment = self.moment or self.now()
        races.acquire(self, key, scope, ordered=False)
        if not changed:
            pass  # nobody who reads the word can know of this access
        elif semantic == "release":
            self.note_release(kernel_site(), "release", None, key, plain[index])
            races.released(self, moment, history, scope, keep=True)
        else:
            races.written_relaxed(self, moment, history, scope, keep=True)
        self.updated(key, old, changed)
        return old

    def threadfence(self, scope):
        self.block.machine.races.threadfence(self, scope)

    # -- synchronizing with other threads
    def rendezvous(self, scope, value, function, mask=0xFFFFFFFF, what=None):
        block, races = self.block, self.block.machine.races

        def order():
            if scope == "block":
                races.block_barrier([block])
            else:
                first = self.thread_id & ~31
                lanes = block.threads[first : first + 32]
                races.barrier_of([t for t in lanes if mask >> t.thread_id % 32 & 1 and not t.dead])

        def last(values):
            order()
            result = function(values)
            order()  # all of them have done it
            return result

        return Thread.rendezvous(self, scope, value, last, mask, what)

    def grid_barrier(self):
        self.block.effects += 1
        launch = self.block.launch
        launch.check_grid_barrier()
        launch.rendezvous.join(
            self, None, lambda values: self.block.machine.races.block_barrier(launch.blocks)
        )


class CheckedBlock(Block):
    thread = CheckedThread

    def __init__(self, launch, index, number):
        launch.machine.races.new_block(self, launch)
        self.signals, self.waits = collections.deque(maxlen=NOTED), collections.deque(maxlen=NOTED)
        Block.__init__(self, launch, index, number)
        self.joined = {}  # ids of two clocks -> them, and what both know

    def clock_of_both(self, mine, other):
        """-> a clock, not to be changed. Threads that wait for the same know the same before, mostly."""
        known = self.joined.get((id(mine), id(other)))
        if known is None:
            clock = joined(mine, other)
            self.machine.races.shorten(clock)
            if len(self.joined) == JOINED:
                del self.joined[next(iter(self.joined))]  # the oldest
            known = self.joined[id(mine), id(other)] = mine, other, clock
        return known[2]

    def release(self):
        if self.open:
            self.check_calls()
        self.machine.races.block_barrier([self])
        Block.release(self)

    def leave(self, thread):
        self.machine.races.thread_ended(thread)
        thread.moment = thread.known_write = thread.known_read = None  # it is no cycle
        Block.leave(self, thread)
        if not self.alive:
            self.joined.clear()
