"""How products are computed and reduced: by the kernel of ``fused.py``, or one after the other."""

import numpy as np

from shmemkit.kernels.all_reduce import AllReduce
from shmemkit.kernels.gemm import matmul
from shmemkit.kernels.gemm.problem import HALVES
from shmemkit.kernels.gemm.sm90 import Kinds, Tile, shared_bytes
from shmemkit.kernels.gemm.sm90_host import Choice, estimate, major, maps
from shmemkit.kernels.method import Method
from shmemkit.kernels.reduce_scatter import ReduceScatter
from shmemkit.launch import bind

from .fused import Parts, fused_kernel

WIDTHS = (256, 224, 192, 160, 128, 96, 64, 32)
FLOAT32_WIDTH = 128  # of tiles whose parts are float32: the kernel runs out of registers otherwise
MOST_RANKS = 16  # the kernel has the code for each other rank's part
LEAST = 1 << 20  # elements of the result that are worth an overlap


def tiles_for(rows, n, part_dtype):
    """The tiles that may be chosen for `rows` rows of each rank, of n columns."""
    widest = FLOAT32_WIDTH if part_dtype == "float32" else 256
    # In narrower ones 16 columns of a part would fill more than a slot.
    least = 64 if part_dtype == "float32" and rows > 64 else 32
    widths = [w for w in WIDTHS if least <= w <= widest and w < n + 32] or [least]
    if rows <= 64:
        return [Tile(64, w) for w in widths] + [Tile(64, w, 2, "n") for w in widths if w <= 128]
    return [Tile(128, w, cluster) for w in widths for cluster in (2, 1)]


