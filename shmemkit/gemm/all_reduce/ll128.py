"""GEMM and all-reduce in one kernel, for few rows: a warp sends its rows of a tile to the other ranks by
LL128, adds the rows that it receives, and stores the sums. The packets carry flags, so the kernel needs no
signals, fences or barriers. For Hopper, and GPUs that NVLink connects.

``shmemkit.gemm.sm90`` computes the product, with K split or not, by tiles of 64 rows: such tiles take the
weights as fast as memory delivers them. The same warp has the same rows and columns on each rank, so packets
that arrive have the layout of those that it sends.

Piece     a warp's 16 rows of a tile, or those of them that the product has, by some columns
          (``shmemkit.gemm.ll128_packets``)
Packet    480 bytes of a piece, in the registers of the warp; on the way four lines. Packets are numbered by
          column of tiles, row, piece
Slots     parts[buffer, k, i], on every rank: packet i of rank k. Written by rank k only
Epochs    epochs[0], local: the epoch is the flag, and selects the buffer. Device-resident, so graph-safe.
          done[0]: blocks of this launch that have read it

  one shot, a warp with its rows of a tile:
          1. for each piece: round and store it to shared memory; syncwarp; store its packets i to
             parts[buffer, me, i] on all ranks, also on this one, with the flag
          2. for some packets i at a time: poll parts[buffer, k, i], of all k at once, until all have the
             flag;
             add them in the order of the ranks, in float32; round, store to out

Two shots: one rank adds the parts of a packet, and sends the sum. For more than two ranks, this sends fewer
bytes, but takes one more hop.

Owner     rank i % n_ranks, of packet i
Slots     parts[k, i // n_ranks], on the owner of packet i: that of rank k. Written by rank k only. sums[i],
          on every rank: the sum, as `part_dtype`. Written by the owner only

          1. as above, to the owners
          2. for the warp's packets i that this rank owns: poll parts[k, i // n_ranks], of all k at once,
             until all have the flag; add them in the order of the ranks, in float32; round, and store to
             sums[i] on all ranks, with the flag
          3. for some packets i at a time: poll sums[i]; store to out

All ranks add the same numbers in the same order; they round their own like the others'. So they get the same
bits, in every run, by one shot or two.

No race, without credits. One shot: the double-buffer lemma (docs/protocols.md); each rank sends packets in
every epoch. Two shots:

- A rank writes a part again in a later epoch. It has received the packet's sum before, which the owner sends
  after it has read the parts.
- An owner writes a sum again when it has all parts of a later epoch. The ranks send these in launches that
  begin after their previous launches have ended: they have read the old sum.

So the calls may have any sizes and tiles, and any data may come in a packet: a line keeps the flag of an
earlier epoch, or 0, until the packet of this epoch comes.

No deadlock: ascending-order progress (docs/protocols.md), for tiles. All parts of K of the first unfinished
tile are computed, as all tiles before it are done. A block waits only with all parts of K of its rows, after
it has sent them. Then all packets come and, of two shots, all sums, which need packets only.

The machine code must keep (docs/machine_code.md): whole line, whole warp.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda

from shmemkit.device.cuda.accumulators import ITEMSIZE, fragment_store
from shmemkit.device.cuda.register_tuples import for_each_part
from shmemkit.device.packets.ll128 import TILE_BYTES, ll128_load_some, ll128_store_tile
from shmemkit.device.packets.transports import AT_ONCE as MOST_RANKS
from shmemkit.device.packets.units import combining
from shmemkit.device.shmem.barriers import rank
from shmemkit.device.swizzle import quotient
from shmemkit.operations.method import Method
from shmemkit.support.settings import listed

from ..aligned_copies import aligned
from ..distributed import multiprocessors_of_all, not_for
from ..epilogue import inline
from ..last_block import is_last_block
from ..ll128_packets import (
    SWIZZLE,
    Pieces,
    numbering,
    packet,
    place_of,
    rounding,
    slot_words,
    unit_in_packet,
)
from ..problem import Problem
from ..sm90 import ALONE, Kinds, Tile, gemm_body, table_entry
from ..sm90_host import bind_gemm, choices_of, estimate

ROWS = 64  # of a tile
WIDTHS = (128, 96, 64, 32)
AT_ONCE = 20  # packets of all ranks that a warp polls at a time: four registers each
# Guesses, not measured:
MOST_ROWS = 128  # of a product
MOST_BYTES = 4 << 20  # of a result as part_dtype, that is better sent by warps than by "fused" or AllReduce
SAVED = 640 << 10  # bytes that a rank need not send, which are worth another trip


class Given(NamedTuple):
    """`extra` of the functions for the GEMM. Positions, in packets from the first slot: `mine`, where this
    rank's packets go; `parts`, where those of rank 0 come; `step`, from there to the next rank's; `sums`."""

    slots: Any
    epoch: Any
    mine: Any
    parts: Any
    step: Any
    sums: Any
    size_m: Any
    strips: object  # of 16 rows of the product
    tile_rows: Any
    out: Any
    width: object  # words of a row of out


@functools.cache
def beginning(n_ranks, shots):
    """-> ``begin(slots, room, epoch, size_m, out, width)``: the Given of an epoch."""

    @inline
    def begin(slots, room, epoch, size_m, out, width):
        parts, step, sums = (epoch & 1) * n_ranks * room, room, 0
        if shots == 2:
            step = quotient(room + n_ranks - 1, n_ranks)
            parts, sums = 0, n_ranks * step
        return Given(
            slots,
            epoch,
            parts + rank() * step,
            parts,
            step,
            sums,
            size_m,
            quotient(size_m + 15, 16),
            quotient(size_m + ROWS - 1, ROWS),
            out,
            width,
        )

    return begin


@inline
def order(t, n_m, n_n, extra):
    return place_of(t, n_m)


@functools.cache
def sending(tile, part_dtype, n_ranks, shots):
    """-> ``send(acc, (pieces, first, packets, lane, extra))``: a warp's rows of a tile, in `packets` packets
    for each piece, the first one having the number `first`."""
    pieces_of = Pieces(tile, part_dtype)
    per_piece, last = pieces_of.packets, pieces_of.row_bytes - 1
    store = fragment_store(part_dtype, pieces_of.row_bytes)

    @inline
    def store_16_columns(part, i, arguments):
        (piece,) = arguments
        store(piece, i, part)

    store_columns = for_each_part(8, store_16_columns)

    @inline
    def send_packet(words, i, extra):
        if shots == 1:
            peer = rank()
            for _ in range(n_ranks):
                peer = peer + 1 if peer + 1 < n_ranks else 0
                ll128_store_tile(extra.slots, extra.mine + i, words, extra.epoch, peer)
        else:
            slot = quotient(i, n_ranks)
            ll128_store_tile(extra.slots, extra.mine + slot, words, extra.epoch, i - slot * n_ranks)

    @inline
    def send_piece(part, i, arguments):
        piece, first, packets, lane, extra = arguments
        cuda.syncwarp()  # what was there is sent
        store_columns(part, (piece,))
        cuda.syncwarp()
        j = 0
        while j < packets:
            send_packet(packet(piece, j, last, lane), first + i * per_piece + j, extra)
            j += 1

    return for_each_part(pieces_of.columns // 2, send_piece)


@functools.cache
def adding(tile, part_dtype, n_ranks):
    """-> ``add(first, packets, extra)``: add up those of a warp's packets that this rank owns, and
    send the sums."""
    pieces_of = Pieces(tile, part_dtype)
    count, per_piece = pieces_of.count, pieces_of.packets
    numbers, combine = numbering(n_ranks, n_ranks), combining("sum", part_dtype, n_ranks)

    @inline
    def add_packet(i, extra):
        slot = quotient(i, n_ranks)
        if i - slot * n_ranks == rank():
            tiles = numbers(extra.parts + slot, extra.step, 0)
            words = combine(ll128_load_some(extra.slots, tiles, extra.epoch))
            for k in range(n_ranks):
                ll128_store_tile(extra.slots, extra.sums + i, words, extra.epoch, k)

    @inline
    def add(first, packets, extra):
        for i in range(count):
            j = 0
            while j < packets:
                add_packet(first + i * per_piece + j, extra)
                j += 1

    return add


@functools.cache
def receiving(tile, part_dtype, dtype, ranks):
    """-> ``receive(at, row, column, packets, lane, extra)``: wait for a warp's packets, from `at` on, of
    `ranks` ranks each; add them up, and store them to out, from this row and word on."""
    pieces_of = Pieces(tile, part_dtype)
    count, per_piece, row_bytes = pieces_of.count, pieces_of.packets, pieces_of.row_bytes
    words_of_row, bits = row_bytes // 8, (row_bytes // 16).bit_length() - 1
    shift, mask = SWIZZLE[row_bytes]
    batch = min(per_piece, max(1, AT_ONCE // ranks))
    numbers, combine = numbering(ranks, ranks * batch), combining("sum", part_dtype, ranks)
    narrow = rounding(part_dtype, dtype)

    @inline
    def store_packet(part, i, arguments):
        j, row, column, packets, lane, extra = arguments
        j += i
        low, high = combine(part)
        unit = 30 * j + unit_in_packet(lane)
        r = unit >> bits
        c = unit - (r << bits) ^ r >> shift & mask
        column += 2 * c + (lane & 15 == 15)
        row += r
        if (j < packets) & (r < 16) & (row < extra.size_m) & (column < extra.width):
            at = row * extra.width + column
            extra.out[at] = narrow(low)
            if lane & 7 != 7:
                extra.out[at + 1] = narrow(high)

    store_packets = for_each_part(ranks, store_packet)

    @inline
    def receive(at, row, column, packets, lane, extra):
        for i in range(count):
            j = 0
            while j < packets:
                tiles = numbers(at + i * per_piece + j, extra.step, packets - 1 - j)
                parts = ll128_load_some(extra.slots, tiles, extra.epoch)
                store_packets(parts, (j, row, column + i * words_of_row, packets, lane, extra))
                j += batch

    return receive


@functools.cache
def exchanging(tile, part_dtype, dtype, n_ranks, shots):
    """-> the Exchange of a kernel."""
    pieces_of = Pieces(tile, part_dtype)
    row_bytes, per_warp = pieces_of.row_bytes, pieces_of.count * pieces_of.packets
    row_words = pieces_of.count * row_bytes // 8
    send = sending(tile, part_dtype, n_ranks, shots)
    add = adding(tile, part_dtype, n_ranks)
    receive = receiving(tile, part_dtype, dtype, n_ranks if shots == 1 else 1)

    @inline
    def take(acc, t, ring, slot, parity, state, pieces, warp, lane, extra):
        row, column = place_of(t, extra.tile_rows)
        row = row * ROWS + 16 * warp
        if row < extra.size_m:
            packets = quotient(min(extra.size_m - row, 16) * row_bytes + TILE_BYTES - 1, TILE_BYTES)
            first = (column * extra.strips + (row >> 4)) * per_warp
            send(acc, (pieces, first, packets, lane, extra))  # 1
            at = extra.parts + first
            if shots == 2:
                add(first, packets, extra)  # 2
                at = extra.sums + first
            receive(at, row, column * row_words, packets, lane, extra)
        return acc, False, slot, parity, state

    return ALONE._replace(take=take)


@functools.cache
def ll128_kernel(tile, kinds, part_dtype, n_ranks, shots):
    """-> the kernel for tiles like `tile`, of 64 rows, of products like `kinds`, whose parts are sent as
    `part_dtype`, of `n_ranks` ranks, in 1 shot or 2."""
    exchange = exchanging(tile, part_dtype, kinds.out_dtype, n_ranks, shots)
    gemm, begin = gemm_body(tile, kinds, order, exchange=exchange), beginning(n_ranks, shots)

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def gemm_ll128(operands, size, split, out, width, slots, room, epochs, done):
        """As of ``gemm_kernel``, without a bias, and

        out     uint64, or uint32 where it has half the bytes of part_dtype, (m * width,)
        width   words of a row
        slots   uint64, symmetric, of ``slot_words`` elements, zeros at first
        room    packets that there are slots for
        epochs  int64 (1,), zero at first; done: int32 (1,)
        """
        epoch = epochs[0] + 1
        given = begin(slots, room, epoch, size[0], out, width)
        gemm(operands, size, split, given)
        if cuda.threadIdx.x == 0 and is_last_block(done):  # all have read the counter
            epochs[0] = epoch

    return gemm_ll128


def packets_of(m, n, tile, part_dtype):
    """Packets of an M by N product."""
    pieces = Pieces(tile, part_dtype)
    return -(-n // tile.n) * -(-m // 16) * pieces.count * pieces.packets


def tiles_for(n, given=None):
    """The tiles that may be chosen for N columns: the one that is `given`, (rows, columns), if any.
    ValueError for one that cannot be."""
    if given is not None:
        if given[0] != ROWS or given[1] not in WIDTHS:
            raise ValueError(f"tile is {given}; it must have {ROWS} rows, and {listed(WIDTHS)} columns")
        return [Tile(*given)]
    return [Tile(ROWS, w) for w in WIDTHS if w < n + 32]


class OneShot(Method):
    """The method "one_shot" of ``GemmAllReduce``."""

    name, shots, several_nodes = "GemmAllReduce one_shot", 1, False
    options = {"tile": None, "splits": None}

    def prepare(self, max_tokens, max_n, dtype, part_dtype, options=options):
        world, n_ranks, self.options = self.world, self.world.n_ranks, options
        world.check_reach(self.name, nvlink=True)
        reason = not_for(n_ranks, dtype, MOST_RANKS)
        self.multiprocessors = multiprocessors_of_all(world, self.name, reason, self.sms)
        self.part_dtype, self.rows = part_dtype, min(max_tokens, MOST_ROWS)
        tiles = tiles_for(max_n, options["tile"])
        self.room = max(packets_of(self.rows, max_n, tile, part_dtype) for tile in tiles)
        words = slot_words(self.room, n_ranks, self.shots)
        self.slots = self.zeros((words,), "uint64", f"{self.name.replace(' ', '.')}.slots")
        self.epochs, self.done = world.xp.zeros(1, "int64"), world.xp.zeros(1, "int32")

    def refuses(self, m, k, n):
        """-> why it does not compute that, alike on all ranks, or None"""
        return f"M is {m}; it is for {self.rows} rows at most" if m > self.rows else None

    def is_for(self, m, k, n):
        """Whether it is the faster choice, for what it computes. Arrays of other sizes must be copied."""
        emulated = self.world.backend.name == "emulator"  # which takes its time
        n_bytes, n_ranks = m * n * ITEMSIZE[self.part_dtype], self.world.n_ranks
        fits = k % 8 == n % 8 == 0 and n_bytes <= MOST_BYTES and n_ranks > 1
        return fits and not emulated and self._is_for(n_bytes, n_ranks)

    def _is_for(self, n_bytes, n_ranks):
        saved = (n_ranks - 1) * (n_ranks - 2) * n_bytes / n_ranks  # by two shots
        return saved < SAVED

    def bind(self, a, b, out):
        """-> run(stream)"""
        return aligned(self._bind, a, b, out, sms=self.sms)

    def _bind(self, a, b, out):
        (m, k), n, sms = a.shape, b.shape[1], self.multiprocessors
        words = out.reshape(-1).view("uint64" if self.part_dtype == out.dtype.name else "uint32")
        tiles = tiles_for(n, self.options["tile"])
        choices = choices_of(tiles, m, n, k, sms, self.options["splits"])
        return bind_gemm(
            lambda tile, kinds: ll128_kernel(tile, kinds, self.part_dtype, self.world.n_ranks, self.shots),
            Problem(a, b, out, None, None),
            min(choices, key=lambda choice: estimate(m, n, k, choice, sms)),
            *(sms, words, words.size // m, self.slots, self.room, self.epochs, self.done),
            co_resident=True,
            group=self.world,
        )


class TwoShot(OneShot):
    """The method "two_shot" of ``GemmAllReduce``."""

    name, shots = "GemmAllReduce two_shot", 2

    def _is_for(self, n_bytes, n_ranks):
        return n_ranks > 2


def _listed(tile, kinds, part_dtype, n_ranks, shots):
    kinds = Kinds(*kinds)
    out = "uint64" if part_dtype == kinds.out_dtype else "uint32"
    return table_entry(ll128_kernel(Tile(*tile), kinds, part_dtype, n_ranks, shots), kinds, out=out)


BF16, F16, SPLIT = ("bfloat16", "k", "k", "bfloat16"), ("float16", "k", "mn", "float16"), (8, True)
MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "64x64 one": _listed((64, 64), BF16, "bfloat16", 2, 1),
    "64x32 one split float32": _listed((64, 32, *SPLIT), BF16, "float32", 4, 1),
    "64x128 one split": _listed((64, 128, *SPLIT), F16, "float16", 8, 1),
    "64x128 one float32": _listed((64, 128), BF16, "float32", 16, 1),
    "64x96 two": _listed((64, 96), F16, "float16", 4, 2),
    "64x128 two split float32": _listed((64, 128, *SPLIT), BF16, "float32", 8, 2),
}
