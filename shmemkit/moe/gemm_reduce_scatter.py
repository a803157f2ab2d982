"""Grouped product, sum over the experts of a token, and reduce-scatter: the second layer of a tensor-parallel
mixture of experts.

    second = sk.GroupedGemmReduceScatter(world, max_tokens=8192, topk=4, max_n=8192)
    out = second(x, w, topk_ids, weights)       # rank r: tokens r * M / n_ranks .. of the sum of all ranks

Methods:

  fused       one kernel multiplies, and a few of its blocks add up and send the columns that are ready.
              Another one does that for the last columns, on all multiprocessors. Hopper, one node
  sequential  sorted rows, ``GroupedGemm``, rows that are put back, sums, ``ReduceScatter``

"fused": rows that are sorted by expert mix the tokens of all ranks, so the tokens of one rank are ready only
at the end. But some columns of all tokens are ready early. The product (``gathered_rows.py``) computes chunk
after chunk of columns, and stores its results, rounded, to y; ``weighted_rows.py`` has the rest.

Tiles     those of chunk 0 first, then those of chunk 1, ..
Y_full    y_full[c], local: how often a warp has stored its part of a tile of chunk c. 0 between calls

  warps that multiply, for each tile:
          1. store it to y
     and during the products of the next tile, at their end at the latest, or at the kernel's:
          2. syncwarp; one lane adds one to y_full[c]                    release, gpu
  the first blocks of the kernel:
          3. the steps of weighted_rows.py up to send(n_chunks - 1), without it
  the second kernel:
          4. the steps from there on
          5. resets y_full; the last block adds 1 to epochs: the next call begins when this one has ended

No deadlock: all blocks of a kernel are co-resident; see weighted_rows.py.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, float32, int64

from shmemkit.collectives.reduce_scatter import ReduceScatter
from shmemkit.device.cuda.float_storage import element
from shmemkit.device.shmem.ordered_access import red_release
from shmemkit.device.swizzle import grouped, quotient
from shmemkit.gemm import gpu_of
from shmemkit.gemm.distributed import multiprocessors_of_all
from shmemkit.gemm.epilogue import inline
from shmemkit.gemm.grouped.sm90 import stacked
from shmemkit.gemm.last_block import is_last_block
from shmemkit.gemm.problem import HALVES, Problem
from shmemkit.gemm.sm90 import ALONE, Kinds, Tile, table_entry
from shmemkit.gemm.sm90_host import Choice, bind_gemm
from shmemkit.operations.method import Method
from shmemkit.operations.operation import Given
from shmemkit.runtime.launch import bind
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World
from shmemkit.support.settings import integer, one_of
from shmemkit.typing import AnyArray, AnyStream, Array, ArrayT, DType, GroupedGemmReduceScatterMethod, Shape

from .expert_index import ExpertIndex
from .expert_layer import ExpertLayer
from .gathered_rows import Rows, check_columns, gathered_body, refused, tile_of
from .moved_rows import moved_product, threads_of
from .weighted_rows import CHUNKS, Sums, steps_of

__all__ = ["GroupedGemmReduceScatter"]

SENDERS = 8  # blocks that add up and send


# ---- the kernels


@functools.cache
def by_chunks(group):
    """-> ``order`` of ``gemm_body``."""

    @inline
    def order(t, n_m, n_n, extra):
        _, _, columns = extra.more
        c = quotient(t, n_m * columns)
        m, n = grouped(t - c * n_m * columns, n_m, min(columns, n_n - c * columns), group)
        return m, c * columns + n

    return order


@inline
def settle(state, lane, extra):
    """`state`: the chunk of the tile that was stored, and 1; or 0."""
    if state > 0:
        _, y_full, _ = extra.more
        cuda.syncwarp()
        if lane == 0:
            red_release(y_full, state - 1, 1, "gpu")  # 2
    return 0


@inline
def take(acc, t, ring, slot, parity, state, pieces, warp, lane, extra):
    _, _, columns = extra.more
    settle(state, lane, extra)
    return acc, True, slot, parity, quotient(t, extra.n_m * columns) + 1


@inline
def workers(extra):
    senders, _, _ = extra.more
    return int64(cuda.blockIdx.x) - senders, int64(cuda.gridDim.x) - senders


@functools.cache
def grouped_rs_kernel(tile, kinds):
    """-> the kernel for tiles like `tile` of products like `kinds`"""
    exchange = ALONE._replace(take=take, settle=settle)
    gemm = gathered_body(tile, kinds, by_chunks(tile.group), False, exchange, workers)
    run = steps_of(kinds.out_dtype)
    tile_m, tile_n, warps = tile.m, tile.n, tile.warps

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def grouped_gemm_rs(operands, size, split, index, x, n_pairs, given, epochs, senders, until):
        """As of ``gemm_kernel``, without a bias, K not split, and a map_b of w as one matrix; but m, map_a
        and map_out are not used. index: `pairs`, `tiles`, `sizes` of an ExpertIndex; x, n_pairs: as of
        ``Rows``

        given            Sums, up to the epoch
        epochs           int64 (1,), local
        senders, until   the first blocks, which do the steps up to that one
        grid             all blocks must be resident
        """
        (pairs, tiles, sizes), (_, n, k) = index, size
        n_m, n_n = int64(sizes[0]), (n + tile_n - 1) // tile_n
        sums = Sums(*(*given, epochs[0] + 1, n_m * warps))  # pyright: ignore[reportCallIssue]
        if cuda.blockIdx.x < senders:
            run(0, until, True, cuda.blockIdx.x, senders, sums)  # 3
        else:
            extra = Rows(
                *(pairs, tiles, n_m, n_n, n, k, x, (0, n_pairs), x, 1, sums.sent, sums.me, sums.n_ranks),
                *(sums.y, 2 * n, (senders, sums.y_full, sums.columns)),
            )
            gemm(operands, (n_m * tile_m, n, k), split, extra)

    return grouped_gemm_rs


@functools.cache
def last_steps_kernel(dtype):
    """-> the kernel for results of `dtype`"""
    run = steps_of(dtype)

    @cuda.jit
    def last_steps(given, epochs, ended, begin, end):
        """As of ``grouped_rs_kernel``, after it; ended: int32 (1,), 0

        grid     any number of blocks, which must be resident, and threads
        """
        epoch = epochs[0] + 1
        sums = Sums(*(*given, epoch, 0))  # pyright: ignore[reportCallIssue]
        run(begin, end, False, cuda.blockIdx.x, cuda.gridDim.x, sums)  # 4
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x < CHUNKS:
            sums.y_full[cuda.threadIdx.x] = 0  # 5
        cuda.syncthreads()
        if cuda.threadIdx.x == 0 and is_last_block(ended):  # all have read the epoch
            epochs[0] = epoch

    return last_steps


@functools.cache
def sum_kernel(dtype):
    """-> the kernel of "sequential" for results of `dtype`: sums[t] = the rows of token t in y, weighted"""
    widen, narrow = element(dtype).widen, element(dtype).narrow

    @cuda.jit
    def sum_experts(sums, y, weights, ids, n_experts, topk):
        """sums, y        uint16 (tokens, N) and (tokens * topk, N); weights, ids: 1-D, of the pairs
        grid           any number of blocks and threads
        """
        t = int64(cuda.blockIdx.x)
        while t < sums.shape[0]:
            i = int64(cuda.threadIdx.x)
            while i < sums.shape[1]:
                total, p = float32(0), t * topk
                while p < (t + 1) * topk:
                    if 0 <= ids[p] and ids[p] < n_experts:
                        total += weights[p] * widen(y[p, i])
                    p += 1
                sums[t, i] = narrow(total)
                i += cuda.blockDim.x
            t += cuda.gridDim.x

    return sum_experts


# ---- the methods


class Fused(Method):
    """The method "fused"."""

    options: dict[str, Any] = {"columns": None, "chunks": None, "senders": None}

    def prepare(self, max_tokens, topk, max_n, dtype, options):
        world, self.options = self.world, options
        world.check_reach("fused")
        self.within(2, 2)
        self.multiprocessors = multiprocessors_of_all(world, "fused", sms=self.sms)
        if self.multiprocessors < 2:
            raise ValueError("fused: the GPU has one multiprocessor; it must have 2 or more, to send by some")
        n_ranks = world.n_ranks
        self.room = -(-max_tokens // n_ranks) * max_n * 2 + 127 & -128
        self.staged = self.empty((2 * n_ranks * self.room,), "uint8", "grouped_rs.staged")
        self.full = self.zeros((n_ranks * CHUNKS,), "uint64", "grouped_rs.full")
        self.offsets = self.offsets_of(self.full, range(n_ranks))
        xp = world.xp
        self.sent, self.y_full = xp.zeros(n_ranks * CHUNKS, "int32"), xp.zeros(CHUNKS, "uint64")
        self.epochs, self.ended = xp.zeros(1, "int64"), xp.zeros(1, "int32")
        self.y = xp.empty(max_tokens * topk * max_n, dtype)

    def bind(self, x, w, weights, index, steps, out):
        world, sms = self.world, self.multiprocessors
        (n_pairs, k), (n_experts, n, _) = x.shape, w.shape
        if reason := refused(k, n, w, x=x, out=out):
            raise ValueError(f"GroupedGemmReduceScatter: {reason}. Or use method='sequential', on all ranks")
        senders = min(self.options["senders"] or max(1, min(SENDERS, sms // 8)), sms - 1)
        tile = tile_of(index, n_experts, n, sms - senders, self.options["columns"])
        y, n_n = self.y[: n_pairs * n], -(-n // tile.n)
        matrix: Any = stacked(w)
        columns = -(-n_n // (self.options["chunks"] or CHUNKS))
        n_steps = 2 * -(-n_n // columns)
        until = max(0, n_steps - 3)
        given = (
            *(y.view("uint8"), out.reshape(-1).view("uint8"), 2 * n, weights.reshape(-1), index.ids),
            *(n_experts, index.topk, out.shape[0], columns * tile.n * 2, self.y_full, columns, n_n),
            *(self.staged, self.room, self.full, self.sent, self.offsets, world.rank, world.n_ranks),
        )
        product = bind_gemm(
            grouped_rs_kernel,
            *(Problem(x, matrix.T, y.reshape(n_pairs, n), None, None), Choice(tile, 1), sms - senders),
            (index.pairs, index.tiles, index.sizes),
            *(x.reshape(-1).view("uint16"), n_pairs, given, self.epochs, senders, until),
            m=index.max_tiles * tile.m,
            n=n,
            k=k,
            n_tiles=index.max_tiles * n_n,
            beside=senders,
            co_resident=True,
            group=world,
        )
        arguments = given, self.epochs, self.ended, until, n_steps
        kernel = last_steps_kernel(out.dtype.name)
        last = bind(kernel, sms, self.threads, arguments, co_resident=True, group=world)
        return [*steps, product, last]


class Sequential:
    """The method "sequential"."""

    def __init__(self, world, max_tokens, topk, max_n, dtype, sms=None):
        self.world, self.gpu = world, gpu_of(world).limited(sms)
        self._scatter = ReduceScatter(world, max_tokens * max_n * 2, sms=sms)
        self._sums = self._scatter.output(max_tokens * max_n, dtype)
        self._y = world.xp.empty(max_tokens * topk * max_n, dtype)

    def bind(self, x, w, weights, index, steps, out):
        world, (n_pairs, n) = self.world, (x.shape[0], w.shape[1])
        y = self._y[: n_pairs * n].reshape(n_pairs, n)
        sums = self._sums[: index.tokens * n].reshape(index.tokens, n)
        arguments = sums.view("uint16"), y.view("uint16"), weights.reshape(-1), index.ids
        add = bind(
            sum_kernel(out.dtype.name),
            self.gpu.blocks(min(index.tokens, 8 * self.gpu.multiprocessors)),
            threads_of(world),
            (*arguments, index.n_experts, index.topk),
        )

        def scatter(stream):
            self._scatter(sums, out, stream=stream)

        return [*steps, *moved_product(world, self.gpu, index, 1, x, w, y), add, scatter]

    def free(self):
        self._scatter.free()


# ---- the host object


class GroupedGemmReduceScatter(ExpertLayer):
    """Multiply rows by the weights of their experts, add up those of a token, and sum them over the ranks;
    each rank gets its tokens' sums. Collective.

    ``second = sk.GroupedGemmReduceScatter(world, max_tokens, topk, max_n)``, then ``second(x, w, topk_ids,
    weights)``. Each rank multiplies its slice of K. Sums travel while the product is still running. The host
    reads no number of rows, and never waits. ``help(sk.collectives)`` has the rules for calls, arrays,
    streams, order, graphs, memory and errors.

    world              the World
    max_tokens, topk   the most tokens, of all ranks, and experts of a token
    max_n              columns of the largest result
    dtype              of x, w and the result: bfloat16 or float16
    method             "auto", for now sequential, since fused takes twice as long, or
                         fused       one kernel multiplies and sends: Hopper, one node; K and N are multiples
                                     of 8
                         sequential  `grouped_matmul` of rows that are copied to their experts first, sums,
                                     `ReduceScatter`: everywhere
    options            numbers of "fused", for tuning; None: those that are chosen. All ranks give the same
                         columns  of a tile: a multiple of 16 up to 256
                         chunks   of columns, 1 to 8, that travel while the next are computed
                         senders  blocks that send beside the product
    sms                the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned

    Products are rounded to dtype. The weighted sum of a token's products is added up in float32, in the order
    of j, and rounded; the sums of the ranks are added up in float32, in the order of the ranks, and rounded.
    Equal calls give equal bits.

    `used` is the method's name; `refused` is {method: the reason why it cannot be used here}.
    """

    METHODS = {"fused": Fused, "sequential": Sequential}
    methods = tuple(METHODS)
    # Decided by benchmarks/results/model/grouped_gemm_rs_h100x4.json
    unused = "it takes 2 to 3 times as long as 'sequential' on 4 H100"
    options = Fused.options
    ARRAYS = {
        "x": Given("pairs k", align=0),
        "w": Given("experts n k", contiguous=False, align=0),
        "topk_ids": Given("tokens of_each", dtype=None, align=0),
        "weights": Given("tokens of_each", "float32", align=0),
        "out": Given("tokens/n_ranks n", new=True, align=0),
    }
    LIMITS = {"tokens": ("max_tokens", "tokens"), "n": ("max_n", "columns")}
    ALIKE = "x", "out"
    max_tokens: int
    topk: int
    max_n: int
    dtype: np.dtype

    def __init__(
        self,
        world: World,
        max_tokens: int,
        topk: int,
        max_n: int,
        dtype: DType = "bfloat16",
        method: GroupedGemmReduceScatterMethod = "auto",
        *,
        options: dict[str, Any] | None = None,
        sms: int | None = None,
    ):
        who = "GroupedGemmReduceScatter"

        def check():
            self.dtype = as_dtype(dtype, f"{who}: ")
            one_of(who, "dtype", self.dtype.name, HALVES)
            check_columns(who, self.options["columns"])
            integer(who, "options['chunks']", self.options["chunks"] or 1, 1, CHUNKS)
            sizes = {"max_tokens": max_tokens, "topk": topk, "max_n": max_n}
            vars(self).update({name: integer(who, name, size, 1) for name, size in sizes.items()})
            return {name: getattr(self, name) for name in sizes} | {"dtype": self.dtype.name}

        super().__init__(world, method, options, check, sms)
        sizes = self.max_tokens, self.topk, self.max_n, self.dtype
        more = (self.options,) if self.used == "fused" else ()
        self._method: Any = self._part(self.METHODS[self.used], world, *sizes, *more)

    def __call__(
        self,
        x: ArrayT,
        w: AnyArray,
        topk_ids: AnyArray | ExpertIndex,
        weights: AnyArray,
        out: ArrayT | None = None,
        *,
        stream: AnyStream | None = None,
    ) -> ArrayT:
        """Enqueue ``sum over j of weights[t, j] * x[t * topk + j] @ w[topk_ids[t, j]].T``, summed over the
        ranks. -> out, the sums of this rank's tokens

        x         (M * topk, K), C-contiguous; K is the rank's share. M is a multiple of n_ranks
        w         (E, N, K): this rank's part of each expert's weight. "fused" wants experts that lie one
                  after another, with contiguous rows; or contiguous columns, where K is a multiple of 64
        topk_ids  int32 or int64 (M, topk), C-contiguous, on the GPU, the same on all ranks: the experts of
                  each token; or an `ExpertIndex` of it. -1, and any number that is no expert's, stands for
                  none: nothing is added, whatever x and weights have there
        weights   float32 (M, topk), C-contiguous, the same on all ranks
        out       (M / n_ranks, N), C-contiguous, apart from all others. Default: a new array of x's kind
        stream    default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        x, w and out are of this object's dtype, and begin at multiples of 16 bytes for "fused"; K, N, E and M
        are the same on all ranks. When the stream has run it, later work on it sees out, and all others may
        be written again. The first call for arrays at new addresses binds kernels, and may compile them: it
        cannot be in the capture of a graph. The caller keeps the arrays and this object alive until the call
        has run, and as long as graphs that have captured it are used.

        TypeError or ValueError for what this rank can see to be wrong; then nothing is enqueued.
        """
        operands = {"x": x, "w": w, "topk_ids": topk_ids, "weights": weights}
        return self._multiply(operands, out, stream)

    # -- inside
    def _check(self, arrays):
        sizes = super()._check(arrays)
        shape, pairs = arrays["topk_ids"].shape, len(arrays["x"])
        if pairs != shape[0] * shape[1] or shape[1] > self.topk:
            raise ValueError(
                f"{self._who}: x has {pairs} rows, and topk_ids is {shape}; x must have a row for each "
                f"expert of each token, and topk_ids at most {self.topk} columns, topk of this object"
            )
        return sizes

    def _steps(self, arrays, index, steps):
        x, w, _, weights, out = arrays.values()
        return self._method.bind(x, w, weights, index, steps, out)

    def output(self, shape: Shape, dtype: DType | None = None) -> Array:
        """-> a symmetric array for a result, of this shape on all ranks, and of this object's dtype.
        ``free`` frees it. Collective.
        """
        return super().output(shape, self.dtype if dtype is None else dtype)


def _listed(tile, *kinds):
    kinds = Kinds(*kinds)
    return *table_entry(grouped_rs_kernel(Tile(*tile), kinds), kinds), (9, 0)


_BF16 = "bfloat16", "k", "k", "bfloat16"
GPU_KERNELS = {
    "128x256": _listed((128, 256), *_BF16),
    "128x256 columns": _listed((128, 256), "float16", "k", "mn", "float16"),
    "128x224": _listed((128, 224), *_BF16),
    "64x128": _listed((64, 128), *_BF16),
    **{f"last_steps {dtype}": last_steps_kernel(dtype) for dtype in HALVES},
    **{
        f"sum_experts[{dtype},{ids}]": (sum_kernel(dtype), {"ids": ids})
        for dtype in HALVES
        for ids in ("int32", "int64")
    },
}
