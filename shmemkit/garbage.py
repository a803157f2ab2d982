"""No garbage collection for a while: where many objects are made that stay, the collector looks at all of
them again and again, in vain."""

import contextlib
import gc

_pauses, _was_enabled = 0, False


def pause():
    """No collection until as many calls of ``resume`` as of this."""
    global _pauses, _was_enabled
    if _pauses == 0:
        _was_enabled = gc.isenabled()
        gc.disable()
    _pauses += 1


def resume():
    global _pauses
    _pauses -= 1
    if _pauses == 0 and _was_enabled:
        gc.enable()


@contextlib.contextmanager
def uncollected():
    pause()
    try:
        yield
    finally:
        resume()
