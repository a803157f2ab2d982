"""Pushes of segments: stores into the peers' memory, by all multiprocessors, to one peer after the other.
What all-gather and all-to-all by push share: all peers get the same segment of x, or each gets another one.

Segments  segment k of out comes from rank k
Parts     a segment is cut into parts, the same on all ranks. Block b sends part b of the segments to the next
          rank, then to the one after that, and so on: at any time a rank receives from one other

Into a symmetric `out` (the same part of the same array on all ranks), directly:

Signals   arrivals[k, b], on every rank: how often block b of rank k has met the others (only rank k sets it)
Counters  direct_epochs[b], local: how many of these calls block b has taken part in. In device memory, as all
          counters, so that a replayed graph counts on

  block b:  1. meet blocks b of all others                release and acquire, sys: after what used the outs
            2. copy part b of each peer's segment to segment me of its out, and of my own
            3. meet them again                            release and acquire, sys: publishes all parts b

No race: a peer writes my out after my block has met it, after all that my stream did before; what comes later
on it is after the second time, for all parts. No deadlock: all blocks say that they are there before they
wait, and all are resident.

Into private memory, which others cannot write, staged, through

Scratch   scratch[buffer, k, b], on every rank: part b of what rank k sends here. Written by rank k only
Signals   full[k, b], on every rank: how much of part b of rank k is here (only rank k sets it)
Counters  epochs[y, b], local: how many of these calls block (b, y) has taken part in, so that it gives the
          number of a call, and the half

  block (b, 0), for each peer, me + 1, me + 2, ... modulo the ranks:
          1. copy part b of its segment to scratch[buffer, me, b] there, in steps
          2. set full[me, b] there                 release, sys: publishes them (``transfers.put_to_all``)
  block (b, 1), for each peer in the order in which they come, me - 1, me - 2, ... modulo the ranks:
          3. wait for full[peer, b] here           acquire, sys: sees a step
          4. copy it from scratch[buffer, peer, b] to the output

No race: part b is always at the same place, and both sides count it alike, whatever the lengths of the calls.
Half h of it is written again two calls with it later. In the one between, the peer's part b has come, which
the peer sends in a launch that begins after its launch before has ended: it has read what half h held.
No deadlock: senders wait for nobody, receivers for them; all blocks are resident.

A block of stores for each multiprocessor, and all of them to one peer after the other, filled the links of
four GPUs better than few blocks of the TMA, and than some blocks for each peer.
"""

from numba import cuda, types

from shmemkit.device import copy_block, num_ranks, rank, span, symm_at

from .block_barrier import block_barrier
from .chunked_transfer import CHUNKS, chunk_of, put_to_all, receive
from .method import Method

PART = 1 << 13  # bytes that are worth a block
CHUNK = 1 << 14  # bytes that are worth a signal
SENDERS = 132  # blocks that send, at most: one for each of H200's multiprocessors


def push_kernels(personalized):
    """-> the direct kernel, and the staged one; `personalized`: x has a segment for each rank."""

    @cuda.jit
    def push(x, out, in_place, segment, part, arrivals, epochs):
        """Send each rank a segment of `x`, to `out`, symmetric.

        x, out    uint8, 1-D: out has n_ranks segments, x too if they are personalized, else one
        in_place  whether x is my segment of out
        segment   elements of a segment
        part      elements of a part: gridDim.x of them are a segment, or more
        arrivals       uint64 (n_ranks, parts at most), symmetric, zeros at first
        epochs     uint64 (parts at most,), zeros at first
        grid      (parts,)
        """
        me, n, b = rank(), num_ranks(), cuda.blockIdx.x
        begin = min(b * part, segment)
        size = min(part, segment - begin)
        epoch = epochs[b] + 1
        block_barrier(arrivals, b, 2 * epoch - 1)
        cuda.syncthreads()
        s = 1
        while s < n + (not in_place):  # my own comes last
            peer = me + s if me + s < n else me + s - n
            its = span(x, peer * segment * personalized + begin, size)
            copy_block(span(symm_at(out, peer), me * segment + begin, size), its)
            s += 1
        cuda.syncthreads()
        block_barrier(arrivals, b, 2 * epoch)
        if cuda.threadIdx.x == 0:
            epochs[b] = epoch

    @cuda.jit(max_registers=128)  # so that two blocks of 256 threads fit on a multiprocessor
    def push_staged(x, out, in_place, segment, part, chunk, scratch, full, epochs):
        """Send each rank a segment of `x`, to `out`.

        chunk      elements of a step, a multiple of 8192: STEPS or fewer of them are a part
        scratch   uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
        full   uint64 (n_ranks, parts at most), symmetric, zeros at first
        epochs     uint64 (2, parts at most), zeros at first
        grid      (parts, 2)
        """
        me, n, b, y = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
        begin = min(b * part, segment)
        size = min(part, segment - begin)
        epoch = epochs[y, b] + 1
        buffer, base = epoch & 1, CHUNKS * epoch
        if y == 0:
            stride = segment * personalized
            put_to_all(scratch[buffer, me, b], x, stride, begin, size, full[me, b:], base, chunk)
        else:
            if not in_place:
                own = span(x, me * segment * personalized + begin, size)
                copy_block(span(out, me * segment + begin, size), own)
            s = 1
            while s < n:
                peer = me - s if s <= me else me - s + n
                theirs = span(out, peer * segment + begin, size)
                receive(theirs, scratch[buffer, peer, b], full[peer, b:], base, chunk)
                s += 1
        cuda.syncthreads()  # all threads have read the counter
        if cuda.threadIdx.x == 0:
            epochs[y, b] = epoch

    return push, push_staged


