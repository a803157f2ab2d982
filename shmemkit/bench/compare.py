"""``bench --compare OLD.json``: which rows have become slower than those of an earlier run.

A run measures all rows once; several runs (``--runs``) follow each other, so that what changes on the machine
meanwhile reaches all rows. A row is slower if its fastest run takes longer than the slowest one of the old
row, and if its median is longer by more than 3 %, since times of two processes differ by as much. NCCL,
cuBLAS and PyTorch are not judged: their times tell whether the machine is the same.
"""

import shlex
import statistics

from .results import COMPETITORS, ranks_of
from .tune import MARGIN

RUNS = 3  # unless --runs says otherwise
NOT_AGAIN = "--compare", "--json", "--nccl", "--plot", "--runs", "--tune"  # options of the old command


def arguments_of(results):
    """-> the arguments of the command that measured `results`, but for its files and runs."""
    found, skipping = [], False
    for argument in shlex.split(results.command)[3:]:  # behind python3 -m shmemkit.bench
        option = argument.startswith("-")
        if option:
            skipping = argument.partition("=")[0] in NOT_AGAIN
        if not skipping:
            found.append(argument)
    return found


def check(old, new):
    """ValueError unless `old` was measured where `new` is."""
    then, now = (
        f"{ranks_of(results.n_ranks)} of {results.machine['gpu']} on {results.machine['n_nodes']} node(s)"
        for results in (old, new)
    )
    if then != now:
        raise ValueError(f"the file is of {then}; here are {now}. Compare on the same machine")


class Comparison:
    """What `new` has of `old`.

    pairs    [(old row, new row), ...] that have a time in both, ours
    slower   those of them that have become slower
    drift    the competitors' new times over their old ones, the geometric mean; None without any
    missing  labels of our old rows that have no time now
    """

    def __init__(self, old, new):
        now = {row.key: row for row in new.rows if row.us and not row.note}
        then = {row.key: row for row in old.rows if row.us and not row.note}
        both = [(row, now[key]) for key, row in then.items() if key in now]
        self.pairs = [pair for pair in both if pair[0].method not in COMPETITORS]
        self.slower = [pair for pair in self.pairs if _slower(*pair)]
        theirs = [new.us / old.us for old, new in both if old.method in COMPETITORS]
        self.drift = statistics.geometric_mean(theirs) if theirs else None
        self.missing = [row for key, row in then.items() if key not in now and row.method not in COMPETITORS]


def _slower(old, new):
    return min(new.runs or [new.us]) > max(old.runs or [old.us]) and new.us > (1 + MARGIN) * old.us
