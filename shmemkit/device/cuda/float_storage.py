"""Numbers of 16 bits, and float32, as what they are stored as: kernels compute with float32, and take arrays
of bfloat16 and float16 as unsigned integers.

    e = element("bfloat16")                    # on the host
    out[i] = e.narrow(e.widen(x[i]) * scale)   # in a kernel: x and out are uint16
    pairs[i] = e.pack(low, high)               # uint32: two neighbours in one store
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shmemkit.compiler.ptx import asm, bitcast, extend_half, gpu, round_to_half, types
from shmemkit.support.dtypes import numpy_dtype

from ..argument_checks import check_choice
from ..emulator import current_thread, from_scalar

__all__ = ["Element", "element"]

_STORED = {
    "bfloat16": ("uint16", "uint32"),
    "float16": ("uint16", "uint32"),
    "float32": ("float32", "uint64"),
}
ELEMENTS = tuple(_STORED)


class Element(NamedTuple):
    """A dtype, and functions for kernels, called by any thread. They touch no memory.

    stored, pair   names of the dtypes as which kernels view an array's elements, or pairs of them
    widen          stored -> float32
    narrow         float32 -> stored, rounded to nearest even
    pack           two float32 -> pair, the first one lower in memory
    """

    stored: str
    pair: str
    widen: Callable
    narrow: Callable
    pack: Callable


@functools.cache
def element(dtype: str) -> Element:
    """-> the Element of "bfloat16", "float16" or "float32". ValueError for others."""
    check_choice("element", "dtype", dtype, ELEMENTS)
    stored, pair = _STORED[dtype]
    functions = _emulated(numpy_dtype(dtype), stored, pair)
    for function, implementation in zip(functions, _on_gpu(dtype), strict=True):
        gpu(function)(implementation)
    return Element(stored, pair, *functions)


def _emulated(dtype, stored, pair):
    # All numbers of 16 bits, in float32: a conversion takes long.
    widened = None if dtype.itemsize > 2 else list(np.arange(1 << 16, dtype=stored).view(dtype).astype("f4"))

    def widen(bits):
        current_thread("widen")
        return np.float32(bits) if widened is None else widened[bits]

    def narrow(number):
        current_thread("narrow")
        if type(number) is np.float32 and dtype != np.float16:  # that one may warn
            return from_scalar(dtype.type(number).view(stored))
        with np.errstate(all="ignore"):
            return from_scalar(np.array([number], np.float32).astype(dtype).view(stored)[0])

    def pack(low, high):
        current_thread("pack")
        with np.errstate(all="ignore"):
            return from_scalar(np.array([low, high], np.float32).astype(dtype).view(pair)[0])

    return widen, narrow, pack


_bfloat16_bits = asm("cvt.rn.bf16.f32 $0, $1;", types.uint16, (types.float32,), pure=True)
_float_of = bitcast(types.uint32, types.float32)
_two = (types.float32, types.float32)
_pack = {
    "bfloat16": asm("cvt.rn.bf16x2.f32 $0, $2, $1;", types.uint32, _two, pure=True),
    "float16": asm("cvt.rn.f16x2.f32 $0, $2, $1;", types.uint32, _two, pure=True),
    "float32": asm("mov.b64 $0, {$1, $2};", types.uint64, _two, pure=True),
}


def _on_gpu(dtype):
    """Typing functions of widen, narrow, pack."""
    pack = _pack[dtype]

    def widen_bfloat16(bits):
        return lambda bits: _float_of(types.uint32(bits) << types.uint32(16))

    def narrow_bfloat16(number):
        return lambda number: _bfloat16_bits(number)

    def widen_float16(bits):
        return lambda bits: extend_half(bits)

    def narrow_float16(number):
        return lambda number: round_to_half(number)

    def widen_float32(bits):
        return lambda bits: types.float32(bits)

    def narrow_float32(number):
        return lambda number: types.float32(number)

    conversions = {
        "bfloat16": (widen_bfloat16, narrow_bfloat16),
        "float16": (widen_float16, narrow_float16),
        "float32": (widen_float32, narrow_float32),
    }
    return *conversions[dtype], lambda low, high: lambda low, high: pack(low, high)
