"""Broadcast: the array of one rank, the root, on all of them.

The methods, a file each, which says how it works:

  ll       flag-in-data packets of 8 bytes, from the root to all others: small messages
  ll128    lines of 128 bytes with a flag: middling ones
  lamport  packets of 16 bytes, and a sentinel in empty slots: the root sends each to one of the others, which
           passes it on: larger ones
  scatter  a segment for each of the others, which pass them on to one another: likewise
  push_2d  a segment for each rank of the root's node, which send them to the other nodes, through NVSHMEM;
           all pass them on in their own: several nodes
"""

from __future__ import annotations

from shmemkit.runtime.world import World
from shmemkit.typing import AnyStream, ArrayT, BroadcastMethod

from ..collective import OfRoot
from ..schedules.rooted import FromRoot
from ..transports import LAMPORT, LL, LL128
from .lamport import Lamport
from .push_2d import Push2D
from .scatter import Scatter

METHODS = {
    "ll": (FromRoot, LL),
    "ll128": (FromRoot, LL128),
    "lamport": (Lamport, LAMPORT),
    "scatter": Scatter,
    "push_2d": Push2D,
}


class Broadcast(OfRoot):
    """Give all ranks the array of the root. Collective.

    world       the World
    max_nbytes  bytes of the largest array
    root        its rank
    method      one of ``Broadcast.methods``, or "auto", as of ``AllGather``

    ``broadcast(x)`` enqueues one, as ``gather(x)`` does: on any stream, also in graphs, in the same order on
    all ranks.
    """

    _table, _METHODS, methods = "broadcast", METHODS, tuple(METHODS)
    _overlap = "they must lie apart, or be the same"

    def __init__(self, world: World, max_nbytes: int, root: int = 0, method: BroadcastMethod = "auto"):
        super().__init__(world, max_nbytes, root, method)

    def __call__(self, x: ArrayT, out: ArrayT | None = None, stream: AnyStream | None = None) -> ArrayT:
        """-> out, with the root's `x`

        x        C-contiguous, any dtype, of the same shape and dtype on all ranks; only the root's is read.
                 An array or tensor, as of ``AllGather``
        out      C-contiguous, as large, of the same dtype; it may be x. Default: x itself
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's
        """
        return self._call(x, x if out is None else out, stream)

    def _sizes(self, x, out):
        if x.dtype != out.dtype or x.size != out.size:
            raise ValueError(
                f"Broadcast: x is {x.dtype} {x.shape}, and out is {out.dtype} {out.shape}; out must be "
                f"{x.dtype} with {x.size} elements"
            )

    def _in_place(self, x, out):
        return 0
