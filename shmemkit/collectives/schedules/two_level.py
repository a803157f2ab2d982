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

from ..method import Method, cut, parts_of
from ..network import ranks_in_reach


class TwoLevel(Method):
    """A method of this schedule. A subclass has

    name        of it, as "all_gather push_2d"
    given       an example of what a call gives: mostly, whether x is in out already
    part        bytes that are worth a block
    max_parts   of a segment
    max_blocks  of a grid, unless there are more segments: one per multiprocessor of A100

    It finds `local_size`, the ranks of a node, and `nodes`.
    """

    part, max_parts, max_blocks = 1 << 15, 32, 108
    given: int = False
    name: str

    def __init__(self, world, *args, **settings):
        self.local_size = ranks_in_reach(world)
        self.nodes = world.n_ranks // self.local_size
        super().__init__(world, *args, **settings)

    def cut_in_parts(self, max_nbytes, segments):
        """-> (parts of a segment at most, elements of a part at most), of `segments` segments."""
        most = min(self.max_parts, max(1, self.max_blocks // segments))
        self.parts, capacity = parts_of(max_nbytes, segments, most, self.part)
        return self.parts, capacity

    def use(self, kernel, rows, *arguments):
        """Calls launch ``kernel(x, out, given, part, *arguments)`` with a grid of (parts, *rows): x and out
        are uint8, 1-D; `given` is what a call gives; a part has `part` elements, a multiple of 128."""
        self.kernel, self.rows, self.arguments = kernel, rows, arguments
        nothing = self.world.xp.empty(0, "uint8")
        self._launch(self.parts, nothing, nothing, self.given, 0)

    def bind_parts(self, segment, x, out, given):
        """-> run(stream), for segments of so many bytes."""
        parts, part = cut(segment, self.parts, self.part)
        return self._launch(parts, x.view("uint8"), out.view("uint8"), given, part)

    def _launch(self, parts, *args):
        return self.launch(self.kernel, (parts, *self.rows), *args, *self.arguments)
