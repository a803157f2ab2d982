"""All-to-all by copy engines: for large messages.

Into an `out` of private memory: to staged memory on the peers, in pieces, which a few blocks store to their
segments (``shmemkit.kernels.copied_pieces``): segment k of x goes to rank k.

Into a symmetric one, the same part of the same array on all ranks, without blocks or staged memory:

  stream:          1. barrier of all ranks: their outs may be written
                   2. copy segment k of x to segment me of out on rank k, for k = me + 1, me + 2, ... modulo
                      the ranks, one after the other (see there)
                   3. barrier: all segments are there
  a stream beside: copy my own segment, which no other rank touches, before 3

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
        for k in (*range(me + 1, n), *range(me + 1)):  # my own comes last
            to = self.world.peer_view(mine, k)
            copies.append(self.world.backend.copy(to, x[k * size : (k + 1) * size]))
        return lambda stream: self._write(copies, stream)

    def _write(self, copies, stream):
        backend, (*others, own) = self.world.backend, copies
        main, (beside,) = backend.handle(stream), self.lanes.beside(stream, 1)
        backend.order(beside, main)
        own(beside)
        self.barrier(stream)
        for copy in others:
            copy(main)
        backend.order(main, beside)
        self.barrier(stream)
