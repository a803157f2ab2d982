"""The budget of multiprocessors, ``sms=`` of host objects: a launch has no more blocks than that.

A block is on one multiprocessor, which may have others, too. So a launch of `sms` blocks or fewer is on `sms`
multiprocessors at most, wherever the GPU puts them.
"""

from __future__ import annotations

import math
from typing import Any

from shmemkit.support.settings import integer


def checked_sms(who: str, sms: int | None) -> int | None:
    """The `sms` of a host object. TypeError or ValueError for what is neither None nor 1 or more."""
    return None if sms is None else integer(who, "sms", sms, 1)


def within(who: str, sms: int | None, blocks: int, rows: int = 1) -> int:
    """-> how many blocks a row of a grid of so many `rows` has, of `blocks` that are wanted. ValueError if
    `sms` is less than `rows`."""
    if sms is None:
        return blocks
    if sms < rows:
        raise ValueError(f"{who}: sms is {sms}; it must be {rows} at least, the fewest blocks of its kernel")
    return max(1, min(blocks, sms // rows))


def check_budget(who: str, sms: int | None, grid: Any) -> None:
    """ValueError unless a launch of this grid keeps to `sms`."""
    blocks = math.prod(grid) if isinstance(grid, tuple) else grid
    within(who, sms, blocks, blocks)
