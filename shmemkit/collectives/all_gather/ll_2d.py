"""Two-dimensional LL all-gathers: once across nodes, then inside the node. For small messages.

Rank (i, l) is rank l of node i. It packs its segment into LL words (``device.packets.ll``) and sends them by
NVSHMEM to the ranks (j, l) only, one on each other node. Each of those forwards the words unchanged to the
ranks of its node: by stores ("ll_2d"), or by one store for all of them, which the NVSwitch delivers
("ll_2d_multimem"). Every word carries its flag over one hop or two: there is no signal. So these are neither
a schedule of packets (``collectives/schedules``), whose words take one hop, nor one by put_signal.

Slots     slots[buffer, k], on every rank: the words of rank k's segment. The rank of this node that is k, or
          has its local index, writes them. On that rank itself, k writes them first, through the network; by
          multicast, the rank then replaces them by themselves
Outbox    the words that the network reads: the rank's own slots; by multicast, outbox[buffer], symmetric
Epochs    epochs[z, y, c], local: of chunk c in blocks (.., y, z). The epoch gives the flag and the buffer.
          Device-resident, so graph-safe

  block (b, y, z) of rank (i, l), with l' = l + y modulo the ranks of a node and j = i + z modulo the nodes,
  for its chunks c = b, b + gridDim.x, ...; by multicast, these steps are for y = 0, and for all l':
     z = 0:         pack     the own chunk to the slots of (i, l'), which for y = 0 are the rank's own
     y = 0, z = 0:  put      the words in the outbox, after syncthreads, to (j, l) for all j but i: a warp for
                             each
     y > 0, z > 0:  forward  the words of (j, l), when they are here, to the slots of (i, l')
     all, when that is done for all of its chunks:
                    unpack   the words of (j, l'), when they are here, to the output; by multicast, the own
                             chunk is copied there
                    count    add 1 to the chunks' epochs

A chunk always has the same slots, whatever the size of the call. So the flags of a word only grow, until
their 31 bits wrap. It does not matter who has forwarded a word.

No race: the double-buffer lemma and the put lemma (docs/protocols.md). Who writes a word, the sender or the
rank that forwards it, has received the reader's own chunk of the epoch between directly: (i, l) and (j, l)
send to each other, as all ranks of a node do. The reader sent it after its previous launch, which ended after
every poll of the word, by unpacking and forwarding blocks.

No deadlock: packing and puts wait for nobody, forwarding waits for puts only, unpacking for packing, puts
and forwarding.
"""

from numba import cuda

from shmemkit.device import (
    copy_block,
    ll_pack_block,
    ll_put_warp,
    ll_recv_block,
    ll_recv_pack_block,
    ll_words,
    multimem_ll_pack_block,
    multimem_ll_recv_pack_block,
    rank,
    span,
    symm_at,
)
from shmemkit.device.packets.transports import flag_of, rank_after
from shmemkit.operations.method import Method

from ..network import device, place


@device
def put_to_nodes(target, words, n_words, local_size):
    """Put `words` to `target` on the ranks of this one's number on other nodes. A warp for each."""
    hops, nodes = 1 + (cuda.threadIdx.x >> 5), cuda.gridDim.z
    while hops < nodes:
        ll_put_warp(target, words, n_words, rank_after(rank(), hops * local_size))
        hops += (cuda.blockDim.x + 31) >> 5


@device
def unpack(out, slots, k, chunk, words, epochs):
    """Rank k's words, of the chunks of this block, to `out`."""
    c = cuda.blockIdx.x
    while c * chunk < out.size:
        part = span(out, c * chunk, min(chunk, out.size - c * chunk))
        ll_recv_block(part, slots[epochs[c] & 1, k, words * c :], flag_of(epochs[c]))
        c += cuda.gridDim.x


@device
def count(size, chunk, epochs):
    """Add 1 to the epochs of the chunks of this block."""
    cuda.syncthreads()  # all threads have read the counters
    if cuda.threadIdx.x == 0:
        c = cuda.blockIdx.x
        while c * chunk < size:
            epochs[c] += 1
            c += cuda.gridDim.x


@cuda.jit
def ll_all_gather_2d(x, out, in_place, chunk, words, local_size, slots, epochs):
    """Gather the `x` of all ranks in `out`, by rank; x.size may be anything up to what the slots hold.

    x, out      1-D, uint64 or uint8: x.size elements, and n_ranks times as many
    in_place    whether x is the own part of out
    chunk       elements of a chunk, an even number of 8 bytes; they are packed into `words` words
    local_size  ranks of a node
    slots       uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
    epochs      uint64 (nodes, local_size, chunks of the capacity), zeros at first
    grid        (any number, local_size, nodes), the same on all ranks; any number of threads
    """
    y, z = cuda.blockIdx.y, cuda.blockIdx.z
    me, size, counts = rank(), x.size, epochs[z, y]
    first, peer, there = place(local_size, y, z)
    passed, segment = there + me - first, there + peer - first
    peer_slots = symm_at(slots, peer)
    c = cuda.blockIdx.x
    while c * chunk < size:
        part = span(x, c * chunk, min(chunk, size - c * chunk))
        epoch, at, n_words = counts[c], words * c, ll_words(part.size * x.itemsize)
        buffer, flag = epoch & 1, flag_of(epoch)
        if z == 0:
            ll_pack_block(peer_slots[buffer, me, at:], part, flag)
            if y == 0:
                cuda.syncthreads()
                put_to_nodes(slots[buffer, me, at:], slots[buffer, me, at:], n_words, local_size)
        elif y > 0:
            ll_recv_pack_block(peer_slots[buffer, passed, at:], slots[buffer, passed, at:], n_words, flag)
        c += cuda.gridDim.x
    if y > 0 or z > 0 or not in_place:
        unpack(span(out, segment * size, size), slots, segment, chunk, words, counts)
    count(size, chunk, counts)


