"""The Hopper GEMM behind an all-gather by copy engines: it begins with the rows that are here, and waits for
the others in the order in which they come.

    out[M, N] = activation(A[M, K] @ B[N, K].T + bias[N]),    A: the x of rank 0, of rank 1, ..

Copies     ``shmemkit.kernels.all_gather.copy_engine`` brings segment k of A, the x of rank k, and then sets
           arrived[k]: for k = me + 1, me + 2, .. modulo the ranks. It takes no multiprocessor and no kernel,
           so the GEMM may take all of them and wait. A segment may come in parts, with a signal each: then
           what is said here of segments and ranks holds for parts, of which several are mine
Tiles      in the order of ``rank_rotated``: those of my own rows first, then those of rank me + 1, ..; a few
           rows of tiles at a time, column after column. So a segment is wanted when all tiles before it are
           under way
My rows    are read straight from x, by a tensor map of its own, where no tile has rows of two ranks: nothing
           is copied before the GEMM begins. Elsewhere they are copied to A first
Come       come, in each block: so many segments, in that order, it knows to be there; mine is the first

  loader, one thread of a block, for each tile:
          1. while a segment that it has rows of, or one before that, is not known to be there: wait for
             arrived[k]                          acquire, sys: sees the copy
          2. fence between proxies: the loads of the TMA see it, too
          3. load A and B, slab by slab

The rest is ``shmemkit.kernels.gemm.sm90``. The blocks of a cluster, one below the other, may lie in several
segments: each waits for those of its own tile, and loads its own tile of A; of B's, each loads a part for
all, so that all get as far as the last of them. Side by side they load parts of the same tile of A, and wait
for the same segments.

No race: the loader alone reads A and x, and has waited. No deadlock: a loader waits for copies alone, and
those for nothing that a GEMM under way does (see there).
"""

import functools

from numba import cuda, types

from shmemkit.device.signals import wait
from shmemkit.device.swizzle import grouped, quotient, rank_rotated
from shmemkit.device.tma import fence_proxy_async_global, tensormap_acquire
from shmemkit.kernels.gemm.epilogue import inline
from shmemkit.kernels.gemm.sm90 import (
    Kinds,
    Tile,
    gemm_body,
)


@functools.cache
def mine_first(group):
    """-> ``order`` of ``gemm_body``: the tiles of my rows first, those of the rank after me next."""

    @inline
    def order(tile, n_m, n_n, extra):
        me, n_parts = extra[4], extra[5]
        m, n = grouped(tile, n_m, n_n, group)
        return rank_rotated(m, n_m, me, n_parts, n_parts), n

    return order


@functools.cache
def waiting(tile_m):
    """-> ``before_loads`` of ``gemm_body``: until the parts are here that a tile has rows of."""

    @inline
    def before_loads(m, n, extra):
        arrived, signals, size_m, rows, me, n_parts, _, _, come = extra
        if m >= size_m:  # a block of a cluster that reaches beyond the last rows
            return
        first, last = quotient(m, rows), quotient(min(m + tile_m, size_m) - 1, rows)
        wanted = last - me  # counted from mine on
        if wanted < 0:
            wanted += n_parts
        if first < me and me <= last:
            wanted = n_parts - 1
        known = come[0]
        if known <= wanted:
            while known <= wanted:
                k = me + known
                if k >= n_parts:
                    k -= n_parts
                wait(arrived[k * signals :], signals, "sys", "acquire", 1)  # 1
                known += 1
            fence_proxy_async_global()  # 2
            come[0] = known

    return before_loads


@inline
def mine_from_x(m, map_a, extra):
    """``a_at`` of ``gemm_body``."""
    map_x, (begin, end) = extra[6], extra[7]
    if m >= begin and m < end:
        return map_x, m - begin
    return map_a, m


@functools.cache
def ag_gemm_kernel(tile, kinds):
    """-> the kernel for tiles like `tile` of products like `kinds`."""
    gemm = gemm_body(tile, kinds, mine_first(tile.group), before_loads=waiting(tile.m), a_at=mine_from_x)

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def ag_gemm_sm90(
        map_x,
        map_a,
        map_b,
        map_out,
        bias,
        m,
        n,
        k,
        splits,
        partials,
        arrivals,
        arrived,
        signals,
        rows,
        me,
        mine,
        n_parts,
        from_x,
    ):
        """out = activation(A B + bias), M by N, of an A whose rows come meanwhile.

        map_x     the tensor map of my rows; its box is that of map_a
        arrived   uint64 (n_parts * signals,): those from k * signals on are 1 when part k of A is there,
                  rows k * rows to (k + 1) * rows - 1
        signals   of a part
        rows      of a part: m / n_parts
        me, mine  parts me to me + mine - 1 are mine: they are not waited for
        from_x    int64 (begin, end): the rows that are read from x; (0, 0) if none is
        others    as of ``gemm_kernel``
        """
        come = cuda.shared.array(1, types.int64)
        if cuda.threadIdx.x == 0:  # the loader
            come[0] = mine
            tensormap_acquire(map_x)
        extra = arrived, signals, m, rows, me, n_parts, map_x, from_x, come
        gemm(map_a, map_b, map_out, bias, m, n, k, splits, partials, arrivals, extra)

    return ag_gemm_sm90


def listed(kernel, tile, *kinds):
    """What GPU_KERNELS have of a kernel like ``ag_gemm_kernel``."""
    tile, kinds = Tile(*tile), Kinds(*kinds)
    words, number = types.uint64[::1], types.int64
    bias = types.uint16 if kinds.bias_dtype in ("bfloat16", "float16") else types.float32
    signature = (
        *(*(words,) * 4, bias[::1], *(number,) * 4, types.float32[::1], types.int32[::1]),
        *(words, *(number,) * 5, types.UniTuple(number, 2)),
    )
    return kernel(tile, kinds), signature, (9, 0)


MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": listed(ag_gemm_kernel, (128, 256, 2), "bfloat16", "k", "k", "bfloat16"),
    "128x224 mn": listed(ag_gemm_kernel, (128, 224, 2), "bfloat16", "k", "mn", "float16", "float32", "silu"),
    "128x128 split": listed(ag_gemm_kernel, (128, 128, 1, "m", 8, True), "float16", "k", "k", "float32"),
    "64x64": listed(ag_gemm_kernel, (64, 64, 4, "n"), "bfloat16", "k", "k", "bfloat16", "bfloat16", "gelu"),
}
