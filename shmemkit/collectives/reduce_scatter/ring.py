"""Reduce-scatter around the ring: each rank receives partial results from the rank before, adds its own
values, and sends the sums to the next rank. A rank talks to its two neighbours only, and sends n_ranks - 1
segments.

It stores totals straight into the next rank's inbox. So it is no method by puts, as the ring of all-reduce
(``schedules/tree.py``): these copy what lies in memory.

Segments  x is n_ranks segments, one for each rank. Each is handled as words of its own: a segment may begin
          anywhere. Block b has part b of all segments, and sends it in chunks
Inbox     inbox[buffer, s, b], on every rank: part b of what the rank before sends in its hop s, of segment me
          - 2 - s modulo the ranks. float16, bfloat16 and float8 travel as float32
          (``device/cuda/partial_results.py``). Written by the rank before only
Signals   full[b], on every rank: the epoch times STEPS, plus the number of chunks of part b that are here.
          Only the rank before sets it. Each release publishes all chunks before it, too
Epochs    epochs[b], local: of block b; the epoch selects the buffer. Device-resident, so graph-safe

  block b, for s = 0 .. n_ranks - 1, with segment k = me - 1 - s modulo the ranks, for each chunk of part b:
          1. s > 0: wait until full[b] says that the chunk of hop s - 1 is here     acquire, sys
          2. add x's chunk of segment k to that in inbox[buffer, s - 1, b]
          3. s < n_ranks - 1: store it to inbox[buffer, s, b] on the next rank; syncthreads;
             set full[b] there                                            release, sys: publishes the chunk
             else (k is me): compute and store the result

Segment k begins on rank k + 1 and passes all ranks after it, modulo the ranks, up to rank k. Its elements are
combined in this order: the bits are the same in every run.

No race: as in the double-buffer lemma (docs/protocols.md). A rank writes a buffer of the next rank's inbox
again two epochs later. In the epoch between, its own segment has come around the ring. The next rank has
passed it on, in a launch that began after its previous launch had ended: it has read the buffer. Within an
epoch, each hop has its own slots. out may be the rank's own segment of x: it is loaded in the last hop only,
each word by the thread that stores it.

No deadlock: hop 0 waits for no rank, and hop s for a chunk of hop s - 1, in the same order on all ranks.
"""

import functools

from numba import cuda

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
from shmemkit.device.cuda.partial_results import shares, totals
from shmemkit.operations.method import Method, cut, parts_of

from ..network import end_epoch

STEPS = 1 << 16  # more than the chunks that a block gets in an epoch


@functools.cache
def ring_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    first, add, result = reduction(op, dtype)
    _, load, store = totals(op, dtype)

    @cuda.jit
    def ring_reduce_scatter(x, out, part, chunk, inbox, full, epochs):
        """Combine the segments of this rank, of the `x` of all ranks, in `out`.

        x, out  uint64 or uint8 (the bytes of elements of `dtype`), 1-D, x n_ranks times as large; out may be
                x's segment of this rank
        part    words of a part: gridDim.x of them are out
        chunk   words of a chunk: STEPS of them are more than n_ranks parts
        inbox   uint64 (2, n_ranks - 1 or more, parts at most, words of a part at most; twice as many for
                float16 and bfloat16, four times as many for float8), symmetric
        full    uint64 (parts at most,), symmetric, zeros at first
        epochs  uint64 (parts at most,), zeros at first
        grid    parts, one-dimensional, as the blocks are
        """
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n, size = rank(), num_ranks(), n_words(out)
        epoch = epochs[b] + 1
        buffer = epoch & 1
        following = me + 1 if me + 1 < n else 0
        begin, end = b * part, min((b + 1) * part, size)
        sent = received = epoch * STEPS
        s = 0
        while s < n:
            k = me - 1 - s
            if k < 0:
                k += n
            segment = x[k * out.size : (k + 1) * out.size]
            here = inbox[buffer, s - 1 if s > 0 else 0, b]
            there = symm_at(inbox[buffer, s if s < n - 1 else 0, b], following)
            start = begin
            while start < end:
                stop = min(start + chunk, end)
                if s > 0:
                    received += 1
                    wait_block(full[b:], 1, "sys", "acquire", received)
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
                        notify(full[b:], following, sent, "set", "sys")
                start = stop
            s += 1
        end_epoch(epochs, b, epoch)

    return ring_reduce_scatter


class Ring(Method):
    """The method "ring" of ``ReduceScatter``.

    part, chunk  bytes that are worth a block, and a signal
    max_blocks   of a grid: one per multiprocessor of A100
    max_chunks   of a part
    """

    part, chunk, max_blocks, max_chunks = 1 << 12, 1 << 14, 104, 32

    counts = staticmethod(shares)

    def prepare(self, max_nbytes, op):
        world, n = self.world, self.world.n_ranks
        world.check_reach("reduce_scatter ring", ranks=[(world.rank + 1) % n])
        if n * self.max_chunks >= STEPS:
            raise ValueError(
                f"reduce_scatter ring: there are {n} ranks; it is for {STEPS // self.max_chunks - 1} at most"
            )
        self.op = op
        self.blocks, room = parts_of(max_nbytes, n, self.within(self.max_blocks), self.part)
        shape = 2, max(1, n - 1), self.blocks, 2 * room // 8
        self.inbox = self.empty(shape, "uint64", "reduce_scatter.ring.inbox")
        self.full = self.zeros(self.blocks, "uint64", "reduce_scatter.ring.full")
        self.epochs = world.xp.zeros(self.blocks, "uint64")

    @staticmethod
    def kernel_of(n_ranks, op, dtype, **_):
        return ring_kernel(op, dtype)

    def bind(self, x, out, in_place, dtype):
        words, times = -(-out.nbytes // 8), shares(dtype.name)
        part = cut(8 * times * words, self.blocks, self.part)[1] // (8 * times)
        chunk = max(self.chunk // 8, -(-part // self.max_chunks))
        args = x, out, part, chunk, self.inbox, self.full, self.epochs
        return self.launch(self.kernel_of(self.world.n_ranks, self.op, dtype.name), -(-words // part), *args)


GPU_KERNELS = {
    f"ring_reduce_scatter[{op},{dtype},{words}]": (ring_kernel(op, dtype), {"x out": words})
    for op, dtype, words in (
        ("sum", "bfloat16", "uint64"),
        ("avg", "float16", "uint8"),
        ("max", "float32", "uint64"),
        ("avg", "float64", "uint64"),
        ("prod", "int8", "uint64"),
        ("sum", "float8_e4m3fn", "uint64"),
        ("avg", "float8_e5m2", "uint8"),
    )
}
