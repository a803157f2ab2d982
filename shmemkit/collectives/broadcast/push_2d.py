"""Two-dimensional push broadcast: over the ranks of the root's node to the other nodes, and inside each
node. For several nodes.

Rank (i, l) is rank l of node i; the root is on node i0. The message has a segment for each local index. The
root gives segment l to (i0, l), which sends it to the ranks (j, l) of the other nodes, by NVSHMEM. Each
rank passes its segment on to the ranks of its node, by stores. So the message crosses the network once for
each other node, over the links of all ranks of the root's node alike.

Parts     a segment is cut into as many parts as there are blocks per rank
Scratch   scratch[buffer, l, b], on every rank but the root: part b of segment l. A rank's own segment is
          written by the root on its node, by (i0, l) through the network on the others. The other segments
          are written by the ranks of the same node that own them
Outbox    outbox[buffer, b], on the ranks of the root's node: part b of the own segment, which the network
          reads
Signals   full[buffer, l, b], on every rank: the last epoch whose part b of segment l is here. The writer
          sets it. On the root, which has the segment, it says that (i0, l) has received it; only (i0, l)
          sets it
          empty[k, b], on (i0, l): how many epochs rank k = (j, l) of another node has begun. Only k adds
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer. Device-resident, so graph-safe

  block (b, y) of rank (i, l), with l' = l + y modulo the ranks of a node:
     y = 0, i not i0:     1. add 1 to empty[me, b] on (i0, l)
     y > 0, the root:     2. wait until (i0, l') has received the part of the previous epoch  acquire, sys
                          3. copy part b of segment l' to the scratch there, syncthreads
                          4. set its full signal there                 release, sys: publishes the part
     all but the root:    5. wait for part b of the own segment        acquire, sys, or of the network
     y > 0:               6. copy it to the scratch of (i, l'), unless that is the root, syncthreads
                          7. set its full signal there                 release, sys
     y > 0, not the root: 8. wait for part b of segment l'             acquire, sys
     y = 0, i = i0:       9. wait until the ranks (j, l) of other nodes have begun the previous epoch
                         10. copy part b of the own segment to the outbox, put it, and its signal, to all of
                             these                                     the signal follows the data
     all:                11. copy part b of segment l' to the output
                         12. add 1 to the epoch

No race: the double-buffer lemma and the credit lemma (docs/protocols.md), for part b. A writer has heard
from the reader in the epoch between, whose launch begins after the reader's reads of the buffer have ended.
The ranks of a node hear it by the segments that they exchange, the root by 2, (i0, l) by 9 from other
nodes. The launch that made a put could not end before the put had arrived. So the outbox may be written
again, too, without quiet, and no two puts with one signal are under way at once. The network may swap puts
of neighbouring epochs: hence a full signal for each buffer, and a sum in empty. Nobody waits for the last
addition: NVSHMEM completes it before it frees memory.

A part goes as a whole. What overlaps are parts, and epochs.

No deadlock: 2 and 9 wait at most for the previous epoch of the others, 5 for the root, or for 9 and 10 of
(i0, l), 8 for 6, which waits for 5 only; all blocks are resident.
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
    signal_op,
    signal_wait_until,
    span,
    symm_at,
    wait_block,
)

from ..method import Method
from ..push import cut, parts_of

SET, ADD, GE = SignalOp.SIGNAL_SET, SignalOp.SIGNAL_ADD, ComparisonType.CMP_GE


@cuda.jit
def push_broadcast_2d(
    x, out, in_place, root, part, first, home, local_size, scratch, outbox, full, empty, epochs
):
    """Store the root's `x` in `out`.

    x, out       uint8, 1-D, of the same size; x counts on the root only
    in_place     whether x is out
    part         elements of a part: gridDim.x of them are a segment, or more
    first, home  the first rank of this node, and of the root's
    local_size   ranks of a node, which are consecutive: as many segments
    scratch      uint8 (2, local_size, parts at most, elements of a part at most), symmetric
    outbox       uint8 (2, parts at most, elements of a part at most), symmetric
    full      uint64 (2, local_size, parts at most), symmetric, zeros at first
    empty        uint64 (n_ranks, parts at most), symmetric, zeros at first
    epochs        uint64 (local_size, parts at most), zeros at first
    grid         (parts, local_size), the same on all ranks
    """
    b, y, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    me, n, size = rank(), num_ranks(), x.size
    local = me - first  # l
    to = local + y if local + y < local_size else local + y - local_size  # l'
    peer, pitch = first + to, cuda.gridDim.x * part
    begin, its = min(local * pitch + b * part, size), min(to * pitch + b * part, size)
    length, its_length = min(begin + part, size) - begin, min(its + part, size) - its
    epoch = epochs[y, b] + 1
    buffer = epoch & 1
    if y == 0 and first != home and t == 0:
        signal_op(empty[me, b:], 1, ADD, home + local)

    mine, theirs = span(scratch[buffer, local, b], 0, length), span(scratch[buffer, to, b], 0, its_length)
    if me == root:
        mine, theirs = span(x, begin, length), span(x, its, its_length)
        if y > 0:
            wait_block(full[1 - buffer, to, b:], 1, "sys", "acquire", epoch - 1)
            copy_block(span(symm_at(scratch, peer)[buffer, to, b], 0, its_length), theirs)
            cuda.syncthreads()
            if t == 0:
                notify(full[buffer, to, b:], peer, epoch, "set", "sys")
    elif first == home:
        wait_block(full[buffer, local, b:], 1, "sys", "acquire", epoch)
    else:
        if t == 0:
            signal_wait_until(full[buffer, local, b:], GE, epoch)
        cuda.syncthreads()
    if y > 0:
        if peer != root:
            copy_block(span(symm_at(scratch, peer)[buffer, local, b], 0, length), mine)
            cuda.syncthreads()
        if t == 0:
            notify(full[buffer, local, b:], peer, epoch, "set", "sys")
        if me != root:
            wait_block(full[buffer, to, b:], 1, "sys", "acquire", epoch)
    elif first == home and n > local_size:
        if t == 0:
            k = local
            while k < n:
                if k != me:
                    signal_wait_until(empty[k, b:], GE, epoch - 1)
                k += local_size
        cuda.syncthreads()
        source, k = span(outbox[buffer, b], 0, length), local
        copy_block(source, mine)
        while k < n:
            if k != me:  # it begins with a barrier of the block
                target = span(scratch[buffer, local, b], 0, length)
                put_signal_nbi_block(target, source, full[buffer, local, b:], epoch, SET, k)
            k += local_size
    if me != root or not in_place:
        copy_block(span(out, its, its_length), theirs)
    cuda.syncthreads()  # all threads have read the counter
    if t == 0:
        epochs[y, b] = epoch


class Push2D(Method):
    """The method "push_2d" of ``Broadcast``.

    part        bytes that are worth a block
    max_parts   of a segment
    max_blocks  of a grid, unless a node has more ranks: one per multiprocessor of A100
    """

    part, max_parts, max_blocks = 1 << 15, 32, 108

    def prepare(self, max_nbytes, root):
        world = self.world
        world.check_reach("broadcast push_2d", ranks=world.node_ranks)
        self.root, self.local_size = root, world.local_size
        most = min(self.max_parts, max(1, self.max_blocks // self.local_size))
        self.parts, capacity = parts_of(max_nbytes, self.local_size, most, self.part)
        shape = self.local_size, self.parts
        self.scratch = self.empty((2, *shape, capacity), "uint8", "broadcast.push_2d.scratch")
        self.outbox = self.empty((2, self.parts, capacity), "uint8", "broadcast.push_2d.outbox")
        self.full = self.zeros((2, *shape), "uint64", "broadcast.push_2d.full")
        self.empty_signals = self.zeros((world.n_ranks, self.parts), "uint64", "broadcast.push_2d.empty")
        self.epochs = world.xp.zeros(shape, "uint64")
        nothing = world.xp.empty(0, "uint8")
        self._bind(self.parts, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        parts, part = cut(-(-x.size // self.local_size), self.parts, self.part)
        return self._bind(parts, x, out, in_place, part)

    def _bind(self, parts, x, out, in_place, part):
        first, home = (k - k % self.local_size for k in (self.world.rank, self.root))
        args = x, out, in_place, self.root, part, first, home, self.local_size
        args += self.scratch, self.outbox, self.full, self.empty_signals, self.epochs
        return self.launch(push_broadcast_2d, (parts, self.local_size), *args)


_bytes, _two = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 2, "C")
GPU_KERNELS = {
    "push_broadcast_2d": (
        push_broadcast_2d,
        (
            *(_bytes, _bytes, types.boolean, *[types.int64] * 5),
            *(types.Array(types.uint8, 4, "C"), types.Array(types.uint8, 3, "C")),
            *(types.Array(types.uint64, 3, "C"), _two, _two),
        ),
    )
}
