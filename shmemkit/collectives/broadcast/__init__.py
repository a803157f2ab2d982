"""Broadcast: the array of one rank, the root, on all of them. Each method has a file, which explains it."""

from __future__ import annotations

from shmemkit.device.packets.transports import LAMPORT, LL, LL128
from shmemkit.runtime.world import World
from shmemkit.typing import AnyStream, ArrayT, BroadcastMethod

from ..collective import OfRoot
from ..functional import in_one_line
from ..schedules.rooted import FromRoot
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
# On several nodes the first ones, up to any size (1 << 62), can run only where NVLink spans the nodes.
DEFAULTS = (
    ((1 << 13, "ll128"), (None, "scatter")),
    ((1 << 18, "ll128"), (1 << 20, "ll128"), (1 << 62, "scatter"), (None, "push_2d")),
)


class Broadcast(OfRoot[BroadcastMethod]):
    """Give all ranks the array of the root. Collective.

    ``broadcast = sk.Broadcast(world, max_nbytes)``, then ``broadcast(x)``. ``help(sk.collectives)`` has the
    rules that all collectives share: arrays, streams, order, graphs, memory and errors.

    world       the World
    max_nbytes  bytes of the largest array
    root        the rank whose array it is
    method      "auto", or
                  ll, ll128  small arrays, from the root to all: packets of 8 bytes; lines of 128, over
                             NVLink
                  lamport    larger ones, over NVLink: others pass packets on
                  scatter    larger ones: a segment for each of the others, which pass them on
                  push_2d    several nodes, through NVSHMEM
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned
    """

    _METHODS = METHODS

    @staticmethod
    def _moved(xp, given, rank, root):
        return given[root]

    def __call__(self, x: ArrayT, out: ArrayT | None = None, *, stream: AnyStream | None = None) -> ArrayT:
        """Enqueue one broadcast. -> out, with the root's x

        x        C-contiguous, any dtype, of the same size and dtype on all ranks; only the root's is read
        out      C-contiguous, as large, of the same dtype. It may be x, and must not overlap it in any other
                 way. Default: x itself
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's
        """
        return self._call(x, x if out is None else out, stream)

    def _sides(self, x, out):
        return x, x if out is None else out

    def _writes(self, x, out):
        return self.world.rank != self.root or self._address(x) != self._address(out)


def broadcast(
    x: ArrayT,
    root: int = 0,
    *,
    out: ArrayT | None = None,
    stream: AnyStream | None = None,
    group: World | None = None,
    sms: int | None = None,
) -> ArrayT:
    """Give all ranks the `x` of the root: see `Broadcast`. -> out, default x"""
    return in_one_line(Broadcast, x, out, stream, group, sms, root)
