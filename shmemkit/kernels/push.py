"""Pushes of segments: stores into the peers' memory, and a signal for each part. What all-gather and
all-to-all by push share: all peers get the same segment of x, or each gets another one.

Segments  segment k of out comes from rank k
Parts     a segment is cut into as many parts as there are blocks per peer
Signals   arrived[k, b], on every rank: how much of part b of rank k is here (only rank k sets it)
Counters  calls[z, y, b], local: how many calls block (b, y, z) has taken part in, so that it gives the number
          of a call, and the half. In device memory, so that a replayed graph counts on

Into a symmetric `out` (the same part of the same array on all ranks), directly, which needs

Ready     ready[k, b], on every rank: the number of the last call in which rank k has said that its output may
          be written (only rank k sets it)

  block (b, y), with peer = me + y modulo the ranks:
          1. set ready[me, b] on the peer to the number of this call    release, sys: after what used out
          2. wait until ready[peer, b] here is at least that            acquire, sys
          3. copy part b of the peer's segment to segment me of its out
          4. set arrived[me, b] there to STEPS * call + 1               release, sys: publishes the part
          5. wait until arrived[peer, b] here is at least that          acquire, sys

No race: a peer writes my out after my ready of this call, which comes after all that my stream did before;
what comes later on it is after arrived of all parts. The copy to my own segment (y = 0) waits for nobody.

Into private memory, which others cannot write, staged, through

Scratch   scratch[half, k, b], on every rank: part b of what rank k sends here. Written by rank k only

  block (b, y, 0): for each step s, a piece of part b of the peer's segment:
          1. copy the piece to scratch[half, me, b] on the peer, syncthreads
          2. set arrived[me, b] there to STEPS * call + s + 1           release, sys: publishes the piece
  block (b, y, 1): for each step s:
          3. wait until arrived[peer, b] here is at least that          acquire, sys: sees the piece
          4. copy it from scratch[half, peer, b] to the output

No race: part b is always at the same place, and both sides count it alike, whatever the lengths of the calls.
Half h of it is written again two calls with it later. In the one between, the peer's part b has come, which
the peer sends in a launch that begins after its launch before has ended: it has read what half h held.

No deadlock: a block that waits waits for what the peer's block of the same number does before it waits
itself; all blocks are resident. At its end, a block adds 1 to its counter.

GPUs from Hopper on copy by the TMA, which needs few blocks; with more of them, parts that go to one rank
compete. It moves multiples of 16 bytes between addresses that agree modulo 16: other arrays are copied by
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


@cuda.jit(device=True)
def receive(dst, src, signal, value, step):
    """Copy `src` to `dst`, all of it, as it comes by ``put`` (``shmemkit.kernels.transfers``), by a block."""
    begin = 0
    while True:
        value += 1
        wait_block(signal, 1, "sys", "acquire", value)
        end = min(begin + step, dst.size)
        copy_block(dst[begin:end], src[begin:end])
        begin = end
        if begin >= dst.size:
            break


def push_kernels(personalized):
    """-> {by_tma: (the direct kernel, the staged one)}; `personalized`: x has a segment for each rank."""
    return {
        False: _kernels(personalized, copy_by_threads, put_by_threads),
        True: _kernels(personalized, copy_by_tma, put_by_tma),
    }


def _kernels(personalized, copy, put):
    @cuda.jit
    def push(x, out, in_place, segment, part, ready, arrived, calls):
        """Send each rank a segment of `x`, to `out`, symmetric.

        x, out    uint8, 1-D: out has n_ranks segments, x too if they are personalized, else one
        in_place  whether x is my segment of out
        segment   elements of a segment
        part      elements of a part: gridDim.x of them are a segment
        ready     uint64 (n_ranks, parts), symmetric, zeros at first
        arrived   as ready
        calls     uint64 (2, n_ranks, parts at most), zeros at first
        grid      (parts, n_ranks)
        """
        me, n, b, y = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
        peer = me + y
        if peer >= n:
            peer -= n
        begin, end = min(b * part, segment), min((b + 1) * part, segment)
        call = calls[0, y, b] + 1
        there = symm_at(out, peer)[me * segment + begin : me * segment + end]
        first = peer * segment if personalized else 0
        if y == 0:
            if not in_place:
                copy(there, x[first + begin : first + end])
        else:
            if cuda.threadIdx.x == 0:
                notify(ready[me, b:], peer, call, "set", "sys")
            wait_block(ready[peer, b:], 1, "sys", "acquire", call)
            copy(there, x[first + begin : first + end])
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                notify(arrived[me, b:], peer, STEPS * call + 1, "set", "sys")
            wait_block(arrived[peer, b:], 1, "sys", "acquire", STEPS * call + 1)
        cuda.syncthreads()  # all threads have read the counter
        if cuda.threadIdx.x == 0:
            calls[0, y, b] = calls[1, y, b] = call

    @cuda.jit
    def push_staged(x, out, in_place, segment, part, step, scratch, arrived, calls):
        """Send each rank a segment of `x`, to `out`.

        step      elements of a piece, a multiple of 8192: STEPS or fewer of them are a part
        scratch   uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
        grid      (parts, n_ranks, 2)
        """
        me, n, b, y = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
        peer = me + y
        if peer >= n:
            peer -= n
        begin, end = min(b * part, segment), min((b + 1) * part, segment)
        z = cuda.blockIdx.z
        call = calls[z, y, b] + 1
        half, arrival = call & 1, STEPS * call
        theirs = out[peer * segment : (peer + 1) * segment]
        first = peer * segment if personalized else 0
        if y == 0:
            if z == 0 and not in_place:
                copy_block(theirs[begin:end], x[first + begin : first + end])
        elif z == 0:
            there = scratch[half, me, b, : end - begin]
            put(there, x[first + begin : first + end], arrived[me, b:], arrival, step, peer)
        else:
            receive(theirs[begin:end], scratch[half, peer, b], arrived[peer, b:], arrival, step)
        cuda.syncthreads()  # all threads have read the counter
        if cuda.threadIdx.x == 0:
            calls[z, y, b] = call

    return push, push_staged


class Push(Method):
    """A method that pushes. A subclass has

    name          that its symmetric arrays' names begin with, as "all_gather.push"
    personalized  whether x has a segment for each rank, and `kernels`: ``push_kernels(personalized)``
    """

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        self.blocks, room = parts_of(max_nbytes, n)
        self.scratch = self.empty((2, n, self.blocks, room), "uint8", f"{self.name}.scratch")
        self.arrived = self.zeros((n, self.blocks), "uint64", f"{self.name}.arrived")
        self.ready = self.zeros((n, self.blocks), "uint64", f"{self.name}.ready")
        self.calls = world.xp.zeros((2, n, self.blocks), "uint64")
        nothing = world.xp.empty(0, "uint8")
        for aligned in (False, True):
            self._bind_direct(aligned, self.blocks, nothing, nothing, False, 0, 0)
            self._bind_staged(aligned, self.blocks, nothing, nothing, False, 0, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        segment = out.size // self.world.n_ranks
        blocks, part = cut(segment, self.blocks)
        address = self.world.backend.address
        if self.world.is_symmetric(out):
            aligned = (address(x) | address(out) | segment) % 16 == 0
            return self._bind_direct(aligned, blocks, x, out, in_place, segment, part)
        aligned = (address(x) | (segment if self.personalized else 0)) % 16 == 0
        return self._bind_staged(aligned, blocks, x, out, in_place, segment, part)

    def _kernels_for(self, aligned):
        return self.kernels[aligned and self.world.backend.compute_capability >= (9, 0)]

    def _bind_direct(self, aligned, blocks, *args):
        grid, kernel = (blocks, self.world.n_ranks), self._kernels_for(aligned)[0]
        return self.launch(kernel, grid, *args, self.ready, self.arrived, self.calls)

    def _bind_staged(self, aligned, blocks, *args):
        grid, kernel = (blocks, self.world.n_ranks, 2), self._kernels_for(aligned)[1]
        return self.launch(kernel, grid, *args, step_of(args[-1]), self.scratch, self.arrived, self.calls)


def parts_of(max_nbytes, n_ranks):
    """-> how many parts a segment has at most, and bytes of the largest, where n_ranks segments have
    `max_nbytes` at most."""
    parts = max(1, SENDERS // max(1, n_ranks - 1))
    segment = max(1, -(-max_nbytes // n_ranks))
    return parts, max(min(PART, segment), -(-segment // parts)) + 127 & -128


def cut(segment, most):
    """-> into how many parts a segment of so many bytes is cut, `most` at most, and bytes of a part."""
    parts = min(most, -(-segment // PART))
    return parts, -(-segment // parts) + 127 & -128  # of whole lines: others are half as fast


def step_of(part):
    """-> bytes of a step of a part."""
    return max(STEP, -(-part // STEPS) + 8191 & -8192)


_bytes, _signals = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 2, "C")
_begin, _calls = (_bytes, _bytes, types.boolean, types.int64, types.int64), types.Array(types.uint64, 3, "C")
_direct = (*_begin, _signals, _signals, _calls)
_staged = (*_begin, types.int64, types.Array(types.uint8, 4, "C"), _signals, _calls)


def gpu_kernels(name, kernels):
    """-> the GPU_KERNELS of a module that has `kernels`, of ``push_kernels``."""
    (direct, staged), (direct_tma, staged_tma) = kernels[False], kernels[True]
    return {
        name: (direct, _direct),
        f"{name}_staged": (staged, _staged),
        f"{name}_tma": (direct_tma, _direct, (9, 0)),
        f"{name}_staged_tma": (staged_tma, _staged, (9, 0)),
    }
