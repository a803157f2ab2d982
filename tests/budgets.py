"""What the tests of ``sms=`` share."""

import re


def most_blocks(timeline):
    """-> how many blocks the largest launch in a Timeline had on any rank: tracks have their numbers."""
    names = [e["args"]["name"] for e in timeline.data["traceEvents"] if e["name"] == "thread_name"]
    return 1 + max(int(found[1]) for name in names if (found := re.search(r"\bblock (\d+)", name)))
