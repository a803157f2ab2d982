"""All-reduce: the arrays of all ranks, combined on each of them. Each method has a file, which
explains it.
"""

from __future__ import annotations

from shmemkit.device.packets.transports import LAMPORT, LL, LL128
from shmemkit.runtime.world import World
from shmemkit.typing import AllReduceMethod, AnyStream, ArrayT, Op

from ..collective import Reducing
from ..functional import in_one_line
from ..schedules.exchange import Exchange
from ..schedules.tree import DoubleTree, Ring
from ..schedules.two_shot import TwoShot
from .composed import CopyEngine, Push
from .multimem import MultimemOneShot, MultimemTwoShot

METHODS = {
    "one_shot": (Exchange, LL, {"whole": True}),
    "one_shot_ll128": (Exchange, LL128, {"whole": True}),
    "one_shot_lamport": (Exchange, LAMPORT, {"whole": True}),
    "two_shot_ll128": (TwoShot, LL128),
    "push": Push,
    "copy_engine": CopyEngine,
    "ring": Ring,
    "double_tree": DoubleTree,
    "multimem_one_shot": MultimemOneShot,
    "multimem_two_shot": MultimemTwoShot,
}
DEFAULTS = (
    ((1 << 12, "one_shot_ll128"), (1 << 13, "two_shot_ll128"), (None, "push")),
    ((1 << 20, "double_tree"), (None, "ring")),
)


class AllReduce(Reducing[AllReduceMethod]):
    """Combine the arrays of all ranks element by element, on each rank. Collective.

    ``reduce = sk.AllReduce(world, max_nbytes)``, then ``reduce(x)``. ``help(sk.collectives)`` has the rules
    that all collectives share: arrays, streams, order, graphs, memory and errors.

    world       the World
    max_nbytes  bytes of the largest x. By "ring" and "double_tree" float8 counts twice: totals travel as
                float32
    op          "sum", "prod", "max", "min" or, of floating-point numbers, "avg"
    method      "auto", or
                  one_shot           small arrays, by LL: each rank sends all of x to all others
                  one_shot_ll128     likewise, by LL128, over NVLink
                  one_shot_lamport   likewise, by Lamport packets, over NVLink
                  two_shot_ll128     medium ones, over NVLink: each rank combines a segment and sends the
                                     result
                  push, copy_engine  large ones: a reduce-scatter, then an all-gather
                  ring, double_tree  several nodes, through NVSHMEM: few, or many, ranks
                  multimem_one_shot  NVLink SHARP, small arrays
                  multimem_two_shot  NVLink SHARP, larger ones
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned

    dtypes are float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, and integers of 8 to 64 bits.
    ValueError for others, as bool and complex. float16, bfloat16 and float8 are combined in float32 and
    rounded once, to nearest even; integers are combined modulo 2**bits. NaN stays NaN (of float8 with the
    bits 0x7F). A float8 result saturates, as PTX's cvt.rn.satfinite does: what is larger than 448 or 57344,
    or infinite, becomes that number, with its sign. Infinities count as infinite while they are combined.

    Equal calls give equal bits in every run, the same on all ranks. Elements are combined in the order of
    the ranks, by "double_tree" subtree by subtree. The multimem methods have "sum", "max" and "min", of
    integers of 32 and 64 bits, float16, bfloat16, and for "sum" float32 and float64. There the switch
    chooses the order, and "multimem_one_shot" may give ranks different last bits.

    The first call for a dtype compiles its kernel, in seconds: make it before a capture.
    """

    _METHODS = METHODS

    def __call__(self, x: ArrayT, out: ArrayT | None = None, *, stream: AnyStream | None = None) -> ArrayT:
        """Enqueue one all-reduce. -> out

        x        C-contiguous, any shape, of the same size and dtype on all ranks
        out      C-contiguous, as large, of the same dtype. It may be x, and must not overlap it in any other
                 way. Default: a new one of x's kind and shape
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        When the stream has run it, out[i] is op over all ranks of x[i].
        """
        return self._call(x, out, stream)


def all_reduce(
    x: ArrayT,
    op: Op = "sum",
    *,
    out: ArrayT | None = None,
    stream: AnyStream | None = None,
    group: World | None = None,
    sms: int | None = None,
) -> ArrayT:
    """Combine the `x` of all ranks on each: see `AllReduce`. -> out, default a new one of x's kind and
    shape
    """
    return in_one_line(AllReduce, x, out, stream, group, sms, op)
