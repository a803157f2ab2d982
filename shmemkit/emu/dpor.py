"""All schedules of a small program, one for each class of those that do the same: dynamic partial-order
reduction.

A program is run again and again. A schedule is the order of its steps: from one access to a word by which
threads signal each other (waits, notifies, atomics, puts with a signal, quiet, ...) to the next, and the
arrival of each message. Two schedules are equivalent if one becomes the other by swapping neighbouring steps
that are independent: steps of different threads which touch different words, or only read the same ones, or
only add to them. What a step does besides, with ordinary loads and stores, orders nothing as long as there is
no race; so races are looked for, too, and with none found the classes are all that the program can do.

After each run, every pair of dependent steps that nothing but their own order puts in order is looked at: the
later one is to come first in some other run, where no run does so already (`backtrack`). A process that was
followed from a state need not be followed again from there until a step that depends on its own has been
taken (`sleep`). This is Source-DPOR (Abdulla, Aronis, Jonsson, Sagonas: Optimal dynamic partial order
reduction, POPL 2014), with the sleep sets of Godefroid.

A turn of a spin loop that finds nothing changes nothing: a run in which a loop looked too early does what
some run without that turn does. So the loop stops there, and when the others have ended, or wait for it, the
run is redundant. A loop that looked after the last write, and in vain, stops as well: a deadlock.
"""

import itertools
from collections import Counter, defaultdict

from .schedules import Choice
from .vector_clock import STEP

_COMMUTE = frozenset(
    pair for kinds in (("read", "wait"), ("add", "arrive")) for pair in itertools.product(kinds, repeat=2)
)


class Redundant(Exception):
    """Whatever follows has been seen in an equivalent schedule."""


class TooLong(RuntimeError):
    """A run has more steps than can be explored."""


class Step:
    """The `count`-th of a process."""

    __slots__ = ("process", "key", "count", "past", "effects", "depends_on")

    def __init__(self, process, key, count, past):
        self.process, self.key, self.count = process, key, count
        self.past = past  # bits of the steps that come before it in all equivalent schedules, and its own
        self.effects = set()  # (kind, word)
        self.depends_on = []  # indices of steps of which nothing else says that they come before


class State:
    """One on the way of the current run: who can go on, and who does."""

    def __init__(self, enabled, sleep):
        self.enabled, self.sleep = enabled, sleep  # sleep: process -> effects of its step
        self.followed = {}  # likewise: those with which runs have gone on from here
        self.chosen = next(p for p in enabled if p not in sleep)
        self.backtrack = {self.chosen}  # those with which some run must

    def turn_to_next(self):
        """-> whether there is another one to go on with"""
        for process in self.enabled:
            if process in self.backtrack and process not in self.followed and process not in self.sleep:
                self.chosen = process
                return True
        return False


