"""All-gather by push: stores into the peers' memory, and a signal for each part.

Parts     a segment, what one rank gives, is cut into as many parts as there are blocks per peer
Signals   arrived[k, b], on every rank: how much of part b of rank k is here (only rank k sets it)
Counters  calls[z, y, b], local: how many calls block (b, y, z) has taken part in, so that it gives the number
          of a call, and the half. In device memory, so that a replayed graph counts on

Into a symmetric `out` (the same part of the same array on all ranks), ``push_all_gather``, which needs

Ready     ready[k, b], on every rank: the number of the last call in which rank k has said that its output may
          be written (only rank k sets it)

  block (b, y), with peer = me + y modulo the ranks:
          1. set ready[me, b] on the peer to the number of this call    release, sys: after what used out
          2. wait until ready[peer, b] here is at least that            acquire, sys
          3. copy part b of x to segment me of the peer's out
          4. set arrived[me, b] there to STEPS * call + 1               release, sys: publishes the part
          5. wait until arrived[peer, b] here is at least that          acquire, sys

No race: a peer writes my out after my ready of this call, which comes after all that my stream did before;
what comes later on it is after arrived of all parts. The copy to my own part (y = 0) waits for nobody.

Into private memory, which others cannot write, ``push_all_gather_staged``, through

Scratch   scratch[half, k, b], on every rank: part b of what rank k sends here. Written by rank k only

  block (b, y, 0): for each step s, a piece of part b:
          1. copy the piece of x to scratch[half, me, b] on the peer, syncthreads
          2. set arrived[me, b] there to STEPS * call + s + 1           release, sys: publishes the piece
  block (b, y, 1): for each step s:
          3. wait until arrived[peer, b] here is at least that          acquire, sys: sees the piece
          4. copy it from scratch[half, peer, b] to the output

No race: part b is always at the same place, and both sides count it alike, whatever the lengths of the calls.
Half h of it is written again two calls with it later. In the one between, the peer's part b has come, which
the peer sends in a launch that begins after its launch before has ended: it has read what half h held.

No deadlock: a block that waits waits for what the peer's block of the same number does before it waits
itself; all blocks are resident. At its end, a block adds 1 to its counter.

Where some ranks' memory is not mapped, ``push_network.py``.

GPUs from Hopper on copy by the TMA, which needs few blocks; with more of them, parts that go to one rank
compete. It moves multiples of 16 bytes between addresses that agree modulo 16: other arrays are copied by
threads, as each rank finds by itself, for the signals are the same.
"""

from numba import cuda, types

from shmemkit.device import (
    copy_block,
    notify,
    num_ranks,
    rank,
    symm_at,
    wait_block,
)
from shmemkit.kernels.method import Method
from shmemkit.kernels.transfers import copy_by_threads, copy_by_tma, put_by_threads, put_by_tma

from .push_network import push_all_gather_network

PART = 1 << 15  # bytes that are worth a block
STEPS = 8  # of a part, at most
STEP = 1 << 17  # bytes that are worth a signal
SENDERS = 24  # blocks that send, at most; with as many that receive they are resident on A100


def _kernels(copy, put):
    @cuda.jit
    def push_all_gather(x, out, in_place, part, ready, arrived, calls):
        """Gather the `x` of all ranks in `out`, symmetric, by rank.

        x, out    uint8, 1-D: x.size bytes, and n_ranks times as many
        in_place  whether x is my part of out
        part      elements of a part: gridDim.x of them are x
        ready     uint64 (n_ranks, parts), symmetric, zeros at first
        arrived   as ready
        calls     uint64 (2, n_ranks, parts at most), zeros at first
        grid      (parts, n_ranks)
        """
        me, n, b, y = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
        peer = me + y
        if peer >= n:
            peer -= n
        begin, end = min(b * part, x.size), min((b + 1) * part, x.size)
        call = calls[0, y, b] + 1
        there = symm_at(out, peer)[me * x.size + begin : me * x.size + end]
        if y == 0:
            if not in_place:
                copy(there, x[begin:end])
        else:
            if cuda.threadIdx.x == 0:
                notify(ready[me, b:], peer, call, "set", "sys")
            wait_block(ready[peer, b:], 1, "sys", "acquire", call)
            copy(there, x[begin:end])
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                notify(arrived[me, b:], peer, STEPS * call + 1, "set", "sys")
            wait_block(arrived[peer, b:], 1, "sys", "acquire", STEPS * call + 1)
        cuda.syncthreads()  # all threads have read the counter
        if cuda.threadIdx.x == 0:
            calls[0, y, b] = calls[1, y, b] = call

    @cuda.jit
    def push_all_gather_staged(x, out, in_place, part, step, scratch, arrived, calls):
        """Gather the `x` of all ranks in `out`, by rank.

        step      elements of a piece, a multiple of 8192: STEPS or fewer of them are a part
        scratch   uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
        grid      (parts, n_ranks, 2)
        """
        me, n, b, y = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
        peer = me + y
        if peer >= n:
            peer -= n
        begin, end = min(b * part, x.size), min((b + 1) * part, x.size)
        z = cuda.blockIdx.z
        call = calls[z, y, b] + 1
        half, arrival = call & 1, STEPS * call
        mine = out[peer * x.size : (peer + 1) * x.size]
        if y == 0:
            if z == 0 and not in_place:
                copy_block(mine[begin:end], x[begin:end])
        elif z == 0:
            there = scratch[half, me, b, : end - begin]
            put(there, x[begin:end], arrived[me, b:], arrival, step, peer)
        else:
            here, first = scratch[half, peer, b], begin
            while True:
                until = min(begin + step, end)
                arrival += 1
                wait_block(arrived[peer, b:], 1, "sys", "acquire", arrival)
                copy_block(mine[begin:until], here[begin - first : until - first])
                begin = until
                if begin >= end:
                    break
        cuda.syncthreads()  # all threads have read the counter
        if cuda.threadIdx.x == 0:
            calls[z, y, b] = call

    return push_all_gather, push_all_gather_staged


