"""Exchanges of segments by copy engines, in pieces: they copy to staged memory on the peers, and a few blocks
take what has come there, while the next pieces are copied. What reduce-scatter, all-to-all and all-gather
share: each peer gets a segment of x of its own, or all get the same; and what comes is combined, or stored.

Segments  one for each rank, of the same size. A segment is cut into 3 pieces or more, each half as large as
          the one before: each of its copies takes some microseconds besides its bytes, so that few are
          needed, and little remains when all are done
Staged    staged[k], on every rank: what rank k gives it, written by that rank's copies. Its last piece has a
          place that no other piece of any call has. What I give myself stays in x: nothing is copied here
Signals   ready[k, b], on every rank: how many pieces of rank k's have been copied, as its block b says (only
          rank k sets it)
Counters  calls[b], local: how many launches block b has taken part in: pieces of all calls. In device memory,
          so that a replayed graph counts on

  a stream beside, for each piece p:
          1. copy it to staged[me] on each peer, one after the other, the next rank first; from piece 2 on,
             after kernel 0
  stream, for each piece p, kernel p, after its copies, by block b:
          2. set ready[me, b] on all others to the number of this launch    release, sys: publishes the copies
          3. wait until ready[k, b] here is at least that, for all k        acquire, sys: sees theirs
          4. take the piece from x and staged: combine it in the order of the ranks, or store it to the
             segments of the output

No race, although nobody acknowledges. A graph's copies always go to the same addresses, so that calls cannot
take turns with two halves; but the pieces can, as the last one has its own place. When my kernel of it has
ended, all ranks have begun theirs, and so ended those of the pieces before: the next call may write their
places, as soon as my stream comes to it. When my kernel 0 of that call has ended, all ranks have begun
theirs, and so ended the call before: the copies after it may write the last piece's place, and are the only
ones that do, since there are two pieces before. x and out may be used again when the stream has run the last
kernel, which comes after all copies. Of what is copied, nothing is written before: if x and out overlap, then
only in what this rank keeps of x, which it alone loads, and a thread loads its words before it stores them.

No deadlock: kernel p waits for kernels p of the others, which wait for their copies of pieces up to p, and
those, in turn, for kernel 0 at most; all blocks are resident. The host enqueues them in an order in which
they can run one by one.

Copies go to one peer after the other, so that each rank sends to one and receives from one other: to all of
three at once, on a stream for each, they took half as long again. What kernels do moves n_ranks bytes or more
in this GPU's memory for n_ranks - 1 that arrive: BLOCKS do so faster than they arrive, because the last piece
is taken when all copies are done.
"""

import itertools

from numba import cuda, types

from shmemkit.device import copy_block, num_ranks, rank, span
from shmemkit.kernels.lanes import Lanes
from shmemkit.kernels.meeting import meet
from shmemkit.kernels.method import Method

PIECES = 3  # at least
LAST = 1 << 24  # bytes of the last piece, at most
BLOCKS = 44  # of a kernel, at most: a third of H200's multiprocessors
PART = 1 << 12  # bytes that are worth a block
LINE = 16  # words: at multiples of them pieces and parts begin


