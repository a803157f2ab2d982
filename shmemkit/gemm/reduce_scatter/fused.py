"""GEMM and reduce-scatter, or all-reduce, in one kernel: the TMA sends each finished tile while the next
tiles are computed. A rank adds the parts that it receives to its own tiles before they are rounded. For
Hopper, and GPUs that reach each other's memory.

``shmemkit.gemm.sm90`` computes the product in another order, by a schedule in memory (``tile_order.py``).
Each round of tiles has some of the next rank's rows, as many of the rank after it, .., and at last some of
the rank's own, one round late. Where that is not faster, all tiles of the next rank come first, .., and all
own tiles last. Tiles do not cross from one rank's rows to another's.

Parts     a tile of another rank's rows, rounded to `part_dtype`, is this rank's part of it: its accumulators
          in the order of the threads. So it travels in large pieces without strides, and the same threads
          load it
Staged    staged[buffer, k, i], on every rank: the part of rank k for the rank's i-th tile. Written by rank k
          only. (There is no slot for its own part: numbers k above its own are one less.)
Signals   staged_full[k, i], on every rank: the last epoch whose part of rank k for tile i is here; set by
          rank k only
Epochs    epochs[0], local: the epoch selects the buffer. Device-resident, so graph-safe. done[0]: blocks of
          this launch that have ended
Posts     two mbarriers of a block: posts[0], its warps have sent their pieces of a part; posts[1], the part
          is announced
Ring      the slots and barriers of the GEMM, which the parts use, too

  warps that multiply, for each tile of others' rows, when its products are done:
          1. for some columns at a time: wait until the store before the last has read its piece of shared
             memory; round and store to the piece; fence for the asynchronous proxy; syncwarp; one thread
             starts the store to staged[buffer, me, i] there
     and during the products of the next tile, at their end at the latest, or at the kernel's:
          2. that thread waits until these stores are written, and for posts[1]; it arrives at posts[0]
  watcher, one more thread, for each of these tiles, in turn:
          3. wait for posts[0]; set staged_full[me, i] there to the epoch    release, sys; arrive at posts[1]
     (steps 2 and 3 include the rank's own tiles, which it announces to no rank)
  loader, after the slabs of each own tile, for each other rank k:
          4. wait until staged_full[k, i] >= epoch             acquire, sys; fence for the asynchronous proxy
          5. start the loads of the part into slots of the ring, as for slabs
  warps that multiply, for each own tile, when its products are done:
          6. add the parts, in the order of the ranks, as their slots are full; arrive at empty of each slot
          7. store the tile to out, as the GEMM does

The own part comes first, then the others' in the order of the ranks: the bits are the same in every run.

No race.

- A part is written before it is announced (3). A thread that has waited for its bulk stores sees them written
  (PTX: the writes have been made visible to the executing thread). It arrives at posts[0], the watcher
  acquires that, and its release at system scope is cumulative. The receiver acquires the signal, and reads
  the part by the asynchronous proxy, after a fence for that proxy.
- Staged has two buffers: the double-buffer lemma (docs/protocols.md). Each rank has rows, and so receives a
  part of each other rank, in every epoch.
- No thread is two phases ahead of the others at posts: the warps wait for posts[1], the watcher for posts[0].

No deadlock: sending waits for no rank, and all blocks are co-resident. Own tile i waits for the others' parts
for it. In the order of their blocks, these come after own tiles of lower numbers at most: the schedule has
tile i of each other rank's rows before own tile i, and keeps the order of one rank's tiles. So the lowest
unfinished own tile of all ranks waits for none.

Copied (`copied`): copy engines send the parts, in chunks of consecutive tiles. The warps that multiply store
the parts to local memory, which is faster. A graph's copies have fixed addresses, and its operations on
signals fixed values. So staged has one buffer, and signals are 0 or 1, and are reset.

Outbox    outbox[t, i], local: the part for the i-th tile of rank me + 1 + t modulo the ranks
Signals   written[t, c], local: how many tiles of chunk c of outbox[t] are there. staged_full[k, c]: likewise
          for chunk c of rank k's parts, 0 or 1. staged_empty[k], on every rank: 0 or 1, at first 1: this
          rank's parts may be written to staged on rank k; set by rank k only

  warps:  1. to outbox[t, i]
  watcher, for each of these tiles:
          3. wait for posts[0]; add one to written[t, c]         release, sys; arrive at posts[1]
  side stream, for each chunk, in the order of the tiles:
         10. at first: wait for staged_empty[k] of all k; reset them
         11. wait until written[t, c] has all its tiles; reset it; copy the chunk to staged[me] there; set
             staged_full[me, c] there                            release, sys: publishes the copy
  loader: 4. wait for staged_full[k, c]
  last block, when all have read their parts:
         12. reset all staged_full; set staged_empty[me] on the others   release, sys

The next call on the stream comes after the side stream, so it writes outbox after the copies. Rank k copies
to staged here, and sets staged_full, only after it has waited for staged_empty[me]. This rank sets that after
it has read staged and reset staged_full. Rank k has reset staged_empty[me] by then; this rank sets it again
when it has all parts of that epoch. Copies wait for the kernel of their rank, which still sends without a
wait for any rank, and for the ends of earlier calls. Copies wait without a limit. So the kernel sets written
and staged_empty even after a wait has expired (``device.shmem.bounded_waits``); else the streams would never
end, and nobody would see the error.

All-reduce (`everywhere`): each rank's rows of the result go to all ranks (the tensor maps of step 7 are those
of `out` on each), and then

Gathered  gathered[k, i], on every rank: the last epoch in which tile i of rank k's rows is here

          8. the watcher, for own tiles in step 3: sets gathered[me, i] on all others
          9. it then waits for gathered[k, i] of all k, and of those i that are its block's share

so the kernel ends when all rows are here. Other ranks write out in an epoch only after they have this rank's
parts of that epoch: all earlier work on its stream has ended then, and so have the readers of the previous
result.

The machine code must keep (docs/machine_code.md): one elected thread, whole warp.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, int64, types

from shmemkit.device.cuda.accumulators import ITEMSIZE, packed_add, packed_store
from shmemkit.device.cuda.mbarrier import (
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from shmemkit.device.cuda.register_tuples import for_each_part, map_parts
from shmemkit.device.cuda.subarrays import span
from shmemkit.device.cuda.tma import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    bulk_wait_group,
    bulk_wait_group_read,
    fence_proxy_async,
    fence_proxy_async_global,
)
from shmemkit.device.cuda.wgmma import SLAB
from shmemkit.device.shmem.ordered_access import peer_at, red_release, st_release
from shmemkit.device.shmem.signals import notify_at, wait
from shmemkit.device.swizzle import grouped, quotient

from ..epilogue import inline
from ..last_block import is_last_block
from ..sm90 import WATCHING, Exchange, Kinds, Layout, Tile, gemm_body, hand_back, table_entry

SENT, TOLD = 0, 1  # of posts


class Parts:
    """How a tile's part lies in memory: in units, each of which a slot holds, of `chunks` times 16 columns of
    each warp's rows. All sizes in bytes. The same on all ranks, however their operands are stored: a slot has
    room for a K-major slab of B."""

    def __init__(self, tile, part_dtype):
        self.chunk = 32 * 8 * ITEMSIZE[part_dtype]
        self.per_tile = tile.n // 16
        self.chunks = largest_divisor(self.per_tile, tile.n * 2 * SLAB // (tile.warps * self.chunk))
        self.units = self.per_tile // self.chunks
        self.unit = tile.warps * self.chunks * self.chunk
        self.tile = self.units * self.unit


def largest_divisor(number, most):
    return max(d for d in range(1, number + 1) if number % d == 0 and d <= most)


class Given(NamedTuple):
    """`extra` of the functions for the GEMM: `epoch`, and the kernel's arguments, or as above."""

    staged: Any
    staged_full: Any
    gathered: Any
    offsets: Any
    posts: Any
    epoch: Any
    me: Any
    rows: Any
    tile_rows: Any
    part_tiles: Any
    room: Any
    signals: Any
    outbox: Any
    written: Any
    chunk: Any
    schedule: Any


