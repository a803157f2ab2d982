"""GEMM and reduce-scatter, or all-reduce, in one kernel, by LL128: the ranks exchange a tile while the next
is computed. For results of some megabytes. For Hopper, and GPUs that NVLink connects.

``shmemkit.gemm.sm90`` computes the product, by tiles of 128 rows. They have so few columns that a whole
tile's part fits in shared memory. The warps that multiply leave it there and go on; the three warps beside
the loader's exchange it at the same time. The warps that multiply exchange a block's last tile themselves:
they are more, and have no other work.

All ranks compute their tiles in the same order, column after column: weights come from memory once for all
rows, as for the GEMM alone. (In "fused", each rank computes the others' rows first, and loads the weights
again for its own.)

Part      of a tile, rounded to `part_dtype`: the pieces of all warps (``shmemkit.gemm.ll128_packets``)
Packet    480 bytes of a part, in the registers of a warp; on the way four lines with flags
          (``device.packets.ll128``). Rows that the result does not have are not sent
Owner     of a tile: the rank whose rows it has. Tiles do not cross from one rank's rows to another's
Slots     parts[buffer, k, i], on the owner: packet i of its tiles, of rank k. Written by rank k only
Epochs    epochs[0], local: the epoch is the flag, and selects the buffer. Device-resident, so graph-safe.
          done[0]: blocks of this launch that have read it
Posts     two mbarriers of a block: posts[0], a part is in shared memory: one arrival of each warp that
          multiplies; posts[1], it has been sent: one of each warp beside the loader's

  warps that multiply, for each tile:
          1. wait for posts[1] of the tile before, if there was one; round and store the tile's part;
             syncwarp;
             arrive at posts[0]
  warps beside the loader's, for each tile of the block but the last; those that multiply, for the last:
          2. wait for posts[0]; load the packets, and store them to parts[buffer, me, i] on the tile's owner,
             also on this rank, with the flag; syncwarp; arrive at posts[1]
          3. if this rank owns the tile, for some packets i at a time: poll parts[buffer, k, i], of all k at
             once, until all have the flag; add them in the order of the ranks, in float32; round, and store
             to out

All-reduce (`everywhere`) in two shots: no rank owns the rows. One rank adds the parts of a packet, and sends
the sum. Packets are numbered through all tiles.

Owner     rank i % n_ranks, of packet i
Slots     parts[k, i // n_ranks], on the owner of packet i: that of rank k. Written by rank k only. sums[i],
          on every rank: the sum, as `part_dtype`. Written by the owner only

          2. as above, to the packets' owners
          3. for the packets i that this rank owns: poll parts[k, i // n_ranks], of all k at once, until all
             have the flag; add them in the order of the ranks, in float32; round, and store to sums[i] on all
             ranks, with the flag
          4. for some packets i at a time: poll sums[i]; store to out

All products are rounded alike, and added in the order of the ranks: the bits are the same in every run, and
those of an all-reduce on all ranks.

No race, without credits. A part in shared memory is written again (1) after it has been sent (2).
Reduce-scatter: the double-buffer lemma (docs/protocols.md); each rank has rows in every epoch. All-reduce: as
with two shots in ``gemm/all_reduce/ll128.py``. The calls may have any sizes and tiles. Only this rank writes
out.

No deadlock: ascending-order progress (docs/protocols.md), for tiles. A tile is sent without a wait for other
ranks; then all its parts come, all sums, and it is done.

The machine code must keep (docs/machine_code.md): whole line, one elected thread.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, int64, types

from shmemkit.device.cuda.accumulators import ITEMSIZE, fragment_store
from shmemkit.device.cuda.mbarrier import mbarrier_arrive, mbarrier_init, mbarrier_wait
from shmemkit.device.cuda.register_tuples import for_each_part
from shmemkit.device.cuda.subarrays import span
from shmemkit.device.packets.ll128 import TILE_BYTES, ll128_load_some, ll128_store_tile
from shmemkit.device.packets.transports import AT_ONCE as MOST_RANKS
from shmemkit.device.packets.units import combining
from shmemkit.device.shmem.barriers import rank
from shmemkit.device.swizzle import quotient
from shmemkit.operations.method import Method

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
from ..sm90 import ALONE, BESIDE, Kinds, Layout, Tile, gemm_body, table_entry
from ..sm90_host import Choice, bind_gemm, choose, estimate
from .fused import rows_of
from .time_estimates import outlasts

ROWS = 128  # of a tile
# Of tiles, by bytes of an element of a part, which fits in shared memory. (Wider ones would move registers,
# which ptxas ignores in kernels that have the table of ranks, as `rank` and LL128 do.)
WIDTHS = {2: (128, 64), 4: (64,)}
AT_ONCE = 12  # packets of all ranks that a warp polls at a time: four registers each
FULL, SENT = 0, 1  # of posts
# Smaller results are faster with K split, larger ones by "fused": decided by
# benchmarks/results/gemm_{rs,ar}_h200x{2,4}.json
LEAST = 1 << 20  # elements of a result
SOME_BYTES = 8 << 20  # of a result as part_dtype; of more, products that take long are faster by "fused"


class Given(NamedTuple):
    """`extra` of the functions for the GEMM. Rows, and rows of tiles, are those of a rank; of an all-reduce
    all. Positions, in packets from the first slot: `mine`, where this rank's packets go; `parts`, where those
    of rank 0 come; `step`, from there to the next rank's; `sums`."""

    slots: Any
    epoch: Any
    mine: Any
    parts: Any
    step: Any
    sums: Any
    posts: Any
    tiles: Any
    tile_rows: Any
    rows: Any
    out: Any
    width: object  # words of a row of out


