"""Scatter: each rank gets its segment of the array of one rank, the root."""

from __future__ import annotations

from shmemkit.device.packets.transports import LL, LL128
from shmemkit.runtime.world import World
from shmemkit.typing import AnyStream, ArrayT, ScatterMethod

from ..collective import OfRoot
from ..functional import in_one_line
from ..schedules.push_rooted import PushRooted
from ..schedules.rooted import FromRoot

METHODS = {
    "ll": (FromRoot, LL, {"personalized": True}),
    "ll128": (FromRoot, LL128, {"personalized": True}),
    "push": (PushRooted, None, {"name": "scatter push", "chunk": 1 << 15}),
}
DEFAULTS = (
    ((1 << 13, "ll128"), (None, "push")),
    ((1 << 13, "ll128"), (None, "push")),
)


class Scatter(OfRoot[ScatterMethod]):
    """Give each rank its segment of the root's array. Collective.

    ``scatter = sk.Scatter(world, max_nbytes)``, then ``scatter(x, out)`` on the root and ``scatter(None,
    out)`` on all other ranks. ``help(sk.collectives)`` has the rules that all collectives share: arrays,
    streams, order, graphs, memory and errors. The root may be two calls ahead of the others; then it waits
    for them.

    world       the World
    max_nbytes  bytes of the largest x: n_ranks segments
    root        the rank that has x
    method      "auto", or
                  ll     small arrays: flag-in-data packets of 8 bytes
                  ll128  medium ones: lines of 128 bytes with a flag, over NVLink
                  push   larger ones: stores and signals
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned
    """

    _METHODS, _scatters = METHODS, True
    _out_is_alike = True

    @staticmethod
    def _moved(xp, given, rank, root):
        return given[root][rank]

    def __call__(
        self, x: ArrayT | None = None, out: ArrayT | None = None, *, stream: AnyStream | None = None
    ) -> ArrayT:
        """Enqueue one scatter. -> out

        x        on the root: C-contiguous, any dtype, n_ranks segments in a row. On all other ranks: None
        out      C-contiguous, of x's dtype, as large as a segment; all ranks but the root must give it. On
                 the root it may be its own segment of x. Default on the root: a new one of x's kind, of
                 shape (d / n_ranks, ...) if x has the shape (d, ...), as of `ReduceScatter`
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        When the stream of rank k has run it, out is x.reshape(n_ranks, -1)[k] of the root. ValueError where
        x or out is given that must not be, or is not given that must be.
        """
        return self._call(*self._sides(x, out), stream)

    def _sides(self, x, out):
        if self.world.rank == self.root:
            if x is None:
                raise ValueError(
                    f"Scatter: x is None on rank {self.root}, the root; it must have all segments"
                )
            return x, out
        if x is not None:
            raise ValueError(
                f"Scatter: x is given on rank {self.world.rank}; it must be None there. Only the root, rank "
                f"{self.root}, gives it"
            )
        if out is None:
            raise ValueError(
                f"Scatter: rank {self.world.rank} gives no out; it must give an array for its segment. Only "
                f"the root, rank {self.root}, knows how large that is"
            )
        return out, out

    def _sizes(self, x, out):
        n = self.world.n_ranks
        if self.world.rank == self.root and (x.dtype != out.dtype or x.size != n * out.size):
            raise ValueError(
                f"Scatter: x is {x.dtype} {x.shape}, and out is {out.dtype} {out.shape}; x must be "
                f"{out.dtype} with {n * out.size} elements, a segment of out's size for each of {n} ranks"
            )


def scatter(
    x: ArrayT | None = None,
    root: int = 0,
    *,
    out: ArrayT | None = None,
    stream: AnyStream | None = None,
    group: World | None = None,
    sms: int | None = None,
) -> ArrayT:
    """Give each rank its segment of the root's `x`: see `Scatter`. All other ranks give `out`. -> out, on
    the root by default a new one
    """
    return in_one_line(Scatter, x, out, stream, group, sms, root)
