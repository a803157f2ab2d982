"""All-reduce in two shots, by pieces that say themselves that they have arrived
(``device.packets.lamport``): each rank combines one segment of all ranks' arrays, which they send it, and
sends the result to all. No signals, no fences, and no byte more than the data have. For middling messages.

Pieces    16 bytes of the array, in the registers of a thread; 32 pieces of a warp are a tile
Segments  the array is cut into n_ranks segments of as many pieces, rank k's being the k-th. For what the last
          ones lack, 0 is sent, and nothing stored
Lines     inputs[half, k], on every rank: places for its segment of rank k's array. results[k]: for segment k,
          combined. Both written by rank k over NVLink, and made empty by this rank
Counters  calls[i], local: how often tile i of the segments has been sent; it gives the half. In device
          memory, so that a replayed graph counts on

  a thread, for its pieces i, one after the other:
          1. load piece i of all segments; store that of segment k to inputs[half, me] on rank k: on this one,
             too
          2. add 1 to the tile's counter (one thread of the warp)
          3. poll piece i in inputs[half], of all ranks at once, until all are there; make their places empty;
             combine them in the order of the ranks; store the result to results[me] on all ranks
          4. poll piece i in results, of all ranks at once; make their places empty; store them to the
             segments of the output

Only one rank combines an element, in the order of the ranks: all ranks have the same bits, in every run.

No race: piece i is always at the same place, and all ranks count its tile alike, whatever the lengths of the
calls and the grids. I store a result to rank k when a piece of its inputs has come in the same call, which it
sends when its launch before has ended (after griddepcontrol_wait): that one has made the place empty. I store
to half h of inputs on rank k before anything has come in the same call, but two calls of the tile after the
last time: in the one between, a piece of rank k's inputs has come, and so on. One half would not do: of the
call before I know only that rank k has sent its results, which is not ordered with that it has made places
empty. x may be out: a thread has loaded its pieces of x before it writes the same of out, and no other reads
them.

No deadlock: all warps take their tiles in ascending order. So the first tile that is not done on all ranks
waits for none, on any rank, and goes through the steps, in each of which all send before they wait. All
blocks are resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    PIECE_BYTES,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    lamport_load,
    load_piece,
    rank,
    store_piece,
    symm_at,
)

from ..lamport import TILE, LamportMethod, rank_after, sending, slot_indices_of, tiles_of
from ..packet_tiles import combining, copying


@cuda.jit(device=True)
def _load_inside(x, i, pieces):
    """Piece `i` of x, of `pieces`; 0 beyond its end."""
    words = types.uint64(0), types.uint64(0)
    if i < pieces:
        words = load_piece(x, i)
    return words


@functools.cache
def _loading(n):
    """-> ``load(x, segment, pieces, i, me)``: piece `i` of the segments, of `segment` pieces, of the `n`
    ranks after `me`."""
    before = _loading(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def load_first(x, segment, pieces, i, me):
        return (_load_inside(x, rank_after(me, 1) * segment + i, pieces),)

    @cuda.jit(device=True)
    def load(x, segment, pieces, i, me):
        last = _load_inside(x, rank_after(me, n) * segment + i, pieces)
        return before(x, segment, pieces, i, me) + (last,)

    return load if n > 1 else load_first


@functools.cache
def _storing(n):
    """-> ``store(out, segment, pieces, i, words)``: likewise; what is beyond the end is dropped."""
    before = _storing(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def store(out, segment, pieces, i, words):
        if before is not None:
            before(out, segment, pieces, i, words)
        if (n - 1) * segment + i < pieces:
            store_piece(out, (n - 1) * segment + i, words[n - 1])

    return store


@functools.cache
def two_shot_lamport_kernel(op, dtype, n):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum", of `n` ranks."""
    load, combine, copies, store = _loading(n), combining(op, dtype, n), copying(n), _storing(n)
    send, places = sending(n), slot_indices_of(n)

    @cuda.jit
    def two_shot_lamport_all_reduce(x, out, segment, pieces, inputs, results, row, low, high, calls):
        """Combine the `x` of all ranks in `out`.

        x, out           complex128, uint64 or uint8 (the bytes of elements of `dtype`), as of ``load_piece``,
                         of the same size; may be the same
        segment          pieces of 16 bytes of a segment; n of them are x, or more
        pieces           of x
        inputs           uint64 (4 * n_ranks * row,), symmetric, the pattern everywhere at first
        results          uint64 (2 * n_ranks * row,), likewise
        row              pieces of a segment at most: of whole tiles
        low, high        the pattern
        calls            uint32 (row / 32,), zeros at first
        grid             any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        i, me = types.uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x), rank()
        step, end = types.uint32(cuda.blockDim.x * cuda.gridDim.x), types.uint32(segment + 31 & -32)
        griddepcontrol_wait(x, out, segment, symm_at(inputs, 0), results, calls, me, i)
        griddepcontrol_launch_dependents()
        while i < end:
            call = types.uint32(calls[i >> 5] + 1)
            half = types.uint32((call & 1) * n * row + i)
            if i < segment:
                send(inputs, types.uint32(half + me * row), load(x, segment, pieces, i, me), low, high, me)
            cuda.syncwarp()  # all threads have read the counter
            if i & 31 == 0:
                calls[i >> 5] = call
            if i < segment:
                words = combine(lamport_load(inputs, places(half, row), low, high))
                send(results, types.uint32(i + me * row), copies(words), low, high, me)
                store(out, segment, pieces, i, lamport_load(results, places(i, row), low, high))
            i = types.uint32(i + step)

    return two_shot_lamport_all_reduce


class TwoShotLamport(LamportMethod):
    """The method "two_shot_lamport" of ``AllReduce``."""

    def prepare(self, max_nbytes, op):
        self.op, n = op, self.world.n_ranks
        tiles = max(1, -(-tiles_of(max_nbytes) // n))
        self.check("all_reduce two_shot_lamport", 2 * n * tiles)
        self.row = TILE * tiles
        lines = self.empty_slots(3 * n * self.row, "all_reduce.two_shot_lamport.lines")
        self.inputs, self.results = lines[: 4 * n * self.row], lines[4 * n * self.row :]
        self.calls = self.world.xp.zeros(tiles, "uint32")

    def bind(self, x, out, in_place, dtype):
        n, pieces = self.world.n_ranks, -(-x.nbytes // PIECE_BYTES)
        kernel, segment = two_shot_lamport_kernel(self.op, dtype.name, n), -(-pieces // n)
        if segment > TILE:
            segment = -(-segment // TILE) * TILE  # accesses to segments are aligned
        x, out = self.wide(x, out, x.nbytes)
        args = self.inputs, self.results, self.row, *self.pattern, self.calls
        return self.launch_tiles(kernel, max(1, -(-segment // TILE)), x, out, segment, pieces, *args)


_words, _counts = types.Array(types.uint64, 1, "C"), types.Array(types.uint32, 1, "C")
GPU_KERNELS = {
    f"two_shot_lamport_all_reduce[{op},{dtype},{n},{words}]": (
        two_shot_lamport_kernel(op, dtype, n),
        (
            *[types.Array(words, 1, "C")] * 2,
            types.int64,
            types.int64,
            _words,
            _words,
            *[types.int64] * 3,
            _counts,
        ),
    )
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, types.complex128),
        ("sum", "float32", 2, types.complex128),
        ("sum", "float16", 4, types.uint8),
        ("max", "float32", 8, types.uint64),
        ("prod", "int8", 16, types.complex128),
    )
}
