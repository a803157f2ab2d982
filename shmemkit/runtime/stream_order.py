"""Calls on several streams, in the order of the host's calls."""

from shmemkit.support.call_site import users_call

CAPTURES = 16  # that are known; those that have ended do no harm: no other capture has their number


class StreamOrder:
    """Makes each call run after those before it, whatever their streams, and whatever groups of the World
    make them.

    ``before(stream, name, *arrays, shared=None)`` precedes a call; a stream of None is the World's. It does
    nothing as long as the stream is the same. Captured calls follow only those of the same capture: who
    launches a graph orders it. And while the stream of the last call captures, no stream can wait for the
    work before the capture.

    Why overlapping groups do not deadlock: if the program's calls have one order that all ranks respect, then
    the first call in it that is not done has all its ranks. Each of them has done its earlier calls, and
    begins no later one.

    On the emulator, ValueError if the call with this number is a different one on another rank: it has
    another name, or arrays of another dtype or size; or `shared`, an array that peers use if it is symmetric,
    is another part of symmetric memory there, or private.
    """

    def __init__(self, world):
        self._world, self._calls = world, world.backend.calls
        self._streams = world.world.kept.setdefault(_Streams, _Streams(world.world.backend))

    def before(self, stream, name, *arrays, shared=None):
        if self._calls is not None:
            self.compare(name, *arrays, shared=shared)
        self._streams.follow(stream)

    def compare(self, name, *arrays, shared=None):
        """Only compare the call with those of other ranks, on the emulator."""
        if self._calls is not None:
            given = " and ".join(f"{array.size} {array.dtype}" for array in arrays)
            where = "" if shared is None else _where(self._world.place_of(shared))
            self._calls.enter(f"{name} of {given}{where}" if given else name, users_call(name).site)


class _Streams:
    """Those of the calls of a World and its groups."""

    def __init__(self, backend):
        self._backend = backend
        self._last = {None: None}  # capture, None for none -> the stream of its last call, as far as known
        self._stream, self._captured = None, False  # of the last call

    def follow(self, stream):
        """The next call is on `stream`."""
        if not self._captured and _same(stream, self._stream):
            return
        capture = self._backend.capture_of(stream)
        # A call on the same stream, when it began to capture, was not noticed.
        self._last.setdefault(self._backend.capture_of(self._stream), self._stream)
        if capture in self._last and not _same(self._last[capture], stream):
            self._backend.follow(stream, self._last[capture])
        self._last[capture] = stream
        if len(self._last) > CAPTURES:  # the oldest, after None
            del self._last[list(self._last)[1]]
        self._stream, self._captured = stream, capture is not None


def _same(stream, other):
    """Also of two objects, or addresses, of one stream. (Those of different libraries are not compared.)"""
    return stream is other or (type(stream) is type(other) and stream == other)


def _where(place):
    return " in private memory" if place is None else f" in {place[0]} at byte {place[1]}"


def shared_order(world):
    """-> the StreamOrder that collectives and products of a World, or of a group, share. Their kernels wait
    for other ranks, and some take all multiprocessors: two at a time, each under way on some ranks, would
    wait for ever."""
    return world.kept.setdefault(StreamOrder, StreamOrder(world))
