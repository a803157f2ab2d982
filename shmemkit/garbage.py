"""No garbage collection for a while: where many objects are made that stay, the collector looks at all of
them again and again, in vain."""

import contextlib
import gc


@contextlib.contextmanager
def uncollected():
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
