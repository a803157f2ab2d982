"""GEMM and all-reduce: each rank multiplies its slice of K; all ranks get the sum of the partial products.

    product = sk.GemmAllReduce(world, max_m=8192, max_n=4096)
    out = product(a, b)                  # the sum of all ranks' a @ b

Methods:

  one_shot    one kernel, which sends a rank's whole product to all others by LL128 (``ll128.py``). For few
              rows, as when tokens are decoded; GPUs of compute capability 9.0 that NVLink connects
  two_shot    as one_shot, in two hops with fewer bytes: each rank sums up one segment, and sends the sum to
              all. Faster on more than two ranks
  two_shot_overlap
              as two_shot, but the kernel exchanges a tile while it computes the next
              (``gemm/reduce_scatter/ll128.py``). For more rows, of some megabytes
  fused       GEMM and reduce-scatter in one kernel, which sends a rank's rows to all others as soon as they
              are computed (``gemm/reduce_scatter/fused.py``). For large results; GPUs of compute capability
              9.0 that reach each other's memory
  copy_engine as fused, but copy engines send (``gemm/reduce_scatter/copy_engine.py``). For the largest
  results fused_2d    several nodes: "fused_2d" of ``GemmReduceScatter``, then ``sk.AllGather``. For large
  results sequential  ``sk.matmul``, then ``sk.AllReduce``. Works everywhere, also over several nodes; for
  other sizes
"""

from __future__ import annotations

from shmemkit.typing import AnyArray, AnyStream, ArrayT, GemmAllReduceMethod

from ..reduce_scatter.copy_engine import CopiedEverywhere
from ..reduce_scatter.fused_2d import Fused2DEverywhere
from ..reduce_scatter.host_objects import GemmCollective
from ..reduce_scatter.ll128 import OverlapEverywhere
from ..reduce_scatter.methods import FusedEverywhere, SequentialAllReduce
from .ll128 import OneShot, TwoShot

__all__ = ["GemmAllReduce"]


class GemmAllReduce(GemmCollective[GemmAllReduceMethod]):
    """Products a @ b, summed over the ranks; every rank gets the sum. Collective.

    The arguments are those of ``GemmReduceScatter``; `options` also have splits, the parts of K, for
    "one_shot" and "two_shot". Its methods "copy_engine", "fused", "fused_2d" and "sequential" exist here,
    too. "one_shot" and "two_shot" are for M up to 128. "two_shot_overlap" is for results (as part_dtype, in
    whole tiles) of up to 32 MiB, on two ranks 8 MiB. These three round all products to part_dtype, and add
    them in the order of the ranks. All ranks get the same bits.
    """

    METHODS = {
        "one_shot": OneShot,
        "two_shot": TwoShot,
        "two_shot_overlap": OverlapEverywhere,
        "copy_engine": CopiedEverywhere,
        "fused": FusedEverywhere,
        "fused_2d": Fused2DEverywhere,
        "sequential": SequentialAllReduce,
    }
    methods = tuple(METHODS)

    def __call__(
        self, a: ArrayT, b: AnyArray, out: ArrayT | None = None, stream: AnyStream | None = None
    ) -> ArrayT:
        """Enqueue ``a @ b``, summed over the ranks. -> out, the sum

        a, b    as in ``GemmReduceScatter``. "fused", "copy_engine" and "fused_2d" need an M that is a
                multiple of n_ranks
        out     (M, N), contiguous; it must not overlap a or b. If it is in symmetric memory, of ``output()``
                or other, it must be the same part of the same array on all ranks (this is not checked): with
                "fused" and "copy_engine" the peers write it directly. Default: a new array
        stream  default: PyTorch's current one if any array is a tensor on a GPU, else the World's
        """
        return super().__call__(a, b, out, stream)

    def _rows(self, m):
        return m
