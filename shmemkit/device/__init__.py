"""What a kernel may call. docs/primitives.md has the table: who calls it, what it orders, NVLink and
network."""

from . import (
    atomics,
    barriers,
    bulk,
    clusters,
    collectives,
    copies,
    elements,
    fragments,
    lamport,
    ll,
    ll128,
    ll128_tiles,
    mbarrier,
    memory,
    mma,
    multimem,
    multimem_ll,
    pdl,
    reductions,
    registers,
    rma,
    signals,
    spans,
    tma,
    wgmma,
    words,
)
from .atomics import *  # noqa: F403
from .barriers import *  # noqa: F403
from .bulk import *  # noqa: F403
from .clusters import *  # noqa: F403
from .collectives import *  # noqa: F403
from .copies import *  # noqa: F403
from .elements import *  # noqa: F403
from .enums import ComparisonType, SignalOp, SmemAmount, Teams
from .fragments import *  # noqa: F403
from .lamport import *  # noqa: F403
from .ll import *  # noqa: F403
from .ll128 import *  # noqa: F403
from .ll128_tiles import *  # noqa: F403
from .mbarrier import *  # noqa: F403
from .memory import *  # noqa: F403
from .mma import *  # noqa: F403
from .multimem import *  # noqa: F403
from .multimem_ll import *  # noqa: F403
from .pdl import *  # noqa: F403
from .reductions import *  # noqa: F403
from .registers import *  # noqa: F403
from .rma import *  # noqa: F403
from .signals import *  # noqa: F403
from .spans import *  # noqa: F403
from .tma import *  # noqa: F403
from .wgmma import *  # noqa: F403
from .words import *  # noqa: F403

__all__ = ["ComparisonType", "SignalOp", "SmemAmount", "Teams"]
for _module in (
    atomics,
    barriers,
    bulk,
    clusters,
    collectives,
    copies,
    elements,
    fragments,
    lamport,
    ll,
    ll128,
    ll128_tiles,
    mbarrier,
    memory,
    mma,
    multimem,
    multimem_ll,
    pdl,
    reductions,
    registers,
    rma,
    signals,
    spans,
    tma,
    wgmma,
    words,
):
    __all__ += _module.__all__
__all__.sort()
