"""Two-dimensional push all-gather: once across nodes, then inside the node. For several nodes.

Rank (i, l) is rank l of node i. It sends its segment by NVSHMEM to the ranks (j, l) only, one on each other
node. Each of those passes it on to the ranks of its node, by stores. So a segment goes to each node once,
and all ranks use the network alike.

Parts     a segment, what one rank gives, is cut into as many parts as there are blocks per rank
Scratch   scratch[buffer, k, b], on every rank: part b of rank k's segment. Rank k writes it if it is on
          this node or has the same local index l; otherwise the rank of this node with rank k's local index
          does. The network reads the rank's own
Signals   full[buffer, k, b], on every rank: the last epoch whose part b of rank k is there. The writer sets
          it
Epochs    epochs[z, y, b], local: of block (b, y, z); the epoch selects the buffer. Device-resident, so
          graph-safe

  block (b, y, z) of rank (i, l), with l' = l + y modulo the ranks of a node and j = i + z modulo the nodes:
     z > 0:          1. wait for part b of (j, l), syncthreads                 acquire, also of the network
     y > 0:          2. copy it (z = 0: part b of x) to the scratch of (i, l'), syncthreads
                     3. set its full signal there                              release, sys
                     4. wait for part b of (j, l'), syncthreads                acquire, sys
     y = 0, z = 0:   2. copy part b of x to the own scratch, syncthreads
                     3. put it, and its signal, to (j, l) for all j but i      the signal follows the data
     all:            5. copy part b of (j, l') to the output
                     6. add 1 to the epoch

No race: the double-buffer lemma (docs/protocols.md), for part b. Who writes it, by a put or by stores, has
received the reader's own part b of the epoch between directly: (i, l) and (j, l) send to each other, as all
ranks of a node do. The reader's launch before had ended, with all reads of the buffer, also by blocks that
pass it on. That launch could not end before the put had arrived. So the rank's own scratch may be written
again without quiet, and no two puts with one signal are under way at once. The network may swap puts of
neighbouring epochs: hence a signal for each buffer.

No deadlock: blocks (b, y, 0) send before they wait, blocks that pass on wait for a put only, receivers wait
for those, and all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import (
    ComparisonType,
    SignalOp,
    copy_block,
    notify,
    num_ranks,
    put_signal_nbi_block,
    rank,
    signal_wait_until,
    symm_at,
    wait_block,
)

from ..method import Method

SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def push_all_gather_2d(x, out, in_place, part, local_size, scratch, full, epochs):
    """Gather the `x` of all ranks in `out`, by rank.

    x, out      uint8, 1-D: x.size bytes, and n_ranks times as many
    in_place    whether x is the own part of out
    part        elements of a part: gridDim.x of them are x
    local_size  ranks of a node, which are consecutive
    scratch     uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
    full     uint64 (2, n_ranks, parts at most), symmetric, zeros at first
    epochs       uint64 (nodes, local_size, parts at most), zeros at first
    grid        (parts, local_size, nodes), the same on all ranks; any number of threads
    """
    b, y, z = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
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
    peer, passed, segment = first + local, there + me - first, there + local
    begin, end = min(b * part, size), min((b + 1) * part, size)
    epoch = epochs[z, y, b] + 1
    buffer, length = epoch & 1, end - begin

    source = x[begin:end]
    if z > 0:
        if cuda.threadIdx.x == 0:
            signal_wait_until(full[buffer, passed, b:], GE, epoch)
        cuda.syncthreads()
        source = scratch[buffer, passed, b, :length]
    if y > 0 or (z == 0 and cuda.gridDim.z > 1):
        copy_block(symm_at(scratch, peer)[buffer, passed, b, :length], source)
    if y > 0:
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            notify(full[buffer, passed, b:], peer, epoch, "set", "sys")
        wait_block(full[buffer, segment, b:], 1, "sys", "acquire", epoch)
        source = scratch[buffer, segment, b, :length]
    elif z == 0:
        mine, to = scratch[buffer, me, b, :length], me
        for _ in range(1, cuda.gridDim.z):
            to += local_size
            if to >= n:
                to -= n
            put_signal_nbi_block(mine, mine, full[buffer, me, b:], epoch, SET, to)
    if y > 0 or z > 0 or not in_place:
        copy_block(out[segment * size + begin : segment * size + end], source)
    cuda.syncthreads()  # all threads have read the counter
    if cuda.threadIdx.x == 0:
        epochs[z, y, b] = epoch


class Push2D(Method):
    """The method "push_2d" of ``AllGather``.

    part        bytes that are worth a block
    max_parts   of a segment
    max_blocks  of a grid, unless there are more ranks: one per multiprocessor of A100
    """

    part, max_parts, max_blocks = 1 << 15, 32, 108

    def prepare(self, max_nbytes):
        self.world.check_reach("all_gather push_2d", ranks=self.world.node_ranks)
        n, nodes, local_size = self.world.n_ranks, self.world.n_nodes, self.world.local_size
        segment = max(1, -(-max_nbytes // n))
        self.parts = min(self.max_parts, max(1, self.max_blocks // n), -(-segment // self.part))
        capacity = max(min(self.part, segment), -(-segment // self.parts)) + 15 & -16
        self.scratch = self.empty((2, n, self.parts, capacity), "uint8", "all_gather.push_2d.scratch")
        self.full = self.zeros((2, n, self.parts), "uint64", "all_gather.push_2d.full")
        self.epochs = self.world.xp.zeros((nodes, local_size, self.parts), "uint64")
        nothing = self.world.xp.empty(0, "uint8")
        self._bind(self.parts, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        parts = min(self.parts, -(-x.size // self.part))
        return self._bind(parts, x, out, in_place, -(-x.size // parts) + 15 & -16)

    def _bind(self, parts, *args):
        local_size, nodes = self.world.local_size, self.world.n_nodes
        args += local_size, self.scratch, self.full, self.epochs
        return self.launch(push_all_gather_2d, (parts, local_size, nodes), *args)


_bytes, _counters = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 3, "C")
_signature = (
    *(_bytes, _bytes, types.boolean, types.int64, types.int64),
    *(types.Array(types.uint8, 4, "C"), _counters, _counters),
)
GPU_KERNELS = {"push_all_gather_2d": (push_all_gather_2d, _signature)}
