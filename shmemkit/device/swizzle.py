"""Threadblock orders: which tile of a matrix comes next.

A result of n_m by n_n tiles is computed tile by tile, many at a time. The order decides what the tiles under
way share in the L2 cache, and, where tiles are received from or sent to other ranks, who waits for whom. Each
function here maps a position in the order, from 0, to a tile (or a tile row), and is a permutation:

  row_major        row after row
  grouped          `group` rows at a time, column after column: a square of tiles instead of a stripe
  rotated          rows from a given one on, around
  rank_rotated     rows from the rank's own on: a GEMM behind an all-gather finds those there at once
  reduce_scatter   rows from the next rank's on, the own last: in front of a reduce-scatter all ranks send to
                   different ones, and nothing is left to send at the end

The last three are of rows, for the result of the first two:

    m, n = grouped(tile, n_m, n_n, 8)
    m = rank_rotated(m, n_m, rank(), num_ranks(), num_ranks())

They compute with numbers alone, in kernels (any thread; nothing is ordered), in the emulator and on the host,
where ``order_of`` gives the whole order at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shmemkit.compiler.ptx import asm, gpu, gpu_function, types

__all__ = ["grouped", "order_of", "quotient", "rank_rotated", "reduce_scatter", "rotated", "row_major"]


def quotient(a: int, b: int) -> int:
    """``a // b`` of numbers from 0 to 2**32 - 1, b not 0: a division of 32 bits, which takes a fifth of the
    time of the 64 that ``//`` always has in kernels."""
    if not 0 <= a < 1 << 32 or not 0 < b < 1 << 32:
        raise ValueError(f"quotient(): a is {a}, b is {b}; both must be 0 to 2**32 - 1, and b not 0")
    return a // b


_divide = asm("div.u32 $0, $1, $2;", types.uint32, (types.uint32, types.uint32), pure=True)


@gpu(quotient)
def _(a, b):
    return lambda a, b: types.int64(_divide(a, b))


@gpu_function
def row_major(tile: int, n_m: int, n_n: int) -> tuple[int, int]:
    """-> (m, n), the `tile`-th of n_m by n_n tiles, row after row."""
    m = quotient(tile, n_n)
    return m, tile - m * n_n


@gpu_function
def grouped(tile: int, n_m: int, n_n: int, group: int) -> tuple[int, int]:
    """-> (m, n), the `tile`-th of n_m by n_n tiles: `group` rows (the last group may have fewer), column
    after column, then the next rows.

    About as many rows as columns of tiles are under way then, so that both operands come from the L2 cache as
    often as they can.
    """
    first = quotient(tile, group * n_n) * group
    rows = min(group, n_m - first)
    tile -= first * n_n
    n = quotient(tile, rows)
    return first + tile - n * rows, n


@gpu_function
def rotated(m: int, n_m: int, first: int) -> int:
    """-> the `m`-th of n_m tile rows, from row `first` on, around."""
    m += first
    return m - n_m if m >= n_m else m


@gpu_function
def rank_rotated(m: int, n_m: int, rank: int, n_ranks: int, n_local: int) -> int:
    """-> the `m`-th of n_m tile rows, from those of `rank` on.

    n_ranks   each has n_m / n_ranks rows, in the order of ranks; where that is no whole number, a row belongs
              to the rank in whose part it ends
    n_local   ranks of a node, a divisor of n_ranks; n_ranks if nodes do not matter: then this is
              ``(m + rank * rows_per_rank) % n_m``. Otherwise the rows of the rank's own node come
              first, from its own rows on and around. Those of the next node follow, from the rows of the
              rank at the same position in that node on
    """
    return _two_levels(m, n_m, rank, n_ranks, n_local, 0)


@gpu_function
def reduce_scatter(m: int, n_m: int, rank: int, n_ranks: int, n_local: int) -> int:
    """-> the `m`-th of n_m tile rows: those of the next rank first, those of `rank` last.

    n_ranks, n_local   as of ``rank_rotated``. With several nodes the next node's rows come first, and those
                       of the rank's own node last. In each node the rows of the rank at the same position
                       come last, and those of the rank after it first
    """
    return _two_levels(m, n_m, rank, n_ranks, n_local, 1)


@gpu_function
def _two_levels(m, n_m, rank, n_ranks, n_local, ahead):
    """Nodes from the one `ahead` of the rank's own on; in each the ranks from `ahead` of its position on."""
    mine = quotient(rank, n_local)
    local = rank - mine * n_local + ahead
    if local == n_local:
        local = 0
    m = rotated(m, n_m, _first_row(min((mine + ahead) * n_local, n_ranks), n_m, n_ranks))
    node = quotient(quotient(m * n_ranks, n_m), n_local)
    begin = _first_row(node * n_local, n_m, n_ranks)
    end = _first_row((node + 1) * n_local, n_m, n_ranks)
    first = _first_row(node * n_local + local, n_m, n_ranks)
    return begin + rotated(m - begin, end - begin, first - begin)


@gpu_function
def _first_row(rank, n_m, n_ranks):
    """The first of a rank's tile rows."""
    return quotient(rank * n_m + n_ranks - 1, n_ranks)


def order_of(swizzle: Callable[[int], tuple[int, int]], n_m: int, n_n: int) -> np.ndarray:
    """On the host: when each tile's turn is, as an array (n_m, n_n) of numbers from 0 on, to be looked at.

    swizzle   a function of the position in the order -> (m, n), such as
              ``lambda tile: grouped(tile, n_m, n_n, 8)``
    """
    turns = np.full((n_m, n_n), -1)
    for tile in range(n_m * n_n):
        turns[swizzle(tile)] = tile
    return turns
