"""Methods that compute and reduce a product: in one kernel (``fused.py``), or one step after the other."""

from collections.abc import Callable
from typing import Any

from shmemkit.collectives.all_reduce import AllReduce
from shmemkit.collectives.reduce_scatter import ReduceScatter
from shmemkit.operations.method import Method

from .. import bind_product, gpu_of
from ..aligned_copies import aligned
from ..distributed import multiprocessors_of_all, not_for
from ..problem import HALVES, Problem
from ..sm90 import Tile
from ..sm90_host import Choice, bind_gemm, estimate
from .fused import Parts, fused_kernel
from .tile_order import schedule

WIDTHS = (256, 224, 192, 160, 128, 96, 64, 32)
FLOAT32_WIDTH = 128  # of tiles whose parts are float32: the kernel runs out of registers otherwise
MOST_RANKS = 16  # the kernel has the code for each other rank's part
# Elements of the result that are worth an overlap: decided by benchmarks/results/gemm_rs_h200x{2,4}.json
LEAST = 1 << 22


def tiles_for(rows, n, part_dtype):
    """The tiles that may be chosen for `rows` rows of each rank, of n columns."""
    widest = FLOAT32_WIDTH if part_dtype == "float32" else 256
    # In narrower ones 16 columns of a part would fill more than a slot.
    least = 64 if part_dtype == "float32" and rows > 64 else 32
    widths = [w for w in WIDTHS if least <= w <= widest and w < n + 32] or [least]
    return [Tile(64 if rows <= 64 else 128, w) for w in widths]


