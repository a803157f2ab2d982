"""Packet transports: how a unit of data gets into a peer's memory so that its arrival shows by itself. The
packets are those of ``shmemkit.device.packets``; docs/protocols.md compares them. A schedule
(``collectives/schedules``) says who sends which unit to whom. It works with any of these transports.

          unit                              slot        full when
  LL      8 bytes, in a thread              16 bytes    both flags are that of the epoch
  LL128   480 bytes, a tile, in a warp      512 bytes   the four flags are that of the epoch
  LAMPORT 16 bytes, in a thread             16 bytes    the slot no longer holds the sentinel; the receiver
                                                        resets it
Slots     slots[row, i], symmetric: unit i of a row. A schedule says what a row is, mostly a rank's packets in
          one of two buffers
Epochs    local: how often a group of units has been sent. A group is a tile of LL128, or the units of a warp

In kernels, `channel` is (slots, units of a row, low, high); low and high are the sentinel. `slot` is the
number of a slot, row * units of a row + i. All accesses to slots are relaxed, of scope sys.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, types

from ..cuda.array_words import load_word, store_word
from ..cuda.unroll import for_each, tuple_of
from ..shmem.barriers import num_ranks
from ..shmem.ordered_access import symm_at
from .lamport import PIECE_BYTES, lamport_load, lamport_store, load_piece, store_piece
from .ll import ll_load, ll_store
from .ll128 import (
    TILE_BYTES,
    TILE_WORDS,
    ll128_load_some,
    ll128_store_tile,
    ll128_store_tiles,
    load_tile,
    store_tile,
)

AT_ONCE = 16  # ranks: two words of each, and more, in registers
MOST_BYTES = 1 << 34  # of slots, and of arrays: units are counted in 32 bits

device = cuda.jit(device=True)
u32 = types.uint32


@dataclass(frozen=True)
class Transport:
    """What a schedule needs to know of a packet. What follows is a function of kernels, or makes
    one for `n` ranks.

    load(x, i) -> words       unit `i` of x, in registers
    store(out, i, words)      what is beyond the end of out is dropped
    send(channel, slot, words, epoch, rank)
                              to one rank
    receive(channel, slot, epoch) -> words
                              wait until the slot is full
    send_all(n)               -> send(channel, row, i, words, epoch, me): words[k] to the k-th rank, or to the
                              k-th after `me` (`rotates`)
    receive_all(n)            -> receive(channel, row, i, epoch): unit i of rows row .. row + n - 1, polled at
                              once. Both are None where a loop over the ranks serves as well
    has_sentinel              whether empty slots hold the sentinel, and not zeros
    """

    name: str
    unit_bytes: int
    slot_words: int
    lanes: int  # threads that have a unit together: 1, or 32 of a warp
    threads: int  # of a block
    blocks: int  # of a grid, at most, for each multiprocessor
    kinds: tuple  # of words that arrays are viewed as, the widest first
    whole_lines: bool  # it relies on NVLink, or one GPU, to deliver 16 or 128 bytes as a whole
    load: Callable
    store: Callable
    send: Callable
    receive: Callable
    send_all: Callable | None = None
    receive_all: Callable | None = None
    rotates: bool = False
    has_sentinel: bool = False

    @property
    def group(self):
        """Units that share a counter of epochs."""
        return 32 // self.lanes

    def groups_of(self, n_bytes):
        """How many groups of units a segment has, at least one."""
        return max(1, -(-n_bytes // (self.unit_bytes * self.group)))

    def units_of(self, n_bytes):
        return -(-n_bytes // self.unit_bytes)

    def wide(self, world, x, out, unit):
        """-> both, viewed as the widest words that their addresses, and `unit` bytes, of which they are
        multiples, allow."""
        address = world.backend.address
        bits = address(x) | address(out) | unit
        kind = next(kind for kind in self.kinds if bits % BYTES[kind] == 0)
        return x.view(kind), out.view(kind)

    def channel(self, method, rows, n_bytes, name):
        """-> (slots, units of a row, low, high): symmetric slots for `rows` rows of `n_bytes` each, empty.
        Collective."""
        world, units = method.world, self.groups_of(n_bytes) * self.group
        words = rows * units * self.slot_words
        if 8 * words > MOST_BYTES:
            raise ValueError(
                f"{method.name}: its slots would take {8 * words} bytes, more than {MOST_BYTES}; it is for "
                "smaller arrays"
            )
        if not self.has_sentinel:
            return method.zeros((words,), "uint64", name), units, 0, 0
        drawn = world.host_allgather(os.urandom(16))[0]
        sentinel = tuple(int.from_bytes(part, "little") >> 1 for part in (drawn[:8], drawn[8:]))  # int64
        slots = method.empty((words,), "uint64", name)
        with world.stream:
            slots.reshape(-1, 2)[:] = world.xp.asarray(sentinel, "uint64")
        world.stream.synchronize()
        return slots, units, *sentinel


BYTES = {"complex128": 16, "uint64": 8, "uint8": 1}


@device
def after(k, hops, n):
    """(k + hops) modulo n, without a division, which is slow. k is below n; hops is n at most."""
    return k + hops if k + hops < n else k + hops - n


@device
def rank_after(me, y):
    """The y-th rank after `me`, modulo their number; y is up to that."""
    return after(me, y, num_ranks())


# ---- where a thread's units are, and their counters


@functools.cache
def in_block(t):
    """-> unit_of() and units_of(): a thread's unit in its block, and how many a block has."""
    shift = t.lanes.bit_length() - 1  # x >> 0 would be a number of 64 bits

    @device
    def unit_of():
        return cuda.threadIdx.x >> shift if shift else cuda.threadIdx.x

    @device
    def units_of():
        return cuda.blockDim.x >> shift if shift else cuda.blockDim.x

    return unit_of, units_of


