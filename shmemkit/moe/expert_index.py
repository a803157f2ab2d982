"""Which rows go to which expert: the pairs of a token and one of its experts, sorted by expert, and in each
expert by the rank that has the token. One block makes it, on the GPU, from the numbers of the experts alone.

Pair      t * topk + j: token t, and expert topk_ids[t, j]. A number that is no expert's stands for none
Source    the rank that has the token's row, counted from this rank on: 0 is this rank, 1 the next one, ..
Pairs     pairs[i]: the i-th pair in the order of (expert, source); counts[e]: how many expert e has
Tiles     up to `tile_m` pairs of one expert, which follow each other in `pairs`. They are sorted by (last
          source, expert): so those of this rank's tokens come first, and others in the order in which rows
          of other ranks arrive. A tile is one integer; `row_of`, `rows_in`, `source_of`, `expert_of` take it
          apart

  the block:      1. count the pairs of each bin, (expert, source)
  its first warp: 2. bins[b] = how many pairs there are in the bins before: prefix sums
                  3. write the tiles. Expert e's tiles whose last row is of source s or before it are
                     complete when all rows up to s are there: rows / tile_m of them, rounded down, or up if
                     no rows follow
  the block:      4. place each pair at bins[b], and add one to that

Atomic additions in step 4 order the pairs of a bin differently in each run. Results do not depend on it: each
row is multiplied by itself.

The machine code must keep (docs/machine_code.md): whole warp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, int64, types

from shmemkit.device.swizzle import quotient
from shmemkit.gemm.epilogue import inline
from shmemkit.gemm.grouped.expert_tiles import ALL, MAX_EXPERTS, sums_up_to
from shmemkit.gemm.grouped.sm90 import FEW
from shmemkit.operations.operation import Declared, Given, nothing
from shmemkit.operations.plans import plans_of
from shmemkit.runtime.launch import bind
from shmemkit.runtime.world import World, check_world
from shmemkit.support.arrays import as_array
from shmemkit.support.settings import array_text, integer
from shmemkit.typing import AnyArray, AnyStream

MAX_BINS = 1 << 15  # experts times ranks: what shared memory holds
MAX_PAIRS = (1 << 31) - 1


# ---- a tile: row_of and expert_of are those of ``expert_tiles.py``


@inline
def rows_in(tile):
    """How many pairs it has."""
    return tile >> 32 & 0xFF


@inline
def source_of(tile):
    """Its last source."""
    return tile >> 40 & 0xFF


# ---- the kernel


@inline
def bin_of(p, ids, n_experts, topk, rows, n_sources, me):
    """The bin of pair p; -1 if it has no expert, or if there is no such pair."""
    if p >= ids.size:
        return int64(-1)
    expert = int64(ids[p])
    if expert < 0 or expert >= n_experts:
        return int64(-1)
    source = quotient(quotient(p, topk), rows) - me
    if source < 0:
        source += n_sources
    return expert * n_sources + source


@inline
def count(bins, b):
    if b >= 0:
        cuda.atomic.add(bins, b, 1)


@inline
def place(pairs, bins, b, p):
    if b >= 0:
        pairs[cuda.atomic.add(bins, b, 1)] = p


@inline
def complete(rows, of_expert, tile_m):
    """Tiles of an expert whose first `rows` rows are there."""
    return quotient(rows + tile_m - 1 if rows == of_expert else rows, tile_m)


@cuda.jit
def index_experts(ids, n_experts, topk, n_sources, me, tile_m, pairs, counts, tiles, sizes):
    """ids     int32 or int64: topk_ids, 1-D; its tokens are those of n_sources ranks, as many of each
    me      this rank
    pairs   int32, as many as ids; counts: int32 (n_experts,); tiles: int64; sizes: int32 (2,), of
            tiles, and of pairs that have an expert
    grid    one block, of a multiple of 32 threads; shared: int32 (n_experts * n_sources + 1,)
    """
    bins = cuda.shared.array(0, types.int32)
    thread, threads, n_bins = int64(cuda.threadIdx.x), int64(cuda.blockDim.x), n_experts * n_sources
    rows = quotient(quotient(ids.size, topk), n_sources)
    b = thread
    while b <= n_bins:
        bins[b] = 0
        b += threads
    cuda.syncthreads()
    p = thread
    while p < ids.size:  # 1, of four pairs at once: their loads take long
        b0 = bin_of(p, ids, n_experts, topk, rows, n_sources, me)
        b1 = bin_of(p + threads, ids, n_experts, topk, rows, n_sources, me)
        b2 = bin_of(p + 2 * threads, ids, n_experts, topk, rows, n_sources, me)
        b3 = bin_of(p + 3 * threads, ids, n_experts, topk, rows, n_sources, me)
        count(bins, b0)
        count(bins, b1)
        count(bins, b2)
        count(bins, b3)
        p += 4 * threads
    cuda.syncthreads()
    if thread < 32:
        total, first = int64(0), int64(0)
        while first < n_bins:  # 2
            b, here = first + thread, int64(0)
            if b < n_bins:
                here = int64(bins[b])
            until = total + sums_up_to(here, thread)
            if b < n_bins:
                bins[b] = until - here
            total = cuda.shfl_sync(ALL, until, 31)
            first += 32
        if thread == 0:
            bins[n_bins] = total
            sizes[1] = total
        cuda.syncwarp()
        total, first = int64(0), int64(0)
        while first < n_bins:  # 3
            i, begin, end, start, stop = first + thread, int64(0), int64(0), int64(0), int64(0)
            source = quotient(i, n_experts)
            expert = i - source * n_experts
            if i < n_bins:
                b = expert * n_sources + source
                start = int64(bins[expert * n_sources])
                stop = int64(bins[(expert + 1) * n_sources])
                begin = complete(bins[b] - start, stop - start, tile_m)
                end = complete(bins[b + 1] - start, stop - start, tile_m)
                if source == 0:
                    begin = int64(0)
                    counts[expert] = stop - start
            until = total + sums_up_to(end - begin, thread)
            at = until - end
            while begin < end:
                row = start + begin * tile_m
                coded = expert << 48 | source << 40 | min(stop - row, tile_m) << 32 | row
                tiles[at + begin] = coded
                begin += 1
            total = cuda.shfl_sync(ALL, until, 31)
            first += 32
        if thread == 0:
            sizes[0] = total
    cuda.syncthreads()
    p = thread
    while p < ids.size:  # 4
        b0 = bin_of(p, ids, n_experts, topk, rows, n_sources, me)
        b1 = bin_of(p + threads, ids, n_experts, topk, rows, n_sources, me)
        b2 = bin_of(p + 2 * threads, ids, n_experts, topk, rows, n_sources, me)
        b3 = bin_of(p + 3 * threads, ids, n_experts, topk, rows, n_sources, me)
        place(pairs, bins, b0, p)
        place(pairs, bins, b1, p + threads)
        place(pairs, bins, b2, p + 2 * threads)
        place(pairs, bins, b3, p + 3 * threads)
        p += 4 * threads


# ---- the host object


class Update(Declared):
    """What makes an ExpertIndex from its topk_ids, by ``make(stream)``."""

    ARRAYS = {"topk_ids": Given(dtype=None, align=0)}

    def __init__(self, world, make):
        self.world, self._who, self.make, self._plans = world, "ExpertIndex", make, plans_of(world)

    def _check_alive(self):
        check_world(self._who, self.world)

    def _bind(self, topk_ids):
        return self.make


class ExpertIndex:
    """Which rows go to which expert, sorted, for products of several layers with one routing.

        index = sk.ExpertIndex(world, topk_ids, n_experts)
        index.update()                       # after topk_ids was written
        h = first(x, w1, index)              # an AllGatherGroupedGemm
        y = second(h, w2, index, weights)    # a GroupedGemmReduceScatter

    A product that gets `topk_ids` itself makes an index in each call. An index is empty before its first
    ``update``, and no product takes it.

    world      the World
    topk_ids   int32 or int64 (M, topk), C-contiguous, on the GPU, the same on all ranks: the experts of each
               token. Rank r has tokens r * M / n_ranks and those after it. A number that is no expert's, such
               as -1, stands for none
    n_experts  1 to 32768 / n_ranks
    """

    def __init__(self, world: World, topk_ids: AnyArray, n_experts: int):
        check_world("ExpertIndex", world)
        who, self.world, self.topk_ids = "ExpertIndex", world, topk_ids
        self._ids = as_array(who, "topk_ids", topk_ids, world.xp)
        self.n_experts, n_ranks = integer(who, "n_experts", n_experts, 1), world.n_ranks
        check_ids(who, self._ids, n_ranks)
        if self.n_experts * n_ranks > min(MAX_BINS, MAX_EXPERTS):
            raise ValueError(
                f"{who}: n_experts is {n_experts}, on {n_ranks} rank{'s' * (n_ranks > 1)}; it must be "
                f"{MAX_BINS // n_ranks} at most"
            )
        self.tokens, self.topk = self._ids.shape
        self.ids = self._ids.reshape(-1)
        n_pairs, xp = self._ids.size, world.xp
        self.tile_m = 64 if n_pairs <= FEW * self.n_experts else 128
        self.max_tiles = min(n_pairs, n_pairs // self.tile_m + self.n_experts)
        self.pairs, self.counts = xp.empty(n_pairs, "int32"), xp.zeros(self.n_experts, "int32")
        self.tiles, self.sizes = xp.empty(self.max_tiles, "int64"), xp.zeros(2, "int32")
        self._make: Any = nothing
        self._updated = not n_pairs
        if n_pairs:
            n_bins = self.n_experts * n_ranks
            args = self.ids, self.n_experts, self.topk, n_ranks, world.rank, self.tile_m
            threads = 1024 if xp.ndarray is not np.ndarray else 64
            args = *args, self.pairs, self.counts, self.tiles, self.sizes
            self._make = bind(index_experts, 1, threads, args, shared=4 * (n_bins + 1))
        self._update = Update(world, self._make)

    def update(self, *, stream: AnyStream | None = None) -> None:
        """Enqueue: make it from what topk_ids holds then. Products whose calls follow on the stream use it.

        stream  default: PyTorch's current one if topk_ids is a tensor on a GPU, else the World's
        """
        self._update._enqueue({"topk_ids": self.topk_ids}, stream)
        self._updated = True

    def _enqueue(self, stream):
        self._updated = True
        self._make(stream)


def index_of(who, world, topk_ids, n_experts):
    """-> an ExpertIndex that was given instead of topk_ids, or a new one; and the steps that make it"""
    if not isinstance(topk_ids, ExpertIndex):
        index = ExpertIndex(world, topk_ids, n_experts)
        return index, [index._enqueue]
    if topk_ids.world is not world or topk_ids.n_experts != n_experts:
        raise ValueError(
            f"{who}: the ExpertIndex is of {topk_ids.n_experts} experts; it must be of {n_experts}, those of "
            "w, and of the same World"
        )
    if not topk_ids._updated:
        raise ValueError(f"{who}: the ExpertIndex is empty; call its update() first")
    return topk_ids, []


def check_ids(who, ids, n_ranks):
    if ids.ndim != 2 or ids.dtype.name not in ("int32", "int64") or not ids.flags.c_contiguous:
        raise ValueError(
            f"{who}: topk_ids is {array_text(ids)}; it must be int32 or int64 (M, topk), C-contiguous"
        )
    if not ids.shape[1] or ids.size > MAX_PAIRS or ids.shape[0] % n_ranks:
        raise ValueError(
            f"{who}: topk_ids is {ids.shape}; M must be a multiple of the number of ranks, {n_ranks}, and "
            "topk 1 or more, with less than 2**31 elements"
        )


GPU_KERNELS = {f"index_experts[{kind}]": (index_experts, {"ids": kind}) for kind in ("int32", "int64")}
