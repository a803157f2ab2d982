"""A process that was forked from a rank (``os.fork``, multiprocessing's "fork") is no rank.

In the child, whatever it calls of shmemkit's raises an error that says so: it would take the parent's place
in a barrier, and CUDA works in no such child. Python tells us of the fork, so that calls need no check: the
objects that all calls go through change their class. A child that calls nothing, as the workers of a pool,
runs on. At its end it leaves the World, MPI and CUDA to the parent: MPI_Finalize in a child breaks the
parent's connection to the launcher.
"""

import atexit
import contextlib
import os
import sys
import weakref

from shmemkit.support.command_line import say_at_last
from shmemkit.support.host_program import host_program
from shmemkit.support.tracebacks import uncaught

_worlds = weakref.WeakSet()  # and groups
_handlers = []  # the ExitHandlers of programs of several ranks
_rank = None  # in a child: the parent's
_status = None  # what a child gave sys.exit()

TEXT = (
    "this process was forked from rank {}, and is no rank itself: it can call nothing of shmemkit. Start it "
    "before shmemkit.init(), or by multiprocessing.get_context('spawn') with RANK and WORLD_SIZE unset"
)


def watch(world, handler):
    """A child that is forked while `world`, which may be a group, is alive is no rank; nor is one that is
    forked later, if `handler`, the World's, has other ranks to end."""
    _worlds.add(world)
    if handler.comm is not None and handler not in _handlers:
        _handlers.append(handler)


def in_child():
    """Whether this process is such a child."""
    return _rank is not None


def refuse(*_, **__):
    raise RuntimeError(TEXT.format(_rank))


def _in_child():
    global _rank
    worlds = [world for world in _worlds if not world.finalized]
    if _rank is not None or not (worlds or _handlers):  # a child's child, or nothing to protect
        return
    mine = host_program().world or next(iter(worlds), None)
    _rank = _handlers[0].comm.Get_rank() if mine is None else mine.world.rank
    for handler in {*_handlers, *(world.world._exit_handler for world in worlds)}:
        handler.leave_to_parent()
    things = [host_program()]
    for world in worlds:
        things += [world, world.backend, world._host, getattr(world.backend, "machine", None)]
    for thing in {id(thing): thing for thing in things if thing is not None}.values():
        _disable(thing)
    from .launch import Launch  # which imports the World's module

    for kind in Launch.__subclasses__():
        kind.__call__ = refuse
    sys.exit = _exit


def _disable(thing):
    """From now on, every use of `thing` raises."""
    kind = type(thing)
    names = {"__getattribute__": _get, "__repr__": lambda _: f"<the {kind.__name__} of another process>"}
    thing.__class__ = type(kind.__name__, (kind,), names)


def _get(thing, name):
    if name == "__class__":  # isinstance asks for it
        return type(thing)
    refuse()


def _exit(status=None):
    """``sys.exit``, which Python does not tell the functions that run at exit about."""
    global _status
    _status = status
    raise SystemExit(status)


def _leave():
    """The end of a child. It is registered before the World's own, so that it runs after those that the
    program has registered."""
    if _rank is None:
        return
    status = next((handler.status for handler in _handlers if handler.status), _status)
    if uncaught() is not None:
        status = 1
    elif not isinstance(status, (int, type(None))):
        say_at_last(status)
        status = 1
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            file.flush()
    os._exit((status or 0) & 0xFF)


atexit.register(_leave)
os.register_at_fork(after_in_child=_in_child)
