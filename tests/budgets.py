"""What the tests of ``sms=`` share."""

import re
from collections import Counter


def most_blocks(timeline):
    """-> how many blocks the largest launch in a Timeline had on any rank: tracks have their numbers."""
    names = [e["args"]["name"] for e in timeline.data["traceEvents"] if e["name"] == "thread_name"]
    return 1 + max(int(found[1]) for name in names if (found := re.search(r"\bblock (\d+)", name)))


def least_budget(make, sms):
    """-> the least budget, from `sms` on, with which ``make(sms)`` makes its object, as its error says"""
    try:
        made = make(sms)
    except ValueError as error:
        found = re.search(rf"sms is {sms}; it must be (\d+) at least", str(error))
        if found is None or int(found[1]) <= sms:
            raise
        return least_budget(make, int(found[1]))
    if hasattr(made, "free"):
        made.free()
    return sms


def multiprocessors_at_once(timeline, rank):
    """-> on how many multiprocessors a rank had blocks at the same time, at most, in a Timeline of a GPU"""
    assert not timeline.data["otherData"].get("dropped")
    events = [e for e in timeline.data["traceEvents"] if e["pid"] == rank]
    sm_of = {
        e["tid"]: int(found[1])
        for e in events
        if e["name"] == "thread_name" and (found := re.match(r"SM (\d+) ", e["args"]["name"]))
    }
    blocks = [e for e in events if e.get("cat") == "kernel" and e["tid"] in sm_of]
    changes = [(e["ts"], 1, sm_of[e["tid"]]) for e in blocks]
    changes += [(e["ts"] + e["dur"], -1, sm_of[e["tid"]]) for e in blocks]
    there, most = Counter(), 0
    for _, change, sm in sorted(changes):  # of one time, ends come first
        there[sm] += change
        most = max(most, len(+there))
    return most
