"""Side streams: they run beside a stream, for work that goes on at the same time."""


class SideStreams:
    """The side streams of a World. A stream takes part in one graph capture at a time, so each capture gets
    side streams of its own."""

    def __init__(self, world):
        self._backend = world.backend
        self._of_capture = {None: []}

    def of(self, stream, count):
        """-> handles of `count` side streams of `stream` (None: the World's). Order them after it first: then
        they are part of its capture, if it has one."""
        backend, capture = self._backend, self._backend.capture_of(stream)
        if capture not in self._of_capture:  # the side streams of earlier captures are not needed any more
            self._of_capture = {None: self._of_capture[None], capture: []}
        streams = self._of_capture[capture]
        while len(streams) < count:
            streams.append(backend.new_stream())
        return [backend.handle(side) for side in streams[:count]]

    @property
    def captures(self):
        """The number of captures that have side streams."""
        return len(self._of_capture) - 1
