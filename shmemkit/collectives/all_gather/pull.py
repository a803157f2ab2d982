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

from numba import cuda

from shmemkit.device import copy_block, notify, num_ranks, rank, symm_at, wait_block
from shmemkit.device.packets.transports import rank_after
from shmemkit.operations.method import InParts


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


class Pull(InParts):
    """The method "pull" of ``AllGather``."""

    name = "all_gather pull"
    part, max_parts, max_blocks = 1 << 14, 104, 104

    @staticmethod
    def kernel_of(n_ranks, op, dtype, **_):
        return pull_all_gather

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        world.check_reach(self.name)
        parts, capacity = self.cut_in_parts(max_nbytes, n)
        self.use(
            self.kernel_of(n, None, None),
            (n,),
            self.empty((2, parts, capacity), "uint8", self.array_name("staged")),
            self.zeros((n, parts), "uint64", self.array_name("full")),
            world.xp.zeros((n, parts), "uint64"),
        )


GPU_KERNELS = {"pull_all_gather": pull_all_gather}
