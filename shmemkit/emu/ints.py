"""Integers as a CUDA kernel compiled by Numba has them.

Numba computes integers in 64 bits whatever the width they are stored in: an operation on two unsigned operands is unsigned
and wraps modulo 2**64, any other is signed. Signed values are plain Python integers here (they wrap when they are stored
or cast, which gives the same bits unless an intermediate overflowed before a division, a right shift or a comparison);
unsigned values are ``Unsigned``. ``wrap`` is what a store into an array or a cast does.

Rules: Numba enhancement proposal 1, "Changes in integer typing".
"""

import numpy as np

_U64 = (1 << 64) - 1


def _binary(name):
    operation = getattr(int, name)

    def method(self, other):
        result = operation(self, other)
        return Unsigned(result & _U64) if type(other) is Unsigned else result

    return method


def _shift(name):
    operation = getattr(int, name)

    def method(self, other):
        return Unsigned(operation(self, other) & _U64)

    return method


class Unsigned(int):
    """An unsigned 64-bit value: with another Unsigned it wraps modulo 2**64, with a signed integer the result is signed."""

    __slots__ = ()

    __add__, __sub__, __mul__ = _binary("__add__"), _binary("__sub__"), _binary("__mul__")
    __floordiv__, __mod__ = _binary("__floordiv__"), _binary("__mod__")
    __and__, __or__, __xor__ = _binary("__and__"), _binary("__or__"), _binary("__xor__")
    __lshift__, __rshift__ = _shift("__lshift__"), _shift("__rshift__")  # a shift has the type of its left operand

    def __invert__(self):
        return Unsigned(~int(self) & _U64)

    def __neg__(self):
        return Unsigned(-int(self) & _U64)


class _Cast:
    """A Numba or NumPy integer type as kernels use it: called, it casts; given as a dtype, NumPy understands it."""

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)

    def __call__(self, value=0):
        return wrap(int(value), self.dtype)

    def __repr__(self):
        return self.dtype.name


def wrap(value, dtype):
    """`value` (any integer) as one of `dtype`: the low bits, read as signed or unsigned."""
    bits = dtype.itemsize * 8
    value = int(value) & ((1 << bits) - 1)
    if dtype.kind == "u":
        return Unsigned(value)
    return value - (1 << bits) if value >> (bits - 1) else value


def from_scalar(value):
    """A NumPy scalar as a kernel computes with it: integers in 64 bits, floats as they are."""
    if isinstance(value, np.unsignedinteger):
        return Unsigned(value)
    if isinstance(value, np.signedinteger):
        return int(value)
    return bool(value) if isinstance(value, np.bool_) else value


CASTS = {name: _Cast(name) for name in "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()}
CASTS |= {"intp": CASTS["int64"], "uintp": CASTS["uint64"], "uint": CASTS["uint64"]}
