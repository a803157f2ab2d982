"""Reductions of words: 8 bytes at a time, whatever the elements are.

    combine = reduction("sum", "bfloat16")       # on the host

    total = combine.first(word)                  # in a kernel: uint64 words, of 4 elements here
    total = combine.add(total, other)
    word = combine.result(total, n)              # of a total of n words

float16, bfloat16 and float8 are widened to float32, combined there, and rounded once, to nearest even, by
`result`. Integers are combined modulo 2**bits. The order is that of the calls, so equal calls give equal
bits. NaN stays NaN, also in "max" and "min" (maximum and minimum of IEEE 754-2019, but for the sign of
zeros).

float8_e4m3fn and float8_e5m2 saturate, as cvt.rn.satfinite of PTX does: a result beyond the largest number,
448 or 57344, becomes that number, with its sign. So does an infinite result: an infinity of float8_e5m2 is
infinite while it is combined, and becomes 57344. A NaN becomes 0x7F (``float8.py``).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple, get_args

import numpy as np

from shmemkit.compiler.ptx import asm, bitcast, extend_half, gpu, gpu_function, round_to_half, types
from shmemkit.support.dtypes import REDUCIBLE, numpy_dtype
from shmemkit.support.settings import listed
from shmemkit.typing import Op

from ..emulator import current_thread, from_scalar
from .float8 import FLOAT8, conversions_of_float8, saturated

__all__ = ["OPS", "Reduction", "reduction"]

OPS = get_args(Op)
DTYPES = tuple(REDUCIBLE)


class Reduction(NamedTuple):
    """Functions for kernels, called by one thread. They touch no memory and order nothing.

    first    makes a total of one word
    add      combines a total with a word
    result   gives the word of a total of n words
    """

    first: Callable
    add: Callable
    result: Callable


@functools.cache
def reduction(op: Op, dtype: str) -> Reduction:
    """-> the Reduction of words of `dtype`. ValueError for an unknown op or dtype.

    op     "sum", "prod", "max", "min" or, of floating-point numbers, "avg": the sum divided by n
    dtype  a name, as "float16": float8_e4m3fn, float8_e5m2, bfloat16, floats and integers of 8 to 64 bits
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}; it must be {listed(map(repr, OPS))}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be {listed(DTYPES)}. View or cast the array")
    if op == "avg" and "float" not in dtype:
        raise ValueError(
            f"op is 'avg' and dtype {dtype}; it must be a floating-point dtype. Use 'sum' and divide"
        )
    combined = _emulated(op, dtype)
    for primitive, implementation in zip(combined, _of_words(op, dtype), strict=True):
        _register(primitive, implementation)
    return combined


# ---- in the emulator: a total is an array


def _emulated(op, name):
    dtype, wide = numpy_dtype(name), numpy_dtype(REDUCIBLE[name].wide)
    ufunc = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]

    def elements(word):
        return np.array([int(word)], np.uint64).view(dtype).astype(wide)

    def first(word):
        current_thread("a reduction")
        return elements(word)

    def add(total, word):
        with np.errstate(all="ignore"):
            return ufunc(total, elements(word))

    def result(total, n):
        with np.errstate(all="ignore"):
            if op == "avg":
                total = total / wide.type(n)
            if name in FLOAT8:
                total = saturated(total, name)
            return from_scalar(total.astype(dtype).view(np.uint64)[0])

    return Reduction(first, add, result)


# ---- on the GPU: a total is one wide number, or a pair of totals, of the halves of the word


def _register(primitive, implementation):
    gpu(primitive)(_with_parameters(primitive, implementation))


def _with_parameters(primitive, implementation):
    if primitive.__code__.co_argcount == 1:
        return lambda word: implementation
    if primitive.__name__ == "add":
        return lambda total, word: implementation
    return lambda total, n: implementation