push_all_gather, push_all_gather_staged = _kernels(copy_by_threads, put_by_threads)
push_all_gather_tma, push_all_gather_staged_tma = _kernels(copy_by_tma, put_by_tma)


class Push1D(Method):
    """The method "push_1d" of ``AllGather``."""

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        by_threads = push_all_gather, push_all_gather_staged
        by_tma = push_all_gather_tma, push_all_gather_staged_tma
        hopper = world.backend.compute_capability >= (9, 0)
        self.kernels = {False: by_threads, True: by_tma if hopper else by_threads}  # by alignment
        self.blocks = max(1, SENDERS // max(1, n - 1))
        segment = max(1, -(-max_nbytes // n))
        room = max(min(PART, segment), -(-segment // self.blocks)) + 127 & -128
        self.scratch = self.empty((2, n, self.blocks, room), "uint8", "all_gather.push.scratch")
        self.arrived = self.zeros((2, n, self.blocks), "uint64", "all_gather.push.arrived")
        self.ready = self.zeros((n, self.blocks), "uint64", "all_gather.push.ready")
        self.calls = world.xp.zeros((2, n, self.blocks), "uint64")
        near = world.near()
        all_near = all(world.host_allgather(all(near)))
        self.near = None if all_near else world.xp.asarray(near).astype("uint8")
        nothing = world.xp.empty(0, "uint8")
        if self.near is not None:
            self._bind_network(self.blocks, nothing, nothing, False, 0)
        else:
            for aligned in (False, True):
                self._bind_direct(aligned, self.blocks, nothing, nothing, False, 0)
                self._bind_staged(aligned, self.blocks, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        blocks = min(self.blocks, -(-x.size // PART))
        part = -(-x.size // blocks) + 127 & -128  # of whole lines: others are half as fast
        if self.near is not None:
            return self._bind_network(blocks, x, out, in_place, part)
        address = self.world.backend.address
        if self.world.is_symmetric(out):
            aligned = (address(x) | address(out) | x.size) % 16 == 0
            return self._bind_direct(aligned, blocks, x, out, in_place, part)
        return self._bind_staged(address(x) % 16 == 0, blocks, x, out, in_place, part)

    def _bind_direct(self, aligned, blocks, *args):
        grid, kernel = (blocks, self.world.n_ranks), self.kernels[aligned][0]
        return self.launch(kernel, grid, *args, self.ready, self.arrived[0], self.calls)

    def _bind_staged(self, aligned, blocks, x, out, in_place, part):
        grid = blocks, self.world.n_ranks, 2
        step = max(STEP, -(-part // STEPS) + 8191 & -8192)
        args = x, out, in_place, part, step, self.scratch, self.arrived[0], self.calls
        return self.launch(self.kernels[aligned][1], grid, *args)

    def _bind_network(self, blocks, *args):
        args += self.near, self.scratch, self.arrived, self.calls[0]
        return self.launch(push_all_gather_network, (blocks, self.world.n_ranks), *args)


_bytes, _signals = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 2, "C")
_begin, _calls = (_bytes, _bytes, types.boolean, types.int64), types.Array(types.uint64, 3, "C")
_direct = (*_begin, _signals, _signals, _calls)
_staged = (*_begin, types.int64, types.Array(types.uint8, 4, "C"), _signals, _calls)
GPU_KERNELS = {
    "push_all_gather": (push_all_gather, _direct),
    "push_all_gather_staged": (push_all_gather_staged, _staged),
    "push_all_gather_tma": (push_all_gather_tma, _direct, (9, 0)),
    "push_all_gather_staged_tma": (push_all_gather_staged_tma, _staged, (9, 0)),
}
