"""Tuples of registers: loops over their parts, whose code is there once for each part, since a register
cannot be indexed.

    store = for_each_part(8, store_eight)        # on the host
    store(accumulators, (tile, row))             # in a kernel: store_eight(part, i, (tile, row)) for each i

PTX ISA has no indexed registers; what is indexed by a variable is in local memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from shmemkit.compiler.ptx import gpu_parts

from ..emulator import current_thread, rebind

__all__ = ["combine_parts", "for_each_part", "map_parts"]


@functools.cache
def for_each_part(size: int, function: Callable) -> Callable:
    """-> ``run(values, arguments)``, for kernels, which calls ``function(part, i, arguments)`` for each part.

    A part has `size` elements of the tuple `values`, from the first on; i is its number, a constant.

    function   a ``@cuda.jit(device=True)`` function that returns nothing
    arguments  anything, as a tuple
    """

    def run(values, arguments):
        current_thread("for_each_part")
        call = rebind(function.py_func)
        for i in range(len(values) // size):
            call(values[i * size : (i + 1) * size], i, arguments)

    gpu_parts(run, size, function.py_func, mapped=False)
    return run


@functools.cache
def map_parts(size: int, function: Callable) -> Callable:
    """-> ``run(values, arguments)``, as by ``for_each_part``, which returns the new values of all parts.

    `function` returns the new values of its part, a tuple of as many.
    """

    def run(values, arguments):
        current_thread("map_parts")
        call, changed = rebind(function.py_func), ()
        for i in range(len(values) // size):
            changed += tuple(call(values[i * size : (i + 1) * size], i, arguments))
        return changed

    gpu_parts(run, size, function.py_func, mapped=True)
    return run


@functools.cache
def combine_parts(size: int, function: Callable) -> Callable:
    """-> ``run(values, others, arguments)``, as by ``map_parts``, of two tuples of one type: it calls
    ``function(part, other, i, arguments)``."""

    def run(values, others, arguments):
        current_thread("combine_parts")
        call, changed = rebind(function.py_func), ()
        for i in range(len(values) // size):
            part = slice(i * size, (i + 1) * size)
            changed += tuple(call(values[part], others[part], i, arguments))
        return changed

    gpu_parts(run, size, function.py_func, mapped=True, tuples=2)
    return run