def _of_words(op, name):
    bits = 8 * REDUCIBLE[name].bytes
    functions = _of_elements(op, name)
    if name in _PACKED:
        functions, bits = _of_two_halves(op, name, *functions[:2]), 32
    while bits < 64:
        functions = _of_pairs(*functions, bits)
        bits *= 2
    return functions


def _of_elements(op, name):
    """Of a word's lowest element; what is above it is ignored, and undefined in the result."""
    wide, widen, narrow = _conversions(name)
    combine, mean = _combining(op), op == "avg"

    @gpu_function
    def first(word):
        return widen(word)

    @gpu_function
    def add(total, word):
        return combine(total, widen(word))

    @gpu_function
    def result(total, n):
        return narrow(total / wide(n) if mean else total)

    return first, add, result


def _of_pairs(first_half, add_half, result_half, bits):
    """Of two elements, or two pairs of them, of `bits` bits each."""
    shift, mask = types.uint64(bits), types.uint64((1 << bits) - 1)

    @gpu_function
    def first(word):
        return first_half(word), first_half(word >> shift)

    @gpu_function
    def add(total, word):
        return add_half(total[0], word), add_half(total[1], word >> shift)

    @gpu_function
    def result(total, n):
        return result_half(total[0], n) & mask | result_half(total[1], n) << shift

    return first, add, result


def _of_two_halves(op, name, first_half, add_half):
    """Of a word's lower half: two elements of 16 bits, which are rounded by one instruction."""
    pack = asm(f"cvt.rn.{_PACKED[name]}.f32 $0, $2, $1;", types.uint32, (types.float32,) * 2, pure=True)
    mean, sixteen = op == "avg", types.uint64(16)

    @gpu_function
    def first(word):
        return first_half(word), first_half(word >> sixteen)

    @gpu_function
    def add(total, word):
        return add_half(total[0], word), add_half(total[1], word >> sixteen)

    @gpu_function
    def result(total, n):
        low, high = total
        if mean:
            low, high = low / types.float32(n), high / types.float32(n)
        return types.uint64(pack(low, high))

    return first, add, result


def _combining(op):
    @gpu_function
    def maximum(a, b):
        return a if a > b or a != a else b

    @gpu_function
    def minimum(a, b):
        return a if a < b or a != a else b

    return {"prod": operator.mul, "max": maximum, "min": minimum}.get(op, operator.add)


_to_float = bitcast(types.uint32, types.float32)
_round_to_bfloat16 = asm("cvt.rn.bf16.f32 $0, $1;", types.uint16, (types.float32,), pure=True)


_PACKED = {"bfloat16": "bf16x2", "float16": "f16x2"}


def _conversions(name):
    """-> numba type that `name` is widened to, widen(word), narrow(number of that type) -> word"""
    if name in FLOAT8:
        return types.float32, *conversions_of_float8(name)
    if name == "bfloat16":

        @gpu_function
        def widen(word):
            return _to_float(types.uint32(word) << types.uint32(16))

        @gpu_function
        def narrow(number):
            return types.uint64(_round_to_bfloat16(number))

        return types.float32, widen, narrow
    if name == "float16":

        @gpu_function
        def widen(word):
            return extend_half(types.uint16(word))

        @gpu_function
        def narrow(number):
            return types.uint64(round_to_half(number))

        return types.float32, widen, narrow
    element = getattr(types, name)
    if isinstance(element, types.Float):
        bits = getattr(types, f"uint{element.bitwidth}")
        to_float, to_bits = bitcast(bits, element), bitcast(element, bits)

        @gpu_function
        def widen(word):
            return to_float(bits(word))

        @gpu_function
        def narrow(number):
            return types.uint64(to_bits(number))

        return element, widen, narrow

    @gpu_function
    def widen(word):
        return wide(element(word))

    @gpu_function
    def narrow(number):
        return types.uint64(number)

    wide = types.int64 if element.signed else types.uint64
    return wide, widen, narrow
