"""cp.async of the emulator: copies to shared memory that have been issued, and have not arrived.

Their bytes arrive when their thread waits for them, and not before. Until then their destination holds bytes
0xFF, as on a GPU it may hold anything: who reads it too early, or still needed what was there, gets NaN.
"""

from collections import deque


class AsyncCopies:
    """Those of one thread."""

    __slots__ = ("issued", "groups")

    def __init__(self):
        self.issued, self.groups = [], deque()  # since the last commit; committed, the oldest first

    def issue(self, arrive):
        """``arrive()`` brings the bytes."""
        self.issued.append(arrive)

    def commit(self):
        self.groups.append(self.issued)
        self.issued = []

    def wait(self, n):
        """All but the last `n` groups arrive."""
        while len(self.groups) > n:
            for arrive in self.groups.popleft():
                arrive()


def copies_of(thread):
    """-> the AsyncCopies of an emulated thread"""
    of_block = thread.block.async_copies
    if thread.thread_id not in of_block:
        of_block[thread.thread_id] = AsyncCopies()
    return of_block[thread.thread_id]
