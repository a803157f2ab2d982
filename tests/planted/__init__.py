"""Planted bugs: each program is right, or has one bug. `python tests/planted` measures how well the emulator
tells the two apart."""

from . import (  # noqa: F401
    atomics,
    barriers,
    blocks,
    buffers,
    chains,
    collectives,
    grids,
    hosts,
    memory,
    message_signals,
    multicast,
    order,
    packets,
    participation,
    puts,
    remote_memory,
    shared_memory,
    signals,
    streams,
    tma,
    unwritten,
)
from .plant import DELIVERIES, PLANTED

__all__ = ["DELIVERIES", "PLANTED"]
