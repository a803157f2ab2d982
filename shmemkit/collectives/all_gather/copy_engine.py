"""All-gather by copy engines (``copy_engines.py``), for large messages, and beside kernels that need all
multiprocessors.

Segments  segment k of `out` is what rank k gives
Staged    staged, on every rank: its own segment, where the others read it (only to pull into private memory)

"copy_push", into a symmetric `out` (the same part of the same array on all ranks):

  stream:       1. barrier of all ranks: their outs may be written
  side stream:  2. copy x to segment me of out on me - 1, me - 2, ... modulo the ranks
  stream:          a few blocks store x to segment me here
                3. barrier, after the copies: all segments are there

"copy_pull", and "copy_push" into an `out` of private memory, which no other rank can write:

  stream:       1. copy x to staged, or to segment me of a symmetric out; barrier: all others may read it
  side stream:  2. copy it from me + 1, me + 2, ... to their segments of out here
  stream:          a few blocks store x to segment me here
                3. barrier, after the copies: all ranks have read

``start`` and ``finish`` split the call in two, with a consumer between them: a kernel that works on each
segment as soon as it is there. It may occupy all multiprocessors and wait for segments. So streams write its
signals, by memory operations, which need no multiprocessor.

Signals   arrived[k], on every rank: 1 when segment k of this call is here, else 0. arrived[me] is always 1

  stream:       1. as above; before its barrier arrives at rank k, it sets arrived[k] here to 0
  side stream:  2. the copies; after each, a write of 1 (release, sys): pushed, to arrived[me] there; pulled,
                   to arrived[k] here
  consumer:        waits until arrived[k] >= 1 (acquire, sys): it sees the copy
  finish:       3. stream: after the copies of the side stream
                   pushed: a kernel waits for all arrived, unless the consumer has done that
                   pulled: barrier: all ranks have read

Copies within this GPU come before the consumer on its stream, or after all other copies, where nobody waits
for them. Otherwise they might wait for a multiprocessor that a consumer occupies, which waits for them. No
stream waits for a signal, which would be slow, and none writes many signals at once.

No signal is lost. Rank k writes its 1 here after the barrier of the same call. The thread that sets
arrived[k] to 0 arrives at rank k only after that (release, sys). A rank that pulls writes the signal itself,
after that kernel.

No signal is taken for that of another call. Each is written once in a call. The call ends when this write has
been seen: pushed, by the consumer or the kernel of step 3; pulled, by the stream, which waits for the side
stream that writes. So a 1 that is seen after the reset is of this call. Nobody looks during the reset: what
waits for signals is earlier on the stream, and has ended.

No race. The barriers release and acquire at scope sys. A rank writes on rank k after the barrier of step 1,
which rank k reaches when its consumer of the previous call has ended. What a rank reads there is not written
again before the barrier of step 3. So `staged` needs no second buffer.

No deadlock. Streams reach a barrier before their consumer, and without waiting for this call. Copies wait
only for a barrier; a consumer, or the kernel of step 3, for copies.
"""

from __future__ import annotations

import functools
from typing import Literal

from numba import cuda, types

from shmemkit.device import span, wait
from shmemkit.runtime.launch import MAX_THREADS, bind
from shmemkit.runtime.side_streams import SideStreams
from shmemkit.runtime.stream_barrier import bind_team_barrier
from shmemkit.support.settings import array_text
from shmemkit.typing import AnyStream, Array

from ..copy_engines import Copying, enqueue


@cuda.jit
def await_segments(arrived):
    """Wait until all of them are 1.

    arrived  uint64, 1-D: signals
    grid     1; any number of threads
    """
    i = cuda.threadIdx.x
    while i < arrived.size:
        wait(span(arrived, i, 1), 1, "sys", "acquire", 1)
        i += cuda.blockDim.x


