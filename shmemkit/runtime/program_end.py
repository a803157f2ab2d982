"""When one rank fails, all end: nobody waits for a rank that will never come.

An exception that nobody caught, or an exit with a status other than 0 under ``python -m mpi4py`` (as
``shmemkit run`` starts programs), aborts the program on all ranks. A World that is alive at exit is
finalized; when that fails, the exit status says so.
"""

import atexit
import contextlib
import os
import sys
import time
import traceback
from typing import Any

from shmemkit.comm.choice import is_mpi
from shmemkit.support.command_line import say

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HIDDEN = (
    f"{os.sep}mpi4py{os.sep}",
    f"{os.sep}runpy.py",
    *(os.path.join(_PACKAGE, room, "") for room in ("backends", "emu", "emulated_scripts")),
)


def told(error):
    """The traceback, without the frames of the launcher and of the emulator."""
    shown = traceback.TracebackException.from_exception(error)
    if getattr(error, "tells_its_cause", False):  # as an error of the emulator does
        shown.__cause__ = shown.__context__ = None
    _forget_ours(shown)
    text = "".join(shown.format())
    if not hasattr(error, "add_note"):  # Python 3.10
        text += "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    return text.rstrip()


def _forget_ours(shown):
    """Drop these frames from a TracebackException and from those that it follows."""
    while shown is not None:
        frames = [f for f in shown.stack if not any(p in f.filename for p in ("<frozen", *_HIDDEN))]
        shown.stack = traceback.StackSummary.from_list(frames)
        if shown.__cause__ is not None:
            _forget_ours(shown.__context__)
        shown = shown.__cause__ or shown.__context__


class ExitHandler:
    """Ends all ranks when this process, which has a World, fails, and finalizes the World at exit. `comm`: a
    Communicator, or None for one rank."""

    def __init__(self, comm):
        self.comm = comm if comm is not None and comm.Get_size() > 1 else None
        self.world: Any = None
        self.status = 0  # the exit status that mpi4py was told, if not 0
        self._excepthook = sys.excepthook
        self._mpi: Any = sys.modules["mpi4py.MPI"] if self.comm is not None and is_mpi(comm) else None
        if self._mpi is not None:
            self._set_abort_status = self._mpi._set_abort_status
            self._mpi._set_abort_status = self._note_status
        if self.comm is not None:
            sys.excepthook = self.fail

    def watch(self, world):
        """Finalize `world` at exit, unless ``forget`` is called before."""
        self.world = world
        atexit.register(self._at_exit)

    def forget(self):
        """The World is finalized: leave no trace."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self.fail:
            sys.excepthook = self._excepthook
        if self._mpi is not None and self._mpi._set_abort_status == self._note_status:
            self._mpi._set_abort_status = self._set_abort_status

    def exit(self, status):
        """SystemExit(status) leaves a World: with other ranks and a status other than 0, end them all now."""
        if self.comm is None or status in (None, 0):
            return
        rank, number = self.comm.Get_rank(), status if isinstance(status, int) else 1
        say(f"shmemkit: rank {rank}: {f'exits with status {number}' if number is status else status}")
        self._abort(number)

    def fail(self, kind, error, trace):
        """Show an exception that nobody caught, and end all ranks."""
        rank = self.comm.Get_rank() if self.comm is not None else 0
        if getattr(error, "shown_by", rank) != rank:
            time.sleep(5.0)  # another rank shows it, and ends this one
        of = "failed at exit" if self.comm is None else f"rank {rank} of {self.comm.Get_size()} failed"
        say(f"shmemkit: {of}\n{told(error)}")
        if self.world is not None:
            with contextlib.suppress(Exception):
                self.world.end_timeline(error)
        self._abort(1)

    def _note_status(self, status):
        self.status = status
        self._set_abort_status(status)

    def _at_exit(self):
        if self.status:
            self._abort(self.status)
        try:
            self.world.finalize()
        except BaseException as error:
            self.fail(type(error), error, error.__traceback__)

    def _abort(self, status):
        sys.stdout.flush()
        if self.comm is None:
            os._exit(status)
        time.sleep(0.2)  # let the launcher forward what was printed before it ends us
        self.comm.Abort(status)
