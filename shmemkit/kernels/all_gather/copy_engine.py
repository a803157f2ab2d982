"""All-gather by copy engines: copies that the streams themselves carry out, without a kernel.

For large messages, and beside kernels that want all multiprocessors: what goes between GPUs takes none.

Segments  segment k of `out` is what rank k gives
Staged    staged, on every rank: its own segment, where the others read it (only to pull, see below)

"copy_push", into a symmetric `out` (the same part of the same array on all ranks):

  stream:     1. barrier of all ranks: their outs may be written
              2. copy x to segment me of out on me - 1, me - 2, ... modulo the ranks
              3. barrier: all segments are there
  beside it:     copy x to segment me here

"copy_pull", and "copy_push" into an `out` of private memory, which nobody else can write:

  stream:     1. copy x to staged; barrier: those of all ranks may be read
              2. copy staged on me + 1, me + 2, ... to their segments of out here
              3. barrier: all have read
  beside it:     copy x to segment me here

Into a symmetric `out`, copy_pull does without `staged`: the others read segment me of out. In each part of
step 2 every rank sends to one other and receives from one other, at full speed. The barriers
(``shmemkit.stream_barrier``) are kernels of a block and two microseconds; they release and acquire at scope
sys, so that nothing is written before, nor read after, what it must follow. `staged` needs no second half: a
call ends when all have read it.

``start`` and ``finish`` are the same in two halves, with a consumer between them: a kernel that works on each
segment as soon as it is there. It may occupy all multiprocessors and wait for segments, so that no kernel can
begin beside it; the signals are memory operations of the streams then, which cost more (some 20 us in all):

Signals   ready[k], arrived[k] and taken[k], on every rank: 0 or 1. A stream's operations that were captured
          in a graph store and await constants, so that these do not count calls: who has waited for one sets
          it back

  beside the consumer's stream:
              1. set ready[me] on the others                                release, sys
                 wait for every ready[k] here, and set it back              acquire, sys
              2. the copies; after each, set arrived, there if it has pushed, here if it has pulled
                 pulled: set taken[me] on the others: I have read it        release, sys
  consumer:      waits for arrived[k] and leaves it: all of its threads may look
  finish:     3. wait for all arrived, or taken, here, and set them back    acquire, sys

No signal is lost, although one rank sets it back and another one sets it again, since that comes after
something that I do after I have set it back. Rank k sets
  ready[k] here again   in its next call, after it has waited, in step 3, for the arrived[me] or taken[me]
                        that I set there after my step 1: I have set ready[k] back in it
  arrived[k], taken[k]  in a later call, after it has waited for the ready[me] of mine
And none is taken for that of another call: all are set back when a call ends, whatever the next one does.
arrived[me] is 1 for ever: copies within this GPU, for which the driver may use multiprocessors, come before
the consumer on its own stream, lest they wait for one that a consumer occupies which waits for them.

No deadlock: each step tells the others before it waits, for the same step of theirs.
"""

import functools

from shmemkit.kernels.lanes import Lanes
from shmemkit.kernels.method import Method
from shmemkit.stream_barrier import bind_barrier


