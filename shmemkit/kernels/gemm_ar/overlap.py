"""GEMM and all-reduce in one kernel, in two shots by LL128, while the next tile is computed: for results of
some megabytes, of more rows than ``ll128.py`` is for. Hopper, GPUs that NVLink connects.

The product is that of ``shmemkit.kernels.gemm.sm90``, by tiles of 128 rows and so few columns that a tile's
part fits in shared memory whole. The warps that multiply leave it there and go on; three warps beside the
loader's exchange it meanwhile, and store the sums to out. Of a block's last tile the warps that multiply do
so themselves: there are more of them, and they have nothing else to do.

All ranks have the same tiles, and the order in which they compute them is free: so weights come from memory
once for all rows, as they do for the GEMM alone. (Where each rank adds up some rows, "fused", the others' are
computed first, and the weights come again for its own.)

Part      of a tile, rounded to `part_dtype`: its rows in pieces of 16 rows by 128 bytes, swizzled, one warp's
          after another's
Packet    480 bytes of a part, in the registers of a warp; on the way four lines
          (``shmemkit.device.ll128_tiles``). Packets have numbers, tile after tile; rank i % n_ranks adds
          packet i up, its owner
Lines     parts[k, i // n_ranks], on the owner of packet i: that of rank k. Written by rank k only. sums[i],
          on every rank: the sum, as `part_dtype`. Written by the owner only
Counters  calls[0], local: how many calls have ended. The number of a call is the flag of its lines. In device
          memory, so that a replayed graph counts on. done[0]: blocks of this call that have read it
Posts     two mbarriers of a block: posts[0], a part is in shared memory: one arrival of each warp that
          multiplies; posts[1], it has been sent: one of each warp beside the loader's

  warps that multiply, for each tile:
          1. wait for posts[1] of the tile before; round and store the tile's part; arrive at posts[0]
  warps beside the loader's, for each tile of the block but the last; those that multiply, for the last:
          2. wait for posts[0]; load packets, and store them to parts[me, i // n_ranks] on their owners, with
             the flag: on this rank, too. Arrive at posts[1]
          3. for the packets i that I own: poll parts[k, i // n_ranks], of all k at once, until all have the
             flag; add them in the order of the ranks, in float32; round, and store to sums[i] on all ranks,
             with the flag
          4. for some packets i at a time: poll sums[i]; store to out

All ranks add the same numbers in the same order, their own rounded like the others': they get the same bits,
in every run.

No race: a part in shared memory is written again (1) when it has been sent (2). I write to parts again in a
later call than that in which I got the packet's sum, which its owner has sent when it had read the part; and
a sum, when I have all parts of a later call, sent in launches that began when those before had ended: they
have read the sum. So the calls may have any sizes and tiles, and a packet may be anything: a line has an
earlier call's number, or 0, until that of this call comes with it. out is written by this rank alone.

No deadlock: all blocks are resident, and take the tiles in ascending order, the same on all ranks. Consider
the first tile that is not done on all ranks. All before it are, so nobody waits for these: warps get to it,
and it is sent without waiting for other ranks; then all its parts come, all sums, and it is done.
"""

import functools
from typing import NamedTuple

from numba import cuda, int64, types

from shmemkit.device.barriers import rank
from shmemkit.device.fragments import ITEMSIZE, fragment_store
from shmemkit.device.ll128_tiles import TILE_BYTES, ll128_load_some, ll128_store_tile
from shmemkit.device.mbarrier import mbarrier_arrive, mbarrier_init, mbarrier_wait
from shmemkit.device.memory import load_vec16
from shmemkit.device.registers import for_each_part
from shmemkit.device.spans import span
from shmemkit.device.swizzle import quotient
from shmemkit.kernels.gemm.aligned import aligned
from shmemkit.kernels.gemm.epilogue import inline
from shmemkit.kernels.gemm.problem import HALVES, Problem
from shmemkit.kernels.gemm.products import multiprocessors_of_all
from shmemkit.kernels.gemm.sm90 import ALONE, BESIDE, Kinds, Layout, Tile, gemm_body, signature
from shmemkit.kernels.gemm.sm90_host import Choice, bind_gemm, estimate
from shmemkit.kernels.method import Method
from shmemkit.kernels.tiles import MOST_RANKS, combining

