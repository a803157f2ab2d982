"""The fused product whose parts copy engines send: the work of the side stream. ``fused.py`` has the
protocol.

The kernel's warps store parts to local memory faster than links take them from all multiprocessors at once.
"""

from shmemkit.device.cuda.accumulators import ITEMSIZE
from shmemkit.runtime.side_streams import SideStreams

from ..sm90_host import Choice
from .methods import Fused
from .time_estimates import outlasts

CHUNKS = 8  # of a part, at most
CHUNK = 1 << 21  # bytes of a part that are worth a copy
# Bytes of a part from which on "auto" copies: it loses with 4 MB, and wins from 32 MB on where the product
# outlasts the copies. Decided by benchmarks/results/gemm_rs_h200x{2,4}.json
LEAST = 1 << 23


class Copied(Fused):
    """The method "copy_engine"."""

    copied, interleaved = True, False  # tiles come in the order of the copies
    options = {**Fused.options, "copied_tiles": None}

    def prepare_staged(self, others):
        world, xp = self.world, self.world.xp
        reason = next(filter(None, world.host_allgather(world.backend.no_copies())), None)
        if reason:
            raise ValueError(f"copies by the driver cannot be used here: {reason}. Use another method")
        self.staged = self.empty((others * self.room,), "uint8", "gemm.staged")
        self.staged_empty = self.zeros((others + 1,), "uint64", "gemm.staged_empty")
        with world.stream:
            self.staged_empty[:] = 1
            self.outbox = xp.empty(others * self.room, "uint8")
            self.written = xp.zeros(others * self.signals, "uint64")
        world.stream.synchronize()
        self.side_streams = SideStreams(world)

    def is_for(self, m, k, n):
        n_ranks = len(self.ranks)
        part = m * n // n_ranks * ITEMSIZE[self.part_dtype]
        if part < LEAST or not super().is_for(m, k, n):
            return False
        sent = (n_ranks - 1) * part * (2 if self.everywhere else 1)
        choice = Choice(self.choose(m // n_ranks, n, k), 1)
        return outlasts(m, n, k, choice, self.multiprocessors, sent)

    def chunk_of(self, tiles, tile_bytes):
        return self.options["copied_tiles"] or max(-(-tiles // CHUNKS), min(tiles, CHUNK // tile_bytes))

    def with_side_stream(self, step, tiles, chunk, tile_bytes):
        backend = self.world.backend
        staged_empty = [self.staged_empty[k : k + 1] for k in range(len(self.ranks)) if k != self.me]
        begin = [("wait", word, 1) for word in staged_empty] + [
            ("write", word, 0) for word in staged_empty
        ]  # 10
        operations = [backend.memory_operations(begin), *self._copies(tiles, chunk, tile_bytes)]

        def run(stream):
            main, side = backend.handle(stream), self.side_streams.of(stream)
            backend.order(side, main)
            step(stream)  # before what waits for it
            for operation in operations:
                operation(side)
            backend.order(main, side)

        return run

    def _copies(self, tiles, chunk, tile_bytes):
        """Step 11 of each chunk, for one stream: copies to several ranks at a time take longer."""
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
                staged_full = world.peer_view(
                    self.staged_full[me * self.signals + c :][:1], self.ranks[owner]
                )
                yield operations([("wait", written, count), ("write", written, 0)])
                yield world.backend.copy(there, here)
                yield operations([("write", staged_full, 1)])


class CopiedEverywhere(Copied):
    everywhere = True
