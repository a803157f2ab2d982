"""Operations of host programs on a stream, as kernels of one thread: races and delivery see them."""

import sys

from shmemkit.emu import report
from shmemkit.emu.grid import Launch


def on_stream(name, stream, primitive, **arguments):
    """Enqueue ``primitive(*arguments)``, a function of ``shmemkit.device``, on the emulated `stream`. Reports
    show it as kernel `name`, at the line of the script that calls."""
    function = _called_from(sys._getframe(1), name, primitive)
    stream.enqueue(Launch(stream, name, function, list(arguments), list(arguments.values())))


def _called_from(frame, name, primitive):
    """`primitive`, called from the innermost line of the script at or above `frame`."""
    frame = report.kernel_frame(frame)

    def call(*arguments):
        primitive(*arguments)

    if frame is not None:
        first = frame.f_lineno - 1  # what `call` does is one line below its head
        call.__code__ = call.__code__.replace(
            co_filename=frame.f_code.co_filename, co_firstlineno=first, co_name=name
        )
    return call
