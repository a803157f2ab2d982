"""When one rank fails, all end: nobody waits for a rank that will never come.

An exception that nobody caught, or an exit with a status other than 0 under ``python -m mpi4py`` (as
``shmemkit run`` starts programs), aborts the program on all ranks. If another ``sys.excepthook`` took the
place of ours, the exception is found at exit. One in a thread counts if it came through shmemkit: the others
wait for that thread's call. A World that is alive at exit is finalized; when that fails, the exit status says
so.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import Any

from shmemkit.comm.choice import is_mpi
from shmemkit.support.command_line import say_at_last
from shmemkit.support.tracebacks import passes_through_us, traceback_of, uncaught


class ExitHandler:
    """Ends all ranks when this process, which has a World, fails, and finalizes the World at exit. `comm`: a
    Communicator, or None for one rank."""

    def __init__(self, comm):
        self.comm = comm if comm is not None and comm.Get_size() > 1 else None
        self.world: Any = None
        self.status = 0  # the exit status that mpi4py was told, if not 0
        self.over = False
        self._excepthook, self._in_thread = sys.excepthook, threading.excepthook
        self._earlier = uncaught()  # of a program that has gone on since
        self._mpi: Any = sys.modules["mpi4py.MPI"] if self.comm is not None and is_mpi(comm) else None
        if self._mpi is not None:
            self._set_abort_status = self._mpi._set_abort_status
            self._mpi._set_abort_status = self._note_status
        if self.comm is not None:
            sys.excepthook, threading.excepthook = self.fail, self.fail_in_thread

    def watch(self, world):
        """Finalize `world` at exit, unless ``forget`` is called before."""
        self.world = world
        atexit.register(self._at_exit)

    def forget(self):
        """The World is finalized: leave no trace."""
        self.over, self.world = True, None
        atexit.unregister(self._at_exit)
        if sys.excepthook == self.fail:
            sys.excepthook = self._excepthook
        if threading.excepthook == self.fail_in_thread:
            threading.excepthook = self._in_thread
        if self._mpi is not None and self._mpi._set_abort_status == self._note_status:
            self._mpi._set_abort_status = self._set_abort_status

    def leave_to_parent(self):
        """This process is a child of the rank: it ends no rank and no World."""
        self.forget()
        if self.comm is not None and self._mpi is not None:
            self._set_abort_status = lambda status: None
            self._mpi._set_abort_status = self._note_status
        self.comm = None

    def exit(self, status):
        """SystemExit(status) leaves a World: with other ranks and a status other than 0, end them all now."""
        if self.comm is None or status in (None, 0):
            return
        rank, number = self.comm.Get_rank(), status if isinstance(status, int) else 1
        say_at_last(f"shmemkit: rank {rank}: {f'exits with status {number}' if number is status else status}")
        self._abort(number)

    def fail(self, kind, error, trace):
        """Show an exception that nobody caught, and end all ranks."""
        if self.over:  # whoever replaced ``sys.excepthook`` still calls the one that was there
            return self._excepthook(kind, error, trace)
        rank = self.comm.Get_rank() if self.comm is not None else 0
        if getattr(error, "reported_by", rank) != rank:
            time.sleep(5.0)  # another rank shows it, and ends this one
        of = "failed at exit" if self.comm is None else f"rank {rank} of {self.comm.Get_size()} failed"
        say_at_last(f"shmemkit: {of}\n{traceback_of(error)}")
        if self.world is not None:
            with contextlib.suppress(Exception):
                self.world.end_timeline(error)
        self._abort(1)

    def fail_in_thread(self, arguments):
        """As ``fail``, of a thread's exception, if it came through shmemkit."""
        if self.over or arguments.exc_type is SystemExit or not passes_through_us(arguments.exc_traceback):
            self._in_thread(arguments)
        else:
            self.fail(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    def _note_status(self, status):
        self.status = status
        self._set_abort_status(status)

    def _at_exit(self):
        error = uncaught()
        if error is not None and error is not self._earlier and self.comm is not None:
            self.fail(type(error), error, error.__traceback__)
        if self.status:
            self._abort(self.status)
        try:
            self.world.finalize()
        except BaseException as error:
            self.fail(type(error), error, error.__traceback__)

    def _abort(self, status):
        status = status & 0xFF or 1  # the system keeps these bits; a failure never ends with 0
        with contextlib.suppress(Exception):  # a disk that is full, a pipe that is closed
            sys.stdout.flush()
        if self.comm is None:
            os._exit(status)
        time.sleep(0.2)  # let the launcher forward what was printed before it ends us
        self.comm.Abort(status)
        os._exit(status)  # MPICH's Abort returns
