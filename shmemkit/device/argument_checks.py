"""What a primitive may be given. The messages are the same in the emulator (TypeError or ValueError) and on
the GPU, where compiling fails (TypingError)."""

import enum
import functools
from typing import get_args

import numpy as np

from shmemkit.compiler.ptx import TypingError, types
from shmemkit.support.settings import listed
from shmemkit.typing import Comparison, Scope

from .emulator import address
from .enums import ComparisonType, SignalOp, members

SCOPES, COMPARES = get_args(Scope), get_args(Comparison)

INTEGERS = (types.int32, types.uint32, types.int64, types.uint64)
OFFSETS = (types.int64,)
WORDS = (types.uint64,)
SIGNALS = (types.uint64, types.int64)  # of NVSHMEM
NUMBERS = (*INTEGERS, types.float32, types.float64)


# What other libraries call so, and what does it here.
_INSTEAD = {
    "release": ". A wait or a load acquires, notify() releases",
    "acq_rel": ". A wait or a load acquires, notify() releases",
    "intra_node": ". 'sys' reaches all ranks of a node",
    "inter_node": ". put_signal() and signal_op() reach other nodes, and signal_wait_until() waits there",
    "cta": ". cuda.syncthreads() orders the threads of a block",
}


def not_allowed(primitive, name, given, allowed):
    """The message for an argument that is not one of `allowed`."""
    instead = _INSTEAD.get(given, "") if isinstance(given, str) else ""
    if given in ("release", "acq_rel") and "acquire" not in allowed:
        instead = ""
    return f"{primitive}(): {name} is {given!r}; it must be {_choices(allowed)}{instead}"


def _choices(allowed):
    if isinstance(allowed, range):
        return f"{allowed[0]} to {allowed[-1]}"
    return listed(map(repr, allowed))


def check_choice(primitive, name, given, allowed):
    """In the emulator: `given` must be one of `allowed`."""
    if given not in allowed:
        raise ValueError(not_allowed(primitive, name, given, allowed))


def literal_choice(primitive, name, given, allowed):
    """On the GPU, at compile time: what `given`, a numba type, stands for; one of `allowed`."""
    value = given
    if isinstance(given, types.Omitted):
        value = given.value
    elif isinstance(given, types.Literal):
        value = given.literal_value
    elif not isinstance(given, (str, int)):  # as a default is given
        raise TypingError(not_literal(primitive, name, given, _choices(allowed)))
    if value not in allowed:
        raise TypingError(not_allowed(primitive, name, value, allowed))
    return value


def not_literal(primitive, name, given, needed):
    """The message for a variable of type `given`, a numba type, where a literal is needed."""
    return (
        f"{primitive}(): {name} is a variable of type {given}; it must be a literal in the call, {needed}. "
        "It decides which instruction is compiled"
    )


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


def _wanted(name):
    return {"signal_op": members(SignalOp), "compare": members(ComparisonType)}.get(name, "an integer")


def check_integer(primitive, **given):
    """At compile time: these arguments must be integers, and no enum members that are for another one."""
    for name, value in given.items():
        if not isinstance(value, (types.Integer, types.Boolean, types.IntEnumMember, int)):
            raise TypingError(f"{primitive}(): {name} is {described(value)}; it must be {_wanted(name)}")
        if isinstance(value, types.IntEnumMember):
            _check_enum(primitive, name, value.instance_class, given, TypingError)


def check_emulated_integer(primitive, **given):
    """The same in the emulator (TypeError)."""
    for name, value in given.items():
        if not isinstance(value, (int, np.integer, np.bool_)):
            raise TypeError(f"{primitive}(): {name} is {described(value)}; it must be {_wanted(name)}")
        if isinstance(value, enum.Enum):
            _check_enum(primitive, name, type(value), given, TypeError)


def _check_enum(primitive, name, kind, given, error):
    right = _ENUMS.get(kind.__name__, name)
    if name != right:
        raise error(
            f"{primitive}(): {name} is a {kind.__name__}, which is for {right}. The order of these arguments "
            f"is {', '.join(given)}"
        )


_NOT_CONTIGUOUS = "non-contiguous "
# What one side calls the types of the other.
_TYPES = {"int": "int64", "Int32": "int32", "Unsigned": "uint64", "float": "float64", "unicode_type": "str"}


