"""All-to-all by copy engines: for large messages.

Into an `out` of private memory: to staged memory on the peers, in pieces, which a few blocks store to their
segments (``shmemkit.kernels.copied_pieces``): segment k of x goes to rank k.

Into a symmetric one, the same part of the same array on all ranks, without blocks or staged memory:

  stream:     1. barrier of all ranks: their outs may be written
  lanes:      2. copy segment k of x to segment me of out on rank k, for all k; my own, too
  stream:     3. barrier: all segments are there

The barriers (``shmemkit.stream_barrier``) are kernels of a block; they release and acquire at scope sys, so
that nothing is written before, nor read after, what it must follow.
"""

from shmemkit.kernels import copied_pieces
from shmemkit.stream_barrier import bind_barrier


class CopyEngine(copied_pieces.StoredPieces):
    """The method "copy_engine" of ``AllToAll``."""

    name, personalized = "all_to_all copy_engine", True

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        arrivals = self.zeros(n, "uint64", "all_to_all.copy_engine.barrier")
        super().prepare(max_nbytes)
        self.barrier = bind_barrier(arrivals, world.xp.zeros(1, "uint64"), n, world.stream)

    def bind(self, x, out, in_place):
        if not self.world.is_symmetric(out) or not out.size:
            return super().bind(x, out, in_place)
        me, n, size = self.world.rank, self.world.n_ranks, out.size // self.world.n_ranks
        mine, copies = out[me * size : (me + 1) * size], []
        for k in (*range(me + 1, n), *range(me + 1)):
            to = self.world.peer_view(mine, k)
            copies.append(self.world.backend.copy(to, x[k * size : (k + 1) * size]))
        return lambda stream: self._write(copies, stream)

    def _write(self, copies, stream):
        backend = self.world.backend
        lanes = self.lanes.beside(stream, self.n_lanes)
        self.barrier(stream)
        for lane in lanes:
            backend.order(lane, backend.handle(stream))
        for j, copy in enumerate(copies):
            copy(lanes[j % len(lanes)])
        for lane in lanes:
            backend.order(backend.handle(stream), lane)
        self.barrier(stream)
