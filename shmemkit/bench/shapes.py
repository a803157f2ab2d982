"""The rows of ``bench gemm``, ``ag_gemm``, ``gemm_rs`` and ``gemm_ar``, of each shape and contender. All of a
shape are timed in the same rounds, those of a part alone, too.
"""

import math
from typing import NamedTuple

from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.timer import Timer

from .measure import Contender, measure_all
from .refusal import Refused, agreed
from .results import METHOD_OF_ROUNDS

WORK = 2e12  # operations that a graph has, about: milliseconds
LEAST, MOST = 2, 50  # calls in a graph
EMULATED = 1 << 24  # operations that are emulated without waiting too long


def parse_shapes(text, names="MxNxK"):
    """ "MxNxK,MxNxK" -> [(m, n, k), ...]; likewise with other `names`"""
    shapes = []
    for part in text.split(","):
        sizes = part.lower().split("x")
        if len(sizes) != len(names.split("x")) or not all(
            size.strip().isdecimal() and int(size) for size in sizes
        ):
            raise ValueError(f"it has {part!r}; it must be {names}, of integers of 1 or more")
        shapes.append(tuple(map(int, sizes)))
    return shapes


class Entry(NamedTuple):
    """A contender, the part that it does alone (None: all), its name, if not that of its method, and its
    case, if not that of its part."""

    contender: Contender
    alone: str | None = None
    name: str | None = None
    case: str | None = None

    @property
    def method(self):
        return self.name or self.contender.method


def measure_shapes(world, results, options, progress, entries, cases_of):
    """Fill in the rows, and close the contenders. Collective.

    cases_of(shape, dtype)  -> {part, or None for all: its case}, whose data are made in this order. That of
                            all has the `bytes` of the rows, and `operations`, the product's
    """
    op, emulated, dtype = options.command, world.backend.name == "emulator", as_dtype(options.dtype)
    if emulated and max(2 * math.prod(shape) for shape in options.shapes) > EMULATED:
        raise SystemExit(
            f"{op}: --shapes has one that is too large for the emulator; it must have up to {EMULATED} "
            "operations, as 128x128x128"
        )
    if not emulated:
        results.method = METHOD_OF_ROUNDS
    todo = [(shape, cases_of(shape, dtype)) for shape in options.shapes]  # what is refused is so at once
    with progress(len(todo) * (1 + len(entries))) as step:
        while todo:  # the data of one shape go before those of the next come
            shape, cases = todo.pop(0)
            name, whole = "x".join(map(str, shape)), cases[None]
            step(f"{name}, its data")
            iters = 1 if emulated else min(max(math.ceil(WORK / whole.operations), LEAST), MOST)
            timer = Timer(world, options.iters or iters, options.replays)
            measured = _measure(world, timer, name, cases, entries, step)
            for entry, (us, note) in zip(entries, measured, strict=True):
                computes = us and entry.alone in (None, "product")
                tflops = whole.operations / us * 1e-6 if computes else None
                about = entry.contender.about if us else {}
                about |= {"shape": name, "alone": entry.alone, "tflops": tflops}
                results.add(op, entry.method, whole.bytes, us, note=note, **about)
    for entry in entries:
        entry.contender.close()


def _measure(world, timer, shape, cases, entries, step):
    """-> [(microseconds or None, note), ...] of `entries`"""

    def tell(i):
        step(f"{shape}, {entries[i].method}{' alone' if entries[i].alone else ''}")

    try:
        for case in cases.values():
            agreed(world, case.make)
    except Refused as reason:
        return [(None, f"refused: {reason}")] * len(entries)
    return measure_all(
        world, timer, [(cases[entry.case or entry.alone], entry.contender) for entry in entries], tell
    )
