"""All-gather: each rank gives an array, and gets those of all ranks, by rank.

The methods, a file each, which says how it works:

  ll        flag-in-data packets of 8 bytes: small messages
  ll128     lines of 128 bytes with a flag, 94 % of them data: up to a few MB, where NVLink connects all ranks
  lamport   packets of 16 bytes, all of them data, and a sentinel in empty slots: over NVLink, too
  push_1d   stores into the peers' memory and a signal for each part: larger ones
  pull      loads from the peers' memory
  ll_2d, push_2d
            likewise, for several nodes: once across nodes, through NVSHMEM, and then inside the node
  copy_push, copy_pull
            copies by copy engines, which leave the multiprocessors to others: large ones
  copy_staged
            likewise, which blocks store in private memory while the next ones are on their way
  multimem, ll_2d_multimem
            one store for all ranks of a node, which the NVSwitch multiplies (NVLink SHARP): only where that
            is offered and not turned off
"""

from __future__ import annotations

from shmemkit.runtime.world import World
from shmemkit.typing import AllGatherMethod, AnyStream, ArrayT

from ..collective import Collective
from ..network import ranks_in_reach
from ..schedules.copied import CopiedExchange
from ..schedules.exchange import Exchange
from ..schedules.push_exchange import PushExchange
from ..schedules.rows import Rows
from ..transports import LAMPORT, LL, LL128
from .copy_engine import CopyPull, CopyPush
from .ll_2d import LL2D, LL2DMultimem
from .multimem import Multimem
from .pull import Pull
from .push_2d import Push2D


def push_1d(world, max_nbytes, **settings):
    """By stores into the memory of the peers. Where these do not reach all ranks, it is "push_2d"."""
    kind = PushExchange if ranks_in_reach(world) == world.n_ranks else Push2D
    return kind(world, max_nbytes, **settings)


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


class AllGather(Collective):
    """Gather the arrays of all ranks on each of them. Collective.

    world       the World
    max_nbytes  bytes of the largest gathered array: n_ranks times an input
    method      one of ``AllGather.methods``, or "auto": what was measured as the fastest for the size, on
                these GPUs (``collectives.tuning``); only those are made that sizes up to max_nbytes need

    ``gather(x)`` enqueues one; any number may follow each other, on any streams, also in CUDA graphs. The
    ranks make the calls of all such objects in the same order, with inputs of the same size. Calls on another
    stream wait for those before, also of other collectives, and of products: their blocks wait for those of
    the other ranks, and may fill the GPU, and two of them at a time might each wait for ever on some ranks.
    Graphs are launched in that order by whoever launches them (on one stream, or with events), and so are
    those beside kernels of others that fill GPUs and wait for ranks. ValueError for wrong arguments.

    `refused`, {method: why}: what "auto" would have taken, but cannot run here.
    """

    table, METHODS, methods = "all_gather", METHODS, tuple(METHODS)
    _overlap = "they must lie apart, or x must be its own part of out, out[rank]"

    def __init__(self, world: World, max_nbytes: int, method: AllGatherMethod = "auto"):
        super().__init__(world, max_nbytes, method)

    def __call__(self, x: ArrayT, out: ArrayT | None = None, stream: AnyStream | None = None) -> ArrayT:
        """Gather `x`. -> out

        x        C-contiguous, any dtype and shape, of the same size on all ranks. May be the part of `out`
                 that it belongs to. A CuPy array (on the emulator NumPy's), a PyTorch tensor, or another
                 array on the GPU with __cuda_array_interface__ or DLPack, as `out`
        out      C-contiguous, of x's dtype and n_ranks times as many elements. Default: a new one of shape
                 (n_ranks, *x.shape), a tensor if x is. If it lies in symmetric memory, of ``output()`` or
                 other, then on all ranks, as the same part of the same array: the peers write it themselves,
                 or read from it, where the method can do without a copy between
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        Enqueued: when the stream has run it, out.reshape(n_ranks, -1)[k] is rank k's x.
        """
        return self._call(x, out, stream)

    def _shape(self, shape):
        return self.world.n_ranks, *shape

    def _sizes(self, x, out):
        n = self.world.n_ranks
        if x.dtype != out.dtype or out.size != n * x.size:
            raise ValueError(
                f"AllGather: x is {x.dtype} {x.shape}, and out is {out.dtype} {out.shape}; out must be "
                f"{x.dtype} with {n * x.size} elements, x of each of {n} ranks"
            )

    def _in_place(self, x, out):
        return self.world.rank * x.nbytes
