"""What each collective does with segments, said once, for ``shmemkit bench`` and ``shmemkit check``."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import shmemkit as sk

COMBINED = {"sum": "add", "avg": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


@dataclass(frozen=True)
class Description:
    """x and out have a segment, or one for each rank: `gathers` and `scatters` say which of them has all.
    `moved(given, me, root)` is what a rank gets of what all give, if nothing is combined. Of a collective
    with a root, that rank alone "gives" or "gets"."""

    kind: Any
    moved: Callable | None = None
    gathers: bool = False
    scatters: bool = False
    root: str | None = None

    @property
    def reduces(self):
        return self.moved is None

    def result(self, xp, given, me, root, op="sum"):
        """What rank `me` gets of what all ranks give, as arrays of `xp`. Of a collective whose root "gives",
        no other is looked at."""
        if self.moved is not None:
            return self.moved(xp, given, me, root)
        given = [x[me] for x in given] if self.scatters else given
        total = functools.reduce(getattr(xp, COMBINED[op]), given)
        return total // len(given) if op == "avg" else total

    def make(self, world, nbytes, method, root, op, sms=None):
        options = {"root": root} if self.root else {}
        options |= {"op": op} if self.reduces else {}
        return self.kind(world, nbytes, method=method, **options, sms=sms)


def _stacked(xp, given, me, root):
    return xp.stack(given)


DESCRIPTIONS = {
    "AllReduce": Description(sk.AllReduce),
    "ReduceScatter": Description(sk.ReduceScatter, scatters=True),
    "AllGather": Description(sk.AllGather, _stacked, gathers=True),
    "AllToAll": Description(
        sk.AllToAll,
        lambda xp, given, me, root: xp.stack([x[me] for x in given]),
        gathers=True,
        scatters=True,
    ),
    "Broadcast": Description(sk.Broadcast, lambda xp, given, me, root: given[root], root="gives"),
    "Reduce": Description(sk.Reduce, root="gets"),
    "Gather": Description(sk.Gather, _stacked, gathers=True, root="gets"),
    "Scatter": Description(
        sk.Scatter, lambda xp, given, me, root: given[root][me], scatters=True, root="gives"
    ),
}
