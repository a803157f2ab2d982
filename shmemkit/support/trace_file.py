"""The file of a timeline: Chrome's trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a rank; a track is a block, one warp of it, or the rank's host program. What is recorded comes as
`Span`, `Mark` and `Arrow`. ``trace`` makes the file's dictionary of them; ``summary`` and ``picture``
(``trace_picture.py``) read that dictionary, so that they also read files.

Times are numbers of the timeline's `unit`: "step" on the emulator, "ns" on GPUs. The file has them as
microseconds, since the format knows no other unit: one step is shown as 1 us.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from .settings import shown
from .whole_files import write_whole

UNITS = {"step": 1.0, "ns": 1e-3}  # of a time -> microseconds of the file
HOST = "host"
COPIES = -2  # as a block: copy engines
KINDS = ("kernel", "phase", "wait", "send", "copy", HOST, "race")


class Track(NamedTuple):
    """Where something happens: on `rank`, in the block of this number, or -1: in its host program, or
    COPIES."""

    rank: int
    block: int = -1
    warp: int = 0
    sm: int | None = None  # the multiprocessor, where that is known

    def name(self):
        if self.block < 0:
            return "copies" if self.block == COPIES else "host program"
        on = "" if self.sm is None else f"SM {self.sm} "
        return f"{on}block {self.block}" + (f" warp {self.warp}" if self.warp else "")


@dataclass
class Span:
    """What took from `begin` to `end`. `kind` is one of KINDS."""

    track: Track
    kind: str
    name: str
    begin: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)
    kept: bool = True  # there was room for it


class Mark(NamedTuple):
    """What happened at one time."""

    track: Track
    kind: str
    name: str
    time: float
    args: dict[str, Any]


class Arrow(NamedTuple):
    """From a time within a span to a time within another one."""

    name: str
    source: Span
    left: float
    target: Span
    arrived: float


def trace(spans, marks=(), arrows=(), unit="step", **about):
    """-> the file's dictionary. `about`: what else it says of itself, as {"dropped": 3}"""
    scale = UNITS[unit]
    tracks = _Tracks(spans, marks)
    events = []

    def add(ph, on, name, kind, time, args, **more):
        pid, tid = tracks.of(on)
        what = {"name": name, "cat": kind, "ph": ph, "ts": time * scale, "pid": pid, "tid": tid}
        events.append({**what, "args": args, **more})

    for s in spans:
        add("X", s, s.name, s.kind, s.begin, s.args, dur=(s.end - s.begin) * scale)
    for mark in marks:
        add("i", mark, mark.name, mark.kind, mark.time, mark.args, s="t")
    for i, arrow in enumerate(arrows, 1):
        add("s", arrow.source, arrow.name, "signal", arrow.left, {}, id=i)
        add("f", arrow.target, arrow.name, "signal", arrow.arrived, {}, id=i, bp="e")
    # The longest first of those that begin together: they enclose the others.
    events.sort(key=lambda e: (e["pid"], e["tid"], e["ts"], -e.get("dur", 0)))
    return {
        "traceEvents": [*tracks.names(), *events],
        "displayTimeUnit": "ns",
        "otherData": {"unit": unit, **about},
    }


class _Tracks:
    """The file's numbers of tracks. Spans of one track are nested or apart: those that are not, as the waits
    of two threads that diverge, have further tracks beside it."""

    def __init__(self, spans, marks):
        self._of, self._names = {}, {}
        by_track = defaultdict(list)
        for each in (*spans, *marks):
            by_track[each.track].append(each)
        numbers = defaultdict(int)
        for track in sorted(by_track, key=lambda t: (t.rank, t.block, t.warp, -1 if t.sm is None else t.sm)):
            for lane, those in enumerate(_lanes(by_track[track])):
                number = numbers[track.rank]
                numbers[track.rank] += 1
                self._names[track.rank, number] = track.name() + (f" ({lane + 1})" if lane else "")
                for each in those:
                    self._of[id(each)] = track.rank, number

    def of(self, each):
        return self._of[id(each)]

    def names(self):
        ranks = sorted({rank for rank, _ in self._names})
        for rank in ranks:
            yield _metadata(rank, 0, "process_name", {"name": f"rank {rank}"})
            yield _metadata(rank, 0, "process_sort_index", {"sort_index": rank})
        for (rank, number), name in self._names.items():
            yield _metadata(rank, number, "thread_name", {"name": name})
            yield _metadata(rank, number, "thread_sort_index", {"sort_index": number})


