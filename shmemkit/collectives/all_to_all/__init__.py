"""All-to-all: each rank gives another part of its array to each rank. Each method has a file, which explains
it. ``variable.py`` is for different numbers of rows, which only the GPUs know.
"""

from __future__ import annotations

from shmemkit.device.packets.transports import LAMPORT, LL, LL128
from shmemkit.runtime.world import World
from shmemkit.typing import AllToAllMethod, AnyStream, ArrayT

from ..collective import Collective
from ..functional import in_one_line
from ..schedules.copied import CopiedExchange
from ..schedules.push_exchange import PushExchange
from ..schedules.rows import Rows
from .push_2d import Push2D
from .variable import AllToAllV

__all__ = ["METHODS", "AllToAll", "AllToAllV"]

METHODS = {
    "ll": (Rows, LL, {"personalized": True}),
    "ll128": (Rows, LL128, {"personalized": True}),
    "lamport": (Rows, LAMPORT, {"personalized": True}),
    "push": (PushExchange, None, {"name": "all_to_all push", "personalized": True}),
    "copy_engine": (CopiedExchange, LAMPORT, {"personalized": True, "direct": True}),
    "push_2d": Push2D,
}
DEFAULTS = (
    ((1 << 13, "ll128"), (None, "push")),
    ((None, "push_2d"),),
)


class AllToAll(Collective[AllToAllMethod]):
    """Give each rank its segment of an array, and get one's own from each. Collective.

    ``exchange = sk.AllToAll(world, max_nbytes)``, then ``exchange(x)``. ``help(sk.collectives)`` has the
    rules that all collectives share: arrays, streams, order, graphs, memory and errors. All segments have
    one size; for others, see `AllToAllV`.

    world       the World
    max_nbytes  bytes of the largest x
    method      "auto", or
                  ll           small arrays: flag-in-data packets of 8 bytes
                  ll128        medium ones: lines of 128 bytes with a flag, over NVLink
                  lamport      medium ones: packets of 16 bytes into empty slots, over NVLink
                  push         larger ones: stores and signals
                  copy_engine  large ones: copy engines, over NVLink
                  push_2d      several nodes, through NVSHMEM
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned
    """

    _METHODS, _gathers, _scatters = METHODS, True, True

    @staticmethod
    def _moved(xp, given, rank, root):
        return xp.stack([x[rank] for x in given])

    def __call__(self, x: ArrayT, out: ArrayT | None = None, *, stream: AnyStream | None = None) -> ArrayT:
        """Enqueue one all-to-all. -> out

        x        C-contiguous, any dtype and shape, of the same size on all ranks, a multiple of n_ranks
        out      C-contiguous, as large, of the same dtype, apart from x. Default: a new one of x's kind and
                 shape
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        When the stream of rank r has run it, out.reshape(n_ranks, -1)[k] is rank k's x.reshape(n_ranks,
        -1)[r].
        """
        return self._call(x, out, stream)

    def _words(self, x, out):
        """Both as uint64 where their addresses, and the size of a part, allow, else as uint8."""
        address = self.world.backend.address
        unit = "uint8" if (address(x) | address(out) | x.nbytes // self.world.n_ranks) % 8 else "uint64"
        return x.view(unit), out.view(unit)


def all_to_all(
    x: ArrayT,
    *,
    out: ArrayT | None = None,
    stream: AnyStream | None = None,
    group: World | None = None,
    sms: int | None = None,
) -> ArrayT:
    """Send segment k of `x` to rank k: see `AllToAll`. -> out, default a new one of x's kind and shape"""
    return in_one_line(AllToAll, x, out, stream, group, sms)
