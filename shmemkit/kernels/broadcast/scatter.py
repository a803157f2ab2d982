"""Broadcast by scatter and all-gather: the root sends each of the others a segment, which these pass on to
one another. For large messages: what leaves the root is as much as the message, however many ranks there are.

Segments  rank root + 1 + j, modulo the ranks, is the owner of segment j, of n_ranks - 1. A segment is cut
          into as many parts as there are blocks, a part into steps
Scratch   scratch[half, j, b], on every rank: part b of segment j. Written by the root on the owner, by the
          owner on others
Signals   arrived[j, b], on every rank: how much of part b of segment j is here: STEPS * call + the steps. Set
          by who writes the scratch
          free[k, b], on every rank: the number of the last call that block b of rank k has ended (only k)
Counters  calls[b], local: how many calls block b has taken part in. In device memory, for replayed graphs

  block b, before it writes to rank k:  wait until free[k, b] is at least this call less 2   acquire, sys
  on the root, for each step, for each segment j:
          1. copy the step of part b to the owner's scratch[half, j, b]; syncthreads
          2. set arrived[j, b] there                                    release, sys: publishes the step
  on the owner of j, for each step:
          3. wait until arrived[j, b] says that it is here              acquire, sys
          4. copy it to scratch[half, j, b] of all others but the root; syncthreads; set arrived[j, b] there
          5. copy it to the output
          6. for each other segment i: wait until arrived[i, b] says that its step is here, and copy it
  at its end, syncthreads, and set free[me, b] on all others            release, sys: after the reads

No race: the half of a call is written again when who read it says so. No deadlock: a block waits for what has
ended two calls before, for the root, which waits for nothing else, or for an owner, which waits for the root
before; all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import copy_block, notify, num_ranks, rank, symm_at, wait, wait_block
from shmemkit.kernels.method import Method

PART = 1 << 14  # bytes that are worth a block
STEP = 1 << 16  # bytes that are worth a signal
STEPS = 16  # of a part, at most
MAX_BLOCKS = 64


@cuda.jit(device=True)
def _publish(signals, peer, value):
    """Tell `peer` what all threads of the block have written before."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        notify(signals, peer, value, "set", "sys")


@cuda.jit
def scatter_broadcast(x, out, in_place, root, part, step, scratch, arrived, free, calls):
    """Store the root's `x` in `out`.

    x, out      uint8, 1-D, of the same size; x counts on the root only
    in_place    whether x is out
    part, step  bytes of a part, n_ranks - 1 times gridDim.x of which are x; and of a step, STEPS or fewer of
                which are a part
    scratch     uint8 (2, n_ranks - 1, parts at most, bytes of a part at most), symmetric
    arrived     uint64 (n_ranks - 1, parts at most), symmetric, zeros at first
    free        uint64 (n_ranks, parts at most), symmetric, zeros at first
    calls       uint64 (parts at most,), zeros at first
    grid        parts, one-dimensional, as the blocks are
    """
    b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    me, n, parts = rank(), num_ranks(), cuda.gridDim.x
    call = calls[b] + 1
    half, value = call & 1, STEPS * call
    mine = me - root - 1 if me > root else me - root - 1 + n
    if call > 2:
        k = t
        while k < n:
            if k != me:
                wait(free[k, b:], 1, "sys", "acquire", call - 2)
            k += threads
    cuda.syncthreads()
    at = 0
    while at < part:
        value += 1
        if me == root:
            j = 0
            while j < max(1, n - 1):
                first = min((j * parts + b) * part + at, x.size)
                last = min(min(first + step, (j * parts + b + 1) * part), x.size)
                if n > 1:
                    owner = root + 1 + j if root + 1 + j < n else root + 1 + j - n
                    copy_block(symm_at(scratch, owner)[half, j, b, at:], x[first:last])
                    _publish(arrived[j, b:], owner, value)
                if not in_place:
                    copy_block(out[first:last], x[first:last])
                j += 1
        else:
            y = 0
            while y < n - 1:
                j = mine + y if mine + y < n - 1 else mine + y - n + 1
                first = min((j * parts + b) * part + at, x.size)
                last = min(min(first + step, (j * parts + b + 1) * part), x.size)
                wait_block(arrived[j, b:], 1, "sys", "acquire", value)
                here = scratch[half, j, b, at : at + last - first]
                if y == 0:
                    k = 0
                    while k < n:
                        if k != me and k != root:
                            copy_block(symm_at(scratch, k)[half, j, b, at:], here)
                            _publish(arrived[j, b:], k, value)
                        k += 1
                copy_block(out[first:last], here)
                y += 1
        at += step
    cuda.syncthreads()
    k = t
    while k < n:
        if k != me:
            notify(free[me, b:], k, call, "set", "sys")
        k += threads
    if t == 0:
        calls[b] = call


class Scatter(Method):
    """The method "scatter" of ``Broadcast``."""

    threads = 256  # four copies need many registers

    def prepare(self, max_nbytes, root):
        world = self.world
        world.check_reach("broadcast scatter")
        self.root, self.segments = root, max(1, world.n_ranks - 1)
        segment = max(1, -(-max_nbytes // self.segments))
        self.blocks = max(1, min(MAX_BLOCKS, -(-segment // PART)))
        room = max(min(PART, segment), -(-segment // self.blocks)) + 127 & -128
        shape = self.segments, self.blocks
        self.scratch = self.empty((2, *shape, room), "uint8", "broadcast.scatter.scratch")
        self.arrived = self.zeros(shape, "uint64", "broadcast.scatter.arrived")
        self.free_of = self.zeros((world.n_ranks, self.blocks), "uint64", "broadcast.scatter.free")
        self.calls = world.xp.zeros(self.blocks, "uint64")
        nothing = world.xp.empty(0, "uint8")
        self._bind(1, nothing, nothing, False, 0, 1)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        segment = -(-x.size // self.segments)
        blocks = min(self.blocks, -(-segment // PART))
        part = -(-segment // blocks) + 127 & -128
        step = max(STEP, -(-part // STEPS) + 127 & -128)
        return self._bind(blocks, x, out, in_place, part, step)

    def _bind(self, blocks, x, out, in_place, part, step):
        args = x, out, in_place, self.root, part, step
        return self.launch(
            scatter_broadcast, blocks, *args, self.scratch, self.arrived, self.free_of, self.calls
        )


_bytes, _words = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 2, "C")
GPU_KERNELS = {
    "scatter_broadcast": (
        scatter_broadcast,
        (*[_bytes] * 2, types.boolean, *[types.int64] * 3, types.Array(types.uint8, 4, "C"), _words, _words)
        + (types.Array(types.uint64, 1, "C"),),
    )
}