class Fused(Method):
    """The product and the exchange in one kernel, among consecutive `ranks`: all if None. They share products
    of up to `max_tokens` rows."""

    everywhere, copied, several_nodes = False, False, False
    interleaved = True  # the rank's own tiles are among the others
    # `lag`: rounds of tiles by which the own ones are late. With 2 it took 2 % longer on 4 H200
    options = {"tile": None, "lag": 1}

    def prepare(self, max_tokens, max_n, dtype, part_dtype, options=options, ranks=None):
        world, self.options = self.world, options
        self.ranks = range(world.n_ranks) if ranks is None else ranks
        n_ranks = len(self.ranks)
        world.check_reach("a fused GEMM", ranks=self.ranks)
        reason = not_for(n_ranks, dtype, MOST_RANKS, 2)
        self.multiprocessors = multiprocessors_of_all(world, "a fused GEMM", reason, self.sms)
        self.part_dtype, self.me = part_dtype, world.rank - self.ranks.start
        rows = -(-max_tokens // n_ranks)
        sizes = [
            (tile.count(r, max_n), tile.count(r, max_n) * Parts(tile, part_dtype).tile)
            for r in (rows, min(rows, 64))
            for tile in self.tiles_for(r, max_n)
        ]
        self.signals, self.room = (max(column) for column in zip(*sizes, strict=True))
        self.staged_full = self.zeros((n_ranks * self.signals,), "uint64", "gemm.staged_full")
        self.gathered = self.staged_full
        if self.everywhere:
            self.gathered = self.zeros((n_ranks * self.signals,), "uint64", "gemm.gathered")
            self.whole = self.empty(
                (max_tokens * -(-max_n // 8) * 8,), dtype, "gemm.whole"
            )  # see ``aligned``
        self.prepare_staged(n_ranks - 1)
        self.offsets = self.offsets_of(self.staged_full, self.ranks)
        self.epochs, self.done = world.xp.zeros(1, "int64"), world.xp.zeros(1, "int32")

    def prepare_staged(self, others):
        self.staged = self.empty((2 * others * self.room,), "uint8", "gemm.staged")
        self.outbox, self.written, self.staged_empty = (
            self.staged,
            self.staged_full,
            self.staged_full,
        )  # not used

    def refuses(self, m, k, n):
        """-> why it does not compute that, alike on all ranks, or None"""
        if m % len(self.ranks):
            return f"M is {m}; it must be a multiple of the number of ranks, {len(self.ranks)}"
        return None

    def is_for(self, m, k, n):
        """Whether it is the faster choice, for what it computes. Arrays of other sizes must be copied."""
        emulated = self.world.backend.name == "emulator"  # which takes its time
        return k % 8 == n % 8 == 0 and m * n >= LEAST and not emulated

    def tiles_for(self, rows, n):
        """The tiles that may be chosen for `rows` rows of each rank, of n columns."""
        given = self.options["tile"]
        return [Tile(*given)] if given else tiles_for(rows, n, self.part_dtype)

    def choose(self, rows, n, k):
        """-> the Tile"""

        def cost(tile):
            m = len(self.ranks) * -(-rows // tile.m) * tile.m
            return estimate(m, n, k, Choice(tile, 1), self.multiprocessors)

        return min(self.tiles_for(rows, n), key=cost)

    def bind(self, a, b, out):
        """-> run(stream). `out` is of dtype, or float32."""
        return aligned(self._bind, a, b, out, a.shape[0] // len(self.ranks), self.sms)

    def _bind(self, a, b, out):
        world, n_ranks, me = self.world, len(self.ranks), self.me
        rows, (k, n), whole = a.shape[0] // n_ranks, b.shape, out
        tile = self.choose(rows, n, k)
        tiles, tile_rows = tile.count(rows, n), -(-rows // tile.m)
        tile_bytes = Parts(tile, self.part_dtype).tile
        chunk = self.chunk_of(tiles, tile_bytes)
        outs = None
        if self.everywhere:
            if not world.is_symmetric(out):
                whole = self.whole[: out.size].reshape(out.shape)
            mine = slice(me * rows, (me + 1) * rows)
            outs = [world.peer_view(whole, rank)[mine] for rank in self.ranks]
        of_ranks = n_ranks, self.everywhere, self.ranks.start, self.copied
        step = bind_gemm(
            lambda tile, kinds: fused_kernel(tile, kinds, self.part_dtype, *of_ranks),
            *(Problem(a, b, whole, None, None), Choice(tile, 1), self.multiprocessors),
            (rows, tile_rows, tiles, me),
            (self.staged, self.room, self.staged_full, self.gathered, self.signals, self.offsets),
            (self.outbox, self.written, self.staged_empty, chunk),
            *(world.xp.array(self.schedule(tiles)), self.epochs, self.done),
            m=n_ranks * tile_rows * tile.m,
            outs=outs,
            co_resident=True,
            group=world,
        )
        step = self.with_side_stream(step, tiles, chunk, tile_bytes)
        if whole is out:
            return step
        copy = world.backend.copy(out.reshape(-1), whole.reshape(-1))

        def run(stream):
            step(stream)
            copy(world.backend.handle(stream))

        return run

    def schedule(self, tiles):
        """-> the schedule of so many tiles of each rank"""
        n_ranks = len(self.ranks)
        stripe = max(1, self.multiprocessors // n_ranks) if self.interleaved else tiles
        return schedule(tiles, n_ranks, self.me, stripe, self.options["lag"])

    def chunk_of(self, tiles, tile_bytes):
        """-> how many are copied at a time, of `tiles` that a rank gets"""
        return 1

    def with_side_stream(self, step, tiles, chunk, tile_bytes):
        """-> run(stream): the kernel `step`, and the work of the side stream"""
        return step


class FusedEverywhere(Fused):
    everywhere, interleaved = True, False  # sending both kinds of tiles at once slows both

    def is_for(self, m, k, n):
        return m * n * len(self.ranks) >= 4 * LEAST and super().is_for(m, k, n)  # measured with 2 and with 4


class Sequential:
    """The product, and then the collective operation of ``kind``: the one for any GPU, dtype and size."""

    kind: Callable
    options: dict[str, Any] = {}

    def __init__(self, world, max_tokens, max_n, dtype, part_dtype, options, sms=None):
        if part_dtype != dtype:
            raise ValueError(f"part_dtype is {part_dtype}; with 'sequential' it must be the dtype, {dtype}")
        self.world = world
        itemsize = 2 if dtype in HALVES else int(dtype[-2:]) // 8
        self._reduce, self._gpu = (
            self.kind(world, max_tokens * max_n * itemsize, sms=sms),
            gpu_of(world).limited(sms),
        )
        self._product = self._reduce.output(max_tokens * max_n, dtype)

    def refuses(self, m, k, n):
        return None

    def is_for(self, m, k, n):
        return True

    def bind(self, a, b, out):
        m, n = a.shape[0], b.shape[1]
        whole = self._product[: m * n].reshape(m, n)
        product = bind_product(Problem(a, b, whole, None, None), self._gpu)

        def run(stream):
            product(stream)
            self._reduce(whole, out, stream=stream)

        return run

    def free(self):
        self._reduce.free()


class SequentialReduceScatter(Sequential):
    kind = ReduceScatter


class SequentialAllReduce(Sequential):
    kind = AllReduce
