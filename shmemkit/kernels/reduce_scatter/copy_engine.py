"""Reduce-scatter by copy engines: they scatter, each rank's segments to the ranks that they are for, and a
few blocks combine what has come. For large messages, and beside kernels that want the multiprocessors.

Segments  x is n_ranks segments, the k-th for rank k. A segment is cut into 3 pieces or more: while one is
          combined, the next ones are copied. Each is half of what remains, so that few copies are needed,
          and little remains when all are done
Staged    staged[k], on every rank: its segment of rank k's x, written by that rank's copies. Its last piece
          has a place that no other piece of any call has. My own segment stays in x: nothing is copied here
Signals   ready[k, b], on every rank: how many pieces of rank k's have been copied, as its block b says (only
          rank k sets it)
Counters  calls[b], local: how many launches block b has taken part in: pieces of all calls. In device memory,
          so that a replayed graph counts on

  lanes, a stream for each peer, for each piece p:
          1. copy it to staged[me] on the peer; from piece 2 on, after kernel 0
  stream, for each piece p, kernel p, after its copies, by block b:
          2. set ready[me, b] on all others to the number of this launch    release, sys: publishes the copies
          3. wait until ready[k, b] here is at least that, for all k        acquire, sys: sees theirs
          4. load the piece from x and staged, in the order of the ranks, combine it, and store the result

They combine in the order of the ranks, so the bits are the same in every run.

No race, although nobody acknowledges. A graph's copies always go to the same addresses, so that calls cannot
take turns with two halves; but the pieces can, as the last one has its own place. When my kernel of it has
ended, all ranks have begun theirs, and so ended those of the pieces before: the next call may write their
places, as soon as my stream comes to it. When my kernel 0 of that call has ended, all ranks have begun
theirs, and so ended the call before: the copies after it may write the last piece's place, and are the only
ones that do, since there are two pieces before. x and out may be used again when the stream has run the last
kernel, which comes after all copies. out may be my segment of x: only I load it, and a thread loads its words
before it stores them.

No deadlock: kernel p waits for kernels p of the others, which wait for their copies of pieces up to p, and
those, in turn, for kernel 0 at most; all blocks are resident. The host enqueues them in an order in which
they can run one by one.

Copies to all peers at once were faster than one after the other, each of which takes some microseconds
besides. Combining moves n_ranks + 1 bytes in this GPU's memory for n_ranks - 1 that arrive: BLOCKS do so
faster than they arrive, because the last piece is combined when all copies are done.
"""

import functools

from numba import cuda, types

from shmemkit.device import n_words, num_ranks, rank, reduction, store_word
from shmemkit.kernels.meeting import meet
from shmemkit.kernels.method import Method

from .rows import combining

LAST = 1 << 22  # bytes of a segment that are not cut again
MIN_PIECES, MAX_PIECES = 3, 8
LANES = 4  # streams, at most
BLOCKS = 44  # of a kernel, at most: a third of H200's multiprocessors
PART = 1 << 12  # bytes that are worth a block
LINE = 16  # words: at multiples of them pieces and parts begin


@functools.cache
def reduction_kernel(op, dtype, n_ranks):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    _, _, result = reduction(op, dtype)
    one, four = combining(op, dtype, n_ranks)

    @cuda.jit(max_registers=128)  # of 512 threads; only of int8 as bytes some are spilled
    def combine_copied(mine, out, part, staged, at, stride, ready, calls):
        """Combine a piece of all ranks, when it is there, in `out`.

        mine, out  uint64 or uint8 (the bytes of elements of `dtype`), 1-D, of the same size: the piece of
                   this rank's own x, and of the output; may be the same
        part       words of a block's part: gridDim.x of them are out, or more
        staged     uint64, 1-D: rank k's piece begins with word at + k * stride
        ready      uint64 (n_ranks, gridDim.x), symmetric, zeros at first
        calls      uint64 (gridDim.x,), zeros at first
        grid       any, one-dimensional, as the blocks are; the same in all launches
        """
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n, size = rank(), num_ranks(), n_words(out)
        call = calls[b] + 1
        meet(ready, b, call)
        cuda.syncthreads()
        i, end = b * part + t, min((b + 1) * part, size)
        while i + 3 * threads < end:
            p, q, r, s = four(mine, staged, at, stride, me, n, i, threads)
            store_word(out, i, result(p, n))
            store_word(out, i + threads, result(q, n))
            store_word(out, i + 2 * threads, result(r, n))
            store_word(out, i + 3 * threads, result(s, n))
            i += 4 * threads
        while i < end:
            store_word(out, i, result(one(mine, staged, at, stride, me, n, i), n))
            i += threads
        if t == 0:
            calls[b] = call

    return combine_copied


