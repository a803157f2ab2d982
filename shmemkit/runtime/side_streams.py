"""Streams beside a stream, for copies."""


class SideStreams:
    """The side streams of a World: they run beside a stream. A stream takes part in one graph capture at a
    time, so each capture gets a side stream of its own."""

    def __init__(self, world):
        self._backend, self._of_capture = world.backend, {None: world.backend.new_stream()}

    def of(self, stream):
        """-> the handle of the side stream of `stream` (None: the World's). Order it after that first: then
        it is part of its capture, if it has one."""
        backend, streams = self._backend, self._of_capture
        capture = backend.capture_of(stream)
        if capture not in streams:  # the side stream of an earlier capture is not needed any more
            self._of_capture = streams = {None: streams[None], capture: backend.new_stream()}
        return backend.handle(streams[capture])

    @property
    def captures(self):
        """The number of captures that have side streams."""
        return len(self._of_capture) - 1
