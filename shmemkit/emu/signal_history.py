"""What was written to a word by which threads signal each other, in order.

A thread that waits may take any value that satisfies its condition, from the last write on that it knows of:
coherence forbids it to read what it knows to be overwritten, and nothing makes it read the newest value. The
checker takes the first. A program that is right whichever value is taken is right with this one, and one that
relies on a later release has not waited for it.
"""

import ctypes

import numpy as np

from .device_arrays import device_view

LENGTH = 32  # writes of a word that are kept; a thread that is further behind learns the oldest of them


class Write:
    """One write: the bytes that the word holds since, when it was made (a Moment; None: before all that is
    known), what its readers learn, {(scope, PE, block): clock}, and who has read it, {thread: Moment}."""

    __slots__ = ("bytes", "moment", "clocks", "readers")

    def __init__(self, content, moment, clocks):
        self.bytes, self.moment, self.clocks, self.readers = content, moment, clocks, {}

    def is_known(self, thread):
        """Whether it comes before what `thread` does now, by coherence: the write does, or a read of it."""
        if self.moment is None or _before(self.moment, thread):
            return True
        return any(_before(reader, thread) for reader in self.readers.values())


def _before(moment, thread):
    return moment.thread == thread.key or moment.before(thread.clock)


class History:
    """The writes of the word of `n_bytes` bytes at address `key`; at first, what it holds."""

    __slots__ = ("key", "n_bytes", "writes")

    def __init__(self, key, n_bytes):
        self.key, self.n_bytes = key, n_bytes
        self.writes = [Write(self._bytes(), None, {})]

    last = property(lambda self: self.writes[-1])

    def _bytes(self):
        return ctypes.string_at(self.key, self.n_bytes)

    def is_stale(self, n_bytes):
        """Whether the word has changed by something else, such as an ordinary store, or has another size."""
        return n_bytes != self.n_bytes or self.writes[-1].bytes != self._bytes()

    def add(self, moment, clocks):
        """The word has been written at `moment`."""
        writes = self.writes
        writes.append(Write(self._bytes(), moment, clocks))
        if len(writes) > LENGTH:
            del writes[: LENGTH // 2]

    def first(self, thread, dtype, is_satisfied):
        """The index of the first write that `thread` may still read and that is satisfied; else the last."""
        writes = self.writes
        last = len(writes) - 1
        i = last
        while i and not writes[i].is_known(thread):
            i -= 1
        while i < last and not is_satisfied(self.value(i, dtype)):
            i += 1
        return i

    def value(self, i, dtype):
        """What write `i` left, as an element of `dtype`, as kernels see it."""
        return device_view(np.frombuffer(self.writes[i].bytes, dtype))[0]

    def moments_after(self, i):
        """(thread, time) of the writes after write `i`."""
        return {(w.moment.thread, w.moment.time) for w in self.writes[i + 1 :]}
