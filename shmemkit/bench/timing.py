"""How everything here is timed.

`iters` calls are captured in one CUDA graph, the graph is replayed `replays` times between CUDA events, and
the time of a call is the median over the replays of elapsed / iters, then the maximum over the ranks. The
replays are enqueued one after another without a wait of the host, so that between two events there is the
GPU's work alone.

The emulator has no clock of a GPU: there calls are timed on the host, to try out everything else.
"""

import contextlib
import statistics
import time
from itertools import pairwise

SMALL = 4 << 20  # bytes; larger calls are long enough to take fewer of them
METHOD = (
    "iters calls in one CUDA graph, replayed between CUDA events; median over replays of elapsed / iters, "
    "then the maximum over ranks; random data; results checked bit for bit in the same run"
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

        ``call()`` has run before: a graph cannot capture that it is compiled and loaded.
        """
        if self.emulated:

            def replay():
                for _ in range(iters):
                    call()

            return replay
        stream = self.world.stream
        stream.begin_capture()
        try:
            for _ in range(iters):
                call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture may be broken
                stream.end_capture()
            raise
        graph = stream.end_capture()
        return lambda: graph.launch(stream)

    def time(self, replay, iters):
        """-> microseconds that each of the `iters` calls of ``replay()`` takes, the maximum over the ranks.
        Collective; a rank whose `replay` is None takes part without doing anything."""
        self.world.synchronize()
        self.world.host_barrier()
        us = 0.0
        if replay is not None:
            us = (self._on_host if self.emulated else self._on_gpu)(replay) / iters
        self.world.synchronize()
        return max(self.world.host_allgather(us))

    def _on_gpu(self, replay):
        cuda, stream = self.world.xp.cuda, self.world.stream
        replay()  # the first one uploads the graph
        events = [cuda.Event() for _ in range(self.replays + 1)]
        events[0].record(stream)
        for event in events[1:]:
            replay()
            event.record(stream)
        stream.synchronize()
        return statistics.median(cuda.get_elapsed_time(a, b) for a, b in pairwise(events)) * 1e3

    def _on_host(self, replay):
        times = []
        for _ in range(self.replays):
            start = time.perf_counter()
            replay()
            self.world.stream.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6
