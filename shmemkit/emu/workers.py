"""Greenlets that run threads.

A new greenlet costs ten times what a short kernel does. So a worker runs threads one after the other, as long
as none of them has to wait. A thread that waits keeps its worker until it has ended, and another worker runs
the next thread. Workers without threads are kept for later ones, also of later worlds.
"""

import threading
from typing import Any

from greenlet import getcurrent, greenlet

current: Any = getcurrent  # of a thread that runs, it is the worker
MOST_IDLE = 16_384  # workers that are kept; each has a stack of some KiB


class Worker(greenlet):
    __slots__ = ("thread",)
    thread: Any

    def run(self):
        idle = _idle.workers
        while True:
            self._run_threads()
            if len(idle) >= MOST_IDLE:
                return
            idle.append(self)
            self.parent.switch()

    def _run_threads(self):
        """Run its thread, then those of the block that are next and that nobody has begun."""
        thread = self.thread
        block, scheduler = thread.block, thread.block.scheduler
        ready, alone = scheduler.ready, scheduler.choice is not None
        while True:
            thread.run()
            if alone or not ready or scheduler.failure is not None:
                break
            thread = ready[0]
            if thread.block is not block or thread.worker is not None:
                break
            ready.popleft()
            thread.worker = self
            self.thread = thread
        self.thread = None  # an idle worker keeps nothing


class _Idle(threading.local):
    """The workers of an operating-system thread that run nothing: greenlets cannot leave theirs."""

    def __init__(self):
        self.workers = []


_idle = _Idle()


def begin(thread):
    """Run `thread` for the first time."""
    idle, hub = _idle.workers, thread.block.scheduler.hub
    worker = idle.pop() if idle else Worker()
    if worker.parent is not hub:
        worker.parent = hub
    worker.thread = thread
    thread.worker = worker
    worker.switch()


def running() -> Any:
    """The thread, or the host program, that runs."""
    greenlet = current()
    return getattr(greenlet, "thread", greenlet)
