"""What the methods by packet transports share: their slots, the size of their grids, and what they refuse."""

import math

from shmemkit.device.packets.transports import AT_ONCE, Transport

from .method import Method

MOST_THREADS = 256  # of a block within a budget


class PacketMethod(Method):
    """A method by a transport `t`. A subclass has

    name       of it, as "all_gather ll128"
    at_once    whether a thread holds units of all ranks in registers
    _any_blocks  whether a row of its kernel's grid may have any number of blocks
    blocks     of a grid, at most, for each multiprocessor
    """

    t: Transport
    at_once = _any_blocks = False

    def __init__(self, world, *args, **settings):
        self.t = settings.get("t") or self.t
        self.threads, self.blocks = self.grid_of(self.t)
        if settings.get("sms"):  # large blocks instead of many; so many threads have room for all registers
            self.threads = max(self.threads, min(MOST_THREADS, self.threads * self.blocks))
        self.most = {}  # blocks of a row of the grid, by kernel and dtype
        super().__init__(world, *args, **settings)

    @staticmethod
    def grid_of(t):
        """-> threads of a block, blocks for each multiprocessor"""
        return t.threads, t.blocks

    def check_ranks(self):
        """Whether it can run here. Collective."""
        world = self.world
        world.check_reach(self.name, nvlink=self.t.whole_lines)
        most = AT_ONCE if self.at_once and self.t.receive_all else math.inf
        if world.n_ranks > most:
            raise ValueError(f"{self.name}: there are {world.n_ranks} ranks; it is for {most} at most")

    @property
    def units_of_block(self):
        return self.threads // self.t.lanes

    def bind_kinds(self, bind, *args):
        """``bind(x, out, *args)`` of empty arrays of each kind: no kernel is compiled later, while others
        wait."""
        for kind in self.t.kinds:
            nothing = self.world.xp.empty(0, kind)
            bind(nothing, nothing, *args)

    def launch_units(self, kernel, units, x, *args, grid_rows=1, divides=None):
        """-> `kernel` bound to enough threads for so many units, in each of so many rows of the grid, and to
        these arguments. The number of blocks of a row divides `divides`."""
        key = kernel, grid_rows, x.dtype
        if key not in self.most:
            fit = self.launch(kernel, (1, grid_rows), x, *args, pdl=True).resident_blocks
            most = max(1, min(fit, self.blocks * self.world.backend.multiprocessors) // grid_rows)
            self.most[key] = self.within(most, grid_rows)
        grid = max(1, min(-(-units // self.units_of_block), self.most[key]))
        if divides:
            grid = next(blocks for blocks in range(min(grid, divides), 0, -1) if divides % blocks == 0)
        return self.launch(kernel, (grid, grid_rows), x, *args, pdl=True)
