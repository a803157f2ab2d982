"""All-gather by push: stores into the peers' memory, and a full signal for each part. For larger messages.

``schedules/push_exchange.py`` has the protocol and the kernels: all ranks get x. ``push_network.py`` is for
ranks whose memory is not mapped here.
"""

from ..method import cut, parts_of
from ..schedules.push_exchange import PushExchange
from . import push_network


class Push1D(PushExchange):
    """The method "push_1d" of ``AllGather``.

    network_part    bytes that are worth a block, and a message, where some ranks are reached by NVSHMEM
    network_blocks  of a grid there, unless there are more ranks
    """

    name = "all_gather push"
    network_part, network_blocks = 1 << 15, 32

    def prepare(self, max_nbytes):
        world = self.world
        near = world.near()
        all_near = all(world.host_allgather(all(near)))
        self.near = None if all_near else world.xp.asarray(near).astype("uint8")
        if all_near:
            super().prepare(max_nbytes)
            return
        n = world.n_ranks
        most = max(1, self.network_blocks // n)
        self.parts, capacity = parts_of(max_nbytes, n, most, self.network_part)
        self.scratch = self.empty((2, n, self.parts, capacity), "uint8", self.array_name("scratch"))
        self.full = self.zeros((2, n, self.parts), "uint64", self.array_name("full"))
        self.epochs = world.xp.zeros((n, self.parts), "uint64")
        nothing = world.xp.empty(0, "uint8")
        self._bind_network(self.parts, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        if self.near is None:
            return super().bind(x, out, in_place)
        x, out = x.view("uint8"), out.view("uint8")
        parts, part = cut(x.size, self.parts, self.network_part)
        return self._bind_network(parts, x, out, in_place, part)

    def _bind_network(self, parts, *args):
        args += self.near, self.scratch, self.full, self.epochs
        return self.launch(push_network.push_all_gather_network, (parts, self.world.n_ranks), *args)
