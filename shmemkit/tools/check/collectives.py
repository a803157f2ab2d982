"""The collectives as subjects."""

from __future__ import annotations

import math

from shmemkit.support.dtypes import numpy_dtype

from .subjects import MOST, Subject, span_of

TILE = 480  # bytes of an LL128 tile
ODD = 37  # elements
SLOW = 12 << 10  # bytes, on the emulator


def _scale(dtype, terms):
    """What numbers are multiplied by, so that a narrower dtype on the way shows. Sums of so many `terms` stay
    exact."""
    if dtype in ("int64", "uint64", "float64"):
        return 2**32 + 1
    return 513 if dtype == "float32" and terms <= 32 else 1


class Moved(Subject):
    """A collective of segments of `size` elements. `call(x, out)` enqueues it."""

    def __init__(self, world, arrays, what, size, dtype, root, op, call, symmetric=None):
        super().__init__(world, arrays)
        self.what, self.size, self.root, self.op, self.call = what, size, root, op, call
        self.dtypes = self.out_dtypes = (dtype,)
        self.span, self.low = span_of(dtype, self.n if what._reduces and op == "sum" else 1), 0
        # Of "avg", numbers that any number of ranks divides whose arrays a rank combines
        counts = [len(what._combined("", rank, self.n)) for rank in range(self.n)] if op == "avg" else []
        self.times = math.lcm(*counts)
        self.scale = _scale(dtype, self.n * self.times)
        if op in ("max", "min") and not dtype.startswith("uint"):
            self.low = -(self.span // 2)
        if op == "prod":  # the product of all ranks' is an int32
            self.span, self.low, self.scale = min(MOST, max(2, int(2 ** (31 / self.n)) - 1)), 1, 1
        self.shape = (self.n, size) if what._scatters else (size,)
        self.out_shape = (self.n, size) if what._gathers else (size,)
        self.gives, self.gets = what._gives(self.me, root), what._gets(self.me, root)
        self.symmetric, self.private = symmetric, symmetric is None
        nbytes = size * numpy_dtype(dtype).itemsize * what._segments(self.n)
        self.name = f"{size} elements"
        self.calls = 6 if nbytes <= 1 << 24 else 3
        self.slow = self.slow or nbytes > SLOW

    def given(self, call, rank):
        numbers = self.arrays.integers(self.shape, self.span, call, self.world.ranks[rank], self.low)
        numbers = numbers if self.scale == 1 else numbers.astype("int64") * self.scale
        return [numbers * self.times]

    def result(self, given):
        given = [x for (x,) in given]
        return [self.what._expected(self.xp, given, self.me, self.root, self.op)] if self.gets else []

    def outputs(self):
        of = self.out_shape, numpy_dtype(self.out_dtypes[0])
        if self.symmetric:  # made by all ranks
            made = self.symmetric(*of)
            return [made] if self.gets else []
        return [self.arrays.empty(*of, self.first)] if self.gets else []

    def enqueue(self, inputs, outputs):
        self.call(inputs[0] if self.gives else None, outputs[0] if outputs else None)


class Unaligned(Moved):
    """x and out begin at element 1."""

    first, slow = 1, True

    def __init__(self, *given):
        super().__init__(*given)
        self.name += ", unaligned"


class InPlace(Moved):
    """Of x and out the smaller is this rank's segment of the larger."""

    slow = True

    def __init__(self, *given):
        super().__init__(*given)
        self.name += ", in place"

    def enqueue(self, inputs, outputs):
        if not (self.gives and outputs):
            super().enqueue(inputs, outputs)
            return
        (x,), (out,) = inputs, outputs
        if self.what._scatters:
            self.call(x, x[self.me])
            self.copy(out, x[self.me])
        else:
            segment = out[self.me] if self.what._gathers else out
            self.copy(segment, x)
            self.call(segment, out)


class Mixed(Subject):
    """Calls of one object of a large size, a small one and a large one, as a call; only back to back. The
    emulator makes only the first."""

    def __init__(self, world, arrays, *parts):
        super().__init__(world, arrays)
        self.parts, self.name = parts, f"{', '.join(str(part.size) for part in parts)} elements in turn"
        self.dtypes = self.out_dtypes = tuple(dtype for part in parts for dtype in part.dtypes)
        self.calls, self.ways = 3, () if world.backend.name == "emulator" else ("back to back",)

    def given(self, call, rank):
        return [x for k, part in enumerate(self.parts) for x in part.given(len(self.parts) * call + k, rank)]

    def result(self, given):
        return [x for k, part in enumerate(self.parts) for x in part.result([[of[k]] for of in given])]

    def outputs(self):
        return [x for part in self.parts for x in part.outputs()]

    def enqueue(self, inputs, outputs):
        for k, part in enumerate(self.parts):
            part.enqueue(inputs[k : k + 1], outputs[k : k + 1])


def sizes_of(what, n, dtype, emulated, extra=()):
    """-> elements of segments: an odd few, a tile and a part of one, and larger ones in bytes of the full
    array"""
    itemsize, parts = numpy_dtype(dtype).itemsize, what._segments(n)
    large = () if emulated else (1 << 13, 1 << 20, 1 << 23)
    tail = (TILE + 56) // itemsize if emulated else (3 * TILE + 56) // itemsize
    found = [ODD, tail, *(max(1, size // itemsize // parts) for size in (*large, *extra))]
    return list(dict.fromkeys(found))
