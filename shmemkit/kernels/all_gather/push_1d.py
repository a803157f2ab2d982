"""All-gather by push: stores into the peers' memory, and a signal for each part.

Parts     a segment, what one rank gives, is cut into as many parts as there are blocks per peer
Scratch   scratch[half, k], on every rank: what rank k sends here. Written by rank k only, over NVLink
Signals   arrived[k, b], on every rank: the number of the last call whose part b of rank k is here (only
          rank k sets it)
State     state = [calls so far, blocks done], local, in device memory, so that a replayed graph counts on

  block (b, y), with peer = me + y modulo the ranks:
          1. copy part b of x to scratch[half, me] on the peer, syncthreads
          2. set arrived[me, b] there to the number of this call     release, sys: publishes the part
          3. wait until arrived[peer, b] here is at least that       acquire, sys: sees the peer's part
          4. copy it from scratch[half, peer] to the output
  last block to end: adds 1 to the calls

Half h is written again two calls later. In the call between, a part of each peer has come, which the peer
sent after its call before had ended: it has read what half h held. One call of a rank cannot overtake the
next: they are launches on one stream. No deadlock: a block sends before it waits; all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import copy_block, notify, num_ranks, rank, symm_at, threadfence, wait_block
from shmemkit.kernels.method import Method

PART = 1 << 15  # bytes that are worth a block
MAX_BLOCKS = 32  # per peer


@cuda.jit
def push_all_gather(x, out, in_place, part, scratch, arrived, state):
    """Gather the `x` of all ranks in `out`, by rank.

    x, out    uint8, 1-D: x.size bytes, and n_ranks times as many
    in_place  whether x is my part of out
    part      elements of a part: gridDim.x of them are x
    scratch   uint8 (2, n_ranks, capacity), symmetric
    arrived   uint64 (n_ranks, MAX_BLOCKS), symmetric, zeros at first
    state     uint64 (2,), zeros at first
    grid      (parts, n_ranks), any number of threads
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
        if not in_place:
            copy_block(mine, x[begin:end])
    else:
        copy_block(symm_at(scratch, peer)[half, me, begin:end], x[begin:end])
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            notify(arrived[me, b:], peer, call, "set", "sys")
        wait_block(arrived[peer, b:], 1, "sys", "acquire", call)
        copy_block(mine, scratch[half, peer, begin:end])
    cuda.syncthreads()  # all threads have read the state
    if cuda.threadIdx.x == 0:
        threadfence("gpu", "acq_rel")
        if cuda.atomic.add(state, 1, 1) == cuda.gridDim.x * cuda.gridDim.y - 1:
            threadfence("gpu", "acq_rel")  # in every block
            state[0] += 1
            state[1] = 0


class Push1D(Method):
    """The method "push_1d" of ``AllGather``."""

    def prepare(self, max_nbytes):
        n = self.world.n_ranks
        capacity = -(-max(1, -(-max_nbytes // n)) // 16) * 16
        self.scratch = self.empty((2, n, capacity), "uint8", "all_gather.push.scratch")
        self.arrived = self.zeros((n, MAX_BLOCKS), "uint64", "all_gather.push.arrived")
        self.state = self.world.xp.zeros(2, "uint64")
        nothing = self.world.xp.empty(0, "uint8")
        self._bind(MAX_BLOCKS, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        blocks = min(MAX_BLOCKS, -(-x.size // PART))
        return self._bind(blocks, x, out, in_place, -(-x.size // blocks) + 15 & -16)

    def _bind(self, blocks, *args):
        grid = blocks, self.world.n_ranks
        return self.launch(push_all_gather, grid, *args, self.scratch, self.arrived, self.state)


_x = types.Array(types.uint8, 1, "C")
_signature = (
    *(_x, _x, types.boolean, types.int64, types.Array(types.uint8, 3, "C")),
    *(types.Array(types.uint64, 2, "C"), types.Array(types.uint64, 1, "C")),
)
GPU_KERNELS = {"push_all_gather": (push_all_gather, _signature)}
