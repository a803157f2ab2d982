"""Which figures are of kernels that have changed since: by the digests in benchmarks/checked.json.

A results file of ``shmemkit bench everything`` has, for each row, the modules whose kernels it launched, and
the digests that they had. Other files do not say what ran: it was other kernels. Where the package's tuning
table has another method now than "auto" took, that row is of earlier kernels, too.
"""

import json
from pathlib import Path

from shmemkit.bench.results import COMPETITORS, case_of
from shmemkit.collectives import tuning

CHECKED = Path(__file__).resolve().parents[1] / "benchmarks" / "checked.json"
EARLIER, UNKNOWN = "of earlier kernels", "of kernels whose digest was not taken"
DAGGER = "†"


def mark(results, rooms=None):
    """Set `earlier` of each row, as "of earlier kernels, 2026-11-22" or "", and, where our rows differ in
    that, `dagger` of those that have one. `rooms`: {room: digest}, default as in benchmarks/checked.json."""
    present = json.loads(CHECKED.read_text())["rooms"] if rooms is None else rooms
    ours = [row for row in results.rows if row.method not in COMPETITORS]
    for row in ours:
        row.earlier = _earlier(results, row, present)
    mixed = len({row.earlier for row in ours}) > 1
    for row in ours:
        row.dagger = DAGGER if mixed and row.earlier else ""
    return results


def _earlier(results, row, present):
    measured = results.measured
    entry = measured.get(case_of(row)) or measured.get("")
    if entry is None:
        return f"{EARLIER}, {results.date[:10]}"
    had = results.digests.get(entry["sources"], {})
    rooms = row.rooms or ()
    if _takes_another(results, row):
        return f"{EARLIER}, {entry['date'][:10]}"
    if all(had.get(room) and had[room] == present.get(room) for room in rooms):
        return ""
    unknown = any(not had.get(room) for room in rooms) and all(
        not had.get(room) or had[room] == present.get(room) for room in rooms
    )
    return f"{UNKNOWN if unknown else EARLIER}, {entry['date'][:10]}"


def _takes_another(results, row):
    """Whether the package's table names another method for a row of "auto"."""
    here = results.machine["gpu"], results.n_ranks, results.machine.get("n_nodes", 1)
    for found in tuning.read(tuning.PACKAGED).get(row.op, []) if row.took else []:
        if (found["gpu"], found["n_ranks"], found["n_nodes"]) == here:
            choices = found["symmetric" if row.out == "symmetric" else "private"]
            return tuning.method_at(choices, row.bytes) != row.took
    return False


def texts(results):
    """What is said of rows of `results`, each once."""
    return list(dict.fromkeys(row.earlier for row in results.rows if row.earlier))


def sentence(results):
    """What a page says above the tables of a file, or ""."""
    found = texts(results)
    if not found:
        return ""
    daggers = any(row.dagger for row in results.rows)
    parts = [f"{DAGGER} {text}" for text in found] if daggers else found
    return f"**shmemkit's figures: {'; '.join(parts)}.**"


def is_current(results):
    return not texts(results)
