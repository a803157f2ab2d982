"""Loops whose code is emitted once for each value of the index, because registers cannot be indexed: for
what a thread holds of several ranks at once.
"""

import functools

from numba import cuda


@functools.cache
def tuple_of(n, function):
    """-> ``make(arguments)``, for kernels: (function(0, arguments), .., function(n - 1, arguments))."""
    before, k = tuple_of(n - 1, function) if n > 1 else None, n - 1

    @cuda.jit(device=True)
    def first(arguments):
        return (function(0, arguments),)

    @cuda.jit(device=True)
    def make(arguments):
        return before(arguments) + (function(k, arguments),)

    return make if n > 1 else first


@functools.cache
def for_each(n, function):
    """-> ``run(values, arguments)``, for kernels: function(k, values[k], arguments) for k = 0 .. n - 1."""
    before, k = for_each(n - 1, function) if n > 1 else None, n - 1

    @cuda.jit(device=True)
    def run(values, arguments):
        if before is not None:
            before(values, arguments)
        function(k, values[k], arguments)

    return run


@functools.cache
def folded(n, first, add):
    """-> ``fold(values, arguments)``, for kernels: first(values[0], arguments), then
    add(total, values[k], arguments) for k = 1 .. n - 1."""
    before, k = folded(n - 1, first, add) if n > 1 else None, n - 1

    @cuda.jit(device=True)
    def only(values, arguments):
        return first(values[0], arguments)

    @cuda.jit(device=True)
    def fold(values, arguments):
        return add(before(values, arguments), values[k], arguments)

    return fold if n > 1 else only


@functools.cache
def chained(n, function):
    """-> ``run(values, state)``, for kernels: the state after state = function(k, values[k], state) for
    k = 0 .. n - 1."""
    before, k = chained(n - 1, function) if n > 1 else None, n - 1

    @cuda.jit(device=True)
    def run(values, state):
        if before is not None:
            state = before(values, state)
        return function(k, values[k], state)

    return run


@functools.cache
def mapped(n, function):
    """-> ``make(values, arguments)``, for kernels: (function(values[0], arguments), ..,
    function(values[n - 1], arguments))."""

    @cuda.jit(device=True)
    def first(value, arguments):
        return (function(value, arguments),)

    @cuda.jit(device=True)
    def add(made, value, arguments):
        return made + (function(value, arguments),)

    return folded(n, first, add)
