"""All-gather: the arrays of all ranks, on each of them. Each method has a file, which explains it."""

from __future__ import annotations

from shmemkit.device.packets.transports import LAMPORT, LL, LL128
from shmemkit.runtime.world import World
from shmemkit.typing import AllGatherMethod, AnyStream, ArrayT

from ..collective import Collective
from ..functional import in_one_line
from ..network import ranks_in_reach
from ..schedules.copied import CopiedExchange
from ..schedules.exchange import Exchange
from ..schedules.push_exchange import PushExchange
from ..schedules.rows import Rows
from .copy_engine import CopyPull, CopyPush
from .ll_2d import LL2D, LL2DMultimem
from .multimem import Multimem
from .pull import Pull
from .push_2d import Push2D


def push_1d(world, max_nbytes, **settings):
    """By stores into the memory of the peers. Where these do not reach all ranks, it is "push_2d"."""
    kind = PushExchange if ranks_in_reach(world) == world.n_ranks else Push2D
    return kind(world, max_nbytes, **settings)


push_1d.kernel_of = PushExchange.kernel_of

METHODS = {
    "ll": (Rows, LL),
    "ll128": (Exchange, LL128),
    "lamport": (Exchange, LAMPORT),
    "pull": Pull,
    "push_1d": (push_1d, None, {"name": "all_gather push_1d"}),
    "ll_2d": LL2D,
    "push_2d": Push2D,
    "copy_push": CopyPush,
    "copy_pull": CopyPull,
    "copy_staged": (CopiedExchange, LAMPORT),
    "multimem": Multimem,
    "ll_2d_multimem": LL2DMultimem,
}
DEFAULTS = (
    ((1 << 12, "ll"), (1 << 13, "ll128"), (None, "push_1d")),
    ((1 << 20, "ll_2d"), (None, "push_2d")),
)


class AllGather(Collective[AllGatherMethod]):
    """Gather the arrays of all ranks on each of them. Collective.

    ``gather = sk.AllGather(world, max_nbytes)``, then ``gather(x)``. ``help(sk.collectives)`` has the rules
    that all collectives share: arrays, streams, order, graphs, memory and errors.

    world       the World
    max_nbytes  bytes of the largest gathered array: n_ranks times an x
    method      "auto", or
                  ll                        small arrays: flag-in-data packets of 8 bytes
                  ll128                     small and medium ones: lines of 128 bytes with a flag, over
                                            NVLink
                  lamport                   medium ones: packets of 16 bytes into empty slots, over NVLink
                  push_1d, pull             large ones: stores and signals, or loads
                  copy_push, copy_pull      large ones: copy engines, which leave the multiprocessors to
                                            others
                  copy_staged               likewise, into private memory
                  ll_2d, push_2d            several nodes, through NVSHMEM: small and larger arrays
                  multimem, ll_2d_multimem  NVLink SHARP; "auto" does not take them
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned
    """

    _METHODS, _gathers = METHODS, True

    @staticmethod
    def _moved(xp, given, rank, root):
        return xp.stack(given)

    def __call__(self, x: ArrayT, out: ArrayT | None = None, *, stream: AnyStream | None = None) -> ArrayT:
        """Enqueue one all-gather. -> out

        x        C-contiguous, any dtype and shape, of the same size on all ranks. It may be its own part of
                 `out`, and must not overlap it in any other way
        out      C-contiguous, of x's dtype and n_ranks times as many elements. Default: a new one of x's
                 kind and of shape (n_ranks, *x.shape)
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        When the stream has run it, out.reshape(n_ranks, -1)[k] is rank k's x.
        """
        return self._call(x, out, stream)


def all_gather(
    x: ArrayT,
    *,
    out: ArrayT | None = None,
    stream: AnyStream | None = None,
    group: World | None = None,
    sms: int | None = None,
) -> ArrayT:
    """Gather the `x` of all ranks on each: see `AllGather`. -> out, default a new one (n_ranks, *x.shape) of
    x's kind
    """
    return in_one_line(AllGather, x, out, stream, group, sms)
