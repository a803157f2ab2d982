"""Groups: some ranks of a World, with ranks, symmetric memory and collectives of their own.

    rows = world.split(world.rank // 2)          # collective: ranks 0 and 1, ranks 2 and 3, ...
    x = rows.zeros(1024)                         # symmetric in the group
    sk.AllReduce(rows, x.nbytes)(x)              # what takes a World takes a group

The memory: ``split`` takes one part of the symmetric heap, a *slab*, on all ranks at once. From then on the
group allocates from it by itself, alike on its ranks. When all ranks have left the groups of a split, the
next collective allocation of what was split gives the slab back.

The order of calls: see ``runtime/stream_order.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from shmemkit.support import timeouts
from shmemkit.support.agreement import ranks_text

from .host_barrier import BoundedBarrier
from .world import World


class Group(World):
    """Some ranks of a World: what ``World.split`` and ``World.group`` return.

    It has what a World has, for its own ranks: `rank` and `n_ranks`, symmetric arrays, barriers, `comm`.
    Every host object and one-line function that takes a World takes a Group; ``sk.bind(..., group=group)``
    binds a kernel whose `rank()`, `num_ranks()`, `symm_at`, `notify`, `put`, barriers and teams are the
    group's. (``kernel[grid, block](...)`` always means the World: Numba would load it at the first call.)

    world             the World
    ranks             the World's rank of each of the group's
    node, n_nodes     the nodes of the group's ranks, if each has equally many of them, one after another;
                      otherwise each rank counts as a node of its own, which other ranks reach by puts alone
    stream, backend   the World's

    *Collective* methods are called by all ranks of the group. Groups may overlap. Collectives and products of
    a World and all its groups run one after another on each rank, in the order of the calls, on whatever
    streams. So the program makes them in an order that all ranks respect: for any two calls that share a
    rank, all ranks that make both make the same one first, and there is no circle of such calls.

    Symmetric arrays of the World may be used with a group's ranks, too. Use a group as a context manager, or
    call ``finalize``, or keep it: it ends with its World.
    """

    _kind, _again = "group", "make a new one with World.split()"

    def __init__(self, parent, number, ranks, comm, slab, key):  # see World.split
        self._parent, self._world, self._number = parent, parent.world, number
        self._ranks = tuple(parent.ranks[rank] for rank in ranks)
        self.comm, self.rank, self.n_ranks = comm, comm.Get_rank(), comm.Get_size()
        self.xp, self.stream, self._host = parent.xp, parent.stream, parent._host
        self.finalized, self.kept = False, {}
        self._timeline = self._timeline_file = self._bounded_barrier = None
        self.backend = parent.backend.group(ranks, comm, slab, key)
        if self.backend.name != "emulator" and self.n_ranks > 1:
            self._bounded_barrier = BoundedBarrier(comm, timeouts.default(), self._ranks)
        self.local_size = self._local_size_of([rank // self._world.local_size for rank in self._ranks])
        self.node, self.local_rank = divmod(self.rank, self.local_size)
        self.n_nodes = self.n_ranks // self.local_size
        self.node_ranks = range(self.rank - self.local_rank, self.rank - self.local_rank + self.local_size)
        self.backend.set_local_size(self.local_size)
        self._init_memory()
        self._groups, self._splits = [], 0
        if self.backend.name != "emulator":
            from .stream_barrier import bind_barrier

            self.backend.bind_bounded_barrier(functools.partial(bind_barrier, group=self))

    @staticmethod
    def _local_size_of(nodes):
        """Ranks per node, where ranks are on these `nodes`."""
        sizes = [len(list(run)) for _, run in itertools.groupby(nodes)]
        return sizes[0] if len(set(sizes)) == 1 and len(sizes) == len(set(nodes)) else 1

    def __repr__(self):
        of, name = ranks_text(sorted(self._ranks)), self.backend.name
        return f"<Group of {of}: rank {self.rank} of {self.n_ranks}, {self.n_nodes} node(s), {name}>"

    @property
    def world(self) -> World:
        return self._world

    @property
    def ranks(self) -> Sequence[int]:
        return self._ranks

    def split(self, color: int | None, key: int = 0, heap: int | str = "16M") -> Group | None:
        return super().split(color, key, heap)

    def group(self, ranks, heap: int | str = "16M") -> Group | None:
        return super().group(ranks, heap)

    def group_of_node(self, heap: int | str = "16M") -> Group:
        return super().group_of_node(heap)

    def leaders(self, heap: int | str = "16M") -> Group | None:
        return super().leaders(heap)

    def finalize(self) -> None:
        """Wait for this rank's GPU work and for the group's ranks, free the group's arrays, and end it.
        Collective; a second call does nothing. Groups made of this one end first.

        Symmetric arrays that the program dropped without ``free`` are reported on standard error. Objects
        that were made on the group cannot be used any more.
        """
        if self.finalized or self._world.backend.over:
            self._forget()
            return
        for group in list(self._groups):
            group.finalize()
        self.backend.synchronize()
        self._gather_all("finalize")
        self._report_leaks()
        for allocation in self._allocations.values():
            self.backend.free(allocation.raw)
        self._allocations.clear()
        if self._bounded_barrier is not None:
            self._bounded_barrier.close()
        self.backend.end_group()
        comm: Any = self.comm
        comm.Free()
        if self in self._parent._groups:
            self._parent._groups.remove(self)
        self._parent._unused.add(self._number)
        self._forget()

    def abandon(self) -> None:
        """End the group after a failure, without waiting for other ranks."""
        self._forget()

    def locate(self, address):
        return self._world.locate(address)

    def end_timeline(self, error: object) -> None:
        """A timeline is the World's."""

    def _forget(self):
        self._forget_groups()
        self.finalized = True
        self.kept.clear()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:  # otherwise other ranks may wait for this one, and the World ends
            self.finalize()

    def _allocation_of(self, array):
        """Also of what the group is made of: its arrays are symmetric here, too."""
        found = super()._allocation_of(array)
        return found if found[0] is not None else self._parent._allocation_of(array)
