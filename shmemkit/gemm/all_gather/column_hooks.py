"""Hooks for the kernel of ``sm90.py``, for products of so few tiles that all are computed at once: x comes by
columns.

Each tile has rows of some rank, and would wait for that rank's whole segment before its first product. But it
goes through K, the columns of A, from the first to the last. So the first columns of all segments come first
(``shmemkit.collectives.all_gather.push_ahead``), and each tile begins with these.

Together   where all tiles of a product run at once, tiles of the rank's own rows would get ahead. The parts
           of B that they load would have left the L2 cache when tiles of other rows need them. So they wait,
           too, if the columns come in small parts (``push.py``)
Come       come, in each block: how many slabs of the current tile are known to be there

  loader, for each tile: come is 0, or all slabs where the tile's rows are the rank's own (but for `together`)
  and for each slab of it that is not known to be there:
          1. wait for the part of the columns that it lies in, of all segments that the tile has rows of
                                              acquire, sys: sees the copies
          2. fence between proxies: the loads of the TMA see them, too
"""

import functools

from shmemkit.device.cuda.subarrays import span
from shmemkit.device.cuda.tma import fence_proxy_async_global
from shmemkit.device.shmem.signals import wait
from shmemkit.device.swizzle import quotient

from ..epilogue import inline

ALL = 1 << 30
ROUNDS = 2  # of tiles on all multiprocessors: of products of so many, or fewer, x comes by columns


@inline
def none_known(m, n, extra):
    """``before_loads`` of ``gemm_body``."""
    begin, end = extra.from_x
    extra.come[0] = ALL if m >= begin and m < end and not extra.together else 0


@functools.cache
def waiting(tile_m):
    """-> ``before_slab`` of ``gemm_body``: until it is here."""

    @inline
    def before_slab(m, slab, extra):
        if slab >= extra.come[0]:
            part = quotient(slab, extra.slabs)
            k, last = quotient(m, extra.rows), quotient(min(m + tile_m, extra.size_m) - 1, extra.rows)
            if extra.together:
                k, last = 0, extra.n_parts - 1
            while k <= last:
                wait(span(extra.arrived, k * extra.signals + part, 1), 1, "sys", "acquire", extra.number)  # 1
                k += 1
            fence_proxy_async_global()  # 2
            extra.come[0] = (part + 1) * extra.slabs

    return before_slab
