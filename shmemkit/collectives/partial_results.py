"""Partial results in memory: a rank passes them on to the next one, which combines them with its own data.

    partials = totals("sum", "bfloat16")                    # on the host

    total = partials.load(row, i, length)                   # in a kernel, by one thread: the i-th of `length`
    partials.store(row, i, length, total)

`row` is 1-D, of uint64, with `partials.words` * length words. A total takes one word; those of float16 and
bfloat16 stay float32 and take two. Nothing is rounded. The first words of all totals come first, so that a
warp stores whole lines of 128 bytes. Loads and stores are ordinary ones.
"""

import functools
from typing import NamedTuple

import numpy as np
from numba import cuda

from shmemkit.compiler.ptx import bitcast, gpu, types
from shmemkit.device import reduction
from shmemkit.device.emulator import current_thread, from_scalar


class Partials(NamedTuple):
    words: int
    load: object
    store: object


@functools.cache
def totals(op, dtype):
    """-> the Partials of ``reduction(op, dtype)``; ValueError as there."""
    if reduction(op, dtype) and dtype in ("float16", "bfloat16"):
        return Partials(2, _load_floats, _store_floats)
    # All others are as wide as their totals, and to divide is left to the last: the word of a total is exact.
    first, _, word_of = reduction("sum" if op == "avg" else op, dtype)

    @cuda.jit(device=True)
    def load(row, i, length):
        return first(row[i])

    @cuda.jit(device=True)
    def store(row, i, length, total):
        row[i] = word_of(total, 1)

    return Partials(1, load, store)


@cuda.jit(device=True)
def _load_floats(row, i, length):
    return floats(row[i], row[length + i])


@cuda.jit(device=True)
def _store_floats(row, i, length, total):
    row[i] = low_floats(total)
    row[length + i] = high_floats(total)


# ---- a total of four float32, as of ``reduction``, and two words


def floats(low, high):
    """The total whose elements are those of these words. One thread."""
    current_thread("floats")
    return np.array([int(low), int(high)], np.uint64).view(np.float32)


def low_floats(total):
    """The word of its first two elements. One thread."""
    current_thread("low_floats")
    return from_scalar(total.view(np.uint64)[0])


def high_floats(total):
    """The word of its last two elements. One thread."""
    current_thread("high_floats")
    return from_scalar(total.view(np.uint64)[1])


_to_float, _to_bits = bitcast(types.uint32, types.float32), bitcast(types.float32, types.uint32)


@gpu(floats)
def _(low, high):
    def impl(low, high):
        shift = types.uint64(32)
        return (
            (_to_float(types.uint32(low)), _to_float(types.uint32(low >> shift))),
            (_to_float(types.uint32(high)), _to_float(types.uint32(high >> shift))),
        )

    return impl


@gpu(low_floats)
def _(total):
    return lambda total: _word(total[0])


@gpu(high_floats)
def _(total):
    return lambda total: _word(total[1])


@cuda.jit(device=True)
def _word(pair):
    return types.uint64(_to_bits(pair[0])) | types.uint64(_to_bits(pair[1])) << types.uint64(32)
