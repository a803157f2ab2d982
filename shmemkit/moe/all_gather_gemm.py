"""All-gather and grouped product: each rank multiplies the tokens of all ranks by its part of the weights of
their experts, as in the first layer of a tensor-parallel mixture of experts.

    first = sk.AllGatherGroupedGemm(world, max_nbytes)        # of the gathered tokens
    y = first(x, w, topk_ids)                                 # y[t * topk + j]: token t, by expert j of it

Methods:

  overlap     the copy engines bring the tokens of other ranks, one block makes the ExpertIndex meanwhile, and
              one kernel multiplies what has come: gathered_rows.py. Hopper, one node
  sequential  ``AllGather``, an ExpertIndex, rows that are sorted, ``GroupedGemm``, rows that are put back

The kernel of "overlap", beside gathered_rows.py:

Gathered  the rows of all ranks, by rank. Copy engines write those of the others, and then arrived[k]
          (``collectives.all_gather.push_ahead``). A rank's own rows are read from x
Tiles     in the order of the ExpertIndex, a few rows of them at a time, column after column: those of this
          rank's tokens first. A tile waits for the ranks whose rows it has
End       a block that has no more tiles waits for all ranks: so signals of a call are not left to the next
"""

from __future__ import annotations

import functools
from typing import Any

from shmemkit.collectives.all_gather import AllGather
from shmemkit.collectives.all_gather.push_ahead import PushAhead
from shmemkit.gemm import gpu_of
from shmemkit.gemm.distributed import multiprocessors_of_all
from shmemkit.gemm.problem import HALVES
from shmemkit.operations.operation import Given
from shmemkit.runtime.world import World
from shmemkit.support.settings import integer, listed
from shmemkit.typing import AllGatherGroupedGemmMethod, AnyArray, AnyStream, ArrayT

from .expert_index import ExpertIndex
from .expert_layer import ExpertLayer
from .gathered_rows import bind_gathered, check_columns, flat
from .moved_rows import moved_product

__all__ = ["AllGatherGroupedGemm"]


# ---- the host object


