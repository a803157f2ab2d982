"""What a primitive may be given: the messages, the same in the emulator (ValueError) and on the GPU
(TypingError)."""

import enum
import functools

import numpy as np

from .ptx import TypingError, types

SCOPES = ("gpu", "sys")
COMPARES = ("ge", "eq", "ne", "gt", "le", "lt")

INTEGERS = (types.int32, types.uint32, types.int64, types.uint64)
SIGNALS = (types.uint64, types.int64)  # of NVSHMEM
NUMBERS = (*INTEGERS, types.float32, types.float64)


# What other libraries call so, and what does it here.
_INSTEAD = {
    "release": "; who waits or reads acquires, notify() releases",
    "acq_rel": "; who waits or reads acquires, notify() releases",
    "intra_node": "; 'sys' reaches all ranks of a node",
    "inter_node": "; 'sys' reaches all ranks over NVLink, put_signal() and signal_op() those of other nodes",
    "cta": "; cuda.syncthreads() orders the threads of a block",
}


def not_allowed(primitive, name, given, allowed):
    """The message for an argument that is not one of `allowed`."""
    instead = _INSTEAD.get(given, "") if isinstance(given, str) else ""
    if given in ("release", "acq_rel") and "acquire" not in allowed:
        instead = ""
    return f"{primitive}(): {name}={given!r} is not allowed: use {' or '.join(map(repr, allowed))}{instead}"


def check_choice(primitive, name, given, allowed):
    """In the emulator: `given` must be one of `allowed`."""
    if given not in allowed:
        raise ValueError(not_allowed(primitive, name, given, allowed))


def literal_choice(primitive, name, given, allowed):
    """On the GPU, at compile time: the string that `given`, a numba type, stands for; one of `allowed`."""
    value = given
    if isinstance(given, types.Omitted):
        value = given.value
    elif isinstance(given, types.Literal):
        value = given.literal_value
    elif not isinstance(given, (str, int)):  # as a default is given
        raise TypingError(
            f"{primitive}(): {name} must be written out in the call, as {' or '.join(map(repr, allowed))}: "
            f"it decides which instruction is compiled; given a variable of type {given}"
        )
    if value not in allowed:
        raise TypingError(not_allowed(primitive, name, value, allowed))
    return value


def is_one(n):
    """Is the numba type `n` the literal 1?"""
    return isinstance(n, types.IntegerLiteral) and n.literal_value == 1


# Enums of OpenSHMEM, by their name here and in nvshmem4py, and the arguments that they are for.
_ENUMS = {
    "ComparisonType": "compare",
    "Cmp_type": "compare",
    "SignalOp": "signal_op",
    "Signal_op": "signal_op",
    "Teams": "team",
    "Team_id": "team",
    "SmemAmount": "flag",
    "Smem_amount": "flag",
}


def check_integer(primitive, **given):
    """At compile time: these arguments must be integers, and no enum members that are for another one."""
    for name, value in given.items():
        if not isinstance(value, (types.Integer, types.Boolean, types.IntEnumMember, int)):
            raise TypingError(f"{primitive}(): {name} must be an integer, given {value}")
        if isinstance(value, types.IntEnumMember):
            _check_enum(f"{primitive}()", name, value.instance_class, "", given, TypingError)


def check_emulated_integer(who, **given):
    """The same in the emulator (TypeError)."""
    for name, value in given.items():
        if not isinstance(value, (int, np.integer, np.bool_)):
            raise TypeError(f"{who}: {name} must be an integer, given {value!r}")
        if isinstance(value, enum.Enum):
            _check_enum(who, name, type(value), f".{value.name}", given, TypeError)


def _check_enum(who, name, kind, member, given, error):
    right = _ENUMS.get(kind.__name__, name)
    if name != right:
        raise error(
            f"{who}: {name} is {kind.__name__}{member}, which is for {right}: the order of the arguments is "
            f"... {', '.join(given)}"
        )


def check_words(primitive, name, array, allowed=INTEGERS):
    """At compile time: `array` must be a 1-D array of one of the `allowed` dtypes."""
    if isinstance(array, types.Array) and array.ndim == 1 and array.dtype in allowed:
        return
    raise TypingError(_not_words(primitive, name, array, getattr(array, "ndim", 0), allowed))


def check_emulated_words(primitive, name, array, allowed=INTEGERS):
    """The same in the emulator (TypeError), for a NumPy array."""
    if isinstance(array, np.ndarray):
        if array.ndim == 1 and array.dtype in _numpy_dtypes(allowed):
            return
        given, ndim = f"{array.dtype} {array.shape}", array.ndim
    else:
        given, ndim = f"the {type(array).__name__} {array!r}", 0
    raise TypeError(_not_words(primitive, name, given, ndim, allowed))


@functools.cache
def _numpy_dtypes(allowed):
    return frozenset(np.dtype(str(dtype)) for dtype in allowed)


def _not_words(primitive, name, given, ndim, allowed):
    hint = {0: "; an element is not enough, write x[3:] for x[3]", 1: ""}.get(
        ndim, "; take a row or a slice of it"
    )
    return f"{primitive}(): {name} must be a 1-D array of {', '.join(map(str, allowed))}, given {given}{hint}"


def check_contiguous(primitive, **arrays):
    """At compile time: C-contiguous arrays, all of one dtype."""
    for name, array in arrays.items():
        if not isinstance(array, types.Array):
            raise TypingError(f"{primitive}(): {name} must be an array, given {array}")
        if array.layout != "C":
            raise TypingError(
                f"{primitive}(): {name} must be contiguous (layout C), given {array}: slice only the first "
                "axis, without a step, and pass contiguous arrays to the kernel"
            )
    dtypes = {array.dtype for array in arrays.values()}
    if len(dtypes) > 1:
        given = ", ".join(f"{name} of {array.dtype}" for name, array in arrays.items())
        raise TypingError(f"{primitive}(): the arrays must have one dtype, given {given}")
