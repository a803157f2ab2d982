"""What methods by LL128 tiles (``device.packets.ll128_tiles``) and by Lamport packets
(``device.packets.lamport``) share. Device functions handle the tiles of all ranks at once, unrolled for the
number of ranks: all loads are under way together, and the data stay in registers. The classes size the grid
and check the arguments.
"""

import functools

from numba import cuda, types

from shmemkit.device import TILE_BYTES, TILE_WORDS, load_tile, reduction, span, store_tile

from .method import Method

MOST_RANKS = 16  # two words of each, and more, in registers
MOST_BYTES = 1 << 34  # of an array: its packets are counted in 32 bits


@functools.cache
def loading(n):
    """-> ``load(x, segment, i)``: tile `i` of each of the `n` segments of x, of `segment` tiles."""
    before = loading(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def load_first(x, segment, i):
        return (load_tile(x, i),)

    @cuda.jit(device=True)
    def load(x, segment, i):
        return before(x, segment, i) + (load_tile(x, (n - 1) * segment + i),)

    return load if n > 1 else load_first


@functools.cache
def loading_segments(n):
    """-> ``load(x, size, i)``: tile `i` of each of the `n` segments of x, of `size` elements."""
    before = loading_segments(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def load_first(x, size, i):
        return (load_tile(span(x, 0, size), i),)

    @cuda.jit(device=True)
    def load(x, size, i):
        return before(x, size, i) + (load_tile(span(x, (n - 1) * size, size), i),)

    return load if n > 1 else load_first


@functools.cache
def copying(n):
    """-> ``copies(words)``: `n` times the same tile."""
    before = copying(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def only(words):
        return (words,)

    @cuda.jit(device=True)
    def copies(words):
        return before(words) + (words,)

    return copies if n > 1 else only


@functools.cache
def combining(op, dtype, n):
    """-> ``combine(tiles)``: the words of the combination of `n` tiles, in their order."""
    _, _, result = reduction(op, dtype)
    totals = _totals(op, dtype, n)

    @cuda.jit(device=True)
    def combine(tiles):
        low, high = totals(tiles)
        return result(low, n), result(high, n)

    return combine


@functools.cache
def _totals(op, dtype, n):
    first, add, _ = reduction(op, dtype)
    if n == 1:

        @cuda.jit(device=True)
        def totals(tiles):
            return first(tiles[0][0]), first(tiles[0][1])

    else:
        before = _totals(op, dtype, n - 1)

        @cuda.jit(device=True)
        def totals(tiles):
            low, high = before(tiles)
            return add(low, tiles[n - 1][0]), add(high, tiles[n - 1][1])

    return totals


@functools.cache
def storing(n):
    """-> ``store(out, segment, i, tiles)``: store the k-th of `n` tiles as tile `i` of the k-th segment of
    out, for all k."""
    before = storing(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def store(out, segment, i, tiles):
        if before is not None:
            before(out, segment, i, tiles)
        store_tile(out, (n - 1) * segment + i, tiles[n - 1])

    return store


@functools.cache
def storing_segments(n):
    """-> ``store(out, size, i, tiles)``: store the k-th of `n` tiles as tile `i` of the k-th segment of out,
    of `size` elements, for all k."""
    before = storing_segments(n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def store(out, size, i, tiles):
        if before is not None:
            before(out, size, i, tiles)
        store_tile(span(out, (n - 1) * size, size), i, tiles[n - 1])

    return store


class Tiles(Method):
    """A method whose kernels have a warp for each tile, or fewer."""

    threads = 64
    blocks = 16  # of a grid, at most, for each multiprocessor
    most_ranks = MOST_RANKS

    def check(self, name, tiles):
        """Whether it can run here, with so many tiles of slots in an array; collective."""
        if tiles * 8 * TILE_WORDS > MOST_BYTES:
            raise ValueError(
                f"{name}: its slots would take {tiles * 8 * TILE_WORDS} bytes, more than {MOST_BYTES}; it is "
                "for smaller arrays"
            )
        self.world.check_reach(name, nvlink=True)
        if self.world.n_ranks > self.most_ranks:
            raise ValueError(
                f"{name}: there are {self.world.n_ranks} ranks; it is for {self.most_ranks} at most"
            )
        self.most = {}  # blocks of a row, by kernel and dtype

    def wide(self, x, out, unit):
        """-> both, for accesses of 16 bytes where their addresses, and `unit` bytes, of which they are
        multiples, allow that."""
        address = self.world.backend.address
        if (address(x) | address(out) | unit) & 15:
            return x, out
        return x.view("complex128"), out.view("complex128")

    def bind_kinds(self, bind, *args):
        """``bind(x, out, *args)`` of empty arrays of each kind: no kernel is compiled later, while others
        wait."""
        for dtype in ("complex128", "uint64", "uint8"):
            nothing = self.world.xp.empty(0, dtype)
            bind(nothing, nothing, *args)

    def launch_tiles(self, kernel, tiles, x, *args, rows=1):
        """-> `kernel` bound to enough warps for `tiles` tiles, in each of so many rows of the grid, and to
        these arguments."""
        key = kernel, x.dtype
        if key not in self.most:
            fit = self.launch(kernel, (1, rows), x, *args, pdl=True).resident_blocks
            self.most[key] = max(1, min(fit, self.blocks * self.world.backend.multiprocessors) // rows)
        grid = min(-(-tiles // (self.threads // 32)), self.most[key])
        return self.launch(kernel, (grid, rows), x, *args, pdl=True)


class Exchange(Tiles):
    """A method in which all ranks get x, or each gets another segment of it. What arrives is stored by rank,
    or combined. A protocol has

    prepare_lines(n_bytes)            for segments of up to so many bytes; collective
    _bind(x, out, segment, dtype)     -> run(stream): of segments of so many bytes; dtype, a name, to combine

    and a method by it

    name          of it, as "all_gather ll128"
    personalized  whether x has a segment for each rank
    whole         whether the full array is one segment, as of an all-reduce, and not one for each rank
    """

    whole = False

    def prepare(self, max_nbytes, op=None):
        self.op, self.parts = op, 1 if self.whole else self.world.n_ranks
        self.prepare_slots(-(-max_nbytes // self.parts))
        if op is None:
            self.bind_kinds(self._bind, 0)

    def bind(self, x, out, in_place, dtype=None):
        segment = max(x.nbytes, out.nbytes) // self.parts
        return self._bind(*self.wide(x, out, segment), segment, dtype and dtype.name)


REDUCTIONS = ("sum", "bfloat16"), ("max", "float32"), ("sum", "float16"), ("prod", "int8")


def kernels_of(name, make, more, personalized, combined):
    """-> the GPU_KERNELS of a module whose method is an Exchange, by ``make(n_ranks, personalized, *how)``,
    whose kernels have x, out, and arguments of these `more` types. On sm_80, some with a segment for each
    rank spill registers: those of many ranks, and those by words and bytes."""
    kinds = (4, types.complex128), (8, types.uint64), (4, types.uint8), (16, types.complex128)
    return {
        f"{name}[{','.join(map(str, (*how, n, words)))}]": (
            make(n, personalized, *how),
            (*[types.Array(words, 1, "C")] * 2, *more),
            *[(9, 0)] * (personalized and (n, words) != kinds[0]),
        )
        for how, (n, words) in zip(REDUCTIONS if combined else [()] * 4, kinds, strict=True)
    }


def tiles_of(n_bytes):
    """How many tiles they are, at least one."""
    return max(1, -(-n_bytes // TILE_BYTES))


def words_of(tiles):
    """How many words of slots they take."""
    return tiles * TILE_WORDS
