"""Gather: the arrays of all ranks on one of them, the root. Each method has a file, which explains it."""

from __future__ import annotations

from shmemkit.device.packets.transports import LL, LL128
from shmemkit.runtime.world import World
from shmemkit.typing import AnyStream, ArrayT, GatherMethod

from ..collective import ForRoot
from ..functional import in_one_line
from ..schedules.copied_to_root import CopiedToRoot
from ..schedules.push_rooted import PushRooted
from ..schedules.rooted import ToRoot
from .push_2d import Push2D

_PUSH = {"name": "gather push", "to_root": True, "part": 1 << 15, "chunk": 1 << 17, "senders": 48}
METHODS = {
    "ll": (ToRoot, LL),
    "ll128": (ToRoot, LL128),
    "push": (PushRooted, None, _PUSH),
    "copy_engine": (CopiedToRoot, None, {"name": "gather copy_engine"}),
    "push_2d": Push2D,
}
# On several nodes the first ones, up to any size (1 << 62), can run only where NVLink spans the nodes.
DEFAULTS = (
    ((1 << 18, "ll"), (None, "push")),
    ((1 << 18, "ll"), (1 << 62, "push"), (None, "push_2d")),
)


class Gather(ForRoot[GatherMethod]):
    """Gather the arrays of all ranks on the root. Collective.

    ``gather = sk.Gather(world, max_nbytes)``, then ``gather(x)``. ``help(sk.collectives)`` has the rules
    that all collectives share: arrays, streams, order, graphs, memory and errors. The other ranks may be two
    calls ahead of the root, those of other nodes four; then they wait for it.

    world       the World
    max_nbytes  bytes of the largest gathered array: n_ranks times an x
    root        the rank that gets it
    method      "auto", or
                  ll           small arrays: flag-in-data packets of 8 bytes
                  ll128        medium ones: lines of 128 bytes with a flag, over NVLink
                  push         larger ones: stores and signals
                  copy_engine  the largest ones: copy engines send, blocks of the root store
                  push_2d      several nodes, through NVSHMEM
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned
    """

    _METHODS, _gathers = METHODS, True

    @staticmethod
    def _moved(xp, given, rank, root):
        return xp.stack(given)

    def __call__(
        self, x: ArrayT, out: ArrayT | None = None, *, stream: AnyStream | None = None
    ) -> ArrayT | None:
        """Enqueue one gather. -> out on the root, None on all other ranks

        x        C-contiguous, any dtype and shape, of the same size on all ranks. On the root it may be its
                 own part of `out`, and must not overlap it in any other way
        out      on the root: C-contiguous, of x's dtype and n_ranks times as many elements. Default: a new
                 one of x's kind and of shape (n_ranks, *x.shape). On all other ranks None, else ValueError
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        When the root's stream has run it, out.reshape(n_ranks, -1)[k] is rank k's x.
        """
        return self._to_root(x, out, stream)


def gather(
    x: ArrayT,
    root: int = 0,
    *,
    out: ArrayT | None = None,
    stream: AnyStream | None = None,
    group: World | None = None,
    sms: int | None = None,
) -> ArrayT | None:
    """Gather the `x` of all ranks on the root: see `Gather`. -> out on the root, default a new one (n_ranks,
    *x.shape) of x's kind; None on all others
    """
    return in_one_line(Gather, x, out, stream, group, sms, root)
