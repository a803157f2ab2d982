"""Two-dimensional LL all-gather: once across nodes, then inside the node. For small messages and several
nodes.

Rank (i, l) is rank l of node i. It packs its segment into LL words (``device.packets.ll``) and sends them
by NVSHMEM to the ranks (j, l) only, one on each other node. Each of those forwards the words unchanged to
the ranks of its node, by stores. Every word carries its flag over one hop or two: there is no signal.

Slots     slots[buffer, k], on every rank: the words of rank k's segment. Rank k writes them if it is on
          this node or has the same local index l; otherwise the rank of this node with rank k's local index
          does. The network reads the rank's own
Epochs    epochs[z, y, c], local: of chunk c in blocks (.., y, z). The epoch gives the flag
          and the buffer. Device-resident, so graph-safe

  block (b, y, z) of rank (i, l), with l' = l + y modulo the ranks of a node and j = i + z modulo the nodes,
  for its chunks c = b, b + gridDim.x, ...:
     z = 0:         pack     the own chunk to the slots of (i, l'), which for y = 0 are the rank's own
     y = 0, z = 0:  put      these words, after syncthreads, to (j, l) for all j but i: a warp for each
     y > 0, z > 0:  forward  the words of (j, l), when they are here, to the slots of (i, l')
     all, when that is done for all of its chunks:
                    unpack   the words of (j, l'), when they are here, to the output
                    count    add 1 to the chunks' epochs

A chunk always has the same slots, whatever the size of the call. So the flags of a word only grow, until
the 32 bits of LL's flags wrap. It does not matter who has forwarded a word.

No race: the double-buffer lemma (docs/protocols.md). Who writes a word, the sender or the rank that
forwards it, has received the reader's own chunk of the epoch between directly: (i, l) and (j, l) send to
each other, as all ranks of a node do. The reader sent it after its previous launch, which ended after every
poll of the word, by unpacking and forwarding blocks. That launch could not end before all words of the put
had arrived. So the put has read the rank's own slots, which may be packed again without quiet, and no two
puts to the same words are under way at once.

No deadlock: packing and puts wait for nobody, forwarding waits for puts only, unpacking for packing, puts
and forwarding; all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import (
    ll_pack_block,
    ll_put_warp,
    ll_recv_block,
    ll_recv_pack_block,
    ll_words,
    num_ranks,
    rank,
    symm_at,
)

from ..method import Method


@cuda.jit
def ll_all_gather_2d(x, out, in_place, chunk, words, local_size, slots, epochs):
    """Gather the `x` of all ranks in `out`, by rank; x.size may be anything up to what the slots hold.

    x, out      1-D, uint64 or uint8: x.size elements, and n_ranks times as many
    in_place    whether x is the own part of out
    chunk       elements of a chunk, an even number of 8 bytes; they are packed into `words` words
    local_size  ranks of a node, which are consecutive
    slots       uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
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
    passed, segment = there + me - first, there + local
    peer_slots = symm_at(slots, first + local)
    theirs = out[segment * size : (segment + 1) * size]

    c = cuda.blockIdx.x
    begin = c * chunk
    while begin < size:
        part = x[begin : min(begin + chunk, size)]
        epoch, at, n_words = epochs[z, y, c], words * c, ll_words(part.size * x.itemsize)
        buffer, flag = epoch & 1, epoch + 1
        if z == 0:
            ll_pack_block(peer_slots[buffer, me, at:], part, flag)
            if y == 0:
                cuda.syncthreads()
                hops = 1 + (cuda.threadIdx.x >> 5)
                while hops < cuda.gridDim.z:
                    to = me + hops * local_size
                    if to >= n:
                        to -= n
                    ll_put_warp(slots[buffer, me, at:], slots[buffer, me, at:], n_words, to)
                    hops += (cuda.blockDim.x + 31) >> 5
        elif y > 0:
            ll_recv_pack_block(peer_slots[buffer, passed, at:], slots[buffer, passed, at:], n_words, flag)
        c += cuda.gridDim.x
        begin = c * chunk

    if y > 0 or z > 0 or not in_place:
        c = cuda.blockIdx.x
        begin = c * chunk
        while begin < size:
            epoch = epochs[z, y, c]
            part = theirs[begin : min(begin + chunk, size)]
            ll_recv_block(part, slots[epoch & 1, segment, words * c :], epoch + 1)
            c += cuda.gridDim.x
            begin = c * chunk
    cuda.syncthreads()  # all threads have read the counters
    if cuda.threadIdx.x == 0:
        c = cuda.blockIdx.x
        while c * chunk < size:
            epochs[z, y, c] += 1
            c += cuda.gridDim.x


class LL2D(Method):
    """The method "ll_2d" of ``AllGather``.

    chunk       bytes of a segment that a block deals with at once: 8 for each of 512 threads
    max_blocks  of a grid, unless there are more ranks: one per multiprocessor of A100
    """

    chunk, max_blocks = 4096, 108

    def prepare(self, max_nbytes):
        self.world.check_reach("all_gather ll_2d", ranks=self.world.node_ranks)
        n, nodes, local_size = self.world.n_ranks, self.world.n_nodes, self.world.local_size
        chunks = max(1, -(-max_nbytes // (n * self.chunk)))
        self.slots = self.zeros((2, n, ll_words(self.chunk) * chunks), "uint64", "all_gather.ll_2d.slots")
        self.epochs = self.world.xp.zeros((nodes, local_size, chunks), "uint64")
        for dtype in ("uint8", "uint64"):
            nothing = self.world.xp.empty(0, dtype)
            self._bind(chunks, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // self.chunk), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        local_size, nodes = self.world.local_size, self.world.n_nodes
        grid = min(chunks, max(1, self.max_blocks // self.world.n_ranks)), local_size, nodes
        of_chunk = self.chunk // x.itemsize, ll_words(self.chunk)
        args = x, out, in_place, *of_chunk, local_size, self.slots, self.epochs
        return self.launch(ll_all_gather_2d, grid, *args)


_words = types.Array(types.uint64, 3, "C")
GPU_KERNELS = {
    f"ll_all_gather_2d[{dtype}]": (
        ll_all_gather_2d,
        (*[types.Array(dtype, 1, "C")] * 2, types.boolean, *[types.int64] * 3, _words, _words),
    )
    for dtype in (types.uint8, types.uint64)
}
