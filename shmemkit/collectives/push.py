"""Push: a rank stores its segments into the peers' memory. All-gather sends all peers the same segment of x;
all-to-all sends each peer another one.

Segments  segment k of out comes from rank k
Parts     a segment is cut into parts, one for each block, the same on all ranks. Block b sends part b to the
          next rank, then to the one after it, and so on. So a rank receives from one rank at a time

The direct kernel is for a symmetric `out`: the same part of the same array on all ranks.

Signals   arrivals[k, b], on every rank: the last barrier that block b of rank k has reached. Only rank k sets
          it
Epochs    direct_epochs[b], local: of block b. Device-resident, as all epochs, so graph-safe

  block b:  1. barrier with blocks b of all ranks       release and acquire, sys: the outs may be written
            2. copy part b of each peer's segment to segment me of its out; then the own part
            3. barrier again                            release and acquire, sys: publishes all parts b

No race: a peer writes out after the first barrier, which follows all earlier work of this rank's stream.
Later work follows the second barrier of all parts. No deadlock: each block signals before it waits, and all
blocks are resident.

The staged kernel is for private memory, which peers cannot write.

Scratch   scratch[buffer, k, b], on every rank: part b of rank k's segment. Only rank k writes it
Signals   full[k, b], on every rank: how much of part b of rank k is there. Only rank k sets it
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer

  block (b, 0), for each peer me + 1, me + 2, ... modulo the ranks:
          1. copy part b of its segment to scratch[buffer, me, b] there, in chunks
          2. set full[me, b] there                    release, sys: publishes them (``chunked_transfer``)
  block (b, 1), for each peer me - 1, me - 2, ... modulo the ranks, the order in which parts arrive:
          3. wait for full[peer, b] here              acquire, sys: sees a chunk
          4. copy the chunk from scratch[buffer, peer, b] to the output

No race: the double-buffer lemma (docs/protocols.md), for part b. No deadlock: senders wait for nobody,
receivers wait for senders, and all blocks are resident.

One block for each multiprocessor stores to one peer after the other. On four GPUs this filled the links
better than few blocks of the TMA, and better than some blocks for each peer.
"""

from numba import cuda, types

from shmemkit.device import copy_block, num_ranks, rank, span, symm_at

from .block_barrier import block_barrier
from .chunked_transfer import CHUNKS, chunk_of, put_to_all, receive
from .method import Method


def push_kernels(personalized):
    """-> the direct kernel, and the staged one; `personalized`: x has a segment for each rank."""

    @cuda.jit
    def push(x, out, in_place, segment, part, arrivals, epochs):
        """Send each rank a segment of `x`, to `out`, symmetric.

        x, out    uint8, 1-D: out has n_ranks segments, x too if they are personalized, else one
        in_place  whether x is the own segment of out
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
        while s < n + (not in_place):  # the own segment comes last
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

        chunk     elements of a chunk, a multiple of 8192: CHUNKS or fewer of them are a part
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

    shared        None, or an object whose scratch, signals and epochs it uses: each launch of either is an
                  epoch, on all ranks
    part, chunk   bytes that are worth a block, and a signal
    senders       blocks that send, at most: one for each of H200's multiprocessors
    """

    part, chunk, senders = 1 << 13, 1 << 14, 132
    shared = None

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        if (shared := self.shared) is None:
            self.parts, capacity = parts_of(max_nbytes, n, senders_of(world, self.senders), self.part)
            self.scratch = self.empty((2, n, self.parts, capacity), "uint8", f"{self.name}.scratch")
            self.full = self.zeros((n, self.parts), "uint64", f"{self.name}.full")
            self.epochs = world.xp.zeros((2, self.parts), "uint64")
        else:
            self.parts, self.scratch = shared.parts, shared.scratch
            self.full, self.epochs = shared.full, shared.epochs
        self.arrivals = self.zeros((n, self.parts), "uint64", f"{self.name}.arrivals")
        self.direct_epochs = world.xp.zeros(self.parts, "uint64")
        nothing = world.xp.empty(0, "uint8")
        for bind in (self._bind_direct, self._bind_staged):
            bind(self.parts, nothing, nothing, False, 0, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        segment = out.size // self.world.n_ranks
        parts, part = cut(segment, self.parts, self.part)
        bind = self._bind_direct if self.world.is_symmetric(out) else self._bind_staged
        return bind(parts, x, out, in_place, segment, part)

    def _bind_direct(self, parts, *args):
        return self.launch(self.kernels[0], parts, *args, self.arrivals, self.direct_epochs)

    def _bind_staged(self, parts, *args):
        args += chunk_of(args[-1], self.chunk), self.scratch, self.full, self.epochs
        return self.launch(self.kernels[1], (parts, 2), *args, threads=-(-self.threads // 2))


def senders_of(world, most):
    """-> how many blocks send, alike on all ranks: one for each multiprocessor of the GPU that has fewest,
    `most` at most. Collective."""
    return min(most, *world.host_allgather(world.backend.multiprocessors))


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
    return parts, -(-segment // parts) + 127 & -128  # of whole lines of 128 bytes: others are half as fast


_bytes, _two = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 2, "C")
_begin = (_bytes, _bytes, types.boolean, types.int64, types.int64)
_direct = (*_begin, _two, types.Array(types.uint64, 1, "C"))
_staged = (*_begin, types.int64, types.Array(types.uint8, 4, "C"), _two, _two)


def gpu_kernels(name, kernels):
    """-> the GPU_KERNELS of a module that has `kernels`, of ``push_kernels``."""
    direct, staged = kernels
    return {name: (direct, _direct), f"{name}_staged": (staged, _staged)}
