"""Streams beside a stream, for what goes on at the same time."""


class Lanes:
    """Streams of a World that run beside others. A graph's capture has some of its own: a stream takes part
    in one at a time, and not in what is enqueued meanwhile."""

    def __init__(self, world):
        self._backend = world.backend
        self._of_capture = {None: []}

    def beside(self, stream, count):
        """-> handles of `count` streams for use beside `stream` (None: the World's), to be ordered after it
        first: then they capture with it if it does"""
        backend, capture = self._backend, self._backend.capture_of(stream)
        if capture not in self._of_capture:  # those of captures before are not needed any more
            self._of_capture = {None: self._of_capture[None], capture: []}
        lanes = self._of_capture[capture]
        while len(lanes) < count:
            lanes.append(backend.new_stream())
        return [backend.handle(lane) for lane in lanes[:count]]

    @property
    def captures(self):
        """Of how many captures it keeps streams."""
        return len(self._of_capture) - 1
