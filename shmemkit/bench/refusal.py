"""Whether all ranks can do something: what one of them refuses, none of them does."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Refused(Exception):
    """At least one rank refused; the message says why. Raised on every rank."""


def agreed(world, action: Callable[[], T]) -> T:
    """-> what ``action()`` returns, if it raises ValueError or MemoryError on no rank; Refused on every rank
    otherwise. Collective: in it no collective call may follow what one rank alone refuses."""
    result: Any = None
    reason = None
    try:
        result = action()
    except (ValueError, MemoryError) as error:
        reason = str(error) or type(error).__name__
    reasons = [r for r in world.host_allgather(reason) if r is not None]
    if reasons:
        raise Refused(reasons[0])
    return result


def allocated(world, *makers):
    """-> the symmetric arrays that `makers` make; Refused on every rank, and none is left, where there is no
    memory for all of them. Collective."""
    arrays = []

    def make():
        for maker in makers:
            arrays.append(maker())

    try:
        agreed(world, make)
    except Refused:
        for array in arrays:
            world.free(array)
        raise
    return arrays
