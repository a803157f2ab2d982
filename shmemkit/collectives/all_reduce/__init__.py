"""All-reduce: combine the arrays of all ranks element by element; every rank gets the result.

Each method has a file, which explains it:

  one_shot  each rank sends its whole array to all others, by LL: small messages
  one_shot_ll128, one_shot_lamport
            likewise, by LL128, or by Lamport packets: over NVLink
  two_shot_ll128
            each rank combines a segment and sends the result, all by LL128: middling ones, over NVLink
  push, copy_engine
            a reduce-scatter and an all-gather, by stores or by copy engines: the largest ones
  ring      along the ranks and back, by NVSHMEM's put_signal: over any nodes
  double_tree
            up two binary trees and down again, by put_signal: over any nodes, for many ranks
  multimem_one_shot, multimem_two_shot
            loads that the NVSwitch combines (NVLink SHARP): only where that is offered and not turned off,
            and of some ops and dtypes only
"""

from __future__ import annotations

from shmemkit.device.cuda.word_reductions import OPS
from shmemkit.runtime.world import World
from shmemkit.support.settings import one_of
from shmemkit.typing import AllReduceMethod, AnyStream, ArrayT, Op

from ..collective import Collective, check_reducible
from ..schedules.exchange import Exchange
from ..schedules.tree import DoubleTree, Ring
from ..schedules.two_shot import TwoShot
from ..transports import LAMPORT, LL, LL128
from .composed import CopyEngine, Push
from .multimem import MultimemOneShot, MultimemTwoShot

METHODS = {
    "one_shot": (Exchange, LL, {"whole": True}),
    "one_shot_ll128": (Exchange, LL128, {"whole": True}),
    "one_shot_lamport": (Exchange, LAMPORT, {"whole": True}),
    "two_shot_ll128": (TwoShot, LL128),
    "push": Push,
    "copy_engine": CopyEngine,
    "ring": Ring,
    "double_tree": DoubleTree,
    "multimem_one_shot": MultimemOneShot,
    "multimem_two_shot": MultimemTwoShot,
}


class AllReduce(Collective):
    """Combine the arrays of all ranks on each of them. Collective.

    world       the World
    max_nbytes  bytes of the largest array
    op          "sum", "prod", "max", "min" or, of floating-point numbers, "avg"
    method      one of ``AllReduce.methods``, or "auto", as of ``AllGather``

    Call the object: ``reduce = sk.AllReduce(...)``, then ``reduce(x)``. Each call enqueues one all-reduce, on
    any stream, also in graphs, in the same order on all ranks. float16, bfloat16, float8_e4m3fn and
    float8_e5m2 are combined in float32, and rounded once, to nearest even. Results of float8 saturate: beyond
    the largest number, and where infinite, they are 448 or 57344. All ranks get the same bits, in every run.
    Elements are combined in the order of the ranks, but "double_tree" combines subtree by subtree. By
    multimem, the switch chooses the order in which it adds floating-point numbers (``multimem.py``). The
    first call for a dtype compiles its kernel.
    """

    _table, _METHODS, methods = "all_reduce", METHODS, tuple(METHODS)
    _overlap = "they must lie apart, or be the same"

    def __init__(self, world: World, max_nbytes: int, op: Op = "sum", method: AllReduceMethod = "auto"):
        self.op = op
        super().__init__(world, max_nbytes, method)

    def __call__(self, x: ArrayT, out: ArrayT | None = None, stream: AnyStream | None = None) -> ArrayT:
        """Combine `x` with those of the other ranks. -> out

        x        C-contiguous, of a float, bfloat16 and float8 included, or an integer, of the same shape and
                 dtype on all ranks.
                 An array or tensor, as of ``AllGather``
        out      C-contiguous, as large, of the same dtype; it may be x. Default: a new one of x's kind. If it
                 lies in symmetric memory, of ``output()`` or other, then on all ranks, as the same part of
                 the same array (not checked): the peers write it themselves, where the method can
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's
        """
        return self._call(x, out, stream)

    def _checked_options(self):
        one_of(self._name, "op", self.op, OPS)
        return {"op": self.op}

    def _shape(self, shape):
        return shape

    def _sizes(self, x, out):
        if x.dtype != out.dtype or x.size != out.size:
            raise ValueError(
                f"AllReduce: x is {x.dtype} {x.shape}, and out is {out.dtype} {out.shape}; out must be "
                f"{x.dtype} with {x.size} elements"
            )
        check_reducible("AllReduce", self.op, x.dtype)

    def _in_place(self, x, out):
        return 0

    def _bind(self, method, x, out, in_place):
        return method.bind(*self._words(x, out), in_place, x.dtype)
