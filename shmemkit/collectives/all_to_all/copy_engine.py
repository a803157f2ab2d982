"""All-to-all by copy engines: for large messages. Segment k of x goes to rank k
(``shmemkit.collectives.copy_engine_exchange``).

Into an `out` of private memory, copies go to slots on the peers, where blocks fetch the packets.

Into a symmetric `out`, the same part of the same array on all ranks, they need no slots. A rank copies to
segment me of out on rank k, after the barrier that all ranks reach. A second barrier ends the call: all
segments are there. Blocks store the own segment, which no other rank touches.
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
