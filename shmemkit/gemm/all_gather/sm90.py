"""The Hopper GEMM after an all-gather by copy engines. It begins with the rows that are here, and waits for
the others in the order in which they come.

    out[M, N] = activation(A[M, K] @ B[N, K].T + bias[N]),    A: the x of rank 0, of rank 1, ..

Copies     ``collectives.all_gather.copy_engine`` copies segment k of A, the x of rank k, and then sets
           arrived[k]: for k = me + 1, me + 2, .. modulo the ranks. It takes no multiprocessor and, but for a
           barrier before the GEMM, no kernel, so the GEMM may take all of them and wait. (In ``push.py`` a
           segment comes in parts, each with signals: there, read "part" for "segment"; several may be the
           rank's own)
Tiles      in the order of ``rank_rotated``: those of the rank's own rows first, then those of rank me + 1,
           ..; a few rows of tiles at a time, column after column. So a segment is needed when all tiles
           before it have been started
Own rows   are read straight from x, by a tensor map of its own, where no tile has rows of two ranks and the
           TMA takes x: nothing is copied before the GEMM begins. Otherwise they are copied to A first
Come       come, in each block: how many segments, in that order, it knows to be there; the own one is first

  loader, one thread of a block, for each tile:
          1. while a segment that it has rows of, or one before that, is not known to be there: wait for
             arrived[k]                          acquire, sys: sees the copy
          2. fence between proxies: the loads of the TMA see it, too
          3. load A and B, slab by slab

The rest is ``shmemkit.gemm.sm90``. For products of few tiles, A comes by columns: then the hooks of
``column_hooks.py`` replace steps 1 and 2.

No race: only the loader reads A and x, and it has waited. No deadlock: a loader waits for copies only, and
those do not wait for a running GEMM (see there).
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, types

from shmemkit.device.cuda.subarrays import span
from shmemkit.device.cuda.tma import fence_proxy_async_global, tensormap_acquire
from shmemkit.device.shmem.signals import wait
from shmemkit.device.swizzle import grouped, quotient, rank_rotated

from ..epilogue import inline
from ..sm90 import Kinds, Tile, gemm_body, nothing, table_entry
from . import column_hooks


class Coming(NamedTuple):
    """`extra` of the functions for the GEMM: `come`, in shared memory; `number`, what a signal is, or more,
    when what it stands for is there; all else as the kernel's, or that of ``push.py``."""

    arrived: Any
    signals: Any
    size_m: Any
    rows: Any
    me: Any
    slabs: Any
    n_parts: Any
    map_x: Any
    from_x: Any
    come: Any
    number: Any
    together: Any
    senders: Any


@functools.cache
def mine_first(group):
    """-> ``order`` of ``gemm_body``: the tiles of the own rows first, those of the next rank's then."""

    @inline
    def order(tile, n_m, n_n, extra):
        m, n = grouped(tile, n_m, n_n, group)
        return rank_rotated(m, n_m, extra.me, extra.n_parts, extra.n_parts), n

    return order


@functools.cache
def waiting(tile_m):
    """-> ``before_loads`` of ``gemm_body``: until the parts are here that a tile has rows of."""

    @inline
    def before_loads(m, n, extra):
        rows, me, n_parts = extra.rows, extra.me, extra.n_parts
        first, last = quotient(m, rows), quotient(min(m + tile_m, extra.size_m) - 1, rows)
        wanted = last - me  # counted from the own one on
        if wanted < 0:
            wanted += n_parts
        if first < me and me <= last:
            wanted = n_parts - 1
        known = extra.come[0]
        if known <= wanted:
            while known <= wanted:
                k = me + known
                if k >= n_parts:
                    k -= n_parts
                arrived = span(extra.arrived, k * extra.signals, extra.signals)
                wait(arrived, extra.signals, "sys", "acquire", extra.number)  # 1
                known += 1
            fence_proxy_async_global()  # 2
            extra.come[0] = known

    return before_loads


@inline
def mine_from_x(m, map_a, extra):
    """``a_at`` of ``gemm_body``."""
    begin, end = extra.from_x
    if m >= begin and m < end:
        return extra.map_x, m - begin
    return map_a, m


def hooks_of(tile, by_columns):
    """-> those of ``gemm_body`` where it waits for rows, or columns."""
    if by_columns:
        return {"before_loads": column_hooks.none_known, "before_slab": column_hooks.waiting(tile.m)}
    return {"before_loads": waiting(tile.m), "before_slab": nothing}


@functools.cache
def ag_gemm_kernel(tile, kinds, by_columns=False):
    """-> the kernel for tiles like `tile` of products like `kinds`, whose A comes by rows or by columns."""
    hooks = hooks_of(tile, by_columns)
    gemm = gemm_body(tile, kinds, mine_first(tile.group), a_at=mine_from_x, **hooks)

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def ag_gemm_sm90(operands, size, split, map_x, arrived, signals, rows, me, slabs, n_ranks, from_x):
        """As of ``gemm_kernel``, of an A whose rows, or columns, come meanwhile, and

        map_x     the tensor map of the own rows; its box is that of map_a
        arrived   uint64 (n_ranks * signals,). By rows: that at k is 1 when rank k's rows of A are there,
                  k * rows to (k + 1) * rows - 1. By columns: that at k * signals + i, when part i of their
                  columns is. The own ones always are
        signals   of a rank: by rows 1
        rows      of a rank: m / n_ranks
        me        this rank, of n_ranks
        slabs     of a part of the columns, which begins with slab i * slabs
        from_x    int64 (begin, end): the rows that are read from x; (0, 0) if none is
        """
        come = cuda.shared.array(1, types.int64)
        if cuda.threadIdx.x == 0:  # the loader
            come[0] = 1  # the own one
            tensormap_acquire(map_x)
        coming = Coming(arrived, signals, size[0], rows, me, slabs, n_ranks, map_x, from_x, come, 1, False, 0)
        gemm(operands, size, split, coming)

    return ag_gemm_sm90


def _listed(by_columns, tile, *kinds):
    kinds = Kinds(*kinds)
    return table_entry(ag_gemm_kernel(Tile(*tile), kinds, by_columns), kinds)


MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": _listed(False, (128, 256), "bfloat16", "k", "k", "bfloat16"),
    "128x224 mn": _listed(False, (128, 224), "bfloat16", "k", "mn", "float16", "float32", "silu"),
    "128x128 split": _listed(False, (128, 128, 8, True), "float16", "k", "k", "float32"),
    "64x64": _listed(False, (64, 64), "bfloat16", "k", "k", "bfloat16", "bfloat16", "gelu"),
    "128x224 columns": _listed(True, (128, 224), "bfloat16", "k", "k", "bfloat16"),
    "64x64 columns": _listed(True, (64, 64), "bfloat16", "k", "k", "bfloat16", "bfloat16", "silu"),
}
