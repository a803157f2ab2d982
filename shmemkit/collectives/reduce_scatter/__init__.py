"""Reduce-scatter: combine the arrays of all ranks element by element; each rank gets a segment of the result.

Each method has a file, which explains it:

  ll     each rank sends all others their segments, by LL: small messages
  ll128  likewise, by LL128: middling ones, over NVLink
  lamport
         likewise, by Lamport packets
  push   each rank stores the others' segments into their memory, and combines its own meanwhile: large ones
  ring   partial results go around the ring of the ranks, each link carries one neighbour's data: large ones
  copy_engine
         copy engines send each rank its segments, and blocks combine them: the largest ones
  push_2d
         for several nodes: inside the node first, and then once across nodes, through NVSHMEM
"""

from __future__ import annotations

from shmemkit.device.cuda.word_reductions import OPS
from shmemkit.runtime.world import World
from shmemkit.support.settings import one_of
from shmemkit.typing import AnyStream, ArrayT, Op, ReduceScatterMethod

from ..collective import Collective, check_reducible
from ..schedules.copied import CopiedExchange
from ..schedules.exchange import Exchange
from ..schedules.push_exchange import PushExchange
from ..transports import LAMPORT, LL, LL128
from .push_2d import Push2D
from .ring import Ring

METHODS = {
    "ll": (Exchange, LL, {"personalized": True}),
    "ll128": (Exchange, LL128, {"personalized": True}),
    "lamport": (Exchange, LAMPORT, {"personalized": True}),
    "push": (PushExchange, None, {"name": "reduce_scatter push", "personalized": True}),
    "ring": Ring,
    "copy_engine": (CopiedExchange, LAMPORT, {"personalized": True}),
    "push_2d": Push2D,
}


class ReduceScatter(Collective):
    """Combine the arrays of all ranks, and give each rank its segment of the result. Collective.

    world       the World
    max_nbytes  bytes of the largest x: n_ranks times an output
    op          "sum", "prod", "max", "min" or, of floating-point numbers, "avg"
    method      one of ``ReduceScatter.methods``, or "auto", as of ``AllGather``

    ``scatter(x)`` enqueues one, as ``gather(x)`` does: on any stream, also in graphs, in the same order on
    all ranks. float16, bfloat16 and float8 are combined in float32, and rounded once, as of ``AllReduce``.
    Each method combines in one order, so its bits are the same in every run: "ring" begins segment k with
    rank k + 1, goes on with those after it, modulo the ranks, and ends with rank k; "push_2d" combines in
    each node in the order of its ranks, and then in that of the nodes; the others, in the order of the ranks.
    The first call for a dtype compiles its kernel.
    """

    _table, _METHODS, methods = "reduce_scatter", METHODS, tuple(METHODS)
    _one_place = False
    _overlap = "they must lie apart, or out must be its own part of x, x[rank]"

    def __init__(self, world: World, max_nbytes: int, op: Op = "sum", method: ReduceScatterMethod = "auto"):
        self.op = op
        super().__init__(world, max_nbytes, method)

    def __call__(self, x: ArrayT, out: ArrayT | None = None, stream: AnyStream | None = None) -> ArrayT:
        """Combine `x` with those of the other ranks. -> out

        x        C-contiguous, of a float, bfloat16 and float8 included, or an integer, of the same size and
                 dtype on all ranks: n_ranks segments in a row. An array or tensor, as of ``AllGather``
        out      C-contiguous, of x's dtype, as large as a segment. It may be the rank's own segment of x.
                 Default: a new one of x's kind, of shape (d / n_ranks, ...) if x has the shape (d, ...) and
                 d is a multiple of n_ranks, else of one dimension
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        Enqueued: when the stream has run it, out is x.reshape(n_ranks, -1)[k] on rank k, combined over the
        ranks.
        """
        return self._call(x, out, stream)

    def _checked_options(self):
        one_of(self._name, "op", self.op, OPS)
        return {"op": self.op}

    def _shape(self, shape):
        return self._shape_of_segment(shape)

    def _sizes(self, x, out):
        n = self.world.n_ranks
        if x.size % n:
            raise ValueError(
                f"ReduceScatter: x is {x.shape}; the number of its elements must be a multiple of {n}, the "
                "ranks"
            )
        if x.dtype != out.dtype or x.size != n * out.size:
            raise ValueError(
                f"ReduceScatter: x is {x.dtype} {x.shape}, and out is {out.dtype} {out.shape}; out must be "
                f"{x.dtype} with {x.size // n} elements, the part of one of {n} ranks"
            )
        check_reducible("ReduceScatter", self.op, x.dtype)

    def _in_place(self, x, out):
        return -self.world.rank * out.nbytes

    def _bind(self, method, x, out, in_place):
        return method.bind(*self._words(x, out), in_place, x.dtype)
