"""What a case is, and how a case is run and judged.

A case is a small program with a label. The label and its reason follow from the specification that `spec`
names, and not from what the emulator reports:

    @case(RACE, "OpenSHMEM, shmem_fence: ...", ranks=2)
    def put_and_signal_op_without_fence(world):
        \"\"\"Why it is a race, in one or two sentences.\"\"\"

A race marks the lines that conflict with ``# first`` and ``# second``. Several lines may have one mark, and a
line may have both. The report is right if one of its races is between a first and a second line, in either
order, and if all others are between marked lines, too. A right program names what each rank ``gives``. A
wrong program that the emulator does not find says why it is ``out_of_reach``.
"""

import dataclasses
import inspect
import re

import shmemkit as sk
from shmemkit.emu import RaceError

__all__ = ["CASES", "DELIVERIES", "ERROR", "RACE", "RIGHT", "Case", "case"]

RIGHT, RACE = "right", "race"
ERROR = "error"  # a message may be lost: any error of the emulator will do
DELIVERIES = "eager", "ordered", "unordered"
HEAP = 1 << 16
CASES = []


@dataclasses.dataclass(frozen=True)
class Case:
    label: str
    spec: str  # the paragraph that the label follows from
    main: object  # main(world) -> what this rank ends up with
    ranks: int
    gives: object  # of a right program: what every rank gives, or a list of what each gives
    schedules: bool  # the race is there in some schedules only
    local_size: object
    out_of_reach: str  # of a wrong program that is not found: why; else empty

    @property
    def name(self):
        return self.main.__name__

    @property
    def group(self):
        return self.main.__module__.rpartition(".")[2]

    @property
    def reason(self):
        return " ".join(self.main.__doc__.split())

    def marked(self, mark):
        """The numbers of the lines with this mark."""
        lines, start = inspect.getsourcelines(self.main)
        return {start + i for i, line in enumerate(lines) if re.search(rf"#.*\b{mark}\b", line)}

    def run(self, races, **schedule):
        """-> what each rank ends up with"""
        options = dict(local_size=self.local_size, heap_size=HEAP, races=races, **schedule)
        return sk.emu.run(lambda: self.main(sk.init()), self.ranks, **options)

    def check(self, races=True, **schedule):
        """Run a right program, and compare what it gives."""
        found = self.run(races, **schedule)
        each = self.gives if isinstance(self.gives, list) else [self.gives] * self.ranks
        assert found == each, f"{self.name} gives {found}, not {each}"

    def report(self):
        """What the emulator reports of this program in one run. Where some schedules have the race, in the
        first run that has something to report. -> the exception, or None"""
        for schedule in self.all_schedules(20) if self.schedules else [{}]:
            try:
                self.run(True, **schedule)
            except Exception as error:
                return error
        return None

    def alarm(self, seeds=5):
        """What goes wrong with a right program by default and under some schedules. -> an exception, or "
        "None"""
        for schedule in [{}, *self.all_schedules(seeds)]:
            try:
                self.check(**schedule)
            except Exception as error:
                return error
        return None

    @staticmethod
    def all_schedules(seeds):
        return [dict(delivery=delivery, seed=seed) for delivery in DELIVERIES for seed in range(seeds)]

    def found(self, error):
        """Whether `error` is what was to be found."""
        return isinstance(error, RaceError if self.label == RACE else Exception)

    def lines_right(self, error):
        """Whether the races of a report are those that are marked."""
        if self.label == ERROR:
            return True
        first, second = self.marked("first"), self.marked("second")
        pairs = [(race.first.line, race.second.line) for race in error.races]
        planted = [a in first and b in second or a in second and b in first for a, b in pairs]
        return any(planted) and {line for pair in pairs for line in pair} <= first | second


def case(label, spec, ranks=2, gives=None, schedules=False, local_size=None, out_of_reach=""):
    """Decorator: ``main(world)`` becomes a case."""

    def register(main):
        added = Case(label, spec, main, ranks, gives, schedules, local_size, out_of_reach)
        if (label == RIGHT) != (gives is not None):
            raise ValueError(f"{added.name}: a right program, and no other, names what it gives")
        if (label == RACE) != bool(added.marked("first") and added.marked("second")):
            raise ValueError(f"{added.name}: a race, and no other program, marks its lines")
        if label == RIGHT and out_of_reach:
            raise ValueError(f"{added.name}: a right program has nothing to find")
        CASES.append(added)
        return main

    return register
