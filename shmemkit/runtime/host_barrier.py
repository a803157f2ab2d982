"""A barrier of the host programs of all ranks, with a limit: a rank that waits too long learns who is
missing. All ranks that wait then raise RankTimeout, and those that come later, too. These ranks can use no
further barrier.

Without a limit, the first rank that waits prints on standard error, once, who is missing after PATIENCE.

Over sockets, rank 0's hub knows who is there (``SocketComm.meet``). MPI has no such thing: a rank polls a
non-blocking barrier, and meanwhile it answers questions of the others. When its limit has passed, it asks all
other ranks whether they have reached this barrier, too. Those that have not answered after GRACE are missing.
"""

import time
from typing import Any

from shmemkit.comm.choice import is_mpi
from shmemkit.support.agreement import of_group, reported_by
from shmemkit.support.command_line import say
from shmemkit.support.timeouts import RankTimeout, missing_text

GRACE = 0.5  # seconds for answers: those who wait look for questions every few milliseconds
PATIENCE = 60.0  # seconds
_POLL = 5e-3  # seconds, at most, between two looks


class BoundedBarrier:
    """Barriers of the ranks of `comm`, mpi4py's or a SocketComm. Collective.

    limit   seconds, or None for no limit; the first limit that passes ends the barrier for all ranks
    ranks   of the World, if `comm` is a group's
    """

    def __init__(self, comm, limit=None, ranks=None):
        self._ranks = ranks
        self.comm = comm.Dup()  # separate from all other messages
        self.rank, self.n_ranks, self.limit = comm.Get_rank(), comm.Get_size(), limit
        self._meet = self._by_mpi if is_mpi(comm) else self._by_sockets
        self.epoch = 0
        self.given_up: Any = None  # (call, missing, waited) of the barrier that failed
        self._sent = []  # messages in flight

    def wait(self, call):
        """Wait at the next barrier, in the collective function `call`, until all ranks have reached it.

        RankTimeout if they have not within the limit, or if an earlier barrier failed.
        """
        if self.given_up is None:
            self._meet(call)
        if self.given_up is not None:
            raise self._error()

    def _by_sockets(self, call):
        def waiting(there):
            self._say_missing(call, [rank for rank in range(self.n_ranks) if rank not in there], there)

        _, self.given_up = self.comm.meet(None, call, self.limit, PATIENCE, waiting)

    def _by_mpi(self, call):
        self.epoch += 1
        everybody = self.comm.Ibarrier()
        start = time.monotonic()
        asked, told, there = None, False, set()
        patience = PATIENCE if self.limit is None else self.limit
        while not everybody.Test():
            self._listen(there)
            if self.given_up is not None:
                return
            now = time.monotonic()
            waited = now - start
            if asked is None and waited >= patience:
                asked = now
                self._tell_all("who is here?", self.epoch)
            elif asked is not None and not told and now - asked >= GRACE:
                told = True
                self._report_missing(call, there)
            time.sleep(0 if waited < 1e-3 else min(waited / 20, _POLL))
        self._listen(there)  # the others may have been here and left

    def close(self):
        """Give the communicator back. Collective."""
        self.comm.Free()

    # -- inside
    def _report_missing(self, call, there):
        """Ranks that have not answered are missing."""
        missing = [r for r in range(self.n_ranks) if r != self.rank and r not in there]
        if self.limit is not None:
            self.given_up = call, missing, self.limit
            self._tell_all("given up", self.epoch, self.given_up)
        elif self.rank == min({*there, self.rank}):
            self._say_missing(call, missing, {*there, self.rank})

    def _say_missing(self, call, missing, there):
        say(f"shmemkit: {self._missing_text(call, missing, there, PATIENCE)}, waiting")

    def _missing_text(self, call, missing, there, waited):
        """It names ranks of the World."""
        text = missing_text(call, self._in_world(missing), self._in_world(there), waited)
        return text if self._ranks is None else text + of_group(self._ranks)

    def _in_world(self, ranks):
        return sorted(ranks if self._ranks is None else (self._ranks[rank] for rank in ranks))

    def _tell_all(self, *message):
        for rank in range(self.n_ranks):
            if rank != self.rank:
                self._tell(rank, *message)

    def _tell(self, rank, *message):
        # A message is kept until MPI has sent it; one to a rank that never listens again stays.
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self.comm.isend(message, rank))

    def _listen(self, there):
        while self.comm.iprobe():
            from mpi4py import MPI

            status = MPI.Status()
            what, epoch, *rest = self.comm.recv(status=status)
            if epoch != self.epoch:
                continue  # of a barrier that all ranks reached after all
            if what == "who is here?":
                self._tell(status.source, "me", epoch)
            elif what == "me":
                there.add(status.source)
            else:
                self.given_up = rest[0]

    def _error(self):
        call, missing, limit = self.given_up
        there = [r for r in range(self.n_ranks) if r not in missing]
        text = self._missing_text(call, missing, there, limit)
        (me,) = self._in_world([self.rank])
        if self.rank in missing:
            text += f"; rank {me} came too late"
        text += ". No further barrier of these ranks can complete. End the program"
        return reported_by(there[0], RankTimeout(text, me, call, self._in_world(missing)))
