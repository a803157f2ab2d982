"""Small programs with labels: `python tests/race_cases` measures by them how well races are found."""

from . import (  # noqa: F401
    atomics,
    collectives,
    fence_and_quiet,
    local_memory,
    low_latency,
    rank_barriers,
    remote_memory,
    signals,
    streams_and_hosts,
    threads_and_blocks,
    wait_and_notify,
)
from .case import CASES, ERROR, RACE, RIGHT

__all__ = ["CASES", "ERROR", "RACE", "RIGHT"]
