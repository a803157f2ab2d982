"""A timeline as a picture: a lane for each track, waits in a colour of their own, arrows from signals to the
waits that they satisfied. It needs matplotlib (the extra "bench")."""

from __future__ import annotations

import io
from collections import defaultdict

LANES = 64  # that a picture shows, as many of each rank
ARROWS = 400  # beyond that they hide what they point to
_COLOURS = {"wait": "#f28e2b", "send": "#4e79a7", "copy": "#59a14f", "host": "#bab0ac", "kernel": "#e3e3e3"}
_PHASES = ["#76b7b2", "#b07aa1", "#edc948", "#9c755f", "#86bcb6", "#d4a6c8", "#8cd17d", "#d37295"]
_NAMES = {"wait": "waits", "send": "stores, puts, signals", "copy": "copies", "host": "host program"}
_HEIGHTS = {"kernel": 0.86, "phase": 0.66, "copy": 0.66, "host": 0.5, "wait": 0.42, "send": 0.42}


def svg(data):
    """-> the picture of a file's dictionary, as SVG"""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with rc_context({"svg.hashsalt": "shmemkit", "svg.fonttype": "none", "font.size": 8}):
        text = io.StringIO()
        FigureCanvasSVG(figure(data)).print_figure(text, metadata={"Date": None}, bbox_inches="tight")
    return text.getvalue()


def figure(data):
    """-> the same as matplotlib's Figure"""
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    lanes, names, left = _lanes(data)
    unit = "steps" if data["otherData"]["unit"] == "step" else "us"
    fig = Figure(figsize=(11, 1 + 0.17 * max(len(lanes), 4)))
    ax = fig.add_subplot()
    boxes, points, marks = defaultdict(list), defaultdict(dict), ([], [])
    legend, phases = {}, {}
    for event in data["traceEvents"]:
        y = lanes.get((event["pid"], event["tid"]))
        if y is None or event["ph"] == "M":
            continue
        if event["ph"] == "X":
            kind = event["cat"]
            colour = _COLOURS.get(kind)
            if colour is None:
                colour = phases.setdefault(event["name"], _PHASES[len(phases) % len(_PHASES)])
            height = _HEIGHTS.get(kind, 0.66)
            boxes[kind, colour].append(Rectangle((event["ts"], y - height / 2), event["dur"], height))
            legend.setdefault(event["name"] if kind == "phase" else _NAMES.get(kind, kind), colour)
        elif event["ph"] == "i":
            marks[event["cat"] == "race"].append((event["ts"], y))
        else:
            points[event["id"]][event["ph"]] = event["ts"], y
    for kind, colour in sorted(boxes, key=lambda b: -_HEIGHTS.get(b[0], 0.66)):
        ax.add_collection(
            PatchCollection(boxes[kind, colour], facecolor=colour, edgecolor="none", match_original=False)
        )
    for those, colour, marker, size in zip(marks, ("#333333", "#e15759"), "|X", (25, 50), strict=True):
        if those:
            x, y = zip(*those, strict=True)
            ax.scatter(x, y, size, colour, marker=marker, zorder=5)
    segments = [[p["s"], p["f"]] for p in points.values() if len(p) == 2]
    if len(segments) <= ARROWS:
        ax.add_collection(LineCollection(segments, colors="#4e79a7", linewidths=0.5, alpha=0.7, zorder=4))
    ax.set_yticks(list(lanes.values()), names)
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ends = [e["ts"] + e.get("dur", 0) for e in data["traceEvents"]]
    ax.set_xlim(
        min((e["ts"] for e in data["traceEvents"] if e["ph"] != "M"), default=0), max(ends, default=0) or 1
    )
    ax.set_xlabel(unit + (f"; {left} more tracks are not shown" if left else ""))
    ax.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=name) for name, colour in legend.items()]
    if handles:
        ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=8, frameon=False)
    return fig


def _lanes(data):
    """-> ({(rank, track): place from above}, their names, how many are left out)"""
    names = {
        (e["pid"], e["tid"]): f"rank {e['pid']} {e['args']['name']}"
        for e in data["traceEvents"]
        if e["name"] == "thread_name"
    }
    ranks = sorted({rank for rank, _ in names}) or [0]
    most = max(LANES // len(ranks), 2)
    shown = [track for rank in ranks for track in [t for t in names if t[0] == rank][:most]]
    return {t: i for i, t in enumerate(shown)}, [names[t] for t in shown], len(names) - len(shown)