@cuda.jit(max_registers=128)  # of 512 threads
def ll_all_gather_2d_multimem(x, out, in_place, chunk, words, local_size, slots, to_all, outbox, epochs):
    """As ``ll_all_gather_2d``.

    to_all  the multicast view of the slots
    outbox  uint64 (2, words of the capacity), symmetric
    """
    y, z = cuda.blockIdx.y, cuda.blockIdx.z
    size, counts = x.size, epochs[z, y]
    first, peer, there = place(local_size, y, z)
    segment = there + peer - first
    c = cuda.blockIdx.x
    while y == 0 and c * chunk < size:
        part = span(x, c * chunk, min(chunk, size - c * chunk))
        epoch, at, n_words = counts[c], words * c, ll_words(part.size * x.itemsize)
        buffer, flag = epoch & 1, flag_of(epoch)
        if z > 0:
            if local_size > 1:
                arriving = slots[buffer, segment, at:]
                multimem_ll_recv_pack_block(to_all[buffer, segment, at:], arriving, n_words, flag)
        else:
            if cuda.gridDim.z > 1:
                ll_pack_block(outbox[buffer, at:], part, flag)
                cuda.syncthreads()
                put_to_nodes(slots[buffer, segment, at:], outbox[buffer, at:], n_words, local_size)
            if local_size > 1:
                multimem_ll_pack_block(to_all[buffer, segment, at:], part, flag)
            if not in_place:
                copy_block(span(out, segment * size + c * chunk, part.size), part)
        c += cuda.gridDim.x
    if y > 0 or z > 0:
        unpack(span(out, segment * size, size), slots, segment, chunk, words, counts)
    count(size, chunk, counts)


class LL2D(Method):
    """The method "ll_2d" of ``AllGather``.

    chunk       bytes of a segment that a block deals with at once: 8 for each of 512 threads
    max_blocks  of a grid, unless there are more ranks: one per multiprocessor of A100
    """

    chunk, max_blocks = 4096, 108

    def prepare(self, max_nbytes):
        self.world.check_reach("all_gather ll_2d", ranks=self.world.node_ranks)
        self.use(ll_all_gather_2d, *self.make(max_nbytes, "all_gather.ll_2d"))

    def make(self, max_nbytes, name):
        """-> slots and epochs"""
        world, n = self.world, self.world.n_ranks
        self.chunks = max(1, -(-max_nbytes // (n * self.chunk)))
        slots = self.zeros((2, n, ll_words(self.chunk) * self.chunks), "uint64", f"{name}.slots")
        return slots, world.xp.zeros((world.n_nodes, world.local_size, self.chunks), "uint64")

    def use(self, kernel, *arrays):
        self.kernel, self.arrays = kernel, arrays
        for dtype in ("uint8", "uint64"):
            nothing = self.world.xp.empty(0, dtype)
            self._bind(self.chunks, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // self.chunk), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        local_size, nodes = self.world.local_size, self.world.n_nodes
        blocks = min(chunks, max(1, self.max_blocks // self.world.n_ranks))
        grid = self.within(blocks, local_size * nodes), local_size, nodes
        of_chunk = self.chunk // x.itemsize, ll_words(self.chunk)
        return self.launch(self.kernel, grid, x, out, in_place, *of_chunk, local_size, *self.arrays)


class LL2DMultimem(LL2D):
    """The method "ll_2d_multimem" of ``AllGather``."""

    def prepare(self, max_nbytes):
        name = "all_gather.ll_2d_multimem"
        slots, epochs = self.make(max_nbytes, name)
        to_all = self.world.multicast_view(slots)
        outbox = self.empty(slots.shape[::2], "uint64", f"{name}.outbox")
        self.use(ll_all_gather_2d_multimem, slots, to_all, outbox, epochs)


GPU_KERNELS = {
    f"{name}[{dtype}]": (kernel, {"x out": dtype}, *minimum_cc)
    for name, kernel, *minimum_cc in (
        ("ll_all_gather_2d", ll_all_gather_2d),
        ("ll_all_gather_2d_multimem", ll_all_gather_2d_multimem, (9, 0)),
    )
    for dtype in ("uint8", "uint64")
}
