"""Parts of products that warps send by LL128: how they lie in shared memory, in pieces, and how they are cut
into packets.

Piece     a warp's 16 rows of a tile, by as many columns as take 128 bytes (or 64, or 32): rounded to the
          dtype of parts, swizzled as `fragment_store` does it
Packet    480 bytes of one or several pieces, in the registers of the warp; on the way four lines
          (``shmemkit.device.packets.ll128``)
"""

import functools

from shmemkit.device.cuda.accumulators import ITEMSIZE
from shmemkit.device.cuda.float_storage import element
from shmemkit.device.cuda.weighted_sums import two_words
from shmemkit.device.cuda.word_reductions import reduction
from shmemkit.device.packets.ll128 import TILE_BYTES, TILE_WORDS
from shmemkit.device.shmem.ordered_access import load_vec16
from shmemkit.device.swizzle import quotient

from .epilogue import inline

SWIZZLE = {128: (0, 7), 64: (1, 3), 32: (2, 1)}  # bytes of a row: (shift, mask) of its number


class Pieces:
    """Of a warp's rows of a tile."""

    def __init__(self, tile, part_dtype):
        row = tile.n * ITEMSIZE[part_dtype]
        self.row_bytes = next(b for b in SWIZZLE if row % b == 0)
        self.count = row // self.row_bytes
        self.columns = tile.n // self.count
        self.packets = -(-16 * self.row_bytes // TILE_BYTES)  # of a piece, at most


@inline
def place_of(t, n_m):
    """-> (row, column) of tile t: column after column."""
    column = quotient(t, n_m)
    return t - column * n_m, column


@inline
def unit_in_packet(lane):
    """-> which 16 bytes of a packet hold the lane's two words"""
    return 28 + (lane >> 4) if lane & 7 == 7 else lane - (lane >> 3)


@inline
def packet(piece, j, last, lane):
    """-> the lane's two words of packet j of a piece; the second one is undefined in threads 7, 15, 23 and
    31."""
    low, high = two_words(load_vec16(piece, 16 * min(30 * j + unit_in_packet(lane), last)))
    return high if lane & 15 == 15 else low, high


@functools.cache
def numbering(ranks, count):
    """-> ``numbers(first, step, left)``: of packet `first` and the next ones, of `ranks` ranks each, `step`
    apart, `count` in all. Only `left` next ones exist; after them, the last one is repeated."""
    before = numbering(ranks, count - 1) if count > 1 else None
    i, k = divmod(count - 1, ranks)

    @inline
    def only(first, step, left):
        return (first,)

    @inline
    def numbers(first, step, left):
        return before(first, step, left) + (first + k * step + min(i, left),)

    return numbers if count > 1 else only


@functools.cache
def rounding(part_dtype, dtype):
    """-> ``narrow(word)``: a word of `part_dtype` as `dtype`, of 8 or 4 bytes"""
    if part_dtype == dtype:

        @inline
        def narrow(word):
            return word

        return narrow
    widen, pack = reduction("sum", part_dtype).first, element(dtype).pack

    @inline
    def narrow(word):
        numbers = widen(word)
        return pack(numbers[0], numbers[1])

    return narrow


def slot_words(room, n_ranks, shots):
    """Elements of the slots for `room` packets."""
    packets = 2 * n_ranks * room if shots == 1 else n_ranks * -(-room // n_ranks) + room
    return packets * TILE_WORDS
