"""Two-dimensional push gather: to the ranks of the root's node, and inside it to the root. For several
nodes.

Rank (j, l) is rank l of node j; the root is on node i0. Rank (j, l) of another node sends what it gives to
(i0, l), by NVSHMEM. (i0, l) passes it on to the root, by stores, unless it is the root. So the data from
the network use the links of all ranks of the root's node alike.

Parts     what one rank gives is cut into as many parts as there are blocks per rank
Scratch   scratch[buffer, k, b], on the ranks of the root's node: part b of rank k. On (i0, l), k = (j, l)
          writes it, through the network. On the root, the ranks of its node do, too, for themselves and for
          those that send to them. On other nodes: the own part, which the network reads
Signals   full[buffer, k, b], on the ranks of the root's node: the last epoch whose part b of rank k is
          here. The writer sets it
          empty[k, b], on (i0, l): the last epoch whose part b of rank k the root has read. Only the root
          sets it; k is (i0, l), or sends to it
          outbox_empty[b], on (j, l) of other nodes: how many epochs (i0, l) has begun. Only (i0, l) adds to
          it
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer. Device-resident, so graph-safe

  block (b, 0) of (j, l) of another node:
          1. wait until (i0, l) has begun the previous epoch
          2. copy part b of x to the scratch here, put it, and its signal, to (i0, l)
                                                                       the signal follows the data
  block (b, y) of (i0, l), for rank k: on the root any; on the others itself, and those that send to it
     k sends to it:
          3. add 1 to outbox_empty[b] on k; wait for part b of it       also of the network
     the root, k is of its node, or sends to another of it:
          4. wait for part b of k                                       acquire, sys
     not the root:
          5. wait until the root has read the part of two epochs before acquire, sys
          6. copy part b, of x or of k, to the root's scratch, syncthreads
          7. set its full signal there                                  release, sys: publishes the part
     the root:
          8. copy part b to the output, syncthreads
          9. set empty[k, b] on the rank that stored it, if one did     release, sys: after the reads
     all:
         10. add 1 to the epoch

No race: the credit lemma (docs/protocols.md), with two buffers. Stores to the root follow 5. Puts follow 1:
the epoch between begins on (i0, l) after the launch that read the buffer has ended. That launch could not
end before the put had arrived. So what the put reads may be written again, too, without quiet, and no two
puts with one signal are under way at once. The network may swap puts of neighbouring epochs: hence a full
signal for each buffer, and a sum in outbox_empty. Nobody waits for the last addition: NVSHMEM completes it
before it frees memory.

A part goes as a whole. What overlaps are parts, and epochs. With many ranks there are few parts: the root
has a block for each part of each rank.

No deadlock: 1 and 5 wait for previous epochs only, 3 for 2, 4 for 7, which waits for 3; all blocks are
resident.
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
from shmemkit.device.swizzle import quotient

from ..method import Method
from ..push import cut, parts_of

SET, ADD, GE = SignalOp.SIGNAL_SET, SignalOp.SIGNAL_ADD, ComparisonType.CMP_GE


@cuda.jit
def push_gather_2d(
    x, out, in_place, root, part, home, local_size, scratch, full, outbox_empty, empty, epochs
):
    """Gather the `x` of all ranks in the root's `out`, by rank.

    x, out      uint8, 1-D: out has n_ranks times as many elements, and counts on the root only
    in_place    whether x is the root's part of out
    part        elements of a part: gridDim.x of them are x, or more
    home        the first rank of the root's node
    local_size  ranks of a node, which are consecutive
    scratch     uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
    full     uint64 (2, n_ranks, parts at most), symmetric, zeros at first
    outbox_empty       uint64 (parts at most,), symmetric, zeros at first
    empty        uint64 (n_ranks, parts at most), symmetric, zeros at first
    epochs       uint64 (n_ranks, parts at most), zeros at first
    grid        (parts, n_ranks) on the root, (parts, nodes) on the others of its node, else (parts, 1)
    """
    b, y, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    me, n, size = rank(), num_ranks(), x.size
    k = me + y * (1 if me == root else local_size)
    if k >= n:
        k -= n
    by = home + k - quotient(k, local_size) * local_size  # who brings it to the root: (i0, l)
    begin = min(b * part, size)
    length = min(begin + part, size) - begin
    epoch = epochs[y, b] + 1
    buffer = epoch & 1
    theirs, mine = span(scratch[buffer, k, b], 0, length), span(x, begin, length)
    if me < home or me >= home + local_size:
        if t == 0:
            signal_wait_until(outbox_empty[b:], GE, epoch - 1)
        cuda.syncthreads()
        copy_block(theirs, mine)  # k is me; a put begins with a barrier of the block
        put_signal_nbi_block(theirs, theirs, full[buffer, me, b:], epoch, SET, by)
    else:
        source = mine
        if k != me:
            source = theirs
            if by == me:
                if t == 0:
                    signal_op(outbox_empty[b:], 1, ADD, k)
                    signal_wait_until(full[buffer, k, b:], GE, epoch)
                cuda.syncthreads()
            else:
                wait_block(full[buffer, k, b:], 1, "sys", "acquire", epoch)
        if me != root:
            if epoch > 2:
                wait_block(empty[k, b:], 1, "sys", "acquire", epoch - 2)
            copy_block(span(symm_at(scratch, root)[buffer, k, b], 0, length), source)
            cuda.syncthreads()
            if t == 0:
                notify(full[buffer, k, b:], root, epoch, "set", "sys")
        elif k != me or not in_place:
            copy_block(span(out, k * size + begin, length), source)
    cuda.syncthreads()  # all threads have read the part, and the counter
    if t == 0:
        if me == root and by != me:
            notify(empty[k, b:], by, epoch, "set", "sys")
        epochs[y, b] = epoch


class Push2D(Method):
    """The method "push_2d" of ``Gather``.

    part        bytes that are worth a block
    max_parts   of a segment
    max_blocks  of the root's grid, unless there are more ranks: one per multiprocessor of A100
    """

    part, max_parts, max_blocks = 1 << 15, 32, 108

    def prepare(self, max_nbytes, root):
        world, n = self.world, self.world.n_ranks
        world.check_reach("gather push_2d", ranks=world.node_ranks)
        self.root, self.home = root, root - root % world.local_size
        most = min(self.max_parts, max(1, self.max_blocks // n))
        self.parts, capacity = parts_of(max_nbytes, n, most, self.part)
        self.scratch = self.empty((2, n, self.parts, capacity), "uint8", "gather.push_2d.scratch")
        self.full = self.zeros((2, n, self.parts), "uint64", "gather.push_2d.full")
        self.outbox_empty = self.zeros(self.parts, "uint64", "gather.push_2d.outbox_empty")
        self.empty_signals = self.zeros((n, self.parts), "uint64", "gather.push_2d.empty")
        self.epochs = world.xp.zeros((n, self.parts), "uint64")
        nothing = world.xp.empty(0, "uint8")
        self._bind(self.parts, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        parts, part = cut(x.size, self.parts, self.part)
        return self._bind(parts, x, out, in_place, part)

    def _bind(self, parts, x, out, in_place, part):
        world = self.world
        ranks = world.n_nodes if self.home in world.node_ranks else 1
        if world.rank == self.root:
            ranks = world.n_ranks
        args = x, out, in_place, self.root, part, self.home, world.local_size
        args += self.scratch, self.full, self.outbox_empty, self.empty_signals, self.epochs
        return self.launch(push_gather_2d, (parts, ranks), *args)


_bytes, _one, _two = types.Array(types.uint8, 1, "C"), *(types.Array(types.uint64, d, "C") for d in (1, 2))
GPU_KERNELS = {
    "push_gather_2d": (
        push_gather_2d,
        (
            *(_bytes, _bytes, types.boolean, *[types.int64] * 4),
            *(types.Array(types.uint8, 4, "C"), types.Array(types.uint64, 3, "C"), _one, _two, _two),
        ),
    )
}
