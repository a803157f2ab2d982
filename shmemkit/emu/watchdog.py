"""Says where a kernel thread is that runs on and on.

Threads take turns only where they wait, meet or poll. A loop on an ordinary load, ``while flag[0] == 0:
pass``, never gives the others a turn; on a GPU, the compiler may read the flag only once, so that it is a
mistake there too.
"""

import sys
import threading
import time

from .report import kernel_line, who
from .thread import Thread

SECONDS = 10.0  # without a switch
_watched = _dog = None


def watch(scheduler):
    """From now on, look after the threads of `scheduler`, which run in the calling operating-system
    thread."""
    global _watched, _dog
    _watched = scheduler, threading.get_ident()
    if _dog is None or not _dog.is_alive():  # at first, and after a fork
        _dog = threading.Thread(target=_look_on, name="shmemkit-watchdog", daemon=True)
        _dog.start()


def _look_on():
    seen = since = None
    while threading.current_thread() is _dog:
        time.sleep(SECONDS / 10)
        scheduler, ident = _watched
        state = scheduler, scheduler.progress, scheduler.spinning.polls
        if state != seen:
            seen, since = state, time.monotonic()
        elif since is not None and time.monotonic() - since > SECONDS:
            text = _running(sys._current_frames().get(ident))
            if text:
                print(
                    f"shmemkit: {text}\n  runs for {SECONDS:.0f} s without waiting for anybody, and nobody "
                    "else has a turn. Is it a loop on an ordinary load? Use wait, ld_acquire or an atomic",
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
