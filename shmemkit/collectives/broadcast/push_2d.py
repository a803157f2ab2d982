"""Two-dimensional push broadcast: over the ranks of the root's node to the other nodes, and inside each
node. For several nodes.

The root is on node i0. The message has a segment for each local index. The root gives segment l to (i0, l),
which puts it to the ranks (j, l) of the other nodes. Each rank passes its segment on to the ranks of its
node, by stores. So the message crosses the network once for each other node, over the links of all ranks of
the root's node alike. ``schedules.two_level`` has the words.

Scratch   scratch[buffer, l, b], on every rank but the root: part b of segment l. A rank's own segment is
          written by the root on its node, by (i0, l) through the network on the others. The other segments
          are written by the ranks of the same node that own them
Outbox    outbox[buffer, b], on the ranks of the root's node: part b of the own segment, which the network
          reads
Signals   full[buffer, l, b], on every rank: the last epoch whose part b of segment l is here. The writer
          sets it. On the root, which has the segment, it says that (i0, l) has received it; only (i0, l)
          sets it
          empty[k, b], on (i0, l): how many epochs rank k = (j, l) of another node has begun. Only k adds

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
                         10. copy part b of the own segment to the outbox, put it to all of these
     all:                11. copy part b of segment l' to the output; add 1 to the epoch

No race: the double-buffer lemma, the credit lemma and the put lemma (docs/protocols.md), for part b. A writer
has heard from the reader in the epoch between, whose launch begins after the reader's reads of the buffer
have ended. The ranks of a node hear it by the segments that they exchange, the root by 2, (i0, l) by 9 from
other nodes. Additions to empty may arrive in any order. Nobody waits for the last one: NVSHMEM completes it
before it frees memory.

No deadlock: 2 and 9 wait at most for the previous epoch of the others, 5 for the root, or for 9 and 10 of
(i0, l), 8 for 6, which waits for 5 only.
"""

from numba import cuda

from shmemkit.device import (
    SignalOp,
    copy_block,
    notify,
    num_ranks,
    rank,
    signal_op,
    span,
    symm_at,
    wait_block,
)

from ..network import end_epoch, place, put, wait_for
from ..schedules.two_level import TwoLevel

ADD = SignalOp.SIGNAL_ADD


@cuda.jit
def push_broadcast_2d(x, out, in_place, part, root, home, local_size, scratch, outbox, full, empty, epochs):
    """Store the root's `x` in `out`.

    x, out      uint8, 1-D, of the same size; x counts on the root only
    in_place    whether x is out
    part        elements of a part: gridDim.x of them are a segment, or more
    home        the first rank of the root's node
    local_size  ranks of a node: as many segments
    scratch     uint8 (2, local_size, parts at most, elements of a part at most), symmetric
    outbox      uint8 (2, parts at most, elements of a part at most), symmetric
    full        uint64 (2, local_size, parts at most), symmetric, zeros at first
    empty       uint64 (n_ranks, parts at most), symmetric, zeros at first
    epochs      uint64 (local_size, parts at most), zeros at first
    grid        (parts, local_size), the same on all ranks
    """
    b, y, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    me, n, size = rank(), num_ranks(), x.size
    first, peer, _ = place(local_size, y, 0)
    local, to, pitch = me - first, peer - first, cuda.gridDim.x * part  # l and l'
    begin, its = min(local * pitch + b * part, size), min(to * pitch + b * part, size)
    length, its_length = min(part, size - begin), min(part, size - its)
    epoch = epochs[y, b] + 1
    buffer = epoch & 1
    if y == 0 and first != home and t == 0:
        signal_op(span(empty[me], b, 1), 1, ADD, home + local)

    mine, theirs = span(scratch[buffer, local, b], 0, length), span(scratch[buffer, to, b], 0, its_length)
    if me == root:
        mine, theirs = span(x, begin, length), span(x, its, its_length)
        if y > 0:
            wait_block(span(full[1 - buffer, to], b, 1), 1, "sys", "acquire", epoch - 1)
            copy_block(span(symm_at(scratch, peer)[buffer, to, b], 0, its_length), theirs)
            cuda.syncthreads()
            if t == 0:
                notify(span(full[buffer, to], b, 1), peer, epoch, "set", "sys")
    elif first == home:
        wait_block(span(full[buffer, local], b, 1), 1, "sys", "acquire", epoch)
    else:
        wait_for(span(full[buffer, local], b, 1), epoch)
    if y > 0:
        if peer != root:
            copy_block(span(symm_at(scratch, peer)[buffer, local, b], 0, length), mine)
            cuda.syncthreads()
        if t == 0:
            notify(span(full[buffer, local], b, 1), peer, epoch, "set", "sys")
        if me != root:
            wait_block(span(full[buffer, to], b, 1), 1, "sys", "acquire", epoch)
    elif first == home and n > local_size:
        k = local
        while k < n:
            if k != me:
                wait_for(span(empty[k], b, 1), epoch - 1)
            k += local_size
        source, k = span(outbox[buffer, b], 0, length), local
        copy_block(source, mine)
        while k < n:
            if k != me:
                target = span(scratch[buffer, local, b], 0, length)
                put(target, source, span(full[buffer, local], b, 1), epoch, k)
            k += local_size
    if me != root or not in_place:
        copy_block(span(out, its, its_length), theirs)
    end_epoch(epochs, (y, b), epoch)


class Push2D(TwoLevel):
    """The method "push_2d" of ``Broadcast``."""

    name = "broadcast push_2d"

    def prepare(self, max_nbytes, root):
        world, local_size, name = self.world, self.local_size, self.array_name
        parts, capacity = self.cut_in_parts(max_nbytes, local_size)
        self.use(
            push_broadcast_2d,
            (local_size,),
            *(root, root - root % local_size, local_size),
            self.empty((2, local_size, parts, capacity), "uint8", name("scratch")),
            self.empty((2, parts, capacity), "uint8", name("outbox")),
            self.zeros((2, local_size, parts), "uint64", name("full")),
            self.zeros((world.n_ranks, parts), "uint64", name("empty")),
            world.xp.zeros((local_size, parts), "uint64"),
        )

    def bind(self, x, out, in_place):
        return self.bind_parts(-(-x.nbytes // self.local_size), x, out, in_place)


GPU_KERNELS = {"push_broadcast_2d": push_broadcast_2d}
