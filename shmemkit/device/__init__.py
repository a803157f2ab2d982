"""What a kernel may call, on GPUs and on the emulator. docs/primitives.md says which primitive to use, who
calls it, and what it orders."""

from . import swizzle  # noqa: F401
from .cuda import (
    accumulators,
    array_words,
    clusters,
    copies,
    float_storage,
    marks,
    mbarrier,
    mma,
    pdl,
    register_tuples,
    subarrays,
    tma,
    wgmma,
    word_reductions,
)
from .cuda.accumulators import *  # noqa: F403
from .cuda.array_words import *  # noqa: F403
from .cuda.clusters import *  # noqa: F403
from .cuda.copies import *  # noqa: F403
from .cuda.float_storage import *  # noqa: F403
from .cuda.marks import *  # noqa: F403
from .cuda.mbarrier import *  # noqa: F403
from .cuda.mma import *  # noqa: F403
from .cuda.pdl import *  # noqa: F403
from .cuda.register_tuples import *  # noqa: F403
from .cuda.subarrays import *  # noqa: F403
from .cuda.tma import *  # noqa: F403
from .cuda.wgmma import *  # noqa: F403
from .cuda.word_reductions import *  # noqa: F403
from .enums import ComparisonType, SignalOp, SmemAmount, Teams
from .packets import lamport, ll, ll128, multimem, multimem_ll
from .packets.lamport import *  # noqa: F403
from .packets.ll import *  # noqa: F403
from .packets.ll128 import *  # noqa: F403
from .packets.multimem import *  # noqa: F403
from .packets.multimem_ll import *  # noqa: F403
from .shmem import atomics, barriers, bulk_copies, ordered_access, rma, signals, team_collectives
from .shmem.atomics import *  # noqa: F403
from .shmem.barriers import *  # noqa: F403
from .shmem.bulk_copies import *  # noqa: F403
from .shmem.ordered_access import *  # noqa: F403
from .shmem.rma import *  # noqa: F403
from .shmem.signals import *  # noqa: F403
from .shmem.team_collectives import *  # noqa: F403

__all__ = ["ComparisonType", "SignalOp", "SmemAmount", "Teams"]
__all__ += accumulators.__all__
__all__ += array_words.__all__
__all__ += atomics.__all__
__all__ += barriers.__all__
__all__ += bulk_copies.__all__
__all__ += clusters.__all__
__all__ += copies.__all__
__all__ += float_storage.__all__
__all__ += lamport.__all__
__all__ += ll.__all__
__all__ += ll128.__all__
__all__ += marks.__all__
__all__ += mbarrier.__all__
__all__ += mma.__all__
__all__ += multimem.__all__
__all__ += multimem_ll.__all__
__all__ += ordered_access.__all__
__all__ += pdl.__all__
__all__ += register_tuples.__all__
__all__ += rma.__all__
__all__ += signals.__all__
__all__ += subarrays.__all__
__all__ += team_collectives.__all__
__all__ += tma.__all__
__all__ += wgmma.__all__
__all__ += word_reductions.__all__


def __dir__():
    return [*__all__, "swizzle"]
