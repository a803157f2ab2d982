"""Exchanges of segments by copy engines: they copy to staged memory on the peers, and blocks take what has
come there, while more is copied. What reduce-scatter, all-reduce, all-to-all and all-gather share: each peer
gets a segment of x of its own, or all get the same; and what comes is combined, or stored.

Segments  one for each rank, of the same size
Staged    staged[k], on every rank: what rank k gives it, written by that rank's copies. What I give myself
          stays in x
Steps     of all ranks alike: what goes from each rank to the one that is y after it, a range of the segment.
          To be stored, the segments for ranks me + 1, me + 2, .. come whole, one after the other, but for the
          last of them: this comes in pieces, so that little remains to be stored when all is copied. To be
          combined, the first part of all of them comes first, which is combined while the rest comes
Signals   ready[k, b], on every rank: how many kernels of rank k's have begun, as its block b says (only rank
          k sets it)
Counters  calls[b], local: how many kernels block b has taken part in, on all ranks the same ones. In device
          memory, so that a replayed graph counts on

  stream:          1. barrier of all ranks (``shmemkit.stream_barrier``): their staged memory may be written.
                      (An all-reduce has others, later)
  a stream beside: 2. the copies of each step, in order, after the barrier
  stream, for each step that has a kernel, after its copies, by block b:
                   3. set ready[me, b] on all others to the number of this kernel  release, sys: publishes the
                                                                                   copies of mine
                   4. wait until ready[k, b] here is at least that, for all k      acquire, sys: sees theirs
                   5. take it from x and staged: combine it in the order of the ranks, or store it

No race. What a call copies comes after its barrier, to which all ranks come when their kernels of the call
before have ended, which alone read staged; and none of its copies goes where another one has gone. x and out
may be used again when the stream has run the last kernel, which comes after all copies. Of what is copied,
nothing is written before: if x and out overlap, then only in what this rank keeps of x, which it alone loads,
and a thread loads its words before it stores them.

No deadlock: the kernel of a step waits for those of the others, which wait for their copies, and these for
the barrier; all blocks are resident. The host enqueues all this in an order in which it can run one by one.

Each rank sends to one and receives from one other at a time: copies to all of three at once, on a stream
each, took nearly twice as long on H200s, and two streams to the same one longer than one. A copy costs some 3
microseconds besides its bytes, copies after a kernel and a kernel after copies 6.
"""

import itertools
from typing import NamedTuple

from numba import cuda, types

from shmemkit.device import copy_block, span
from shmemkit.kernels.lanes import Lanes
from shmemkit.kernels.meeting import meet
from shmemkit.kernels.method import Method
from shmemkit.kernels.own import bind_store
from shmemkit.stream_barrier import bind_barrier

SHARES = 3 / 4, 7 / 8  # of a segment: where its first part, and the next piece, end
BLOCKS = 88  # of a kernel, at most: two thirds of H200's multiprocessors
PART = 1 << 12  # bytes that are worth a block
LINE = 16  # words: at multiples of them pieces and parts begin


class Step(NamedTuple):
    """What ``CopiedPieces.run`` has done: `copies`, beside the stream; then `kernel`, on it."""

    copies: list = ()
    kernel: object = None
    after: int | None = None  # the number of a step whose kernel ends before these and later copies begin


