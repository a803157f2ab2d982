"""Arrays as words of 8 bytes, whatever their length: for kernels that handle data by words.

An array of uint64 is its own words; one of uint8, of any length and alignment, has words of 8 of its bytes,
the last perhaps of fewer.
"""

from __future__ import annotations

import numpy as np

from shmemkit.compiler.ptx import gpu, load_bytes, store_bytes, types
from shmemkit.typing import Array

from ..argument_checks import check_array, check_emulated_array, check_integer
from ..emulator import current_thread, from_scalar

__all__ = ["load_word", "n_words", "store_word"]

_DTYPES = (types.uint64, types.uint8)


def n_words(array: Array) -> int:
    """Return how many words `array`, 1-D of uint64 or uint8, has."""
    return (array.size * array.itemsize + 7) // 8


def load_word(array: Array, i: int) -> int:
    """Return word `i`, as uint64. If the last word has fewer than 8 bytes, the others are 0. An ordinary
    load, or up to 8 of them."""
    thread = current_thread("load_word")
    _check_emulated("load_word", array, i)
    last = min(array.nbytes, 8 * int(i) + 8)
    part = np.zeros(8, np.uint8)
    part[: last - 8 * int(i)] = thread.bytes_of("read", array, 8 * int(i), last)
    return from_scalar(part.view(np.uint64)[0])


def store_word(array: Array, i: int, word: int) -> None:
    """Store `word` as word `i`. If the last word has fewer than 8 bytes, the others are dropped. An ordinary
    store, or up to 8 of them."""
    thread = current_thread("store_word")
    _check_emulated("store_word", array, i)
    last = min(array.nbytes, 8 * int(i) + 8)
    part = np.array([int(word)], np.uint64).view(np.uint8)
    thread.bytes_of("write", array, 8 * int(i), last)[:] = part[: last - 8 * int(i)]


def _check_emulated(primitive, array, i):
    check_emulated_array(primitive, "array", array, 1, _DTYPES)
    if not 0 <= i < (array.nbytes + 7) // 8:
        raise IndexError(f"{primitive}(): i is {i}; array has words 0 to {(array.nbytes + 7) // 8 - 1}")


# ---- on the GPU


def _is_bytes(primitive, array):
    check_array(primitive, "array", array, 1, _DTYPES)
    return array.dtype == types.uint8


@gpu(n_words)
def _(array):
    if _is_bytes("n_words", array):
        return lambda array: (array.size + 7) >> 3
    return lambda array: array.size


@gpu(load_word)
def _(array, i):
    check_integer("load_word", i=i)
    load = load_bytes(1)

    def of_words(array, i):
        return array[i]

    def of_bytes(array, i):
        word, k, n = types.uint64(0), 0, min(8, array.size - 8 * i)
        while k < n:
            word |= types.uint64(load(array, 8 * i + k)) << types.uint64(8 * k)
            k += 1
        return word

    return of_bytes if _is_bytes("load_word", array) else of_words


@gpu(store_word)
def _(array, i, word):
    check_integer("store_word", i=i, word=word)
    store = store_bytes(1)

    def of_words(array, i, word):
        array[i] = word

    def of_bytes(array, i, word):
        k, n = 0, min(8, array.size - 8 * i)
        while k < n:
            store(array, 8 * i + k, types.uint64(word) >> types.uint64(8 * k))
            k += 1

    return of_bytes if _is_bytes("store_word", array) else of_words
