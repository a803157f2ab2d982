"""``bench barrier``: how long a barrier of the streams of all ranks takes, by ``sk.Barrier``, by NVSHMEM's
barrier on a stream, and by NCCL's all-reduce of one element. Each is checked to hold all ranks up until the
last one comes.
"""

import time

import numpy as np

import shmemkit as sk

from .cases import Checked
from .command import Command, Entry
from .measure import Contender
from .nccl import SUM, TYPES, Nccl
from .results import NCCL_WAYS, NVSHMEM

LATE = 2e-3  # seconds


class Ours(Contender):
    """The host object."""

    method, _barrier = "sk.Barrier", None

    def prepared(self, case):
        self._barrier = sk.Barrier(self.world)
        return self._barrier

    def stop(self):
        super().stop()
        if self._barrier is not None:
            self._barrier.free()
        self._barrier = None


class Nvshmem(Ours):
    """NVSHMEM's own, on the stream."""

    method = NVSHMEM

    def prepared(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("NVSHMEM's barrier needs GPUs")

    def call(self):
        import nvshmem.core

        try:
            nvshmem.core.barrier(nvshmem.core.Teams.TEAM_WORLD, self.world.stream)
        except Exception as error:  # a reason not to compare with it: a row, not a crash
            raise ValueError(f"{type(error).__name__}: {error}") from error


class BarrierCase(Checked):
    """What is checked, and NCCL's call; `barrier` enqueues one."""

    op, bytes, result, dtype = "barrier", 0, (1,), np.dtype("float32")

    def __init__(self, world, barrier=None):
        self.world, self.barrier = world, barrier

    def make(self):
        self.x = self.world.xp.zeros(1, self.dtype)

    def nccl(self, comm, x, out):
        comm("AllReduce", x, out, 1, TYPES["float32"], SUM)

    def spoil(self, out):
        pass

    def _found(self, out):
        """Each rank comes too late once, and tells those near it before; they look when they have met."""
        world, me = self.world, self.world.rank
        near = np.flatnonzero(world.near())
        seen, wrong = world.zeros(world.n_ranks, "int64", "bench.barrier.seen"), ""
        views = [world.peer_view(seen, int(k)) for k in near]
        for late in range(world.n_ranks):
            if me == late:
                time.sleep(LATE)
            for view in views:
                view[me] = late + 1
            self.barrier()
            missing = near[world.asnumpy(seen)[near] != late + 1]
            if missing.size:
                wrong = f"wrong: rank {me} has not waited for rank {missing[0]}"
            world.host_barrier()  # all have looked
        world.free(seen)
        return wrong


def plan(world, given):
    contenders = [Ours(world), *(Nccl(world, name, given.nccl) for name in NCCL_WAYS if name in given.vs)]
    contenders += [Nvshmem(world)] if NVSHMEM in given.vs else []
    cases = {each.method: BarrierCase(world, each.call) for each in contenders}
    return [Entry(each, case=each.method) for each in contenders], [{None: BarrierCase(world), **cases}]


COMMANDS = [
    Command(
        "barrier",
        "how long a barrier of the streams of all ranks takes",
        plan,
        together=False,
        peers={**dict.fromkeys(NCCL_WAYS, "NCCL's all-reduce of one element"), NVSHMEM: ""},
        iters="20",
    )
]