class CopiedPieces(Method):
    """A method of these. A subclass has its `name`, as "all_to_all copy_engine"."""

    def prepare_pieces(self, max_nbytes):
        """For segments of a rank's share of `max_nbytes`. Collective."""
        world, n = self.world, self.world.n_ranks
        world.check_reach(self.name)
        words, name = max(1, -(-max_nbytes // (8 * n))), self.name.replace(" ", ".")
        self.staged = self.empty((n, _lines(words)), "uint64", f"{name}.staged")
        most = min(BLOCKS, *world.host_allgather(world.backend.multiprocessors))
        self.blocks = min(most, -(-8 * words // PART))
        self.ready = self.zeros((n, self.blocks), "uint64", f"{name}.ready")
        arrivals = self.zeros(n, "uint64", f"{name}.arrivals")
        self.calls, epoch = world.xp.zeros(self.blocks, "uint64"), world.xp.zeros(1, "uint64")
        self.barrier = bind_barrier(arrivals, epoch, n, world.stream)
        self.lanes = Lanes(world)

    def staging(self, dtype):
        """-> staged memory, flat, of words of `dtype`, uint64 or uint8; and how many of them a rank has"""
        staged = self.staged.reshape(-1).view(dtype)
        return staged, staged.size // self.world.n_ranks

    def copies_of(self, segments, y, first, end, out=None):
        """-> the copies of a step: elements `first` to `end` of segments[k] to rank k, the y-th after this
        one; to its staged memory or, from `first` on, to `out`, symmetric"""
        me, n = self.world.rank, self.world.n_ranks
        k = (me + y) % n
        if k == me or first == end:
            return []
        if out is None:
            staged, stride = self.staging(segments[k].dtype)
            out = staged[me * stride :]
        return [self.world.backend.copy(self.world.peer_view(out[first:end], k), segments[k][first:end])]

    def part_of(self, array):
        """-> how many of its elements a block takes: whole lines"""
        unit = 8 // array.itemsize
        return _lines(-(-array.size // (self.blocks * unit))) * unit

    def run(self, steps, stream, first=None):
        """Enqueue `steps`, after the kernel `first`."""
        if not steps:  # of one rank, in place
            return
        backend, awaited = self.world.backend, sorted({step.after for step in steps} - {None})
        main, order = backend.handle(stream), backend.order
        beside, *ends = self.lanes.beside(stream, 1 + len(awaited))
        ends = dict(zip(awaited, ends, strict=True))  # streams that come after the kernels of these steps
        if first:
            first(stream)
        order(beside, main)
        for number, step in enumerate(steps):
            if step.after is not None:
                order(beside, ends[step.after])
            for copy in step.copies:
                copy(beside)
            if step.kernel:
                order(main, beside)
                step.kernel(stream)
            if number in ends:
                order(ends[number], main)
        if not step.kernel:
            order(main, beside)


def cuts_of(size, itemsize, *shares):
    """-> where parts of `size` elements begin, and the last one ends: at 0, where these `shares` of it end,
    at whole lines, and at size"""
    unit = 8 // itemsize
    words = -(-size // unit)
    return [0, *(min(size, _lines(int(words * share)) * unit) for share in shares), size]


def one_by_one(cuts, n_ranks):
    """-> (y, first, end) of the steps, in their order, that give segments to one rank after the other:
    elements `first` to `end` to the y-th after this one, cut so for the last of them."""
    last = [(n_ranks - 1, *piece) for piece in itertools.pairwise(cuts)] if n_ranks > 1 else []
    return [(y, 0, cuts[-1]) for y in range(1, n_ranks - 1)] + last


def in_rounds(cuts, n_ranks):
    """-> likewise: the first part to all ranks, and then the rest, for the last of them cut so. Of one rank,
    y is 0."""
    last, (_, first, *_, end) = n_ranks - 1, cuts
    begun = [(y, 0, first) for y in range(1, last)]
    ended = [(y, first, end) for y in range(1, last)]
    return [*begun, (last, 0, first), *ended, *((last, *piece) for piece in itertools.pairwise(cuts[1:]))]


def _lines(words):
    """At least so many words, in whole lines."""
    return words + LINE - 1 & -LINE


# ---- steps that are stored


@cuda.jit
def store_copied(out, rows, part, ready, calls):
    """Store what has been copied, when all ranks have got so far.

    out, rows  uint64 or uint8, 1-D, of the same size: rows to out
    part       elements of a block: gridDim.x of them are out, or more
    ready      uint64 (n_ranks, gridDim.x), symmetric, zeros at first
    calls      uint64 (gridDim.x,), zeros at first
    grid       any, one-dimensional, as the blocks are; the same in all launches
    """
    b = cuda.blockIdx.x
    begin = min(b * part, out.size)
    length = min(part, out.size - begin)
    call = calls[b] + 1
    meet(ready, b, call)
    cuda.syncthreads()
    copy_block(span(out, begin, length), span(rows, begin, length))
    if cuda.threadIdx.x == 0:
        calls[b] = call


class StoredPieces(CopiedPieces):
    """A method whose segments are stored. A subclass has `personalized`, too: whether x has a segment for
    each rank."""

    def prepare(self, max_nbytes):
        self.prepare_pieces(max_nbytes)
        for dtype in ("uint64", "uint8"):
            nothing = self.world.xp.empty(0, dtype)
            self._store(nothing, nothing)
            bind_store(self, nothing, nothing)

    def bind(self, x, out, in_place):
        n = self.world.n_ranks
        own = [] if in_place else [self.store_own(x, out)]
        portions = one_by_one(cuts_of(out.size // n, out.itemsize, *SHARES), n)
        steps = own + self.steps(self.segments_of(x, n), out, portions)
        return lambda stream: self.run(steps, stream, self.barrier)

    def segments_of(self, x, n):
        """-> what goes to each rank"""
        size = x.size // n
        return [x[k * size : (k + 1) * size] for k in range(n)] if self.personalized else [x] * n

    def store_own(self, x, out):
        """-> the Step that stores this rank's own segment. It does not count: others may be in place."""
        me, n, size = self.world.rank, self.world.n_ranks, out.size // self.world.n_ranks
        return Step(kernel=bind_store(self, out[me * size : (me + 1) * size], self.segments_of(x, n)[me]))

    def steps(self, segments, out, portions):
        """-> the Steps of these `portions`, (y, first, end), which come to `out`."""
        me, n, segment = self.world.rank, self.world.n_ranks, out.size // self.world.n_ranks
        staged, stride = self.staging(out.dtype)
        steps = []
        for y, first, end in portions:
            k = (me - y) % n
            mine, its = out[k * segment :], staged[k * stride :]
            store = self._store(mine[first:end], its[first:end])
            steps.append(Step(self.copies_of(segments, y, first, end), store))
        return steps

    def _store(self, out, rows):
        return self.launch(store_copied, self.blocks, out, rows, self.part_of(out), self.ready, self.calls)


_words = types.Array(types.uint64, 1, "C")
GPU_KERNELS = {
    f"store_copied[{kind}]": (
        store_copied,
        (
            *[types.Array(kind, 1, "C")] * 2,
            types.int64,
            *(types.Array(types.uint64, 2, "C"), _words),
        ),
    )
    for kind in (types.uint64, types.uint8)
}
