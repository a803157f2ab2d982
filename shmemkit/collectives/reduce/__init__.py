"""Reduce: combine the arrays of all ranks element by element; one rank, the root, gets the result.

The methods:

  ll     each rank sends the root all that it has, in packets of 8 bytes: small messages
  ll128  likewise, in lines of 128 bytes with a flag: middling ones, over NVLink
  push   a reduce-scatter by push, and a gather of the segments by push: larger ones
"""

from __future__ import annotations

from shmemkit.device.cuda.word_reductions import OPS
from shmemkit.runtime.world import World
from shmemkit.support.settings import one_of
from shmemkit.typing import AnyStream, ArrayT, Op, ReduceMethod

from ..collective import OfRoot, check_reducible
from ..schedules.rooted import ToRoot
from ..transports import LL, LL128
from .push import Push

METHODS = {"ll": (ToRoot, LL), "ll128": (ToRoot, LL128), "push": Push}


class Reduce(OfRoot):
    """Combine the arrays of all ranks on the root. Collective.

    world       the World
    max_nbytes  bytes of the largest array
    root        the rank that gets the result
    op          "sum", "prod", "max", "min" or, of floating-point numbers, "avg"
    method      one of ``Reduce.methods``, or "auto", as of ``AllGather``

    ``reduce(x)`` enqueues one, as ``gather(x)`` of ``AllGather`` does: on any stream, also in graphs, in the
    same order on all ranks. dtypes and rounding are those of ``AllReduce``. Elements are combined in the
    order of the ranks, so the bits are the same in every run, and those of ``AllReduce``. The others may be
    two calls ahead of the root; then they wait for it.
    """

    _table, _METHODS, methods = "reduce", METHODS, tuple(METHODS)
    _overlap = "they must lie apart, or be the same"

    def __init__(
        self, world: World, max_nbytes: int, root: int = 0, op: Op = "sum", method: ReduceMethod = "auto"
    ):
        self.op = op
        super().__init__(world, max_nbytes, root, method)

    def _checked_options(self):
        one_of(self._name, "op", self.op, OPS)
        return {**super()._checked_options(), "op": self.op}

    def __call__(
        self, x: ArrayT, out: ArrayT | None = None, stream: AnyStream | None = None
    ) -> ArrayT | None:
        """Combine `x` with those of the other ranks. -> out on the root, None on all other ranks

        x        C-contiguous, of a float, bfloat16 and float8 included, or an integer, of the same shape and
                 dtype on all ranks. An array or tensor, as of ``AllGather``
        out      on the root: C-contiguous, as large, of the same dtype; it may be x. Default: a new one of
                 x's kind. On all other ranks: None
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        Enqueued: when the stream of a rank that is not the root has run it, its x may be written again.
        """
        return self._to_root(x, out, stream)

    def _shape(self, shape):
        return shape

    def _sizes(self, x, out):
        if x.dtype != out.dtype or x.size != out.size:
            raise ValueError(
                f"Reduce: x is {x.dtype} {x.shape}, and out is {out.dtype} {out.shape}; out must be "
                f"{x.dtype} with {x.size} elements"
            )
        check_reducible("Reduce", self.op, x.dtype)

    def _in_place(self, x, out):
        return 0

    def _bind(self, method, x, out, in_place):
        return method.bind(*self._words(x, out), in_place, x.dtype)
