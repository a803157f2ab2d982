"""Tiles of a grouped product: rows that are sorted by expert, whose numbers only the GPU knows.

Expert e has the next counts[e] rows. A tile has rows of one expert alone, so an expert's last row of tiles
may be ragged. An expert's tiles come one after another, in the order of ``grouped``.

The first warp of each block makes a table in shared memory, by prefix sums: the first row, and the first row
of tiles, of every `step`-th expert. A thread finds a tile by bisection in the table, and then goes through
the counts of the experts in between.

A row of tiles is one integer: the row that it begins at (32 bits, to which rows may be added), how many rows
it has (16 bits), its expert.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, int64, types

from shmemkit.compiler.ptx import gpu
from shmemkit.device.emulator import current_thread
from shmemkit.device.shmem.ordered_access import store
from shmemkit.device.swizzle import grouped, quotient
from shmemkit.support import kernel_reports

from ..epilogue import inline

SLOTS = 64  # of the table: the first rows of so many experts,
TILES = SLOTS  # from here on, their first rows of tiles,
TOTAL = 2 * SLOTS  # and here how many rows of tiles there are
TABLE = 3 * SLOTS  # a multiple of 128 bytes, behind which dynamic shared memory may begin
MAX_EXPERTS = 1 << 15
MAX_ROWS = (1 << 31) - 1
ALL = 0xFFFFFFFF


# ---- in the kernel


@inline
def row_of(found):
    """The first row."""
    return found & 0xFFFFFFFF


@inline
def rows_in(found):
    """How many rows."""
    return found >> 32 & 0xFFFF


@inline
def expert_of(found):
    return found >> 48


class ExpertTiles(NamedTuple):
    """Device functions for tiles of so many rows.

    plan(counts, rows, table, report)  -> how many rows of tiles there are: called by all threads of the
                                       block, which meet. It fills in the table, TABLE int32 in shared memory.
                                       If the counts do not fit `rows`, it reports that, and there are no
                                       tiles
    find(t, n_n, counts, table)        -> (the row of tiles, the column): the t-th tile, where a row of tiles
                                       has n_n. By any thread
    """

    plan: Any
    find: Any


@inline
def sums_up_to(x, lane):
    """Of the lanes up to this one."""
    for i in range(5):
        below = cuda.shfl_up_sync(ALL, x, 1 << i)
        if lane >= 1 << i:
            x += below
    return x


@functools.cache
def expert_tiles(tile_m, group):
    """-> the ExpertTiles; `group` rows of tiles are computed column after column"""

    @inline
    def plan(counts, rows, table, report):
        n_experts = int64(counts.size)
        step = quotient(n_experts + SLOTS - 1, SLOTS)
        if cuda.threadIdx.x < 32:
            lane = cuda.threadIdx.x
            row, tile, first, negative = int64(0), int64(0), int64(0), False
            while first < n_experts:
                expert, count = first + lane, int64(0)
                if expert < n_experts:
                    count = int64(counts[expert])
                if count < 0:
                    count, negative = int64(0), True
                tiles = quotient(count + tile_m - 1, tile_m)
                next_row, next_tile = row + sums_up_to(count, lane), tile + sums_up_to(tiles, lane)
                slot = quotient(expert, step)
                if slot * step == expert and expert < n_experts:
                    table[slot], table[TILES + slot] = next_row - count, next_tile - tiles
                row, tile = cuda.shfl_sync(ALL, next_row, 31), cuda.shfl_sync(ALL, next_tile, 31)
                first += 32
            if cuda.any_sync(ALL, negative):
                row = int64(-1)
            if row < 0 or row > rows:
                tile = int64(0)
            if lane == 0:
                table[TOTAL] = tile
                if cuda.blockIdx.x == 0 and (row < 0 or row > rows):
                    report_counts(report, row, rows)
        cuda.syncthreads()
        return int64(table[TOTAL])

    @inline
    def find(t, n_n, counts, table):
        step = quotient(int64(counts.size) + SLOTS - 1, SLOTS)
        wanted, low, high = quotient(t, n_n), int64(0), quotient(int64(counts.size) + step - 1, step)
        while high - low > 1:
            middle = (low + high) >> 1
            if table[TILES + middle] <= wanted:
                low = middle
            else:
                high = middle
        expert, row, tile = low * step, int64(table[low]), int64(table[TILES + low])
        count = int64(counts[expert])
        tiles = quotient(count + tile_m - 1, tile_m)
        while wanted >= tile + tiles:
            row += count
            tile += tiles
            expert += 1
            count = int64(counts[expert])
            tiles = quotient(count + tile_m - 1, tile_m)
        m, n = grouped(t - tile * n_n, tiles, n_n, group)
        m *= tile_m
        return expert << 48 | min(count - m, tile_m) << 32 | row + m, n

    return ExpertTiles(plan, find)


# ---- counts that do not fit


def report_counts(report, total, rows):
    """In a kernel: the counts add up to more than `rows`, or (a total of -1) one is negative. The host raises
    ValueError.

    report   address of a word of host memory, as of ``report_address``
    """
    current_thread("report_counts")
    raise ValueError(_explained(int(total), int(rows)))


_publish = store(types.uint64, "sys")


@gpu(report_counts)
def _(report, total, rows):
    def impl(report, total, rows):
        address = types.uint64(report)
        _publish(address + types.uint64(8), types.uint64(total))
        _publish(address + types.uint64(16), types.uint64(rows))
        _publish(address, types.uint64(1))

    return impl


def _explained(total, rows):
    given = "counts has a negative number" if total < 0 else f"counts add up to {total}"
    return (
        f"GroupedGemm: {given}, and x has {rows} rows; they must be 0 or more, and add up to {rows} at most. "
        "Nothing was written to out"
    )


@functools.cache
def report_address():
    """-> the address for ``report_counts``, on GPUs: of a flag, the total, and the rows."""
    return kernel_reports.words_for(2, _explained)
