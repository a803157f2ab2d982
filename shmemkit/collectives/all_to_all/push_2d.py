"""Two-dimensional push all-to-all: first inside the node, then across nodes. For several nodes.

Rank (i, l) is rank l of node i. It gives what it has for rank (j, m) to (i, m), by stores. (i, m) sends
what all ranks of its node have for (j, m), by NVSHMEM, in one message. So two nodes exchange one message
for each local index and part, not one for each pair of ranks, and all ranks use the network alike.

Segments  segment k of x goes to rank k; segment k of out comes from rank k
Parts     a segment is cut into as many parts as there are blocks per rank. Part b of the segments from the
          ranks of one node for one rank is contiguous, segment after segment
Outgoing  outgoing[buffer, z - 1, b], on rank (i, l): part b of what the ranks of node i have for (j, l),
          with j = i + z modulo the nodes. Each of them writes its segment. The network reads it
Incoming  incoming[buffer, z, b], on rank (i, l): part b of what the ranks of node j have for this rank. (j,
          l) writes it, through the network; for z = 0, each rank of the own node
Signals   full_near[z, k, b], on rank (i, l): the last epoch whose part b of (i, k) for (j, l) is here. Only
          (i, k) sets it
          full_far[buffer, z, b]: the last epoch whose incoming[buffer, z, b] is here. Only (j, l) sets it
Epochs    epochs[z, y, b], local: of block (b, y, z); the epoch selects the buffer. Device-resident, so
          graph-safe

  block (b, y, z) of rank (i, l), with l' = l + y modulo the ranks of a node and j = i + z modulo the nodes:
     y = 0, z = 0:  copy part b of the own segment to the output
     otherwise:     1. copy part b of the segment for (j, l') to the outgoing parts of (i, l'), or, for z =
                       0, the incoming ones; syncthreads
     y > 0:         2. set full_near[z, l, b] there                       release, sys: publishes the part
     y = 0, z > 0:  3. wait for full_near[z, k, b] of all k but l         acquire, sys
                    4. put outgoing[buffer, z - 1, b], and its signal, to the incoming parts of (j, l)
                                                                         the signal follows the data
     y > 0, z = 0:  5. wait for full_near[0, l', b]                       acquire, sys
     z > 0:         5. wait for full_far[buffer, z, b], syncthreads       acquire, also of the network
     all:           6. copy part b of what comes from (j, l') to the output
                    7. add 1 to the epoch

The sizes of the calls decide only where the segments lie in a part.

No race: the double-buffer lemma (docs/protocols.md), for part b. A buffer is written again two epochs
later, when the epoch between has ended on its writer. In that epoch the writer has received

  - something directly from the rank (i, m) that has the buffer, since the writer is of its node or has its
    local index. (i, m) sent it after its previous launch had ended. With that launch all reads of its
    blocks had ended, and the blocks had waited for everything that they read, whoever wrote it
  - for outgoing parts, which the network may read later: the put of (j, l) to (i, l). It takes what (j, m)
    stores there, in a launch that begins after (j, m)'s previous launch has ended. That launch could not
    end before (i, m)'s put had arrived. So the part has been read, without quiet

and no two puts with one signal are under way at once. The network may swap puts of neighbouring epochs:
hence a signal for each buffer.

No deadlock: all blocks store before they wait, puts wait for stores only, receivers for stores or a put,
and all blocks are resident.
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
    wait,
    wait_block,
)

from ..method import Method

SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def push_all_to_all_2d(x, out, segment, part, local_size, outgoing, incoming, full_near, full_far, epochs):
    """Exchange the segments of `x`, to `out`.

    x, out      uint8, 1-D, of n_ranks segments; they do not overlap
    segment     elements of a segment
    part        elements of a part, a multiple of 16: gridDim.x of them are a segment
    local_size  ranks of a node, which are consecutive
    outgoing    uint8 (2, nodes - 1, parts at most, local_size * elements of a part at most), symmetric
    incoming    uint8 (2, nodes, as outgoing), symmetric
    full_near      uint64 (nodes, local_size, parts at most), symmetric, zeros at first
    full_far     uint64 (2, nodes, parts at most), symmetric, zeros at first
    epochs       uint64 (nodes, local_size, parts at most), zeros at first
    grid        (parts, local_size, nodes), the same on all ranks; any number of threads
    """
    b, y, z, nodes = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.z
    me, n = rank(), num_ranks()
    first = 0  # of this node's ranks; no division, which is slow
    while first + local_size <= me:
        first += local_size
    there = first + z * local_size  # the first rank of node j
    if there >= n:
        there -= n
    mine = me - first  # l
    local = mine + y  # l'
    if local >= local_size:
        local -= local_size
    begin, end = min(b * part, segment), min((b + 1) * part, segment)
    length = end - begin
    pitch = length + 15 & -16  # from one segment to the next
    epoch = epochs[z, y, b] + 1
    buffer = epoch & 1
    at = (there + local) * segment + begin
    source = x[at : at + length]

    if y > 0 or z > 0:
        room = incoming[buffer, 0, b]
        if z > 0:
            room = outgoing[buffer, z - 1, b]
        copy_block(symm_at(room, first + local)[mine * pitch : mine * pitch + length], source)
        if y > 0:
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                notify(full_near[z, mine, b:], first + local, epoch, "set", "sys")
        else:
            k = cuda.threadIdx.x
            while k < local_size:
                if k != mine:
                    wait(full_near[z, k, b:], 1, "sys", "acquire", epoch)
                k += cuda.blockDim.x
            size = (local_size - 1) * pitch + length
            target = incoming[buffer, nodes - z, b, :size]  # it begins with a barrier of the block
            put_signal_nbi_block(
                target, room[:size], full_far[buffer, nodes - z, b:], epoch, SET, there + mine
            )
        if z > 0:
            if cuda.threadIdx.x == 0:
                signal_wait_until(full_far[buffer, z, b:], GE, epoch)
            cuda.syncthreads()
        else:
            wait_block(full_near[0, local, b:], 1, "sys", "acquire", epoch)
        source = incoming[buffer, z, b, local * pitch : local * pitch + length]
    copy_block(out[at : at + length], source)
    cuda.syncthreads()  # all threads have read the counter
    if cuda.threadIdx.x == 0:
        epochs[z, y, b] = epoch


class Push2D(Method):
    """The method "push_2d" of ``AllToAll``.

    part        bytes that are worth a block
    max_parts   of a segment
    max_blocks  of a grid, unless there are more ranks: one per multiprocessor of A100
    """

    part, max_parts, max_blocks = 1 << 15, 32, 108

    def prepare(self, max_nbytes):
        world = self.world
        world.check_reach("all_to_all push_2d", ranks=world.node_ranks)
        n, nodes, local_size = world.n_ranks, world.n_nodes, world.local_size
        segment = max(1, -(-max_nbytes // n))
        self.parts = min(self.max_parts, max(1, self.max_blocks // n), -(-segment // self.part))
        room = local_size * (max(min(self.part, segment), -(-segment // self.parts)) + 15 & -16)
        outgoing = 2, max(1, nodes - 1), self.parts, room
        self.outgoing = self.empty(outgoing, "uint8", "all_to_all.push_2d.outgoing")
        self.incoming = self.empty((2, nodes, self.parts, room), "uint8", "all_to_all.push_2d.incoming")
        self.full_near = self.zeros((nodes, local_size, self.parts), "uint64", "all_to_all.push_2d.full_near")
        self.full_far = self.zeros((2, nodes, self.parts), "uint64", "all_to_all.push_2d.full_far")
        self.epochs = world.xp.zeros((nodes, local_size, self.parts), "uint64")
        nothing = world.xp.empty(0, "uint8")
        self._bind(self.parts, nothing, nothing, 0, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        segment = x.size // self.world.n_ranks
        parts = min(self.parts, -(-segment // self.part))
        return self._bind(parts, x, out, segment, -(-segment // parts) + 15 & -16)

    def _bind(self, parts, *args):
        local_size, nodes = self.world.local_size, self.world.n_nodes
        args += local_size, self.outgoing, self.incoming, self.full_near, self.full_far, self.epochs
        return self.launch(push_all_to_all_2d, (parts, local_size, nodes), *args)


_bytes, _counters = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 3, "C")
_buffers = types.Array(types.uint8, 4, "C")
_signature = *(_bytes, _bytes, types.int64, types.int64, types.int64), _buffers, _buffers, *[_counters] * 3
GPU_KERNELS = {"push_all_to_all_2d": (push_all_to_all_2d, _signature)}
