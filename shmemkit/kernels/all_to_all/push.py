"""All-to-all by push: stores into the peers' memory, and a signal for each part. For larger messages.

Segments  x and out have one for each rank: segment k of x goes to rank k, segment k of out comes from it
Parts     a segment is cut into as many parts as there are blocks per peer
Signals   arrived[k, b], on every rank: how much of part b of rank k is here (only rank k sets it)
Counters  calls[z, y, b], local: how many calls block (b, y, z) has taken part in, so that it gives the number
          of a call, and the half. In device memory, so that a replayed graph counts on

Into a symmetric `out` (the same part of the same array on all ranks), ``push_all_to_all``, which needs

Ready     ready[k, b], on every rank: the number of the last call in which rank k has said that its output may
          be written (only rank k sets it)

  block (b, y), with peer = me + y modulo the ranks:
          1. set ready[me, b] on the peer to the number of this call    release, sys: after what used out
          2. wait until ready[peer, b] here is at least that            acquire, sys
          3. copy part b of x's segment `peer` to segment me of the peer's out
          4. set arrived[me, b] there to STEPS * call + 1               release, sys: publishes the part
          5. wait until arrived[peer, b] here is at least that          acquire, sys

No race: a peer writes my out after my ready of this call, which comes after all that my stream did before;
what comes later on it is after arrived of all parts.

Into private memory, which others cannot write, ``push_all_to_all_staged``, through

Scratch   scratch[half, k, b], on every rank: part b of what rank k sends here. Written by rank k only

  block (b, y, 0): for each step s, a piece of part b of x's segment `peer`:
          1. copy the piece to scratch[half, me, b] on the peer, syncthreads
          2. set arrived[me, b] there to STEPS * call + s + 1           release, sys: publishes the piece
  block (b, y, 1): for each step s:
          3. wait until arrived[peer, b] here is at least that          acquire, sys: sees the piece
          4. copy it from scratch[half, peer, b] to the output

No race: part b is always at the same place, and both sides count it alike, whatever the lengths of the calls.
Half h of it is written again two calls with it later. In the one between, the peer's part b has come, which
the peer sends in a launch that begins after its launch before has ended: it has read what half h held.

No deadlock: a block that waits waits for what the peer's block of the same number does before it waits
itself; all blocks are resident. At its end, a block adds 1 to its counter. The blocks of y = 0 copy my own
segment to my output, and wait for nobody.

GPUs from Hopper on copy by the TMA, where addresses and segments are multiples of 16 bytes; others by
threads, as each rank finds by itself, for the signals are the same.
"""

from numba import cuda, types

from shmemkit.device import copy_block, notify, num_ranks, rank, symm_at, wait_block
from shmemkit.kernels.method import Method
from shmemkit.kernels.transfers import copy_by_threads, copy_by_tma, put_by_threads, put_by_tma

PART = 1 << 15  # bytes that are worth a block
STEPS = 8  # of a part, at most
STEP = 1 << 17  # bytes that are worth a signal
SENDERS = 24  # blocks that send, at most; with as many that receive they are resident on A100


def _kernels(copy, put):
    @cuda.jit
    def push_all_to_all(x, out, segment, part, ready, arrived, calls):
        """Exchange the segments of `x`, to `out`, symmetric.

        x, out   uint8, 1-D, of n_ranks segments; they do not overlap
        segment  elements of a segment
        part     elements of a part: gridDim.x of them are a segment
        ready    uint64 (n_ranks, parts), symmetric, zeros at first
        arrived  as ready
        calls    uint64 (2, n_ranks, parts at most), zeros at first
        grid     (parts, n_ranks)
        """
        me, n, b, y = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
        peer = me + y
        if peer >= n:
            peer -= n
        begin, end = min(b * part, segment), min((b + 1) * part, segment)
        call = calls[0, y, b] + 1
        there = symm_at(out, peer)[me * segment + begin : me * segment + end]
        mine = x[peer * segment + begin : peer * segment + end]
        if y == 0:
            copy(there, mine)
        else:
            if cuda.threadIdx.x == 0:
                notify(ready[me, b:], peer, call, "set", "sys")
            wait_block(ready[peer, b:], 1, "sys", "acquire", call)
            copy(there, mine)
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                notify(arrived[me, b:], peer, STEPS * call + 1, "set", "sys")
            wait_block(arrived[peer, b:], 1, "sys", "acquire", STEPS * call + 1)
        cuda.syncthreads()  # all threads have read the counter
        if cuda.threadIdx.x == 0:
            calls[0, y, b] = calls[1, y, b] = call

    @cuda.jit
    def push_all_to_all_staged(x, out, segment, part, step, scratch, arrived, calls):
        """Exchange the segments of `x`, to `out`.

        step     elements of a piece, a multiple of 8192: STEPS or fewer of them are a part
        scratch  uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
        grid     (parts, n_ranks, 2)
        """
        me, n, b, y, z = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        peer = me + y
        if peer >= n:
            peer -= n
        begin, end = min(b * part, segment), min((b + 1) * part, segment)
        call = calls[z, y, b] + 1
        half, arrival = call & 1, STEPS * call
        mine, theirs = x[peer * segment : (peer + 1) * segment], out[peer * segment : (peer + 1) * segment]
        if y == 0:
            if z == 0:
                copy_block(theirs[begin:end], mine[begin:end])
        elif z == 0:
            there = scratch[half, me, b, : end - begin]
            put(there, mine[begin:end], arrived[me, b:], arrival, step, peer)
        else:
            here, first = scratch[half, peer, b], begin
            while True:
                until = min(begin + step, end)
                arrival += 1
                wait_block(arrived[peer, b:], 1, "sys", "acquire", arrival)
                copy_block(theirs[begin:until], here[begin - first : until - first])
                begin = until
                if begin >= end:
                    break
        cuda.syncthreads()  # all threads have read the counter
        if cuda.threadIdx.x == 0:
            calls[z, y, b] = call

    return push_all_to_all, push_all_to_all_staged


