"""What all communicators of shmemkit's own have, and that of one rank."""

import os
from typing import Any


class Communicator:
    """What follows from `rank`, `size` and ``allgather``. See ``shmemkit.typing.Communicator``."""

    rank, size = 0, 1

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def allgather(self, value: Any, /) -> list[Any]:
        raise NotImplementedError

    def exchange(self, value: Any, call: str) -> list[Any]:
        """``allgather`` for `call`, which reports may name."""
        return self.allgather(value)

    def bcast(self, value: Any = None, root: int = 0) -> Any:
        return self.exchange(value if self.rank == root else None, "bcast")[root]

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        values = self.exchange(value, "gather")
        return values if self.rank == root else None

    def barrier(self) -> None:
        self.exchange(None, "barrier")

    Barrier = barrier

    def Free(self) -> None:
        pass

    def Abort(self, status: int = 1) -> None:
        os._exit(status)


class SingleComm(Communicator):
    """The communicator of a program that runs alone: ``sk.init(comm=SingleComm())``."""

    def allgather(self, value: Any, /) -> list[Any]:
        return [value]

    def Split(self, color: int = 0, key: int = 0) -> "SingleComm":
        return self
