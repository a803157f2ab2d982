"""All-to-all by copy engines: for large messages. Segment k of x goes to rank k
(``shmemkit.kernels.copied_pieces``).

Into an `out` of private memory: to staged memory on the peers, where blocks fetch it.

Into a symmetric one, the same part of the same array on all ranks, without staged memory: what is staged
memory there is segment me of out on rank k, which may be written when all have come to the barrier; another
one ends the call: all segments are there. Blocks store my own, which no other rank touches.
"""

from shmemkit.kernels.copied_pieces import Step, StoredPieces


class CopyEngine(StoredPieces):
    """The method "copy_engine" of ``AllToAll``."""

    name, personalized = "all_to_all copy_engine", True

    def bind(self, x, out, in_place):
        if not self.world.is_symmetric(out):
            return super().bind(x, out, in_place)
        me, n, size = self.world.rank, self.world.n_ranks, out.size // self.world.n_ranks
        segments, mine = self.segments_of(x, n), out[me * size : (me + 1) * size]
        copies = [copy for y in range(1, n) for copy in self.copies_of(segments, y, 0, size, mine)]
        steps = [self.store_own(x, out), Step(copies, self.barrier)]
        return lambda stream: self.run(steps, stream, self.barrier)
