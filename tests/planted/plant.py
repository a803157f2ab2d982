"""What a planted bug is, and how it is run and judged.

A program has two behaviours: right, and with its bug. It is a function of one argument, ``correct``. It
makes the kernel, with the bug or without it, and returns ``main(world)``, which returns what this rank ends
up with. Its label says how the bug shows, and which paragraph of the documentation the bug breaks. Both
follow from that paragraph, and not from what the emulator reports. Most are

    @planted(RaceError, RELEASE, "slot", "wait", right=[[-1], [7]])
    def missing_wait(correct):
        \"\"\"The receiver reads its slot without waiting for the signal.\"\"\"

        @cuda.jit
        def kernel(slot, full, out):
            if rank() == 0:
                symm_at(slot, 1)[0] = 7  # first
                notify(full, 1, 1)
            else:
                if correct:
                    wait(full, 1, "sys", "acquire", 1)
                out[0] = slot[0]  # second

        return launches(kernel, ints(), signals())

A race is between a line marked ``# first`` and one marked ``# second``, in either order. Several lines may
have one mark, and a line may have both. The right program has no race, and gives the right result in all
schedules.
"""

import dataclasses
import functools
import inspect
import re

import numpy as np

import shmemkit as sk
from shmemkit.emu import RaceError

# Paragraphs: a page in docs/, and a heading or bold words of it.
RACE = "races: What a race is"
SIGNALS = "races: Signals"
ATOMICS = "races: Atomics"
SPINNING = "races: Spinning"
HOSTS = "races: Host programs"
THREADS = "memory_ordering: Threads"
BARRIERS = "memory_ordering: Barriers of ranks"
COLLECTIVES = "memory_ordering: Collectives"
RELEASE = "memory_ordering: Release and acquire"
WAITS = "memory_ordering: A wait"
COUNTS = "memory_ordering: Signals that count"
PUTS = "memory_ordering: Puts"
STREAMS = "memory_ordering: Streams and hosts"
MULTICAST = "memory_ordering: Multicast"
TMA = "memory_ordering: The TMA"
WORDS = "protocols: Words"
PACKETS = "protocols: Packets"
DOUBLE_BUFFER = "protocols: Double-buffer lemma"
PROGRESS = "protocols: Ascending-order progress"
CREDITS = "protocols: Credit lemma"
OWNERS = "protocols: Whose slots they are"
BOUNDS = "emulator: out of bounds"
UNWRITTEN = "emulator: reads memory of `sk.empty` that nobody has written"
FREED = "emulator: use after free"
SAME_CALLS = "emulator: Calls that do not belong together"

WRONG = "wrong result"
DELIVERIES = "eager", "ordered", "unordered"
HEAP = 1 << 14
PLANTED = []


@dataclasses.dataclass(frozen=True, repr=False)
class Planted:
    found: object  # how the bug shows: an error of shmemkit.emu, or WRONG
    paragraph: str
    details: tuple  # the arrays of a race, and words of what is missing; or words of the report
    make: object
    right: list  # what the right program gives on each rank
    ranks: int = 2
    delivery: str = "eager"  # with seed: the schedule that finds the bug
    seed: int | None = None
    local_size: int | None = None
    source: tuple = ()  # kernels and functions whose lines are marked, besides those of `make`
    way: str = ""  # which of several programs by one function
    out_of_reach: str = ""  # why the emulator does not find the bug

    @property
    def name(self):
        name = f"{self.make.__module__.rpartition('.')[2]}-{self.make.__name__}"
        return f"{name}-{self.way}" if self.way else name

    @property
    def reason(self):
        return " ".join(self.make.__doc__.split())

    def run(self, correct, delivery="eager", seed=None):
        """-> what each rank ends up with"""
        main = self.make(correct)
        options = dict(local_size=self.local_size, heap_size=HEAP, races=True, delivery=delivery, seed=seed)
        return sk.emu.run(lambda: main(sk.init()), self.ranks, **options)

    def outcome(self):
        """Run the program with its bug. -> the error, or what each rank ends up with"""
        try:
            return self.run(False, self.delivery, self.seed)
        except Exception as error:
            return error

    def is_found(self, outcome):
        if self.found is WRONG:
            return not isinstance(outcome, Exception) and outcome != self.right
        return type(outcome) is self.found

    def differs(self, outcome):
        """What the report of a bug that was found says otherwise than it should, or None."""
        if self.found is WRONG:
            return None
        if (outcome.delivery, outcome.seed) != (self.delivery, self.seed):
            return f"schedule {outcome.delivery}, {outcome.seed}"
        if self.found is not RaceError:
            absent = [words for words in self.details if words not in str(outcome)]
            return f"not in the report: {absent}" if absent else None
        arrays, *words = self.details
        if (found := {race.array for race in outcome.races}) != set(arrays.split()):
            return f"races on {found}"
        first, second = self.marked("first"), self.marked("second")
        lines = [(race.first.line, race.second.line) for race in outcome.races]
        if not all(a in first and b in second or b in first and a in second for a, b in lines):
            return f"lines {lines}; marked are {first} and {second}"
        missing = [race.missing for race in outcome.races]
        return None if any(all(w in each for w in words) for each in missing) else f"missing: {missing}"

    def marked(self, mark):
        """Numbers of the lines that have a comment with the word `mark`."""
        found = []
        for function in (self.make.__wrapped__, *self.source):
            lines, start = inspect.getsourcelines(getattr(function, "py_func", function))
            found += [start + i for i, line in enumerate(lines) if re.search(rf"#.*\b{mark}\b", line)]
        return found

    def alarm(self, seeds, deliveries=DELIVERIES):
        """What goes wrong with the right program under some schedules. -> text, or None"""
        for delivery in deliveries:
            for seed in (None, *range(seeds)):
                try:
                    given = self.run(True, delivery, seed)
                except Exception as error:
                    return f"delivery {delivery}, seed {seed}: {type(error).__name__}: {error}"
                if given != self.right:
                    return f"delivery {delivery}, seed {seed}: gives {given}, not {self.right}"
        return None


def planted(found, paragraph, *details, right, **options):
    """Decorator: ``make(correct)`` becomes a planted bug. `Planted` says what the arguments are."""

    def register(make):
        make = functools.cache(make)
        case = Planted(found, paragraph, details, make, right, **options)
        if found is RaceError and not (case.marked("first") and case.marked("second")):
            raise ValueError(f"{case.name}: a race marks its lines")
        PLANTED.append(case)
        return make

    return register


# ---- what programs are made of


def launches(kernel, *arrays, blocks=1, threads=1, out=1):
    """-> main(world), which launches `kernel` by ``result``"""
    return lambda world: result(world, kernel[blocks, threads], *arrays, out=out)


def result(world, launch, *arrays, out=1):
    """Call ``launch(*arrays, out)``, out being `out` integers of this rank, at first -1. -> what they are in
    the end. The functions below make arrays for it."""
    found = np.full(out, -1, "int32")
    launch(*(array(world) if inspect.isfunction(array) else array for array in arrays), found)
    world.synchronize()
    return found.tolist()


def ints(shape=1, dtype="int32"):
    """Symmetric zeros."""
    return lambda world: sk.zeros(shape, dtype)


def filled(value, n=1, step=0):
    """n symmetric integers: value + step * rank."""
    return lambda world: sk.full(n, value + step * world.rank, "int32")


def signals(n=1):
    return lambda world: sk.signals(n)


def private(n=1, dtype="int32"):
    """Zeros of one rank alone."""
    return lambda world: np.zeros(n, dtype)
