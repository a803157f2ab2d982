"""Reduce-scatter by push: each rank stores the others' segments into their memory, in announced steps, and
combines its own meanwhile, as far as it has come. For large messages.

Segments  x is n_ranks segments, the k-th for rank k. A segment is cut into parts, one for each sending block
          of a peer, and a part into steps
Scratch   scratch[half, k, b], on every rank: part b of its segment of rank k's x. Written by rank k only
Signals   arrived[k, b], on every rank: how many steps of part b of rank k are here (only rank k sets it)
Counters  calls[y, b], local: how many calls block (b, y) has taken part in: the number of a call, and the
          half. In device memory, so that a replayed graph counts on

  block (b, y), y < n_ranks - 1, with peer = me + 1 + y modulo the ranks: for each step s, a piece of part b
  of the peer's segment:
          1. copy the piece to scratch[half, me, b] on the peer
          2. set arrived[me, b] there to STEPS * call + s + 1           release, sys: publishes the piece
  block (b, y), y >= n_ranks - 1, one of those that combine part b of my segment: for each step s:
          3. wait until arrived[k, b] here is at least that, for all k   acquire, sys: sees the pieces
          4. combine a share of the piece, of x and of scratch[half, :, b], in the order of the ranks, and
             store the result

They combine in the order of the ranks, so the bits are the same in every run.

No race, although nobody acknowledges: part b is always at the same place, and all ranks count it alike,
whatever the lengths of the calls (gridDim.y is the same in all). Half h of it is written again two calls with
it later. In the one between, the parts b of all ranks have come, which they send in launches that begin after
their launches before have ended: they have read what half h held. out may be my segment of x: it is sent to
nobody, and a thread loads its words before it stores them. No deadlock: those that send wait for nobody, and
all blocks are resident.

GPUs from Hopper on send by the TMA (see ``shmemkit.kernels.push``).
"""

import functools

from numba import cuda, types

from shmemkit.device import n_words, num_ranks, rank, reduction, store_word, wait
from shmemkit.kernels.method import Method
from shmemkit.kernels.push import cut, parts_of
from shmemkit.kernels.transfers import put_by_threads, put_by_tma

from .rows import combining

STEPS = 32  # of a part, at most
STEP = 1 << 17  # bytes that are worth a signal
SHARES = 40  # blocks that combine a part, at most


@functools.cache
def push_kernel(op, dtype, n_ranks, by_tma):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    _, _, result = reduction(op, dtype)
    one, four = combining(op, dtype, n_ranks)
    put = put_by_tma if by_tma else put_by_threads

    @cuda.jit(max_registers=128)  # of 512 threads; on sm_80 bytes of many ranks spill some
    def push_reduce_scatter(x, mine, out, part, step, scratch, words, arrived, calls):
        """Combine the segments of this rank, of the `x` of all ranks, in `out`.

        x        uint8, 1-D, n_ranks times as large as out
        mine     my segment of x; uint64 or uint8, as out
        out      uint64 or uint8, 1-D; may be mine
        part     bytes of a part, a multiple of 128: gridDim.x of them are a segment
        step     bytes of a step, a multiple of 8192
        scratch  uint8 (2, n_ranks, parts at most, bytes of a part at most), symmetric
        words    the same, 1-D, as uint64
        arrived  uint64 (n_ranks, parts at most), symmetric, zeros at first
        calls    uint64 (gridDim.y, parts at most), zeros at first
        grid     (parts, n_ranks - 1 and those that combine a part), of one-dimensional blocks
        """
        b, y, t, threads = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
        me, n = rank(), num_ranks()
        call = calls[y, b] + 1
        half, arrival = call & 1, STEPS * call
        if y < n - 1:
            peer = me + 1 + y
            if peer >= n:
                peer -= n
            segment = mine.size * mine.itemsize
            begin, end = min(b * part, segment), min((b + 1) * part, segment)
            there = scratch[half, me, b, : end - begin]
            put(there, x[peer * segment + begin : peer * segment + end], arrived[me, b:], arrival, step, peer)
        else:
            size = n_words(out)
            begin, end = min(b * (part >> 3), size), min((b + 1) * (part >> 3), size)
            room, jump = scratch.shape[3] >> 3, threads * (cuda.gridDim.y - (n - 1))
            stride = scratch.shape[2] * room
            at = half * n * stride + b * room - begin
            i = begin + threads * (y - (n - 1)) + t
            while True:
                until = min(begin + (step >> 3), end)
                arrival += 1
                k = t
                while k < n:
                    if k != me:
                        wait(arrived[k, b:], 1, "sys", "acquire", arrival)
                    k += threads
                cuda.syncthreads()
                while i + 3 * jump < until:
                    p, q, r, s = four(mine, words, at, stride, me, n, i, jump)
                    store_word(out, i, result(p, n))
                    store_word(out, i + jump, result(q, n))
                    store_word(out, i + 2 * jump, result(r, n))
                    store_word(out, i + 3 * jump, result(s, n))
                    i += 4 * jump
                while i < until:
                    store_word(out, i, result(one(mine, words, at, stride, me, n, i), n))
                    i += jump
                begin = until
                if begin >= end:
                    break
        cuda.syncthreads()  # all threads have read the counter
        if t == 0:
            calls[y, b] = call

    return push_reduce_scatter