def described(given):
    """What an argument is: a numba type at compile time, an object in the emulator."""
    if isinstance(given, types.Array):
        contiguous = given.layout == "C"
    elif isinstance(given, np.ndarray):
        contiguous = given.flags.c_contiguous
    else:
        kind = str(types.unliteral(given)) if isinstance(given, types.Type) else type(given).__name__
        return f"of type {_TYPES.get(kind, kind)}"
    return f"a {'' if contiguous else _NOT_CONTIGUOUS}{given.ndim}-D array of {given.dtype}"


def check_array(primitive, name, array, ndim=None, dtypes=None, contiguous=True):
    """At compile time: `array` must be an array, of so many dimensions, of one of `dtypes` (None: any), and
    contiguous."""
    if not (
        isinstance(array, types.Array)
        and ndim in (None, array.ndim)
        and (dtypes is None or array.dtype in dtypes)
        and (array.layout == "C" or not contiguous)
    ):
        raise TypingError(_wrong_array(primitive, name, array, ndim, dtypes, contiguous))


def check_emulated_array(primitive, name, array, ndim=None, dtypes=None, contiguous=True):
    """The same in the emulator (TypeError), for a NumPy array."""
    if not (
        isinstance(array, np.ndarray)
        and ndim in (None, array.ndim)
        and (dtypes is None or array.dtype in _numpy_dtypes(dtypes))
        and (array.flags.c_contiguous or not contiguous)
    ):
        raise TypeError(_wrong_array(primitive, name, array, ndim, dtypes, contiguous))


def _wrong_array(primitive, name, array, ndim, dtypes, contiguous):
    kind = " ".join(["contiguous"] * contiguous + [f"{ndim}-D"] * bool(ndim))
    needed = f"{f'a {kind}' if kind else 'an'} array{f' of {listed(dtypes)}' if dtypes else ''}"
    given = described(array)
    hint = ""
    if not isinstance(array, (types.Array, np.ndarray)):
        hint = ". Write x[3:] for the element x[3]" if ndim == 1 else ""
    elif dtypes and types.uint8 in dtypes and str(array.dtype) not in map(str, dtypes):
        hint = ". Pass a view of it, such as x.view('uint8')"
    elif ndim == 1 < array.ndim:
        hint = ". Pass a row or a slice of it"
    elif contiguous and _NOT_CONTIGUOUS in given:
        hint = ". Slice only the first axis, without a step, and pass contiguous arrays to the kernel"
    return f"{primitive}(): {name} is {given}; it must be {needed}{hint}"


def check_words(primitive, name, array, allowed=INTEGERS):
    """At compile time: `array` must be a 1-D array of one of the `allowed` dtypes, of any stride."""
    check_array(primitive, name, array, 1, allowed, contiguous=False)


def check_emulated_words(primitive, name, array, allowed=INTEGERS):
    """The same in the emulator (TypeError), for a NumPy array."""
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype in _numpy_dtypes(allowed):
        return
    raise TypeError(_wrong_array(primitive, name, array, 1, allowed, False))


# By the id of a tuple, which it keeps: Numba's types take long to hash.
_known = {}


def _numpy_dtypes(allowed):
    known = _known.get(id(allowed))
    if known is not None:
        return known[1]
    dtypes = _as_numpy(allowed)
    if len(_known) < 256:
        _known[id(allowed)] = allowed, dtypes
    return dtypes


@functools.cache
def _as_numpy(allowed):
    return frozenset(np.dtype(str(dtype)) for dtype in allowed)


def check_aligned(primitive, name, array, alignment):
    """In the emulator: `array` begins at a multiple of `alignment` bytes."""
    if array.size and address(array) % alignment:  # without elements it is anywhere
        raise ValueError(
            f"{primitive}(): {name} begins at address {address(array):#x}; it must begin at a multiple of "
            f"{alignment} bytes"
        )


def check_contiguous(primitive, **arrays):
    """At compile time: C-contiguous arrays, all of one dtype."""
    for name, array in arrays.items():
        check_array(primitive, name, array)
    _check_dtypes(primitive, TypingError, **arrays)


def check_emulated_contiguous(primitive, **arrays):
    """The same in the emulator (TypeError)."""
    for name, array in arrays.items():
        check_emulated_array(primitive, name, array)
    _check_dtypes(primitive, TypeError, **arrays)


def _check_dtypes(primitive, error, **arrays):
    if len({array.dtype for array in arrays.values()}) > 1:
        given = ", ".join(f"{name} is {array.dtype}" for name, array in arrays.items())
        raise error(f"{primitive}(): {given}; they must have the same dtype")
