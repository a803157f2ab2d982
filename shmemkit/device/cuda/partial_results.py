"""Partial results in memory: a rank passes them on to the next one, which combines them with its own data.

    partials = totals("sum", "bfloat16")                    # on the host

    total = partials.load(row, i, length)                   # in a kernel, by one thread: the i-th of `length`
    partials.store(row, i, length, total)

`row` is 1-D, of uint64, with `partials.words` * length words. A total takes one word; those of float16 and
bfloat16 stay float32 and take two, those of float8 four. Nothing is rounded. The first words of all totals
come first, so that a warp stores whole lines of 128 bytes. Loads and stores are ordinary ones.

Memory is for totals of two words. So float8 counts twice (``shares``): in chunks and parts of half as many
words, and in arrays of half of max_nbytes (``Method.counts``).
"""

import functools
from typing import NamedTuple

import numpy as np
from numba import cuda

from shmemkit.compiler.ptx import bitcast, gpu, types
from shmemkit.device.emulator import current_thread, from_scalar
from shmemkit.support.dtypes import widening

from .word_reductions import reduction


class Partials(NamedTuple):
    words: int
    load: object
    store: object


def shares(dtype):
    """How many times two words the totals of `dtype` take: 2 of float8, else 1, also where that is less."""
    return max(1, widening(dtype) // 2)


@functools.cache
def totals(op, dtype):
    """-> the Partials of ``reduction(op, dtype)``; ValueError as there."""
    # To divide is left to the last: where totals are no wider than elements, the word of one is exact.
    first, _, word_of = reduction("sum" if op == "avg" else op, dtype)
    if widening(dtype) > 1:
        return {2: Partials(2, _load_floats, _store_floats), 4: Partials(4, _load_eight, _store_eight)}[
            widening(dtype)
        ]

    @cuda.jit(device=True)
    def load(row, i, length):
        return first(row[i])

    @cuda.jit(device=True)
    def store(row, i, length, total):
        row[i] = word_of(total, 1)

    return Partials(1, load, store)


@functools.cache
def merging(op, dtype):
    """-> ``merge(total, row, i, length)``, for kernels: a total, combined with the i-th in `row`, as ``load``
    of ``totals(op, dtype)`` has it."""
    words = totals(op, dtype).words
    if words == 1:
        add = reduction(op, dtype).add

        @cuda.jit(device=True)
        def merge(total, row, i, length):
            return add(total, row[i])  # the word of a total is exact

        return merge
    first, add, word_of = reduction("sum" if op == "avg" else op, "float32")

    @cuda.jit(device=True)
    def merge_floats(total, row, i, length):
        low = add(first(low_floats(total)), row[i])
        high = add(first(high_floats(total)), row[length + i])
        return floats(word_of(low, 1), word_of(high, 1))

    @cuda.jit(device=True)
    def merge_eight(total, row, i, length):
        return joined(
            merge_floats(half(total, 0), row, i, length),
            merge_floats(half(total, 1), row, 2 * length + i, length),
        )

    return merge_eight if words == 4 else merge_floats


@cuda.jit(device=True)
def _load_floats(row, i, length):
    return floats(row[i], row[length + i])


@cuda.jit(device=True)
def _store_floats(row, i, length, total):
    row[i] = low_floats(total)
    row[length + i] = high_floats(total)


@cuda.jit(device=True)
def _load_eight(row, i, length):
    return joined(_load_floats(row, i, length), _load_floats(row, 2 * length + i, length))


@cuda.jit(device=True)
def _store_eight(row, i, length, total):
    _store_floats(row, i, length, half(total, 0))
    _store_floats(row, 2 * length + i, length, half(total, 1))


# ---- a total of eight float32, as of ``reduction``, and two of four


def joined(low, high):
    """The total of both. One thread."""
    current_thread("joined")
    return np.concatenate([low, high])


def half(total, k):
    """Its first four float32 if the literal `k` is 0, the others if it is 1. One thread."""
    current_thread("half")
    return total[4 * k : 4 * k + 4]


@gpu(joined)
def _(low, high):
    return lambda low, high: (low, high)


@gpu(half)
def _(total, k):
    k = k.literal_value
    return lambda total, k: total[k]


# ---- a total of four float32, and two words


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