class Push(Method):
    """A method that pushes. A subclass has

    name          that its symmetric arrays' names begin with, as "all_gather.push"
    personalized  whether x has a segment for each rank, and `kernels`: ``push_kernels(personalized)``
    """

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        self.parts, capacity = parts_of(max_nbytes, n, senders(world), PART)
        self.scratch = self.empty((2, n, self.parts, capacity), "uint8", f"{self.name}.scratch")
        self.full = self.zeros((n, self.parts), "uint64", f"{self.name}.full")
        self.arrivals = self.zeros((n, self.parts), "uint64", f"{self.name}.arrivals")
        self.epochs = world.xp.zeros((2, self.parts), "uint64")
        self.direct_epochs = world.xp.zeros(self.parts, "uint64")
        nothing = world.xp.empty(0, "uint8")
        for bind in (self._bind_direct, self._bind_staged):
            bind(self.parts, nothing, nothing, False, 0, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        segment = out.size // self.world.n_ranks
        parts, part = cut(segment, self.parts, PART)
        bind = self._bind_direct if self.world.is_symmetric(out) else self._bind_staged
        return bind(parts, x, out, in_place, segment, part)

    def _bind_direct(self, parts, *args):
        return self.launch(self.kernels[0], parts, *args, self.arrivals, self.direct_epochs)

    def _bind_staged(self, parts, *args):
        args += chunk_of(args[-1], CHUNK), self.scratch, self.full, self.epochs
        return self.launch(self.kernels[1], (parts, 2), *args, threads=-(-self.threads // 2))


def senders(world):
    """-> how many blocks send at most, alike on all ranks: one for each multiprocessor of the GPU that has
    fewest. Collective."""
    return min(SENDERS, *world.host_allgather(world.backend.multiprocessors))


def parts_of(max_nbytes, n_ranks, most, least):
    """-> how many parts a segment has at most, and bytes of the largest, where n_ranks segments have
    `max_nbytes` at most; `most` and `least` as in ``cut``."""
    segment = max(1, -(-max_nbytes // n_ranks))
    parts = min(most, -(-segment // least))
    return parts, max(min(least, segment), -(-segment // parts)) + 127 & -128


def cut(segment, most, least):
    """-> into how many parts a segment of so many bytes is cut, one for each `least` bytes, `most` at most,
    and bytes of a part."""
    parts = min(most, -(-segment // least))
    return parts, -(-segment // parts) + 127 & -128  # of whole lines: others are half as fast


_bytes, _two = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 2, "C")
_begin = (_bytes, _bytes, types.boolean, types.int64, types.int64)
_direct = (*_begin, _two, types.Array(types.uint64, 1, "C"))
_staged = (*_begin, types.int64, types.Array(types.uint8, 4, "C"), _two, _two)


def gpu_kernels(name, kernels):
    """-> the GPU_KERNELS of a module that has `kernels`, of ``push_kernels``."""
    direct, staged = kernels
    return {name: (direct, _direct), f"{name}_staged": (staged, _staged)}
