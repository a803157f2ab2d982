"""What a case runs: an operation of one size, with numbers that tell which rank gave them in which call.

Numbers are small integers. What ranks give is computed on every rank alike, in wide dtypes, and so is the
exact result; an operation's dtype holds all of them. An element of a rank differs from that of the calls
before, and by much: what is stale differs from what is wanted. Ranks have unlike numbers in every call: what
is of another rank differs in most elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from shmemkit.support.dtypes import OF_ML_DTYPES, numpy_dtype

EXACT = {  # integers up to this are exact
    **{"float16": 2048, "bfloat16": 256, "float8_e4m3fn": 16, "float8_e5m2": 8},
    **{"int8": 127, "uint8": 254},  # 255 is the poison
}
MOST = 1000
POISON = 0xFF  # of all bytes of an output: NaN, or -1


def span_of(dtype, terms=1):
    """How many different integers a sum of so many `terms` may have each, to be exact in `dtype`."""
    return max(3, min(MOST, EXACT.get(dtype, 1 << 24) // terms))


def step_of(span):
    """By how much numbers of `span` different ones move from call to call: by as much as can be, so that
    averages show it, too, until all have had their turn."""
    return next(step for step in range(max(1, round(0.382 * span)), 0, -1) if math.gcd(step, span) == 1)


class Arrays:
    """Arrays of a World's module, of any dtype that operations take."""

    def __init__(self, world):
        self.xp, self.backend = world.xp, world.backend
        self._hashes, self._tables = {}, {}

    def empty(self, shape, dtype, first=0):
        """It begins at element `first` of what is allocated."""
        dtype = numpy_dtype(getattr(dtype, "name", dtype))  # CuPy makes no array of float8, but takes a view
        made = self.xp.empty((first + math.prod(shape)) * dtype.itemsize, "uint8").view(dtype)
        return made[first:].reshape(shape)

    def integers(self, shape, span, call, rank, low=0, mixed=False):
        """int32: those of `rank` in `call`, low .. low + span - 1. An element is the same again after `span`
        calls; `mixed`, which is for few numbers whose sums tell calls apart, at random."""
        size = math.prod(shape)
        if size not in self._hashes:
            x = self.xp.arange(size, dtype="uint32") * np.uint32(2654435761)
            x ^= x >> np.uint32(15)
            x *= np.uint32(2246822519)
            self._hashes[size] = x >> np.uint32(2)
        order = 131 * rank + (977 * call if mixed else 0)
        numbers = self._hashes[size] * np.uint32(2 * (order + 1) + 1) >> np.uint32(9)
        numbers = (numbers + np.uint32(step_of(span) * call % span)) % np.uint32(span)
        return (numbers.astype("int32") + np.int32(low)).reshape(shape)

    def narrow(self, wide, dtype):
        """Integers as `dtype`, exactly, or rounded to nearest even."""
        dtype = numpy_dtype(dtype)
        if dtype.name not in OF_ML_DTYPES:
            return wide.astype(dtype)
        if dtype.name not in self._tables:
            numbers = np.arange(-LARGEST, LARGEST + 1).astype("float32").astype(dtype)
            self._tables[dtype.name] = self.xp.asarray(numbers.view(f"uint{8 * dtype.itemsize}"))
        bits = self._tables[dtype.name][wide.astype("int64") + LARGEST]
        return bits.view(dtype).reshape(wide.shape)

    def widen(self, array):
        """Any numbers as float64."""
        name = array.dtype.name
        if name == "bfloat16":
            return (array.view("uint16").astype("uint32") << np.uint32(16)).view("float32").astype("float64")
        if name in OF_ML_DTYPES:
            table = np.arange(256, dtype="uint8").view(array.dtype).astype("float64")
            return self.xp.asarray(table)[array.view("uint8").astype("int64")]
        return array.astype("float64")

    def forget(self):
        self._hashes.clear()


LARGEST = 1 << 12  # integers up to this become bfloat16 or float8


class Subject:
    """A subclass has

    given(call, rank)        -> what that rank gives, as int32 or float64 arrays
    result(given)            -> what this rank gets of what all give: a list, by output, of int or float64
                             arrays. Or (array, valid): elements that are not valid may be anything
    enqueue(inputs, outputs) one call, on the World's stream
    outputs()                -> empty arrays for a call

    name        of its size
    dtypes      of what a rank gives
    out_dtypes  of the outputs
    tolerance   of each output: relative to the largest magnitude that is wanted; 0: all bits are compared
    calls       the most at once: large arrays take memory
    ways        in which it is run, of those in trials.py; default: all
    slow        on the emulator
    private     whether peers write to no output
    first       the element of their memory at which arrays begin; 1: they are not aligned
    """

    name = ""
    dtypes: tuple[str, ...]
    out_dtypes: tuple[str, ...]
    tolerance: tuple[float, ...] = ()  # default: exact
    calls = 6
    ways: tuple[str, ...] | None = None
    private, slow, first = True, False, 0
    given: Callable[[int, int], list[Any]]
    result: Callable[[list[Any]], list[Any]]
    outputs: Callable[[], list[Any]]
    enqueue: Callable[[list[Any], list[Any]], Any]

    def __init__(self, world, arrays):
        self.world, self.arrays, self.xp = world, arrays, world.xp
        self.me, self.n = world.rank, world.n_ranks

    def inputs(self, call):
        """This rank's arrays."""
        given = self.given(call, self.me)
        made = [self.arrays.narrow(x, dtype) for x, dtype in zip(given, self.dtypes, strict=True)]
        return [self._moved(x) for x in made] if self.first else made

    def _moved(self, array):
        moved = self.arrays.empty(array.shape, array.dtype, self.first)
        moved.reshape(-1).view("uint8")[...] = array.reshape(-1).view("uint8")
        return moved

    def copy(self, dst, src):
        """On the World's stream."""
        backend = self.world.backend
        dst, src = (x.reshape(-1).view("uint8") for x in (dst, src))
        backend.copy(dst, src)(backend.handle(None))

    def wanted(self, calls):
        """-> the outputs of a call of which rank r has given what it gives in calls[r], each as (array, what
        is valid or None): float64 where there is a tolerance"""
        found = self.result([self.given(call, rank) for rank, call in enumerate(calls)])
        pairs = [each if isinstance(each, tuple) else (each, None) for each in found]
        return [
            (wide if self._near(k) else self.arrays.narrow(wide, self.out_dtypes[k]), valid)
            for k, (wide, valid) in enumerate(pairs)
        ]

    def differs(self, k, output, wanted):
        """-> where output number `k` is not what is wanted"""
        array, valid = wanted
        if near := self._near(k):
            most = self.xp.maximum(self.xp.abs(array).max(), 1e-30) if array.size else 1
            differ = ~(self.xp.abs(self.arrays.widen(output) - array) <= near * most)  # also of NaN
        else:
            words = f"uint{8 * min(8, output.dtype.itemsize)}"
            differ = output.view(words) != array.view(words)
        return differ if valid is None else differ & valid

    def _near(self, k):
        return self.tolerance[k] if self.tolerance else 0
