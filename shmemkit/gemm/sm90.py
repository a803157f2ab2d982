"""Matrix product by Hopper's tensor cores (compute capability 9.0): TMA, mbarriers, wgmma.

    out[M, N] = activation(A[M, K] @ B[N, K].T + bias[N])

The operands are float16 or bfloat16, each stored by rows ("k": K is contiguous) or by columns ("mn"), or
float8 (block_scales.py); the sums are float32. The grid is persistent: block b computes tiles b,
b + gridDim.x, .. in the order of a swizzle. In a block, one warpgroup loads; the others, one for each 64 rows
of the tile, multiply.

Slots     `stages` slots in shared memory, each for a slab of A's and of B's tile, 128 bytes of K deep;
          used in a ring through all tiles
Barriers  full[s]: a slab is in slot s. One arrival per phase, and the bytes of the slab. empty[s]: slot s may
          be overwritten. One arrival of each warp that reads it, per phase
Out       two pieces of shared memory per warp, for its 16 rows of some columns of the result

  loader, one thread, for each slab of each tile:
          1. wait for empty[s]                     in the first round at once
          2. arrive at full[s], and announce the slab's bytes; start the loads of its boxes
  consumers, for each slab:
          3. wait for full[s]                      acquire: sees the slab
          4. start the products of their 64 rows   asynchronous: they read slot s until they are done
          5. wait for the products of the slab before; arrive at empty of its slot
  and for each tile:
          6. wait for the last products; arrive at empty of their slot
          7. for some columns at a time: wait until the store before the last one has read its piece; add the
             bias, activate, round, store to the piece; fence for the asynchronous proxy; syncwarp; one
             thread starts the store of the piece

No race: a slot is overwritten (2) after all its readers have arrived (5 or 6), which they do when their
products are done. A piece is overwritten after the store that reads it (7). No thread is two phases ahead at
a barrier: the loader waits for empty between two arrivals at full, and the consumers for full between two at
empty.

No deadlock: the loader waits only for consumers of earlier slabs, and those only for the loader. The loads of
the next tile run while a tile is stored.

No clusters: blocks that load parts of a tile for each other were not faster on an H200, whose L2 cache serves
them as well.

Split K: where there are few tiles, several blocks compute one, each a part of K. Each warp writes its part to
memory. The last warp (it counts arrivals, and resets the counter) adds all parts in the order of K: the
result is the same in every run.

Edges: the TMA reads zeros beyond the operands. It needs rows of A, B and out (columns, for those stored by
columns) that begin at multiples of 16 bytes. It writes whole 16 bytes, so rows of out have a multiple of
that, and it writes nothing beyond out.

The machine code must keep (docs/machine_code.md): whole warpgroup, one elected thread.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, int32, int64, types

from shmemkit.device.cuda.accumulators import fragment_store
from shmemkit.device.cuda.marks import begin_phase, end_phase
from shmemkit.device.cuda.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from shmemkit.device.cuda.register_tuples import for_each_part, map_parts
from shmemkit.device.cuda.subarrays import span
from shmemkit.device.cuda.tma import (
    bulk_commit_group,
    bulk_wait_group,
    bulk_wait_group_read,
    fence_proxy_async,
    padding,
    tensormap_acquire,
    tma_load,
    tma_store,
)
from shmemkit.device.cuda.wgmma import (
    ROW_BYTES,
    SLAB,
    setmaxnreg_dec,
    setmaxnreg_inc,
    warpgroup_mma,
    wgmma_wait_group,
)
from shmemkit.device.swizzle import grouped, quotient

from .epilogue import finishing, inline

SHARED = 232448  # bytes that a block may have
ALIGNMENT = 1024  # bytes, of swizzled tiles
PIECES = 2  # of the result per warp, that are stored while the next is computed
WARPGROUP = 128  # threads
BESIDE = 3  # warps beside the loader's in its warpgroup
WATCHING = 32  # their first thread
SETTLED = 8  # slabs after which what a tile before has sent is there, mostly
REGISTERS = 40, 232  # of a thread that loads, and of one that multiplies, of tiles of ``moves_registers``
ITEMSIZE = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}


class Tile(NamedTuple):
    """What a block computes at a time.

    m, n    rows, 64 or 128, and columns, a multiple of 16 up to 256
    group   rows of tiles that are computed column after column
    split   whether the kernel can split K
    loaded  rows of a box of a K-major A, a multiple of 8 and a divisor of m; None: m. ``boxes`` of
            ``gemm_body`` gives the number of boxes of a ragged tile, so that no time goes into unused rows
    """

    m: int
    n: int
    group: int = 16
    split: bool = False
    loaded: int | None = None

    def count(self, m, n):
        """Tiles of an M by N result."""
        return -(-m // self.m) * -(-n // self.n)

    @property
    def rows_of_a(self):
        return self.loaded or self.m

    @property
    def threads(self):
        return WARPGROUP * (1 + self.m // 64)

    @property
    def warps(self):
        """That multiply."""
        return self.m // 16


def moves_registers(tile):
    """Whether the warpgroup that loads gives registers to those that multiply; otherwise there are enough."""
    return tile.m == 128 and tile.n > 128


def check_registers(tile, few, many):
    """ValueError if a block has too few registers: threads that ask for more of them would wait for ever."""
    wanted, there = (
        few * WARPGROUP + many * (tile.threads - WARPGROUP),
        tile.threads * (65536 // tile.threads & ~7),
    )
    if moves_registers(tile) and wanted > there:
        raise ValueError(f"tiles of {tile}: threads would take {wanted} registers; a block has {there}")


class Kinds(NamedTuple):
    """Of a product: dtype of A and B, how they are stored, dtype of out, and the bias's (None: there is none)
    and activation of the epilogue."""

    dtype: str
    a_major: str
    b_major: str
    out_dtype: str
    bias_dtype: str | None = None
    activation: str | None = None

    @property
    def depth(self):
        """Of K, of a slab."""
        return ROW_BYTES // ITEMSIZE[self.dtype]


class Layout:
    """Where things are in a block's shared memory, in bytes."""

    def __init__(self, tile, kinds):
        self.row_bytes = next(b for b in (128, 64, 32) if tile.n * ITEMSIZE[kinds.out_dtype] % b == 0)
        self.piece = ALIGNMENT * -(-16 * self.row_bytes // ALIGNMENT)
        self.columns = self.row_bytes // ITEMSIZE[kinds.out_dtype]  # of a piece
        self.a, self.b = bytes_of_slab(kinds.a_major, tile.m), bytes_of_slab(kinds.b_major, tile.n)
        pieces = tile.warps * PIECES * self.piece
        self.stages = min((SHARED - 2 * ALIGNMENT - pieces) // (self.a + self.b), 16)
        self.at_b = self.stages * self.a
        self.at_pieces = self.at_b + self.stages * self.b
        self.bytes = self.at_pieces + pieces


def box_rows(major, extent):
    """A slab of `extent` rows or columns of an operand comes in boxes of 128 bytes by so many rows: K-major
    in one, of its own rows; otherwise in one for each 64 columns, of rows of K."""
    return extent if major == "k" else SLAB


def bytes_of_slab(major, extent):
    rows = box_rows(major, extent)
    return -(-extent // rows) * rows * ROW_BYTES


# ---- the pieces


@functools.cache
def loading(major, extent):
    """-> ``load(slab, tensor_map, k, first, barriers, i)``: ask for a slab, from K `k` and row or column
    `first` on."""
    rows = box_rows(major, extent)
    k_major, count, box_bytes = major == "k", -(-extent // rows), rows * ROW_BYTES

    @inline
    def load(slab, tensor_map, k, first, barriers, i):
        for j in range(count):
            x, y = (k, first) if k_major else (first + j * SLAB, k)
            tma_load(span(slab, j * box_bytes, box_bytes), tensor_map, x, y, barriers, i)

    return load


@inline
def hand_back(empty, slot, lane):
    """A warp has read a slot."""
    if lane == 0:
        mbarrier_arrive(empty, slot)


class Accumulation(NamedTuple):
    """Device functions that add up a tile's products, called by the warps that multiply.

    begin(m, n, slab, lane, extra)   -> state: no sums; `slab` is the first one, m the warp's first row in
                                     out, n the tile's column
    add(state, a, b, more, rest, empty, slot, last, lane, extra)
                                     -> state, to whose sums the products of slot `slot` come: the first ones
                                     of the tile, or `more`, after those of slot `last`; `rest` slabs follow.
                                     It hands slots back
    finish(state, empty, last, lane) -> sums, complete; all slots are handed back
    """

    begin: Any
    add: Any
    finish: Any


@functools.cache
def one_level(tile, kinds):
    """-> the Accumulation of the tensor cores alone"""
    zeros, multiply, wait = warpgroup_mma(tile.n, kinds.dtype, kinds.a_major, kinds.b_major)

    @inline
    def begin(m, n, slab, lane, extra):
        return zeros()

    @inline
    def add(sums, a, b, more, rest, empty, slot, last, lane, extra):
        sums = multiply(sums, a, b, more)  # 4
        wgmma_wait_group(1)  # 5
        if more:
            hand_back(empty, last, lane)
        return sums

    @inline
    def finish(sums, empty, last, lane):
        sums = wait(sums)  # 6
        hand_back(empty, last, lane)
        return sums

    return Accumulation(begin, add, finish)


@functools.cache
def storing(n_columns, row_bytes, columns, out_dtype, bias_dtype, activation, send):
    """-> ``store(acc, (pieces, map_out, bias, first, m, n, last, lane, extra))``: a warp stores its rows,
    from row m, column n of out on, whose last column is `last`; bias[first] is that of column 0. `send`: see
    ``gemm_body``."""
    finish = finishing(bias_dtype, activation)
    store_fragment = fragment_store(out_dtype, row_bytes)
    piece_bytes = max(16 * row_bytes, ALIGNMENT)
    odd = n_columns // columns % PIECES != 0

    @inline
    def store_16_columns(part, i, arguments):
        piece, bias, first, n, last, lane = arguments
        n += 16 * i + 2 * (lane & 3)
        n0, n1 = first + min(n, last), first + min(n + 1, last)
        n8, n9 = first + min(n + 8, last), first + min(n + 9, last)
        finished = (
            finish(part[0], bias, n0),
            finish(part[1], bias, n1),
            finish(part[2], bias, n0),
            finish(part[3], bias, n1),
            finish(part[4], bias, n8),
            finish(part[5], bias, n9),
            finish(part[6], bias, n8),
            finish(part[7], bias, n9),
        )
        store_fragment(piece, i, finished)

    store_columns = for_each_part(8, store_16_columns)

    @inline
    def store_piece(part, i, arguments):
        pieces, map_out, bias, first, m, n, last, lane, extra = arguments
        n += i * columns
        piece = span(pieces, (i & 1) * piece_bytes, piece_bytes)
        if odd and i == 0:
            bulk_wait_group_read(0)  # the tile before has left off with this very piece
        else:
            bulk_wait_group_read(1)
        cuda.syncwarp()
        store_columns(part, (piece, bias, first, n, last, lane))
        fence_proxy_async()
        cuda.syncwarp()
        send(piece, map_out, m, n, lane, extra)
        if lane == 0:
            bulk_commit_group()

    return for_each_part(columns // 2, store_piece)


@functools.cache
def adding_up(n):
    """-> ``add_up(acc, partials, arrivals, tile, split, splits, warp, n_warps, lane)`` -> (acc, whether all
    parts are in it): a warp's part of K of a tile, `split` of `splits`."""
    count = n // 2

    @inline
    def write_part(part, i, arguments):
        partials, at = arguments
        for j in range(8):
            partials[at + (8 * i + j) * 32] = part[j]

    @inline
    def add_part(part, i, arguments):
        partials, at = arguments
        at += 8 * 32 * i
        return (
            part[0] + partials[at],
            part[1] + partials[at + 32],
            part[2] + partials[at + 64],
            part[3] + partials[at + 96],
            part[4] + partials[at + 128],
            part[5] + partials[at + 160],
            part[6] + partials[at + 192],
            part[7] + partials[at + 224],
        )

    write, add = for_each_part(8, write_part), map_parts(8, add_part)
    zeros = warpgroup_mma(n, "bfloat16").zeros

    @inline
    def add_up(acc, partials, arrivals, tile, split, splits, warp, n_warps, lane):
        step = n_warps * count * 32
        first = (tile * splits * n_warps + warp) * count * 32 + lane
        write(acc, (partials, first + split * step))
        cuda.threadfence()
        cuda.syncwarp()
        arrived = int32(0)
        if lane == 0:
            arrived = cuda.atomic.add(arrivals, tile * n_warps + warp, 1)
            cuda.threadfence()
        arrived = cuda.shfl_sync(0xFFFFFFFF, arrived, 0)
        cuda.syncwarp()
        complete = arrived == splits - 1
        if complete:
            if lane == 0:
                arrivals[tile * n_warps + warp] = 0
            acc = zeros()
            for i in range(splits):
                acc = add(acc, (partials, first + i * step))
        return acc, complete

    return add_up


# ---- the kernel


@inline
def nothing(m, n, extra):
    """A hook that does nothing."""


@inline
def all_blocks(extra):
    return int64(cuda.blockIdx.x), int64(cuda.gridDim.x)


@inline
def where_it_is(m, map_a, extra):
    """All rows of A are behind one tensor map."""
    return map_a, m


@inline
def one_matrix(m, n, map_b, extra):
    """B is the same for all rows."""
    return map_b, 0, n


@inline
def one_vector(m, extra):
    """So is the bias."""
    return 0


@inline
def one_box(m, extra):
    return 1


@functools.cache
def to_copies(copies):
    """All rows of a piece go to each of so many results."""

    @inline
    def send(piece, map_out, m, n, lane, extra):
        if lane == 0:
            for j in range(copies):
                tma_store(span(map_out, 16 * j, 16), n, m, piece)

    return send


class Exchange(NamedTuple):
    """Device functions for ``gemm_body`` of kernels whose blocks get parts of results, and send them. `extra`
    is what the kernel was given, t a tile's number in the `order`, `ring` (memory, full, empty): the slots
    and their barriers.

    rows(row, tile_m, extra)                  -> (first row in A, first row in out) of tile row `row`
    load(t, ring, slot, parity, extra)        -> the next slot, and parity: called by the loader after the
                                              slabs of a tile, it may load more to the slots that follow
    take(acc, t, ring, slot, parity, state, pieces, warp, lane, extra)
                                              -> (acc, whether to store it, slot, parity, state): called by
                                              the warps that multiply, with a tile's products; where K is
                                              split, by each that has added its rows up
    settle(state, lane, extra)                -> state: called by them during the products of the next tile,
                                              and at the end. `state` is an integer of their own, 0 at first
    watch(t, tiles, step, ring, extra)        called by the BESIDE warps beside the loader's, from thread
                                              WATCHING on, where K is not split: the tiles of their block are
                                              t, t + step, .. below tiles
    """

    rows: Any
    load: Any
    take: Any
    settle: Any
    watch: Any


@inline
def _rows(row, tile_m, extra):
    return row * tile_m, row * tile_m


@inline
def _load(t, ring, slot, parity, extra):
    return slot, parity


@inline
def _take(acc, t, ring, slot, parity, state, pieces, warp, lane, extra):
    return acc, True, slot, parity, state


@inline
def _settle(state, lane, extra):
    return state


@inline
def _watch(t, tiles, step, ring, extra):
    """There is nothing to do."""


ALONE = Exchange(_rows, _load, _take, _settle, _watch)


@functools.cache
def grouping(group):
    @inline
    def order(tile, n_m, n_n, extra):
        return grouped(tile, n_m, n_n, group)

    return order


@functools.cache
def gemm_body(
    tile,
    kinds,
    order=None,
    before_loads=nothing,
    after_store=nothing,
    a_at=where_it_is,
    before_slab=nothing,
    exchange=ALONE,
    copies=1,
    blocks=all_blocks,
    b_at=one_matrix,
    bias_at=one_vector,
    boxes=one_box,
    send=None,
    beside=0,
    registers=REGISTERS,
    accumulation=None,
):
    """-> the kernel as a device function, for kernels that compute more: see ``gemm_kernel`` for its
    arguments. Its last, `extra`, is a tuple, which the functions given here get, device functions all:

    order(t, n_m, n_n, extra)    -> (m, n): the t-th of n_m by n_n tiles; the tile's `group` if None
    before_loads(m, n, extra)    called by the loader before the first load of the tile at row m, column n:
                                 where it waits until the rows are there (then `fence_proxy_async_global`)
    after_store(m, n, extra)     called by a thread of each warp that multiplies, after it has asked for the
                                 last store of its rows m to m + 15 of a tile, and committed it: where it
                                 tells others (after `bulk_wait_group`)
    a_at(m, map_a, extra)        -> (tensor map, row): where the loader finds row m of A, and the rest of the
                                 tile; a tensor map other than map_a `before_loads` has acquired
    before_slab(m, slab, extra)  as before_loads, before each slab, `slab` * 64 of K, of that tile
    exchange                     an Exchange; one that uses the ring has K not split
    copies                       tensor maps that follow each other in map_out: each is given the result
    blocks(extra)                -> (the number of this block, how many there are), int64, of those that call
                                 it
    b_at(m, n, map_b, extra)     -> (tensor map, K, column): where the loader finds column n of B, and what
                                 follows it, for the tile at row m, and at which K it begins
    bias_at(m, extra)            -> where in the bias that of column 0 is, for the tile at row m
    boxes(m, extra)              -> how many boxes of A, of the tile's `loaded` rows, are loaded for a slab
    beside                       arrivals that end a phase of full[s] besides the loader's: of those that load
                                 A, or more of it, in ``exchange.watch``
    registers                    as REGISTERS
    send(piece, map_out, m, n, lane, extra)
                                 called by a warp: start to store its 16 rows of a piece to out, at row m and
                                 column n. A thread commits a group then. None: to all `copies`
    accumulation                 an Accumulation; None: ``one_level``

    m is what ``exchange.rows`` gives, for A or for out; the body adds 16 for each warp to that for out, and
    takes it for a row of A and out where no function does.
    """
    layout = Layout(tile, kinds)
    tile_m, tile_n, split_k, n_warps = tile.m, tile.n, tile.split, tile.warps
    stages, a_bytes, b_bytes = layout.stages, layout.a, layout.b
    at_b, at_pieces, n_bytes = layout.at_b, layout.at_pieces, layout.bytes
    warp_pieces = PIECES * layout.piece
    box_bytes, box_rows_of_a = bytes_of_slab(kinds.a_major, tile.rows_of_a), tile.rows_of_a
    load_a, load_b = loading(kinds.a_major, tile.rows_of_a), loading(kinds.b_major, tile_n)
    begin, add_products, finish = accumulation or one_level(tile, kinds)
    store = storing(
        *(tile_n, layout.row_bytes, layout.columns, kinds.out_dtype, kinds.bias_dtype, kinds.activation),
        to_copies(copies) if send is None else send,
    )
    add_up = adding_up(tile_n)
    order = grouping(tile.group) if order is None else order
    first_rows, load_more, take, settle, watch = exchange
    rows_of_a, depth = 64 * ROW_BYTES, kinds.depth  # bytes of a warpgroup's rows of A's slab
    moves, (few, many) = moves_registers(tile), registers
    check_registers(tile, few, many)

    @inline
    def work_at(i, n_m, n_n, n_slabs, splits, extra):
        """-> row of the tile in A and in out, column, its number, which part of K, from which slab to
        which"""
        t, split, begin, end = i, 0, 0, n_slabs
        if split_k:
            t = quotient(i, splits)
            split = i - t * splits
            begin, end = quotient(split * n_slabs, splits), quotient((split + 1) * n_slabs, splits)
        row, column = order(t, n_m, n_n, extra)
        m, m_out = first_rows(row, tile_m, extra)
        return m, m_out, column * tile_n, t, split, begin, end

    @inline
    def load_tiles(ring, map_a, map_b, work, works, step, shape, extra):
        (memory, full, empty), (n_m, n_n, n_slabs, splits) = ring, shape
        tensormap_acquire(map_a)
        tensormap_acquire(map_b)
        slot, parity = 0, 1
        while work < works:
            m, _, n, t, _, slab, end = work_at(work, n_m, n_n, n_slabs, splits, extra)
            before_loads(m, n, extra)
            from_a, row = a_at(m, map_a, extra)
            from_b, first_k, column = b_at(m, n, map_b, extra)
            n_boxes = boxes(m, extra)
            while slab < end:
                before_slab(m, slab, extra)
                mbarrier_wait(empty, slot, parity)  # 1
                mbarrier_arrive_expect_tx(full, slot, n_boxes * box_bytes + b_bytes)  # 2
                k = slab * depth
                slab_of_a = span(memory, slot * a_bytes, a_bytes)
                for i in range(n_boxes):
                    box = span(slab_of_a, i * box_bytes, box_bytes)
                    load_a(box, from_a, k, row + i * box_rows_of_a, full, slot)
                slab_of_b = span(memory, at_b + slot * b_bytes, b_bytes)
                load_b(slab_of_b, from_b, first_k + k, column, full, slot)
                slab += 1
                slot += 1
                if slot == stages:
                    slot = 0
                    parity ^= 1
            slot, parity = load_more(t, ring, slot, parity, extra)
            work += step

    @inline
    def multiply_tiles(ring, map_out, bias, partials, arrivals, work, works, step, shape, size_n, extra):
        (memory, full, empty), (n_m, n_n, n_slabs, splits) = ring, shape
        thread = cuda.threadIdx.x - WARPGROUP
        lane, warp = thread & 31, cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0)
        warpgroup = warp >> 2
        pieces = span(memory, at_pieces + warp * warp_pieces, warp_pieces)
        if lane == 0:
            for i in range(copies):
                tensormap_acquire(span(map_out, 16 * i, 16))
        slot, parity, state = 0, 0, 0
        while work < works:
            _, m, n, t, split, first, end = work_at(work, n_m, n_n, n_slabs, splits, extra)
            m += 16 * warp
            if warp == 0:
                begin_phase("product")
            sums = begin(m, n, first, lane, extra)
            slab, before = first, slot
            while slab < end:
                mbarrier_wait(full, slot, parity)  # 3
                a = span(memory, slot * a_bytes + warpgroup * rows_of_a, rows_of_a)
                b = span(memory, at_b + slot * b_bytes, b_bytes)
                more, rest = slab > first, end - slab - 1
                sums = add_products(sums, a, b, more, rest, empty, slot, before, lane, extra)  # 4, 5
                if slab == first + SETTLED:
                    state = settle(state, lane, extra)
                before = slot
                slab += 1
                slot += 1
                if slot == stages:
                    slot = 0
                    parity ^= 1
            acc = finish(sums, empty, before, lane)  # 6
            if warp == 0:
                end_phase("product")
            complete = True
            if split_k and splits > 1:
                acc, complete = add_up(acc, partials, arrivals, t, split, splits, warp, n_warps, lane)
            if complete:
                acc, complete, slot, parity, state = take(
                    acc, t, ring, slot, parity, state, pieces, warp, lane, extra
                )
            if complete:
                first = bias_at(m, extra)
                store(acc, (pieces, map_out, bias, first, m, n, size_n - 1, lane, extra))  # 7
                if lane == 0:
                    after_store(m, n, extra)
            work += step
        state = settle(state, lane, extra)
        bulk_wait_group(0)

    @inline
    def gemm(operands, size, split, extra):
        map_a, map_b, map_out, bias = operands
        size_m, size_n, size_k = size
        splits, partials, arrivals = split
        memory = cuda.shared.array(0, types.uint8, 16)  # no more: see `padding`
        memory = span(memory, padding(memory, ALIGNMENT), n_bytes)
        full = cuda.shared.array(stages, types.uint64)
        empty = cuda.shared.array(stages, types.uint64)
        if cuda.threadIdx.x == 0:
            for i in range(stages):
                mbarrier_init(full, i, 1 + beside)
                mbarrier_init(empty, i, n_warps)
            fence_mbarrier_init()
        cuda.syncthreads()

        ring = memory, full, empty
        n_m, n_n = quotient(size_m + tile_m - 1, tile_m), quotient(size_n + tile_n - 1, tile_n)
        shape = n_m, n_n, quotient(size_k + depth - 1, depth), splits
        works = n_m * n_n
        if split_k:
            works *= splits
        work, step = blocks(extra)
        first = cuda.shfl_sync(0xFFFFFFFF, cuda.threadIdx.x, 0)  # of this warp
        if first < WARPGROUP:
            if moves:
                setmaxnreg_dec(few)
            if cuda.threadIdx.x == 0:
                load_tiles(ring, map_a, map_b, work, works, step, shape, extra)
            elif first > 0:
                watch(work, works, step, ring, extra)
        else:
            if moves:
                setmaxnreg_inc(many)
            multiply_tiles(ring, map_out, bias, partials, arrivals, work, works, step, shape, size_n, extra)

    return gemm


@functools.cache
def ordered(order):
    """-> `order`, a device function (turn, n_m, n_n) -> (m, n), as of ``gemm_body``; None for None"""

    @inline
    def without_extra(tile, n_m, n_n, extra):
        return order(tile, n_m, n_n)

    return None if order is None else without_extra


@functools.cache
def gemm_kernel(tile, kinds, order=None):
    """-> the kernel for tiles like `tile` of products like `kinds`, in an `order` as of ``ordered``."""
    gemm = gemm_body(tile, kinds, ordered(order))

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def gemm_sm90(operands, size, split):
        """out = activation(A B + bias), M by N.

        operands  map_a, map_b, map_out: tensor maps, uint64 (16,); their boxes are those of ``maps``
                  bias: 1-D, N elements, as uint16 or float32 (see ``element``); any array if there is none
        size      m, n, k: each at least 1
        split     splits: parts of K, 1 unless the tile's `split` is set; at most the slabs of K
                  partials: float32, ``partial_elements(tile, m, n, splits)`` if splits > 1
                  arrivals: int32 zeros, ``arrival_elements(tile, m, n)`` if splits > 1; they are zeros again
                  at the end
        grid      any number of blocks; block: tile.threads; shared: ``shared_bytes``
        """
        gemm(operands, size, split, ())

    return gemm_sm90


def shared_bytes(tile, kinds):
    """Dynamic shared memory of a block."""
    return Layout(tile, kinds).bytes + ALIGNMENT


def arrival_elements(tile, m, n):
    """Counters that a kernel that splits K needs."""
    return tile.count(m, n) * tile.warps


def partial_elements(tile, m, n, splits):
    """Elements of the parts of K, of all tiles."""
    return arrival_elements(tile, m, n) * splits * 16 * tile.n


# ---- for tests


def table_entry(kernel, kinds, **others):
    """-> what GPU_KERNELS has of a kernel of a product like `kinds`; `others` besides its bias"""
    bias = "uint16" if kinds.bias_dtype in ("bfloat16", "float16") else "float32"
    return kernel, {"operands.3": bias, **others}


def _listed(tile, *kinds):
    tile, kinds = Tile(*tile), Kinds(*kinds)
    return table_entry(gemm_kernel(tile, kinds), kinds)


MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": _listed((128, 256), "bfloat16", "k", "k", "bfloat16"),
    "128x256 transposed": _listed((128, 256), "float16", "mn", "mn", "float32", "float16", "gelu"),
    "128x224": _listed((128, 224), "bfloat16", "k", "mn", "float16", "float32", "relu"),
    "128x128 split": _listed((128, 128, 8, True), "bfloat16", "k", "k", "bfloat16"),
    "64x64": _listed((64, 64), "bfloat16", "k", "k", "bfloat16", "bfloat16", "silu"),
    "64x64 few": _listed((64, 64, 16, False, 8), "bfloat16", "k", "k", "bfloat16"),
    "64x128 split": _listed((64, 128, 8, True), "bfloat16", "k", "k", "float32"),
}
