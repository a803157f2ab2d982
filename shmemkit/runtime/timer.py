"""How long a call takes on the GPUs.

The calls are captured in one CUDA graph, and the graph is replayed several times between CUDA events. The
replays are enqueued one after another and the host does not wait between them: the time between two events is
the GPU's work alone, unless the host takes longer to launch a graph (some microseconds) than the GPU to run
it. The time of a call is the median over the replays of elapsed time / calls in the graph, then the maximum
over the ranks.

``times`` compares several graphs. It replays them in rounds, each graph after a barrier of the ranks on the
stream, so that no rank begins later than the others and makes them wait. Each round has its own order, the
same on all ranks: what runs before a graph, and the clock rate and caches that it leaves, changes from round
to round.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from shmemkit.support.agreement import check_equal
from shmemkit.support.settings import integer, shown

from .world import World, check_world

SMALL = 4 << 20  # bytes; larger calls are long enough to take fewer of them


class Timer:
    """Times calls that enqueue work on the World's stream, in a CUDA graph.

        timer = sk.Timer(world)
        us = timer(lambda: gather(x, out))  # microseconds, the same number on all ranks

    world    the World
    iters    calls in a CUDA graph; default 20, 1 on the emulator
    replays  of the graph; default 20, 1 on the emulator

    The time is the median over the replays of the time between two CUDA events, divided by iters, then the
    maximum over the ranks. A graph must take longer on the GPU than its launch on the host, some
    microseconds, else the launch is what is timed. On the emulator there is no GPU and no graph: the host's
    clock times one call. That number says nothing about GPUs; it lets the same program run there.

    TypeError if `world` is not a World or a number is not an integer, ValueError for numbers below 1.
    """

    def __init__(self, world: World, iters: int | None = None, replays: int | None = None):
        check_world("Timer", world)
        self.world, self.emulated = world, world.backend.name == "emulator"
        self._iters = _count("iters", iters)
        self.replays = _count("replays", replays) or (1 if self.emulated else 20)

    def __call__(self, call: Callable[[], object], iters: int | None = None) -> float:
        """-> how long ``call()`` takes, in microseconds: a float, the maximum over the ranks. Collective.

        call   enqueues work on the World's stream, which is PyTorch's current stream meanwhile. It is called
               once before the capture, which compiles and loads its kernels, and then `iters` times. It must
               not wait for the GPU, nor allocate memory: a CUDA graph cannot capture that. It must work any
               number of times in a row: a signal that is set to 1 each time is a mistake
        iters  calls in the graph; default: the Timer's

        Calls in a graph follow each other without a pause, and what they load may still be in the L2 cache.
        ValueError for a call that cannot be captured, and for `iters` or `replays` that differ between ranks;
        TypeError for a `call` that is no function.
        """
        iters = _count("iters", iters) or self.iters_for(0)
        if not callable(call):
            raise TypeError(f"Timer: call is {shown(call)}; it must be a function")
        with self._pytorch_follows():
            call()
        return self.time(self.capture(call, iters), iters)

    def iters_for(self, n_bytes: int) -> int:
        """-> how many calls that move `n_bytes` bytes the Timer puts in a graph: its `iters`, or else 20 up
        to 4 MiB and 5 above (the emulator: 1)."""
        return self._iters or (1 if self.emulated else 20 if n_bytes <= SMALL else 5)

    def capture(self, call: Callable[[], object], iters: int) -> Any:
        """-> replay, a function that enqueues `iters` calls: a CUDA graph, CuPy's ``replay.graph`` (on the
        emulator the calls; it has no graph).

        Run ``call()`` once before: a graph cannot capture that its kernels are compiled and loaded.
        ValueError for a call that cannot be captured.
        """
        if self.emulated:

            def replay():
                for _ in range(iters):
                    call()

            return replay
        try:
            graph = self._captured(call, iters)
        except RuntimeError as error:
            raise ValueError(f"Timer: a CUDA graph cannot capture the call: {error}") from error

        def replay():
            graph.launch(self.world.stream)

        replay.graph = graph
        return replay

    def _captured(self, call, iters):
        stream = self.world.stream
        with self._pytorch_follows():
            stream.begin_capture()
            try:
                for _ in range(iters):
                    call()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture may be broken
                    stream.end_capture()
                raise
            return stream.end_capture()

    def _pytorch_follows(self):
        """A context in which PyTorch's current stream is the World's, where calls with its tensors go, after
        what PyTorch has enqueued before."""
        torch = sys.modules.get("torch")
        if self.emulated or torch is None or not torch.cuda.is_initialized():  # it has no tensors on the GPU
            return contextlib.nullcontext()
        stream = torch.cuda.ExternalStream(self.world.stream.ptr)
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def time(self, replay: Callable[[], object] | None, iters: int) -> float:
        """-> microseconds of each of the `iters` calls that ``replay()`` enqueues on the World's stream, as
        a CUDA graph of the program's own: the median over the replays, then the maximum over the ranks.
        Collective; a rank whose `replay` is None only takes part.
        """
        return self._times(f"iters={iters}", lambda: [self._in_a_row(replay)])[0] / iters

    def times(self, replays: Sequence[Callable[[], object]]) -> list[float]:
        """-> a list: the microseconds of each of `replays`, timed in rounds; the maximum over the ranks.
        Collective."""
        return self._times(f"{len(replays)} graph(s)", lambda: self._in_rounds(replays))

    def _times(self, given, replayed):
        world = self.world
        world.synchronize()
        of_ranks = world.host_allgather(f"{given} and replays={self.replays}")  # and a barrier
        check_equal(of_ranks, "Timer needs the same on all ranks")
        with self._pytorch_follows():
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


def _count(name, value):
    """`value`, None or an integer of 1 or more."""
    return None if value is None else integer("Timer", name, value, 1)
