"""As ``sm90.py``, for products of few tiles, all of which are computed at once: x comes by columns.

Each tile has rows of some rank, and would wait for all of that rank's segment before its first product. But
it goes through K, the columns of A, from the first to the last: so the first columns of all segments come
first, by copies to all ranks at once (``shmemkit.kernels.all_gather.push_ahead``), and each tile begins with
these.

Come       come, in each block: so many slabs of the tile under way are known to be there

  loader, for each tile: come is 0, or all of them where the tile's rows are mine
  and for each slab of it that is not known to be there:
          1. wait for the part of the columns that it lies in, of all segments that the tile has rows of
                                              acquire, sys: sees the copies
          2. fence between proxies: the loads of the TMA see them, too
"""

import functools

from numba import cuda, types

from shmemkit.device.signals import wait
from shmemkit.device.swizzle import quotient
from shmemkit.device.tma import fence_proxy_async_global, tensormap_acquire
from shmemkit.kernels.gemm.epilogue import inline
from shmemkit.kernels.gemm.sm90 import gemm_body

from .sm90 import listed, mine_first, mine_from_x

ALL = 1 << 30


@inline
def none_known(m, n, extra):
    """``before_loads`` of ``gemm_body``."""
    _, _, size_m, _, _, _, _, (begin, end), come, _ = extra
    come[0] = 0
    if m >= begin and m < end or m >= size_m:
        come[0] = ALL


@functools.cache
def waiting(tile_m):
    """-> ``before_slab`` of ``gemm_body``: until it is here."""

    @inline
    def before_slab(m, slab, extra):
        arrived, signals, size_m, rows, _, _, _, _, come, slabs = extra
        if slab >= come[0]:
            part = quotient(slab, slabs)
            k, last = quotient(m, rows), quotient(min(m + tile_m, size_m) - 1, rows)
            while k <= last:
                wait(arrived[k * signals + part :], 1, "sys", "acquire", 1)  # 1
                k += 1
            fence_proxy_async_global()  # 2
            come[0] = (part + 1) * slabs

    return before_slab


@functools.cache
def ag_gemm_kernel(tile, kinds):
    """-> the kernel for tiles like `tile` of products like `kinds`."""
    gemm = gemm_body(
        *(tile, kinds, mine_first(tile.group)),
        before_loads=none_known,
        before_slab=waiting(tile.m),
        a_at=mine_from_x,
    )

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def ag_gemm_by_columns(
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
        slabs,
        n_ranks,
        from_x,
    ):
        """out = activation(A B + bias), M by N, of an A whose columns come meanwhile.

        arrived   uint64 (n_ranks * signals,): that at k * signals + i is 1 when part i of rank k's columns is
                  there, which are `slabs` slabs, i * slabs and on; mine are 1
        rows      of each rank: m / n_ranks
        others    as of ``sm90.ag_gemm_kernel``
        """
        come = cuda.shared.array(1, types.int64)
        if cuda.threadIdx.x == 0:  # the loader
            tensormap_acquire(map_x)
        extra = arrived, signals, m, rows, me, n_ranks, map_x, from_x, come, slabs
        gemm(map_a, map_b, map_out, bias, m, n, k, splits, partials, arrivals, extra)

    return ag_gemm_by_columns


MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x224": listed(ag_gemm_kernel, (128, 224, 2), "bfloat16", "k", "k", "bfloat16"),
    "64x64": listed(ag_gemm_kernel, (64, 64, 4, "n"), "bfloat16", "k", "k", "bfloat16", "bfloat16", "silu"),
}
