"""Reduce-scatter by push: each rank stores the others' segments into their memory, one rank after the other.
It combines its own segment at the same time, as far as that has come. For large messages.

Segments  x is n_ranks segments, one for each rank. A segment is cut into parts, the same on all ranks, and a
          part into chunks
Scratch   scratch[buffer, k, b], on every rank: part b of its segment of rank k's x. Written by rank k only
Signals   full[k, b], on every rank: how much of part b of rank k is here (only rank k sets it)
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer. Device-resident, so graph-safe

  block (b, 0), for each peer, me + 1, me + 2, ... modulo the ranks:
          1. copy part b of its segment to scratch[buffer, me, b] there
          2. set full[me, b] there                release, sys: publishes it (``chunked_transfer.put_to_all``)
  block (b, 1), for each chunk of part b of the own segment:
          3. wait for the chunk at full[k, b], for all k    acquire, sys: sees them
          4. combine it, from x and scratch[buffer, :, b], in the order of the ranks, and store the result

The order is always the same, and so are the bits. The next rank sends its part last, in chunks; by then, the
others' parts are there.

No race, without credits: the double-buffer lemma (docs/protocols.md), for part b. All ranks give it the same
slot and count its epochs alike, whatever the sizes of the calls. out may be the rank's own segment of x: it
is sent to no rank, and a thread loads its words before it stores them.

No deadlock: blocks that send wait for no rank, and all blocks are co-resident.

A multiprocessor has a block of each kind (see ``shmemkit.collectives.push``), which share its registers: 256
threads of 128.
"""

import functools

from numba import cuda, types

from shmemkit.device import n_words, num_ranks, rank, reduction, store_word, wait

from .. import push
from ..chunked_transfer import CHUNKS, chunk_of, put_to_all
from ..method import Method
from .combine_rows import combining


@functools.cache
def push_kernel(op, dtype, n_ranks):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    _, _, result = reduction(op, dtype)
    one, four = combining(op, dtype, n_ranks)

    @cuda.jit(max_registers=128)  # of 256 threads; of many ranks, and of bytes, some are spilled
    def push_reduce_scatter(x, mine, out, part, chunk, scratch, words, full, epochs):
        """Combine the segments of this rank, of the `x` of all ranks, in `out`.

        x        uint8, 1-D, n_ranks times as large as out
        mine     the rank's segment of x; uint64 or uint8, as out
        out      uint64 or uint8, 1-D; may be mine
        part     bytes of a part, a multiple of 128: gridDim.x of them are a segment, or more
        chunk    bytes of a chunk, a multiple of 8192: CHUNKS or fewer of them are a part
        scratch  uint8 (2, n_ranks, parts at most, bytes of a part at most), symmetric
        words    the same, 1-D, as uint64
        full     uint64 (n_ranks, parts at most), symmetric, zeros at first
        epochs   uint64 (2, parts at most), zeros at first
        grid     (parts, 2), of one-dimensional blocks
        """
        b, y, t, threads = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
        me, n = rank(), num_ranks()
        epoch = epochs[y, b] + 1
        buffer, count = epoch & 1, CHUNKS * epoch
        if y == 0:
            segment = mine.size * mine.itemsize
            begin = min(b * part, segment)
            size = min(part, segment - begin)
            put_to_all(scratch[buffer, me, b], x, segment, begin, size, full[me, b:], count, chunk)
        else:
            size = n_words(out)
            begin, end = min(b * (part >> 3), size), min((b + 1) * (part >> 3), size)
            room = scratch.shape[3] >> 3
            stride = scratch.shape[2] * room
            at = buffer * n * stride + b * room - begin
            i = begin + t
            while True:
                begin = min(begin + (chunk >> 3), end)
                count += 1
                k = t
                while k < n:
                    if k != me:
                        wait(full[k, b:], 1, "sys", "acquire", count)
                    k += threads
                cuda.syncthreads()
                while i + 3 * threads < begin:
                    p, q, r, s = four(mine, words, at, stride, me, n, i, threads)
                    store_word(out, i, result(p, n))
                    store_word(out, i + threads, result(q, n))
                    store_word(out, i + 2 * threads, result(r, n))
                    store_word(out, i + 3 * threads, result(s, n))
                    i += 4 * threads
                while i < begin:
                    store_word(out, i, result(one(mine, words, at, stride, me, n, i), n))
                    i += threads
                if begin >= end:
                    break
        cuda.syncthreads()  # all threads have read the counter
        if t == 0:
            epochs[y, b] = epoch

    return push_reduce_scatter


class Push(Method):
    """The method "push" of ``ReduceScatter``; `part`, `chunk` and `senders` as of ``collectives.push``."""

    threads = 256
    part, chunk, senders = 1 << 13, 1 << 14, 132

    def prepare(self, max_nbytes, op):
        world, n = self.world, self.world.n_ranks
        world.check_reach("reduce_scatter push")
        self.op = op
        self.parts, room = push.parts_of(max_nbytes, n, push.senders_of(world, self.senders), self.part)
        self.scratch = self.empty((2, n, self.parts, room), "uint8", "reduce_scatter.push.scratch")
        self.full = self.zeros((n, self.parts), "uint64", "reduce_scatter.push.full")
        self.epochs = world.xp.zeros((2, self.parts), "uint64")

    def bind(self, x, out, in_place, dtype):
        world = self.world
        parts, part = push.cut(out.nbytes, self.parts, self.part)
        mine = x[world.rank * out.size : (world.rank + 1) * out.size]
        scratch = self.scratch, self.scratch.reshape(-1).view("uint64")
        args = x.view("uint8"), mine, out, part, chunk_of(part, self.chunk), *scratch, self.full, self.epochs
        return self.launch(push_kernel(self.op, dtype.name, world.n_ranks), (parts, 2), *args)


def _signature(words):
    x, word = types.Array(types.uint8, 1, "C"), types.Array(words, 1, "C")
    scratch = types.Array(types.uint8, 4, "C"), types.Array(types.uint64, 1, "C")
    tables = [types.Array(types.uint64, 2, "C")] * 2
    return x, word, word, types.int64, types.int64, *scratch, *tables


GPU_KERNELS = {
    f"push_reduce_scatter[{op},{dtype},{n},{words}]": (push_kernel(op, dtype, n), _signature(words))
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, types.uint64),
        ("sum", "float16", 8, types.uint8),
        ("max", "float32", 8, types.uint64),
        ("avg", "float64", 2, types.uint64),
        ("prod", "int8", 16, types.uint64),
        ("sum", "float8_e4m3fn", 4, types.uint64),
        ("avg", "float8_e5m2", 2, types.uint8),
    )
}
