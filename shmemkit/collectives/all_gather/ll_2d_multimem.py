"""Two-dimensional LL all-gather with multicast: once across nodes, then once to all ranks of a node. For
small messages.

As ``ll_2d.py``, but a rank stores words for its node once, and the NVSwitch delivers them to all its ranks.
The rank that receives words from another node forwards them in the same way. With one node, it is LL by
multicast.

Slots     slots[buffer, k], on every rank: the words of rank k's segment (``device.packets.ll``). The rank
          of this node that is k, or has its local index, writes them through the multicast view. Where that
          rank forwards, k writes its slots first, through the network
Outbox    outbox[buffer], symmetric: the words of the own segment, for the network to read
Epochs    epochs[z, y, c], local: of chunk c in blocks (.., y, z). The epoch gives the flag
          and the buffer. Device-resident, so graph-safe

  block (b, y, z) of rank (i, l), rank l of node i, with l' = l + y modulo the ranks of a node and j = i + z
  modulo the nodes, for its chunks c = b, b + gridDim.x, ...:
     y = z = 0:     pack     the own chunk to the outbox, if there are other nodes, syncthreads
                    put      the words to the slots of (j, l) for all j but i: a warp for each
                    pack     the own chunk to the slots of all ranks of the node
                    copy     the own chunk to the output
     z > 0, y = 0:  forward  the words of (j, l), when they are here, to the slots of all ranks of the node
     all but (0, 0), when that is done for all chunks:
                    unpack   the words of (j, l'), when they are here, to the output
     at the end:             add 1 to the chunks' epochs

A chunk always has the same slots, whatever the size of the call. So the flags of a word only grow, until
the 32 bits of LL's flags wrap. (A rank that forwards replaces words in its own slots by themselves.)

No race: the double-buffer lemma (docs/protocols.md), as in ``ll_2d.py``. Who writes a word has received the
reader's own chunk of the epoch between directly: that of (j, l) through the network, those of its node from
the ranks themselves. The reader's launch before had ended, with every poll and every forwarding store, and
not before all words of the put had arrived. So the outbox may be packed again without quiet, and no two
puts to the same words are under way at once.

No deadlock: packing and puts wait for nobody, forwarding waits for puts only, unpacking for packing, puts
and forwarding; all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import (
    copy_block,
    ll_pack_block,
    ll_put_warp,
    ll_recv_block,
    ll_words,
    multimem_ll_pack_block,
    multimem_ll_recv_pack_block,
    num_ranks,
    rank,
)

from ..method import Method

LINES = 1024  # words for a chunk of 4096 bytes, the largest: 8 for each of 512 threads
MINIMUM_CC = (9, 0)


@cuda.jit
def ll_all_gather_2d_multimem(x, out, in_place, chunk, local_size, to_all, slots, outbox, epochs):
    """Gather the `x` of all ranks in `out`, by rank; x.size may be anything up to what the slots hold.

    x, out      1-D, uint64 or uint8: x.size elements, and n_ranks times as many
    in_place    whether x is the own part of out
    chunk       elements of a chunk
    local_size  ranks of a node, which are consecutive
    slots       uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
    to_all      its multicast view
    outbox      uint64 (2, words of the capacity), symmetric
    epochs       uint64 (nodes, local_size, chunks of the capacity), zeros at first
    grid        (any number, local_size, nodes), the same on all ranks; any number of threads
    """
    y, z = cuda.blockIdx.y, cuda.blockIdx.z
    me, n, size = rank(), num_ranks(), x.size
    first = 0  # of this node's ranks; no division, which is slow
    while first + local_size <= me:
        first += local_size
    there = first + z * local_size  # the first rank of node j
    if there >= n:
        there -= n
    local = me - first + y  # l'
    if local >= local_size:
        local -= local_size
    segment = there + local
    theirs = out[segment * size : (segment + 1) * size]

    c = cuda.blockIdx.x
    begin = c * chunk
    while begin < size and y == 0:
        part = x[begin : min(begin + chunk, size)]
        epoch, at, words = epochs[z, y, c], LINES * c, ll_words(part.size * x.itemsize)
        buffer, flag = epoch & 1, epoch + 1
        if z > 0:
            if local_size > 1:
                arriving = slots[buffer, segment, at:]
                multimem_ll_recv_pack_block(to_all[buffer, segment, at:], arriving, words, flag)
        else:
            if cuda.gridDim.z > 1:
                words_out = outbox[buffer, at:]
                ll_pack_block(words_out, part, flag)
                cuda.syncthreads()
                hops = 1 + (cuda.threadIdx.x >> 5)
                while hops < cuda.gridDim.z:
                    to = me + hops * local_size
                    ll_put_warp(slots[buffer, me, at:], words_out, words, to if to < n else to - n)
                    hops += (cuda.blockDim.x + 31) >> 5
            if local_size > 1:
                multimem_ll_pack_block(to_all[buffer, me, at:], part, flag)
            if not in_place:
                copy_block(theirs[begin : begin + part.size], part)
        c += cuda.gridDim.x
        begin = c * chunk

    if y > 0 or z > 0:
        c = cuda.blockIdx.x
        begin = c * chunk
        while begin < size:
            epoch = epochs[z, y, c]
            part = theirs[begin : min(begin + chunk, size)]
            ll_recv_block(part, slots[epoch & 1, segment, LINES * c :], epoch + 1)
            c += cuda.gridDim.x
            begin = c * chunk
    cuda.syncthreads()  # all threads have read the counters
    if cuda.threadIdx.x == 0:
        c = cuda.blockIdx.x
        while c * chunk < size:
            epochs[z, y, c] += 1
            c += cuda.gridDim.x


class LL2DMultimem(Method):
    """The method "ll_2d_multimem" of ``AllGather``.

    chunk       bytes of a segment that a block deals with at once; 4096 at most
    max_blocks  of a grid, if there are no more ranks: resident on all GPUs that have multicast
    """

    chunk, max_blocks = 4096, 108

    def prepare(self, max_nbytes):
        world = self.world
        chunks = max(1, -(-max_nbytes // (world.n_ranks * self.chunk)))
        shape = 2, world.n_ranks, LINES * chunks
        self.slots = self.zeros(shape, "uint64", "all_gather.ll_2d_multimem.slots")
        self.to_all = world.multicast_view(self.slots)
        self.outbox = self.empty(shape[::2], "uint64", "all_gather.ll_2d_multimem.outbox")
        self.epochs = world.xp.zeros((world.n_nodes, world.local_size, chunks), "uint64")
        for dtype in ("uint8", "uint64"):
            nothing = world.xp.empty(0, dtype)
            self._bind(chunks, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // self.chunk), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        local_size, nodes = self.world.local_size, self.world.n_nodes
        grid = min(chunks, max(1, self.max_blocks // self.world.n_ranks)), local_size, nodes
        args = x, out, in_place, self.chunk // x.itemsize, local_size
        return self.launch(
            ll_all_gather_2d_multimem, grid, *args, self.to_all, self.slots, self.outbox, self.epochs
        )


_x3, _x2 = types.Array(types.uint64, 3, "C"), types.Array(types.uint64, 2, "C")
GPU_KERNELS = {
    f"ll_all_gather_2d_multimem[{dtype}]": (
        ll_all_gather_2d_multimem,
        (
            *[types.Array(dtype, 1, "C")] * 2,
            *(types.boolean, types.int64, types.int64),
            *(_x3, _x3, _x2, _x3),
        ),
    )
    for dtype in (types.uint8, types.uint64)
}