push_all_to_all, push_all_to_all_staged = _kernels(copy_by_threads, put_by_threads)
push_all_to_all_tma, push_all_to_all_staged_tma = _kernels(copy_by_tma, put_by_tma)


class Push(Method):
    """The method "push" of ``AllToAll``."""

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        world.check_reach("all_to_all push")
        by_threads = push_all_to_all, push_all_to_all_staged
        by_tma = push_all_to_all_tma, push_all_to_all_staged_tma
        hopper = world.backend.compute_capability >= (9, 0)
        self.kernels = {False: by_threads, True: by_tma if hopper else by_threads}  # by alignment
        self.blocks = max(1, SENDERS // max(1, n - 1))
        segment = max(1, -(-max_nbytes // n))
        room = max(min(PART, segment), -(-segment // self.blocks)) + 127 & -128
        self.scratch = self.empty((2, n, self.blocks, room), "uint8", "all_to_all.push.scratch")
        self.arrived = self.zeros((n, self.blocks), "uint64", "all_to_all.push.arrived")
        self.ready = self.zeros((n, self.blocks), "uint64", "all_to_all.push.ready")
        self.calls = world.xp.zeros((2, n, self.blocks), "uint64")
        nothing = world.xp.empty(0, "uint8")
        for aligned in (False, True):
            self._bind_direct(aligned, self.blocks, nothing, nothing, 0, 0)
            self._bind_staged(aligned, self.blocks, nothing, nothing, 0, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        segment = x.size // self.world.n_ranks
        blocks = min(self.blocks, -(-segment // PART))
        part = -(-segment // blocks) + 127 & -128  # of whole lines: others are half as fast
        address = self.world.backend.address
        if self.world.is_symmetric(out):
            aligned = (address(x) | address(out) | segment) % 16 == 0
            return self._bind_direct(aligned, blocks, x, out, segment, part)
        return self._bind_staged((address(x) | segment) % 16 == 0, blocks, x, out, segment, part)

    def _bind_direct(self, aligned, blocks, *args):
        grid, kernel = (blocks, self.world.n_ranks), self.kernels[aligned][0]
        return self.launch(kernel, grid, *args, self.ready, self.arrived, self.calls)

    def _bind_staged(self, aligned, blocks, x, out, segment, part):
        grid = blocks, self.world.n_ranks, 2
        step = max(STEP, -(-part // STEPS) + 8191 & -8192)
        args = x, out, segment, part, step, self.scratch, self.arrived, self.calls
        return self.launch(self.kernels[aligned][1], grid, *args)


_bytes, _signals = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 2, "C")
_begin, _calls = (_bytes, _bytes, types.int64, types.int64), types.Array(types.uint64, 3, "C")
_direct = (*_begin, _signals, _signals, _calls)
_staged = (*_begin, types.int64, types.Array(types.uint8, 4, "C"), _signals, _calls)
GPU_KERNELS = {
    "push_all_to_all": (push_all_to_all, _direct),
    "push_all_to_all_staged": (push_all_to_all_staged, _staged),
    "push_all_to_all_tma": (push_all_to_all_tma, _direct, (9, 0)),
    "push_all_to_all_staged_tma": (push_all_to_all_staged_tma, _staged, (9, 0)),
}
