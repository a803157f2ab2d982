"""Gather and scatter by chunked stores (``collectives.chunked_transfer``): all others send the root what they
have, or the root sends each of them its segment.

`d` is a rank's distance from the root: it is rank root + d modulo the ranks. `row` is d - 1 on the side that
has all others, and 0 on the side that has the root alone.

Scratch   gather: scratch[buffer, d - 1, b], on the root. scatter: scratch[buffer, 0, b], on all others. It
          has part b of the segment of the rank at distance d
Signals   full[row, b], beside the scratch: the row is the same
          empty[row, b], on the sender, row d - 1 of the root, 0 of others: the last epoch whose part b has
          been read. Only the reader sets it

  block (b, 0) of the rank at distance d, and block (b, d) of the root, one of which is the sender:
     sender:    1. wait until empty is at least the epoch less 2         acquire, sys: the buffer is empty
                2. put part b to the receiver, in chunks, with its full signals                  release, sys
     receiver:  3. receive part b                                                                acquire, sys
                4. syncthreads; set empty on the sender to the epoch     release, sys: after the reads
  block (b, 0) of the root: copy part b of the root's own segment
  In a grid of fewer rows block (b, y) of the root is block (b, y + gridDim.y), too, and so on.

No race: the credit lemma (docs/protocols.md), with two buffers. No deadlock: a sender waits for what the
receiver did two epochs before. The receiver waits for the sender, which waits for nothing of this epoch. All
blocks are co-resident.

Few blocks of a gather send: those of all ranks share the root's links, and the root has one for each.
"""

import functools

from numba import cuda

from shmemkit.device import copy_block, notify, num_ranks, rank, span, wait_block
from shmemkit.device.packets.transports import rank_after

from ..chunked_transfer import (
    CHUNKS,
    ChunkedMethod,
    part_of_block,
    put,
    receive,
    senders_of,
)


@functools.cache
def rooted_kernel(to_root):
    """-> the kernel of gather if `to_root`, else of scatter."""

    @cuda.jit
    def push_rooted(x, out, in_place, root, segment, part, chunk, scratch, full, empty, epochs):
        """Gather the `x` of all ranks in the root's `out`, by rank; or store the rank's segment of the root's
        `x` in `out`.

        x, out    uint8, 1-D: of `segment` elements, but on the root n_ranks times as many of what is gathered
                  or scattered. What all others receive, or give, counts there only
        in_place  whether the root's one is its segment of the other
        segment   elements of a segment
        part      elements of a part: gridDim.x of them are a segment
        chunk     elements of a chunk, CHUNKS or fewer of which are a part
        scratch   uint8 (2, n_ranks - 1 or 1, parts at most, elements of a part at most), symmetric
        full      uint64 (n_ranks - 1 or 1, parts at most), symmetric, zeros at first
        empty     uint64 (1 or n_ranks - 1, parts at most), symmetric, zeros at first
        epochs    uint64 (n_ranks or 1, parts at most), zeros at first
        grid      (parts, any number up to n_ranks on the root, else 1)
        """
        me, b, y = rank(), cuda.blockIdx.x, cuda.blockIdx.y
        at_root, begin, size = me == root, *part_of_block(part, segment)
        while y < (num_ranks() if at_root else 1):
            d = y
            if me != root:
                d = me - root if me > root else me - root + num_ranks()
            peer = rank_after(root, d) if at_root else root
            row, credit = (d - 1, 0) if to_root else (0, d - 1)
            whole = begin + (peer * segment if at_root else 0)  # where it begins in the array of all ranks
            epoch = epochs[y, b] + 1
            buffer, value = epoch & 1, CHUNKS * epoch
            if d == 0:
                if not in_place:
                    to, at = (whole, begin) if to_root else (begin, whole)
                    copy_block(span(out, to, size), span(x, at, size))
            elif at_root != to_root:
                if epoch > 2:
                    wait_block(empty[credit, b:], 1, "sys", "acquire", epoch - 2)
                its = span(x, begin if to_root else whole, size)
                put(scratch[buffer, row, b], its, full[row, b:], value, chunk, peer)
            else:
                theirs = span(out, whole if to_root else begin, size)
                receive(theirs, scratch[buffer, row, b], full[row, b:], value, chunk)
            cuda.syncthreads()  # all threads have read the counter, and the scratch
            if cuda.threadIdx.x == 0:
                if d > 0 and at_root == to_root:
                    notify(empty[credit, b:], peer, epoch, "set", "sys")
                epochs[y, b] = epoch
            y += cuda.gridDim.y

    return push_rooted


class PushRooted(ChunkedMethod):
    """A method of this schedule: gather if `to_root`, else scatter.

    senders  blocks that send to the root, at most, or one of each rank; or blocks of the root
    """

    to_root = False
    threads = 256  # which may have any number of registers

    def prepare(self, max_nbytes, root):
        world, n = self.world, self.world.n_ranks
        world.check_reach(self.name)
        self.root, rows_of_root = root, min(n, self.sms or n)
        self.grid_rows = rows_of_root if world.rank == root else 1
        others = max(1, n - 1)
        rows, credits = (others, 1) if self.to_root else (1, others)
        blocks = max(1, senders_of(world, self.senders) // (others if self.to_root else n))
        blocks = self.within(blocks, rows_of_root)
        self.make(max_nbytes, n, blocks, rows, rows, credits, n if world.rank == root else 1)
        nothing = world.xp.empty(0, "uint8")
        self._bind(nothing, nothing, False, self.segment)

    def bind(self, x, out, in_place):
        segment = (x if self.to_root else out).nbytes
        return self._bind(x.view("uint8"), out.view("uint8"), in_place, segment)

    def _bind(self, x, out, in_place, segment):
        kernel, args = rooted_kernel(self.to_root), (x, out, in_place, self.root, segment)
        return self.launch_parts(kernel, self.grid_rows, segment, *args)


GPU_KERNELS = {"gather": rooted_kernel(True), "scatter": rooted_kernel(False)}
