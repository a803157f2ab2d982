"""Reduce by push: a reduce-scatter by push, after which each rank has a segment of the result, and a gather
of the segments by push. For larger messages: no rank sends more than one array, and the root receives less
than two.

An array whose size is no multiple of 16 bytes for each rank is copied to one that is, on all ranks alike: the
sizes are.
"""

from ..gather import push as gather_push
from ..method import Method
from ..reduce_scatter import push


class Push(Method):
    """The method "push" of ``Reduce``."""

    def prepare(self, max_nbytes, root, op):
        world, n = self.world, self.world.n_ranks
        self.unit, self.stages, self.is_root = 16 * n, [], world.rank == root
        room = max(1, -(-max_nbytes // self.unit)) * self.unit
        self.stages.append(push.Push(world, room, op))
        self.stages.append(gather_push.Push(world, room, root))
        self.result, self.padded = world.xp.empty(room // n, "uint8"), world.xp.empty(room, "uint8")

    def bind(self, x, out, in_place, dtype):
        n, backend, (scatter, gather) = self.world.n_ranks, self.world.backend, self.stages
        room = -(-x.nbytes // self.unit) * self.unit
        whole, enter, leave = x.nbytes == room, [], []
        if not whole:
            view = self.padded[: x.nbytes]
            enter = [backend.copy(view, x.view("uint8"))]
            if self.is_root:
                leave = [backend.copy(out.view("uint8"), view)]
            x = self.padded[:room].view("uint64")
        mine, target = self.result, x
        if self.is_root:  # its segment is combined where the others are gathered
            target = out if whole else x
            mine = target.view("uint8")[self.world.rank * room // n :]
        mine = mine[: room // n].view(x.dtype)
        steps = scatter.bind(x, mine, target is x, dtype), gather.bind(mine, target, self.is_root)

        def run(stream):
            for copy in enter:
                copy(backend.handle(stream))
            for step in steps:
                step(stream)
            for copy in leave:
                copy(backend.handle(stream))

        return run

    def free(self):
        while self.stages:
            self.stages.pop().free()
        super().free()
