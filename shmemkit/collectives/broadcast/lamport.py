"""Broadcast by Lamport packets: the root sends each packet once, to one of the other ranks, which passes it
on. For all but small messages. A GPU sends and receives no more than the message, and a packet makes its
second hop while the next ones make their first. (It is no schedule for other transports: who sends depends on
the unit, and LL and LL128 would need another credit.)

Packets   16 bytes of the array, in the registers of a thread; the 32 of a warp are a tile
Relay     of a tile: one of the other ranks, in turn
Chunks    as many packets in a row as a block has threads, always the same number
Slots     slots[buffer], on every rank but the root: one for each packet (``device.packets.lamport``). The
          root writes the slots of the packets that this rank relays, over NVLink; their relays write the
          others. The receiver resets them to the sentinel
Signals   empty[k, c], on every rank: how many epochs of chunk c rank k has begun. Only rank k sets it
Epochs    epochs[c], local: the epochs of chunk c so far; they select the buffer. Device-resident, so
          graph-safe

  block b, for its chunks c = b, b + gridDim.x, ..., at first, a few threads for each:
          1. all but the root: set empty[me, c] on all others to epochs[c] + 1                release, sys
             wait until empty[k, c] is at least epochs[c], for all others k but the root      acquire, sys
  then a thread, for its packet of each:
          2. the root: load it, store it to slots[buffer] on its relay, and to the output
             others:   poll it in slots[buffer] until it is full; reset the slot; the relay stores it to
                       slots[buffer] on the others; store it to the output
  at last: 3. syncthreads, and add 1 to the epochs of the chunks

No race: the credit lemma (docs/protocols.md), with two buffers. Before the root or a relay writes a buffer of
a chunk on rank k again, two epochs later, rank k has begun the epoch between, and has told both so (1). So
its previous launches have ended, which reset the slots. x may be out: a thread loads its packet before it
stores it. No deadlock: step 1 waits for earlier epochs; then relays wait for the root, and the others for
relays, all in ascending order; all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import (
    PIECE_BYTES,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    lamport_load,
    lamport_store,
    load_piece,
    notify,
    num_ranks,
    rank,
    store_piece,
    symm_at,
    wait,
)
from shmemkit.device.packets.transports import rank_after
from shmemkit.operations.packet_method import PacketMethod


@cuda.jit
def lamport_broadcast(x, out, in_place, root, packets, chunks, slots, row, low, high, empty, epochs):
    """Store the root's `x` in `out`.

    x, out     complex128, uint64 or uint8, as of ``load_piece``, of the same size; x counts on the root only
    in_place   whether x is out
    packets     of 16 bytes, of the array; chunks: of as many packets as a block has threads
    slots      uint64 (4 * row,), symmetric, the sentinel everywhere at first: two buffers; two words for each
               slot
    row        slots of a buffer
    low, high  the sentinel
    empty      uint64 (n_ranks, chunks of the capacity), symmetric, zeros at first
    epochs      uint64 (chunks of the capacity,), zeros at first
    grid       any number of blocks, one-dimensional, as the blocks are: of whole warps, of as many threads in
               all launches
    """
    b, t, threads, blocks = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, cuda.gridDim.x
    me, n = rank(), num_ranks()
    griddepcontrol_wait(x, out, root, symm_at(slots, 0), empty, epochs, me, n)
    griddepcontrol_launch_dependents()
    c = b + (t >> 3) * blocks
    while c < chunks:
        y = 1 + (t & 7)
        while y < n:
            k = rank_after(me, y)
            if me != root:
                notify(empty[me, c:], k, epochs[c] + 1, "set", "sys")
            if k != root:
                wait(empty[k, c:], 1, "sys", "acquire", epochs[c])
            y += 8
        c += (threads >> 3) * blocks
    cuda.syncthreads()
    c = b
    while c < chunks:
        i = types.uint32(c * threads + t)
        slot = types.uint32((epochs[c] & 1) * row + i)
        if i < packets and n == 1:
            store_piece(out, i, load_piece(x, i))
        elif i < packets:
            relay = rank_after(root, 1 + types.int64((i >> 5) % types.uint32(n - 1)))
            if me == root:
                packet = load_piece(x, i)
                lamport_store(slots, slot, packet, low, high, relay)
                if not in_place:
                    store_piece(out, i, packet)
            else:
                (packet,) = lamport_load(slots, (slot,), low, high)
                if me == relay:
                    for y in range(1, n):
                        k = rank_after(root, y)
                        if k != me:
                            lamport_store(slots, slot, packet, low, high, k)
                store_piece(out, i, packet)
        c += blocks
    cuda.syncthreads()  # all threads have read the counters
    c = b + t * blocks
    while c < chunks:
        epochs[c] += 1
        c += threads * blocks


class Lamport(PacketMethod):
    """The method "lamport" of ``Broadcast``."""

    @staticmethod
    def grid_of(t):
        return 256, 8

    def prepare(self, max_nbytes, root):
        self.root, xp = root, self.world.xp
        self.check_ranks()
        self.channel = self.t.channel(self, 2, max_nbytes, self.array_name("slots"))
        chunks = -(-self.channel[1] // self.threads)
        self.empty_signals = self.zeros((self.world.n_ranks, chunks), "uint64", self.array_name("empty"))
        self.epochs = xp.zeros(chunks, "uint64")
        self.bind_kinds(self._bind, False, 0)

    def bind(self, x, out, in_place):
        return self._bind(*self.t.wide(self.world, x, out, x.nbytes), in_place, x.nbytes)

    def _bind(self, x, out, in_place, n_bytes):
        packets = -(-n_bytes // PIECE_BYTES)
        args = in_place, self.root, packets, -(-packets // self.threads), *self.channel, self.empty_signals
        return self.launch_units(lamport_broadcast, packets, x, out, *args, self.epochs)


GPU_KERNELS = {
    f"lamport_broadcast[{words}]": (lamport_broadcast, {"x out": words})
    for words in ("complex128", "uint64", "uint8")
}
