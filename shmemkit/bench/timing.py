"""How everything here is timed.

`iters` calls are captured in one CUDA graph, the graph is replayed `replays` times between CUDA events, and
the time of a call is the median over the replays of elapsed / iters, then the maximum over the ranks. The
replays are enqueued one after another without a wait of the host, so that between two events there is the
GPU's work alone.

Several graphs are replayed in rounds, one after a barrier of the ranks on the stream: then none begins later
on another rank, for which it would wait. Each round has an order of its own, the same on all ranks, so that
none always follows the same other one, with the clock and the caches that this leaves.

The emulator has no clock of a GPU: there calls are timed on the host, to try out everything else.
"""

import contextlib
import random
import statistics
import time
from itertools import pairwise

SMALL = 4 << 20  # bytes; larger calls are long enough to take fewer of them
METHOD = (
    "iters calls in one CUDA graph, replayed between CUDA events; median over replays of elapsed / iters, "
    "then the maximum over ranks; random data; results checked bit for bit in the same run"
)
METHOD_OF_ROUNDS = (
    "iters calls of each method in a CUDA graph; in each round all graphs of a shape replayed, in random "
    "order, each after a barrier of the ranks and between two CUDA events; median over rounds of elapsed / "
    "iters, then the maximum over ranks; random data; results checked in the same run, by the relative error "
    "of the norm"
)
ON_EMULATOR = "emulator: times mean nothing"


class Clock:
    """Times calls on the World's stream.

    iters    calls per graph: an integer, or None: 20 up to 4 MB, 5 above (the emulator: 1)
    replays  of the graph: an integer, or None: 20 (the emulator: 1)
    """

    def __init__(self, world, iters=None, replays=None):
        self.world, self.emulated = world, world.backend.name == "emulator"
        self._iters, self.replays = iters, replays or (1 if self.emulated else 20)

    def iters(self, n_bytes):
        """How many calls that move `n_bytes` go into one graph."""
        return self._iters or (1 if self.emulated else 20 if n_bytes <= SMALL else 5)

    def capture(self, call, iters):
        """-> replay: it enqueues what `iters` times ``call()`` does, a CUDA graph (the emulator: the calls).

        ``call()`` has run before: a graph cannot capture that it is compiled and loaded. ValueError for what
        cannot be captured.
        """
        if self.emulated:

            def replay():
                for _ in range(iters):
                    call()

            return replay
        try:
            graph = self._captured(call, iters)
        except RuntimeError as error:
            raise ValueError(f"no CUDA graph of it: {error}") from error
        return lambda: graph.launch(self.world.stream)

    def _captured(self, call, iters):
        stream = self.world.stream
        stream.begin_capture()
        try:
            for _ in range(iters):
                call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture may be broken
                stream.end_capture()
            raise
        return stream.end_capture()

    def time(self, replay, iters):
        """-> microseconds that each of the `iters` calls of ``replay()`` takes, the maximum over the ranks.
        Collective; a rank whose `replay` is None takes part without doing anything."""
        return self._times(lambda: [self._in_a_row(replay)])[0] / iters

    def times(self, replays):
        """-> microseconds that each of `replays` takes, in rounds, the maximum over the ranks. Collective."""
        return self._times(lambda: self._in_rounds(replays))

    def _times(self, replayed):
        world = self.world
        world.synchronize()
        world.host_barrier()
        spans = replayed()
        world.synchronize()
        us = [statistics.median(map(self._elapsed, of_one)) if of_one else 0.0 for of_one in spans]
        return [max(of_ranks) for of_ranks in zip(*world.host_allgather(us), strict=True)]

    def _in_a_row(self, replay):
        """-> [(event before, event after), ...] of each time"""
        if replay is None:
            return []
        self._warm_up(replay)
        events = self._events(self.replays + 1)
        events[0].record(self.world.stream)
        for event in events[1:]:
            replay()
            event.record(self.world.stream)
        return list(pairwise(events))

    def _in_rounds(self, replays):
        """-> likewise, of each of `replays`"""
        world, n = self.world, len(replays)
        for replay in replays:
            self._warm_up(replay)
            world.synchronize()  # an upload may wait for all that runs: nothing here may wait for it
        spans = [[self._events(2) for _ in range(self.replays)] for _ in replays]
        for r in range(self.replays):
            for i in random.Random(r).sample(range(n), n):
                before, after = spans[i][r]
                world.barrier()
                before.record(world.stream)
                replays[i]()
                after.record(world.stream)
        return spans

    def _warm_up(self, replay):
        """The first launch of a graph uploads it."""
        if not self.emulated:
            replay()

    def _events(self, n):
        return [HostEvent() if self.emulated else self.world.xp.cuda.Event() for _ in range(n)]

    def _elapsed(self, span):
        """Microseconds."""
        before, after = span
        if self.emulated:
            return 1e6 * (after.at - before.at)
        return 1e3 * self.world.xp.cuda.get_elapsed_time(before, after)


class HostEvent:
    """As one of CuPy's, by the host's clock."""

    def record(self, stream):
        stream.synchronize()
        self.at = time.perf_counter()