class Push(Method):
    """The method "push" of ``ReduceScatter``."""

    def prepare(self, max_nbytes, op):
        world, n = self.world, self.world.n_ranks
        world.check_reach("reduce_scatter push")
        self.op = op
        self.blocks, room = parts_of(max_nbytes, n)
        shares = max(1, min(SHARES, world.backend.multiprocessors // self.blocks - (n - 1)))
        self.scratch = self.empty((2, n, self.blocks, room), "uint8", "reduce_scatter.push.scratch")
        self.arrived = self.zeros((n, self.blocks), "uint64", "reduce_scatter.push.arrived")
        self.calls = world.xp.zeros((n - 1 + shares, self.blocks), "uint64")

    def bind(self, x, out, in_place, dtype):
        world = self.world
        blocks, part = cut(out.nbytes, self.blocks)
        unit = 32 * self.threads * (len(self.calls) - (world.n_ranks - 1))  # four words of each thread
        unit = -(-unit // 8192) * 8192
        step = -(-max(STEP, -(-part // STEPS)) // unit) * unit
        aligned = (world.backend.address(x) | out.nbytes) % 16 == 0
        by_tma = aligned and world.backend.compute_capability >= (9, 0)
        kernel = push_kernel(self.op, dtype.name, world.n_ranks, by_tma)
        mine = x[world.rank * out.size : (world.rank + 1) * out.size]
        scratch = self.scratch, self.scratch.reshape(-1).view("uint64")
        args = x.view("uint8"), mine, out, part, step, *scratch, self.arrived, self.calls
        return self.launch(kernel, (blocks, len(self.calls)), *args)


def _signature(words):
    x, word = types.Array(types.uint8, 1, "C"), types.Array(words, 1, "C")
    scratch = types.Array(types.uint8, 4, "C"), types.Array(types.uint64, 1, "C")
    tables = [types.Array(types.uint64, 2, "C")] * 2
    return x, word, word, types.int64, types.int64, *scratch, *tables


GPU_KERNELS = {
    f"push_reduce_scatter[{op},{dtype},{n},{words}]{'_tma' * by_tma}": (
        push_kernel(op, dtype, n, by_tma),
        _signature(words),
        *[(9, 0)] * by_tma,
    )
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, types.uint64),
        ("sum", "float16", 8, types.uint8),
        ("max", "float32", 8, types.uint64),
        ("avg", "float64", 2, types.uint64),
        ("prod", "int8", 16, types.uint64),
    )
    for by_tma in (False, True)
}