@inline
def place_of(t, n_ranks, extra):
    """The t-th tile of the schedule -> whose turn it is, from 0 (the next rank) to n_ranks - 1 (this one);
    that rank; the tile's number in its part"""
    tile = int64(extra.schedule[t])
    owner = quotient(tile, extra.part_tiles)
    turn = owner - extra.me - 1
    if turn < 0:
        turn += n_ranks
    return turn, owner, tile - owner * extra.part_tiles


@inline
def staged_at(buffer, sender, owner, n_ranks, room):
    """The first byte of the sender's slot."""
    return (buffer * (n_ranks - 1) + (sender - 1 if sender > owner else sender)) * room


@functools.cache
def ordering(group, n_ranks):
    @inline
    def order(t, n_m, n_n, extra):
        _, owner, i = place_of(t, n_ranks, extra)
        m, n = grouped(i, extra.tile_rows, n_n, group)
        return owner * extra.tile_rows + m, n

    return order


@inline
def rows_of(row, tile_m, extra):
    owner = quotient(row, extra.tile_rows)
    first = (row - owner * extra.tile_rows) * tile_m
    return owner * extra.rows + first, first


@functools.cache
def sending(tile, kinds, part_dtype):
    """-> ``send(acc, (pieces, there, lane))``: a warp's rows of a part, to `there`, where those in the first
    unit are; in pieces, which have `room` in shared memory."""
    parts, room = Parts(tile, part_dtype), Layout(tile, kinds).piece
    per_piece = largest_divisor(parts.chunks, room // parts.chunk)
    piece_bytes, per_unit, unit_bytes = per_piece * parts.chunk, parts.chunks // per_piece, parts.unit
    store = packed_store(part_dtype)

    @inline
    def store_chunk(part, i, arguments):
        (piece,) = arguments
        store(piece, i, part)

    store_chunks = for_each_part(8, store_chunk)

    @inline
    def send_piece(part, i, arguments):
        pieces, there, lane = arguments
        piece = span(pieces, (i & 1) * room, piece_bytes)
        unit = i // per_unit
        at = unit * unit_bytes + (i - unit * per_unit) * piece_bytes
        if i > 1:  # all stores of the tile before have ended: see `settle`
            bulk_wait_group_read(1)
            cuda.syncwarp()
        store_chunks(part, (piece,))
        fence_proxy_async()
        cuda.syncwarp()
        if lane == 0:
            bulk_store(span(there, at, piece_bytes), piece)
            bulk_commit_group()

    return for_each_part(8 * per_piece, send_piece)


@functools.cache
def adding(tile, kinds, part_dtype, count):
    """-> ``add(acc, memory, full, empty, slot, parity, warp, lane)`` -> (acc, slot, parity): with the `count`
    parts that are, or will be, in the slots from `slot` on, which are handed back."""
    parts, layout = Parts(tile, part_dtype), Layout(tile, kinds)
    chunks, units, warp_bytes = parts.chunks, parts.units, parts.chunks * parts.chunk
    stages, at_b, b_bytes = layout.stages, layout.at_b, layout.b
    add_chunk = packed_add(part_dtype)

    @inline
    def add_columns(part, i, arguments):
        (piece,) = arguments
        cuda.syncwarp()  # or ptxas loads so far ahead that it runs out of registers
        return add_chunk(piece, i, part)

    add_unit = map_parts(8, add_columns)

    @inline
    def add_slot(part, i, arguments):
        memory, full, empty, slot, parity, warp, lane = arguments
        slot += i
        if slot >= stages:
            slot -= stages
            parity ^= 1
        mbarrier_wait(full, slot, parity)
        part = add_unit(part, (span(memory, at_b + slot * b_bytes + warp * warp_bytes, warp_bytes),))
        cuda.syncwarp()  # all have read it
        hand_back(empty, slot, lane)
        return part

    add_part = map_parts(8 * chunks, add_slot)
    if count == 0:

        @inline
        def add(acc, memory, full, empty, slot, parity, warp, lane):
            return acc, slot, parity

        return add

    add_others = adding(tile, kinds, part_dtype, count - 1)  # a loop would need more registers

    @inline
    def add(acc, memory, full, empty, slot, parity, warp, lane):
        acc = add_part(acc, (memory, full, empty, slot, parity, warp, lane))
        slot += units
        if slot >= stages:
            slot -= stages
            parity ^= 1
        return add_others(acc, memory, full, empty, slot, parity, warp, lane)

    return add


@functools.cache
def exchanging(tile, kinds, part_dtype, n_ranks, everywhere, first_rank, copied):
    """-> the Exchange of a kernel."""
    parts, layout = Parts(tile, part_dtype), Layout(tile, kinds)
    units, unit_bytes, tile_bytes = parts.units, parts.unit, parts.tile
    stages, at_b, b_bytes = layout.stages, layout.at_b, layout.b
    warp_bytes = parts.chunks * parts.chunk
    send, add = sending(tile, kinds, part_dtype), adding(tile, kinds, part_dtype, n_ranks - 1)
    if units > stages:
        raise ValueError(f"parts of {units} slots, of {stages}")

    @inline
    def load(t, ring, slot, parity, extra):
        me = extra.me
        memory, full, empty = ring
        turn, _, i = place_of(t, n_ranks, extra)
        if turn == n_ranks - 1:
            k = 0
            while k < n_ranks:
                if k != me:
                    if copied:
                        buffer, number, signal = 0, 1, quotient(i, extra.chunk)
                    else:
                        buffer, number, signal = extra.epoch & 1, extra.epoch, i
                    staged_full = span(extra.staged_full, k * extra.signals + signal, 1)
                    wait(staged_full, 1, "sys", "acquire", number)  # 4
                    fence_proxy_async_global()  # 4
                    at = staged_at(buffer, k, me, n_ranks, extra.room) + i * tile_bytes
                    for unit in range(units):
                        mbarrier_wait(empty, slot, parity)
                        mbarrier_arrive_expect_tx(full, slot, unit_bytes)
                        place = span(memory, at_b + slot * b_bytes, unit_bytes)
                        part = span(extra.staged, at + unit * unit_bytes, unit_bytes)
                        bulk_load(place, part, full, slot)  # 5
                        slot += 1
                        if slot == stages:
                            slot = 0
                            parity ^= 1
                k += 1
        return slot, parity

    @inline
    def settle(state, lane, extra):
        """`state`: twice the tiles that were posted, and one if there is another."""
        if state & 1:
            if lane == 0:
                bulk_wait_group(0)  # 2
                mbarrier_wait(extra.posts, TOLD, (state >> 1 & 1) ^ 1)
                mbarrier_arrive(extra.posts, SENT)
            cuda.syncwarp()
            state += 1
        return state

    @inline
    def take(acc, t, ring, slot, parity, state, pieces, warp, lane, extra):
        memory, full, empty = ring
        state = settle(state, lane, extra)
        turn, owner, i = place_of(t, n_ranks, extra)
        own = turn == n_ranks - 1
        if own:
            acc, slot, parity = add(acc, memory, full, empty, slot, parity, warp, lane)  # 6
        else:
            first, n_bytes = i * tile_bytes + warp * warp_bytes, tile_bytes - warp * warp_bytes
            if copied:
                there = span(extra.outbox, turn * extra.room + first, n_bytes)
            else:
                first += staged_at(extra.epoch & 1, extra.me, owner, n_ranks, extra.room)
                there = span(peer_at(extra.staged, extra.offsets, first_rank + owner), first, n_bytes)
            send(acc, (pieces, there, lane))  # 1
        return acc, own, slot, parity, state + 1

    @inline
    def watch_tiles(t, tiles, step, extra):
        posts, epoch, me = extra.posts, extra.epoch, extra.me
        parity = 0
        while t < tiles:
            turn, owner, i = place_of(t, n_ranks, extra)
            mine = me * extra.signals + i
            mbarrier_wait(posts, SENT, parity)  # 3
            if turn < n_ranks - 1 and copied:
                red_release(extra.written, turn * extra.signals + quotient(i, extra.chunk), 1, "sys")
            elif turn < n_ranks - 1:
                notify_at(extra.staged_full, mine, extra.offsets, first_rank + owner, epoch)
            elif everywhere:
                k = 0
                while k < n_ranks:
                    if k != me:
                        notify_at(extra.gathered, mine, extra.offsets, first_rank + k, epoch)  # 8
                    k += 1
            mbarrier_arrive(posts, TOLD)
            parity ^= 1
            t += step
        if everywhere:
            k = 0
            while k < n_ranks:
                if k != me:
                    i = int64(cuda.blockIdx.x)
                    while i < extra.part_tiles:
                        signal = span(extra.gathered, k * extra.signals + i, 1)
                        wait(signal, 1, "sys", "acquire", epoch)  # 9
                        i += cuda.gridDim.x
                k += 1

    @inline
    def watch(t, tiles, step, ring, extra):
        if cuda.threadIdx.x == WATCHING:
            watch_tiles(t, tiles, step, extra)

    return Exchange(rows_of, load, take, settle, watch)


@functools.cache
def fused_kernel(tile, kinds, part_dtype, n_ranks, everywhere=False, first_rank=0, copied=False):
    """-> the kernel for tiles like `tile` of products like `kinds`, whose parts are sent as `part_dtype`.

    everywhere  all-reduce; otherwise reduce-scatter
    first_rank  it is for `n_ranks` ranks, this one and those after it, which are numbered from 0 here. (An
                argument of the kernel would take a register that there is not)
    copied      copy engines send the parts
    """
    exchange = exchanging(tile, kinds, part_dtype, n_ranks, everywhere, first_rank, copied)
    copies = n_ranks if everywhere else 1
    gemm = gemm_body(tile, kinds, ordering(tile.group, n_ranks), exchange=exchange, copies=copies)
    warps = tile.warps

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def gemm_exchange(operands, size, split, mine, inbox, copies, schedule, epochs, done):
        """As of ``gemm_kernel``, without a bias and with K not split, but

        map_out       tensor maps, one after another, of this rank's `rows` rows of out; for all-reduce, of
                      each rank's
        m             rows of all tiles: of tile_rows tiles for each rank
        mine          rows, tile_rows, part_tiles, me:
        rows          of A, for each rank; they have part_tiles tiles, in tile_rows rows
        me            this rank, of n_ranks, from 0
        inbox         staged, room, staged_full, gathered, signals, offsets:
        staged        uint8 (2 * (n_ranks - 1) * room,), symmetric; `copied`: half as large
        room          bytes of a rank's slot in it
        staged_full   uint64 (n_ranks * signals,), symmetric, zeros at first; gathered likewise
        signals       elements of a rank's slot in these
        offsets       as of `peer_at`, by ranks of the World
        copies        outbox, written, staged_empty, chunk:
        outbox        `copied`: uint8 ((n_ranks - 1) * room,)
        written       `copied`: uint64 ((n_ranks - 1) * signals,), zeros at first
        staged_empty  `copied`: uint64 (n_ranks,), symmetric, ones at first
        chunk         `copied`: tiles of a chunk
        schedule      int32 (n_ranks * part_tiles,): see ``tile_order.py``
        epochs        int64 (1,), zero at first; done: int32 (1,)
        """
        rows, tile_rows, part_tiles, me = mine
        staged, room, staged_full, gathered, signals, offsets = inbox
        outbox, written, staged_empty, chunk = copies
        posts = cuda.shared.array(2, types.uint64)
        if cuda.threadIdx.x == 0:
            mbarrier_init(posts, SENT, warps)
            mbarrier_init(posts, TOLD, 1)  # the GEMM begins with a fence for that, and a barrier
        epoch = epochs[0] + 1
        given = Given(
            *(staged, staged_full, gathered, offsets, posts, epoch, me, rows, tile_rows, part_tiles, room),
            *(signals, outbox, written, chunk, schedule),
        )
        gemm(operands, size, split, given)
        if copied:  # the block has read its parts
            cuda.syncwarp()
            cuda.syncthreads()
        if cuda.threadIdx.x == 0 and is_last_block(done):  # all have read the counter
            epochs[0] = epoch
            if copied:  # 12
                for k in range(n_ranks):
                    for c in range(quotient(part_tiles + chunk - 1, chunk)):
                        staged_full[k * signals + c] = 0
                for k in range(n_ranks):
                    if k != me:
                        st_release(peer_at(staged_empty, offsets, first_rank + k), me, 1, "sys")

    return gemm_exchange


def _listed(tile, kinds, part_dtype, *of_ranks):
    kinds = Kinds(*kinds)
    return table_entry(fused_kernel(Tile(*tile), kinds, part_dtype, *(of_ranks or (4,))), kinds)


BF16, MN = ("bfloat16", "k", "k", "bfloat16"), ("bfloat16", "k", "mn", "bfloat16")
MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": _listed((128, 256), BF16, "bfloat16"),
    "128x128 float32": _listed((128, 128), MN, "float32"),
    "128x224": _listed((128, 224), ("float16", "k", "mn", "float32"), "float16"),
    "64x128": _listed((64, 128), BF16, "bfloat16"),
    "128x256 everywhere": _listed((128, 256), BF16, "bfloat16", 4, True),
    "128x256 node": _listed((128, 256), BF16, "bfloat16", 4, False, 8),
    "128x128 node": _listed((128, 128), ("bfloat16", "k", "mn", "float32"), "float32", 2, False, 2),
    "128x256 copied": _listed((128, 256), BF16, "bfloat16", 4, False, 0, True),
    "128x128 copied": _listed((128, 128), ("float16", "mn", "k", "float16"), "float32", 3, True, 2, True),
}
