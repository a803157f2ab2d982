"""Bounded waits on memory of this process, in the place of a GPU's."""

import ctypes
from types import SimpleNamespace

from numba.cuda import types

from shmemkit.device.shmem import bounded_waits


class Memory:
    """The table of waits, a signal, and a clock that goes on by `step` nanoseconds at each look.

    limit     of waits, in nanoseconds
    constants what the kernel's module has in constant memory, if the table is elsewhere
    """

    def __init__(self, monkeypatch, limit, step=1000, constants=None):
        self.table = (ctypes.c_uint64 * (8 + bounded_waits.CAPACITY * bounded_waits.WORDS))()
        self.control, self.signal = (ctypes.c_uint64 * 2)(), ctypes.c_uint64(0)
        self.now, self.step, self.polls = 10**18, step, 0
        self.modules = [bounded_waits.Module("a_kernel", limit / 1e9)]
        words = constants or [ctypes.addressof(self.control), ctypes.addressof(self.table), limit, 0]
        fakes = {
            "_word": lambda i: types.uint64(words[int(i)]),
            "_clock": self.clock,
            "_look": lambda address: self.at(address).value,
            "_take": self.take,
            "_set": self.write,
            "_write": self.write,
            "_publish": self.write,
            "cuda": SimpleNamespace(
                threadIdx=SimpleNamespace(x=37, y=5, z=63), blockIdx=SimpleNamespace(x=70000, y=3, z=65534)
            ),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(bounded_waits, name, fake)

    @property
    def address(self):
        return ctypes.addressof(self.signal)

    @staticmethod
    def at(address):
        return ctypes.c_uint64.from_address(int(address))

    def write(self, address, value):
        self.at(address).value = int(value)

    def take(self, address):
        word = self.at(address)
        word.value += 1
        return types.uint64(word.value - 1)

    def clock(self):
        self.now += self.step
        return types.uint64(self.now)

    def read(self, address):
        self.polls += 1
        return self.at(address).value

    def records(self):
        world = SimpleNamespace(rank=1, locate=lambda address: ("flags", (2, 3), 0))
        found = bounded_waits.written(self.table)
        return [bounded_waits.decoded(words, self.modules, 1, world) for words in found]
