"""Two-dimensional push all-gather: once across nodes, then inside the node. For several nodes.

Rank (i, l) puts its segment to the ranks (j, l), one on each other node. Each of those passes it on to the
ranks of its node, by stores. So a segment goes to each node once. ``schedules.two_level`` has the words.

Scratch   scratch[buffer, k, b], on every rank: part b of rank k's segment. Rank k writes it if it is on
          this node or has the same local index l; otherwise the rank of this node with rank k's local index
          does. The network reads the rank's own
Signals   full[buffer, k, b], on every rank: the last epoch whose part b of rank k is there. The writer sets
          it

  block (b, y, z) of rank (i, l), with l' = l + y modulo the ranks of a node and j = i + z modulo the nodes:
     z > 0:          1. wait for part b of (j, l)
     y > 0:          2. copy it (z = 0: part b of x) to the scratch of (i, l'), syncthreads
                     3. set its full signal there                              release, sys
                     4. wait for part b of (j, l')                             acquire, sys
     y = 0, z = 0:   2. copy part b of x to the own scratch
                     3. put it to (j, l) for all j but i
     all:            5. copy part b of (j, l') to the output; add 1 to the epoch

No race: the double-buffer lemma and the put lemma (docs/protocols.md), for part b. Who writes it, by a put or
by stores, has received the reader's own part b of the epoch between directly: (i, l) and (j, l) send to each
other, as all ranks of a node do. The reader's launch before had ended, with all reads of the buffer, also by
blocks that pass it on.

No deadlock: blocks (b, y, 0) send before they wait, blocks that pass on wait for a put only, receivers wait
for those.
"""

from numba import cuda

from shmemkit.device import copy_block, notify, rank, span, symm_at, wait_block
from shmemkit.device.packets.transports import rank_after

from ..chunked_transfer import part_of_block
from ..network import end_epoch, place, put, wait_for
from ..schedules.two_level import TwoLevel


@cuda.jit
def push_all_gather_2d(x, out, in_place, part, local_size, scratch, full, epochs):
    """Gather the `x` of all ranks in `out`, by rank.

    x, out      uint8, 1-D: x.size bytes, and n_ranks times as many
    in_place    whether x is the own part of out
    part        elements of a part: gridDim.x of them are x, or more
    local_size  ranks of a node
    scratch     uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
    full        uint64 (2, n_ranks, parts at most), symmetric, zeros at first
    epochs      uint64 (nodes, local_size, parts at most), zeros at first
    grid        (parts, local_size, nodes), the same on all ranks; any number of threads
    """
    b, y, z = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    me, size = rank(), x.size
    first, peer, there = place(local_size, y, z)
    passed, segment = there + me - first, there + peer - first
    begin, length = part_of_block(part, size)
    epoch = epochs[z, y, b] + 1
    buffer = epoch & 1

    source = span(x, begin, length)
    if z > 0:
        wait_for(full[buffer, passed, b:], epoch)
        source = span(scratch[buffer, passed, b], 0, length)
    if y > 0 or (z == 0 and cuda.gridDim.z > 1):
        copy_block(span(symm_at(scratch, peer)[buffer, passed, b], 0, length), source)
    if y > 0:
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            notify(full[buffer, passed, b:], peer, epoch, "set", "sys")
        wait_block(full[buffer, segment, b:], 1, "sys", "acquire", epoch)
        source = span(scratch[buffer, segment, b], 0, length)
    elif z == 0:
        mine, to = span(scratch[buffer, me, b], 0, length), me
        for _ in range(1, cuda.gridDim.z):
            to = rank_after(to, local_size)
            put(mine, mine, full[buffer, me, b:], epoch, to)
    if y > 0 or z > 0 or not in_place:
        copy_block(span(out, segment * size + begin, length), source)
    end_epoch(epochs, (z, y, b), epoch)


class Push2D(TwoLevel):
    """The method "push_2d" of ``AllGather``."""

    name = "all_gather push_2d"

    def prepare(self, max_nbytes):
        n, nodes, local_size = self.world.n_ranks, self.nodes, self.local_size
        parts, capacity = self.cut_in_parts(max_nbytes, n)
        self.use(
            push_all_gather_2d,
            (local_size, nodes),
            local_size,
            self.empty((2, n, parts, capacity), "uint8", self.array_name("scratch")),
            self.zeros((2, n, parts), "uint64", self.array_name("full")),
            self.world.xp.zeros((nodes, local_size, parts), "uint64"),
        )


GPU_KERNELS = {"push_all_gather_2d": push_all_gather_2d}
