"""Reduce by push: a reduce-scatter by push, after which each rank has a segment of the result, and a gather
of the segments by push. For larger messages: no rank sends more than one array, and the root receives less
than two.

The root combines its segment in its output, where the others are gathered.
"""

from ..gather import Gather
from ..reduce_scatter import ReduceScatter
from ..schedules.rooted import ToRoot
from ..stages import Staged, in_turn


class Push(Staged):
    """The method "push" of ``Reduce``."""

    name, rest = "reduce push", (ToRoot, {})

    def make_stages(self, room, root, op):
        world = self.world
        self.is_root = world.rank == root
        self.stages.append(ReduceScatter._maker("push")(world, room, op, sms=self.sms))
        self.stages.append(Gather._maker("push")(world, room, root, sms=self.sms))
        self.result = None if self.is_root else world.xp.empty(room // world.n_ranks, "uint8")

    def bind_stages(self, x, out, in_place, dtype):
        scatter, gather, size = *self.stages[:2], x.size // self.world.n_ranks
        if self.is_root:
            mine = out[self.world.rank * size :][:size]
        else:
            mine = self.result[: size * x.itemsize].view(x.dtype)
        return in_turn(scatter.bind(x, mine, in_place, dtype), gather.bind(mine, out, self.is_root))
