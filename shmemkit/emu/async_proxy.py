"""Shared memory as the TMA and the tensor cores see it, through a proxy of their own: what a thread has
stored they do not see before its `fence_proxy_async`.

Stores are noted where they matter: a kernel that reaches one of the functions decorated with `reads_shared`
gets `SharedArray`s.
"""

import contextlib
import functools
import types
from typing import Any

import numpy as np

from shmemkit.compiler.numba_internals import CUDADispatcher
from shmemkit.support.names_in_code import names_in

from .device_arrays import IntegerArray, address
from .workers import current


def reads_shared(function):
    """Decorator: a primitive by which the asynchronous proxy reads shared memory."""
    function.reads_shared = True
    return function


class SharedArray(IntegerArray):
    """An array whose stores are noted, with the thread, until that calls `fence_proxy_async`."""

    __slots__ = ()

    def __setitem__(self, index, value):
        IntegerArray.__setitem__(self, index, value)
        self.stored(index)

    def stored(self, index):
        """The running thread stores what `index` names."""
        noted = unfenced(current().thread)
        if type(index) is int and self.ndim == 1:
            noted.add(address(self) + (index if index >= 0 else index + len(self)) * self.strides[0])
            return
        index = index if isinstance(index, tuple) else (index,)
        # Slices, so that an element is an array, too.
        index = tuple(slice(i, i + 1 or None) if hasattr(i, "__index__") else i for i in index)
        part = np.asarray(self)[index]
        steps = (np.arange(n) * stride for n, stride in zip(part.shape, part.strides, strict=True))
        addresses: Any = functools.reduce(np.add.outer, steps, address(part))
        noted.update(addresses.reshape(-1).tolist())

    def view(self, dtype):
        return np.asarray(self).view(dtype).view(SharedArray)


def unfenced(thread):
    """-> addresses that `thread` has stored to, without a fence since: a set"""
    return thread.block.asynchronous.unfenced[thread.thread_id]


def fence(thread):
    thread.block.asynchronous.unfenced.pop(thread.thread_id, None)


def who_stored(block, view):
    """-> the number of a thread of `block` that has stored to the bytes `view`, without a fence since, or
    None"""
    first = address(view)
    for number, noted in block.asynchronous.unfenced.items():
        if any(first <= at < first + view.size for at in noted):
            return number
    return None


def is_used_by(kernel):
    """Whether `kernel`, a plain function, reaches a function that is decorated with `reads_shared`."""
    known = kernel.__dict__.get("__uses_proxy__")
    if known is None:
        known = kernel.__uses_proxy__ = reaches(
            kernel, lambda value: isinstance(value, types.FunctionType) and hasattr(value, "reads_shared")
        )
    return known


def reaches(value, is_it, goes_into=lambda function: True, seen=None):
    """Whether a kernel, or what it uses, is a value of which ``is_it(value)`` is true. Only functions count
    that it ``goes_into``."""
    if isinstance(value, CUDADispatcher):
        value = value.py_func
    seen = set() if seen is None else seen  # ids of what was looked at
    if id(value) in seen:
        return False
    seen.add(id(value))
    if is_it(value):
        return True
    if isinstance(value, tuple):
        return any(reaches(part, is_it, goes_into, seen) for part in value)
    if not isinstance(value, types.FunctionType) or not goes_into(value):
        return False
    variables, attributes = names_in(value.__code__)
    used = [value.__globals__[name] for name in variables if name in value.__globals__]
    for module in [v for v in used if isinstance(v, types.ModuleType)]:
        used += [vars(module)[name] for name in attributes if name in vars(module)]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            used.append(cell.cell_contents)
    return any(reaches(part, is_it, goes_into, seen) for part in used)
