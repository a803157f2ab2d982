"""Two-dimensional push all-to-all: first inside the node, then across nodes. For several nodes.

Rank (i, l) gives what it has for rank (j, m) to (i, m), by stores. (i, m) puts what all ranks of its node
have for (j, m), in one message. So two nodes exchange one message for each local index and part, not one for
each pair of ranks. ``schedules.two_level`` has the words.

Segments  segment k of x goes to rank k; segment k of out comes from rank k. Part b of the segments from the
          ranks of one node for one rank is contiguous, segment after segment
Outgoing  outgoing[buffer, z - 1, b], on rank (i, l): part b of what the ranks of node i have for (j, l),
          with j = i + z modulo the nodes. Each of them writes its segment. The network reads it
Incoming  incoming[buffer, z, b], on rank (i, l): part b of what the ranks of node j have for this rank. (j,
          l) writes it, through the network; for z = 0, each rank of the own node
Signals   full_near[z, k, b], on rank (i, l): the last epoch whose part b of (i, k) for (j, l) is here. Only
          (i, k) sets it
          full_far[buffer, z, b]: the last epoch whose incoming[buffer, z, b] is here. Only (j, l) sets it

  block (b, y, z) of rank (i, l), with l' = l + y modulo the ranks of a node and j = i + z modulo the nodes:
     y = 0, z = 0:  copy part b of the own segment to the output
     otherwise:     1. copy part b of the segment for (j, l') to the outgoing parts of (i, l'), or, for z =
                       0, the incoming ones; syncthreads
     y > 0:         2. set full_near[z, l, b] there                       release, sys: publishes the part
     y = 0, z > 0:  3. wait for full_near[z, k, b] of all k but l         acquire, sys
                    4. put outgoing[buffer, z - 1, b] to the incoming parts of (j, l)
     y > 0, z = 0:  5. wait for full_near[0, l', b]                       acquire, sys
     z > 0:         5. wait for full_far[buffer, z, b]
     all:           6. copy part b of what comes from (j, l') to the output; add 1 to the epoch

No race: the double-buffer lemma and the put lemma (docs/protocols.md), for part b. A buffer is written again
two epochs later, when the epoch between has ended on its writer. In that epoch the writer has received

  - something directly from the rank (i, m) that has the buffer, since the writer is of its node or has its
    local index. (i, m) sent it after its previous launch had ended, with all reads of its blocks, and these
    had waited for everything that they read, whoever wrote it
  - for outgoing parts, which the network may read later: the put of (j, l) to (i, l). It takes what (j, m)
    stores there, in a launch that begins after (j, m)'s previous launch has ended. That launch could not
    end before (i, m)'s put had arrived. So the part has been read

No deadlock: all blocks store before they wait, puts wait for stores only, receivers for stores or a put.
"""

from numba import cuda

from shmemkit.device import copy_block, notify, rank, span, symm_at, wait, wait_block

from ..chunked_transfer import part_of_block
from ..network import end_epoch, place, put, wait_for
from ..schedules.two_level import TwoLevel


@cuda.jit
def push_all_to_all_2d(x, out, segment, part, local_size, outgoing, incoming, full_near, full_far, epochs):
    """Exchange the segments of `x`, to `out`.

    x, out      uint8, 1-D, of n_ranks segments; they do not overlap
    segment     elements of a segment
    part        elements of a part, a multiple of 16: gridDim.x of them are a segment, or more
    local_size  ranks of a node
    outgoing    uint8 (2, nodes - 1, parts at most, local_size * elements of a part at most), symmetric
    incoming    uint8 (2, nodes, as outgoing), symmetric
    full_near   uint64 (nodes, local_size, parts at most), symmetric, zeros at first
    full_far    uint64 (2, nodes, parts at most), symmetric, zeros at first
    epochs      uint64 (nodes, local_size, parts at most), zeros at first
    grid        (parts, local_size, nodes), the same on all ranks; any number of threads
    """
    b, y, z, nodes = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z, cuda.gridDim.z
    first, peer, there = place(local_size, y, z)
    mine, local = rank() - first, peer - first  # l and l'
    begin, length = part_of_block(part, segment)
    pitch = length + 15 & -16  # from one segment to the next
    epoch = epochs[z, y, b] + 1
    buffer = epoch & 1
    at = (there + local) * segment + begin
    source = span(x, at, length)

    if y > 0 or z > 0:
        room = incoming[buffer, 0, b]
        if z > 0:
            room = outgoing[buffer, z - 1, b]
        copy_block(span(symm_at(room, peer), mine * pitch, length), source)
        if y > 0:
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                notify(span(full_near[z, mine], b, 1), peer, epoch, "set", "sys")
        else:
            k = cuda.threadIdx.x
            while k < local_size:
                if k != mine:
                    wait(span(full_near[z, k], b, 1), 1, "sys", "acquire", epoch)
                k += cuda.blockDim.x
            size = (local_size - 1) * pitch + length
            target = span(incoming[buffer, nodes - z, b], 0, size)
            put(target, span(room, 0, size), span(full_far[buffer, nodes - z], b, 1), epoch, there + mine)
        if z > 0:
            wait_for(span(full_far[buffer, z], b, 1), epoch)
        else:
            wait_block(span(full_near[0, local], b, 1), 1, "sys", "acquire", epoch)
        source = span(incoming[buffer, z, b], local * pitch, length)
    copy_block(span(out, at, length), source)
    end_epoch(epochs, (z, y, b), epoch)


class Push2D(TwoLevel):
    """The method "push_2d" of ``AllToAll``."""

    name, given = "all_to_all push_2d", 0

    def prepare(self, max_nbytes):
        nodes, local_size, name = self.nodes, self.local_size, self.array_name
        parts, capacity = self.cut_in_parts(max_nbytes, self.world.n_ranks)
        room = local_size * capacity
        self.use(
            push_all_to_all_2d,
            (local_size, nodes),
            local_size,
            self.empty((2, max(1, nodes - 1), parts, room), "uint8", name("outgoing")),
            self.empty((2, nodes, parts, room), "uint8", name("incoming")),
            self.zeros((nodes, local_size, parts), "uint64", name("full_near")),
            self.zeros((2, nodes, parts), "uint64", name("full_far")),
            self.world.xp.zeros((nodes, local_size, parts), "uint64"),
        )

    def bind(self, x, out, in_place):
        segment = x.nbytes // self.world.n_ranks
        return self.bind_parts(segment, x, out, segment)


GPU_KERNELS = {"push_all_to_all_2d": push_all_to_all_2d}
