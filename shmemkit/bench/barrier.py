"""``bench barrier``: how long a barrier of the streams of all ranks takes, by ``sk.Barrier``, by NVSHMEM's
barrier on a stream, and by NCCL's all-reduce of one element. Each is checked to hold all ranks up until the
last one comes.
"""

import time

import numpy as np

import shmemkit as sk

from .measure import Contender, measure
from .nccl import SUM, TYPES, Nccl
from .refusal import agreed
from .results import NCCL_WAYS, NVSHMEM

LATE = 2e-3  # seconds


class Ours(Contender):
    """The host object."""

    method, _barrier = "sk.Barrier", None

    def start(self, case):
        self._barrier = sk.Barrier(self.world)

    def call(self):
        self._barrier()

    def stop(self):
        if self._barrier is not None:
            self._barrier.free()
        self._barrier = None


class Nvshmem(Ours):
    """NVSHMEM's own, on the stream."""

    method = NVSHMEM

    def start(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("NVSHMEM's barrier needs GPUs")

    def call(self):
        import nvshmem.core

        try:
            nvshmem.core.barrier(nvshmem.core.Teams.TEAM_WORLD, self.world.stream)
        except Exception as error:  # a reason not to compare with it: a row, not a crash
            raise ValueError(f"{type(error).__name__}: {error}") from error


PEERS = (*NCCL_WAYS, NVSHMEM)  # what --vs takes


class BarrierCase:
    """What is checked, and NCCL's call; `barrier` enqueues one."""

    op, bytes = "barrier", 0

    def __init__(self, world, barrier):
        self.world, self.barrier = world, barrier
        self.x = world.xp.zeros(1, "float32")

    def output(self, empty=None):
        return (empty or self.world.xp.empty)(1, self.x.dtype)

    def nccl(self, comm, x, out):
        comm("AllReduce", x, out, 1, TYPES["float32"], SUM)

    def spoil(self, out):
        pass

    def flip(self):
        pass

    def check(self, out):
        """-> "", or what is wrong, the same on every rank. Collective."""
        found = agreed(self.world, self._found)
        return next(filter(None, self.world.host_allgather(found)), "")

    def _found(self):
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


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    timer = sk.Timer(world, options.iters, options.replays)
    contenders = [Ours(world), *(Nccl(world, name, options.nccl) for name in NCCL_WAYS if name in options.vs)]
    contenders += [Nvshmem(world)] if NVSHMEM in options.vs else []
    with progress(len(contenders)) as step:
        for contender in contenders:
            step(contender.method)
            us, note = measure(world, timer, BarrierCase(world, contender.call), contender)
            results.add("barrier", contender.method, us=us, note=note, **contender.about)
    for contender in contenders:
        contender.close()
