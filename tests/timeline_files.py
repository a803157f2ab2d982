"""What a timeline's file must be."""

from collections import defaultdict

from shmemkit.support.settings import shown


def check_timeline(data):
    """ValueError unless `data` is a valid file: every event has its fields, times grow on each track, spans
    of a track are nested or apart, arrows have both ends, and all ranks and tracks have names."""
    last, open_spans, arrows, named, used = {}, defaultdict(list), defaultdict(list), set(), set()
    for event in data["traceEvents"]:
        missing = {"name", "ph", "ts", "pid", "tid"} - set(event)
        needed = {"X": {"dur"}, "s": {"id"}, "f": {"id"}}.get(event.get("ph"), set())
        if missing := missing | needed - set(event):
            raise ValueError(f"event {shown(event)} lacks {', '.join(sorted(missing))}")
        track = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                named.add(track)
            elif event["name"] == "process_name":
                named.add(event["pid"])
            continue
        used.update((track, event["pid"]))
        if event["ts"] < last.get(track, float("-inf")):
            raise ValueError(f"event {shown(event)} comes after a later one of its track")
        last[track] = event["ts"]
        if event["ph"] == "X":
            end, ends = event["ts"] + event["dur"], open_spans[track]
            slack = 1e-9 + 1e-15 * end  # sums of floats are rounded
            while ends and ends[-1] <= event["ts"] + slack:
                ends.pop()
            if event["dur"] < 0 or ends and end > ends[-1] + slack:
                raise ValueError(f"event {shown(event)} ends after the one that encloses it")
            ends.append(end)
        elif event["ph"] in "sf":
            arrows[event["id"]].append((event["ts"], event["ph"]))
    for i, ends in arrows.items():
        if [ph for _, ph in sorted(ends, key=lambda e: (e[0], e[1] != "s"))] != ["s", "f"]:
            raise ValueError(f"arrow {i} has {sorted(ends)}; it must have one s, and then one f")
    if nameless := used - named:
        raise ValueError(f"{sorted(map(str, nameless))[0]} has no name")
