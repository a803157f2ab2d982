"""No garbage collection for a while: where many objects are made that stay, the collector looks at all of
them again and again, in vain."""

import contextlib
import gc
import threading

_lock, _users, _was_enabled = threading.Lock(), 0, False


@contextlib.contextmanager
def uncollected():
    """While any thread is in here. The last one out enables the collector, if it was on before the first."""
    global _users, _was_enabled
    with _lock:
        if _users == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _was_enabled:
                gc.enable()
