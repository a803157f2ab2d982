"""Who has last written to the words of symmetric memory that threads wait for: for reports of deadlocks."""

import sys
from collections import deque

from shmemkit.support.call_site import shown_place

from .report import kernel_frame, numbered

WORDS, LAST = 10_000, 4  # words, and writes of each, that are known


class Writers:
    def __init__(self, machine):
        self._first, self._end = machine.memory_address, machine.memory_address + machine.memory.size
        self._words = {}  # address -> the last writes: (by, what it held then)

    def by(self, thread):
        """`thread` and its line, without the thread: that would keep its launch."""
        frame, block = kernel_frame(sys._getframe(2)), thread.block
        place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        return thread.pe, block.blockIdx, block.gridDim, thread.threadIdx, block.blockDim, place

    def note(self, key, by, value):
        """The word at address `key` holds `value` since `by` has written."""
        if not self._first <= key < self._end:
            return
        last = self._words.get(key)
        if last is None:
            if len(self._words) >= WORDS:
                del self._words[next(iter(self._words))]
            last = self._words[key] = deque(maxlen=LAST)
        last.append((by, value))

    def freed(self, first, n_bytes):
        for key in [k for k in self._words if first <= k < first + n_bytes]:
            del self._words[key]

    def text(self, key):
        """Who has written to the word at `key`, the last first; "" if nobody is known."""
        return "; ".join(f"{value} by {_shown(*by)}" for by, value in reversed(self._words.get(key, ())))


def _shown(pe, block, grid, thread, size, place):
    at = f" ({shown_place(*place)})" if place else ""
    return f"rank {pe} block {numbered(block, grid)} thread {numbered(thread, size)}{at}"
