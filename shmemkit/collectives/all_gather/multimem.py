"""All-gather by multicast, inside a node: a rank stores its segment once, and the NVSwitch delivers it to
all ranks.

Parts     a segment, what one rank gives, is cut into as many parts as there are blocks per rank
Scratch   scratch[buffer, k, b], on every rank: part b of rank k's segment. Only rank k writes it, through
          the multicast view of all ranks' scratch; also on rank k, which does not read it
Signals   full[k, b], on every rank: the last epoch whose part b of rank k is here. Only rank k sets it, on
          all ranks at once, through its multicast view
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer. Device-resident, so graph-safe

  block (b, 0):
          1. copy part b of x to scratch[buffer, me, b] on all ranks, syncthreads
          2. set full[me, b] on all ranks to the epoch               release, sys: publishes the part
          3. copy part b of x to the output
  block (b, y), with peer = me + y modulo the ranks:
          1. wait until full[peer, b] here is at least the epoch     acquire, sys: sees the peer's part
          2. a fence between the part's two addresses, the multicast one and the rank's own
          3. copy it from scratch[buffer, peer, b] to the output
  at its end, each adds 1 to its epoch

No race: the double-buffer lemma (docs/protocols.md), for part b. (The ends of the two launches stand for
the fence here.) Calls of a rank do not overtake each other: they are launches on one stream. No deadlock: a
block that sends waits for nobody, and all blocks are resident.
"""

from numba import cuda

from shmemkit.device import (
    copy_block,
    multimem_copy_block,
    multimem_fence,
    multimem_store,
    rank,
    wait_block,
)
from shmemkit.device.packets.transports import rank_after
from shmemkit.operations.method import InParts

MINIMUM_CC = (9, 0)


@cuda.jit
def multimem_all_gather(x, out, in_place, part, to_all, scratch, signal_all, full, epochs):
    """Gather the `x` of all ranks in `out`, by rank; all ranks are of one node.

    x, out      uint8, 1-D: x.size bytes, and n_ranks times as many
    in_place    whether x is the own part of out
    part        elements of a part, a multiple of 16: gridDim.x of them are x
    scratch     uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric; the last is a
                multiple of 16
    to_all      its multicast view
    full     uint64 (n_ranks, parts at most), symmetric, zeros at first
    signal_all  its multicast view
    epochs       uint64 (n_ranks, parts at most), zeros at first
    grid        (parts, n_ranks), any number of threads
    """
    me, b, y = rank(), cuda.blockIdx.x, cuda.blockIdx.y
    peer = rank_after(me, y)
    begin, end = min(b * part, x.size), min((b + 1) * part, x.size)
    mine = out[peer * x.size + begin : peer * x.size + end]
    epoch = epochs[y, b] + 1
    buffer = epoch & 1
    if y == 0:
        multimem_copy_block(to_all[buffer, me, b], x[begin:end])
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            multimem_store(signal_all[me], b, epoch, "release")
        if not in_place:
            copy_block(mine, x[begin:end])
    else:
        wait_block(full[peer, b:], 1, "sys", "acquire", epoch)
        multimem_fence()
        copy_block(mine, scratch[buffer, peer, b, : end - begin])
    cuda.syncthreads()  # all threads have read the counter
    if cuda.threadIdx.x == 0:
        epochs[y, b] = epoch


class Multimem(InParts):
    """The method "multimem" of ``AllGather``."""

    name, unit = "all_gather multimem", 16
    max_blocks = 1 << 30  # max_parts alone counts

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        if world.n_nodes > 1:
            raise ValueError(
                f"AllGather: method 'multimem' is for one node, where multicast ends; there are "
                f"{world.n_nodes}. Use 'll_2d_multimem', or a method without multicast"
            )
        parts, capacity = self.cut_in_parts(max_nbytes, n)
        scratch = self.empty((2, n, parts, capacity), "uint8", self.array_name("scratch"))
        full = self.zeros((n, parts), "uint64", self.array_name("full"))
        to_all, signal_all = map(world.multicast_view, (scratch, full))
        epochs = world.xp.zeros((n, parts), "uint64")
        self.use(multimem_all_gather, (n,), to_all, scratch, signal_all, full, epochs)


GPU_KERNELS = {"multimem_all_gather": multimem_all_gather}
