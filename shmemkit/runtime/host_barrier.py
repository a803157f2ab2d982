"""The host programs of all ranks meet; who waits too long finds out who is missing.

A meeting is a non-blocking MPI barrier, polled. Meanwhile every rank that has come answers questions. When a
rank has waited for its limit, it asks all others whether they are there, too, in this very meeting; those who
have not said so after GRACE are missing. It tells everybody, so that all who came raise RankTimeout at once,
and those who come later, too: the barrier has lost its count, and these ranks cannot meet again.

Without a limit, the first of those who have come says on standard error, once, who is missing after PATIENCE.
"""

import time
from typing import Any

from shmemkit.support.agreement import shown_by
from shmemkit.support.command_line import say
from shmemkit.support.timeouts import RankTimeout, missing_text

GRACE = 0.5  # seconds for answers: those who wait look for questions every few milliseconds
PATIENCE = 60.0  # seconds
_POLL = 5e-3  # seconds, at most, between two looks


class RollCall:
    """Meetings of the ranks of `comm`, an mpi4py communicator. Collective.

    limit   seconds, or None for no limit; the first that is over ends the meeting for all
    """

    def __init__(self, comm, limit=None):
        self.comm = comm.Dup()  # its messages meet no others
        self.rank, self.n_ranks, self.limit = comm.Get_rank(), comm.Get_size(), limit
        self.number = 0  # of the meeting
        self.given_up: Any = None  # (call, missing, waited) of the meeting that failed
        self._sent = []  # messages under way

    def meet(self, call):
        """Come to the next meeting, in the collective function `call`. Returns when all ranks have come.

        RankTimeout when they have not within the limit, or an earlier meeting failed.
        """
        if self.given_up is not None:
            raise self._error()
        self.number += 1
        everybody = self.comm.Ibarrier()
        start = time.monotonic()
        asked, told, there = None, False, set()
        patience = PATIENCE if self.limit is None else self.limit
        while not everybody.Test():
            self._listen(there)
            if self.given_up is not None:
                raise self._error()
            now = time.monotonic()
            waited = now - start
            if asked is None and waited >= patience:
                asked = now
                self._tell_all("who is here?", self.number)
            elif asked is not None and not told and now - asked >= GRACE:
                told = True
                self._call_is_over(call, there)
            time.sleep(0 if waited < 1e-3 else min(waited / 20, _POLL))
        self._listen(there)  # the others may have come and gone
        if self.given_up is not None:
            raise self._error()

    def close(self):
        """Give the communicator back. Collective."""
        self.comm.Free()

    # -- inside
    def _call_is_over(self, call, there):
        """Who has not answered is missing."""
        missing = [r for r in range(self.n_ranks) if r != self.rank and r not in there]
        if self.limit is not None:
            self.given_up = call, missing, self.limit
            self._tell_all("given up", self.number, self.given_up)
        elif self.rank == min({*there, self.rank}):
            text = missing_text(call, missing, sorted({*there, self.rank}), PATIENCE)
            say(f"shmemkit: {text}, waiting")

    def _tell_all(self, *message):
        for rank in range(self.n_ranks):
            if rank != self.rank:
                self._tell(rank, *message)

    def _tell(self, rank, *message):
        # Kept until MPI has sent it; one to a rank that never listens again stays.
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self.comm.isend(message, rank))

    def _listen(self, there):
        while self.comm.iprobe():
            from mpi4py import MPI

            status = MPI.Status()
            what, number, *rest = self.comm.recv(status=status)
            if number != self.number:
                continue  # of a meeting that took place after all
            if what == "who is here?":
                self._tell(status.source, "me", number)
            elif what == "me":
                there.add(status.source)
            else:
                self.given_up = rest[0]

    def _error(self):
        call, missing, limit = self.given_up
        there = [r for r in range(self.n_ranks) if r not in missing]
        text = missing_text(call, missing, there, limit)
        if self.rank in missing:
            text += f"; rank {self.rank} came too late"
        error = RankTimeout(f"{text}. The ranks cannot meet again. End the program", self.rank, call, missing)
        return shown_by(there[0], error)