class CopyEngine(Method):
    """The method "copy_engine" of ``ReduceScatter``."""

    def prepare(self, max_nbytes, op):
        world, n = self.world, self.world.n_ranks
        world.check_reach("reduce_scatter copy_engine")
        self.op, words = op, max(1, -(-max_nbytes // (8 * n)))
        self.last = _lines(words)  # where the last piece's place begins
        room = self.last + last_of(words)
        self.staged = self.empty((n, room), "uint64", "reduce_scatter.copy_engine.staged")
        self.blocks = min(BLOCKS, -(-8 * words // PART))
        self.ready = self.zeros((n, self.blocks), "uint64", "reduce_scatter.copy_engine.ready")
        self.calls = world.xp.zeros(self.blocks, "uint64")
        self.lanes = {None: self._new_lanes()}  # by capture: a stream takes part in one at a time

    def bind(self, x, out, in_place, dtype):
        """-> run(stream)"""
        me, n, view = self.world.rank, self.world.n_ranks, self.world.peer_view
        unit = 8 // x.itemsize
        segments = [x[k * out.size : (k + 1) * out.size] for k in range(n)]
        rows, stride = self.staged.reshape(-1), self.staged.shape[1]
        copies, kernels = [], []
        pieces = pieces_of(-(-out.nbytes // 8))
        for p, (first, size) in enumerate(pieces):
            at = first if p < len(pieces) - 1 else self.last
            its = slice(first * unit, (first + size) * unit)
            mine, there = segments[me][its], rows[me * stride + at :].view(x.dtype)
            copies.append([])
            for peer in (*range(me + 1, n), *range(me)) if mine.size else ():
                to = view(there[: mine.size], peer)
                copies[-1].append(self.world.backend.copy(to, segments[peer][its]))
            part = _lines(-(-size // self.blocks))
            args = mine, out[its], part, rows, at, stride, self.ready, self.calls
            kernels.append(self.launch(reduction_kernel(self.op, dtype.name, n), self.blocks, *args))
        return lambda stream: self._run(copies, kernels, stream)

    def _run(self, copies, kernels, stream):
        backend = self.world.backend
        main, order = backend.handle(stream), backend.order
        lanes = [backend.handle(lane) for lane in self._lanes_of(stream)]
        for lane in lanes:
            order(lane, main)
        for p, of_piece in enumerate(copies):
            for j, copy in enumerate(of_piece):
                copy(lanes[j % len(lanes)])
            if p > 0:
                kernels[p - 1](stream)
            for lane in lanes:
                if p == 1:
                    order(lane, main)
                order(main, lane)
        kernels[-1](stream)

    def _lanes_of(self, stream):
        """The lanes beside `stream`, which capture with it if it does."""
        capture = self.world.backend.capture_of(stream)
        if capture not in self.lanes:
            self.lanes = {None: self.lanes[None], capture: self._new_lanes()}
        return self.lanes[capture]

    def _new_lanes(self):
        n_lanes = max(1, min(LANES, self.world.n_ranks - 1))
        return [self.world.backend.new_stream() for _ in range(n_lanes)]


def pieces_of(words):
    """-> (first, size) of each piece of so many words, which begin with whole lines."""
    pieces, first, rest = [], 0, words
    while len(pieces) + 1 < MIN_PIECES or (8 * rest > LAST and len(pieces) + 1 < MAX_PIECES):
        size = min(rest, _lines(-(-rest // 2)))
        pieces.append((first, size))
        first, rest = first + size, rest - size
    return [*pieces, (first, rest)]


def last_of(words):
    """Room for the last piece of so many words, or fewer."""
    return _lines(min(words, max(LAST // 8, (words >> MAX_PIECES - 1) + LINE)))


def _lines(words):
    """At least so many words, in whole lines."""
    return words + LINE - 1 & -LINE


_words = types.Array(types.uint64, 1, "C")
GPU_KERNELS = {
    f"combine_copied[{op},{dtype},{n},{words}]": (
        reduction_kernel(op, dtype, n),
        (
            *[types.Array(words, 1, "C")] * 2,
            *(types.int64, _words, types.int64, types.int64),
            *(types.Array(types.uint64, 2, "C"), _words),
        ),
    )
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, types.uint64),
        ("sum", "float16", 4, types.uint8),
        ("max", "float32", 8, types.uint64),
        ("avg", "float64", 2, types.uint64),
        ("prod", "int8", 16, types.uint64),
    )
}
