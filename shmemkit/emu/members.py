"""The ranks that kernels of a PE speak of: those of the World, or of a group."""

import numpy as np

from shmemkit.support.agreement import of_group
from shmemkit.support.settings import shown

from .collective_calls import SLOT, SLOTS

TEAM_WORLD, TEAM_SHARED, TEAM_NODE, TEAM_SAME_MYPE_NODE = range(4)
ALL, NODE, ACROSS = range(3)  # all ranks, those of a node, the same local rank of every node
N_TEAMS = 3


class Members:
    """Rank k is PE ``pes[k]``. `rank` is this PE's; consecutive ranks, `local_size` of them, share a node.

    arrivals  (N_TEAMS, ranks) uint64 in symmetric memory: who has come how often to a barrier of a team
    calls     the collective calls of host programs, compared
    key       what no other group has, alike on all members
    """

    def __init__(self, pes, pe, local_size, arrivals, calls, key):
        self.pes, self.rank, self.n, self.key = tuple(pes), tuple(pes).index(pe), len(pes), key
        self.local_size, self.arrivals, self.calls = local_size, arrivals, calls
        self.epochs = [0] * N_TEAMS  # barriers so far
        self.of = of_group(self.pes) if key else ""  # for reports

    def pe(self, rank):
        """The PE of `rank`."""
        if isinstance(rank, (float, np.floating)):
            raise TypeError(f"a rank is {shown(rank)}; it must be an integer")
        if not 0 <= rank < self.n:
            raise IndexError(f"rank is {rank}; it must be 0 to {self.n - 1}")
        return self.pes[int(rank)]

    def team(self, team):
        """-> the PEs of `team`, in the order of ranks"""
        if team == TEAM_WORLD:
            return list(self.pes)
        if team in (TEAM_SHARED, TEAM_NODE):
            first = self.rank // self.local_size * self.local_size
            return list(self.pes[first : first + self.local_size])
        if team == TEAM_SAME_MYPE_NODE:
            return list(self.pes[self.rank % self.local_size :: self.local_size])
        raise NotImplementedError(
            f"team is {team!r}; on the emulator it must be TEAM_WORLD (0), TEAM_SHARED (1), TEAM_NODE (2) or "
            "TEAM_SAME_MYPE_NODE (3)"
        )

    def row(self, pes):
        """Which row of `arrivals` a barrier of `pes`, those of a team, counts in."""
        if len(pes) == self.n:
            return ALL
        return NODE if self.pes.index(pes[-1]) - self.pes.index(pes[0]) + 1 == len(pes) else ACROSS


def _book(n):
    return np.dtype([("arrivals", "u8", (N_TEAMS, n)), ("met", "i8", n + 1), ("calls", SLOT, (n, SLOTS))])


def book_size(n):
    """Bytes of symmetric memory that a group of `n` ranks needs for itself: see ``book_of``."""
    return _book(n).itemsize


def book_of(memory, n):
    """-> (arrivals, how often the host programs have come and met, the table of calls), parts of `memory`.
    Of the last two, all members use those of the first."""
    book = memory[: book_size(n)].view(_book(n))
    return tuple(book[name][0] for name in ("arrivals", "met", "calls"))
