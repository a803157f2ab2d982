"""Says where a kernel thread is that runs on and on.

Threads take turns only where they wait, synchronize or poll. A loop on an ordinary load, ``while flag[0] ==
0: pass``, never gives the others a turn; on a GPU, the compiler may read the flag only once, so that it is a
mistake there too.
"""

import sys
import threading
import time

from .report import kernel_line, who
from .thread import Thread


class Watchdog:
    """Looks after the scheduler that it was given last; it speaks after `seconds` without a switch."""

    def __init__(self, seconds=10.0):
        self.seconds = seconds
        self.watched = self.looker = None

    def watch(self, scheduler):
        """From now on, look after the threads of `scheduler`, which run in the calling operating-system
        thread."""
        self.watched = scheduler, threading.get_ident()
        if self.looker is None or not self.looker.is_alive():  # at first, and after a fork
            self.looker = threading.Thread(target=self._look_on, name="shmemkit-watchdog", daemon=True)
            self.looker.start()

    def _look_on(self):
        seen = since = None
        while threading.current_thread() is self.looker:
            time.sleep(self.seconds / 10)
            scheduler, ident = self.watched
            state = scheduler, scheduler.progress, scheduler.spinning.polls
            if state != seen:
                seen, since = state, time.monotonic()
            elif since is not None and time.monotonic() - since > self.seconds:
                text = _running(sys._current_frames().get(ident))
                if text:
                    print(
                        f"shmemkit: {text}\n  runs for {self.seconds:g} s without waiting for anybody, and "
                        "nobody else has a turn. Is it a loop on an ordinary load? Use wait, ld_acquire or "
                        "an atomic",
                        file=sys.stderr,
                        flush=True,
                    )
                    since = None  # once is enough


def _running(frame):
    """Which kernel thread runs, and its line, if `frame` is that of one."""
    bottom = frame
    while bottom is not None and bottom.f_code is not Thread.run.__code__:
        bottom = bottom.f_back
    if bottom is None:
        return None
    line = kernel_line(frame)
    return who(bottom.f_locals["self"]) + (f" at {line}" if line else "")


of_launches = Watchdog()
