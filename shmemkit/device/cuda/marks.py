"""Phases and marks of a timeline (``sk.Timeline``): what a kernel says of its own work.

Where no timeline is recorded, they compile to nothing.
"""

from __future__ import annotations

from shmemkit.compiler.bounded_compile import recording
from shmemkit.compiler.ptx import TypingError, gpu_note, types
from shmemkit.support.settings import shown

from ..emulator import current_thread
from .timeline_records import BEGIN, END, MARK, noting

__all__ = ["begin_phase", "end_phase", "mark"]

_KINDS = {
    "begin_kernel": (BEGIN, "kernel"),
    "end_kernel": (END, "kernel"),
    "begin_phase": (BEGIN, "phase"),
    "end_phase": (END, "phase"),
    "mark": (MARK, "mark"),
}


def begin_phase(name: str) -> None:
    """Begin the phase `name`, a literal, of the calling warp. It orders nothing.

    Phases may be nested; each ends with ``end_phase(name)`` of the same name by the same threads, or with the
    block. One thread of a warp records for all that call together.
    """
    _tell("begin_phase", name)


def end_phase(name: str) -> None:
    """End the phase `name` that the calling warp began last. It orders nothing."""
    _tell("end_phase", name)


def mark(name: str) -> None:
    """Mark this point of time by `name`, a literal. It orders nothing."""
    _tell("mark", name)


def begin_kernel(name):
    """What a kernel that is recorded calls first; on GPUs alone."""


def end_kernel(name):
    """And what it calls last."""


def _tell(what, name):
    thread = current_thread(what)
    if not isinstance(name, str):
        raise TypeError(f"{what}(): name is {shown(name)}; it must be a string")
    thread.tell(what, name)


def _implement(primitive):
    what = primitive.__name__

    @gpu_note(primitive)
    def _(name):
        value = name.literal_value if isinstance(name, types.Literal) else None
        if not isinstance(value, str):
            raise TypingError(f"{what}(): name is a variable of type {name}; it must be a literal string")
        return lambda: noting(value, *_KINDS[what]) if recording() else None


for _primitive in (begin_kernel, end_kernel, begin_phase, end_phase, mark):
    _implement(_primitive)
