"""All-gather by LL in two dimensions, with multicast inside the node: once across nodes, and once to all of a
node. For small messages.

As ``ll_2d.py``, but what goes to the ranks of a node is stored once, and the NVSwitch takes it to all of
them; whoever has received it from another node passes it on so, too. With one node, it is LL by multicast.

Lines     slots[buffer, k], on every rank: the words of rank k's segment (``device.packets.ll``). Written
          through the multicast view by the rank of my node that is k or has its number; if that is me and k
          is of another node, by k first, through the network
Outbox    outbox[buffer], symmetric: the words of my segment, for the network to read
Counters  epochs[z, y, c], local: how often block (.., y, z) has dealt with chunk c of a segment, of CHUNK
          bytes; it gives the flag and the half. In device memory, so that a replayed graph counts on

  block (b, y, z) of rank (i, l), the l-th of node i, with l' = l + y modulo the ranks of a node and
  j = i + z modulo the nodes, for its chunks c = b, b + gridDim.x, ...:
     y = z = 0:     pack     my chunk to my outbox, if there are other nodes, syncthreads
                    put      the words to the lines of (j, l) for all j but i: a warp for each
                    pack     my chunk to the lines of all ranks of my node
                    copy     my chunk to the output
     z > 0, y = 0:  forward  the words of (j, l), when they are here, to the lines of all ranks of my node
     all but (0, 0), when that is done for all chunks:
                    unpack   the words of (j, l'), when they are here, to the output
     at the end:             add 1 to the chunks' counters

A chunk is always the same bytes of the lines, and all ranks count it alike, whatever the lengths of the
calls. So the flags of a word only grow, and a word that has the flag has the data of this call, until the
flags begin again after 2**32 calls. (In the lines of who forwards, words are replaced by themselves.)

Nobody acknowledges. Let a word of half h be written in a call, and again two calls with that chunk later. In
the one between, who writes it has received the reader's own chunk: that of (j, l) from the network, those of
its node's ranks from themselves. The reader sends that in a launch that begins after its launch before has
ended, and with it every poll of the words and every store by which it passed them on. That launch could not
end before all words of the put were there: so the put has read my outbox, which I may pack again without
quiet, and no two puts to the same words are under way at once.

No deadlock: packing and puts wait for nobody, forwarding for puts only, unpacking for packing, puts and
forwarding; all blocks are resident.
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

CHUNK = 4096  # bytes of a segment that a block deals with at once: 8 for each of 512 threads
LINES = CHUNK // 8 * 2  # words of a chunk
MAX_BLOCKS = 108  # of a grid, if there are no more ranks: resident on all GPUs that have multicast
MINIMUM_CC = (9, 0)


@cuda.jit
def ll_all_gather_2d_multimem(x, out, in_place, chunk, local_size, to_all, slots, outbox, epochs):
    """Gather the `x` of all ranks in `out`, by rank; x.size may be anything up to what the lines hold.

    x, out      1-D, uint64 or uint8: x.size elements, and n_ranks times as many
    in_place    whether x is my part of out
    chunk       elements of a chunk, which are CHUNK bytes
    local_size  ranks of a node, which are consecutive
    slots       uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
    to_all      its multicast view
    outbox      uint64 (2, words of the capacity), symmetric
    epochs       uint64 (nodes, local_size, chunks of the capacity), zeros at first
    grid        (any number, local_size, nodes), the same on all ranks; any number of threads
    """
    y, z = cuda.blockIdx.y, cuda.blockIdx.z
    me, n, size = rank(), num_ranks(), x.size
    first = 0  # rank of my node; no division, which is slow
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
    """The method "ll_2d_multimem" of ``AllGather``."""

    def prepare(self, max_nbytes):
        world = self.world
        chunks = max(1, -(-max_nbytes // (world.n_ranks * CHUNK)))
        shape = 2, world.n_ranks, LINES * chunks
        self.slots = self.zeros(shape, "uint64", "all_gather.ll_2d_multimem.slots")
        self.to_all = world.multicast_view(self.slots)
        self.outbox = self.empty(shape[::2], "uint64", "all_gather.ll_2d_multimem.outbox")
        self.epochs = world.xp.zeros((world.n_nodes, world.local_size, chunks), "uint64")
        for dtype in ("uint8", "uint64"):
            nothing = world.xp.empty(0, dtype)
            self._bind(chunks, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // CHUNK), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        local_size, nodes = self.world.local_size, self.world.n_nodes
        grid = min(chunks, max(1, MAX_BLOCKS // self.world.n_ranks)), local_size, nodes
        args = x, out, in_place, CHUNK // x.itemsize, local_size
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
