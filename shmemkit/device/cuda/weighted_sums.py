"""Weighted sums of rows, 16 bytes at a time, in float32.

    weighted = weighted_sum("bfloat16")          # on the host

    total = weighted.zero()                      # in a kernel: the float32 totals of the elements of 16 bytes
    total = weighted.add(total, words, weight)   # words of load_vec16, a float32
    words = weighted.result(total)               # for store_vec16

``four_words`` turns two words of 64 bits, as LL128 and Lamport packets have, into such `words`, ``two_words``
back.

float16 and bfloat16 are widened, and rounded once, to nearest even, by `result`; float32 is not rounded. The
order is that of the calls, so equal calls give equal bits on a GPU, which multiplies and adds in one step
(fma); the emulator rounds between. NaN and inf pass through.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import cuda

from shmemkit.compiler.ptx import asm, bitcast, extend_half, gpu, gpu_function, types
from shmemkit.support.dtypes import numpy_dtype

from ..emulator import current_thread, from_scalar

DTYPES = ("float16", "bfloat16", "float32")


@cuda.jit(device=True)
def four_words(pair):
    low, high = pair
    shift = types.uint64(32)
    return types.uint32(low), types.uint32(low >> shift), types.uint32(high), types.uint32(high >> shift)


@cuda.jit(device=True)
def two_words(words):
    shift = types.uint64(32)
    return (
        types.uint64(words[1]) << shift | types.uint64(words[0]),
        types.uint64(words[3]) << shift | types.uint64(words[2]),
    )


class Weighted(NamedTuple):
    """Functions for kernels, by one thread; they touch no memory and order nothing."""

    zero: Callable
    add: Callable
    result: Callable


@functools.cache
def weighted_sum(dtype):
    """-> the Weighted of rows of `dtype`, one of DTYPES."""
    weighted = _emulated(numpy_dtype(dtype))
    zero, add, result = _of_floats() if dtype == "float32" else _of_halves(dtype)
    gpu(weighted.zero)(lambda: zero)
    gpu(weighted.add)(lambda total, words, weight: add)
    gpu(weighted.result)(lambda total: result)
    return weighted


# ---- in the emulator: a total is an array


def _emulated(dtype):
    def zero():
        current_thread("a weighted sum")
        return np.zeros(16 // dtype.itemsize, "float32")

    def add(total, words, weight):
        elements = np.array([int(word) for word in words], "uint32").view(dtype).astype("float32")
        with np.errstate(all="ignore"):
            return total + np.float32(weight) * elements

    def result(total):
        with np.errstate(all="ignore"):
            return tuple(from_scalar(word) for word in total.astype(dtype).view("uint32"))

    return Weighted(zero, add, result)


# ---- on the GPU: a total is a tuple

_to_float, _to_bits = bitcast(types.uint32, types.float32), bitcast(types.float32, types.uint32)


def _of_floats():
    @gpu_function
    def zero():
        nothing = types.float32(0)
        return nothing, nothing, nothing, nothing

    @gpu_function
    def add(total, words, weight):
        return (
            total[0] + weight * _to_float(words[0]),
            total[1] + weight * _to_float(words[1]),
            total[2] + weight * _to_float(words[2]),
            total[3] + weight * _to_float(words[3]),
        )

    @gpu_function
    def result(total):
        return _to_bits(total[0]), _to_bits(total[1]), _to_bits(total[2]), _to_bits(total[3])

    return zero, add, result


def _of_halves(dtype):
    low, high = (_low_bfloat16, _high_bfloat16) if dtype == "bfloat16" else (_low_float16, _high_float16)
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    pair = asm(
        f"cvt.rn.{kind}.f32 $0, $2, $1;", types.uint32, (types.float32, types.float32), pure=True
    )  # the first one into the lower half

    @gpu_function
    def zero():
        nothing = types.float32(0)
        return nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing

    @gpu_function
    def add(total, words, weight):
        return (
            total[0] + weight * low(words[0]),
            total[1] + weight * high(words[0]),
            total[2] + weight * low(words[1]),
            total[3] + weight * high(words[1]),
            total[4] + weight * low(words[2]),
            total[5] + weight * high(words[2]),
            total[6] + weight * low(words[3]),
            total[7] + weight * high(words[3]),
        )

    @gpu_function
    def result(total):
        return (
            pair(total[0], total[1]),
            pair(total[2], total[3]),
            pair(total[4], total[5]),
            pair(total[6], total[7]),
        )

    return zero, add, result


@gpu_function
def _low_bfloat16(word):
    return _to_float(types.uint32(word << types.uint32(16)))


@gpu_function
def _high_bfloat16(word):
    return _to_float(types.uint32(word & types.uint32(0xFFFF0000)))


@gpu_function
def _low_float16(word):
    return extend_half(types.uint16(word))


@gpu_function
def _high_float16(word):
    return extend_half(types.uint16(word >> types.uint32(16)))
