"""Barrier of all ranks on a stream: one kernel of one block.

Where all ranks reach each other by loads and stores, each signals each: ``runtime.stream_barrier``. Otherwise
``barrier_2d``: the ranks of a node first have such a barrier; then each rank has one with those of the same
local index on the other nodes, by dissemination, through NVSHMEM.

Signals   arrivals[k], on every rank of its node: how often rank k has arrived. Only rank k adds to it
          passed[r], on every rank: how often the rank 2**r nodes before, of the same local index, has reached
          round r. Only that rank adds to it
Epoch     epoch[0], local. Device-resident, so graph-safe

  block:        1. arrive at all ranks of the node, and wait for them; syncthreads
  thread 0, for each round r with 2**r < nodes:
                2. add 1 to passed[r] on the rank 2**r nodes after this one, modulo the nodes, behind a fence:
                   this also publishes what others have published to this rank
                3. wait until passed[r] >= epoch + 1           acquire, also of the network
                4. set epoch += 1

After round r a rank knows that all ranks of 2**(r + 1) nodes have arrived: its own node and those before it.
After the last round it knows this of all nodes. Nothing is ever reset. A rank may be an epoch ahead of the
one that it signals, and its additions may overtake each other: the sum still counts how often it has been in
the round.

No deadlock: in each step a rank signals others before it waits, and waits for their signals of the same step.
"""

from __future__ import annotations

from numba import cuda

from shmemkit.device import (
    ComparisonType,
    SignalOp,
    num_ranks,
    rank,
    signal_op,
    signal_wait_until,
    symm_at,
    threadfence,
)
from shmemkit.operations.method import Method
from shmemkit.operations.operation import Operation
from shmemkit.runtime.launch import MAX_THREADS
from shmemkit.runtime.stream_barrier import arrive_and_wait, barrier_kernel
from shmemkit.runtime.world import World
from shmemkit.typing import AnyStream

from .network import ranks_in_reach

ADD, GE = SignalOp.SIGNAL_ADD, ComparisonType.CMP_GE


@cuda.jit
def barrier_2d(local_size, arrivals, passed, epoch):
    """Meet all ranks, of several nodes.

    local_size  ranks of a node, which are consecutive and reach each other by stores
    arrivals    uint64 (n_ranks,), symmetric, zeros at first
    passed      uint64 (rounds,), symmetric, zeros at first
    epoch       uint64 (1,), zero at first
    grid        1; any number of threads: best one for each rank of a node
    """
    me, n = rank(), num_ranks()
    first = 0  # of this node's ranks; no division, which is slow
    while first + local_size <= me:
        first += local_size
    end = first + local_size
    there = symm_at(arrivals, min(first + cuda.threadIdx.x, end - 1))
    target = arrive_and_wait(arrivals, there, epoch, first, end)
    if cuda.threadIdx.x == 0:
        hop, r = local_size, 0
        while hop < n:
            to = me + hop
            if to >= n:
                to -= n
            threadfence("sys", "acq_rel")
            signal_op(passed[r:], 1, ADD, to)
            signal_wait_until(passed[r:], GE, target)
            hop += hop
            r += 1
        epoch[0] = target


class _Barrier(Method):
    """Its memory, and its kernel: ``run(stream)``."""

    name = "Barrier"

    def prepare(self) -> None:
        world, n, size = self.world, self.world.n_ranks, ranks_in_reach(self.world)
        self.threads = min(MAX_THREADS, size)
        arrivals = self.zeros(n, "uint64", "barrier.arrivals")
        self.epoch = world.xp.zeros(1, "uint64")
        if size == n:
            self.run = self.launch(barrier_kernel, 1, arrivals, self.epoch, pdl=True)
        else:
            passed = self.zeros((n // size - 1).bit_length(), "uint64", "barrier.passed")
            self.run = self.launch(barrier_2d, 1, size, arrivals, passed, self.epoch)


class Barrier(Operation):
    """A barrier of all ranks on a stream: one kernel of one block, which takes a few microseconds.
    Collective.

    ``barrier = sk.Barrier(world)``, then ``barrier()``. Work that any rank enqueues after it sees all stores
    that every rank enqueued before it. It completes no puts: kernels that make some call `quiet`, or the
    program calls ``World.barrier``. The rules for streams, order and graphs are those of
    ``help(sk.collectives)``.

    Where the memory of all ranks is mapped, each rank signals each by stores. Otherwise the ranks of a node
    do, and then the nodes, in log2(nodes) rounds of NVSHMEM's signals.

    world  the World. TypeError, on all ranks, if it is none
    """

    ALIKE = None  # it has no arrays

    def __init__(self, world: World):
        super().__init__(world, dict)
        self._run = self._part(_Barrier, world).run

    def __call__(self, *, stream: AnyStream | None = None) -> None:
        """Enqueue a barrier on `stream` (default: the World's). Collective. RuntimeError after ``free``, or
        after ``World.finalize``.
        """
        if self._parts is None or self.world.finalized:
            self._check_alive()
        self._order.before(None if stream is self.world.stream else stream, self._who)
        self._run(stream)


GPU_KERNELS = {"barrier_2d": barrier_2d}
