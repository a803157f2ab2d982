"""Exchanges of segments by copy engines: reduce-scatter, all-reduce, all-to-all and all-gather. Copy engines
write to Lamport slots on the peers (``device.packets.lamport``), and blocks take each packet as it arrives.
Each peer gets its own segment of x, or all get the same one. What arrives is combined, or stored.

Segments  one for each rank, of the same size
Packets   16 bytes of a segment
Slots     slots[k], on every rank: the packets of rank k. Rank k writes them; the receiver resets them to the
          sentinel. The own segment stays in x

  stream:        1. barrier of all ranks (``shmemkit.runtime.stream_barrier``): their slots are empty.
                    (An all-reduce has barriers of its own: ``all_reduce/composed.py``)
  side stream:   2. copies of whole segments to slots[me] on the ranks me + 1, me + 2, .. modulo the ranks,
                    one after the other
  stream:           a kernel, in which a thread, for its packets:
                 3. stores those that are not copied to slots[me] on each rank: all packets of segments that
                    do not start at multiples of 16 bytes; where all get the same, a last packet of less than
                    16
                 4. polls their slots until they are full; resets the slots; combines the packets in the order
                    of the ranks, or stores them
  stream:        5. waits for the copies: x may be written again

A copied packet arrives whole because copy engines write 32 bytes or more at once. CUDA does not promise this.
tests/collectives/test_gpu_collectives.py looks for packets that do not.

No race, although no signal announces a segment. A call writes slots after its barrier. All ranks reach the
barrier after their kernels of the previous call, which reset all slots. A call writes each slot once. So a
single buffer is enough, where ``schedules/exchange.py``, without a barrier, has two. x and out may be used
again when the stream has run all steps. If x and out overlap, then only in the rank's own segment. There, a
combining thread loads a packet before it stores the result; a gather stores nothing there.

No deadlock. Copies wait for no kernel but the barrier, and are enqueued before the kernel that waits for
those of other ranks. So the host may run the steps one by one. (In a graph, copies and that kernel run side
by side: copy engines do not wait for multiprocessors.) Threads store to others before they wait. All blocks
are resident.

Each rank sends to one rank and receives from one at a time. On H200s, copies to all three peers at once, on a
stream each, took nearly twice as long; two streams to one peer took longer than one. A copy costs some 3
microseconds besides its bytes. A copy that follows a kernel on a stream, or a kernel that follows a copy,
begins 6 microseconds later: so no step waits for a part of a segment by an order of streams. A kernel on half
of the multiprocessors reaches the bandwidth of the memory and hardly slows the copies down; one on all of
them costs a tenth of their speed.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    PIECE_BYTES,
    lamport_load,
    lamport_store,
    load_piece,
    num_ranks,
    rank,
    span,
    store_piece,
)
from shmemkit.runtime.stream_barrier import bind_barrier

from .own_segment import StoresOwn
from .schedules.packets import PacketMethod
from .side_streams import SideStreams
from .transports import LAMPORT, rank_after

AT_ONCE = 4  # slots that a thread polls at once, if their packets are stored


class CopyEngineExchange(PacketMethod, StoresOwn):
    """A method of this exchange. A subclass has its `name`, as "all_to_all copy_engine", and
    `personalized`: whether x has a segment for each rank.

    max_blocks  of a kernel, and on half of the multiprocessors: H200 has 132
    """

    t, at_once, max_blocks = LAMPORT, True, 66

    @staticmethod
    def grid_of(t):
        return 512, 1

    def prepare_slots(self, max_nbytes):
        """For segments of a rank's share of `max_nbytes`. Collective."""
        world, n = self.world, self.world.n_ranks
        self.check_ranks()
        channel = self.t.channel(self, n, -(-max_nbytes // n), self.array_name("slots"))
        self.slots, self.row, self.sentinel = *channel[:2], channel[2:]
        arrivals, epoch = self.zeros(n, "uint64", self.array_name("arrivals")), world.xp.zeros(1, "uint64")
        self.barrier = bind_barrier(arrivals, epoch, n, world.stream)
        self.side_streams = SideStreams(world)

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

    def copies(self, segments, ys, first=0, end=None):
        """-> copies to the y-th rank after this one, for all `ys`, of packets `first` to `end` (default:
        all), of those that are copied"""
        world, copies = self.world, []
        end = min(self.copied(segments), self.row if end is None else end)
        for y in ys:
            k = (world.rank + y) % world.n_ranks
            src = segments[k].view("uint8")[first * PIECE_BYTES : end * PIECE_BYTES]
            if src.size:
                at = 2 * (world.rank * self.row + first)
                slots = world.peer_view(self.slots[at : at + src.size // 8], k)
                copies.append(world.backend.copy_pieces(slots, src, self.sentinel))
        return copies

    def fork(self, stream):
        """-> handles: of `stream`, and of a side stream that is ordered after its work so far"""
        main, (side,) = self.world.backend.handle(stream), self.side_streams.of(stream, 1)
        self.world.backend.order(side, main)
        return main, side

    def launch_packets(self, kernel, packets, x, *args):
        """-> `kernel` bound to enough blocks for so many packets, and to these arguments"""
        fit = self.launch(kernel, 1, x, *args).resident_blocks
        most = min(self.max_blocks, fit, max(1, self.world.backend.multiprocessors // 2))
        return self.launch(kernel, max(1, min(most, -(-packets // self.threads))), x, *args)


def enqueue(copies, handle):
    for copy in copies:
        copy(handle)


@functools.cache
def slot_indices_of(ks, m):
    """-> ``slot_indices(i, row, step)``: m * len(ks) of them: for i, i + step, .., one in each of the rows
    `ks`."""
    count = m * len(ks)

    def made(j):
        before, k, q = made(j - 1) if j else None, ks[j % len(ks)], j // len(ks)

        @cuda.jit(device=True)
        def slot(i, row, step):
            return (types.uint32(i + types.uint32(k * row)),)

        @cuda.jit(device=True)
        def slot_indices(i, row, step):
            return before(i, row, step) + (types.uint32(i + types.uint32(q * step + k * row)),)

        return slot_indices if j else slot

    return made(count - 1)


@cuda.jit(device=True)
def send_packets(x, stride, at, size, i, step, end, slots, first, low, high):
    """Store packets i, i + step, .. before `end`, of a range of each segment, to the slots from `first` on of
    its rank."""
    me = rank()
    while i < end:
        for y in range(1, num_ranks()):
            k = rank_after(me, y)
            packet = load_piece(span(x, k * stride + at, size), i)
            lamport_store(slots, types.uint32(first + i), packet, low, high, k)
        i = types.uint32(i + step)


# ---- exchanges whose packets are stored


@functools.cache
def _storing(m):
    """-> ``store(out, i, step, packets)``: store `m` packets as packets i, i + step, ..."""
    before = _storing(m - 1) if m > 1 else None

    @cuda.jit(device=True)
    def store(out, i, step, packets):
        if before is not None:
            before(out, i, step, packets)
        store_piece(out, i + types.uint32((m - 1) * step), packets[m - 1])

    return store


_slot_indices, _slot_index, _store = (
    slot_indices_of((0,), AT_ONCE),
    slot_indices_of((0,), 1),
    _storing(AT_ONCE),
)


@cuda.jit
def store_copied(x, out, stride, size, packets, copied, slots, row, low, high):
    """Store what the others send to their segments of `out`; the previous rank's comes first.

    x, out     complex128, uint64 or uint8, as of ``load_piece``; out has n segments
    stride     elements from a segment of x to the next: 0, if all ranks get the same
    size       elements of a segment
    packets     of 16 bytes, of a segment; copied: how many of them copies send to the others
    slots      uint64 (2 * n * row,), symmetric, the sentinel everywhere
    row        slots for the packets of a rank
    low, high  the sentinel
    grid       any, one-dimensional, as the blocks are
    """
    first = types.uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    step, end, me = types.uint32(cuda.blockDim.x * cuda.gridDim.x), types.uint32(packets), rank()
    i = types.uint32(first + copied)
    send_packets(x, stride, 0, size, i, step, end, slots, types.uint32(me * row), low, high)
    for y in range(1, num_ranks()):
        k = rank_after(me, num_ranks() - y)
        its, at, i = span(out, k * size, size), types.uint32(k * row), first
        while i + (AT_ONCE - 1) * step < end:
            _store(its, i, step, lamport_load(slots, _slot_indices(types.uint32(at + i), 0, step), low, high))
            i = types.uint32(i + AT_ONCE * step)
        while i < end:
            (packet,) = lamport_load(slots, _slot_index(types.uint32(at + i), 0, step), low, high)
            store_piece(its, i, packet)
            i = types.uint32(i + step)


class StoredExchange(CopyEngineExchange):
    """A method that stores what arrives."""

    at_once = False

    def prepare(self, max_nbytes):
        self.prepare_slots(max_nbytes)
        self.bind_kinds(self._store)
        nothing = self.world.xp.empty(0, "uint8")
        self.bind_store(nothing, nothing)

    def bind(self, x, out, in_place):
        world, segments = self.world, self.segments_of(x)
        copies = self.copies(segments, range(1, world.n_ranks))
        own, store = self.store_own(segments, out, in_place), self._store(x, out)

        def run(stream):
            self.barrier(stream)
            main, side = self.fork(stream)
            enqueue(copies, side)
            own(stream)
            store(stream)
            world.backend.order(main, side)

        return run

    def store_own(self, segments, out, in_place):
        """-> run(stream): store this rank's own segment."""
        if in_place:
            return lambda stream: None
        me, size = self.world.rank, out.size // self.world.n_ranks
        return self.bind_store(out[me * size : (me + 1) * size], segments[me])

    def _store(self, x, out):
        segments, segment = self.segments_of(x), out.nbytes // self.world.n_ranks
        copied, packets = self.copied(segments), -(-segment // PIECE_BYTES)
        x, out = self.t.wide(self.world, x, out, segment)
        size = segment // out.itemsize
        numbers = size if self.personalized else 0, size, packets, copied
        return self.launch_packets(
            store_copied, packets, x, out, *numbers, self.slots, self.row, *self.sentinel
        )


_words = types.Array(types.uint64, 1, "C")
GPU_KERNELS = {
    f"store_copied[{kind}]": (
        store_copied,
        (*[types.Array(kind, 1, "C")] * 2, *[types.int64] * 4, _words, *[types.int64] * 3),
    )
    for kind in (types.complex128, types.uint64, types.uint8)
}
