"""Bounded waits on memory of this process, in the place of a GPU's."""

import ctypes
from types import SimpleNamespace

import numpy as np
from ptx_in_python import Gpu

from shmemkit.device.shmem import bounded_waits


class Memory(Gpu):
    """The table of waits, a signal, and a clock that goes on by `step` nanoseconds at each look.

    limit     of waits, in nanoseconds
    constants what the kernel's module has in constant memory, if the table is elsewhere
    """

    def __init__(self, monkeypatch, limit, step=1000, constants=None):
        super().__init__(monkeypatch)
        self.table = (ctypes.c_uint64 * (8 + bounded_waits.CAPACITY * bounded_waits.WORDS))()
        self.control, self.signal = (ctypes.c_uint64 * 2)(), ctypes.c_uint64(0)
        self.now, self.step, self.polls = 10**18, step, 0
        self.modules = [bounded_waits.Module("a_kernel", limit / 1e9)]
        table = [ctypes.addressof(self.control), ctypes.addressof(self.table), limit, 0]
        self.constants = constants or table

    @property
    def address(self):
        return ctypes.addressof(self.signal)

    def clock(self):
        self.now += self.step
        return np.uint64(self.now)

    def constant(self, index):
        return self.constants[index]

    def read(self, address):
        """Looks at a word of 64 bits, as waits do."""
        self.polls += 1
        return int(self.read_memory(int(address), 8))

    def records(self):
        world = SimpleNamespace(rank=1, locate=lambda address: ("flags", (2, 3), 0))
        found = bounded_waits.written(self.table)
        return [bounded_waits.decoded(words, self.modules, 1, world) for words in found]
