"""GEMM and all-reduce: the product of matrices whose inner dimension is cut over the ranks, on all of them.

    product = sk.GemmAllReduce(world, max_m=8192, max_n=4096)
    out = product(a, b)                  # the sum of all ranks' a @ b

Methods:

  fused       GEMM and reduce-scatter in one kernel, which sends a rank's rows to all others as they are done
              (``gemm_rs/fused.py``): GPUs of compute capability 9.0 that reach each other's memory; large
              results
  sequential  ``sk.matmul``, then ``sk.AllReduce``: everywhere, also over nodes; small results
"""

from .gemm_rs.collective import GemmCollective
from .gemm_rs.methods import FusedEverywhere, SequentialAllReduce

__all__ = ["GemmAllReduce"]


class GemmAllReduce(GemmCollective):
    """Products a @ b, added up over the ranks, on each of them. Collective.

    Arguments and methods as of ``GemmReduceScatter``. All ranks get the same bits.
    """

    METHODS = {"fused": FusedEverywhere, "sequential": SequentialAllReduce}
    methods = tuple(METHODS)

    def __call__(self, a, b, out=None, stream=None):
        """-> out, enqueued

        a, b    as of ``GemmReduceScatter``; "fused" wants M to be a multiple of n_ranks
        out     (M, N), contiguous, apart from a and b. If it lies in symmetric memory, of ``output()`` or
                other, then on all ranks, as the same part of the same array (not checked): the peers write it
                themselves. Default: a new array
        stream  default: the World's
        """
        return super().__call__(a, b, out, stream)

    def _rows(self, m):
        return m