class CopiedPieces(Method):
    """A method of these. A subclass has its `name`, as "all_to_all copy_engine"."""

    def prepare_pieces(self, max_nbytes):
        """For segments of a rank's share of `max_nbytes`. Collective."""
        world, n = self.world, self.world.n_ranks
        world.check_reach(self.name)
        words, name = max(1, -(-max_nbytes // (8 * n))), self.name.replace(" ", ".")
        self.last = _lines(words)  # where the last piece's place begins
        self.staged = self.empty((n, self.last + last_of(words)), "uint64", f"{name}.staged")
        self.blocks = min(BLOCKS, -(-8 * words // PART))
        self.ready = self.zeros((n, self.blocks), "uint64", f"{name}.ready")
        self.calls = world.xp.zeros(self.blocks, "uint64")
        self.lanes = Lanes(world)

    def bind_pieces(self, segments, take):
        """-> run(stream)

        segments  of x: segments[k] for rank k, on all ranks of the same size; uint64 or uint8
        take      take(first, size, at, part, staged, stride) -> kernel p, bound with `blocks` blocks: for
                  elements first to first + size of the segments, of which `part` are a block's. Rank k's are
                  in staged, 1-D, of x's dtype, from at + k * stride on
        """
        me, n, backend = self.world.rank, self.world.n_ranks, self.world.backend
        dtype, unit = segments[me].dtype, 8 // segments[me].itemsize
        staged, stride = self.staged.reshape(-1).view(dtype), self.staged.shape[1] * unit
        copies, kernels = [], []
        pieces = pieces_of(-(-segments[me].nbytes // 8))
        for p, (first, size) in enumerate(pieces):
            at = (first if p < len(pieces) - 1 else self.last) * unit
            first, end = (min(word * unit, segments[me].size) for word in (first, first + size))
            there = staged[at + me * stride :][: end - first]
            copies.append([])
            for peer in (*range(me + 1, n), *range(me)) if there.size else ():
                to = self.world.peer_view(there, peer)
                copies[-1].append(backend.copy(to, segments[peer][first:end]))
            part = _lines(-(-size // self.blocks)) * unit
            kernels.append(take(first, there.size, at, part, staged, stride))
        return lambda stream: self._run(copies, kernels, stream)

    def _run(self, copies, kernels, stream):
        backend = self.world.backend
        main, order = backend.handle(stream), backend.order
        (beside,) = self.lanes.beside(stream, 1)
        order(beside, main)
        for p, of_piece in enumerate(copies):
            for copy in of_piece:
                copy(beside)
            if p > 0:
                kernels[p - 1](stream)
            if p == 1:
                order(beside, main)
            order(main, beside)
        kernels[-1](stream)


def pieces_of(words):
    """-> (first, size) of each piece of so many words, which begin with whole lines."""
    count = PIECES
    while words * 8 > LAST * (2**count - 1):
        count += 1
    unit = _lines(-(-words // (2**count - 1)))  # the last one; the one before is two of them, and so on
    firsts = [min(words, (2**count - 2**p) * unit) for p in range(count, -1, -1)]
    return [(first, end - first) for first, end in itertools.pairwise(firsts)]


def last_of(words):
    """Room for the last piece of so many words, or fewer."""
    return _lines(min(LAST // 8, -(-words // (2**PIECES - 1))))


def _lines(words):
    """At least so many words, in whole lines."""
    return words + LINE - 1 & -LINE


# ---- pieces that are stored


@cuda.jit
def store_copied(x, out, in_place, mine, segment, first, size, part, staged, at, stride, ready, calls):
    """Store a piece of all ranks, when it is there, to their segments of `out`.

    x, out    uint64 or uint8, 1-D; out is n_ranks segments
    in_place  whether my own is there already; else it is in x, from `mine` on
    segment   elements of one
    first     of the piece in a segment, of `size` elements; a block has `part` of them
    staged    likewise, 1-D: rank k's piece begins with at + k * stride
    ready     uint64 (n_ranks, gridDim.x), symmetric, zeros at first
    calls     uint64 (gridDim.x,), zeros at first
    grid      any, one-dimensional, as the blocks are; the same in all launches
    """
    b, me, n = cuda.blockIdx.x, rank(), num_ranks()
    begin = min(b * part, size)
    length = min(part, size - begin)
    to = first + begin
    call = calls[b] + 1
    if not in_place:
        copy_block(span(out, me * segment + to, length), span(x, mine + to, length))
    meet(ready, b, call)
    cuda.syncthreads()
    y = 1
    while y < n:
        k = me + y if me + y < n else me + y - n
        copy_block(span(out, k * segment + to, length), span(staged, at + k * stride + begin, length))
        y += 1
    if cuda.threadIdx.x == 0:
        calls[b] = call


class StoredPieces(CopiedPieces):
    """A method whose pieces are stored. A subclass has `personalized`, too: whether x has a segment for each
    rank."""

    def prepare(self, max_nbytes):
        self.prepare_pieces(max_nbytes)
        for dtype in ("uint64", "uint8"):
            self.bind(*[self.world.xp.empty(0, dtype)] * 2, False)

    def bind(self, x, out, in_place):
        me, n = self.world.rank, self.world.n_ranks
        segment = out.size // n
        segments = [x[k * segment : (k + 1) * segment] for k in range(n)] if self.personalized else [x] * n
        mine = me * segment if self.personalized else 0

        def take(first, size, at, part, staged, stride):
            how = bool(in_place), mine, segment, first, size, part, staged, at, stride
            return self.launch(store_copied, self.blocks, x, out, *how, self.ready, self.calls)

        return self.bind_pieces(segments, take)


_words = types.Array(types.uint64, 1, "C")
GPU_KERNELS = {
    f"store_copied[{kind}]": (
        store_copied,
        (
            *[types.Array(kind, 1, "C")] * 2,
            types.boolean,
            *[types.int64] * 5,
            types.Array(kind, 1, "C"),
            *[types.int64] * 2,
            *(types.Array(types.uint64, 2, "C"), _words),
        ),
    )
    for kind in (types.uint64, types.uint8)
}