class CopyEngine(Method):
    """All-gathers by copies, of at most `max_nbytes` gathered bytes. Collective.

    arrived   symmetric uint64 (n_ranks,): the segments that are here, for the consumer of ``overlap``
    pushes    whether segments are pushed into a symmetric `out`, not pulled

    ValueError, on all ranks, where one of them does not reach the memory of all, or its streams have no
    memory operations. These wait without limit: SHMEMKIT_TIMEOUT is for kernels.
    """

    pushes, freed = True, False
    parts = 1  # of a segment, each with a signal of its own

    def prepare(self, max_nbytes):
        n = self.world.n_ranks
        self._prepare_signals(max_nbytes)
        self.taken = self.zeros(n, "uint64", "all_gather.copy.taken")
        self.staged = self.empty(-(-max_nbytes // n), "uint8", "all_gather.copy.staged")
        arrivals = self.zeros(n, "uint64", "all_gather.copy.barrier")
        self.barrier = bind_barrier(arrivals, self.world.xp.zeros(1, "uint64"), n, self.world.stream)

    def _prepare_signals(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        reason = next(filter(None, world.host_allgather(world.backend.no_copies())), None)
        if reason:
            raise ValueError(f"all-gather by copy engines cannot be used here: {reason}. Take another method")
        self.max_nbytes = max_nbytes
        self.ready = self.zeros(n, "uint64", "all_gather.copy.ready")
        self.arrived = self.zeros(n * self.parts, "uint64", "all_gather.copy.arrived")
        with world.stream:
            self.arrived[world.rank * self.parts : (world.rank + 1) * self.parts] = 1
        world.stream.synchronize()
        self.lanes = Lanes(world)
        self.started = None  # the Transfer that is to be finished

    def bind(self, x, out, in_place):
        return Transfer(self, x.view("uint8"), out.view("uint8"), in_place).run

    def overlap(self, x, out, own="first"):
        """-> the Transfer that gathers `x` in `out`: to be made once, and then to ``start`` and ``finish``.

        x     C-contiguous, any dtype and shape, of the same size on all ranks. May be its part of `out`,
              which need not be copied there then, but not overlap it otherwise
        out   C-contiguous, of x's dtype and n_ranks times as many elements, of max_nbytes at most: on all
              ranks the same part of the same symmetric array, or on all ranks private memory
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
        world = self.world
        if (
            not (x.flags.c_contiguous and out.flags.c_contiguous)
            or x.dtype != out.dtype
            or out.size != world.n_ranks * x.size
            or out.nbytes > self.max_nbytes
        ):
            raise ValueError(
                f"overlap: x is {x.dtype} {x.shape}, out {out.dtype} {out.shape}: C-contiguous arrays of one "
                f"dtype are allowed, out {world.n_ranks} times as large, of at most {self.max_nbytes} bytes"
            )
        at, to = world.backend.address(x), world.backend.address(out)
        in_place = at == to + world.rank * x.nbytes
        if at < to + out.nbytes and to < at + x.nbytes and not in_place:
            raise ValueError("overlap: x may be its own part of out, out[rank], but not overlap it otherwise")
        return in_place

    def check_alive(self):
        if self.freed:
            raise RuntimeError("copy engine: it was freed; make a new one")

    def free(self):
        self.freed = True
        super().free()


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
        self.engine, self.world, self.backend = engine, engine.world, engine.world.backend
        me, n, size = self.world.rank, self.world.n_ranks, x.size
        self.peers = [(me + i) % n for i in range(1, n)]  # in the order in which their segments come
        segments = [out[k * size : (k + 1) * size] for k in range(n)]
        self.own = [] if in_place else [self._copy(segments[me], me, x, me)]
        self.stage, self.copies = [], []  # before everything else; between GPUs
        symmetric = size > 0 and self.world.is_symmetric(out)
        self.pushes = symmetric and engine.pushes
        if self.peers and self.pushes:
            self.copies = [self._copy(segments[me], p, x, me) for p in self.peers[::-1]]
        elif self.peers:
            staged = segments if symmetric else [engine.staged[:size]] * n  # on rank k: what it gives
            if symmetric:
                self.stage, self.own = self.own, []
            else:
                self.stage = [self._copy(staged[me], me, x, me)]
            self.copies = [self._copy(segments[p], me, staged[p], p) for p in self.peers]
        self.first = self.own if own == "first" else []  # for ``start``: before the consumer
        self.last = self.own if own == "last" else []  # beside it, after all other copies

    @functools.cached_property
    def halves(self):
        """For ``start`` and ``finish``: what each stream beside does, the copies with memory operations after
        each; and the last operations."""
        if not self.peers:
            return [[*self.last]], []
        me, peers = self.world.rank, self.peers
        ready, arrived = self.engine.ready, self.engine.arrived
        if self.pushes:
            signals = [[self._tell(arrived, me, p)] for p in peers[::-1]]
            last = self._await(arrived)
        else:
            taken = self.engine.taken
            signals = [[self._tell(arrived, p, me)] for p in peers]
            signals[-1] += [self._tell(taken, me, p) for p in peers]
            last = self._await(taken) + self._set_back(arrived)
        operations = self.backend.memory_operations
        first = [operations([self._tell(ready, me, p) for p in peers] + self._await(ready))]
        for copy, its in zip(self.copies, signals, strict=True):
            first += [copy, operations(its)]
        return [[*first, *self.last]], [operations(last)]

    def _copy(self, dst, to, src, at):
        """From memory of rank `at` to that of rank `to`."""
        if src.size == 0:
            return _nothing
        return self.backend.copy(self.world.peer_view(dst, to), self.world.peer_view(src, at))

    def _tell(self, signals, k, on):
        """Set signal k on rank `on`."""
        return "write", self.world.peer_view(signals[k : k + 1], on), 1

    def _await(self, signals, peers=None):
        """Wait for those of `peers` (None: of all others) here, and set them back."""
        return self._wait(signals, peers) + self._set_back(signals, peers)

    def _wait(self, signals, peers=None):
        return [("wait", word, 1) for word in self._of(peers, signals)]

    def _set_back(self, signals, peers=None):
        return [("write", word, 0) for word in self._of(peers, signals)]

    def _of(self, peers, signals):
        each = signals.size // self.world.n_ranks
        peers = self.peers if peers is None else peers
        return [signals[i : i + 1] for p in peers for i in range(p * each, (p + 1) * each)]

    def run(self, stream=None):
        """Gather: when the stream has run it, all segments are there, and x may be overwritten."""
        self._check(None)
        target, barrier = stream, self.engine.barrier
        (side,) = self.engine.lanes.beside(stream, 1)
        stream = self.backend.handle(stream)
        _enqueue(self.stage, stream)
        if self.own:
            self.backend.order(side, stream)
            _enqueue(self.own, side)
        if self.peers:
            barrier(target)
            _enqueue(self.copies, stream)
            barrier(target)
        if self.own:
            self.backend.order(stream, side)

    def start(self, stream=None):
        """Begin to gather. A kernel that is launched on `stream` now may ``wait(engine.arrived[k:], 1, "sys",
        "acquire", 1)`` and then read segment k of out. They come in the order of the ranks after this one;
        its own is there, if it was to be copied first."""
        self._check(None)
        lanes = self.engine.lanes.beside(stream, len(self.halves[0]))
        stream = self.backend.handle(stream)
        _enqueue(self.stage, stream)
        for lane, operations in zip(lanes, self.halves[0], strict=True):
            self.backend.order(lane, stream)
            _enqueue(operations, lane)
        _enqueue(self.first, stream)
        self.engine.started = self

    def wait(self, stream=None):
        """Between ``start`` and ``finish``: what is enqueued on the stream now finds the segments of all
        others there."""
        self._check(self)
        if self.peers:
            self.backend.memory_operations(self._wait(self.engine.arrived))(self.backend.handle(stream))

    def finish(self, stream=None):
        """When the stream has run it, all segments are there, and x and out may be overwritten."""
        self._check(self)
        lanes = self.engine.lanes.beside(stream, len(self.halves[0]))
        stream = self.backend.handle(stream)
        for lane in lanes:
            self.backend.order(stream, lane)
        _enqueue(self.halves[1], stream)
        self.engine.started = None

    def _check(self, started):
        self.engine.check_alive()
        if self.engine.started is not started:
            raise RuntimeError(
                "a Transfer was started and not finished" if started is None else "finish: start comes before"
            )


def _enqueue(operations, stream):
    for operation in operations:
        operation(stream)


def _nothing(stream):
    pass
