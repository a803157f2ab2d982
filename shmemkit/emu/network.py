"""Messages between PEs: put, get and signals. Every message is delivered when it is issued.

That is one of the orders that NVSHMEM's memory model allows, so a correct program gives its result; fence and
quiet have nothing left to wait for.
"""

import numpy as np

from .arrays import address


class Network:
    def __init__(self, machine):
        self.machine = machine

    def put(self, thread, dst, src, pe, nbi, signal, value, op):
        """Copy min(dst.size, src.size) elements of `src` to `dst` on `pe`, then apply the signal there, if
        there is one."""
        there = self.machine.peer(thread.block, dst, pe)
        if there.size == 1:  # it may be a flag that others change by atomics
            with self.machine.lock:
                copy(there, src, "put")
        else:
            copy(there, src, "put")
        self.machine.written(address(there))
        if signal is not None:
            self.signal(thread, signal, value, op, pe)

    def get(self, thread, dst, src, pe, nbi):
        """Copy min(dst.size, src.size) elements of `src` on `pe` to `dst`."""
        there = self.machine.peer(thread.block, src, pe)
        if there.size:
            thread.look(address(there), there.item(0))  # it may be a poll
        copy(dst, there, "get")

    def signal(self, thread, signal, value, op, pe):
        """Set signal[0] on `pe` to `value`, or add `value` to it."""
        there = self.machine.peer(thread.block, signal, pe)
        if op == "set":
            thread.store(there, 0, value)
        elif op == "add":
            thread.atomic(there, 0, lambda old: old + value)
        else:
            raise ValueError(f"signal operation {op!r}: 'set' or 'add' is allowed")

    def fence(self, thread):
        """Order my earlier puts to a PE before later ones: they are delivered."""

    def quiet(self, thread):
        """Complete my puts and gets: they are."""


def copy(dst, src, name):
    """Copy elements of contiguous arrays, as many as the smaller holds."""
    if dst.dtype != src.dtype:
        raise TypeError(f"{name}: dst is {dst.dtype}, src is {src.dtype}; they must have the same dtype")
    dst, src = flat(dst, name, "dst"), flat(src, name, "src")
    n = min(dst.size, src.size)
    np.copyto(dst[:n], src[:n])


def flat(array, name, label):
    """The elements of `array`, which must be contiguous, in one dimension."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: {label} {array.shape} with strides {array.strides} is not contiguous; "
            "copy rows one by one"
        )
    return np.asarray(array).reshape(-1)
