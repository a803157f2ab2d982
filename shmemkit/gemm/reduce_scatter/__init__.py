"""GEMM and reduce-scatter: each rank multiplies its slice of K, and gets its rows of the sum.

    product = sk.GemmReduceScatter(world, max_tokens=8192, max_n=4096)
    out = product(x, w)                  # rank r: rows r * M / n_ranks .. of the sum of all ranks' x @ w

Methods:

  ll128_overlap
               one kernel, which exchanges a tile by LL128 while it computes the next (``ll128.py``). For
               results of some megabytes; GPUs of compute capability 9.0 that NVLink connects
  fused        one kernel, which sends a tile while it computes the next, the tiles of other ranks first
               (``fused.py``). For large results; such GPUs that reach each other's memory
  copy_engine  as fused, but copy engines send the tiles (``copy_engine.py``). For the largest results
  fused_2d     several nodes: "fused" in each node, for the rows of one node after another. Their sums cross
               the network during the next product (``fused_2d.py``). For large results
  sequential   ``sk.matmul``, then ``sk.ReduceScatter``. Works everywhere, also over several nodes
"""

from __future__ import annotations

from shmemkit.operations.operation import Given
from shmemkit.support.renamed import renamed
from shmemkit.typing import AnyArray, AnyStream, ArrayT, GemmReduceScatterMethod

from .copy_engine import Copied
from .fused_2d import Fused2D
from .host_objects import GemmCollective
from .ll128 import Overlap
from .methods import Fused, SequentialReduceScatter

__all__ = ["GemmReduceScatter"]


class GemmReduceScatter(GemmCollective[GemmReduceScatterMethod]):
    """Products x @ w, summed over the ranks; each rank gets its rows of the sum. Collective.

    ``product = sk.GemmReduceScatter(world, max_tokens, max_n)``, then ``product(x, w)``. Each rank multiplies
    its slice of K, and the partial products are summed across ranks while the GEMM is still running.
    ``help(sk.collectives)`` has the rules for calls, arrays, streams, order, graphs, memory and errors.

    world         the World
    max_tokens    M of the largest x, 1 or more
    max_n         N of the largest w, 1 or more
    dtype         of x, w and the result: bfloat16, float16, float32 or float64
    part_dtype    what the ranks' products are rounded to before they are sent, and then added up in float32:
                  dtype if None, or "float32" for bfloat16 and float16: more bytes, less error
    method        "auto", or (docs/products.md says what each needs and takes, and what "auto" chooses)
                    ll128_overlap       results of some megabytes: one kernel, by LL128: Hopper, NVLink
                    fused, copy_engine  larger ones: Hopper, one node
                    fused_2d            large ones on several nodes
                    sequential          `matmul`, then `ReduceScatter`: everywhere, without part_dtype
    options       numbers of the methods, for tuning; None: those that are chosen. All ranks give the same
                    tile          (rows, columns) of a tile: 64 or 128, and a multiple of 16 up to 256; a
                                  method that has no such tile is not made
                    lag           "fused", "copy_engine": rounds of tiles by which the own ones are late
                    copied_tiles  "copy_engine": tiles of a copy
                    chunk         "fused_2d": words of 8 bytes of a message, 8192 by default
    sms           the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned

    Equal calls give equal bits; other methods may give other last bits. "fused" and "copy_engine" start with
    the rank's own product, which they do not round, and add those of the others in the order of the ranks.
    "fused_2d" does so in each node, rounds the sum to part_dtype, and adds the sums of the nodes in their
    order. All other methods round every product to part_dtype, and add them in the order of the ranks.

    `refused` is {method: the reason why "auto" never uses it here}.
    """

    ARRAYS = {
        "x": Given("m k", contiguous=False, align=0),
        "w": Given("k n", contiguous=False, align=0),
        "out": Given("m/n_ranks n", new=True, align=0),
    }
    METHODS = {
        "ll128_overlap": Overlap,
        "copy_engine": Copied,
        "fused": Fused,
        "fused_2d": Fused2D,
        "sequential": SequentialReduceScatter,
    }
    methods = tuple(METHODS)

    @renamed(a="x", b="w")
    def __call__(
        self, x: ArrayT, w: AnyArray, out: ArrayT | None = None, *, stream: AnyStream | None = None
    ) -> ArrayT:
        """Enqueue ``x @ w``, summed over the ranks. -> out, this rank's rows of the sum

        x       (M, K), of any strides; K, the rank's share, is 1 or more, M a multiple of n_ranks
        w       (K, N), of any strides
        out     (M / n_ranks, N), C-contiguous, apart from x and w. Symmetric as of ``help(sk.collectives)``:
                "fused" and "copy_engine" let the peers write it. Default: a new array of x's kind
        stream  default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        All are of this object's dtype. M, N and K are the same on all ranks, which the emulator checks, GPUs
        do not; strides may differ. All methods but "sequential" copy, in each call, an operand whose rows
        (or columns, if those are consecutive) do not begin at multiples of 16 bytes, and such a result.
        "fused", "copy_engine" and "fused_2d" also copy an `x` stored by columns if a rank's rows are no
        multiple of 8.

        When the stream has run it, later work on it sees out, and x and w may be written again. The first
        call for arrays at new addresses binds kernels, and may compile them: it cannot be in the capture of
        a graph. The caller keeps the arrays alive until the call has run, and as long as graphs that have
        captured it are used.

        TypeError or ValueError for wrong arguments; then nothing is enqueued.
        """
        return super().__call__(x, w, out, stream=stream)
