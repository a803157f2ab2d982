"""What the methods by packet transports share: their slots, the size of their grids, and what they refuse."""

import functools
import math

from numba import cuda, types

from shmemkit.device import num_ranks, reduction, span
from shmemkit.device.cuda.unroll import folded, for_each, tuple_of
from shmemkit.operations.method import Method

from ..transports import AT_ONCE, Transport, rank_after

MOST_THREADS = 256  # of a block within a budget

device = cuda.jit(device=True)
u32 = types.uint32


class PacketMethod(Method):
    """A method by a transport `t`. A subclass has

    name       of it, as "all_gather ll128"
    at_once    whether a thread holds units of all ranks in registers
    blocks     of a grid, at most, for each multiprocessor
    """

    t: Transport
    at_once = False

    def __init__(self, world, *args, **settings):
        self.t = settings.get("t", getattr(self, "t", None))
        self.threads, self.blocks = self.grid_of(self.t)
        if settings.get("sms"):  # large blocks instead of many; so many threads have room for all registers
            self.threads = max(self.threads, min(MOST_THREADS, self.threads * self.blocks))
        self.most = {}  # blocks of a row of the grid, by kernel and dtype
        super().__init__(world, *args, **settings)

    @staticmethod
    def grid_of(t):
        """-> threads of a block, blocks for each multiprocessor"""
        return t.threads, t.blocks

    def check_ranks(self):
        """Whether it can run here. Collective."""
        world = self.world
        world.check_reach(self.name, nvlink=self.t.whole_lines)
        most = AT_ONCE if self.at_once and self.t.receive_all else math.inf
        if world.n_ranks > most:
            raise ValueError(f"{self.name}: there are {world.n_ranks} ranks; it is for {most} at most")

    @property
    def units_of_block(self):
        return self.threads // self.t.lanes

    def bind_kinds(self, bind, *args):
        """``bind(x, out, *args)`` of empty arrays of each kind: no kernel is compiled later, while others
        wait."""
        for kind in self.t.kinds:
            nothing = self.world.xp.empty(0, kind)
            bind(nothing, nothing, *args)

    def launch_units(self, kernel, units, x, *args, grid_rows=1, divides=None):
        """-> `kernel` bound to enough threads for so many units, in each of so many rows of the grid, and to
        these arguments. The number of blocks of a row divides `divides`."""
        key = kernel, grid_rows, x.dtype
        if key not in self.most:
            fit = self.launch(kernel, (1, grid_rows), x, *args, pdl=True).resident_blocks
            most = max(1, min(fit, self.blocks * self.world.backend.multiprocessors) // grid_rows)
            self.most[key] = self.within(most, grid_rows)
        grid = max(1, min(-(-units // self.units_of_block), self.most[key]))
        if divides:
            grid = next(blocks for blocks in range(min(grid, divides), 0, -1) if divides % blocks == 0)
        return self.launch(kernel, (grid, grid_rows), x, *args, pdl=True)


# ---- what kernels do with the units of all ranks


@functools.cache
def repeating(n):
    """-> ``copies(words)``: the same words, `n` times."""

    @device
    def same(k, words):
        return words

    return tuple_of(n, same)


@functools.cache
def sending(t, n, personalized):
    """-> ``send(channel, row, i, x, size, epoch, me)``: send each of `n` ranks, this one too, unit `i` of x,
    or of its segment of x, of `size` elements."""
    load_unit, send_all, rotates = t.load, t.send_all(n), t.rotates

    @device
    def load(k, arguments):
        x, size, i, me = arguments
        return load_unit(span(x, (rank_after(me, k + 1) if rotates else k) * size, size), i)

    load_all, copies = tuple_of(n, load), repeating(n)

    @device
    def send(channel, row, i, x, size, epoch, me):
        words = load_all((x, size, i, me)) if personalized else copies(load_unit(x, i))
        send_all(channel, row, i, words, epoch, me)

    return send


@functools.cache
def storing(t, n):
    """-> ``store(units, (out, size, i))``: store the k-th of `n` units as unit `i` of segment k of out, of
    `size` elements, for all k."""
    store_unit = t.store

    @device
    def store(k, words, arguments):
        out, size, i = arguments
        store_unit(span(out, k * size, size), i, words)

    return for_each(n, store)


@functools.cache
def combining(op, dtype, n):
    """-> ``combine(units)``: the words of the combination of `n` units of two words, in their order."""
    first, add, result = reduction(op, dtype)

    @device
    def first_pair(words, _):
        return first(words[0]), first(words[1])

    @device
    def add_pair(totals, words, _):
        return add(totals[0], words[0]), add(totals[1], words[1])

    fold = folded(n, first_pair, add_pair)

    @device
    def combine(units):
        low, high = fold(units, ())
        return result(low, n), result(high, n)

    return combine


@functools.cache
def combining_one_by_one(t, op, dtype):
    """-> ``combine(channel, slot, own, epoch, me)``: the combination of a unit of all ranks, in their order;
    `slot` is that of rank 0."""
    receive, (first, add, result) = t.receive, reduction(op, dtype)

    @device
    def of_rank(channel, slot, own, epoch, me, k):
        return own if k == me else receive(channel, u32(slot + k * channel[1]), epoch)

    @device
    def combine_words(channel, slot, own, epoch, me):
        n, k = num_ranks(), 1
        total = first(of_rank(channel, slot, own, epoch, me, 0)[0])
        while k < n:
            total = add(total, of_rank(channel, slot, own, epoch, me, k)[0])
            k += 1
        return (result(total, n),)

    @device
    def combine_pairs(channel, slot, own, epoch, me):
        n, k = num_ranks(), 1
        words = of_rank(channel, slot, own, epoch, me, 0)
        low, high = first(words[0]), first(words[1])
        while k < n:
            words = of_rank(channel, slot, own, epoch, me, k)
            low, high = add(low, words[0]), add(high, words[1])
            k += 1
        return result(low, n), result(high, n)

    return combine_words if t.unit_bytes == 8 else combine_pairs


REDUCTIONS = (
    ("sum", "bfloat16"),
    ("max", "float32"),
    ("sum", "float16"),
    ("prod", "int8"),
    ("avg", "float8_e5m2"),
)


def kernel_types(t, *more):
    """-> {kind of words: argument types of a kernel of `t`: x, out, size, units, its channel, `more`}"""
    return {
        kind: (
            *[types.Array(getattr(types, kind), 1, "C")] * 2,
            *[types.int64] * 2,
            types.Array(types.uint64, 1, "C"),
            *[types.int64] * 3,
            *more,
        )
        for kind in t.kinds
    }
