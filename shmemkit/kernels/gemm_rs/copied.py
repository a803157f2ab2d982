"""The fused product whose parts are sent by copy engines: what goes on beside the kernel of ``fused.py``,
which has the protocol.

The kernel's warps store parts to memory here faster than links take them from all multiprocessors at a time.
"""

from shmemkit.device.fragments import ITEMSIZE
from shmemkit.kernels.lanes import Lanes

from .methods import Fused

CHUNKS = 8  # of a part, at most
CHUNK = 1 << 21  # bytes of a part that are worth a copy
LANES = 2  # streams, so that a copy begins while the one before ends
LEAST = 1 << 23  # bytes of a part from which on "auto" copies: a guess, between 4 MB and 32 MB


class Copied(Fused):
    """The method "copy_engine"."""

    copied = True

    def prepare_staged(self, others):
        world, xp = self.world, self.world.xp
        reason = next(filter(None, world.host_allgather(world.backend.no_copies())), None)
        if reason:
            raise ValueError(f"copies of parts cannot be used here: {reason}. Take another method")
        self.staged = self.empty((others * self.room,), "uint8", "gemm.staged")
        self.ready = self.zeros((others + 1,), "uint64", "gemm.ready")
        with world.stream:
            self.ready[:] = 1
            self.outbox = xp.empty(others * self.room, "uint8")
            self.written = xp.zeros(others * self.signals, "uint64")
        world.stream.synchronize()
        self.lanes = Lanes(world)

    def is_for(self, m, k, n):
        part = m * n // len(self.ranks) * ITEMSIZE[self.part_dtype]
        return part >= LEAST and super().is_for(m, k, n)

    def chunk_of(self, tiles, tile_bytes):
        return max(-(-tiles // CHUNKS), min(tiles, CHUNK // tile_bytes))

    def beside(self, step, tiles, chunk, tile_bytes):
        backend, lanes = self.world.backend, [[] for _ in range(LANES)]
        ready = [self.ready[k : k + 1] for k in range(len(self.ranks)) if k != self.me]
        begin = [("wait", word, 1) for word in ready] + [("write", word, 0) for word in ready]  # 10
        begin = backend.memory_operations(begin)
        for i, copy in enumerate(self._copies(tiles, chunk, tile_bytes)):
            lanes[i % LANES] += copy

        def run(stream):
            main, (first, *others) = backend.handle(stream), self.lanes.beside(stream, LANES)
            backend.order(first, main)
            step(stream)  # before what waits for it
            begin(first)
            for lane in others:
                backend.order(lane, first)
            for lane, operations in zip((first, *others), lanes, strict=True):
                for operation in operations:
                    operation(lane)
                backend.order(main, lane)

        return run

    def _copies(self, tiles, chunk, tile_bytes):
        """Step 11 of each chunk."""
        world, me, n_ranks = self.world, self.me, len(self.ranks)
        operations = world.backend.memory_operations
        for turn in range(n_ranks - 1):
            owner = (me + 1 + turn) % n_ranks
            place = (me - 1 if me > owner else me) * self.room
            for c, first in enumerate(range(0, tiles, chunk)):
                count = min(chunk, tiles - first)
                at, n_bytes = first * tile_bytes, count * tile_bytes
                written = self.written[turn * self.signals + c :][:1]
                here = self.outbox[turn * self.room + at :][:n_bytes]
                there = world.peer_view(self.staged[place + at :][:n_bytes], self.ranks[owner])
                arrived = world.peer_view(self.arrived[me * self.signals + c :][:1], self.ranks[owner])
                yield [
                    operations([("wait", written, count), ("write", written, 0)]),
                    world.backend.copy(there, here),
                    operations([("write", arrived, 1)]),
                ]


class CopiedEverywhere(Copied):
    everywhere = True
