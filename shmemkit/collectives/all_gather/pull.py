"""All-gather by pull: each rank stages its segment, signals that it is full, and reads those of its peers.

Parts     a segment, what one rank gives, is cut into as many parts as there are blocks per peer
Staged    staged[buffer, b], on every rank: part b of its own segment, where the peers read it
Signals   full[k, b], on every rank: the last epoch whose part b rank k has staged. Only rank k sets it
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer. Device-resident, so graph-safe

  block (b, 0):   1. copy part b of x to staged[buffer, b], syncthreads
                  2. set full[me, b] on all others to the epoch                  release, sys
                  3. copy part b of x to the output
  block (b, y), with peer = me + y modulo the ranks:
                  1. wait until full[peer, b] here is at least the epoch         acquire, sys
                  2. copy staged[buffer, b] of the peer to the output

No race: the double-buffer lemma (docs/protocols.md) with the roles swapped. A rank rewrites its own staged
part two epochs later. In the epoch between, each peer has signalled its own part, in a launch after the one
that read the buffer.

No deadlock: senders wait for nobody, and all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import copy_block, notify, num_ranks, rank, symm_at, wait_block

from ..method import Method, cut, parts_of
from ..transports import rank_after


@cuda.jit
def pull_all_gather(x, out, in_place, part, staged, full, epochs):
    """Gather the `x` of all ranks in `out`, by rank.

    x, out    uint8, 1-D: x.size bytes, and n_ranks times as many
    in_place  whether x is the own part of out
    part      elements of a part: gridDim.x of them are x
    staged    uint8 (2, parts at most, elements of a part at most), symmetric
    full     uint64 (n_ranks, parts at most), symmetric, zeros at first
    epochs     uint64 (n_ranks, parts at most), zeros at first
    grid      (parts, n_ranks)
    """
    me, n, b, y, thread = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    begin, end = min(b * part, x.size), min((b + 1) * part, x.size)
    epoch = epochs[y, b] + 1
    peer = rank_after(me, y)
    mine, here = out[peer * x.size + begin : peer * x.size + end], staged[epoch & 1, b, : end - begin]
    if y == 0:
        copy_block(here, x[begin:end])
        cuda.syncthreads()
        other = thread
        while other < n:
            if other != me:
                notify(full[me, b:], other, epoch, "set", "sys")
            other += cuda.blockDim.x
        if not in_place:
            copy_block(mine, x[begin:end])
    else:
        wait_block(full[peer, b:], 1, "sys", "acquire", epoch)
        copy_block(mine, symm_at(here, peer))
    cuda.syncthreads()  # all threads have read the counter
    if thread == 0:
        epochs[y, b] = epoch


class Pull(Method):
    """The method "pull" of ``AllGather``.

    part        bytes that are worth a block
    max_blocks  of a grid, unless there are more ranks: one per multiprocessor of A100
    """

    part, max_blocks = 1 << 14, 104

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        world.check_reach("all_gather pull")
        self.blocks, capacity = parts_of(max_nbytes, n, max(1, self.max_blocks // n), self.part)
        self.staged = self.empty((2, self.blocks, capacity), "uint8", "all_gather.pull.staged")
        self.full = self.zeros((n, self.blocks), "uint64", "all_gather.pull.full")
        self.epochs = world.xp.zeros((n, self.blocks), "uint64")
        nothing = world.xp.empty(0, "uint8")
        self._bind(self.blocks, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        blocks, part = cut(x.size, self.blocks, self.part)
        return self._bind(blocks, x, out, in_place, part)

    def _bind(self, blocks, *args):
        args += self.staged, self.full, self.epochs
        return self.launch(pull_all_gather, (blocks, self.world.n_ranks), *args)


_bytes, _words = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 2, "C")
_staged = types.Array(types.uint8, 3, "C")
_signature = _bytes, _bytes, types.boolean, types.int64, _staged, _words, _words
GPU_KERNELS = {"pull_all_gather": (pull_all_gather, _signature)}
