"""Two-dimensional push gather: to the ranks of the root's node, and inside it to the root. For several
nodes.

The root is on node i0. Rank (j, l) of another node puts what it gives to (i0, l), which passes it on to the
root, by stores, unless it is the root. So the data from the network use the links of all ranks of the root's
node alike. ``schedules.two_level`` has the words. With many ranks there are few parts: the root has a block
for each part of each rank.

Scratch   scratch[buffer, k, b], on the ranks of the root's node: part b of rank k. On (i0, l), k = (j, l)
          writes it, through the network. On the root, the ranks of its node do, too, for themselves and for
          those that send to them. On other nodes: the own part, which the network reads
Signals   full[buffer, k, b], on the ranks of the root's node: the last epoch whose part b of rank k is
          here. The writer sets it
          empty[k, b], on (i0, l): the last epoch whose part b of rank k the root has read. Only the root
          sets it; k is (i0, l), or sends to it
          outbox_empty[b], on (j, l) of other nodes: how many epochs (i0, l) has begun. Only (i0, l) adds to
          it

  block (b, 0) of (j, l) of another node:
          1. wait until (i0, l) has begun the previous epoch
          2. copy part b of x to the scratch here, put it to (i0, l)
  block (b, y) of (i0, l), for rank k: on the root any; on the others itself, and those that send to it
     k sends to it:
          3. add 1 to outbox_empty[b] on k; wait for part b of it
     the root, k is of its node, or sends to another of it:
          4. wait for part b of k                                       acquire, sys
     not the root:
          5. wait until the root has read the part of two epochs before acquire, sys
          6. copy part b, of x or of k, to the root's scratch, syncthreads
          7. set its full signal there                                  release, sys: publishes the part
     the root:
          8. copy part b to the output, syncthreads
          9. set empty[k, b] on the rank that stored it, if one did     release, sys: after the reads
     all: 10. add 1 to the epoch

No race: the credit lemma and the put lemma (docs/protocols.md), with two buffers. Stores to the root follow
5. Puts follow 1: the epoch between begins on (i0, l) after the launch that read the buffer has ended.
Additions to outbox_empty may arrive in any order. Nobody waits for the last one: NVSHMEM completes it before
it frees memory.

No deadlock: 1 and 5 wait for previous epochs only, 3 for 2, 4 for 7, which waits for 3.
"""

from numba import cuda

from shmemkit.device import (
    SignalOp,
    copy_block,
    notify,
    rank,
    signal_op,
    span,
    symm_at,
    wait_block,
)
from shmemkit.device.packets.transports import rank_after
from shmemkit.device.swizzle import quotient

from ..chunked_transfer import part_of_block
from ..network import put, wait_for
from ..schedules.two_level import TwoLevel

ADD = SignalOp.SIGNAL_ADD


@cuda.jit
def push_gather_2d(
    x, out, in_place, part, root, home, local_size, scratch, full, outbox_empty, empty, epochs
):
    """Gather the `x` of all ranks in the root's `out`, by rank.

    x, out        uint8, 1-D: out has n_ranks times as many elements, and counts on the root only
    in_place      whether x is the root's part of out
    part          elements of a part: gridDim.x of them are x, or more
    home          the first rank of the root's node
    local_size    ranks of a node
    scratch       uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
    full          uint64 (2, n_ranks, parts at most), symmetric, zeros at first
    outbox_empty  uint64 (parts at most,), symmetric, zeros at first
    empty         uint64 (n_ranks, parts at most), symmetric, zeros at first
    epochs        uint64 (n_ranks, parts at most), zeros at first
    grid          (parts, n_ranks) on the root, (parts, nodes) on the others of its node, else (parts, 1)
    """
    b, y, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    me, size = rank(), x.size
    k = rank_after(me, y * (1 if me == root else local_size))
    by = home + k - quotient(k, local_size) * local_size  # who brings it to the root: (i0, l)
    begin, length = part_of_block(part, size)
    epoch = epochs[y, b] + 1
    buffer = epoch & 1
    theirs, mine = span(scratch[buffer, k, b], 0, length), span(x, begin, length)
    if me < home or me >= home + local_size:
        wait_for(outbox_empty[b:], epoch - 1)
        copy_block(theirs, mine)  # k is this rank
        put(theirs, theirs, full[buffer, me, b:], epoch, by)
    else:
        source = mine
        if k != me:
            source = theirs
            if by == me:
                if t == 0:
                    signal_op(outbox_empty[b:], 1, ADD, k)
                wait_for(full[buffer, k, b:], epoch)
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


class Push2D(TwoLevel):
    """The method "push_2d" of ``Gather``."""

    name = "gather push_2d"

    def prepare(self, max_nbytes, root):
        me, n, local_size, name = self.world.rank, self.world.n_ranks, self.local_size, self.array_name
        parts, capacity = self.cut_in_parts(max_nbytes, n)
        home = root - root % local_size
        ranks = n if me == root else self.nodes if home <= me < home + local_size else 1
        self.epochs = self.world.xp.zeros((n, parts), "uint64")
        self.use(
            push_gather_2d,
            (ranks,),
            *(root, home, local_size),
            self.empty((2, n, parts, capacity), "uint8", name("scratch")),
            self.zeros((2, n, parts), "uint64", name("full")),
            self.zeros(parts, "uint64", name("outbox_empty")),
            self.zeros((n, parts), "uint64", name("empty")),
            self.epochs,
        )


GPU_KERNELS = {"push_gather_2d": push_gather_2d}
