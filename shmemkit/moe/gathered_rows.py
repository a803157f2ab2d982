"""Grouped products of rows that lie anywhere: the Hopper kernel (``shmemkit.gemm.sm90``), with hooks that
load the rows of a tile one by one, and store its results one by one. Both layers of ``sk.moe`` compute by it.

    out[pairs[i]] = a[row of pairs[i]] @ w[e].T   for each i, e the expert of that pair (``expert_index.py``)

The TMA loads rows that follow each other, and on Hopper no others. So it loads B alone, and the three warps
beside the loader copy the rows of A, with cp.async.

Rows      the 4 rows of a group are copied by one instruction of a warp: 8 lanes bring a row's 128 bytes of a
          slab, swizzled as the TMA does. Warp w copies groups w, w + 3, ..
Barriers  full[s] expects 1 + WARPS arrivals: the loader's, with the bytes of B, and one of each of the warps

  the loader:        as in sm90.py, of B alone
  each of the warps, for each tile:
          1. wait for the rank of the last source that the tile has rows of, and those before it, if it does
             not know them to be there                 one lane; acquire, sys; syncwarp
          2. load where the rows of its groups are
     for each slab:
          3. wait until the copies of the slab before the last have arrived, in this thread; fence for the
             asynchronous proxy; syncwarp; one lane arrives at full of its slot
          4. wait for empty[s]; start the copies
     and at the end 3 for the last slabs
  warps that multiply: as in sm90.py, but a warp stores the rows of a piece to out[pairs[i]], 16 bytes a lane

No race: the copies are the warp's own (cp.async belongs to the generic proxy, and so do acquired rows); the
fence comes after their arrival, and the tensor cores read after the barrier. Each pair has one row of out.

No deadlock: a warp that waits for the slot of slab i has arrived for the slabs up to i - 2. That slot has
slab i - stages, and is handed back when the products of the slab after it have begun. As there are three
slots or more, every warp arrives for that one before it waits. Step 1 waits for copies that wait for no
kernel.

The machine code must keep (docs/machine_code.md): one elected thread.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64

from shmemkit.device.cuda.mbarrier import mbarrier_arrive, mbarrier_wait
from shmemkit.device.cuda.mma import cp_async, cp_async_commit, cp_async_wait
from shmemkit.device.cuda.register_tuples import for_each_part, map_parts
from shmemkit.device.cuda.subarrays import span
from shmemkit.device.cuda.tma import fence_proxy_async
from shmemkit.device.cuda.wgmma import SLAB
from shmemkit.device.shmem.signals import wait
from shmemkit.device.swizzle import quotient
from shmemkit.gemm.epilogue import inline
from shmemkit.gemm.grouped.expert_tiles import expert_of, row_of
from shmemkit.gemm.grouped.sm90 import GROUP, choose, stacked, storing_rows, weights_that_cannot_be_loaded
from shmemkit.gemm.problem import Problem
from shmemkit.gemm.sm90 import (
    ALONE,
    BESIDE,
    WARPGROUP,
    WATCHING,
    Kinds,
    Layout,
    Tile,
    gemm_body,
    grouping,
    table_entry,
)
from shmemkit.gemm.sm90_host import ALIGNED, Choice, bind_gemm, taken
from shmemkit.support.arrays import address_of

from .expert_index import rows_in, source_of

WARPS = BESIDE  # that copy rows
AT_ONCE = 4  # rows that a warp copies with one instruction
UNIT = 8  # elements of 16 bytes
REGISTERS = 104, 200  # as of sm90.py: the warps that copy keep where their rows are; with 88 they spill


class Rows(NamedTuple):
    """`extra` of the hooks. `pairs`, `tiles`: of an ExpertIndex; n_m, n_n: rows and columns of tiles

    x, rows_of_x      uint16: this rank's rows, each of size_k; (first, end): which of all rows they are
    gathered          uint16: all rows, where those of other ranks arrive; x where there are no others
    topk              pairs of a row
    arrived           uint64 (n_ranks,): 1 where a rank's rows are there
    out, pitch        uint8; bytes from row to row
    """

    pairs: Any
    tiles: Any
    n_m: Any
    n_n: Any
    size_n: Any
    size_k: Any
    x: Any
    rows_of_x: Any
    gathered: Any
    topk: Any
    arrived: Any
    me: Any
    n_ranks: Any
    out: Any
    pitch: Any


@functools.cache
def gathering(tile, kinds, order, others):
    """-> ``watch`` of an Exchange. `order`: as of ``gemm_body``; `others`: whether some rows are those of
    other ranks."""
    layout = Layout(tile, kinds)
    stages, a_bytes = layout.stages, layout.a
    count = -(-tile.m // (AT_ONCE * WARPS))  # groups of a warp
    zeros = (np.int32(0),) * count
    if stages < 3:
        raise ValueError(f"tiles of {tile} have {stages} slots; they must have 3 or more")

    @inline
    def find(part, i, arguments):
        tile, first, extra = arguments
        row = min(first + i * AT_ONCE * WARPS, rows_in(tile) - 1)  # behind the last one, that again
        row = quotient(int64(extra.pairs[row_of(tile) + row]), extra.topk)
        begin, end = extra.rows_of_x
        if others and (row < begin or row >= end):
            return (int32(~row),)
        return (int32(row - begin),)

    @inline
    def copy(part, i, arguments):
        memory, to, left, column, n_bytes, k, extra = arguments
        if i * AT_ONCE * WARPS < left:
            source, row = extra.x, part[0]
            if others and row < 0:
                source, row = extra.gathered, ~row
            to += i * (AT_ONCE * WARPS * 2 * SLAB)
            to ^= (i & 1) * (AT_ONCE << 4)  # the row's number modulo 8 is another one
            cp_async(memory, to, source, int64(row) * int64(k) + column, n_bytes, 16)

    find_all, copy_all = map_parts(1, find), for_each_part(1, copy)

    @inline
    def await_sources(source, known, lane, extra):
        """-> how many sources are there"""
        if known <= source:
            while known <= source:
                k = extra.me + known
                if k >= extra.n_ranks:
                    k -= extra.n_ranks
                if lane == 0:
                    wait(span(extra.arrived, k, 1), 1, "sys", "acquire", 1)  # 1
                known += 1
            cuda.syncwarp()
        return known

    @inline
    def tell(full, slot, lane):
        fence_proxy_async()
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(full, slot)

    @inline
    def watch(t, tiles, step, ring, extra):
        memory, full, empty = ring
        thread = int64(cuda.threadIdx.x) - WATCHING
        lane, unit, first = thread & 31, thread & 7, (thread >> 5) * AT_ONCE + (thread >> 3 & 3)
        n_slabs = quotient(extra.size_k + SLAB - 1, SLAB)
        slot, parity, last, before, known = 0, 1, -1, -1, 1
        while t < tiles:
            m, _ = order(t, extra.n_m, extra.n_n, extra)
            tile = extra.tiles[m]
            if others:
                known = await_sources(source_of(tile), known, lane, extra)
            rows, slab = find_all(zeros, (tile, first, extra)), 0  # 2
            left = int32(rows_in(tile) - first)
            while slab < n_slabs:
                if before >= 0:
                    cp_async_wait(1)
                    tell(full, before, lane)  # 3
                mbarrier_wait(empty, slot, parity)
                column = slab * SLAB + UNIT * unit
                n_bytes = 16 if column < extra.size_k else 0
                to = slot * a_bytes + first * (2 * SLAB) + ((unit ^ (first & 7)) << 4)
                copy_all(rows, (memory, to, left, column, n_bytes, int32(extra.size_k), extra))  # 4
                cp_async_commit()
                before, last = last, slot
                slab += 1
                slot += 1
                if slot == stages:
                    slot = 0
                    parity ^= 1
            t += step
        cp_async_wait(0)
        if before >= 0:
            tell(full, before, lane)
        if last >= 0:
            tell(full, last, lane)
        if others:  # also for ranks that no tile has rows of: their signals are of this call
            await_sources(extra.n_ranks - 1, known, lane, extra)

    return watch


@functools.cache
def gathered_kernel(tile, kinds, others):
    """-> the kernel for tiles like `tile` of products like `kinds`; `others`: whether other ranks exist"""
    by_k, order = kinds.b_major == "k", grouping(tile.group)
    tile_m, tile_n = tile.m, tile.n

    @inline
    def row_in_out(tile, row, extra):
        return int64(extra.pairs[row_of(tile) + row])

    store_rows = storing_rows(tile, kinds, row_in_out)

    @inline
    def first_rows(m, tile_m, extra):
        tile = extra.tiles[m]
        return tile, tile

    @inline
    def no_box(tile, extra):
        return 0

    @inline
    def b_at(tile, n, map_b, extra):
        if by_k:
            return map_b, 0, expert_of(tile) * extra.size_n + n
        return map_b, expert_of(tile) * extra.size_k, n

    @inline
    def send(piece, map_out, tile, n, lane, extra):
        first = 16 * ((cuda.threadIdx.x - WARPGROUP) >> 5)  # which the tile's row includes
        left = rows_in(tile) - first
        store_rows(piece, tile, n, left, extra.size_n, extra.out, extra.pitch, lane, extra)

    gemm = gemm_body(
        tile,
        kinds,
        order,
        exchange=ALONE._replace(rows=first_rows, watch=gathering(tile, kinds, order, others)),
        b_at=b_at,
        boxes=no_box,
        send=send,
        beside=WARPS,
        registers=REGISTERS,
    )

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def gathered_gemm(operands, size, split, index, rows):
        """As of ``gemm_kernel``, without a bias, K not split, and a map_b of w as one matrix; but m, map_a
        and map_out are not used. index: `pairs`, `tiles`, `sizes` of an ExpertIndex; rows: as of ``Rows``,
        from `x` to `pitch`"""
        (pairs, tiles, sizes), (_, n, k) = index, size
        n_m, n_n = int64(sizes[0]), (n + tile_n - 1) // tile_n
        extra = Rows(*(pairs, tiles, n_m, n_n, n, k, *rows))
        gemm(operands, (n_m * tile_m, n, k), split, extra)

    return gathered_gemm


# ---- on the host


def refused(k, n, w, **arrays):
    """-> why the kernels do not take these arrays, or None. `arrays`: x and out, C-contiguous"""
    if k % UNIT or n % UNIT:
        return f"K is {k} and N is {n}; they must be multiples of {UNIT}"
    if reason := weights_that_cannot_be_loaded(w):
        return reason
    for name, array in arrays.items():
        if not taken(array):
            return f"{name} is at {address_of(array):#x}; it must be at a multiple of {ALIGNED} bytes"
    return None


def bind_gathered(x, w, out, index, sms, columns, sources):
    """-> the product, bound, on so many multiprocessors, in tiles of so many columns (None: chosen). All
    arrays are 2-D, but w. `sources`: as of ``Rows``, from `rows_of_x` to `n_ranks`"""
    (n_experts, n, k), n_ranks = w.shape, sources[-1]
    if columns is None:
        _, columns = choose(index.pairs.size, n_experts, n, sms)
    tile = Tile(index.tile_m, columns, GROUP)
    matrix: Any = stacked(w)
    return bind_gemm(
        functools.partial(_kernel, n_ranks > 1),
        *(Problem(x, matrix.T, out, None, None), Choice(tile, 1), sms),
        (index.pairs, index.tiles, index.sizes),
        (flat(x), *sources, out.reshape(-1).view("uint8"), n * out.itemsize),
        m=index.max_tiles * tile.m,
        n=n,
        k=k,
        n_tiles=index.max_tiles * -(-n // tile.n),
    )


def flat(array):
    return array.reshape(-1).view("uint16")


def _kernel(others, tile, kinds):
    return gathered_kernel(tile, kinds, others)


def check_columns(who, columns):
    if columns is not None and columns not in range(16, 257, 16):
        raise ValueError(f"{who}: options['columns'] is {columns}; it must be a multiple of 16 up to 256")


def _listed(others, tile, *kinds):
    kinds = Kinds(*kinds)
    return table_entry(gathered_kernel(Tile(*tile), kinds, others), kinds)


_BF16 = "bfloat16", "k", "k", "bfloat16"
MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": _listed(True, (128, 256), *_BF16),
    "128x256 columns": _listed(True, (128, 256), "float16", "k", "mn", "float16"),
    "128x224": _listed(True, (128, 224), *_BF16),
    "128x256 alone": _listed(False, (128, 256), *_BF16),
    "64x128": _listed(True, (64, 128), *_BF16),
}