class AllGatherGroupedGemm(ExpertLayer):
    """Gather the tokens of all ranks, and multiply each by the weights of its experts. Collective.

    ``first = sk.AllGatherGroupedGemm(world, max_nbytes)``, then ``first(x, w, topk_ids)``. The products of
    this rank's tokens are computed while the others arrive. The host reads no number of rows, and never
    waits. ``help(sk.collectives)`` has the rules for calls, arrays, streams, order, graphs, memory and
    errors.

    world       the World
    max_nbytes  bytes of the largest gathered tokens: n_ranks times an x
    method      "auto", the first of these that can compute a call; or
                  overlap     copy engines send the tokens, one kernel multiplies: Hopper, one node; K and N
                              are multiples of 8
                  sequential  `AllGather`, then `grouped_matmul` of rows that are copied to their experts
                              first: everywhere
    options     {"columns": of a tile, a multiple of 16 up to 256}: for tuning, of "overlap"; the same on all
                ranks. None: it is chosen
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned

    `used` is the method's name; `refused` is {method: the reason why it cannot be used here}.
    """

    methods = ("overlap", "sequential")
    options: dict[str, Any] = {"columns": None}
    ARRAYS = {
        "x": Given("m k", dtype=None, align=0),
        "w": Given("experts n k", "x", contiguous=False, align=0),
        "topk_ids": Given("n_ranks*m topk", dtype=None, align=0),
        "out": Given("n_ranks*m*topk n", "x", align=0, new=True),
    }
    max_nbytes: int

    def __init__(
        self,
        world: World,
        max_nbytes: int,
        method: AllGatherGroupedGemmMethod = "auto",
        *,
        options: dict[str, Any] | None = None,
        sms: int | None = None,
    ):
        def check():
            check_columns("AllGatherGroupedGemm", self.options["columns"])
            self.max_nbytes = integer("AllGatherGroupedGemm", "max_nbytes", max_nbytes, 0)
            return {"max_nbytes": self.max_nbytes}

        super().__init__(world, method, options, check, sms)

    def _prepare(self, name):
        world = self.world
        self._gpu = gpu_of(world).limited(self.sms)
        if name == "overlap":
            most = multiprocessors_of_all(world, "overlap", sms=self.sms)
            self._ahead = self._part(PushAhead, world, self.max_nbytes)
            self._gathered = self._ahead.buffer
            self._gpu = self._gpu._replace(multiprocessors=most)
        else:
            self._gather = self._part(AllGather, world, self.max_nbytes)
            self._gathered = self._gather.output(self.max_nbytes, "uint8")

    def __call__(
        self,
        x: ArrayT,
        w: AnyArray,
        topk_ids: AnyArray | ExpertIndex,
        out: ArrayT | None = None,
        *,
        stream: AnyStream | None = None,
    ) -> ArrayT:
        """Enqueue ``out[t * topk + j] = X[t] @ w[topk_ids[t, j]].T``, X being the rows x of all ranks, by
        rank. -> out

        x         (m, K), C-contiguous, of the same shape and dtype on all ranks; bfloat16 or float16
        w         (E, N, K), x's dtype: this rank's part of each expert's weight, of the same shape on all
                  ranks. "overlap" wants experts that lie one after another, with contiguous rows; or
                  contiguous columns, where K is a multiple of 64
        topk_ids  int32 or int64 (n_ranks * m, topk), C-contiguous, on the GPU, the same on all ranks: the
                  experts of each token; or an `ExpertIndex` of it. -1, and any number that is no expert's,
                  stands for none
        out       (n_ranks * m * topk, N), C-contiguous, of x's dtype, apart from all others. Rows of pairs
                  without an expert are left as they are. Default: a new array of x's kind
        stream    default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        x, out and w begin at multiples of 16 bytes for "overlap". Sums are in float32, and rounded once;
        equal calls give equal bits. When the stream has run it, later work on it sees out, and x and topk_ids
        may be written again. The first call for arrays at new addresses binds kernels, and may compile them:
        it cannot be in the capture of a graph. The caller keeps the arrays and this object alive until the
        call has run, and as long as graphs that have captured it are used.

        TypeError or ValueError for what this rank can see to be wrong; then nothing is enqueued.
        """
        return self._multiply({"x": x, "w": w, "topk_ids": topk_ids}, out, stream)

    # -- inside
    def _check(self, arrays):
        sizes = super()._check(arrays)
        x, n_bytes = arrays["x"], self.world.n_ranks * arrays["x"].nbytes
        if x.dtype.name not in HALVES:
            raise ValueError(f"{self._who}: x is {x.dtype}; it must be {listed(HALVES)}")
        if n_bytes > self.max_nbytes:
            raise ValueError(
                f"{self._who}: the tokens of all ranks have {n_bytes} bytes, more than max_nbytes="
                f"{self.max_nbytes}. Make one with a larger max_nbytes"
            )
        return sizes

    def _steps(self, arrays, index, steps):
        world, gpu, (x, w, _, out) = self.world, self._gpu, arrays.values()
        (m, k), (_, n, _), n_ranks = x.shape, w.shape, world.n_ranks
        whole = self._gathered[: n_ranks * x.nbytes].view(x.dtype).reshape(n_ranks * m, k)
        if self.used == "sequential":

            def gather(stream):
                self._gather(x, whole, stream=stream)

            return [gather, *steps, *moved_product(world, gpu, index, index.topk, whole, w, out)]
        if self._is_sequential(k, n, w, x=x, out=out):
            transfer = self._ahead.overlap(x, whole)
            product = transfer.wait, *moved_product(world, gpu, index, index.topk, whole, w, out)
        else:
            transfer, me = self._ahead.overlap(x, whole, "never"), world.rank
            sources = (me * m, (me + 1) * m), flat(whole), index.topk, self._ahead.arrived, me, n_ranks
            columns = self.options["columns"]
            product = (bind_gathered(x, w, out, index, gpu.multiprocessors, columns, sources),)
        return [transfer.start, *steps, *product, functools.partial(transfer.finish, awaited=True)]
