"""What a kernel may call. docs/primitives.md has the table: who calls it, what it orders, NVLink and
network."""

from . import atomics, barriers, collectives, copies, ll, memory, rma, signals
from .atomics import *  # noqa: F403
from .barriers import *  # noqa: F403
from .collectives import *  # noqa: F403
from .copies import *  # noqa: F403
from .enums import ComparisonType, SignalOp, SmemAmount, Teams
from .ll import *  # noqa: F403
from .memory import *  # noqa: F403
from .rma import *  # noqa: F403
from .signals import *  # noqa: F403

__all__ = ["ComparisonType", "SignalOp", "SmemAmount", "Teams"]
for _module in (atomics, barriers, collectives, copies, ll, memory, rma, signals):
    __all__ += _module.__all__
__all__.sort()
