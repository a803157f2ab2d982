"""A file of results that is written case by case: what ``--json`` writes, and

measured  {case: entry}: of which run its rows are. An entry has `date`, `sources` (``ledger.sources``),
          `commit`, `what` (our methods: "auto" or "all methods"), `host`, `asked` (the arguments) and
          `answer`: "done", "begun", or why the case has no further rows
hosts     [{machine, versions, environment}, ...], which entries name by their index
digests   {sources: {room: digest}} of the modules of kernels, as benchmarks/checked.json has them. Where it
          has none of these sources yet, docs/checked.py adds them later
nccl      {"versions": [...], "ways": [...]} that rows are of

All rows of a case are of one run. A new run of the case replaces them.
"""

import contextlib
import datetime
import functools
import json
import re
import shlex
import subprocess
import time
from pathlib import Path

from shmemkit.bench.results import NCCL_WAYS, Results, case_of
from shmemkit.support.installed import versions
from shmemkit.support.whole_files import write_whole

from .. import ledger
from .plan import ALL

DONE, BEGUN = "done", "begun"


def short(gpu):
    """ "NVIDIA H100 80GB HBM3" -> "h100" """
    found = re.search(r"\b[A-Za-z]+\d+\w*", gpu)
    return (found[0] if found else re.sub(r"\W+", "_", gpu)).lower()


def path_of(folder, batch, gpu):
    if batch.file == "launch":
        return Path(folder, "launch.json")
    ranks = f"x{batch.ranks}" if batch.ranks > 1 else ""
    return Path(folder, f"{batch.file}_{short(gpu)}{ranks}.json")


def pinned(folder):
    """-> {room: digest}, if checked.json beside the folder has them of this package; else {}"""
    with contextlib.suppress(OSError, ValueError):
        data = json.loads((Path(folder).resolve().parent / "checked.json").read_text())
        if data["sources"] == sources():
            return {room: digest for room, digest in data["rooms"].items() if digest}
    return {}


def read(path):
    """-> what is in the file, or {}"""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(Path(path).read_text())
    return {}


def write(path, data):
    write_whole(path, json.dumps(data, indent=1) + "\n")


def is_done(data, batch, case):
    """Whether the file has what the batch would measure, of this package."""
    entry = data.get("measured", {}).get(batch.key(case), {})
    same = entry.get("sources") == sources() and entry.get("answer") == DONE
    return same and entry["what"] in (ALL, batch.what)


def stamp(data, sources, digests, commit=None):
    """Add the digests of `sources` to a file's data, if it has rows of these, and their commit where the host
    did not know it. -> whether it has new digests."""
    entries = data.get("measured", {}).values()
    for entry in entries:
        if entry["sources"] == sources:
            entry["commit"] = entry.get("commit") or commit
    rooms = {room for row in data.get("rows", ()) for room in row.get("rooms") or ()}
    if not any(entry["sources"] == sources for entry in entries):
        return False
    wanted = {room: digests[room] for room in sorted(rooms & digests.keys()) if digests[room]}
    if not wanted or data.setdefault("digests", {}).get(sources) == wanted:
        return False
    data["digests"][sources] = wanted
    return True


def note(path, batch, case, answer, about=None):
    """Say in the file why a case has no further rows."""
    data = read(path)
    if not data:  # it failed before it had a row
        data = {"machine": {"gpu": "", "gpus": {}}, "versions": {}, "environment": {}, "date": _now()}
        data |= {"method": "", "n_ranks": batch.ranks, "p2p_GBps": None, "rows": [], **(about or {})}
        data["command"] = _command(batch, batch.cases)
    entries = data.setdefault("measured", {})
    old = entries.get(batch.key(case), {})
    fresh = old.get("sources") == sources() and old.get("answer") != DONE
    entries[batch.key(case)] = {**(old if fresh else _entry(batch)), "answer": answer}
    if not fresh:
        data["rows"] = [row for row in data["rows"] if case_of(row) != batch.key(case)]
    write(path, data)


def _entry(batch):
    found = {"date": _now(), "sources": sources(), "commit": commit(), "what": batch.what}
    return found | {"asked": batch.arguments, "answer": BEGUN}


