"""Exchanges by copy engines: all-gather, all-to-all, reduce-scatter and a stage of all-reduce. Copy engines
write to Lamport slots on the peers (``device.packets.lamport``), and blocks take each packet as it arrives.
Each peer gets its own segment of x, or all get the same one. What arrives is combined, or stored.

Segments  one for each rank, of the same size
Packets   16 bytes of a segment
Slots     slots[k], on every rank: the packets of rank k. Rank k writes them; the receiver resets them to the
          sentinel. The own segment stays in x, and slots[me] is not used

  stream:        1. barrier of all ranks: their slots are empty. (An all-reduce has barriers of its own:
                    ``all_reduce/composed.py``)
  side stream:   2. copies of whole segments to slots[me] on the others (``copy_engines.py`` says how)
  stream:           a kernel, in which a thread, for its packets:
                 3. stores those that are not copied to slots[me] on each rank: all packets of segments that
                    do not start at multiples of 16 bytes; where all get the same, a last packet of less than
                    16
                 4. polls their slots until they are full; resets the slots; combines the packets in the order
                    of the ranks, so that the bits are the same in every run, or stores them
  stream:        5. waits for the copies: x may be written again

A kernel that combines starts when all segments but the last have been copied: before that it could only wait.

A copied packet arrives whole because copy engines write 32 bytes or more at once. CUDA does not promise this.
tests/collectives/test_gpu_collectives.py looks for packets that do not.

No race, although no signal announces a segment. A call writes slots after its barrier. All ranks reach the
barrier after their kernels of the previous call, which reset all slots. A call writes each slot once. So a
single buffer is enough, where ``exchange.py``, without a barrier, has two. x and out may be used again when
the stream has run all steps. If x and out overlap, then only in the rank's own segment. There, a combining
thread loads a packet before it stores the result; a gather stores nothing there.

No deadlock. Copies wait for no kernel but the barrier, and are enqueued before the kernel that waits for
those of other ranks. So the host may run the steps one by one. (In a graph, copies and that kernel run side
by side: copy engines do not wait for multiprocessors.) Threads store to others before they wait. All blocks
are resident.

All-to-all into a symmetric `out`, the same part of the same array on all ranks, needs no slots (`direct`). A
rank copies to segment me of out on rank k, after the barrier. A second barrier ends the call: all segments
are there. Blocks store the own segment, which no other rank touches.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    PIECE_BYTES,
    for_each_part,
    lamport_load,
    lamport_store,
    load_piece,
    num_ranks,
    rank,
    span,
    store_piece,
)
from shmemkit.device.cuda.unroll import for_each, tuple_of
from shmemkit.device.packets.transports import rank_after
from shmemkit.device.packets.units import combining, device
from shmemkit.operations.packet_method import PacketMethod
from shmemkit.runtime.side_streams import SideStreams
from shmemkit.runtime.stream_barrier import bind_barrier

from ..copy_engines import Copying

u32 = types.uint32
STORED, COMBINED = 4, 8  # packets in registers of a thread, whose loads are under way together


@device
def send_packets(x, stride, at, size, i, step, end, slots, first, low, high):
    """Store packets i, i + step, .. before `end`, of a range of each segment, to the slots from `first` on of
    its rank."""
    me = rank()
    while i < end:
        for y in range(1, num_ranks()):
            k = rank_after(me, y)
            packet = load_piece(span(x, k * stride + at, size), i)
            lamport_store(slots, u32(first + i), packet, low, high, k)
        i = u32(i + step)


@device
def _load(j, arguments):
    x, i, step = arguments
    return load_piece(x, i + u32(j * step))


@device
def _store(j, packet, arguments):
    out, i, step = arguments
    store_piece(out, i + u32(j * step), packet)


# ---- exchanges whose packets are stored


@device
def _slot(j, arguments):
    i, step = arguments
    return u32(i + u32(j * step))


_slots, _store_all = tuple_of(STORED, _slot), for_each(STORED, _store)


@cuda.jit
def store_copied(x, out, stride, size, packets, copied, slots, row, low, high):
    """Store what the others send to their segments of `out`; the previous rank's comes first.

    x, out     complex128, uint64 or uint8, as of ``load_piece``; out has n segments
    stride     elements from a segment of x to the next: 0, if all ranks get the same
    size       elements of a segment
    packets    of 16 bytes, of a segment; copied: how many of them copies send to the others
    slots      uint64 (2 * n * row,), symmetric, the sentinel everywhere
    row        slots for the packets of a rank
    low, high  the sentinel
    grid       any, one-dimensional, as the blocks are
    """
    first = u32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    step, end, me = u32(cuda.blockDim.x * cuda.gridDim.x), u32(packets), rank()
    i = u32(first + copied)
    send_packets(x, stride, 0, size, i, step, end, slots, u32(me * row), low, high)
    for y in range(1, num_ranks()):
        k = rank_after(me, num_ranks() - y)
        its, at, i = span(out, k * size, size), u32(k * row), first
        while i + (STORED - 1) * step < end:
            _store_all(lamport_load(slots, _slots((u32(at + i), step)), low, high), (its, i, step))
            i = u32(i + STORED * step)
        while i < end:
            (packet,) = lamport_load(slots, (u32(at + i),), low, high)
            store_piece(its, i, packet)
            i = u32(i + step)


# ---- exchanges whose packets are combined


@functools.cache
def _taking(op, dtype, n, me, m):
    """-> ``take(mine, out, i, step, slots, slot, row, low, high)``: wait for `m` packets of all others,
    combine them with the own ones, i, i + step, .. of `mine`, and store the results."""
    combine, others = combining(op, dtype, n), n - 1

    @device
    def slot_of(j, arguments):
        slot, row, step = arguments
        y = j % others
        return u32(slot + u32(j // others * step + (y + (y >= me)) * row))

    @device
    def store(packets, j, arguments):
        out, i, step, own = arguments
        store_piece(out, i + u32(j * step), combine(packets[:me] + (own[j],) + packets[me:]))

    @device
    def store_alone(j, packet, arguments):
        _store(j, combine((packet,)), arguments)

    load = tuple_of(m, _load)
    if n == 1:
        store_own = for_each(m, store_alone)

        @device
        def take_own(mine, out, i, step, slots, slot, row, low, high):
            store_own(load((mine, i, step)), (out, i, step))

        return take_own
    slots_of, store_all = tuple_of(m * others, slot_of), for_each_part(others, store)

    @device
    def take(mine, out, i, step, slots, slot, row, low, high):
        own = load((mine, i, step))
        store_all(lamport_load(slots, slots_of((slot, row, step)), low, high), (out, i, step, own))

    return take


@functools.cache
def reduction_kernel(op, dtype, n, me, words):
    """-> the kernel of rank `me` of `n`, which reduces `dtype`, a name as "float16", by `op`, as "sum", in
    arrays of `words`, as "complex128"."""
    m = max(1, COMBINED // n) if words != "uint8" else 1
    take, take_one = _taking(op, dtype, n, me, m), _taking(op, dtype, n, me, 1)

    @cuda.jit(max_registers=128)  # of 512 threads
    def combine_copied(x, out, stride, at, packets, copied, slots, row, first, low, high):
        """Combine a range of the segments of this rank, of the `x` of all ranks, in `out`.

        x, out     complex128, uint64 or uint8, as of ``load_piece``; x has n segments, out is the range of
                   this rank's; it may be that of x
        stride     elements of a segment
        at         where the range begins in it
        packets    of 16 bytes, which it has; copied: how many of them copies send to the others, all or none
        slots      uint64 (2 * n * row,), symmetric, the sentinel everywhere
        row        slots for the packets of a rank
        first      the number of the range's first packet in the segment
        low, high  the sentinel
        grid       any, one-dimensional, as the blocks are
        """
        i = u32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        step, end = u32(cuda.blockDim.x * cuda.gridDim.x), u32(packets)
        mine, slot = span(x, me * stride + at, out.size), u32(me * row + first)
        send_packets(x, stride, at, out.size, u32(i + copied), step, end, slots, slot, low, high)
        while i + (m - 1) * step < end:
            take(mine, out, i, step, slots, u32(first + i), row, low, high)
            i = u32(i + m * step)
        while i < end:
            take_one(mine, out, i, step, slots, u32(first + i), row, low, high)
            i = u32(i + step)

    return combine_copied


class CopiedExchange(PacketMethod, Copying):
    """A method of this schedule: transport `t`, LAMPORT; whether x is `personalized`, with a segment for each
    rank; whether it goes `direct` to a symmetric output. With an op, what arrives is combined.

    max_blocks  of a kernel, and on half of the multiprocessors: H200 has 132
    others      the other ranks, the next one first: a rank sends to them in this order
    """

    personalized = direct = False
    max_blocks = 66

    @staticmethod
    def grid_of(t):
        return 512, 1

    def prepare(self, max_nbytes, op=None):
        world, n = self.world, self.world.n_ranks
        self.op, self.at_once = op, op is not None
        self.others = [(world.rank + y) % n for y in range(1, n)]
        self.check_ranks()
        channel = self.t.channel(self, n, -(-max_nbytes // n), self.array_name("slots"))
        self.slots, self.row, self.sentinel = *channel[:2], channel[2:]
        arrivals, epoch = self.zeros(n, "uint64", self.array_name("arrivals")), world.xp.zeros(1, "uint64")
        self.barrier = bind_barrier(arrivals, epoch, n, world.stream, world)
        self.side_streams = SideStreams(world)
        if op is None:
            self.bind_kinds(self.storing)
            self.bind_store(*[world.xp.empty(0, "uint8")] * 2)

    def bind(self, x, out, in_place, dtype=None):
        world, others, segments = self.world, self.others, self.segments_of(x)
        if self.op:
            early, last = self.copies(segments, others[:-1]), self.copies(segments, others[-1:])
            return self.copying(last, [self.combining(x, out, dtype)], early=early)
        me, size = world.rank, out.size // world.n_ranks
        mine = out[me * size : (me + 1) * size]
        own = [] if in_place else [self.bind_store(mine, segments[me])]
        if self.direct and world.is_symmetric(out):
            copies = [world.backend.copy(world.peer_view(mine, k), segments[k]) for k in others]
            return self.copying(copies, own, last=[self.barrier])
        return self.copying(self.copies(segments, others), [*own, self.storing(x, out)])

    def segments_of(self, x):
        """-> what goes to each rank"""
        n = self.world.n_ranks
        if not self.personalized:
            return [x] * n
        size = x.size // n
        return [x[k * size : (k + 1) * size] for k in range(n)]

    def copied(self, segments):
        """-> how many packets of each of them are copied."""
        address, nbytes = self.world.backend.address, segments[0].nbytes
        if any(address(segment) % PIECE_BYTES for segment in segments):
            return 0
        return nbytes // PIECE_BYTES

    def copies(self, segments, ranks, first=0, end=None):
        """-> copies to the slots of these ranks, of packets `first` to `end` (default: all), of those that
        are copied"""
        world, copied = self.world, self.copied(segments)
        end = copied if end is None else min(end, copied)
        if end <= first:
            return []
        slots = self.slots_of(world.rank)[2 * first : 2 * end]
        part = slice(first * PIECE_BYTES, end * PIECE_BYTES)
        return [
            world.backend.copy_pieces(
                world.peer_view(slots, k), segments[k].view("uint8")[part], self.sentinel
            )
            for k in ranks
        ]

    def slots_of(self, k):
        """-> slots[k]"""
        return self.slots[2 * k * self.row : 2 * (k + 1) * self.row]

    def storing(self, x, out):
        """-> run(stream): store what comes."""
        segments, segment = self.segments_of(x), out.nbytes // self.world.n_ranks
        copied, packets = self.copied(segments), -(-segment // PIECE_BYTES)
        x, out = self.t.wide(self.world, x, out, segment)
        size = segment // out.itemsize
        numbers = size if self.personalized else 0, size, packets, copied
        return self._launch(store_copied, packets, x, out, *numbers, self.slots, self.row, *self.sentinel)

    def combining(self, x, out, dtype, first=0):
        """-> run(stream): combine what comes in `out`, 1-D, a range of the segments that begins with packet
        `first`, for arrays as of ``bind``."""
        world, segments = self.world, self.segments_of(x)
        segment, at, packets = segments[0].nbytes, first * PIECE_BYTES, -(-out.nbytes // PIECE_BYTES)
        copied = packets if self.copied(segments) else 0
        x, out = self.t.wide(world, x, out, segment)
        kernel = reduction_kernel(self.op, dtype.name, world.n_ranks, world.rank, x.dtype.name)
        stride = segment // x.itemsize if self.personalized else 0
        numbers = stride, at // x.itemsize, packets, copied
        return self._launch(kernel, packets, x, out, *numbers, self.slots, self.row, first, *self.sentinel)

    def _launch(self, kernel, packets, x, *args):
        """-> `kernel` bound to enough blocks for so many packets, and to these arguments"""
        fit = self.launch(kernel, 1, x, *args).resident_blocks
        most = self.within(min(self.max_blocks, fit, max(1, self.world.backend.multiprocessors // 2)))
        return self.launch(kernel, max(1, min(most, -(-packets // self.threads))), x, *args)


GPU_KERNELS = {
    f"store_copied[{words}]": (store_copied, {"x out": words}) for words in ("complex128", "uint64", "uint8")
} | {
    f"combine_copied[{op},{dtype},{n},{words}]": (
        reduction_kernel(op, dtype, n, n // 2, words),
        {"x out": words},
    )
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, "complex128"),
        ("sum", "float16", 4, "uint8"),
        ("max", "float32", 8, "uint64"),
        ("avg", "float64", 2, "complex128"),
        ("prod", "int8", 16, "complex128"),
        ("sum", "float8_e4m3fn", 4, "complex128"),
        ("avg", "float8_e5m2", 2, "uint8"),
    )
}