from .ll128 import SWIZZLE, Pieces, line_words, numbering, place_in_packet, place_of, rounding

ROWS = 128  # of a tile
WIDTHS = {2: (128, 64), 4: (64,)}  # of tiles, by bytes of an element of a part, which fits in shared memory
AT_ONCE = 12  # packets whose sums a warp polls at a time
FULL, SENT = 0, 1  # of posts
# Measured on 2 H200: smaller results are faster with K split, larger ones by "fused".
LEAST = 1 << 20  # elements of a result
MOST_BYTES = 8 << 20  # of one as part_dtype


class Given(NamedTuple):
    """`extra` of the functions for the GEMM. In packets from the beginning of the lines: where mine go, from
    one rank's to the next one's, and where sums are."""

    lines: object
    call: object
    mine: object
    step: object
    sums: object
    posts: object
    tiles: object
    tile_rows: object
    size_m: object
    out: object
    width: object  # words of a row of out


def packets_of_tile(tile, part_dtype):
    return -(-tile.m * tile.n * ITEMSIZE[part_dtype] // TILE_BYTES)


@functools.cache
def sending(tile, part_dtype, n_ranks, warps):
    """-> ``send(t, part, warp, lane, extra)``: step 2 for tile `t`, which has this part, by `warps` warps."""
    packets, last = packets_of_tile(tile, part_dtype), tile.m * tile.n * ITEMSIZE[part_dtype] // 16 - 1

    @inline
    def send(t, part, warp, lane, extra):
        j = int64(warp)
        while j < packets:
            a, b, c, d = load_vec16(part, 16 * min(30 * j + place_in_packet(lane), last))
            low = types.uint64(b) << types.uint64(32) | types.uint64(a)
            high = types.uint64(d) << types.uint64(32) | types.uint64(c)
            words = high if lane & 15 == 15 else low, high
            i = t * packets + j
            place = quotient(i, n_ranks)
            ll128_store_tile(extra.lines, extra.mine + place, words, extra.call, i - place * n_ranks)
            j += warps

    return send


@functools.cache
def adding(tile, part_dtype, n_ranks, warps):
    """-> ``add(t, warp, extra)``: step 3 for tile `t`, by `warps` warps."""
    packets = packets_of_tile(tile, part_dtype)
    numbers, combine = numbering(n_ranks, n_ranks), combining("sum", part_dtype, n_ranks)

    @inline
    def add(t, warp, extra):
        first, me = t * packets, rank()
        place = quotient(first + n_ranks - 1 - me, n_ranks) + warp  # of the first packet that I own
        while place * n_ranks + me < first + packets:
            words = combine(ll128_load_some(extra.lines, numbers(place, extra.step, 0), extra.call))
            for k in range(n_ranks):
                ll128_store_tile(extra.lines, extra.sums + place * n_ranks + me, words, extra.call, k)
            place += warps

    return add


@functools.cache
def receiving(tile, part_dtype, dtype, warps):
    """-> ``receive(t, warp, lane, extra)``: step 4 for tile `t`, by `warps` warps."""
    pieces, packets = Pieces(tile, part_dtype), packets_of_tile(tile, part_dtype)
    count, words_of_row, bits = pieces.count, pieces.row_bytes // 8, (pieces.row_bytes // 16).bit_length() - 1
    shift, mask = SWIZZLE[pieces.row_bytes]
    units = pieces.row_bytes  # of 16 bytes, of the 16 rows of a piece
    of_tile, batch = tile.warps, min(AT_ONCE, -(-packets // warps))
    numbers, combine = numbering(1, batch), combining("sum", part_dtype, 1)
    narrow = rounding(part_dtype, dtype)

    @inline
    def store_packet(words, i, arguments):
        j, row, column, lane, extra = arguments
        low, high = combine(words)
        unit = 30 * (j + i) + place_in_packet(lane)
        piece = quotient(unit, units)
        unit -= piece * units
        warp = quotient(piece, count)
        r = unit >> bits
        c = unit - (r << bits) ^ r >> shift & mask
        row += 16 * warp + r
        column += (piece - warp * count) * words_of_row + 2 * c + (lane & 15 == 15)
        if (warp < of_tile) & (row < extra.size_m) & (column < extra.width):
            at = row * extra.width + column
            extra.out[at] = narrow(low)
            if lane & 7 != 7:
                extra.out[at + 1] = narrow(high)

    store_packets = for_each_part(1, store_packet)

    @inline
    def receive(t, warp, lane, extra):
        row, column = place_of(t, extra.tile_rows)
        row, column = row * ROWS, column * count * words_of_row
        at = extra.sums + t * packets
        j = int64(warp * batch)
        while j < packets:
            sums = ll128_load_some(extra.lines, numbers(at + j, 0, packets - 1 - j), extra.call)
            store_packets(sums, (j, row, column, lane, extra))
            j += warps * batch

    return receive


@functools.cache
def exchanging(tile, kinds, part_dtype, n_ranks):
    """-> the Exchange of a kernel."""
    layout, pieces = Layout(tile, kinds), Pieces(tile, part_dtype)
    piece_bytes, count, at_part = 16 * pieces.row_bytes, pieces.count, layout.at_pieces
    part_bytes = tile.warps * count * piece_bytes
    if part_bytes > layout.bytes - at_part:
        raise ValueError(f"parts of {part_bytes} bytes, of {layout.bytes - at_part}")
    store = fragment_store(part_dtype, pieces.row_bytes)

    def steps(warps):
        these = sending, adding, receiving
        of = (part_dtype, n_ranks), (part_dtype, n_ranks), (part_dtype, kinds.out_dtype)
        return [step(tile, *how, warps) for step, how in zip(these, of, strict=True)]

    (send, add, receive), (send_last, add_last, receive_last) = steps(BESIDE), steps(tile.warps)

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
            add_last(t, warp, extra)  # 3
            receive_last(t, warp, lane, extra)  # 4
        return acc, False, slot, parity, state + 1

    @inline
    def watch(t, tiles, step, ring, extra):
        memory, _, _ = ring
        part = span(memory, at_part, part_bytes)
        warp, lane = (cuda.threadIdx.x >> 5) - 1, cuda.threadIdx.x & 31
        parity = 0
        while t + step < tiles:
            mbarrier_wait(extra.posts, FULL, parity)
            send(t, part, warp, lane, extra)  # 2; the warp has loaded all before it stores the last
            if lane == 0:
                mbarrier_arrive(extra.posts, SENT)
            add(t, warp, extra)  # 3
            receive(t, warp, lane, extra)  # 4
            parity ^= 1
            t += step

    return ALONE._replace(take=take, watch=watch)


@inline
def order(t, n_m, n_n, extra):
    return place_of(t, n_m)


@functools.cache
def overlap_kernel(tile, kinds, part_dtype, n_ranks):
    """-> the kernel for tiles like `tile`, of products like `kinds`, whose parts are sent as `part_dtype`, of
    `n_ranks` ranks."""
    gemm = gemm_body(tile, kinds, order, exchange=exchanging(tile, kinds, part_dtype, n_ranks))
    warps, columns = tile.warps, tile.n

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def gemm_overlap(
        map_a, map_b, map_out, bias, m, n, k, splits, partials, arrivals, out, width, lines, room, calls, done
    ):
        """As of ``gemm_kernel``, without a bias and with K not split, and

        out         uint64, or uint32 where it has half the bytes of part_dtype, (m * width,)
        width       words of a row
        lines       uint64, symmetric, of ``line_words`` elements, zeros at first
        room        packets that there are places for
        calls       int64 (1,), zero at first; done: int32 (1,)
        """
        posts = cuda.shared.array(2, types.uint64)
        if cuda.threadIdx.x == 0:
            mbarrier_init(posts, FULL, warps)
            mbarrier_init(posts, SENT, BESIDE)  # the GEMM begins with a fence for that, and a barrier
        call, step = calls[0] + 1, quotient(room + n_ranks - 1, n_ranks)
        tile_rows = quotient(m + ROWS - 1, ROWS)
        tiles = tile_rows * quotient(n + columns - 1, columns)
        where = rank() * step, step, n_ranks * step
        given = Given(lines, call, *where, posts, tiles, tile_rows, m, out, width)
        gemm(map_a, map_b, map_out, bias, m, n, k, splits, partials, arrivals, given)
        if cuda.threadIdx.x == 0:
            cuda.threadfence()
            if cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:  # all have read the counter
                cuda.threadfence()
                done[0] = 0
                calls[0] = call

    return gemm_overlap


def tiles_for(part_dtype):
    """The tiles whose parts fit in shared memory."""
    return [Tile(ROWS, width) for width in WIDTHS[ITEMSIZE[part_dtype]]]


def packets_of(m, n, tile, part_dtype):
    """Packets of an M by N product."""
    return tile.count(m, n) * packets_of_tile(tile, part_dtype)


def rows_allowed(max_m, max_n, part_dtype):
    """The most rows of a product of up to `max_n` columns that there are lines for."""
    rows = MOST_BYTES // (max_n * ITEMSIZE[part_dtype])
    return min(max_m, max(ROWS, rows // ROWS * ROWS))


def room_for(rows, max_n, part_dtype):
    """Packets of the largest product."""
    return max(packets_of(rows, max_n, tile, part_dtype) for tile in tiles_for(part_dtype))


class TwoShotOverlap(Method):
    """The method "two_shot_overlap" of ``GemmAllReduce``."""

    several_nodes = False

    def prepare(self, max_m, max_n, dtype, part_dtype):
        world, name = self.world, "GemmAllReduce two_shot_overlap"
        world.check_reach(name, nvlink=True)
        reason = None
        if world.n_ranks > MOST_RANKS:
            reason = f"{world.n_ranks} ranks: up to {MOST_RANKS} are allowed"
        elif dtype not in HALVES:
            reason = f"{dtype}: {' or '.join(HALVES)} is allowed"
        self.multiprocessors = multiprocessors_of_all(world, name, reason)
        self.part_dtype, self.max_n = part_dtype, max_n
        self.rows = rows_allowed(max_m, max_n, part_dtype)
        self.room = room_for(self.rows, max_n, part_dtype)
        words = line_words(self.room, world.n_ranks, 2)
        self.lines = self.zeros((words,), "uint64", "GemmAllReduce.two_shot_overlap.lines")
        self.calls, self.done = world.xp.zeros(1, "int64"), world.xp.zeros(1, "int32")

    def refuses(self, m, k, n):
        """-> why it does not compute that, alike on all ranks, or None"""
        if m <= self.rows:
            return None
        return f"M is {m}: up to {self.rows} are allowed for max_n={self.max_n}; it is for {MOST_BYTES} bytes"

    def is_for(self, m, k, n):
        """Whether it is the faster choice, for what it computes. Arrays of other sizes must be copied."""
        emulated = self.world.backend.name == "emulator"  # which takes its time
        fits = k % 8 == n % 8 == 0 and m > ROWS and m * n >= LEAST
        return fits and self.world.n_ranks > 1 and not emulated

    def bind(self, a, b, out):
        """-> run(stream)"""
        return aligned(self._bind, a, b, out)

    def _bind(self, a, b, out):
        (m, k), n, sms = a.shape, b.shape[1], self.multiprocessors
        words = out.reshape(-1).view("uint64" if self.part_dtype == out.dtype.name else "uint32")
        choices = [Choice(tile, 1) for tile in tiles_for(self.part_dtype)]
        return bind_gemm(
            lambda tile, kinds: overlap_kernel(tile, kinds, self.part_dtype, self.world.n_ranks),
            Problem(a, b, out, None, None),
            min(choices, key=lambda choice: estimate(m, n, k, choice, sms)),
            *(sms, words, words.size // m, self.lines, self.room, self.calls, self.done),
            co_resident=True,
        )


def _listed(tile, kinds, part_dtype, n_ranks):
    tile, kinds, words = Tile(*tile), Kinds(*kinds), types.uint64[::1]
    out = words if part_dtype == kinds.out_dtype else types.uint32[::1]
    more = out, types.int64, words, types.int64, types.int64[::1], types.int32[::1]
    return overlap_kernel(tile, kinds, part_dtype, n_ranks), signature(kinds, *more), (9, 0)


BF16, F16 = ("bfloat16", "k", "k", "bfloat16"), ("float16", "k", "mn", "float16")
MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x128": _listed((128, 128), BF16, "bfloat16", 4),
    "128x64": _listed((128, 64), F16, "float16", 8),
    "128x64 float32": _listed((128, 64), BF16, "float32", 2),
}
