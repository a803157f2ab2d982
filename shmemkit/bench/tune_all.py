"""``bench tune``: the tuning table of all collectives, in one run or several.

At each size of an operation it measures the methods that may be the fastest: by the model they take at most
NEAR times the time of the best one. Between two sizes with different methods it measures these two once more.
An operation's entry is written when all its sizes are there. What is not complete is in FILE.part; there the
next run goes on, if the machine and the kernels are the same.

Rank 0 alone looks at files and at the clock, and tells the others: all ranks measure the same.
"""

import dataclasses
import json
import time
from pathlib import Path

from shmemkit.collectives import cost_model, tuning
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.support.settings import listed
from shmemkit.support.whole_files import write_whole

from . import loop
from . import options as kinds
from .cases import CASES, host_of
from .command import Command, Entry
from .measure import Ours
from .results import Row
from .tune import entry_of, times_of

SECONDS = 210  # of the 4 minutes in which a run should be over, but for what begins late
SIZES = "8K:256M:4,256M"
NEAR = 1.6


class Tuner:
    """`table`: the file; `rows`: what was measured, also in earlier runs; `begun`: when this run began."""

    def __init__(self, world, table, seconds):
        self.world, self.table, self.seconds = world, table, seconds
        self.part, self.begun = Path(f"{table}.part"), time.monotonic()
        backend = world.backend
        self.place = [backend.gpu_name, world.n_ranks, world.n_nodes]
        self.gpu, _ = cost_model.gpu_of(backend.gpu_name, backend.multiprocessors)
        self.rows = [*self._from_first(self._read)]  # ranks of the emulator get the same list

    def _from_first(self, ask):
        """What ``ask()`` returns on rank 0, or raises: on all ranks. Collective."""
        told = None
        if self.world.rank == 0:
            try:
                told = ask(), None
            except (OSError, ValueError) as error:
                told = None, str(error)
        answer, error = self.world.host_allgather(told)[0]
        if error is not None:
            raise SystemExit(f"tune: {error}")
        return answer

    def _about(self):
        return {"place": self.place, "digests": tuning.digests()}

    def _read(self):
        if self.table.exists():
            tuning.read(self.table)  # a broken one is refused before anything is measured
        self.table.parent.mkdir(parents=True, exist_ok=True)
        if not self.part.exists():
            return []
        kept = json.loads(self.part.read_text())
        if {key: kept.get(key) for key in ("place", "digests")} != self._about():
            return []
        return [Row(**row) for row in kept["rows"]]

    def keep(self, left):
        """Write FILE.part, or remove it if nothing is `left`."""
        if self.world.rank == 0 and not left:
            self.part.unlink(missing_ok=True)
        elif self.world.rank == 0:
            rows = [{k: v for k, v in dataclasses.asdict(row).items() if v is not None} for row in self.rows]
            write_whole(self.part, json.dumps({**self._about(), "rows": rows}))

    def add(self, *args, **about):
        self.rows.append(Row(*args, **about))

    def in_time(self):
        """Collective."""
        return self._from_first(lambda: time.monotonic() - self.begun < self.seconds)

    def wanted(self, op, size):
        """-> [(method, output)] to measure at `size`"""
        found = []
        for output in outputs_of(op):
            times = cost_model.times(op, self.world.n_ranks, size, output == "symmetric", self.gpu)
            most = NEAR * min(times.values(), default=0)
            found += [(name, output) for name in candidates(op) if times.get(name, 0) <= most]
        return found

    def between(self, op, sizes):
        """-> {size: [(method, output)]}, between two neighbours of `sizes` with different methods"""
        found = {}
        for output in outputs_of(op):
            times = times_of(self.rows, op, output)
            known = [size for size in sizes if size in times]
            for low, high in zip(known, known[1:], strict=False):
                pair = {min(times[size], key=times[size].get) for size in (low, high)}
                if len(pair) == 2 and high > 2 * low:
                    middle = 1 << (low * high).bit_length() // 2
                    found.setdefault(middle, []).extend((name, output) for name in sorted(pair))
        return found

    def has(self, op, nbytes, method, output):
        return any(
            (row.op, row.bytes, row.method, row.out or "private") == (op, nbytes, method, output)
            for row in self.rows
        )


def outputs_of(op):
    return tuning.OUTPUTS[:1] if host_of(op)._rooted else tuning.OUTPUTS


def candidates(op):
    """The methods that may be the fastest: by the model, or all where it knows none."""
    return cost_model.methods(op) or host_of(op).methods


def run(world, results, options, progress):
    """Measure, and write entries. Collective."""
    if not options.table and world.backend.name == "emulator":
        raise SystemExit(
            "tune: this is the emulator, whose times mean nothing. To try the command out, give --table FILE"
        )
    table = options.table or tuning.user_file()
    tuner = Tuner(world, table, options.seconds)
    left, problems = [], []
    with progress(2 * len(options.ops) * len(options.sizes)) as step:
        for op in options.ops:
            plan = {size: tuner.wanted(op, size) for size in options.sizes}
            done = _measure_all(tuner, options, op, plan, step)
            rounded = sorted({row.bytes for row in tuner.rows if row.op == op})
            more = tuner.between(op, rounded) if done else {}
            if not (done and _measure_all(tuner, options, op, more, step)):
                left.append(op)
                continue
            problems += _write(tuner, op)
    tuner.keep(left)
    results.rows += [row for row in tuner.rows if row.op in options.ops]
    if world.rank == 0:
        state = f"{', '.join(left)} are not complete: run it again" if left else "complete"
        print(f"tune: {table} has what was measured; {state}", flush=True)
    if problems:
        raise SystemExit(f"tune: no entry was written where {listed(problems, 'and')}")


def _measure_all(tuner, options, op, plan, step):
    """-> whether all of `plan`, {size: [(method, output)]}, is there now. Collective."""
    world = tuner.world
    for size, wanted in plan.items():
        case = CASES[op](world, size, as_dtype(options.dtype))
        entries = [
            Entry(Ours(world, method, output == "symmetric"))
            for method, output in wanted
            if not tuner.has(op, case.bytes, method, output)
        ]
        if not entries:
            continue
        if not tuner.in_time():
            return False
        loop.measure_case(world, tuner, options, step, False, entries, {None: case}, f"{op}, ")
        tuner.keep([op])
    return True


def _write(tuner, op):
    """Write the entry. -> what is wrong, none or one. Collective."""
    try:
        entry = entry_of(tuner.world, op, tuner.rows, candidates(op), outputs_of(op))
    except ValueError as error:  # on all ranks, which have the same rows
        return [str(error)]
    tuner._from_first(lambda: tuning.update(tuner.table, op, entry))
    return []


_file = f"the table; default: the user's, {tuning.user_file()}. FILE.part keeps what is not complete yet"
_seconds = "begin no case later than so many seconds from the start"
_ops = {"type": kinds.some_of(lambda: tuple(CASES)), "default": list(CASES), "metavar": "A,B"}
COMMANDS = [
    Command(
        "tune",
        "the tuning table of all collectives: the methods that may be the fastest, each at some sizes",
        run=run,
        sizes="of the full array; between two with different methods it measures one more",
        usual=SIZES,
        dtypes=("bfloat16", "float16", "float32"),
        iters="20 up to 4 MB, 5 above",
        options=[
            ("--ops", _ops | {"help": f"some of {', '.join(CASES)}; default: all"}),
            ("--seconds", kinds.number(_seconds, SECONDS)),
            ("--table", {"type": kinds.path, "metavar": "FILE", "help": _file}),
        ],
    )
]