class Recorder(Results):
    """The rows of a batch; those of a case are in its file once all are there. `path` is None on all ranks
    but the first."""

    EVERY = 2  # seconds, after which rows of a case that is not over are written, too

    def __init__(self, world, batch, cases, path):
        super().__init__(world, [])
        self.command = _command(batch, cases)
        self._batch, self._path, self._saved = batch, path, time.monotonic()
        self._keys = {batch.key(case): None for case in cases}
        self._entries = {}  # of the cases that have rows; the last one is not over

    def add(self, *args, **kwargs):
        super().add(*args, **kwargs)
        key = self._key(vars(self.rows[-1]))
        over = self._entries and key not in self._entries
        if over:
            next(reversed(self._entries.values()))["answer"] = DONE
        self._entries.setdefault(key, _entry(self._batch))
        if self._path and (over or time.monotonic() > self._saved + self.EVERY):
            self._save()

    def end(self, answer=DONE):
        """The batch is over; what has no answer yet has this one."""
        for key in {**self._keys, **self._entries}:
            entry = self._entries.setdefault(key, _entry(self._batch))
            entry["answer"] = answer if entry["answer"] == BEGUN else entry["answer"]
        if self._path:
            self._save()

    def _key(self, row):
        return case_of(row) if self._batch.option else ""

    def _save(self):
        data = read(self._path)
        self.compare()
        new = self.as_dict()
        new["versions"] |= toolchain()
        host = {key: new[key] for key in ("machine", "versions", "environment")}
        hosts = data.get("hosts", [])
        hosts = hosts if host in hosts else [*hosts, host]
        mine = {key: entry | {"host": hosts.index(host)} for key, entry in self._entries.items()}
        rows = [row for row in data.get("rows", ()) if self._key(row) not in mine] + new["rows"]
        if self._batch.option == "--sizes":
            rows.sort(key=lambda row: row.get("bytes") or 0)
        of_nccl = [row for row in rows if row["method"] in NCCL_WAYS and row.get("us")]
        versions = {row["version"] for row in of_nccl if row.get("version")}
        new["nccl"] = {"versions": sorted(versions), "ways": sorted({row["method"] for row in of_nccl})}
        new |= {"rows": rows, "measured": data.get("measured", {}) | mine, "hosts": hosts}
        new |= {"p2p_GBps": new["p2p_GBps"] or data.get("p2p_GBps"), "digests": data.get("digests", {})}
        stamp(new, sources(), pinned(self._path.parent))
        write(self._path, new)
        self._saved = time.monotonic()


def merge(folder, other):
    """Take the cases of the files in the folder `other` that are newer. -> the names of the files that
    changed."""
    changed = []
    for source in sorted(Path(other).glob("*.json")):
        new, path = read(source), Path(folder, source.name)
        old = read(path)
        if not new.get("measured") or new == old:
            continue
        merged = _merged(old, new)
        if merged != old:
            write(path, merged)
            changed.append(path.name)
    return changed


def _merged(old, new):
    if not old.get("measured"):  # of another version, or nothing
        return new
    mine, theirs = old["measured"], new["measured"]
    taken = {case for case in theirs if case not in mine or _better(theirs[case], mine[case])}
    newer = new if max(e["date"] for e in theirs.values()) > max(e["date"] for e in mine.values()) else old
    single = "" in theirs or "" in mine
    rows = [row for row in old["rows"] if ("" if single else case_of(row)) not in taken]
    rows += [row for row in new["rows"] if ("" if single else case_of(row)) in taken]
    if not single and all(not row.get("shape") for row in rows):
        rows.sort(key=lambda row: row.get("bytes") or 0)
    hosts = [*old.get("hosts", ())]
    hosts += [host for host in new.get("hosts", ()) if host not in hosts]
    entries = dict(mine)
    for case in taken:
        at = theirs[case].get("host")
        entries[case] = theirs[case] | ({} if at is None else {"host": hosts.index(new["hosts"][at])})
    digests = {**old.get("digests", {}), **new.get("digests", {})}
    nccl = {
        key: sorted({*old.get("nccl", {}).get(key, ()), *new.get("nccl", {}).get(key, ())})
        for key in ("versions", "ways")
    }
    more = {"rows": rows, "measured": entries, "hosts": hosts, "digests": digests, "nccl": nccl}
    return {**newer, "p2p_GBps": newer["p2p_GBps"] or old["p2p_GBps"], **more}


def _better(new, old):
    """Newer; but what was not finished replaces nothing of the same package that was."""
    if new["sources"] == old["sources"] and (new["answer"] == DONE) != (old["answer"] == DONE):
        return new["answer"] == DONE
    if new["sources"] == old["sources"] and new["what"] != old["what"]:
        return new["what"] == ALL
    return new["date"] > old["date"]


def _command(batch, cases):
    return shlex.join(["python3", "-m", "shmemkit.bench", *batch.command(cases)])


def _now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@functools.cache
def sources():
    return ledger.sources()


@functools.cache
def commit():
    """Of the checkout that runs, or None outside of one."""
    command = ["git", "-C", str(ledger.PACKAGE), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() or None
    return None


@functools.cache
def toolchain():
    """-> {name: version} of the compilers, as installed, and as the CUDA toolkit says."""
    found = versions(ledger.COMPILERS)
    for name in ("nvvm", "nvjitlink"):
        with contextlib.suppress(Exception):  # only a remark
            module = __import__(f"cuda.bindings.{name}", fromlist=["version"])
            found[f"{name} library"] = ".".join(map(str, module.version()))
    return found
