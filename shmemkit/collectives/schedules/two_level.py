"""Two levels: stores between the ranks of a node, and puts between nodes (``collectives.network``). A rank
puts to those of its number on other nodes only. So all ranks use the network alike. Where stores do not reach
all ranks of each node, as between GPUs without peer access, each rank is a node of its own.

All-gather, all-to-all, broadcast and gather have a file and a kernel each: who relays what to whom is another
thing in each, and a kernel for all four would be these four kernels. They share this:

Rank      (i, l) is the l-th rank of node i
Parts     a segment is what a rank gives, or gives to another. It is cut into parts, one for each block of a
          row of the grid, the same on all ranks. A part goes as a whole; what overlaps are parts, and epochs
Buffers   two of everything that a put writes or reads, with a full signal for each (the put lemma)
Epochs    epochs[row, b], local: of block b of a row of the grid; the epoch selects the buffer.
          Device-resident, so graph-safe
"""

from shmemkit.operations.method import InParts

from ..network import ranks_in_reach


class TwoLevel(InParts):
    """A method of this schedule. It finds `local_size`, the ranks of a node, and `nodes`."""

    def __init__(self, world, *args, **settings):
        self.local_size = ranks_in_reach(world)
        self.nodes = world.n_ranks // self.local_size
        super().__init__(world, *args, **settings)
