"""Reduce-scatter around the ring: each rank gets partial results from the rank before it, adds its own, and
sends them to the rank after it. A rank talks to its two neighbours only, and sends n_ranks - 1 segments.

Segments  x is n_ranks segments, the k-th for rank k, each handled as words of its own: one may begin
          anywhere. A segment is cut into as many parts as there are blocks; part b of all is block b's, which
          sends it in chunks
Inbox     inbox[half, s, b], on every rank: part b of what the rank before it sends in its step s, of the
          segment me - 2 - s, modulo the ranks. float16 and bfloat16 travel as float32 (``partials``).
          Written by that rank only
Signal    arrived[b], on every rank: how much of part b is here: the number of the call times STEPS, and how
          many chunks of it. Only the rank before sets it, one chunk after another, by stores that are
          releases: each publishes all before it, so that one signal does for all
Counters  calls[b], local: how many calls block b has taken part in: the number of a call, and the half. In
          device memory, so that a replayed graph counts on

  block b, for s = 0 .. n_ranks - 1, with segment k = me - 1 - s modulo the ranks, for each chunk of part b:
          1. s > 0: wait until arrived[b] says that the chunk of step s - 1 is here   acquire, sys
          2. add x's chunk of segment k to that in inbox[half, s - 1, b]
          3. s < n_ranks - 1: store it to inbox[half, s, b] on the next rank; syncthreads;
             set arrived[b] there                                            release, sys: publishes the chunk
             else, k is me: finish it, and store the result

Segment k begins on rank k + 1 and comes through all ranks after it, modulo the ranks, to rank k: in this
order the ranks' elements are combined, so the bits are the same in every run.

No race: part b is always at the same place, and all ranks count it alike, whatever the lengths of the calls.
I write to half h of the next rank's inbox again two calls with part b later. In the launch between, what is
mine has come around the ring: the next rank has sent it on its way, in a launch that began after its launch
before had ended: it has read what half h held. Within a call, each step has a place of its own. out may be my
segment of x: I load it in the last step only, each word by the thread that stores it then.

No deadlock: step 0 waits for nobody, and step s for a chunk of step s - 1, in the same order on all ranks;
all blocks are resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    load_word,
    n_words,
    notify,
    num_ranks,
    rank,
    reduction,
    store_word,
    symm_at,
    wait_block,
)

from ..method import Method
from ..partial_results import totals

PART = 1 << 12  # bytes that are worth a block
MAX_BLOCKS = 104  # of a grid: one per multiprocessor of A100
CHUNK = 1 << 14  # bytes that are worth a signal
MAX_CHUNKS = 32  # of a part
STEPS = 1 << 16  # more than the chunks that a block gets in a call


@functools.cache
def ring_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    first, add, result = reduction(op, dtype)
    _, load, store = totals(op, dtype)

    @cuda.jit
    def ring_reduce_scatter(x, out, part, chunk, inbox, arrived, calls):
        """Combine the segments of this rank, of the `x` of all ranks, in `out`.

        x, out   uint64 or uint8 (the bytes of elements of `dtype`), 1-D, x n_ranks times as large; out may be
                 x's segment of this rank
        part     words of a part: gridDim.x of them are out
        chunk    words of a chunk: STEPS of them are more than n_ranks parts
        inbox    uint64 (2, n_ranks - 1 or more, parts at most, words of a part at most; twice as many for
                 float16 and bfloat16), symmetric
        arrived  uint64 (parts at most,), symmetric, zeros at first
        calls    uint64 (parts at most,), zeros at first
        grid     parts, one-dimensional, as the blocks are
        """
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n, size = rank(), num_ranks(), n_words(out)
        call = calls[b] + 1
        half = call & 1
        following = me + 1 if me + 1 < n else 0
        begin, end = b * part, min((b + 1) * part, size)
        sent = got = call * STEPS
        s = 0
        while s < n:
            k = me - 1 - s
            if k < 0:
                k += n
            segment = x[k * out.size : (k + 1) * out.size]
            here = inbox[half, s - 1 if s > 0 else 0, b]
            there = symm_at(inbox[half, s if s < n - 1 else 0, b], following)
            start = begin
            while start < end:
                stop = min(start + chunk, end)
                if s > 0:
                    got += 1
                    wait_block(arrived[b:], 1, "sys", "acquire", got)
                i = start + t
                while i < stop:
                    word, at = load_word(segment, i), i - begin
                    total = first(word) if s == 0 else add(load(here, at, part), word)
                    if s == n - 1:
                        store_word(out, i, result(total, n))
                    else:
                        store(there, at, part, total)
                    i += threads
                if s < n - 1:
                    sent += 1
                    cuda.syncthreads()
                    if t == 0:
                        notify(arrived[b:], following, sent, "set", "sys")
                start = stop
            s += 1
        cuda.syncthreads()  # all threads have read the counter
        if t == 0:
            calls[b] = call

    return ring_reduce_scatter


class Ring(Method):
    """The method "ring" of ``ReduceScatter``."""

    def prepare(self, max_nbytes, op):
        world, n = self.world, self.world.n_ranks
        world.check_reach("reduce_scatter ring", ranks=[(world.rank + 1) % n])
        if n * MAX_CHUNKS >= STEPS:
            raise ValueError(
                f"reduce_scatter ring: there are {n} ranks; it is for {STEPS // MAX_CHUNKS - 1} at most"
            )
        self.op, words = op, max(1, -(-max_nbytes // (8 * n)))
        self.blocks = max(1, min(MAX_BLOCKS, -(-8 * words // PART)))
        room = max(min(PART // 8, words), -(-words // self.blocks)) + 15 & -16
        shape = 2, max(1, n - 1), self.blocks, 2 * room
        self.inbox = self.empty(shape, "uint64", "reduce_scatter.ring.inbox")
        self.arrived = self.zeros(self.blocks, "uint64", "reduce_scatter.ring.arrived")
        self.calls = world.xp.zeros(self.blocks, "uint64")

    def bind(self, x, out, in_place, dtype):
        words = -(-out.nbytes // 8)
        part = -(-words // min(self.blocks, -(-8 * words // PART))) + 15 & -16
        chunk = max(CHUNK // 8, -(-part // MAX_CHUNKS))
        args = x, out, part, chunk, self.inbox, self.arrived, self.calls
        return self.launch(ring_kernel(self.op, dtype.name), -(-words // part), *args)


_x = {words: (types.Array(words, 1, "C"),) * 2 for words in (types.uint64, types.uint8)}
_inbox, _one = types.Array(types.uint64, 4, "C"), types.Array(types.uint64, 1, "C")
GPU_KERNELS = {
    f"ring_reduce_scatter[{op},{dtype},{words}]": (
        ring_kernel(op, dtype),
        (*_x[words], types.int64, types.int64, _inbox, _one, _one),
    )
    for op, dtype, words in (
        ("sum", "bfloat16", types.uint64),
        ("avg", "float16", types.uint8),
        ("max", "float32", types.uint64),
        ("avg", "float64", types.uint64),
        ("prod", "int8", types.uint64),
    )
}
