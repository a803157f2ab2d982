"""All-to-all by copy engines: for large messages. Segment k of x goes to rank k
(``shmemkit.collectives.copy_engine_exchange``).

Into an `out` of private memory: to places on the peers, where blocks fetch it.

Into a symmetric one, the same part of the same array on all ranks, without them: to segment me of out on rank
k, which may be written when all have come to the barrier; another one ends the call: all segments are there.
Blocks store my own, which no other rank touches.
"""

from ..copy_engine_exchange import StoredExchange, enqueue


class CopyEngine(StoredExchange):
    """The method "copy_engine" of ``AllToAll``."""

    name, personalized = "all_to_all copy_engine", True

    def bind(self, x, out, in_place):
        if not self.world.is_symmetric(out):
            return super().bind(x, out, in_place)
        world, me, n = self.world, self.world.rank, self.world.n_ranks
        backend, size, segments = world.backend, out.size // n, self.segments_of(x)
        mine, copies = out[me * size : (me + 1) * size], []
        for y in range(1, n):
            k = (me + y) % n
            copies.append(backend.copy(world.peer_view(mine, k), segments[k]))
        own = self.store_own(segments, out, in_place=False)

        def run(stream):
            self.barrier(stream)
            main, side = self.fork(stream)
            enqueue(copies, side)
            own(stream)
            backend.order(main, side)
            self.barrier(stream)

        return run