class Explorer(Choice):
    """The choice of one run after the other: ``advance()`` after each says whether there is another.

    Threads must be checked for races: their clocks, which whatever orders threads joins, carry the numbers
    of steps along. A run with more than `max_steps` raises TooLong.
    """

    needs_races = True
    takes_turns = False

    def __init__(self, max_steps=10_000):
        self.max_steps = max_steps
        self.states = []  # before each step of the current run
        self.keys = {}  # process -> its key in clocks
        self._begin_run()

    def _begin_run(self):
        self.redundant = False
        self.steps = []
        self.steps_of = {}  # process -> [indices]
        self.by_key = {}  # key of the process in clocks -> the same lists
        self.accesses = defaultdict(list)  # word -> [(kind, index of the step)]
        self.sent_by = Counter()
        self.ways = defaultdict(list)  # (source, target) -> messages so far
        self.senders = {}  # message -> (its process, index of the step that sent it, processes before it)

    @property
    def schedule(self):
        """Of the current run."""
        return [step.process for step in self.steps]

    def advance(self):
        """A run has ended. -> whether another one is to be made"""
        for i, step in enumerate(self.steps):
            for j in step.depends_on:
                self._reverse(j, i)
        while self.states:
            state = self.states[-1]
            state.followed[state.chosen] = self.steps[len(self.states) - 1].effects
            if state.turn_to_next():
                self._begin_run()
                return True
            self.states.pop()
        return False

    def _reverse(self, j, i):
        """Step i depends on step j. Some run must have it first, with what it needs, but not j, before it."""
        state = self.states[j]
        apart = [k for k in range(j + 1, i) if not self.steps[k].past >> j & 1] + [i]
        bits = sum(1 << k for k in apart)
        first = {self.steps[k].process for k in apart if self.steps[k].past & bits == 1 << k}
        if not any(p in state.backtrack or p in state.sleep for p in first):
            state.backtrack.update([p for p in state.enabled if p in first][:1])

    # -- the choice
    def next(self, ready, network):
        for i, thread in enumerate(ready):
            if not thread.at_turn:  # nobody can see what it does until its next turn
                return i
        self.machine = network.machine
        threads = {self._name(thread): i for i, thread in enumerate(ready)}
        messages = {self.senders[m][0]: m for m in network.deliverable()}
        process = self._choose([*threads, *messages])
        if process in messages:
            return self._arrives(messages[process])
        thread = ready[threads[process]]
        past = 0
        for key, count in thread.clock.items():
            if key >= STEP:
                past |= self.steps[self.by_key[key][count - 1]].past
        step = self._take(process, past)
        thread.learn({step.key: step.count})
        return threads[process]

    def late(self, messages):
        named = {self.senders[m][0]: m for m in messages}
        return self._arrives(named[self._choose([*named])])

    def _choose(self, enabled):
        depth = len(self.steps)
        if depth == len(self.states):
            sleep = self._sleep()
            if all(p in sleep for p in enabled):
                raise Redundant
            self.states.append(State(enabled, sleep))
        return self.states[depth].chosen

    def _sleep(self):
        """Those that need not be followed after the last step: it does not matter to them."""
        if not self.steps:
            return {}
        before, done = self.states[len(self.steps) - 1], self.steps[-1].effects
        return {p: e for p, e in {**before.sleep, **before.followed}.items() if not _dependent(e, done)}

    def polled_in_vain(self):
        """Another run does the same without that poll. But what the others do meanwhile is to be seen."""
        self.redundant = True
        return True

    def stuck(self):
        if self.redundant:
            raise Redundant

    # -- steps
    def _take(self, process, past):
        mine = self.steps_of.setdefault(process, [])
        key = self.keys.setdefault(process, STEP + len(self.keys))
        self.by_key[key] = mine
        i = len(self.steps)
        if i == self.max_steps:
            raise TooLong(
                f"explore(): a run has more than {self.max_steps} steps; an exhaustive exploration takes no "
                "more. Use fewer threads, ranks or rounds, and no loop that counts its polls"
            )
        mine.append(i)
        self.steps.append(Step(process, key, len(mine), past | 1 << i))
        return self.steps[i]

    def _arrives(self, message):
        process, sent, before = self.senders.pop(message)
        past = self.steps[sent].past
        for earlier in before:
            past |= self.steps[self.steps_of[earlier][0]].past
        self._take(process, past)
        return message

    def sent(self, message, thread):
        sender = self._name(thread)
        self.sent_by[sender] += 1
        process, way = (*sender, self.sent_by[sender]), self.ways[message.source, message.target]
        before = [self.senders[m][0] for m in message.after]
        if thread.block.machine.network.delivery == "ordered":
            before += way  # those that have arrived, too
        way.append(process)
        self.senders[message] = process, len(self.steps) - 1, before

    def effect(self, thread, kind, key):
        if not self.steps:
            return
        step, word = self.steps[-1], self._word(thread, key)
        if (kind, word) in step.effects:
            return
        step.effects.add((kind, word))
        accesses = self.accesses[word]
        before = step.past
        for other_kind, j in reversed(accesses):
            # A wait may not have been possible just before the last step that it depends on, but earlier.
            if _clash(kind, other_kind) and not (before if kind == "wait" else step.past) >> j & 1:
                other = self.steps[j]
                if other_kind != "arrive":
                    step.depends_on.append(j)
                step.past |= other.past
                if thread is not None:
                    thread.learn({other.key: other.count})
        accesses.append((kind, len(self.steps) - 1))

    # -- names that are the same in every run
    def _name(self, thread):
        block = thread.block
        stream = self.machine.streams[thread.pe].index(block.launch.stream)
        return thread.pe, stream, block.launch.number, *block.blockIdx, thread.thread_id

    def _word(self, thread, key):
        if isinstance(key, tuple):
            return key
        if self.machine.located(key)[0] is None:
            return "local memory of", thread.pe  # its addresses differ from run to run
        return key - self.machine.memory_address


class Replay(Explorer):
    """One schedule, once more: the processes in the order of their steps."""

    def __init__(self, schedule):
        super().__init__()
        self.given = schedule

    def _choose(self, enabled):
        following = self.given[len(self.steps) : len(self.steps) + 1]
        return following[0] if following and following[0] in enabled else enabled[0]


def _clash(kind, other):
    return (kind, other) not in _COMMUTE


def _dependent(effects, others):
    return any(word == word2 and _clash(kind, kind2) for kind, word in effects for kind2, word2 in others)
