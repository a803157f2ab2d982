"""``bench --compare OLD.json``: which rows have become slower than those of an earlier run.

All rows are measured, then all of them again, as often as ``--runs`` says: a disturbance of the machine hits
all rows and not one. A row is slower if its median is longer by more than 3 %, by which times of two
processes differ, and by more than three times the median deviation of the runs, old and new. If one is, all
runs are made once more, and the medians of all count. NCCL, cuBLAS and PyTorch are not judged: their times
tell whether the machine is the same.
"""

import shlex
import statistics

from shmemkit.collectives.tuning import MARGIN

from .results import COMPETITORS, ranks_of

RUNS = 3  # unless --runs says otherwise
NOT_AGAIN = "--compare", "--json", "--nccl", "--plot", "--runs"  # options of the old command
# What must be as it was.
SETTINGS = "command dtype layout iters tokens hidden experts top_k batches batch_size".split()


def arguments_of(results):
    """-> the arguments of the command that measured `results`, but for its files and runs. ValueError for one
    with --tune."""
    found, skipping = [], False
    for argument in shlex.split(results.command)[3:]:  # behind python3 -m shmemkit.bench
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            if name == "--tune":
                raise ValueError("it was written by a command with --tune; give a file of one without")
            skipping = name in NOT_AGAIN
        if not skipping:
            found.append(argument)
    return found


def check_settings(old, new):
    """ValueError unless the options `new` are those of the old command, `old`, but for what is measured."""
    for name in SETTINGS:
        then, now = getattr(old, name, None), getattr(new, name, None)
        if then != now:
            option = "the command" if name == "command" else f"--{name.replace('_', '-')}"
            then, now = then or "not given", now or "not given"
            raise ValueError(f"{option} is {now}; it must be as in the file, {then}")


def check_machine(old, new):
    """ValueError unless `old` was measured where `new` is."""
    then, now = (
        f"{ranks_of(results.n_ranks)} of {results.machine['gpu']} on {results.machine['n_nodes']} node(s)"
        for results in (old, new)
    )
    if then != now:
        raise ValueError(f"the file is of {then}; here are {now}. Compare on the same machine")


class Comparison:
    """What `new` has of `old`.

    pairs   [(old row, new row), ...] that have a time in both, ours
    slower  those of them that have become slower
    failed  our new rows that have no time, and had one
    others  our old rows that were not measured now
    drift   the competitors' new times over their old ones, the geometric mean; None without any
    """

    def __init__(self, old, new):
        now = {row.key: row for row in new.rows}
        then = {row.key: row for row in old.rows if row.us and not row.note}
        both = [(row, now[key]) for key, row in then.items() if key in now]
        ran = [(before, after) for before, after in both if after.us and not after.note]
        self.pairs = [pair for pair in ran if pair[0].method not in COMPETITORS]
        self.slower = [pair for pair in self.pairs if _slower(*pair)]
        theirs = [after.us / before.us for before, after in ran if before.method in COMPETITORS]
        self.drift = statistics.geometric_mean(theirs) if theirs else None
        ours = {key: row for key, row in then.items() if row.method not in COMPETITORS}
        self.failed = [now[key] for key in ours if key in now and (now[key].note or not now[key].us)]
        self.others = [row for key, row in ours.items() if key not in now]

    @property
    def passed(self):
        """Whether something was compared, and nothing is slower or has failed."""
        return bool(self.pairs) and not self.slower and not self.failed


def _slower(old, new):
    noise = 3 * max(_deviation(old), _deviation(new))
    return new.us - old.us > max(MARGIN * old.us, noise)


def _deviation(row):
    """The median of the runs' deviations from their median."""
    return statistics.median(abs(us - row.us) for us in row.runs or [row.us])
