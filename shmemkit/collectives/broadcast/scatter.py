"""Broadcast by scatter and all-gather: the root sends each of the others a segment, and these pass their
segments on to one another as they arrive. For large messages: the root sends as much as the message,
however many ranks there are.

Segments  rank root + 1 + j, modulo the ranks, owns segment j of n_ranks - 1
Scratch   scratch[buffer, j, b], on every rank but the root: part b of segment j. The root writes it on the
          owner, the owner on others
Signals   full[2 * j + p, b], on every rank but the root: how many even chunks of part b of segment j are
          here, if p is 0, or odd ones: CHUNKS * epoch and so many. The writer of the scratch sets it
          empty[k, b], on the root: how many epochs with part b rank k has ended. Only rank k sets it

  block (b, p) on the root:
          1. wait until empty[k, b] is at least the epoch less 2, for all k       acquire, sys
             for each even chunk, or each odd one, for each segment j in turn:
          2. copy the chunk of part b from x to the output, and to the owner's scratch[buffer, j, b];
             syncthreads
          3. set full[2 * j + p, b]                                      release, sys: publishes the chunk
  block (b, 0) on the owner of j:
          4. set empty[me, b] on the root to the epoch less 1           release, sys: after that epoch's reads
             for each chunk:
          5. wait until full[2 * j + p, b] says it is here               acquire, sys
          6. copy it from there to scratch[buffer, j, b] of the owners of segments j - 1, j - 2, ..., one
             after the other; syncthreads; set full[j, b] there, as in 3
  block (b, 1) on the owner of j:
          7. for each chunk, for segments j, j + 1, ... modulo their number: wait until full says that it is
             here, and copy it to the output                                  acquire, sys

While the root sends to the owner of i, the owner of j sends to that of 2 j - i, modulo the segments. Where
their number is odd (4 ranks, or 8), each rank receives from one rank at a time, all the time.

No race: two buffers. The root writes an owner's part by the credit lemma (docs/protocols.md): the owner has
said, in the epoch between, that its previous launch has ended. The owner of j writes rank k's part by the
double-buffer lemma: in the epoch between it received k's own part b (block (b, 1), in a launch that has
ended). Empty parts are announced as well. No deadlock: the root waits for what the others signal at the
beginning of the previous epoch. An owner that passes its segment on waits for the root, and blocks that
copy to the output for both; all blocks are resident.

A multiprocessor has a block of each kind, which share its registers: 256 threads of 128. An announcement
costs a block the time in which its stores arrive; on the root the other block sends meanwhile.
"""

from numba import cuda

from shmemkit.device import copy_block, notify, num_ranks, rank, span, symm_at, wait, wait_block
from shmemkit.device.packets.transports import rank_after

from ..chunked_transfer import CHUNKS, ChunkedMethod, senders_of
from ..network import end_epoch


@cuda.jit(max_registers=128)  # so that two blocks of 256 threads fit on a multiprocessor
def scatter_broadcast(x, out, in_place, root, part, chunk, scratch, full, empty, epochs):
    """Store the root's `x` in `out`.

    x, out    uint8, 1-D, of the same size; x counts on the root only
    in_place  whether x is out
    part      elements of a part: gridDim.x of them are a segment, or more
    chunk     elements of a chunk, 2 * CHUNKS or fewer of which are a part
    scratch   uint8 (2, n_ranks - 1, parts at most, elements of a part at most), symmetric
    full      uint64 (2 * (n_ranks - 1), parts at most), symmetric, zeros at first
    empty     uint64 (n_ranks, parts at most), symmetric, zeros at first
    epochs    uint64 (2, parts at most), zeros at first
    grid      (parts, 2)
    """
    b, y, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    me, n, parts = rank(), num_ranks(), cuda.gridDim.x
    segments, size = max(1, n - 1), out.size
    epoch = epochs[y, b] + 1
    buffer, value = epoch & 1, CHUNKS * epoch
    mine = (me - root if me > root else me - root + n) - 1
    if me == root and epoch > 2:
        k = t
        while k < n:
            if k != me:
                wait(empty[k, b:], 1, "sys", "acquire", epoch - 2)
            k += cuda.blockDim.x
    elif me != root and y == 0 and t == 0:
        notify(empty[me, b:], root, epoch - 1, "set", "sys")
    cuda.syncthreads()  # all have read the counter
    at = number = 0
    while at < part:
        length, parity = min(chunk, part - at), number & 1
        value += 1 - parity
        s = 0
        while s < segments and (me != root or y == parity):
            j = to = s  # copy a chunk of segment j, to the owner of `to`
            if me != root:
                j = to = mine
                if y == 0:
                    to = mine - s if s <= mine else mine - s + segments
                else:
                    j = mine + s if mine + s < segments else mine + s - segments
                if y == 1 or s == 0:
                    wait_block(full[2 * j + parity, b:], 1, "sys", "acquire", value)
            begin = (j * parts + b) * part + at
            first = min(begin, size)
            count = min(begin + length, size) - first
            its = span(x, first, count) if me == root else span(scratch[buffer, j, b], at, count)
            peer = rank_after(root, 1 + to)
            if me == root and not in_place or me != root and y == 1:
                copy_block(span(out, first, count), its)
            if peer != me and (me == root or y == 0):
                copy_block(span(symm_at(scratch, peer)[buffer, j, b], at, count), its)
                cuda.syncthreads()
                if t == 0:
                    notify(full[2 * j + parity, b:], peer, value, "set", "sys")
            s += 1
        at += length
        number += 1
    end_epoch(epochs, (y, b), epoch)


class Scatter(ChunkedMethod):
    """The method "scatter" of ``Broadcast``."""

    name, threads = "broadcast scatter", 256

    def prepare(self, max_nbytes, root):
        world = self.world
        world.check_reach(self.name)
        self.root, self.segments = root, max(1, world.n_ranks - 1)
        blocks, rows = self.within(senders_of(world, self.senders), 2), self.segments
        self.make(max_nbytes, rows, blocks, rows, 2 * rows, world.n_ranks)
        nothing = world.xp.empty(0, "uint8")
        self._bind(nothing, nothing, False, self.segment)

    def bind(self, x, out, in_place):
        return self._bind(x.view("uint8"), out.view("uint8"), in_place, -(-x.nbytes // self.segments))

    def _bind(self, x, out, in_place, segment):
        args = x, out, in_place, self.root
        return self.launch_parts(scatter_broadcast, 2, segment, *args, chunks=(2 * CHUNKS, 128))


GPU_KERNELS = {"scatter_broadcast": scatter_broadcast}
