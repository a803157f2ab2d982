"""All-reduce in two shots, by Lamport packets (``device.packets.lamport``): each rank combines one segment,
which all ranks send it, and sends the result to all. It needs no signals and no fences, and sends no byte but
data. For middling messages.

Pieces    16 bytes of the array, in the registers of a thread; the 32 pieces of a warp are a tile
Segments  the array is cut into n_ranks segments of equally many pieces, one for each rank. Where the last
          segments are shorter, ranks send zeros and store nothing
Slots     inputs[buffer, k], on every rank: slots for its segment of rank k's array. results[k]: for segment
          k, combined. Rank k writes both over NVLink; this rank resets them to the sentinel
Epochs    epochs[i], local: of tile i of the segments; the epoch selects the buffer. Device-resident, so
          graph-safe

  a thread, for its pieces i, one after the other:
          1. load piece i of all segments; store that of segment k to inputs[buffer, me] on rank k, also on
             this one
          2. add 1 to the tile's epoch (one thread of the warp)
          3. poll piece i in inputs[buffer], of all ranks at once, until all are full; reset their slots;
             combine them in the order of the ranks; store the result to results[me] on all ranks
          4. poll piece i in results, of all ranks at once; reset their slots; store them to the segments of
             the output

One rank combines an element, in the order of the ranks: all ranks get the same bits, in every run.

No race. All ranks give piece i the same slot and count its tile's epochs alike, whatever the sizes of the
calls and the grids.

- A rank stores a result to rank k after it has received an input of rank k in the same epoch. Rank k sends
  that after its previous launch has ended (griddepcontrol_wait), which has reset the slot.
- The double-buffer lemma (docs/protocols.md) holds for inputs. A single buffer would not do: from the
  previous epoch the rank knows only that rank k has sent its results, which does not order rank k's resets of
  slots.
- x may be out: a thread loads its pieces of x before it writes the same pieces of out, and no other thread
  reads them.

No deadlock: ascending-order progress (docs/protocols.md); in each step a warp sends before it waits.
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
    send, indices = sending(n), slot_indices_of(n)

    @cuda.jit
    def two_shot_lamport_all_reduce(x, out, segment, pieces, inputs, results, row, low, high, epochs):
        """Combine the `x` of all ranks in `out`.

        x, out     complex128, uint64 or uint8 (the bytes of elements of `dtype`), as of ``load_piece``, of
                   the same size; may be the same
        segment    pieces of 16 bytes of a segment; n of them are x, or more
        pieces     of x
        inputs     uint64 (4 * n_ranks * row,), symmetric, the sentinel everywhere at first
        results    uint64 (2 * n_ranks * row,), likewise
        row        pieces of a segment at most: of whole tiles
        low, high  the sentinel
        epochs     uint32 (row / 32,), zeros at first
        grid       any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        i, me = types.uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x), rank()
        step, end = types.uint32(cuda.blockDim.x * cuda.gridDim.x), types.uint32(segment + 31 & -32)
        griddepcontrol_wait(x, out, segment, symm_at(inputs, 0), results, epochs, me, i)
        griddepcontrol_launch_dependents()
        while i < end:
            epoch = types.uint32(epochs[i >> 5] + 1)
            base = types.uint32((epoch & 1) * n * row + i)
            if i < segment:
                send(inputs, types.uint32(base + me * row), load(x, segment, pieces, i, me), low, high, me)
            cuda.syncwarp()  # all threads have read the counter
            if i & 31 == 0:
                epochs[i >> 5] = epoch
            if i < segment:
                words = combine(lamport_load(inputs, indices(base, row), low, high))
                send(results, types.uint32(i + me * row), copies(words), low, high, me)
                store(out, segment, pieces, i, lamport_load(results, indices(i, row), low, high))
            i = types.uint32(i + step)

    return two_shot_lamport_all_reduce


class TwoShotLamport(LamportMethod):
    """The method "two_shot_lamport" of ``AllReduce``."""

    def prepare(self, max_nbytes, op):
        self.op, n = op, self.world.n_ranks
        tiles = max(1, -(-tiles_of(max_nbytes) // n))
        self.check("all_reduce two_shot_lamport", 2 * n * tiles)
        self.row = TILE * tiles
        slots = self.empty_slots(3 * n * self.row, "all_reduce.two_shot_lamport.slots")
        self.inputs, self.results = slots[: 4 * n * self.row], slots[4 * n * self.row :]
        self.epochs = self.world.xp.zeros(tiles, "uint32")

    def bind(self, x, out, in_place, dtype):
        n, pieces = self.world.n_ranks, -(-x.nbytes // PIECE_BYTES)
        kernel, segment = two_shot_lamport_kernel(self.op, dtype.name, n), -(-pieces // n)
        if segment > TILE:
            segment = -(-segment // TILE) * TILE  # accesses to segments are aligned
        x, out = self.wide(x, out, x.nbytes)
        args = self.inputs, self.results, self.row, *self.sentinel, self.epochs
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
