"""OpenSHMEM's constants, with NVSHMEM's values, so that kernels can be written where NVSHMEM is not
installed.

The enums of ``nvshmem.core`` and plain integers are accepted wherever these are.
"""

from enum import IntEnum

from shmemkit.support.settings import listed


class SignalOp(IntEnum):
    """What a signal does to its word."""

    SIGNAL_SET = 9
    SIGNAL_ADD = 10


class ComparisonType(IntEnum):
    """How a wait compares the word with the value."""

    CMP_EQ = 0
    CMP_NE = 1
    CMP_GT = 2
    CMP_LE = 3
    CMP_LT = 4
    CMP_GE = 5


class Teams(IntEnum):
    """The predefined teams."""

    TEAM_WORLD = 0
    TEAM_SHARED = 1
    TEAM_NODE = 2
    TEAM_SAME_MYPE_NODE = 3


class SmemAmount(IntEnum):
    """How much shared memory ``ask_smem`` is asked for."""

    SMEM_RECOMMENDED = 0
    SMEM_MINIMUM = 1
    SMEM_BARRIERS_ONLY = 2


_SIGNAL_OPS = {int(op): op.name[len("SIGNAL_") :].lower() for op in SignalOp}
_COMPARISONS = {int(compare): compare.name[len("CMP_") :].lower() for compare in ComparisonType}


def signal_op_name(primitive, op):
    """9 or ``SignalOp.SIGNAL_SET`` -> "set", 10 or ``SignalOp.SIGNAL_ADD`` -> "add"."""
    return _name(primitive, "signal_op", _SIGNAL_OPS, SignalOp, op)


def comparison_name(compare, primitive="signal_wait_until"):
    """0 or ``ComparisonType.CMP_EQ`` -> "eq", and so on."""
    return _name(primitive, "compare", _COMPARISONS, ComparisonType, compare)


def _name(primitive, argument, names, enum, value):
    try:
        return names[int(value)]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{primitive}(): {argument} is {value!r}; it must be {members(enum)}") from None


def members(enum):
    """ "SignalOp.SIGNAL_SET (9) or SignalOp.SIGNAL_ADD (10)" """
    return listed(f"{enum.__name__}.{member.name} ({int(member)})" for member in enum)