class CopyEngine(Copying):
    """All-gathers by copies, of at most `max_nbytes` gathered bytes, among `ranks` of the World: a range that
    this one is in, or None for all. Collective for all ranks of the World, each with a range of its own or
    that of others.

    arrived   symmetric uint64 (len(ranks),): the segments that are here, for the consumer of ``overlap``
    pushes    whether segments are pushed into a symmetric `out`, not pulled

    ValueError, on all ranks, where one of them does not reach the memory of all, or its streams have no
    memory operations.
    """

    pushes = True

    def prepare(self, max_nbytes, ranks=None):
        world = self.world
        reason = next(filter(None, world.host_allgather(world.backend.no_copies(ranks))), None)
        if reason:
            raise ValueError(f"all_gather by copy engines cannot be used here: {reason}")
        self.max_nbytes = max_nbytes
        self.ranks = range(world.n_ranks) if ranks is None else ranks
        self.me, self.n_ranks = world.rank - self.ranks.start, len(self.ranks)
        self._arrivals = self.zeros(world.n_ranks, "uint64", "all_gather.copy.arrivals")
        self.arrived = self.signals(1, "all_gather.copy.arrived")
        self.allocate()
        self._epoch, self.side_streams = world.xp.zeros(1, "uint64"), SideStreams(world)
        self.barrier, self.awaiting = self.kernels_of(self.arrived)
        self.bind_store(*[world.xp.empty(0, "uint8")] * 2)
        self.started = None  # the Transfer that is to be finished

    def allocate(self):
        """Memory besides. Collective."""
        self.staged = self.empty(-(-self.max_nbytes // self.n_ranks), "uint8", "all_gather.copy.staged")

    def signals(self, parts, name):
        """-> uint64, symmetric: so many of each segment; those of the own one are 1."""
        signals = self.zeros(self.n_ranks * parts, "uint64", name)
        with self.world.stream:
            signals[self.me * parts : (self.me + 1) * parts] = 1
        self.world.stream.synchronize()
        return signals

    def kernels_of(self, signals):
        """-> the barrier that sets these back, and what waits for all of them"""
        world, threads = self.world, min(self.n_ranks, MAX_THREADS)
        barrier = bind_team_barrier(self._arrivals, self._epoch, self.ranks, signals, world)
        return barrier, bind(await_segments, 1, threads, (signals,), stream=world.stream)

    def view(self, array, k):
        """`array` on the k-th of the ranks: symmetric, if that is another one."""
        return array if k == self.me else self.world.peer_view(array, self.ranks[k])

    def bind(self, x, out, in_place):
        return Transfer(self, x.view("uint8"), out.view("uint8"), in_place).run

    def overlap(self, x: Array, out: Array, own: Literal["first", "last", "never"] = "first") -> Transfer:
        """-> the Transfer that gathers `x` in `out`: to be made once, and then to ``start`` and ``finish``.

        x     C-contiguous, any dtype and shape, of the same size on all ranks. May be its part of `out`,
              which need not be copied there then, but not overlap it otherwise
        out   C-contiguous, of x's dtype and as many times as large as there are ranks, of max_nbytes at most:
              on all ranks the same part of the same symmetric array, or on all ranks private memory
        own   when x is copied to its part of `out` here: "first", before the consumer; "last", beside it, for
              one that reads x itself; "never", for one that needs nothing else

        ValueError for what this rank can see to be wrong. Not checked: that sizes and memory are alike on all
        ranks. If they are not, the results are wrong, or ranks wait for ever. RuntimeError after ``free``.
        """
        in_place = self._check_arrays(x, out)
        return Transfer(self, x.reshape(-1).view("uint8"), out.reshape(-1).view("uint8"), in_place, own)

    def _check_arrays(self, x, out):
        """-> whether x is its part of out"""
        self.check_alive()
        if (
            not (x.flags.c_contiguous and out.flags.c_contiguous)
            or x.dtype != out.dtype
            or out.size != self.n_ranks * x.size
            or out.nbytes > self.max_nbytes
        ):
            raise ValueError(
                f"overlap(): x is {array_text(x)} and out is {array_text(out)}; they must be C-contiguous "
                f"and of one dtype, and out {self.n_ranks} times as large, {self.max_nbytes} bytes at most"
            )
        address = self.world.backend.address
        at, to = address(x), address(out)
        in_place = at == to + self.me * x.nbytes
        if at < to + out.nbytes and to < at + x.nbytes and not in_place:
            raise ValueError("overlap(): x and out overlap; x must be out[rank], or lie outside of out")
        return in_place

    def check_alive(self):
        if not self._arrays:
            raise RuntimeError("copy engine: it was freed; make a new one")


class CopyPush(CopyEngine):
    """The method "copy_push" of ``AllGather``."""


class CopyPull(CopyEngine):
    """The method "copy_pull" of ``AllGather``."""

    pushes = False


class Transfer:
    """One all-gather of these arrays, as often as it is wanted; in graphs, too.

    Either ``run(stream)``; or ``start(stream)``, the launch of the consumer on the same stream, and
    ``finish(stream)``. A stream of None is the World's. The caller keeps the arrays alive. The calls of one
    CopyEngine, of all its Transfers, follow each other in the same order on all ranks, on one stream or
    ordered by events. RuntimeError when one begins before another has been finished, or when the engine has
    been freed.
    """

    def __init__(self, engine, x, out, in_place, own="first"):
        self.engine, self.backend = engine, engine.world.backend
        me, n, size = engine.me, engine.n_ranks, x.size
        self.barrier, self.awaiting = engine.barrier, engine.awaiting
        segments = [out[k * size : (k + 1) * size] for k in range(n)]
        symmetric = engine.world.is_symmetric(out)
        self.pushes = symmetric and engine.pushes
        # In the order in which their segments arrive, or in which they need this one.
        self.peers = [(me - i if self.pushes else me + i) % n for i in range(1, n)]
        copied = [] if in_place else [self._copy(segments[me], me, x, me)]
        stored = [] if in_place else [engine.bind_store(segments[me], x)]
        self.stage = []  # before everything else
        if self.pushes:
            self.copies = [self._copy(segments[me], p, x, me) for p in self.peers]
        elif symmetric:
            self.stage, copied, stored = copied, [], []
            self.copies = [self._copy(segments[p], me, segments[p], p) for p in self.peers]
        else:
            staged = engine.staged[:size]
            self.stage = [self._copy(staged, me, x, me)]
            self.copies = [self._copy(segments[p], me, staged, p) for p in self.peers]
        self.first = copied if own == "first" else []  # for ``start``: before the consumer
        self.last = copied if own == "last" else []  # beside it, after all other copies
        self.whole = engine.copying(self.copies, stored, last=[engine.barrier])

    @functools.cached_property
    def side_operations(self):
        """What ``start`` has done beside the stream: the copies, after each its signal."""
        engine, operations = self.engine, []
        for p, copy in zip(self.peers, self.copies, strict=True):
            k, to = (engine.me, p) if self.pushes else (p, engine.me)
            operations += [copy, self._set(engine.arrived, k, to)]
        return operations + self.last

    def _copy(self, dst, to, src, at):
        """From memory of rank `at` to that of rank `to`."""
        if src.size == 0:
            return _nothing
        return self.backend.copy(self.engine.view(dst, to), self.engine.view(src, at))

    def _set(self, signals, k, to):
        """Set signal k on rank `to`."""
        return self.backend.memory_operations([("write", self.engine.view(signals[k : k + 1], to), 1)])

    def run(self, stream: AnyStream | None = None) -> None:
        """Gather: when the stream has run it, all segments are there, and x may be overwritten."""
        self._check(None)
        enqueue(self.stage, self.backend.handle(stream))
        self.whole(stream)

    def start(self, stream: AnyStream | None = None) -> None:
        """Begin to gather. A kernel that is launched on `stream` now may ``wait(engine.arrived[k:], 1, "sys",
        "acquire", 1)`` and then read segment k of out. They come in the order of the ranks after this one;
        its own is there, if it was to be copied first."""
        self._check(None)
        enqueue(self.stage, self.backend.handle(stream))
        self.barrier(stream)
        main, side = self.engine.fork(stream)
        enqueue(self.side_operations, side)
        enqueue(self.first, main)
        self.engine.started, self.capture = self, self.backend.capture_of(stream)

    def wait(self, stream: AnyStream | None = None) -> None:
        """Between ``start`` and ``finish``: what is enqueued on the stream now finds the segments of all
        others there."""
        self._check(self, stream)
        if self.pushes:
            self.awaiting(stream)
        else:
            self._follow(stream)

    def finish(self, stream: AnyStream | None = None, awaited: bool = False) -> None:
        """When the stream has run it, all segments are there, and x and out may be overwritten.

        awaited  whether what is on the stream since ``start`` has waited for all segments: then that need not
                 be done again. If it has not, the next call may take signals of this one for its own
        """
        self._check(self, stream)
        self._follow(stream)
        if not self.pushes:
            self.barrier(stream)
        elif not awaited:
            self.awaiting(stream)
        self.engine.started = None

    def _follow(self, stream):
        """What is enqueued on the stream now comes after the copies beside it."""
        self.backend.order(self.backend.handle(stream), self.engine.side_streams.of(stream))

    def _check(self, started, stream=None):
        self.engine.check_alive()
        if self.engine.started is not started:
            raise RuntimeError(
                "start(): another Transfer was started and not finished. Finish it or, after an error, make "
                "a new engine"
                if started is None
                else "wait() or finish(): this Transfer was not started. Call start() first"
            )
        if started is not None and self.capture != self.backend.capture_of(stream):
            raise RuntimeError(
                "finish(): this Transfer was started in another capture of a graph, or in none. Start and "
                "finish it in the same one; after a capture that failed, make a new engine"
            )


def _nothing(stream):
    pass


_words = types.Array(types.uint64, 1, "C")
GPU_KERNELS = {"await_segments": await_segments}