@functools.cache
def beginning(n_ranks, everywhere):
    """-> ``begin(slots, room, epoch, posts, tiles, tile_rows, rows, out, width)``: the Given of an epoch."""

    @inline
    def begin(slots, room, epoch, posts, tiles, tile_rows, rows, out, width):
        parts, step, sums = (epoch & 1) * n_ranks * room, room, 0
        if everywhere:
            step = quotient(room + n_ranks - 1, n_ranks)
            parts, sums = 0, n_ranks * step
        begins = parts + rank() * step, parts, step, sums
        return Given(slots, epoch, *begins, posts, tiles, tile_rows, rows, out, width)

    return begin


def bytes_of_tile(tile, part_dtype):
    return tile.m * tile.n * ITEMSIZE[part_dtype]


def packets_of_tile(tile, part_dtype):
    """Of a whole one; each has as many numbers."""
    return -(-bytes_of_tile(tile, part_dtype) // TILE_BYTES)


@functools.cache
def counting(tile, part_dtype):
    """-> ``packets_at(row, extra)``: packets of a tile in row `row` of them: those of warps that have rows"""
    bytes_of_warp = bytes_of_tile(tile, part_dtype) // tile.warps

    @inline
    def packets_at(row, extra):
        warps = quotient(min(extra.rows - row * ROWS, ROWS) + 15, 16)
        return quotient(warps * bytes_of_warp + TILE_BYTES - 1, TILE_BYTES)

    return packets_at


@functools.cache
def owning(n_ranks):
    """-> ``owner_of(t, extra)`` -> tile t's owner; its number among the owner's; its row of tiles there, and
    its column"""

    @inline
    def owner_of(t, extra):
        row, column = place_of(t, n_ranks * extra.tile_rows)
        owner = quotient(row, extra.tile_rows)
        row -= owner * extra.tile_rows
        return owner, column * extra.tile_rows + row, row, column

    return owner_of


@functools.cache
def sending(tile, part_dtype, n_ranks, everywhere, warps):
    """-> ``send(t, part, warp, lane, extra)``: step 2 for tile `t`, which has this part, by `warps` warps."""
    packets, last = packets_of_tile(tile, part_dtype), bytes_of_tile(tile, part_dtype) // 16 - 1
    owner_of, packets_at = owning(n_ranks), counting(tile, part_dtype)

    @inline
    def send(t, part, warp, lane, extra):
        if everywhere:
            owner, i = 0, t
            row, _ = place_of(t, extra.tile_rows)
        else:
            owner, i, row, _ = owner_of(t, extra)
        j, count = int64(warp), packets_at(row, extra)
        while j < count:
            words, slot = packet(part, j, last, lane), i * packets + j
            if everywhere:
                owner = slot
                slot = quotient(owner, n_ranks)
                owner -= slot * n_ranks
            ll128_store_tile(extra.slots, extra.mine + slot, words, extra.epoch, owner)
            j += warps

    return send


@functools.cache
def adding(tile, part_dtype, n_ranks, warps):
    """-> ``add(t, row, warp, extra)``: step 3 of an all-reduce for tile `t`, in that row of tiles, by `warps`
    warps."""
    packets, packets_at = packets_of_tile(tile, part_dtype), counting(tile, part_dtype)
    numbers, combine = numbering(n_ranks, n_ranks), combining("sum", part_dtype, n_ranks)

    @inline
    def add(t, row, warp, extra):
        first, me = t * packets, rank()
        end = first + packets_at(row, extra)
        slot = quotient(first + n_ranks - 1 - me, n_ranks) + warp  # of the first packet that this rank owns
        while slot * n_ranks + me < end:
            tiles = numbers(extra.parts + slot, extra.step, 0)
            words = combine(ll128_load_some(extra.slots, tiles, extra.epoch))
            for k in range(n_ranks):
                ll128_store_tile(extra.slots, extra.sums + slot * n_ranks + me, words, extra.epoch, k)
            slot += warps

    return add


@functools.cache
def receiving(tile, part_dtype, dtype, ranks, warps):
    """-> ``receive(at, row, column, warp, lane, extra)``: wait for a tile's packets, from `at` on, of
    `ranks` ranks each; add them up, and store them to out, from this row and column of tiles on; by `warps`
    warps."""
    pieces, packets = Pieces(tile, part_dtype), packets_of_tile(tile, part_dtype)
    count, words_of_row, bits = pieces.count, pieces.row_bytes // 8, (pieces.row_bytes // 16).bit_length() - 1
    shift, mask = SWIZZLE[pieces.row_bytes]
    units = pieces.row_bytes  # of 16 bytes, of the 16 rows of a piece
    of_tile, batch = tile.warps, min(max(1, AT_ONCE // ranks), -(-packets // warps))
    numbers, combine = numbering(ranks, ranks * batch), combining("sum", part_dtype, ranks)
    narrow, packets_at = rounding(part_dtype, dtype), counting(tile, part_dtype)

    @inline
    def store_packet(words, i, arguments):
        j, row, column, lane, extra = arguments
        low, high = combine(words)
        unit = 30 * (j + i) + unit_in_packet(lane)
        piece = quotient(unit, units)
        unit -= piece * units
        warp = quotient(piece, count)
        r = unit >> bits
        c = unit - (r << bits) ^ r >> shift & mask
        row += 16 * warp + r
        column += (piece - warp * count) * words_of_row + 2 * c + (lane & 15 == 15)
        if (warp < of_tile) & (row < extra.rows) & (column < extra.width):
            at = row * extra.width + column
            extra.out[at] = narrow(low)
            if lane & 7 != 7:
                extra.out[at + 1] = narrow(high)

    store_packets = for_each_part(ranks, store_packet)

    @inline
    def receive(at, row, column, warp, lane, extra):
        j, left = int64(warp * batch), packets_at(row, extra)
        row, column = row * ROWS, column * count * words_of_row
        while j < left:
            tiles = numbers(at + j, extra.step, left - 1 - j)
            store_packets(ll128_load_some(extra.slots, tiles, extra.epoch), (j, row, column, lane, extra))
            j += warps * batch

    return receive


@functools.cache
def finishing(tile, part_dtype, dtype, n_ranks, everywhere, warps):
    """-> ``finish(t, warp, lane, extra)``: what comes after step 2 for tile `t`, by `warps` warps."""
    packets, owner_of = packets_of_tile(tile, part_dtype), owning(n_ranks)
    add = adding(tile, part_dtype, n_ranks, warps)
    receive = receiving(tile, part_dtype, dtype, 1 if everywhere else n_ranks, warps)

    @inline
    def finish(t, warp, lane, extra):
        if everywhere:
            row, column = place_of(t, extra.tile_rows)
            add(t, row, warp, extra)  # 3
            receive(extra.sums + t * packets, row, column, warp, lane, extra)  # 4
        else:
            owner, i, row, column = owner_of(t, extra)
            if owner == rank():
                receive(extra.parts + i * packets, row, column, warp, lane, extra)  # 3

    return finish


@functools.cache
def exchanging(tile, kinds, part_dtype, n_ranks, everywhere):
    """-> the Exchange of a kernel."""
    layout, pieces = Layout(tile, kinds), Pieces(tile, part_dtype)
    piece_bytes, count, at_part = 16 * pieces.row_bytes, pieces.count, layout.at_pieces
    part_bytes = tile.warps * count * piece_bytes
    if part_bytes > layout.bytes - at_part:
        raise ValueError(f"parts of {part_bytes} bytes, of {layout.bytes - at_part}")
    store = fragment_store(part_dtype, pieces.row_bytes)
    of, dtype = (n_ranks, everywhere), kinds.out_dtype
    send, send_last = (sending(tile, part_dtype, *of, warps) for warps in (BESIDE, tile.warps))
    finish, finish_last = (finishing(tile, part_dtype, dtype, *of, warps) for warps in (BESIDE, tile.warps))

    @inline
    def store_16_columns(acc, i, arguments):
        (piece,) = arguments
        store(piece, i, acc)

    store_columns = for_each_part(8, store_16_columns)

    @inline
    def store_piece(acc, i, arguments):
        (part,) = arguments
        store_columns(acc, (span(part, i * piece_bytes, piece_bytes),))

    store_pieces = for_each_part(pieces.columns // 2, store_piece)

    @inline
    def take(acc, t, ring, slot, parity, state, _, warp, lane, extra):
        memory, _, _ = ring
        part = span(memory, at_part, part_bytes)
        if state > 0:
            mbarrier_wait(extra.posts, SENT, (state & 1) ^ 1)
        of_warp = warp * count * piece_bytes
        store_pieces(acc, (span(part, of_warp, part_bytes - of_warp),))  # 1
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(extra.posts, FULL)
        if t + cuda.gridDim.x >= extra.tiles:
            mbarrier_wait(extra.posts, FULL, state & 1)
            send_last(t, part, warp, lane, extra)  # 2
            finish_last(t, warp, lane, extra)
        return acc, False, slot, parity, state + 1

    @inline
    def watch(t, tiles, step, ring, extra):
        memory, _, _ = ring
        part = span(memory, at_part, part_bytes)
        warp, lane = (cuda.threadIdx.x >> 5) - 1, cuda.threadIdx.x & 31
        parity = 0
        while t + step < tiles:
            mbarrier_wait(extra.posts, FULL, parity)
            send(t, part, warp, lane, extra)  # 2
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(extra.posts, SENT)
            finish(t, warp, lane, extra)
            parity ^= 1
            t += step

    exchange = ALONE._replace(take=take, watch=watch)
    return exchange if everywhere else exchange._replace(rows=rows_of)


@inline
def order(t, n_m, n_n, extra):
    return place_of(t, n_m)


@functools.cache
def overlap_kernel(tile, kinds, part_dtype, n_ranks, everywhere=False):
    """-> the kernel for tiles like `tile`, of products like `kinds`, whose parts are sent as `part_dtype`, of
    `n_ranks` ranks. `everywhere`: all-reduce; otherwise reduce-scatter."""
    gemm = gemm_body(tile, kinds, order, exchange=exchanging(tile, kinds, part_dtype, n_ranks, everywhere))
    warps, begin = tile.warps, beginning(n_ranks, everywhere)

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def gemm_overlap(operands, size, split, rows, tile_rows, tiles, out, width, slots, room, epochs, done):
        """As of ``gemm_kernel``, without a bias and with K not split, but

        m       rows of all tiles
        rows    of the result, and tile_rows rows of tiles: for each rank; for all-reduce, all
        tiles   all of them
        out     uint64, or uint32 where it has half the bytes of part_dtype, (rows * width,)
        width   words of a row
        slots   uint64, symmetric, of ``slot_words`` elements, zeros at first
        room    packets of a rank's rows, for all-reduce of all rows, that there are slots for
        epochs  int64 (1,), zero at first; done: int32 (1,)
        """
        posts = cuda.shared.array(2, types.uint64)
        if cuda.threadIdx.x == 0:
            mbarrier_init(posts, FULL, warps)
            mbarrier_init(posts, SENT, BESIDE)  # the GEMM begins with a fence for that, and a barrier
        epoch = epochs[0] + 1
        given = begin(slots, room, epoch, posts, tiles, tile_rows, rows, out, width)
        gemm(operands, size, split, given)
        if cuda.threadIdx.x == 0 and is_last_block(done):  # all have read the counter
            epochs[0] = epoch

    return gemm_overlap


def tiles_for(part_dtype, given=None):
    """The tiles whose parts fit in shared memory; of these the one that is `given`, (rows, columns), if any.
    ValueError for another one."""
    widths = WIDTHS[ITEMSIZE[part_dtype]]
    if given is not None:
        if given[0] != ROWS or given[1] > max(widths):
            raise ValueError(f"tile is {given}; it must have {ROWS} rows, and up to {max(widths)} columns")
        return [Tile(*given)]
    return [Tile(ROWS, width) for width in widths]


def most_bytes(n_ranks, everywhere):
    """Of a result as part_dtype, in whole tiles: the largest that there are slots for."""
    return SOME_BYTES if n_ranks <= 2 else (4 if everywhere else 2) * SOME_BYTES


def room_for(rows, n, tiles, part_dtype, shares, most):
    """Packets of a rank's rows, of `shares` ranks, of the largest product of up to `most` bytes, by any of
    these tiles."""
    numbers = [most // bytes_of_tile(tile, part_dtype) // shares for tile in tiles]
    return max(
        min(tile.count(rows, n), number) * packets_of_tile(tile, part_dtype)
        for tile, number in zip(tiles, numbers, strict=True)
    )


class Overlap(Method):
    """The method "ll128_overlap" of ``GemmReduceScatter``."""

    name, everywhere, several_nodes = "GemmReduceScatter ll128_overlap", False, False
    options = {"tile": None}

    def prepare(self, max_tokens, max_n, dtype, part_dtype, options=options):
        world, n_ranks, self.options = self.world, self.world.n_ranks, options
        world.check_reach(self.name, nvlink=True)
        reason = not_for(n_ranks, dtype, MOST_RANKS)
        self.multiprocessors = multiprocessors_of_all(world, self.name, reason, self.sms)
        self.part_dtype, self.shares = part_dtype, 1 if self.everywhere else n_ranks
        self.most = most_bytes(n_ranks, self.everywhere)
        rows = -(-max_tokens // self.shares)
        self.room = room_for(rows, max_n, self.tiles(), part_dtype, self.shares, self.most)
        words = slot_words(self.room, n_ranks, 2 if self.everywhere else 1)
        self.slots = self.zeros((words,), "uint64", f"{self.name.replace(' ', '.')}.slots")
        self.epochs, self.done = world.xp.zeros(1, "int64"), world.xp.zeros(1, "int32")

    def tiles(self):
        """Those that may be chosen."""
        return tiles_for(self.part_dtype, self.options["tile"])

    def refuses(self, m, k, n):
        """-> why it does not compute that, alike on all ranks, or None"""
        rows = -(-m // self.shares)
        n_bytes = self.shares * max(
            tile.count(rows, n) * bytes_of_tile(tile, self.part_dtype) for tile in self.tiles()
        )
        if n_bytes <= self.most:
            return None
        return (
            f"{m} by {n} takes {n_bytes} bytes as {self.part_dtype} in whole tiles of {ROWS} rows"
            f"{'' if self.everywhere else ' of each rank'}; it is for {self.most} at most"
        )

    def is_for(self, m, k, n):
        """Whether it is the faster choice, for what it computes. Arrays of other sizes must be copied."""
        emulated = self.world.backend.name == "emulator"  # which takes its time
        fits = k % 8 == n % 8 == 0 and m * n >= LEAST and self._fills_tiles(m // self.shares)
        return fits and self.world.n_ranks > 1 and not emulated and not self._takes_long(m, k, n)

    def _fills_tiles(self, rows):
        return 4 * rows >= 3 * (-(-rows // ROWS) * ROWS)

    def _takes_long(self, m, k, n):
        """Whether it is a large result, and its product takes much longer than the links."""
        n_bytes, n_ranks = m * n * ITEMSIZE[self.part_dtype], self.world.n_ranks
        sent = (n_ranks - 1) * n_bytes // n_ranks * (2 if self.everywhere else 1)
        sms = self.multiprocessors
        return n_bytes > SOME_BYTES and outlasts(m, n, k, choose(m, n, k, sms), sms, sent)

    def bind(self, a, b, out):
        """-> run(stream)"""
        return aligned(self._bind, a, b, out, 0 if self.everywhere else out.shape[0], self.sms)

    def _bind(self, a, b, out):
        n_ranks, sms, (k, n), rows = self.world.n_ranks, self.multiprocessors, b.shape, out.shape[0]
        tile_rows = -(-rows // ROWS)
        m = self.shares * tile_rows * ROWS
        words = out.reshape(-1).view("uint64" if self.part_dtype == out.dtype.name else "uint32")
        choices = [Choice(tile, 1) for tile in self.tiles()]
        choice = min(choices, key=lambda choice: estimate(m, n, k, choice, sms))
        return bind_gemm(
            lambda tile, kinds: overlap_kernel(tile, kinds, self.part_dtype, n_ranks, self.everywhere),
            *(Problem(a, b, out, None, None), choice, sms),
            *(rows, tile_rows, choice.tile.count(m, n), words, words.size // rows),
            *(self.slots, self.room, self.epochs, self.done),
            m=m,
            co_resident=True,
            group=self.world,
        )


class OverlapEverywhere(Overlap):
    """The method "two_shot_overlap" of ``GemmAllReduce``."""

    name, everywhere = "GemmAllReduce two_shot_overlap", True

    def is_for(self, m, k, n):
        return m > ROWS and super().is_for(m, k, n)


def _listed(tile, kinds, part_dtype, n_ranks, *everywhere):
    kinds = Kinds(*kinds)
    out = "uint64" if part_dtype == kinds.out_dtype else "uint32"
    return table_entry(overlap_kernel(Tile(*tile), kinds, part_dtype, n_ranks, *everywhere), kinds, out=out)


BF16, F16 = ("bfloat16", "k", "k", "bfloat16"), ("float16", "k", "mn", "float16")
MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x128": _listed((128, 128), BF16, "bfloat16", 4),
    "128x128 of 16": _listed((128, 128), F16, "float16", 16),
    "128x64 float32": _listed((128, 64), F16, "float32", 2),
    "128x128 everywhere": _listed((128, 128), BF16, "bfloat16", 4, True),
    "128x64 everywhere": _listed((128, 64), F16, "float16", 8, True),
    "128x64 everywhere float32": _listed((128, 64), BF16, "float32", 2, True),
}