@functools.cache
def indexing(t, of_block=False):
    """-> index() and stride(): a thread's first unit in a one-dimensional grid, and the distance of its next
    (`of_block`: in its block alone);
    counter(i): the number of unit i's counter; leads(i): whether the thread writes it; end(units): what i
    is below while the thread counts, so that warps stay together."""
    lanes, group, others = t.lanes.bit_length() - 1, t.group.bit_length() - 1, t.group - 1

    @device
    def index():
        return u32(cuda.blockIdx.x * (cuda.blockDim.x >> lanes) + (cuda.threadIdx.x >> lanes))

    @device
    def stride():
        return u32((cuda.blockDim.x >> lanes) * cuda.gridDim.x)

    @device
    def index_in_block():
        return u32(cuda.threadIdx.x >> lanes)

    @device
    def stride_of_block():
        return u32(cuda.blockDim.x >> lanes)

    @device
    def counter(i):
        return i >> group

    @device
    def leads(i):
        return i & others == 0 if others else cuda.threadIdx.x & 31 == 0

    @device
    def end(units):
        return u32(u32(units) + u32(others)) & ~u32(others) if others else units

    where = (index_in_block, stride_of_block) if of_block else (index, stride)
    return *where, counter, leads, end


@device
def _slot(k, arguments):
    first, units = arguments
    return u32(first + u32(k * units))


def _receiving(receive_some):
    """-> a transport's `receive_all`, by ``receive_some(channel, slots, epoch)``: the units of some slots."""

    @functools.cache
    def receive_all(n):
        slots_of = tuple_of(n, _slot)

        @device
        def receive(channel, row, i, epoch):
            units = channel[1]
            return receive_some(channel, slots_of((u32(row * units + i), units)), epoch)

        return receive

    return receive_all


# ---- LL


@device
def _load_word(x, i):
    return (load_word(x, i),)


@device
def _store_word(out, i, words):
    store_word(out, i, words[0])


@device
def flag_of(epoch):
    """Never 0, as slots hold at first: units that share a counter may be sent in few of its epochs."""
    return u32(epoch | u32(0x80000000))


@device
def _ll_send(channel, slot, words, epoch, rank):
    ll_store(symm_at(channel[0], rank), slot, words[0], flag_of(epoch))


@device
def _ll_receive(channel, slot, epoch):
    return (ll_load(channel[0], slot, flag_of(epoch)),)


# ---- LL128


@device
def _ll128_send(channel, slot, words, epoch, rank):
    ll128_store_tile(channel[0], slot, words, flag_of(epoch), rank)


@device
def _ll128_receive_some(channel, slots, epoch):
    return ll128_load_some(channel[0], slots, flag_of(epoch))


@device
def _ll128_receive(channel, slot, epoch):
    return _ll128_receive_some(channel, (slot,), epoch)[0]


@functools.cache
def _ll128_send_all(n):
    @device
    def send(channel, row, i, words, epoch, me):
        ll128_store_tiles(channel[0], 0, u32(row * channel[1] + i), words, flag_of(epoch))

    return send


# ---- Lamport


@device
def _lamport_send(channel, slot, words, epoch, rank):
    lamport_store(channel[0], slot, words, channel[2], channel[3], rank)


@device
def _lamport_receive_some(channel, slots, epoch):
    return lamport_load(channel[0], slots, channel[2], channel[3])


@device
def _lamport_receive(channel, slot, epoch):
    return _lamport_receive_some(channel, (slot,), epoch)[0]


@device
def _lamport_send_after(k, words, arguments):
    channel, slot, epoch, me = arguments
    _lamport_send(channel, slot, words, epoch, rank_after(me, k + 1))


@functools.cache
def _lamport_send_all(n):
    each = for_each(n, _lamport_send_after)

    @device
    def send(channel, row, i, words, epoch, me):
        each(words, (channel, u32(row * channel[1] + i), epoch, me))

    return send


# ---- the three

_wide = "complex128", "uint64", "uint8"
LL = Transport(
    name="ll",
    unit_bytes=8,
    slot_words=2,
    lanes=1,
    threads=128,
    blocks=2,
    kinds=_wide[1:],
    whole_lines=False,
    load=_load_word,
    store=_store_word,
    send=_ll_send,
    receive=_ll_receive,
)
LL128 = Transport(
    name="ll128",
    unit_bytes=TILE_BYTES,
    slot_words=TILE_WORDS,
    lanes=32,
    threads=64,
    blocks=16,
    kinds=_wide,
    whole_lines=True,
    load=load_tile,
    store=store_tile,
    send=_ll128_send,
    receive=_ll128_receive,
    send_all=_ll128_send_all,
    receive_all=_receiving(_ll128_receive_some),
)
LAMPORT = Transport(
    name="lamport",
    unit_bytes=PIECE_BYTES,
    slot_words=2,
    lanes=1,
    threads=64,
    blocks=16,
    kinds=_wide,
    whole_lines=True,
    load=load_piece,
    store=store_piece,
    send=_lamport_send,
    receive=_lamport_receive,
    send_all=_lamport_send_all,
    receive_all=_receiving(_lamport_receive_some),
    rotates=True,
    has_sentinel=True,
)
