"""Grouped product, sum over the experts of a token, and reduce-scatter: the second layer of a tensor-parallel
mixture of experts.

    second = sk.GroupedGemmReduceScatter(world, max_tokens=8192, topk=4, max_n=8192)
    out = second(x, w, topk_ids, weights)       # rank r: tokens r * M / n_ranks .. of the sum of all ranks

Methods:

  gathered    a product that loads and stores rows where they are (``gathered_rows.py``); then a kernel that
              adds them up and sends the sums (``weighted_rows.py``). Hopper, one node
  sequential  sorted rows, ``GroupedGemm``, rows that are put back, sums, ``ReduceScatter``

Rows that are sorted by expert mix the tokens of all ranks, so the tokens of one rank are ready only at the
end of the product. Chunks of columns are ready earlier. But the few multiprocessors that a product can spare
add up the rows of all experts too slowly.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda, float32, int64

from shmemkit.collectives.reduce_scatter import ReduceScatter
from shmemkit.device.cuda.float_storage import element
from shmemkit.gemm import gpu_of
from shmemkit.gemm.distributed import multiprocessors_of_all
from shmemkit.gemm.problem import HALVES
from shmemkit.operations.operation import Given
from shmemkit.runtime.launch import bind
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World
from shmemkit.support.settings import integer, one_of
from shmemkit.typing import AnyArray, AnyStream, Array, ArrayT, DType, GroupedGemmReduceScatterMethod, Shape

from .expert_index import ExpertIndex
from .expert_layer import ExpertLayer
from .gathered_rows import bind_gathered, check_columns, flat
from .moved_rows import moved_product, threads_of
from .weighted_rows import CHUNKS, SumRows, pitch_of

__all__ = ["GroupedGemmReduceScatter"]


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


# ---- the host object


class GroupedGemmReduceScatter(ExpertLayer):
    """Multiply rows by the weights of their experts, add up those of a token, and sum them over the ranks;
    each rank gets its tokens' sums. Collective.

    ``second = sk.GroupedGemmReduceScatter(world, max_tokens, topk, max_n)``, then ``second(x, w, topk_ids,
    weights)``. Each rank multiplies its slice of K. The host reads no number of rows, and never waits.
    ``help(sk.collectives)`` has the rules for calls, arrays, streams, order, graphs, memory and errors.

    world              the World
    max_tokens, topk   the most tokens, of all ranks, and experts of a token
    max_n              columns of the largest result
    dtype              of x, w and the result: bfloat16 or float16
    method             "auto", the first of these that can compute a call, or
                         gathered    a product that loads and stores rows where they are, and a kernel that
                                     adds them up and sends the sums: Hopper, one node; K and N are multiples
                                     of 8
                         sequential  `grouped_matmul` of rows that are copied to their experts first, sums,
                                     `ReduceScatter`: everywhere
    options            numbers of "gathered", for tuning; None: those that are chosen. All ranks give the same
                         columns  of a tile: a multiple of 16 up to 256
                         chunks   of columns, 1 to 8, that travel while the next are added up
    sms                the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned

    Products are rounded to dtype. The weighted sum of a token's products is added up in float32, in the order
    of j, and rounded; the sums of the ranks are added up in float32, in the order of the ranks, and rounded.
    Equal calls give equal bits.

    `used` is the method's name; `refused` is {method: the reason why it cannot be used here}.
    """

    methods = "gathered", "sequential"
    options: dict[str, Any] = {"columns": None, "chunks": None}
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

    def _prepare(self, name):
        world, largest = self.world, self.max_tokens * self.max_n
        self._gpu, pitch = gpu_of(world).limited(self.sms), pitch_of(self.max_n)
        if name == "gathered":
            most = multiprocessors_of_all(world, "gathered", sms=self.sms)
            self._gpu = self._gpu._replace(multiprocessors=most)
            self._sum = self._part(SumRows, world, self.max_tokens, self.max_n)
            self._none = world.xp.zeros(1, "uint64")
        else:
            self._scatter = self._part(ReduceScatter, world, largest * 2)
            self._sums = self._scatter.output(largest, self.dtype)
        self._y = world.xp.empty(self.max_tokens * self.topk * pitch, self.dtype)

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
        w         (E, N, K): this rank's part of each expert's weight. "gathered" wants experts that lie one
                  after another, with contiguous rows; or contiguous columns, where K is a multiple of 64
        topk_ids  int32 or int64 (M, topk), C-contiguous, on the GPU, the same on all ranks: the experts of
                  each token; or an `ExpertIndex` of it. -1, and any number that is no expert's, stands for
                  none: nothing is added, whatever x and weights have there
        weights   float32 (M, topk), C-contiguous, the same on all ranks
        out       (M / n_ranks, N), C-contiguous, apart from all others. Default: a new array of x's kind
        stream    default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        x, w and out are of this object's dtype, and begin at multiples of 16 bytes for "gathered"; K, N, E
        and M are the same on all ranks. When the stream has run it, later work on it sees out, and all others
        may be written again. The first call for arrays at new addresses binds kernels, and may compile them:
        it cannot be in the capture of a graph. The caller keeps the arrays and this object alive until the
        call has run, and as long as graphs that have captured it are used.

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
        world, gpu, (n_pairs, k), (_, n, _) = self.world, self._gpu, x.shape, w.shape
        sequential = self._is_sequential(k, n, w, x=x, out=out)
        pitch = n if self.used == "sequential" else pitch_of(n)
        rows = self._y[: n_pairs * pitch]
        y = rows.reshape(n_pairs, pitch)[:, :n]
        if sequential:
            product = moved_product(world, gpu, index, 1, x, w, y)
        else:
            sources = (0, n_pairs), flat(x), 1, self._none, 0, 1
            columns = self.options["columns"]
            product = (bind_gathered(x, w, y, index, gpu.multiprocessors, columns, sources),)
        if self.used == "gathered":
            return [*steps, *product, self._sum.bind(rows, weights, index, out, self.options["chunks"])]
        sums = self._sums[: index.tokens * n].reshape(index.tokens, n)
        arguments = sums.view("uint16"), y.view("uint16"), weights.reshape(-1), index.ids
        blocks = gpu.blocks(min(index.tokens, 8 * gpu.multiprocessors))
        arguments = *arguments, index.n_experts, index.topk
        add = bind(sum_kernel(out.dtype.name), blocks, threads_of(world), arguments)

        def scatter(stream):
            self._scatter(sums, out, stream=stream)

        return [*steps, *product, add, scatter]

    def output(self, shape: Shape, dtype: DType | None = None) -> Array:
        """-> a symmetric array for a result, of this shape on all ranks, and of this object's dtype.
        ``free`` frees it. Collective.
        """
        return super().output(shape, self.dtype if dtype is None else dtype)


GPU_KERNELS = {
    f"sum_experts[{dtype},{ids}]": (sum_kernel(dtype), {"ids": ids})
    for dtype in HALVES
    for ids in ("int32", "int64")
}
