"""GEMM and all-reduce: each rank multiplies its slice of K; all ranks get the sum of the partial products.

    product = sk.GemmAllReduce(world, max_m=8192, max_n=4096)
    out = product(a, b)                  # the sum of all ranks' a @ b

Methods:

  one_shot    in one kernel, which sends a rank's whole product to all others by LL128 (``ll128.py``): few
              rows, as when tokens are decoded; GPUs of compute capability 9.0 that NVLink connects
  two_shot    likewise, in two hops with fewer bytes: each rank adds up a segment, and sends the sum to all;
              faster on more than two ranks
  two_shot_overlap
              likewise, but a tile is exchanged while the next is computed
              (``gemm/reduce_scatter/ll128.py``): more rows, some megabytes
  fused       GEMM and reduce-scatter in one kernel, which sends a rank's rows to all others as they are done
              (``gemm/reduce_scatter/fused.py``): GPUs of compute capability 9.0 that reach each other's
              memory; large results
  copy_engine likewise, by copy engines (``gemm/reduce_scatter/copy_engine.py``): the largest ones
  fused_2d    several nodes: that method of ``GemmReduceScatter``, and then ``sk.AllGather``; large results
  sequential  ``sk.matmul``, then ``sk.AllReduce``: everywhere, also over nodes; for all other sizes
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

    Arguments as of ``GemmReduceScatter``. Methods: "one_shot" and "two_shot", for M up to 128;
    "two_shot_overlap", for results of up to 32 MiB, on two ranks 8, as part_dtype, in whole tiles; and
    "copy_engine", "fused", "fused_2d" and "sequential", as there. All ranks get the same bits. The first
    three round all products to part_dtype, and add them in the order of the ranks.
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
        """-> out, enqueued

        a, b    as of ``GemmReduceScatter``; for "fused", "copy_engine" and "fused_2d" M is a multiple of
                n_ranks
        out     (M, N), contiguous, apart from a and b. If it lies in symmetric memory, of ``output()`` or
                other, then on all ranks, as the same part of the same array (not checked): with "fused" and
                "copy_engine" the peers write it themselves. Default: a new array
        stream  default: PyTorch's current one if any array is a tensor on a GPU, else the World's
        """
        return super().__call__(a, b, out, stream)

    def _rows(self, m):
        return m
