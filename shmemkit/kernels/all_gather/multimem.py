"""All-gather by multicast, inside a node: a segment is stored once, and the NVSwitch takes it to all ranks.

Parts     a segment, what one rank gives, is cut into as many parts as there are blocks per rank
Scratch   scratch[half, k], on every rank: what rank k gives. Written by rank k only, through the multicast
          view of all ranks' scratch; on rank k too, which does not read it
Signals   arrived[k, b], on every rank: the number of the last call whose part b of rank k is here (only
          rank k sets it, on all ranks at once, through its multicast view)
State     state = [calls so far, blocks done], local, in device memory, so that a replayed graph counts on

  block (b, 0):
          1. copy part b of x to scratch[half, me] on all ranks, syncthreads
          2. set arrived[me, b] on all to the number of this call    release, sys: publishes the part
          3. copy part b of x to the output
  block (b, y), with peer = me + y modulo the ranks:
          1. wait until arrived[peer, b] here is at least that       acquire, sys: sees the peer's part
          2. a fence between the two addresses that the part has, multicast and my own
          3. copy it from scratch[half, peer] to the output
  last block to end: adds 1 to the calls

Half h is written again two calls later. In the call between, a part of each peer has come, which the peer
sent after its call before had ended: it has read what half h held. (The ends of both launches stand for the
fence here.) One call of a rank cannot overtake the next: they are launches on one stream. No deadlock: a
block that sends waits for nobody; all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import (
    copy_block,
    multimem_copy_block,
    multimem_fence,
    multimem_store,
    num_ranks,
    rank,
    threadfence,
    wait_block,
)
from shmemkit.kernels.method import Method

PART = 1 << 15  # bytes that are worth a block
MAX_BLOCKS = 32  # per rank
MINIMUM_CC = (9, 0)


@cuda.jit
def multimem_all_gather(x, out, in_place, part, to_all, scratch, signal_all, arrived, state):
    """Gather the `x` of all ranks in `out`, by rank; all ranks are of one node.

    x, out      uint8, 1-D: x.size bytes, and n_ranks times as many
    in_place    whether x is my part of out
    part        elements of a part, a multiple of 16: gridDim.x of them are x
    scratch     uint8 (2, n_ranks, capacity), symmetric; the capacity is a multiple of 16
    to_all      its multicast view
    arrived     uint64 (n_ranks, MAX_BLOCKS), symmetric, zeros at first
    signal_all  its multicast view
    state       uint64 (2,), zeros at first
    grid        (parts, n_ranks), any number of threads
    """
    me, n, b, y = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
    peer = me + y
    if peer >= n:
        peer -= n
    begin, end = min(b * part, x.size), min((b + 1) * part, x.size)
    mine = out[peer * x.size + begin : peer * x.size + end]
    call = state[0] + 1
    half = call & 1
    if y == 0:
        multimem_copy_block(to_all[half, me, begin:], x[begin:end])
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            multimem_store(signal_all[me], b, call, "release")
        if not in_place:
            copy_block(mine, x[begin:end])
    else:
        wait_block(arrived[peer, b:], 1, "sys", "acquire", call)
        multimem_fence()
        copy_block(mine, scratch[half, peer, begin:end])
    cuda.syncthreads()  # all threads have read the state
    if cuda.threadIdx.x == 0:
        threadfence("gpu", "acq_rel")
        if cuda.atomic.add(state, 1, 1) == cuda.gridDim.x * cuda.gridDim.y - 1:
            threadfence("gpu", "acq_rel")  # in every block
            state[0] += 1
            state[1] = 0


class Multimem(Method):
    """The method "multimem" of ``AllGather``."""

    def prepare(self, max_nbytes):
        world = self.world
        if world.n_nodes > 1:
            raise ValueError(
                f"AllGather: method='multimem': multicast ends at the node, and there are {world.n_nodes}: "
                "'ll_2d_multimem' or methods without multicast are allowed"
            )
        n = world.n_ranks
        capacity = -(-max(1, -(-max_nbytes // n)) // 16) * 16
        self.scratch = self.empty((2, n, capacity), "uint8", "all_gather.multimem.scratch")
        self.arrived = self.zeros((n, MAX_BLOCKS), "uint64", "all_gather.multimem.arrived")
        self.to_all, self.signal_all = map(world.multicast_view, (self.scratch, self.arrived))
        self.state = world.xp.zeros(2, "uint64")
        nothing = world.xp.empty(0, "uint8")
        self._bind(MAX_BLOCKS, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        blocks = min(MAX_BLOCKS, -(-x.size // PART))
        return self._bind(blocks, x, out, in_place, -(-x.size // blocks) + 15 & -16)

    def _bind(self, blocks, *args):
        shared = self.to_all, self.scratch, self.signal_all, self.arrived, self.state
        return self.launch(multimem_all_gather, (blocks, self.world.n_ranks), *args, *shared)


_x, _scratch, _words = (
    types.Array(types.uint8, 1, "C"),
    types.Array(types.uint8, 3, "C"),
    types.Array(types.uint64, 2, "C"),
)
_signature = (
    *(_x, _x, types.boolean, types.int64, _scratch, _scratch, _words, _words),
    types.Array(types.uint64, 1, "C"),
)
GPU_KERNELS = {"multimem_all_gather": (multimem_all_gather, _signature)}
