"""Flash decode over ranks: the attention of one new token of each sequence to a KV cache that is spread over
the ranks. One kernel.

    out = softmax(scale * q k^T) v        over the tokens of all ranks
    with a soft cap: scores become cap * tanh(scores / cap)

Each rank attends to its own tokens, in the way of Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023), and the
ranks' results are combined by packets (``collectives/attention_combine.py``).

Units     unit u: a batch entry and a head of K and V, or `together` neighbouring ones, with the `group`
          heads of q that share each. Its tokens are in tiles. A warp has 16 tokens of a tile, of one head:
          `together` warps have the same tokens. All tiles, unit after unit, are divided evenly among the
          blocks. So a block has neighbouring tiles, of one unit or several, and of two at most only a part
Ring      each warp's own: `stages` slots of 16 tokens of K and V in shared memory, which cp.async fills
Partials  partials[block, 0], of a unit that the block has from the middle on; [block, 1], of one that it has
          from the start, but not to the end
Arrivals  arrivals[u]: blocks that have stored their partial of the unit; the last one resets it

  a warp, for each tile:
          1. wait for the tile's copies; syncwarp; begin the copies of the tile stages - 1 further on
          2. scores = q k^T by the tensor cores, `group` of their 16 rows being used; the softmax goes on with
             the largest score so far; sums += p v by the tensor cores
  a block, at a unit's last tile, or its own:
          3. add up the sums of the warps. If it has all of the unit, send the rows
          4. otherwise store the partial, fence, and add 1 to arrivals[u]. The last one to arrive adds up the
             partials of all, and sends the rows
  a block, at the end:
          5. of sequences without tokens on this rank, divided among the blocks: send empty rows
          6. of the rows that this rank gets, likewise: receive the row, and store it

Rows travel as float32, so each is rounded once. The order of all sums depends on the lengths and the grid
alone: results are the same in every run.

No race: a warp fills a slot after the syncwarp that follows its last read. The fences before and behind the
arrival order the partials; each block has its own. Packets: see ``attention_combine``. No deadlock: a block
waits when it has sent all of its rows, sending waits for nothing, and all blocks are resident.

The machine code must keep (docs/machine_code.md): whole packet, whole warp.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from shmemkit.collectives.attention_combine import (
    check_heads,
    packets_of,
    partial_attention,
)
from shmemkit.device import griddepcontrol_launch_dependents, griddepcontrol_wait, symm_at
from shmemkit.device.cuda.arithmetic import divided_by, exp2, reciprocal
from shmemkit.device.cuda.float_storage import element
from shmemkit.device.cuda.mma import (
    cp_async,
    cp_async_commit,
    cp_async_wait,
    ldmatrix,
    ldmatrix_trans,
    warp_mma,
)
from shmemkit.device.cuda.register_tuples import combine_parts, for_each_part, map_parts
from shmemkit.device.cuda.unroll import chained, tuple_of
from shmemkit.device.cuda.weighted_sums import four_words, weighted_sum
from shmemkit.device.packets.transports import LAMPORT
from shmemkit.gemm import gpu_of
from shmemkit.gemm.epilogue import inline
from shmemkit.gemm.problem import flat
from shmemkit.operations.operation import Given, Operation
from shmemkit.operations.packet_method import PacketMethod
from shmemkit.runtime.world import World
from shmemkit.support.settings import array_text, integer, listed, shown
from shmemkit.typing import AnyArray, AnyStream, ArrayT, AttentionForm, DType

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
ROWS = 16  # of the tensor cores; as many tokens of a warp
PIECE = LAMPORT.unit_bytes
AT_ONCE = 8  # partials that a thread loads at once
ALL = 0xFFFFFFFF
LOG2_E = math.log2(math.e)

u32, u64, f32 = types.uint32, types.uint64, types.float32
LN_2, LEAST = f32(math.log(2)), f32(-math.inf)
load_piece, store_piece = LAMPORT.load, LAMPORT.store


class Tile(NamedTuple):
    """Of a block: its warps, the slots of a warp's ring, the blocks of a multiprocessor, and the heads of K
    and V that a block reads at once, at most; `warps` and `heads` are powers of two. In a cache (.., tokens,
    heads, head_dim) the heads of a token are neighbours: the more are read at once, the longer the pieces of
    memory are."""

    warps: int
    stages: int
    blocks: int
    heads: int = 1

    def together(self, kv_heads):
        return math.gcd(self.heads, self.warps, kv_heads)

    def tokens(self, kv_heads):
        return self.warps * ROWS // self.together(kv_heads)

    def shared_bytes(self, head_dim):
        """Of the rings: dynamic ones."""
        return self.warps * ROWS * self.stages * 4 * head_dim

    def static_bytes(self, group, head_dim):
        """Of the sums of the warps, and what belongs to them: `sums`, `tops` and `told` of the kernel."""
        return self.warps * group * 4 * (head_dim + 2) + 4


TILES, EMULATED_TILE = (Tile(8, 3, 1), Tile(4, 5, 1), Tile(4, 3, 1), Tile(4, 2, 1)), Tile(2, 2, 1, 2)
HOPPER_BYTES, ALIGNMENT = 232448, 128  # of shared memory that a block may have; where the rings begin


def tile_of(group, head_dim, shared_bytes=HOPPER_BYTES):
    """-> the first of TILES that fits into so much shared memory of a block, or the last one. Where many
    heads of q share one of k, the sums of 8 warps take a quarter of it."""
    for tile in TILES:
        static = -(-tile.static_bytes(group, head_dim) // ALIGNMENT) * ALIGNMENT
        if static + tile.shared_bytes(head_dim) <= shared_bytes:
            return tile
    return TILES[-1]


@functools.cache
def decode_kernel(n, kv_heads, group, head_dim, dtype, form, tile):
    """-> the kernel for `kv_heads` heads of K and V, each with `group` heads of q"""
    warps, stages, blocks, _ = tile
    heads, ahead, but_first = kv_heads * group, stages - 1, stages - 2
    together, tile_tokens = tile.together(kv_heads), tile.tokens(kv_heads)
    sets, rows, states = kv_heads // together, together * group, warps // together
    lanes, _, send, receive = partial_attention(n, heads, head_dim, "float32", form)
    own_heads = heads if form == "all_gather" else heads // n
    row_bytes, row_pieces = 2 * head_dim, head_dim // 8
    half, at_once = ROWS * row_bytes, 32 // row_pieces  # bytes of K in a slot; rows of one copy
    ring, steps = stages * 2 * half, head_dim // 16
    log_pieces, log_tile = row_pieces.bit_length() - 1, tile_tokens.bit_length() - 1
    log_together = together.bit_length() - 1
    threads = 32 * warps
    lane_groups = threads // lanes
    n_sums, n_tops = warps * group * head_dim, 2 * warps * group
    splits = max(1, min(states, lane_groups // rows))
    zero_scores, multiply_scores = warp_mma(1, 2, dtype)
    zero_sums, multiply_sums = warp_mma(1, head_dim // 8, dtype)
    pack, pack_floats = element(dtype).pack, element("float32").pack
    float_zero, float_add, _ = weighted_sum("float32")

    # ---- which tiles

    @inline
    def length_of(lengths, b, batch, capacity):
        length = 0
        if b < batch:
            length = max(0, min(lengths[b], capacity))
        return u32(length)

    @inline
    def tiles_of(length):
        return u32(u32(length + u32(tile_tokens - 1)) >> u32(log_tile))

    @inline
    def tiles_of_lane(lengths, b, batch, capacity):
        return tiles_of(length_of(lengths, b, batch, capacity))

    @inline
    def all_tiles(lengths, batch, capacity):
        """Of all units; a warp."""
        b, total = u32(cuda.laneid), u32(0)
        while b < batch:
            total = u32(total + tiles_of_lane(lengths, b, batch, capacity))
            b = u32(b + 32)
        for distance in (16, 8, 4, 2, 1):
            total = u32(total + u32(cuda.shfl_xor_sync(ALL, types.int32(total), distance)))
        return u32(total * sets)

    @inline
    def cursor_at(lengths, batch, capacity, index):
        """-> batch entry, set of heads, tile of the unit, tiles of the unit, tokens: of the tile with that
        index."""
        first, before, beyond = u32(0), u32(0), u32(0)
        while beyond == 0:
            here = tiles_of_lane(lengths, u32(first + cuda.laneid), batch, capacity)
            up_to = here
            for distance in (1, 2, 4, 8, 16):
                other = u32(cuda.shfl_up_sync(ALL, types.int32(up_to), distance))
                if cuda.laneid >= distance:
                    up_to = u32(up_to + other)
            beyond = u32(cuda.ballot_sync(ALL, u32((before + up_to) * sets) > index))
            lane, tiles_before = 32, up_to
            if beyond != 0:
                lane, tiles_before = cuda.ffs(beyond) - 1, u32(up_to - here)
            before = u32(before + u32(cuda.shfl_sync(ALL, types.int32(tiles_before), min(lane, 31))))
            first = u32(first + lane)
        length = length_of(lengths, first, batch, capacity)
        tiles, t = tiles_of(length), u32(index - before * sets)
        h = divided_by(t, tiles)
        return first, u32(h), u32(t - h * tiles), tiles, length

    @inline
    def following(lengths, batch, capacity, cursor):
        b, h, t, tiles, length = cursor
        t = u32(t + 1)
        if t == tiles:
            t, h = u32(0), u32(h + 1)
            if h == sets:
                h, b = u32(0), u32(b + 1)
                length = length_of(lengths, b, batch, capacity)
                while b < batch and length == 0:
                    b = u32(b + 1)
                    length = length_of(lengths, b, batch, capacity)
                tiles = tiles_of(length)
        return b, h, t, tiles, length

    # ---- copies

    @inline
    def first_token():
        """Of the warp, in a tile."""
        return u32((cuda.threadIdx.x >> u32(5 + log_together)) * ROWS)

    @inline
    def head_of_set():
        return u32((cuda.threadIdx.x >> 5) & (together - 1))

    @inline
    def place_of(cursor, table, cache):
        """Of the lane's token of the warp's part of the tile: the number of its first piece in K, for head 0;
        all bits set beyond the last token."""
        b, _, t, _, length = cursor
        pages, page_size, page_step, token_step, _ = cache
        token = u32((t << u32(log_tile)) + first_token() + (cuda.laneid & (ROWS - 1)))
        place = u32(ALL)
        if token < length:
            number, page = u32(divided_by(token, page_size)), b
            token = u32(token - number * page_size)
            if pages > 0:
                page = u32(table[b * pages + number])
            place = u32(page * page_step + token * token_step)
        return place

    @inline
    def fill(shared, slot, k, v, place, h, head_step):
        column, row = u32(cuda.laneid & (row_pieces - 1)), u32(cuda.laneid >> log_pieces)
        to, shift = u32(slot + row * row_bytes + ((column ^ row) << 4)), u32(h * head_step + column)
        for i in range(ROWS // at_once):
            there = u32(cuda.shfl_sync(ALL, types.int32(place), u32(row + i * at_once)))
            n_bytes, at = 0, u32(0)
            if there != ALL:
                n_bytes, at = PIECE, u32(there + shift)
            # row + i * at_once has the bits of both: so has its exclusive or with the column
            here = u32((to ^ u32((i * at_once & 7) << 4)) + i * at_once * row_bytes)
            cp_async(shared, here, k, at, n_bytes, 16)
            cp_async(shared, u32(here + half), v, at, n_bytes, 16)

    # ---- a tile

    @inline
    def q_pair(q, first, row, column):
        return q[(first + row * head_dim + column) >> 1] if row < group else u32(0)

    @inline
    def q_part(k, arguments):
        """The operand of the tensor cores of 16 elements of q's rows."""
        q, first = arguments
        row, column = u32(cuda.laneid >> 2), u32(16 * k + 2 * (cuda.laneid & 3))
        return (
            q_pair(q, first, row, column),
            q_pair(q, first, row + 8, column),
            q_pair(q, first, row, column + 8),
            q_pair(q, first, row + 8, column + 8),
        )

    q_parts = tuple_of(steps, q_part)

    @functools.cache
    def scoring(step):
        """Of every second step up to this one: two chains of products, of half the latency."""
        before = scoring(step - 2) if step > 1 else None

        @inline
        def first(shared, at, q):
            return multiply_scores(zero_scores(), q[step], ldmatrix(shared, at ^ u32(32 * step)))

        @inline
        def score(shared, at, q):
            return multiply_scores(before(shared, at, q), q[step], ldmatrix(shared, at ^ u32(32 * step)))

        return score if step > 1 else first

    @inline
    def add_part(part, other, i, arguments):
        return part[0] + other[0], part[1] + other[1], part[2] + other[2], part[3] + other[3]

    add_scores = combine_parts(4, add_part)

    @functools.cache
    def loading(k):
        before, step = loading(k - 1) if k > 1 else None, k - 1

        @inline
        def first(shared, at):
            return ldmatrix_trans(shared, at)

        @inline
        def load(shared, at):
            return before(shared, at) + ldmatrix_trans(shared, at ^ u32(32 * step))

        return load if k > 1 else first

    even_scores, odd_scores, values_of = scoring(steps - 2), scoring(steps - 1), loading(steps)

    @inline
    def capped(score, cap):
        return f32(cap - f32(cap * f32(2)) * reciprocal(f32(exp2(score) + f32(1))))

    @inline
    def cap_part(part, i, arguments):
        (cap,) = arguments
        return capped(part[0], cap), capped(part[1], cap), capped(part[2], cap), capped(part[3], cap)

    @inline
    def there(score, token, left):
        return score if token < left else LEAST

    @inline
    def scale_part(part, i, arguments):
        (scale,) = arguments
        return (
            f32(part[0] * scale),
            f32(part[1] * scale),
            f32(part[2] * scale),
            f32(part[3] * scale),
        )

    @inline
    def mask_part(part, i, arguments):
        (left,) = arguments
        token = 8 * i + 2 * (cuda.laneid & 3)
        return (
            there(part[0], token, left),
            there(part[1], token + 1, left),
            there(part[2], token, left),
            there(part[3], token + 1, left),
        )

    scale_scores, cap_scores, mask_scores = (map_parts(4, f) for f in (scale_part, cap_part, mask_part))

    @inline
    def shrink_part(part, i, arguments):
        a, b = arguments
        return (
            *(part[0] * a, part[1] * a, part[2] * b, part[3] * b),
            *(part[4] * a, part[5] * a, part[6] * b, part[7] * b),
        )

    shrink = map_parts(8, shrink_part)

    @inline
    def largest(x):
        x = max(x, cuda.shfl_xor_sync(ALL, x, 1))
        return f32(max(x, cuda.shfl_xor_sync(ALL, x, 2)))

    @inline
    def total(x):
        x = f32(x + cuda.shfl_xor_sync(ALL, x, 1))
        return f32(x + cuda.shfl_xor_sync(ALL, x, 2))

    @inline
    def attend(shared, at_k, at_v, q, left, scale, cap, state):
        """Step 2; the lane has two rows: lane // 4, and that + 8."""
        sums, top0, top1, total0, total1 = state
        s = scale_scores(add_scores(even_scores(shared, at_k, q), odd_scores(shared, at_k, q), ()), (scale,))
        if cap != 0:
            s = cap_scores(s, (cap,))
        if left < ROWS:
            s = mask_scores(s, (left,))
        new0 = f32(max(top0, largest(max(max(s[0], s[1]), max(s[4], s[5])))))
        new1 = f32(max(top1, largest(max(max(s[2], s[3]), max(s[6], s[7])))))
        if cuda.any_sync(ALL, new0 > top0 or new1 > top1):
            a, b = exp2(f32(top0 - new0)), exp2(f32(top1 - new1))
            sums, total0, total1 = shrink(sums, (a, b)), f32(total0 * a), f32(total1 * b)
        a, b, c, d = (
            exp2(f32(s[0] - new0)),
            exp2(f32(s[1] - new0)),
            exp2(f32(s[4] - new0)),
            exp2(f32(s[5] - new0)),
        )
        w, x, y, z = (
            exp2(f32(s[2] - new1)),
            exp2(f32(s[3] - new1)),
            exp2(f32(s[6] - new1)),
            exp2(f32(s[7] - new1)),
        )
        total0, total1 = f32(total0 + f32(a + b) + f32(c + d)), f32(total1 + f32(w + x) + f32(y + z))
        p = pack(a, b), pack(w, x), pack(c, d), pack(y, z)
        return multiply_sums(sums, p, values_of(shared, at_v)), new0, new1, total0, total1

    # ---- a unit

    @inline
    def put_two(sums, row, column, x, y):
        if row < group:
            at = (cuda.threadIdx.x >> 5) * group * head_dim + row * head_dim + column
            sums[at] = x
            sums[at + 1] = y

    @inline
    def put_part(part, i, arguments):
        (sums,) = arguments
        row, column = cuda.laneid >> 2, 16 * i + 2 * (cuda.laneid & 3)
        put_two(sums, row, column, part[0], part[1])
        put_two(sums, row + 8, column, part[2], part[3])
        put_two(sums, row, column + 8, part[4], part[5])
        put_two(sums, row + 8, column + 8, part[6], part[7])

    put_parts = for_each_part(8, put_part)

    @inline
    def put(state, sums, tops):
        """A warp's state to shared memory."""
        parts, top0, top1, total0, total1 = state
        total0, total1 = total(total0), total(total1)
        put_parts(parts, (sums,))
        row = cuda.laneid >> 2
        at = 2 * ((cuda.threadIdx.x >> 5) * group + row)
        if cuda.laneid & 3 == 0:
            if row < group:
                tops[at] = top0
                tops[at + 1] = total0
            if row + 8 < group:
                tops[at + 16] = top1
                tops[at + 17] = total1

    @inline
    def added_up(sums, tops, count, row, j):
        """-> the lane's piece of the row, the row's lse to base 2: of `count` states in shared memory."""
        top = tops[2 * row]
        for i in range(1, count):
            top = f32(max(top, tops[2 * (i * rows + row)]))
        a = b = c = d = weights = f32(0)
        for i in range(count):
            at = (i * rows + row) * head_dim + 4 * j
            weight = exp2(f32(tops[2 * (i * rows + row)] - top))
            weights = f32(weights + weight * tops[2 * (i * rows + row) + 1])
            a, b = f32(a + weight * sums[at]), f32(b + weight * sums[at + 1])
            c, d = f32(c + weight * sums[at + 2]), f32(d + weight * sums[at + 3])
        scale = f32(f32(1) / weights)
        words = pack_floats(f32(a * scale), f32(b * scale)), pack_floats(f32(c * scale), f32(d * scale))
        return words, f32(top + f32(math.log(weights)) * f32(LOG2_E))

    @inline
    def load_partial(k, arguments):
        """-> a piece and its lse: of the k-th next block of the split; nothing beyond the last block."""
        block, first, last, row, j, partials, lses = arguments
        block = u32(block + k * splits)
        words, lse = (u64(0), u64(0)), LEAST
        if block <= last:
            slot = u32((2 * block + (1 if block == first else 0)) * rows + row)
            words, lse = load_piece(partials, u32(slot * lanes + j)), lses[slot]
        return words, lse

    @inline
    def add_partial(k, partial, total):
        (words, lse), (a, b, c, d, weights, top) = partial, total
        new = f32(max(top, lse))
        old, weight = exp2(f32(top - new)), exp2(f32(lse - new))
        x = float_add(float_zero(), four_words(words), weight)
        a, b = f32(a * old + x[0]), f32(b * old + x[1])
        c, d = f32(c * old + x[2]), f32(d * old + x[3])
        return a, b, c, d, f32(weights * old + weight), new

    load_some, add_some = tuple_of(AT_ONCE, load_partial), chained(AT_ONCE, add_partial)

    @inline
    def add_partials(first, last, partials, lses, sums, tops):
        """Step 4: add up those of the blocks first .. last, some blocks in each `split`, to shared memory.
        Some are loaded at once: one by one, their latencies would take most of a short call."""
        j, part = cuda.threadIdx.x & (lanes - 1), cuda.threadIdx.x // lanes
        while part < splits * rows:
            split = part // rows
            row = part - split * rows
            total, block = (f32(0), f32(0), f32(0), f32(0), f32(0), LEAST), u32(first + split)
            while block <= last:
                total = add_some(load_some((block, first, last, row, j, partials, lses)), total)
                block = u32(block + AT_ONCE * splits)
            at = (split * rows + row) * head_dim + 4 * j
            sums[at], sums[at + 1], sums[at + 2], sums[at + 3] = total[0], total[1], total[2], total[3]
            if j == 0:
                tops[2 * (split * rows + row)] = total[5]
                tops[2 * (split * rows + row) + 1] = total[4]
            part += lane_groups

    @inline
    def send_unit(sums, tops, count, first_row, packets):
        j, row = u32(cuda.threadIdx.x & (lanes - 1)), u32(cuda.threadIdx.x // lanes)
        while row < rows:
            words, lse = added_up(sums, tops, count, row, j)
            send(packets, u32(first_row + row), j, (words,), f32(lse * LN_2))
            row = u32(row + lane_groups)

    @inline
    def store_partial(sums, tops, slot, partials, lses):
        j, row = u32(cuda.threadIdx.x & (lanes - 1)), u32(cuda.threadIdx.x // lanes)
        while row < rows:
            words, lse = added_up(sums, tops, states, row, j)
            store_piece(partials, u32((slot * rows + row) * lanes + j), words)
            if j == 0:
                lses[slot * rows + row] = lse
            row = u32(row + lane_groups)

    @cuda.jit(launch_bounds=(threads, blocks))
    def flash_decode(
        q, k, v, table, lengths, out, batch, cache, capacity, scale, cap, partials, lses, arrivals, packets
    ):
        """q          uint32, pairs of elements: (batch, heads, head_dim)
        k, v       complex128, pieces of 16 bytes
        table      int32 (batch, pages): the pages of each sequence; empty without pages
        lengths    int32 (batch,): tokens of each on this rank, `capacity` at most
        out        uint64, four elements each: (batch, the heads that this rank gets, head_dim)
        cache      pages of a sequence, or 0, if a sequence has one page, with its number; tokens of a page;
                   distances of pages, of tokens and of heads, in pieces: uint32 each
        scale      of scores, times log2(e); with a cap times 2 / cap
        cap        times log2(e); 0 without
        partials   complex128 (2 * grid * rows of a unit * head_dim / 4,); lses: float32 (2 * grid * these)
        arrivals   uint32, of each unit, zeros at first
        grid       one-dimensional; dynamic shared memory: Tile.shared_bytes
        """
        shared = cuda.shared.array(0, types.uint16, alignment=ALIGNMENT)
        sums, tops = cuda.shared.array(n_sums, f32), cuda.shared.array(n_tops, f32)
        told = cuda.shared.array(1, u32)
        griddepcontrol_wait(q, k, v, lengths, symm_at(packets[0][0], 0), arrivals)
        griddepcontrol_launch_dependents()
        batch, capacity, head_step = u32(batch), types.int32(capacity), cache[4]
        warp, lane, block = u32(cuda.threadIdx.x >> 5), u32(cuda.laneid), u32(cuda.blockIdx.x)
        my_ring, begin, my_head = u32(warp * ring), first_token(), head_of_set()
        # ldmatrix: the lane's row of the slot, and which half of 16 elements of K, or of 32 bytes of V
        of_k = u32((((lane >> 4) << 3) + (lane & 7)) * row_bytes + ((((lane >> 3) & 1) ^ (lane & 7)) << 4))
        of_v = u32((lane & 15) * row_bytes + (((lane >> 4) ^ (lane & 7)) << 4) + half)
        n_tiles = all_tiles(lengths, batch, capacity)
        per_block = u32(max(u32(1), divided_by(u32(n_tiles + cuda.gridDim.x - 1), u32(cuda.gridDim.x))))
        index = u32(block * per_block)
        end = u32(min(n_tiles, u32(index + per_block)))
        asked = index
        if index < end:
            here = cursor_at(lengths, batch, capacity, index)
            coming, place = here, place_of(here, table, cache)
            filled = my_ring
            for _ in range(ahead):
                if asked < end:
                    fill(shared, filled, k, v, place, u32(coming[1] * together + my_head), head_step)
                    coming = following(lengths, batch, capacity, coming)
                    asked = u32(asked + 1)
                    if asked < end:
                        place = place_of(coming, table, cache)
                cp_async_commit()
                filled = u32(filled + 2 * half)
            slot = my_ring
            while index < end:
                b, h, t, tiles, length = here
                first_row = u32(b * heads + h * rows)
                first_tile = u32(index - t)
                last = u32(min(end, u32(first_tile + tiles)))
                whole = t == 0 and last == first_tile + tiles
                parts = q_parts((q, u32((first_row + my_head * group) * head_dim)))
                state = zero_sums(), LEAST, LEAST, f32(0), f32(0)
                while index < last:
                    cp_async_wait(but_first)
                    cuda.syncwarp()
                    if asked < end:
                        fill(shared, filled, k, v, place, u32(coming[1] * together + my_head), head_step)
                        coming = following(lengths, batch, capacity, coming)
                        asked = u32(asked + 1)
                        if asked < end:
                            place = place_of(coming, table, cache)
                    cp_async_commit()
                    filled = u32(filled + 2 * half)
                    if filled == my_ring + ring:
                        filled = my_ring
                    left = types.int32(length) - types.int32((t << u32(log_tile)) + begin)
                    if left > 0:
                        state = attend(
                            shared, u32(slot + of_k), u32(slot + of_v), parts, left, scale, cap, state
                        )
                    slot = u32(slot + 2 * half)
                    if slot == my_ring + ring:
                        slot = my_ring
                    t, index = u32(t + 1), u32(index + 1)
                here = following(lengths, batch, capacity, (b, h, u32(t - 1), tiles, length))
                put(state, sums, tops)
                cuda.syncthreads()
                if whole:
                    send_unit(sums, tops, states, first_row, packets)
                else:
                    slot_of_partial = u32(2 * block + (1 if first_tile >= block * per_block else 0))
                    store_partial(sums, tops, slot_of_partial, partials, lses)
                    cuda.syncthreads()
                    first_block = divided_by(first_tile, per_block)
                    last_block = divided_by(u32(first_tile + tiles - 1), per_block)
                    if cuda.threadIdx.x == 0:
                        unit = b * sets + h
                        cuda.threadfence()
                        arrived = cuda.atomic.add(arrivals, unit, 1)
                        cuda.threadfence()
                        told[0] = u32(1 if arrived == last_block - first_block else 0)
                        if arrived == last_block - first_block:
                            arrivals[unit] = 0
                    cuda.syncthreads()
                    if told[0] != 0:
                        add_partials(first_block, last_block, partials, lses, sums, tops)
                        cuda.syncthreads()
                        send_unit(sums, tops, splits, first_row, packets)
                cuda.syncthreads()  # sums and tops may be written again
            cp_async_wait(0)
        j, row = u32(lane & (lanes - 1)), u32(cuda.threadIdx.x // lanes)
        b = block
        while b < batch:
            if length_of(lengths, b, batch, capacity) == 0:
                i = row
                while i < heads:
                    send(packets, u32(b * heads + i), j, ((u64(0), u64(0)),), LEAST)
                    i = u32(i + lane_groups)
            b = u32(b + cuda.gridDim.x)
        r = u32(row * cuda.gridDim.x + block)
        while r < batch * own_heads:
            words = receive(packets, r, j)[0]
            x = float_add(float_zero(), four_words(words), f32(1))
            low, high = pack(x[0], x[1]), pack(x[2], x[3])
            out[r * lanes + j] = u64(high) << u64(32) | u64(low)
            r = u32(r + lane_groups * cuda.gridDim.x)

    return flash_decode


class _Decode(PacketMethod):
    at_once, t = True, LAMPORT

    def prepare(self, max_batch, kv_heads, group, head_dim, dtype, form):
        self.check_ranks()
        world, heads = self.world, kv_heads * group
        self.packets = packets_of(self, max_batch, heads, head_dim, "float32", form)
        fits = tile_of(group, head_dim, gpu_of(world).shared_bytes)
        self.tile = EMULATED_TILE if world.backend.name == "emulator" else fits
        self.threads, self.shared = 32 * self.tile.warps, self.tile.shared_bytes(head_dim)
        self.kv_heads, self.together = kv_heads, self.tile.together(kv_heads)
        self.units, rows = max_batch * kv_heads // self.together, self.together * group
        self.kernel = decode_kernel(world.n_ranks, kv_heads, group, head_dim, dtype, form, self.tile)
        self.arrivals = world.xp.zeros(self.units, "uint32")
        self.partials, self.lses = world.xp.zeros(0, "complex128"), world.xp.zeros(0, "float32")
        nothing = world.xp.empty(0, dtype)
        empty = world.xp.empty(0, "int32")
        cache = (np.uint32(0),) * 5
        launch = self._launch(1, nothing, nothing, nothing, empty, empty, nothing, 0, cache, 0, 1.0, 0.0)
        self.fit = self.within(min(launch.resident_blocks, self.tile.blocks * world.backend.multiprocessors))
        self.partials = world.xp.zeros(2 * self.fit * rows * head_dim // 4, "complex128")
        self.lses = world.xp.zeros(2 * self.fit * rows, "float32")

    def _launch(self, grid, q, k, v, table, lengths, out, batch, cache, capacity, scale, cap):
        return self.launch(
            *(self.kernel, grid, q.view("uint32"), k.view("uint8").view("complex128")),
            *(v.view("uint8").view("complex128"), table, lengths, out.view("uint8").view("uint64"), batch),
            *(cache, capacity, np.float32(scale), np.float32(cap), self.partials, self.lses),
            *(self.arrivals, self.packets),
            pdl=True,
            shared=self.shared,
        )

    def bind(self, *args):
        batch, capacity = args[6], args[8]
        sets = self.kv_heads // self.together
        tiles = batch * sets * max(1, -(-capacity // self.tile.tokens(self.kv_heads)))
        return self._launch(min(self.fit, tiles), *args)


class FlashDecode(Operation):
    """Attention of one new token of each sequence to a KV cache that is spread over the ranks. Collective.

    ``op = sk.FlashDecode(world, max_batch, q_heads, kv_heads)``, then ``out = op(q, k, v, lengths)``, in one
    kernel. Each rank has some of the tokens of each sequence, any of them, or none:

        out = softmax(scale * q k^T) v        over the tokens of all ranks; 0 where there are none

    ``help(sk.collectives)`` has the rules for calls, streams, order, graphs, memory and errors.

    world      the World; its ranks, 16 at most, reach each other over NVLink, as in one node
    max_batch  the most sequences of a call
    q_heads    heads of q
    kv_heads   heads of k and v; q_heads is 1 to 16 times as many. Head i of q is of head i // (q_heads /
               kv_heads) of k and v
    head_dim   64 or 128
    dtype      bfloat16 or float16
    form       "all_gather": every rank gets all heads of out. "all_to_all": rank r gets the r-th segment of
               heads, whose number the ranks divide
    sms        the most multiprocessors that it uses, 1 or more; None: as many as are tuned

    Scores and sums are float32; what the tensor cores multiply by v is rounded to dtype, and out is rounded
    once. All ranks that get a row get the same bits.
    """

    ARRAYS = {
        "q": Given("batch q_heads head_dim"),
        "k": Given("pages page_size kv_heads head_dim", contiguous=False),
        "v": Given("pages page_size kv_heads head_dim", contiguous=False),
        "lengths": Given("batch", "int32", align=0),
        "block_table": Given("batch pages_of_each", "int32", align=0, optional=True),
        "out": Given("batch own_heads head_dim", new=True),
    }
    LIMITS = {"batch": ("max_batch", "sequences")}
    max_batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    form: AttentionForm

    def __init__(
        self,
        world: World,
        max_batch: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int = 128,
        dtype: DType = "bfloat16",
        form: AttentionForm = "all_gather",
        *,
        sms: int | None = None,
    ):
        def check():
            self.dtype = kind = check_heads(WHO, world, max_batch, q_heads, head_dim, dtype, form)
            if kind.name not in DTYPES or head_dim not in HEAD_DIMS:
                raise ValueError(
                    f"{WHO}: dtype is {kind.name}, head_dim {head_dim}; they must be {listed(DTYPES)}, and "
                    f"{listed(map(str, HEAD_DIMS))}"
                )
            integer(WHO, "kv_heads", kv_heads, 1, q_heads)
            if q_heads % kv_heads or q_heads > ROWS * kv_heads:
                raise ValueError(
                    f"{WHO}: there are {q_heads} heads of q and {kv_heads} of k and v; q must have 1 to "
                    f"{ROWS} times as many"
                )
            given = {"max_batch": max_batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
            vars(self).update({name: int(value) for name, value in given.items()}, form=form)
            return {**given, "dtype": kind.name, "form": form}

        super().__init__(world, check, sms)
        self.own_heads = self.q_heads if form == "all_gather" else self.q_heads // world.n_ranks
        of = self.kv_heads, self.q_heads // self.kv_heads, self.head_dim, self.dtype.name, form
        self._method: Any = self._part(_Decode, world, self.max_batch, *of, name=f"flash_decode {form}")

    def __call__(
        self,
        q: ArrayT,
        k: AnyArray,
        v: AnyArray,
        lengths: AnyArray,
        block_table: AnyArray | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        out: ArrayT | None = None,
        *,
        stream: AnyStream | None = None,
    ) -> ArrayT:
        """Enqueue one. -> out

        q            (batch, q_heads, head_dim), the same on all ranks; batch is 0 to max_batch
        k, v         the rank's cache. (batch, tokens, kv_heads, head_dim); with a block_table (pages,
                     page_size, kv_heads, head_dim). Both have the same strides, any multiples of 16 bytes,
                     the last one that of contiguous elements. So heads may come before tokens:
                     ``k.transpose(0, 2, 1, 3)``
        lengths      (batch,), int32, on the GPU: how many tokens of each sequence are in the rank's cache.
                     Less than 0 is as 0, more than there is room for as all of it
        block_table  (batch, most pages of a sequence), int32, on the GPU: the pages of each sequence in their
                     order, each 0 to pages - 1, which nobody checks on a GPU. Entries beyond its length are
                     not read
        scale        default: 1 / sqrt(head_dim)
        soft_cap     scores become ``soft_cap * tanh(scores / soft_cap)``
        out          (batch, q_heads, head_dim), or (batch, q_heads / n_ranks, head_dim) by "all_to_all".
                     Default: a new one of q's kind
        stream       default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        batch, scale and soft_cap are the same on all ranks. All arrays but k and v are C-contiguous; all but
        lengths and block_table begin at multiples of 16 bytes. When the stream has run it, later work on it
        sees the result.
        """
        scale = 1 / math.sqrt(self.head_dim) if scale is None else self._number("scale", scale, 0)
        soft_cap = 0.0 if soft_cap is None else self._number("soft_cap", soft_cap, 1e-30)
        arrays = {"q": q, "k": k, "v": v, "lengths": lengths, "block_table": block_table, "out": out}
        return self._enqueue(arrays, stream, scale=scale, soft_cap=soft_cap)["out"]

    def _bind(self, q, k, v, lengths, block_table, out, scale, soft_cap):
        batch, cap = q.shape[0], soft_cap
        pages, size = self._check_cache(k, v, batch, block_table)
        table = lengths[:0] if block_table is None else block_table.reshape(-1)
        steps = (step // PIECE for step in (k.strides[0], k.strides[1], k.strides[2]))
        cache = tuple(np.uint32(number) for number in (pages, max(1, size), *steps))
        scale = scale * (2 / cap if cap else 1) * LOG2_E
        q, out = q.reshape(-1), out.reshape(-1)
        capacity = min(max(1, pages) * size, MOST_TOKENS)
        k, v = flat(k, k.dtype), flat(v, v.dtype)
        return self._method.bind(q, k, v, table, lengths, out, batch, cache, capacity, scale, cap * LOG2_E)

    def _check_cache(self, k, v, batch, block_table):
        """-> pages of a sequence, or 0 without a table; tokens of a page"""
        if block_table is None and k.shape[0] != batch:
            raise ValueError(
                f"{WHO}: k is {array_text(k)}; without a block_table it must be {self.dtype.name} ({batch}, "
                f"tokens, {self.kv_heads}, {self.head_dim})"
            )
        item, steps = self.dtype.itemsize, k.strides
        if k.size and (any(s < 0 or s % PIECE for s in steps[:3]) or steps[3] != item):
            raise ValueError(
                f"{WHO}: k has strides {steps}; all but the last must be multiples of {PIECE}, the last "
                f"{item}. Give a copy"
            )
        if steps != v.strides:
            raise ValueError(f"{WHO}: k has strides {steps}, v {v.strides}; they must be the same")
        if sum((n - 1) * step for n, step in zip(k.shape, k.strides, strict=True)) >= MOST_BYTES:
            raise ValueError(f"{WHO}: k and v are of {k.nbytes} bytes; they must have less than {MOST_BYTES}")
        if block_table is None:
            return 0, k.shape[1]
        return max(1, block_table.shape[1]), k.shape[1] if block_table.shape[1] else 0

    @staticmethod
    def _number(name, value, least):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
            raise TypeError(f"{WHO}: {name} is {shown(value)}; it must be a number")
        if not least <= value < math.inf:
            raise ValueError(
                f"{WHO}: {name} is {value}; it must be {'0 or more' if not least else 'positive'}"
            )
        return float(value)


WHO = FlashDecode.__name__
MOST_TOKENS = (1 << 31) - 1  # of a sequence: lengths are int32
MOST_BYTES = (1 << 32) * PIECE - PIECE  # of k: pieces are counted in 32 bits


GPU_KERNELS = {
    f"[{', '.join(map(str, of))}]": decode_kernel(*of, tile_of(*of[2:4]))
    for of in (
        (2, 12, 1, 128, "float16", "all_gather"),
        (2, 8, 8, 128, "bfloat16", "all_gather"),
        (8, 8, 4, 64, "bfloat16", "all_to_all"),
        (8, 1, 16, 128, "float16", "all_gather"),
    )
}