def _metadata(pid, tid, name, args):
    return {"name": name, "cat": "__metadata", "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _lanes(those):
    """Spans, and marks, of a track, in lists of which each has spans that are nested or apart."""
    marks = [m for m in those if isinstance(m, Mark)]
    lanes = []  # (its spans, the ends of those that are open)
    for span in sorted((s for s in those if isinstance(s, Span)), key=lambda s: (s.begin, -s.end)):
        for lane in lanes:
            ends = lane[1]
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                break
        else:
            lane = ([], [])
            lanes.append(lane)
        lane[0].append(span)
        lane[1].append(span.end)
    if marks and not lanes:
        lanes.append(([], []))
    if marks:
        lanes[0][0].extend(marks)
    return [inside for inside, _ in lanes]


def merged(parts):
    """-> one dictionary of those of several processes, of other ranks each; None is left out"""
    parts = [part for part in parts if part is not None]
    result = trace([]) if not parts else {**parts[0], "otherData": {**parts[0]["otherData"], "dropped": {}}}
    result["traceEvents"] = []
    arrows = 0
    for part in parts:  # each numbers its arrows from 1
        events = [{**e, "id": e["id"] + arrows} if "id" in e else e for e in part["traceEvents"]]
        arrows += sum(e["ph"] == "s" for e in events)
        result["traceEvents"] += events
    for part in parts:
        result["otherData"]["dropped"].update(part["otherData"].get("dropped", {}))
    return result


def between(data, first, last):
    """-> what of the dictionary `data` is between two times of the file: spans are cut off there, arrows that
    leave it and tracks without anything are left out"""
    events, ends = [], defaultdict(int)
    for event in data["traceEvents"]:
        begin, end = event["ts"], event["ts"] + event.get("dur", 0)
        if event["ph"] == "X" and begin < last and end > first:
            begin, end = max(begin, first), min(end, last)
            events.append({**event, "ts": begin, "dur": end - begin})
        elif event["ph"] in "isf" and first <= begin <= last:
            events.append(event)
            ends[event.get("id")] += 1
    kept = [e for e in events if e["ph"] not in "sf" or ends[e["id"]] == 2]
    used = {(e["pid"], e["tid"]) for e in kept}
    ranks = {rank for rank, _ in used}
    about = [
        e
        for e in data["traceEvents"]
        if e["ph"] == "M" and (e["pid"] in ranks if "process" in e["name"] else (e["pid"], e["tid"]) in used)
    ]
    return {**data, "traceEvents": about + kept}


# ---- files


def timeline_file(source, given=None):
    """-> the path `given`, or that of SHMEMKIT_TIMELINE; None if there is none, or if `given` is False. It is
    checked now, not when a long program has ended: TypeError, or OSError if no file can be written there.
    `source` is who gives it."""
    if given is False:
        return None
    if given is None:
        source, given = "SHMEMKIT_TIMELINE", os.environ.get("SHMEMKIT_TIMELINE", "").strip() or None
        if given is None:
            return None
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{source} is {shown(given)}; it must be the path of a file")
    path = os.path.abspath(given)
    folder = os.path.dirname(path)
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise OSError(
            f"{source} is {given!r}; it must be the path of a file in a folder that you can write to"
        )
    return os.fspath(given)


def save(data, path):
    """Write `data` to the file `path`, whole or not at all."""
    write_whole(path, json.dumps(data, separators=(",", ":")) + "\n")


def load(path):
    """-> the dictionary in the file. ValueError if it has no timeline of shmemkit."""
    with open(path, encoding="utf-8") as file:
        try:
            data = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is no timeline: {error}") from None
    about = data.get("otherData") if isinstance(data, dict) else None
    known = isinstance(about, dict) and about.get("unit") in UNITS
    if not known or not isinstance(data.get("traceEvents"), list):
        raise ValueError(f"{path} is no timeline of shmemkit; sk.Timeline and SHMEMKIT_TIMELINE write them")
    return data


# ---- what it says


class Total(NamedTuple):
    """All spans of one kind and name on a rank. Times in the file's unit. `busy`: the union over all tracks.
    `waiting`: the waits in them (of a kernel: in its blocks), added up, which may be more."""

    rank: int
    kind: str
    name: str
    count: int
    busy: float
    waiting: float
    n_bytes: int


def totals(data):
    """-> [Total], in the order of ranks and of their first spans"""
    groups, waits = defaultdict(list), defaultdict(list)
    blocks = {}  # (rank, track) -> the block that it is of
    for event in data["traceEvents"]:
        if event["name"] == "thread_name":
            name = event["args"]["name"].partition(" warp")[0].partition(" (")[0]
            blocks[event["pid"], event["tid"]] = event["pid"], name
        elif event["ph"] == "X":
            groups[event["pid"], event["cat"], event["name"]].append(event)
            if event["cat"] == "wait":
                track = event["pid"], event["tid"]
                for where in {track, blocks[track]}:
                    waits[where].append(event)
    sums = {where: _Sums(events) for where, events in waits.items()}
    found = []
    for (rank, kind, name), events in sorted(groups.items(), key=lambda g: (g[0][0], g[1][0]["ts"])):
        waiting = 0.0
        if kind in ("kernel", "phase"):
            for e in events:
                track = rank, e["tid"]
                inside = sums.get(blocks[track] if kind == "kernel" else track)
                waiting += inside.between(e["ts"], e["ts"] + e["dur"]) if inside else 0.0
        n_bytes = sum(e["args"].get("bytes", 0) for e in events)
        found.append(Total(rank, kind, name, len(events), union(events), waiting, n_bytes))
    return found


class _Sums:
    """How long spans took that begin between two times."""

    def __init__(self, events):
        times = sorted((e["ts"], e["dur"]) for e in events)
        self.begins = [begin for begin, _ in times]
        self.sums = list(accumulate((length for _, length in times), initial=0.0))

    def between(self, first, last):
        return self.sums[bisect_left(self.begins, last)] - self.sums[bisect_left(self.begins, first)]


def union(events):
    """How long at least one of the spans was under way."""
    length, until = 0.0, float("-inf")
    for e in sorted(events, key=lambda e: e["ts"]):
        end = e["ts"] + e["dur"]
        if end > until:
            length += end - max(e["ts"], until)
            until = end
    return length


def overlap(data, rank):
    """The overlap efficiency of a rank: the time of its longest phase or copy over the time of all of them,
    first begin to last end; None with less than two."""
    groups = defaultdict(list)
    for e in data["traceEvents"]:
        if e["ph"] == "X" and e["pid"] == rank and e["cat"] in ("phase", "copy"):
            groups[e["name"]].append(e)
    if len(groups) < 2:
        return None
    every = [e for events in groups.values() for e in events]
    whole = max(e["ts"] + e["dur"] for e in every) - min(e["ts"] for e in every)
    return max(map(union, groups.values())) / whole if whole else None


def summary(data):
    """-> the summary as text: a table, and what the file says of itself"""
    about = data["otherData"]
    unit = "steps" if about["unit"] == "step" else "us"
    head = ("rank", "what", "name", "times", f"busy, {unit}", f"waits, {unit}", "bytes")
    rows: list[tuple[str, ...]] = [head]
    for t in totals(data):
        numbers = (
            f"{t.busy:.6g}",
            f"{t.waiting:.6g}" if t.waiting else "",
            str(t.n_bytes) if t.n_bytes else "",
        )
        rows.append((str(t.rank), t.kind, t.name, str(t.count), *numbers))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for rank in sorted({e["pid"] for e in data["traceEvents"]}):
        if (ratio := overlap(data, rank)) is not None:
            lines.append(f"rank {rank}: overlap {ratio:.2f} (its longest phase or copy over all of them)")
    if about["unit"] == "step":
        lines.append("a step: one action of a kernel that others can see; steps are no measure of time")
    if "uncertainty_ns" in about:
        lines.append(f"the clocks of the ranks agree within {about['uncertainty_ns'] / 1e3:.2f} us")
    for rank, n in sorted(about.get("dropped", {}).items()):
        lines.append(f"rank {rank}: {n} records had no room; give Timeline more with records=")
    return "\n".join(lines)
