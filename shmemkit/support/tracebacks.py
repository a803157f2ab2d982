"""Errors as users see them at the terminal: without the frames of shmemkit, of the launcher and of ``runpy``.
SHMEMKIT_FULL_TRACEBACK=1 shows all frames. (In notebooks: ``notebook.py``.)
"""

import os
import sys
import traceback

from .command_line import say_at_last
from .settings import switch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LAUNCHER = f"{os.sep}mpi4py{os.sep}", f"{os.sep}runpy.py", "<frozen"


def is_ours(file):
    """Whether `file` is a part of shmemkit."""
    return file.startswith(_PACKAGE)


def is_shown_whole():
    """Whether SHMEMKIT_FULL_TRACEBACK asks for all frames. Text that is no switch asks for them, too: this is
    no place to raise."""
    try:
        return switch("SHMEMKIT_FULL_TRACEBACK", False)
    except ValueError:
        return True


def traceback_of(error):
    """The traceback of `error`, without our frames, unless it has no others: a command of ours has failed."""
    shown = traceback.TracebackException.from_exception(error)
    if getattr(error, "tells_its_cause", False):  # as an error of the emulator does
        shown.__cause__ = shown.__context__ = None
    if not is_shown_whole():
        _forget_ours(shown, set(), keep=True)
    text = "".join(shown.format())
    if not hasattr(error, "add_note"):  # Python 3.10
        text += "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    return text.rstrip()


def _forget_ours(shown, seen, keep=False):
    """Drop our frames from a TracebackException, from those that it follows and those that it groups. With
    `keep` it has them if there are no others."""
    if shown is None or id(shown) in seen:
        return
    seen.add(id(shown))
    frames = [f for f in shown.stack or () if not any(part in f.filename for part in _LAUNCHER)]
    theirs = [f for f in frames if not is_ours(f.filename)]
    kept = theirs or (frames if keep else [])
    shown.stack = traceback.StackSummary.from_list(kept) if kept else None
    for other in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        _forget_ours(other, seen)


def passes_through_us(trace):
    """Whether a frame of the traceback `trace` is of shmemkit."""
    return any(is_ours(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(trace))


def hide_our_frames():
    """From now on, Python's own ``sys.excepthook`` leaves out our frames. Whoever has another keeps it."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show


def show(kind, error, trace):
    """A ``sys.excepthook``."""
    say_at_last(traceback_of(error))


def uncaught():
    """The exception that has ended the program, whatever ``sys.excepthook`` did with it, or None.

    Python keeps it in ``sys.last_value``. So do interactive sessions and test runners with others that they
    have caught: in those, another frame stands below the traceback's first.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    trace = getattr(error, "__traceback__", None)
    if trace is None or trace.tb_frame.f_back is not None or hasattr(sys, "ps1"):
        return None
    return error
