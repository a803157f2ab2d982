"""Reduce: the arrays of all ranks, combined element by element; one rank, the root, gets the result."""

from __future__ import annotations

from shmemkit.device.packets.transports import LL, LL128
from shmemkit.runtime.world import World
from shmemkit.typing import AnyStream, ArrayT, Op, ReduceMethod

from ..collective import ForRoot, Reducing
from ..functional import in_one_line
from ..schedules.copied_to_root import CopiedToRoot
from ..schedules.rooted import ToRoot
from .push import Push

METHODS = {
    "ll": (ToRoot, LL),
    "ll128": (ToRoot, LL128),
    "push": Push,
    "copy_engine": (CopiedToRoot, None, {"name": "reduce copy_engine"}),
}
DEFAULTS = (
    ((1 << 12, "ll"), (1 << 13, "ll128"), (None, "push")),
    ((1 << 12, "ll"), (1 << 13, "ll128"), (None, "push")),
)


class Reduce(Reducing[ReduceMethod], ForRoot[ReduceMethod]):
    """Combine the arrays of all ranks on the root. Collective.

    ``reduce = sk.Reduce(world, max_nbytes)``, then ``reduce(x)``. ``help(sk.collectives)`` has the rules
    that all collectives share: arrays, streams, order, graphs, memory and errors. The other ranks may be two
    calls ahead of the root; then they wait for it.

    world       the World
    max_nbytes  bytes of the largest x
    root        the rank that gets the result
    op          "sum", "prod", "max", "min" or, of floating-point numbers, "avg"
    method      "auto", or
                  ll           small arrays: flag-in-data packets of 8 bytes, to the root
                  ll128        medium ones: lines of 128 bytes with a flag, over NVLink
                  push         larger ones: a reduce-scatter and a gather, by stores and signals
                  copy_engine  large ones, on few ranks: copy engines send, blocks of the root combine
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned

    dtypes, rounding and the compilation for a dtype are those of `AllReduce`. Elements are combined in the
    order of the ranks: equal calls give equal bits in every run, the same as `AllReduce` gives.
    """

    _METHODS = METHODS

    def __init__(
        self,
        world: World,
        max_nbytes: int,
        root: int = 0,
        op: Op = "sum",
        method: ReduceMethod = "auto",
        *,
        sms: int | None = None,
    ):
        self.op = op
        ForRoot.__init__(self, world, max_nbytes, root, method, sms=sms)

    def __call__(
        self, x: ArrayT, out: ArrayT | None = None, *, stream: AnyStream | None = None
    ) -> ArrayT | None:
        """Enqueue one reduction. -> out on the root, None on all other ranks

        x        C-contiguous, of the same size and dtype on all ranks
        out      on the root: C-contiguous, as large, of the same dtype. It may be x, and must not overlap it
                 in any other way. Default: a new one of x's kind and shape. On all other ranks None, else
                 ValueError
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        When the root's stream has run it, out[i] is op over all ranks of x[i].
        """
        return self._to_root(x, out, stream)


def reduce(
    x: ArrayT,
    root: int = 0,
    op: Op = "sum",
    *,
    out: ArrayT | None = None,
    stream: AnyStream | None = None,
    group: World | None = None,
    sms: int | None = None,
) -> ArrayT | None:
    """Combine the `x` of all ranks on the root: see `Reduce`. -> out on the root, default a new one of x's
    kind and shape; None on all others
    """
    return in_one_line(Reduce, x, out, stream, group, sms, root, op)
