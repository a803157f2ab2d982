"""How long ranks wait for each other, and the errors when they have waited too long.

SHMEMKIT_TIMEOUT (seconds) or ``bind(timeout=)`` bounds the waits in kernels: ``SignalTimeout``. The variable
also bounds the barriers of the host programs: ``RankTimeout``. What kernels note when a wait expires, and
where, is in ``shmemkit.device.shmem.bounded_waits``.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

from .agreement import ranks_text
from .call_site import Call
from .settings import shown

VARIABLE = "SHMEMKIT_TIMEOUT"
MOST = 1e9  # seconds: more than the nanoseconds of a 64-bit clock could not count
BARRIER = "World.barrier"  # the name of its signals: one for each rank
_COLUMNS = ("waited", "kernel", "block", "thread", "in", "for", "seen")


class SignalTimeout(RuntimeError):
    """Waits of this rank's kernels have expired. The message is a table of them.

    rank      this rank
    records   a list of WaitRecord: the waits that were in progress when the first one expired, as many as
              there is room for, the longest wait first
    """

    __module__ = "shmemkit"  # where users find it; tracebacks say so

    def __init__(self, message: str, rank: int = 0, records: Iterable[WaitRecord] = ()):
        super().__init__(message)
        self.rank, self.records = rank, list(records)


class RankTimeout(RuntimeError):
    """Ranks did not come to a collective call of the host programs in time.

    rank      this rank
    call      the collective function that waited, as "host_barrier"
    missing   the ranks that are not there
    """

    __module__ = "shmemkit"  # where users find it; tracebacks say so

    def __init__(self, message: str, rank: int = 0, call: str = "", missing: Iterable[int] = ()):
        super().__init__(message)
        self.rank, self.call, self.missing = rank, call, list(missing)


@dataclass(frozen=True)
class WaitRecord:
    """A wait that did not get what it waited for."""

    rank: int
    """The rank whose kernel waited."""
    kernel: str
    primitive: str
    """ "wait", "wait_warp", "wait_block", "signal_wait_until", "barrier_all_block", "grid_barrier", or what
    receives packets: "ll_recv_block", "ll128_load_tiles", "lamport_load", ..."""
    block: tuple[int, int, int]
    """(x, y, z)"""
    thread: tuple[int, int, int]
    """(x, y, z), in the block"""
    address: int
    """Of the signal; for a grid barrier, of the count of blocks that have arrived; for lines, of the word
    with the flag; for a Lamport packet, of its slot."""
    signal: str | None
    """Name of the symmetric array that it is in; None where that is not known."""
    index: tuple[int, ...] | None
    """Index in that array; None if `signal` is."""
    owner: int | None
    """The rank in whose memory it is; None if `signal` is."""
    compare: str
    """ "ge", "eq", "ne", "gt", "le" or "lt"."""
    expected: int
    """What it was compared to; for a grid barrier, the number of blocks; for LL and LL128, the flag; for a
    Lamport packet, the first word of an empty slot."""
    seen: int
    """What it was."""
    waited: float
    """Seconds."""
    expired: bool
    """Whether its own time was up; otherwise it ended because that of another was."""

    def where(self) -> str:
        """The signal as ``name[index]``, with its rank if that is another, or its address."""
        if self.signal is None:
            return f"0x{self.address:x}"
        index = ", ".join(map(str, self.index or ()))
        return f"{self.signal}[{index}]" + (f" of rank {self.owner}" if self.owner != self.rank else "")

    def sought(self) -> str:
        """What it waited for, as ``full[3] >= 5``."""
        if self.primitive == "grid_barrier":
            return f"{self.expected} blocks, at {self.where()}"
        if "_recv_" in self.primitive or self.primitive.startswith(("ll_load", "ll128_load")):
            return f"flag {self.expected} in {self.where()}"
        if self.primitive == "lamport_load":
            return f"a piece in {self.where()}"
        sign = {"ge": ">=", "eq": "==", "ne": "!=", "gt": ">", "le": "<=", "lt": "<"}[self.compare]
        return f"{self.where()} {sign} {self.expected}"


def signal_timeout(rank, records, total, limit, trouble=""):
    """The SignalTimeout of `rank` for these records, of `total` waits; `limit`: the one that expired."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for r in records:
        waited = f"{r.waited:.3g} s" + ("" if r.expired else " *")
        rows.append((waited, r.kernel, str(r.block), str(r.thread), r.primitive, r.sought(), str(r.seen)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    expired = sum(r.expired for r in records)
    head = f"rank {rank}: {expired} wait{'s' * (expired != 1)} in kernels took longer than {limit:g} s"
    for barrier in sorted({r.signal for r in records if (r.signal or "").startswith(BARRIER)}):
        late = sorted({r.index[0] for r in records if r.signal == barrier})
        lines.append(f"  {ranks_text(late)} {'have' if len(late) > 1 else 'has'} not come to {barrier}")
    if any(not r.expired for r in records):
        lines.append("  *: this wait ended because another one had expired")
    if total > len(records):
        lines.append(f"  and {total - len(records)} more waits, which are not recorded")
    lines.append(
        "All work that this rank had enqueued has ended. Its results are not valid. Allocate the signals "
        "that took part again before you use them"
    )
    if trouble:
        lines.append(trouble)
    return SignalTimeout("\n".join([head, *lines]), rank, records)


def missing_text(call, missing, there, waited):
    """ "rank 2 has not come to host_barrier() within 5 s; ranks 0 and 1 are there"."""
    have, are = "have" if len(missing) > 1 else "has", "are" if len(there) > 1 else "is"
    others = f"; {ranks_text(there)} {are} there" if there else ""
    return f"{ranks_text(missing)} {have} not come to {Call(call)} within {waited:.3g} s{others}"


def as_seconds(value, source):
    """`value` as seconds. TypeError or ValueError, which name its `source`, if it is no number of them. What
    the environment has is a text, an argument is none."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if source != VARIABLE and (isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__")):
        raise TypeError(f"{source} is {shown(value)}; it must be a number of seconds")
    if not 0 < seconds <= MOST:
        raise ValueError(
            f"{source} is {value!r}; it must be a number of seconds greater than 0, and {MOST:g} at most"
            + (". Unset it to wait without limit" if source == VARIABLE else "")
        )
    return seconds


@functools.cache
def default():
    """SHMEMKIT_TIMEOUT in seconds, or None if it is not set. Read once: kernels are compiled for it."""
    text = os.environ.get(VARIABLE, "").strip()
    return as_seconds(text, VARIABLE) if text else None
