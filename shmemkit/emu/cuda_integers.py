"""Integers as a CUDA kernel compiled by Numba has them.

Numba computes integers in 64 bits whatever the width they are stored in: an operation on two unsigned
operands is unsigned and wraps modulo 2**64, any other is signed. Signed values are plain Python integers
here. They wrap when they are stored, cast, or combined with an unsigned operand, and where
``arithmetic.py`` has found that an overflow would show. Unsigned values are ``Unsigned``. ``wrap`` is what a
store into an array or a cast does.

The width of a value matters to ``cuda.clz``, ``brev`` and ``popc`` alone. In kernels that use them, what is
loaded or cast is `sized`: of a subclass that knows its `bits`; the result of an operation has 64 again.

Rules: Numba enhancement proposal 1, "Changes in integer typing".
"""

import operator
from typing import Any

import numpy as np

_U64 = (1 << 64) - 1
_I63 = (1 << 63) - 1


def _signed(value):
    """The low 64 bits of `value`, read as signed."""
    value &= _U64
    return value - (1 << 64) if value > _I63 else value


def _binary(name):
    operation = getattr(int, name)

    def method(self, other):
        if isinstance(other, Unsigned):
            return Unsigned(operation(self, other) & _U64)
        if not isinstance(other, int):
            return NotImplemented
        if self <= _I63:
            result = operation(self, other)
            return result if -_I63 <= result <= _I63 else _signed(result)
        return _signed(operation(_signed(int(self)), other))

    return method


def _reflected(name):
    operation = getattr(int, name)

    def method(self, other):  # `other` is signed: an Unsigned on the left has computed the result itself
        if not isinstance(other, int):
            return NotImplemented
        return _signed(operation(int(other), _signed(int(self))))

    return method


def _quotient(binary):
    """By zero: 0."""

    def method(self, other):
        if isinstance(other, int) and not other:
            return Unsigned(0) if isinstance(other, Unsigned) else 0
        return binary(self, other)

    return method


def _reflected_quotient(reflected):
    return lambda self, other: reflected(self, other) if self else 0


def _shift(name):
    operation = getattr(int, name)

    def method(self, other):
        return Unsigned(operation(self, other) & _U64)

    return method


class Unsigned(int):
    """An unsigned 64-bit value. With another Unsigned the result wraps modulo 2**64, with a signed integer it
    is signed."""

    __slots__ = ()
    bits = 64

    def __invert__(self):
        return Unsigned(~int(self) & _U64)

    def __neg__(self):
        return Unsigned(-int(self) & _U64)

    def __pos__(self):
        return self

    __abs__ = __pos__


for _name in "add sub mul and or xor floordiv mod".split():
    _operation, _of_left = _binary(f"__{_name}__"), _reflected(f"__{_name}__")
    if _name in ("floordiv", "mod"):
        _operation, _of_left = _quotient(_operation), _reflected_quotient(_of_left)
    setattr(Unsigned, f"__{_name}__", _operation)
    setattr(Unsigned, f"__r{_name}__", _of_left)
for _name in ("__lshift__", "__rshift__"):  # a shift has the type of its left operand
    setattr(Unsigned, _name, _shift(_name))


class Signed(int):
    """A signed value that is known to have `bits` bits."""

    __slots__ = ()
    bits = 64

    def __new__(cls, value):
        """`value`: any integer; its low bits."""
        value &= (1 << cls.bits) - 1
        return super().__new__(cls, value - (1 << cls.bits) if value >> cls.bits - 1 else value)


class Int32(Signed):
    """The lane masks of warp votes, for ``cuda.popc``."""

    __slots__ = ()
    bits = 32


def _in_64_bits(name):
    operation = getattr(operator, name)
    return lambda self, other: operation(int(self), other)


# An Unsigned on the right has its say.
_CAREFUL = {
    f"__{name}__": _in_64_bits(f"__{name}__") for name in "add sub mul floordiv mod and or xor".split()
}
_SIZED: dict[str, Any] = {
    **{f"int{n}": type(f"Int{n}", (Signed,), {"__slots__": (), "bits": n, **_CAREFUL}) for n in (8, 16, 32)},
    **{f"uint{n}": type(f"UInt{n}", (Unsigned,), {"__slots__": (), "bits": n}) for n in (8, 16, 32)},
}


def _cast(name, sized=False):
    """A Numba or NumPy integer type as kernels use it: called, it casts; given as a dtype, NumPy understands
    it."""
    dtype = np.dtype(name)
    limits = np.iinfo(dtype)
    mask, least, most = (1 << limits.bits) - 1, int(limits.min), int(limits.max)

    def signed(value=0):
        if type(value) is not int:
            value = int(value)
        return value if least <= value <= most else wrap(value, dtype)

    def unsigned(value=0):
        return Unsigned(int(value) & mask)

    cast: Any = unsigned if dtype.kind == "u" else signed
    if sized and name in _SIZED:
        of_size = _SIZED[name]

        def cast(value=0):
            return of_size((unsigned if dtype.kind == "u" else signed)(value))

    cast.dtype, cast.__name__ = dtype, name
    return cast


def wrap(value, dtype):
    """`value` (any integer) as one of `dtype`: the low bits, read as signed or unsigned."""
    bits = dtype.itemsize * 8
    value = int(value) & ((1 << bits) - 1)
    if dtype.kind == "u":
        return Unsigned(value)
    return value - (1 << bits) if value >> (bits - 1) else value


_FROM_SCALAR: dict[type, Any] = {np.bool_: bool}
_FROM_SCALAR |= {np.dtype(code).type: int for code in "bhilq"} | {
    np.dtype(code).type: Unsigned for code in "BHILQ"
}


def from_scalar(value) -> Any:
    """A NumPy scalar as a kernel computes with it: integers in 64 bits, floats as they are."""
    convert = _FROM_SCALAR.get(type(value))
    return value if convert is None else convert(value)


def sized(value) -> Any:
    """As `from_scalar`, with the number of bits."""
    kind = _SIZED.get(value.dtype.name)
    return from_scalar(value) if kind is None else kind(int(value))


_NAMES = "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()


def _casts(sized):
    casts = {name: _cast(name, sized) for name in _NAMES}
    return casts | {"intp": casts["int64"], "uintp": casts["uint64"], "uint": casts["uint64"]}


CASTS, SIZED_CASTS = _casts(False), _casts(True)
FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
