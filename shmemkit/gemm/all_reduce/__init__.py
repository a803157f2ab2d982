"""GEMM and all-reduce: each rank multiplies its slice of K; all ranks get the sum of the partial products.

    product = sk.GemmAllReduce(world, max_tokens=8192, max_n=4096)
    out = product(x, w)                  # the sum of all ranks' x @ w

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
  copy_engine as fused, but copy engines send (``gemm/reduce_scatter/copy_engine.py``): the largest results
  fused_2d    several nodes: "fused_2d" of ``GemmReduceScatter``, then ``sk.AllGather``. For large results
  sequential  ``sk.matmul``, then ``sk.AllReduce``. Works everywhere, also over several nodes; for other sizes
"""

from __future__ import annotations

from shmemkit.operations.operation import Given
from shmemkit.support.renamed import renamed
from shmemkit.typing import AnyArray, AnyStream, ArrayT, GemmAllReduceMethod

from ..reduce_scatter.copy_engine import CopiedEverywhere
from ..reduce_scatter.fused_2d import Fused2DEverywhere
from ..reduce_scatter.host_objects import GemmCollective
from ..reduce_scatter.ll128 import OverlapEverywhere
from ..reduce_scatter.methods import FusedEverywhere, SequentialAllReduce
from .ll128 import OneShot, TwoShot

__all__ = ["GemmAllReduce"]


class GemmAllReduce(GemmCollective[GemmAllReduceMethod]):
    """Products x @ w, summed over the ranks; every rank gets the sum. Collective.

    ``product = sk.GemmAllReduce(world, max_tokens, max_n)``, then ``product(x, w)``. Each rank multiplies its
    slice of K. Arguments, bits and rules are those of `GemmReduceScatter`, but for these:

    method   "auto", or (docs/products.md says what each needs and takes, and what "auto" chooses)
               one_shot, two_shot  up to 128 rows: one kernel, by LL128: Hopper, NVLink
               two_shot_overlap    results of some megabytes: one kernel, by LL128: Hopper, NVLink
               fused, copy_engine  larger ones: Hopper, one node
               fused_2d            large ones on several nodes
               sequential          `matmul`, then `AllReduce`: everywhere, without part_dtype
    options  also splits, the parts of K, for "one_shot" and "two_shot"

    All ranks get the same bits.
    """

    ARRAYS = {
        "x": Given("m k", contiguous=False, align=0),
        "w": Given("k n", contiguous=False, align=0),
        "out": Given("m n", new=True, align=0),
    }
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

    @renamed(a="x", b="w")
    def __call__(
        self, x: ArrayT, w: AnyArray, out: ArrayT | None = None, *, stream: AnyStream | None = None
    ) -> ArrayT:
        """Enqueue ``x @ w``, summed over the ranks. -> out, the sum

        x, w    as of `GemmReduceScatter`; only "fused", "copy_engine" and "fused_2d" need an M that is a
                multiple of n_ranks
        out     (M, N), C-contiguous, apart from x and w. Symmetric as of ``help(sk.collectives)``: "fused"
                and "copy_engine" let the peers write it. Default: a new array of x's kind
        stream  default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        Copies, memory ordering, capture and errors are those of `GemmReduceScatter`.
        """
        return super().__call__(x, w, out, stream=stream)
