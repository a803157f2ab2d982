"""Reduce-scatter by copy engines: they send each segment to its rank, and blocks combine what has come. For
large messages.

``collectives.copy_engine_exchange`` has the protocol: segment k of x goes to rank k. A thread combines a
piece when it has come from all ranks, in the order of the ranks: the bits are the same in every run. out may
be the rank's own segment of x.

The kernel starts when all segments but the last have been copied: before that it could only wait. It takes
the pieces of the last segment as they come.
"""

import functools

from numba import cuda, types

from shmemkit.device import PIECE_BYTES, lamport_load, load_piece, span, store_piece

from ..copy_engine_exchange import CopyEngineExchange, enqueue, send_packets, slot_indices_of
from ..schedules.packets import combining

AT_ONCE = 8  # pieces of all ranks, in registers of a thread, whose loads are under way together


@functools.cache
def _loading(m):
    """-> ``load(mine, i, step)``: `m` pieces: i, i + step, ..."""
    before = _loading(m - 1) if m > 1 else None

    @cuda.jit(device=True)
    def only(mine, i, step):
        return (load_piece(mine, i),)

    @cuda.jit(device=True)
    def load(mine, i, step):
        return before(mine, i, step) + (load_piece(mine, i + types.uint32((m - 1) * step)),)

    return load if m > 1 else only


@functools.cache
def _storing(combine, me, n, m):
    """-> ``store(out, i, step, own, others)``: combine `m` own pieces, each with the `n` - 1 of the others,
    and store the results."""
    before = _storing(combine, me, n, m - 1) if m > 1 else None
    if n == 1:

        @cuda.jit(device=True)
        def store_own(out, i, step, own, others):
            if before is not None:
                before(out, i, step, own, others)
            store_piece(out, i + types.uint32((m - 1) * step), combine((own[m - 1],)))

        return store_own
    first, mine, end = (m - 1) * (n - 1), (m - 1) * (n - 1) + me, m * (n - 1)

    @cuda.jit(device=True)
    def store(out, i, step, own, others):
        if before is not None:
            before(out, i, step, own, others)
        pieces = others[first:mine] + (own[m - 1],) + others[mine:end]
        store_piece(out, i + types.uint32((m - 1) * step), combine(pieces))

    return store


@functools.cache
def _taking(combine, me, n, m):
    """-> ``take(mine, out, i, step, slots, slot, row, low, high)``: wait for `m` pieces of all others,
    combine them with the own ones, and store the results."""
    load, store = _loading(m), _storing(combine, me, n, m)
    indices = slot_indices_of(tuple(k for k in range(n) if k != me), m) if n > 1 else None

    @cuda.jit(device=True)
    def take(mine, out, i, step, slots, slot, row, low, high):
        own = load(mine, i, step)
        if indices is None:
            store(out, i, step, own, None)
        else:
            store(out, i, step, own, lamport_load(slots, indices(slot, row, step), low, high))

    return take


@functools.cache
def reduction_kernel(op, dtype, n, me, words):
    """-> the kernel of rank `me` of `n`, which reduces `dtype`, a name as "float16", by `op`, as "sum", in
    arrays of `words`, as "complex128"."""
    m = max(1, AT_ONCE // n) if words != "uint8" else 1
    combine = combining(op, dtype, n)
    take, take_one = _taking(combine, me, n, m), _taking(combine, me, n, 1)

    @cuda.jit(max_registers=128)  # of 512 threads
    def combine_copied(x, out, stride, at, pieces, copied, slots, row, first, low, high):
        """Combine a range of the segments of this rank, of the `x` of all ranks, in `out`.

        x, out     complex128, uint64 or uint8, as of ``load_piece``; x has n segments, out is the range of
                   this rank's; it may be that of x
        stride     elements of a segment
        at         where the range begins in it
        pieces     of 16 bytes, which it has; copied: how many of them copies send to the others, all or none
        slots      uint64 (2 * n * row,), symmetric, the sentinel everywhere
        row        slots for the pieces of a rank
        first      the number of the range's first piece in the segment
        low, high  the sentinel
        grid       any, one-dimensional, as the blocks are
        """
        i = types.uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        step, end = types.uint32(cuda.blockDim.x * cuda.gridDim.x), types.uint32(pieces)
        mine = span(x, me * stride + at, out.size)
        slot = types.uint32(me * row + first)
        send_packets(x, stride, at, out.size, types.uint32(i + copied), step, end, slots, slot, low, high)
        while i + (m - 1) * step < end:
            take(mine, out, i, step, slots, types.uint32(first + i), row, low, high)
            i = types.uint32(i + m * step)
        while i < end:
            take_one(mine, out, i, step, slots, types.uint32(first + i), row, low, high)
            i = types.uint32(i + step)

    return combine_copied


class CopyEngine(CopyEngineExchange):
    """The method "copy_engine" of ``ReduceScatter``."""

    name, personalized = "reduce_scatter copy_engine", True

    def prepare(self, max_nbytes, op):
        self.op = op
        self.prepare_slots(max_nbytes)

    def bind(self, x, out, in_place, dtype):
        """-> run(stream)"""
        backend, n = self.world.backend, self.world.n_ranks
        segments = self.segments_of(x)
        early, late = self.copies(segments, range(1, n - 1)), self.copies(segments, range(max(1, n - 1), n))
        combine = self.combining(x, out, dtype)

        def run(stream):
            self.barrier(stream)
            main, side = self.fork(stream)
            enqueue(early, side)
            if early:
                backend.order(main, side)
            enqueue(late, side)
            combine(stream)
            backend.order(main, side)

        return run

    def combining(self, x, out, dtype, first=0):
        """-> run(stream): combine what comes in `out`, 1-D, a range of the segments that begins with piece
        `first`, for arrays as of ``bind``."""
        world, n, segment = self.world, self.world.n_ranks, x.nbytes // self.world.n_ranks
        at, pieces = first * PIECE_BYTES, -(-out.nbytes // PIECE_BYTES)
        copied = pieces if self.copied(self.segments_of(x)) else 0
        x, out = self.t.wide(self.world, x, out, segment)
        kernel = reduction_kernel(self.op, dtype.name, n, world.rank, x.dtype.name)
        numbers = segment // x.itemsize, at // x.itemsize, pieces, copied
        return self.launch_packets(
            kernel, pieces, x, out, *numbers, self.slots, self.row, first, *self.sentinel
        )


GPU_KERNELS = {
    f"combine_copied[{op},{dtype},{n},{words}]": (
        reduction_kernel(op, dtype, n, n // 2, words.name),
        (
            *[types.Array(words, 1, "C")] * 2,
            *[types.int64] * 4,
            types.Array(types.uint64, 1, "C"),
            *[types.int64] * 4,
        ),
    )
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, types.complex128),
        ("sum", "float16", 4, types.uint8),
        ("max", "float32", 8, types.uint64),
        ("avg", "float64", 2, types.complex128),
        ("prod", "int8", 16, types.complex128),
        ("sum", "float8_e4m3fn", 4, types.complex128),
        ("avg", "float8_e5m2", 2, types.uint8),
    )
}
