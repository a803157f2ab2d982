"""Reduce-scatter: the arrays of all ranks, combined, a segment on each. Each method has a file, which
explains it.
"""

from __future__ import annotations

from shmemkit.device.packets.transports import LAMPORT, LL, LL128
from shmemkit.runtime.world import World
from shmemkit.typing import AnyStream, ArrayT, Op, ReduceScatterMethod

from ..collective import Reducing
from ..functional import in_one_line
from ..schedules.copied import CopiedExchange
from ..schedules.exchange import Exchange
from ..schedules.push_exchange import PushExchange
from .push_2d import Push2D
from .ring import Ring

METHODS = {
    "ll": (Exchange, LL, {"personalized": True}),
    "ll128": (Exchange, LL128, {"personalized": True}),
    "lamport": (Exchange, LAMPORT, {"personalized": True}),
    "push": (PushExchange, None, {"name": "reduce_scatter push", "personalized": True}),
    "ring": Ring,
    "copy_engine": (CopiedExchange, LAMPORT, {"personalized": True}),
    "push_2d": Push2D,
}
DEFAULTS = (
    ((1 << 13, "ll128"), (None, "push")),
    ((None, "push_2d"),),
)


class ReduceScatter(Reducing[ReduceScatterMethod]):
    """Combine the arrays of all ranks element by element, and give each rank its segment. Collective.

    ``scatter = sk.ReduceScatter(world, max_nbytes)``, then ``scatter(x)``. ``help(sk.collectives)`` has the
    rules that all collectives share: arrays, streams, order, graphs, memory and errors.

    world       the World
    max_nbytes  bytes of the largest x. By "ring" and "push_2d" float8 counts twice: totals travel as float32
    op          "sum", "prod", "max", "min" or, of floating-point numbers, "avg"
    method      "auto", or
                  ll           small arrays: flag-in-data packets of 8 bytes
                  ll128        medium ones: lines of 128 bytes with a flag, over NVLink
                  lamport      medium ones: packets of 16 bytes into empty slots, over NVLink
                  push         large ones: stores and signals
                  copy_engine  the largest ones: copy engines send, blocks combine
                  ring         large ones, where only neighbours are well connected
                  push_2d      several nodes, through NVSHMEM
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned

    dtypes, rounding and the compilation for a dtype are those of `AllReduce`. Equal calls give equal bits in
    every run. Elements are combined in the order of the ranks. The exceptions: "ring" combines segment k in
    the order k + 1, k + 2, ..., k, modulo the ranks. "push_2d" combines within each node, then over the
    nodes.
    """

    _METHODS, _scatters = METHODS, True
    _one_place = False

    @classmethod
    def _combined(cls, method, rank, n):
        return [(rank + 1 + k) % n for k in range(n)] if method == "ring" else range(n)

    def __call__(self, x: ArrayT, out: ArrayT | None = None, *, stream: AnyStream | None = None) -> ArrayT:
        """Enqueue one reduce-scatter. -> out

        x        C-contiguous, of the same size and dtype on all ranks: n_ranks segments in a row
        out      C-contiguous, of x's dtype, as large as a segment. It may be the rank's own segment of x,
                 and must not overlap x in any other way. Default: a new one of x's kind, of shape (d /
                 n_ranks, ...) if x has the shape (d, ...) and d is a multiple of n_ranks, else of one
                 dimension
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        When the stream of rank k has run it, out is op over all ranks of x.reshape(n_ranks, -1)[k].
        """
        return self._call(x, out, stream)


def reduce_scatter(
    x: ArrayT,
    op: Op = "sum",
    *,
    out: ArrayT | None = None,
    stream: AnyStream | None = None,
    group: World | None = None,
    sms: int | None = None,
) -> ArrayT:
    """Combine the `x` of all ranks, a segment on each: see `ReduceScatter`. -> out, default a new one of x's
    kind and of x's shape divided by n_ranks
    """
    return in_one_line(ReduceScatter, x, out, stream, group, sms, op)