def padded(rows, tile):
    """Rows of a rank's tiles."""
    step = tile.m * tile.m_blocks
    return -(-rows // step) * step


def part_tiles(rows, n, tile):
    """Tiles of a rank's part of the result."""
    return padded(rows, tile) // tile.m * -(-n // (tile.n * tile.n_blocks)) * tile.n_blocks


class Fused(Method):
    """The product and the exchange in one kernel, among `ranks`, consecutive ones: all if None. `max_m` are
    the most rows of a product that they share."""

    everywhere, copied, several_nodes = False, False, False

    def prepare(self, max_m, max_n, dtype, part_dtype, ranks=None):
        world = self.world
        self.ranks = range(world.n_ranks) if ranks is None else ranks
        n_ranks = len(self.ranks)
        world.check_reach("a fused GEMM", ranks=self.ranks)
        reason = None
        if not 2 <= n_ranks <= MOST_RANKS:
            reason = f"{n_ranks} ranks: 2 to {MOST_RANKS} are allowed"
        elif world.backend.compute_capability[0] != 9:
            reason = f"compute capability {world.backend.compute_capability}: 9.0 is allowed"
        elif dtype not in HALVES:
            reason = f"{dtype}: {' or '.join(HALVES)} is allowed"
        if reason := next(filter(None, world.host_allgather(reason)), None):
            raise ValueError(f"a fused GEMM cannot be used here: {reason}")
        self.dtype, self.part_dtype, self.me = dtype, part_dtype, world.rank - self.ranks.start
        rows = -(-max_m // n_ranks)
        sizes = [
            (part_tiles(r, max_n, tile), part_tiles(r, max_n, tile) * self._parts(tile).tile)
            for r in (rows, min(rows, 64))
            for tile in tiles_for(r, max_n, part_dtype)
        ]
        self.signals, self.room = (max(column) for column in zip(*sizes, strict=True))
        self.arrived = self.zeros((n_ranks * self.signals,), "uint64", "gemm.arrived")
        self.gathered = self.arrived
        if self.everywhere:
            self.gathered = self.zeros((n_ranks * self.signals,), "uint64", "gemm.gathered")
            self.whole = self.empty((max_m * max_n,), dtype, "gemm.whole")
        self.prepare_staged(n_ranks - 1)
        xp, address = world.xp, world.backend.address
        peers = [world.peer_view(self.arrived, rank) for rank in self.ranks]
        offsets = [0] * self.ranks.start + [address(there) - address(self.arrived) for there in peers]
        self.offsets = xp.array(offsets, "int64")  # of ranks of the World
        self.calls, self.done, self.no = xp.zeros(1, "int64"), xp.zeros(1, "int32"), xp.zeros(1, "float32")

    def prepare_staged(self, others):
        self.staged = self.empty((2 * others * self.room,), "uint8", "gemm.staged")
        self.outbox, self.written, self.ready = self.staged, self.arrived, self.arrived  # not used

    def _parts(self, tile):
        return Parts(tile, Kinds(self.dtype, "k", "k", self.dtype), self.part_dtype)

    def is_for(self, m, k, n):
        """Whether it computes that at all, and is the faster choice."""
        emulated = self.world.backend.name == "emulator"  # which takes its time
        return m % len(self.ranks) == 0 and k % 8 == n % 8 == 0 and m * n >= LEAST and not emulated

    def choose(self, rows, n, k):
        """-> the Tile"""
        n_ranks, sms = len(self.ranks), self.world.backend.multiprocessors

        def cost(tile):
            return estimate(n_ranks * padded(rows, tile), n, k, Choice(tile, 1), sms)

        tiles = tiles_for(rows, n, self.part_dtype)
        return min((tile for tile in tiles if tile.cluster <= sms), key=cost)

    def bind(self, a, b, out):
        """-> run(stream). `out` is of dtype, or float32. ValueError for what the TMA cannot take."""
        world, n_ranks, me = self.world, len(self.ranks), self.me
        m, k, n = *a.shape, b.shape[1]
        if m % n_ranks:
            raise ValueError(f"a fused GEMM: M is {m}: a multiple of {n_ranks}, the ranks, is allowed")
        rows = m // n_ranks
        tile = self.choose(rows, n, k)
        kinds = Kinds(self.dtype, major(a, False), major(b, True), out.dtype.name)
        whole, mine = out, slice(me * rows, (me + 1) * rows)
        if self.everywhere:
            if not world.is_symmetric(out):
                whole = self.whole[: m * n].reshape(m, n)
            map_a, map_b, _ = maps(tile, kinds, a, b, whole)
            map_out = world.xp.concatenate(
                [maps(tile, kinds, a, b, world.peer_view(whole, r)[mine])[2] for r in self.ranks]
            )
        else:
            map_a, map_b, map_out = maps(tile, kinds, a, b, out)
        tiles = part_tiles(rows, n, tile)
        tile_bytes = self._parts(tile).tile
        chunk = self.chunk_of(tiles, tile_bytes)
        sms = world.backend.multiprocessors // tile.cluster * tile.cluster
        of_ranks = n_ranks, self.everywhere, self.ranks.start, self.copied
        step = bind(
            fused_kernel(tile, kinds, self.part_dtype, *of_ranks),
            min(n_ranks * tiles, sms),
            tile.threads,
            (
                *(map_a, map_b, map_out, n, k, rows, padded(rows, tile) // tile.m, tiles, me),
                *(self.staged, self.room, self.arrived, self.gathered, self.signals, self.offsets),
                *(self.outbox, self.written, self.ready, chunk, self.calls, self.done, self.no),
            ),
            shared=shared_bytes(tile, kinds),
            cluster=tile.cluster if tile.cluster > 1 else None,
            co_resident=True,
        )
        if world.xp is not np:
            world.xp.cuda.get_current_stream().synchronize()  # the maps are there
        step = self.beside(step, tiles, chunk, tile_bytes)
        if whole is out:
            return step
        copy = world.backend.copy(out.reshape(-1), whole.reshape(-1))

        def run(stream):
            step(stream)
            copy(world.backend.handle(stream))

        return run

    def chunk_of(self, tiles, tile_bytes):
        """-> how many are copied at a time, of `tiles` that a rank gets"""
        return 1

    def beside(self, step, tiles, chunk, tile_bytes):
        """-> run(stream): the kernel `step`, and what goes on beside it"""
        return step


class FusedEverywhere(Fused):
    everywhere = True


class Sequential:
    """The product, and then the collective operation of ``kind``: the one for any GPU, dtype and size."""

    def __init__(self, world, max_m, max_n, dtype, part_dtype):
        if part_dtype != dtype:
            raise ValueError(f"sequential: parts are of the dtype, {dtype}, not {part_dtype}")
        self.world = world
        itemsize = 2 if dtype in HALVES else int(dtype[-2:]) // 8
        self._reduce = self.kind(world, max_m * max_n * itemsize)
        self._product = self._reduce.output(max_m * max_n, dtype)

    def is_for(self, m, k, n):
        return True

    def bind(self, a, b, out):
        m, n = a.shape[0], b.shape[1]
        product = self._product[: m * n].reshape(m, n)

        def run(stream):
            matmul(a, b, product, stream=stream)
            self._reduce(product, out, stream)

        return run

    def free(self):
        self._reduce.free()


class SequentialReduceScatter(Sequential):
    kind = ReduceScatter


class SequentialAllReduce(Sequential):
    kind = AllReduce
