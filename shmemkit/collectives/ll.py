"""LL exchanges of segments. All-gather sends all peers the same segment of x; all-to-all sends each peer
another one.

Segments  segment k of out comes from rank k
Slots     slots[buffer, k], on every rank: the packets of rank k (``shmemkit.device.packets.ll``). Only rank k
          writes them, over NVLink
Epochs    epochs[y, c], local: of chunk c to the peer me + 1 + y. The epoch is the flag and selects the
          buffer. Device-resident, so graph-safe

  block (b, y), with peer = me + 1 + y modulo the ranks, for its chunks c = b, b + gridDim.x, ...:
          1. store the chunk of the peer's segment to slots[buffer, me] on the peer, with the flag
          2. add 1 to the chunk's epoch; copy a share of the rank's own segment to the output
          3. poll slots[buffer, peer] until they have the flag; store the data to the output

A chunk always has the same slots, whatever the size of the call. So the flags of a slot only grow, until the
32 bits of LL's flags wrap.

No race: the double-buffer lemma (docs/protocols.md). No deadlock: a block sends all its chunks before it
waits, and all blocks are resident.

``ll_words`` is for segments of whole, aligned words of 8 bytes: one thread for each word, and a third of the
instructions. ``ll_bytes`` is for all others. Both use the same slots, chunks and epochs, so ranks may choose
differently.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    copy_block,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll_load,
    ll_pack_block,
    ll_recv_block,
    ll_store,
    num_ranks,
    rank,
    symm_at,
)

from .method import Method


@functools.cache
def ll_words_kernel(personalized):
    """-> the kernel for words by LL; `personalized`: x has a segment for each rank."""

    @cuda.jit
    def ll_words(x, out, in_place, size, slots, epochs):
        """Send each rank a segment of `x`, to `out`.

        x, out    uint64, 1-D: out has n_ranks segments, x too if they are personalized, else one
        in_place  whether the own segment is in out already
        size      elements of a segment, any number up to what the slots hold
        slots     uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
        epochs     uint64 (peers, chunks of the capacity), zeros at first
        grid      (any number, peers): n_ranks - 1, but at least 1
        block     one-dimensional; an element of a chunk for each thread
        """
        b, y, t, threads = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
        me, n = rank(), num_ranks()
        peer = me + 1 + y
        if peer >= n:  # a remainder would be a division, of a good part of a microsecond
            peer -= n
        there = symm_at(slots, peer)
        mine, theirs = (me * size, peer * size) if personalized else (0, 0)
        griddepcontrol_wait(x, out, there, slots, epochs, mine, theirs)
        griddepcontrol_launch_dependents()
        c = b
        while c * threads < size:
            i = c * threads + t
            if i < size:
                value = x[theirs + i]  # before the counter, so that both are on their way at once
                epoch = epochs[y, c] + 1
                ll_store(there[epoch & 1, me], i, value, epoch)
                if y == 0 and not in_place:
                    out[me * size + i] = x[mine + i]
            c += cuda.gridDim.x
        cuda.syncthreads()  # all threads have read the counters
        if t == 0:
            c = b
            while c * threads < size:
                epochs[y, c] += 1
                c += cuda.gridDim.x
        cuda.syncthreads()
        c = b
        while c * threads < size:
            i = c * threads + t
            if i < size:
                epoch = epochs[y, c]
                out[peer * size + i] = ll_load(slots[epoch & 1, peer], i, epoch)
            c += cuda.gridDim.x

    return ll_words


@functools.cache
def ll_bytes_kernel(personalized):
    """-> the kernel for bytes, by LL."""

    @cuda.jit
    def ll_bytes(x, out, in_place, size, own, chunk, words, slots, epochs):
        """As ``ll_words``, with

        x, out  uint8
        own     elements of a chunk of the own segment that each of its blocks copies
        chunk   elements of a chunk; what they are packed into are `words` words
        """
        y, n, me = cuda.blockIdx.y, num_ranks(), rank()
        peer = me + 1 + y
        if peer >= n:
            peer -= n
        mine, theirs = out[me * size : (me + 1) * size], out[peer * size : (peer + 1) * size]
        there = symm_at(slots, peer)
        first = peer * size if personalized else 0
        griddepcontrol_wait(x, mine, theirs, there, slots, epochs, first)
        griddepcontrol_launch_dependents()
        b = cuda.blockIdx.x
        begin = b * chunk
        while begin < size:
            epoch = epochs[y, b] + 1
            ll_pack_block(
                there[epoch & 1, me, words * b :], x[first + begin : first + min(begin + chunk, size)], epoch
            )
            b += cuda.gridDim.x
            begin = b * chunk
        cuda.syncthreads()  # all threads have read the counters
        if cuda.threadIdx.x == 0:
            b = cuda.blockIdx.x
            while b * chunk < size:
                epochs[y, b] += 1
                b += cuda.gridDim.x
        if not in_place:
            first = me * size if personalized else 0
            b = cuda.blockIdx.x
            begin = b * chunk
            while begin < size:
                start = begin + own * y
                end = min(start + own, min(begin + chunk, size))
                if start < end:
                    copy_block(mine[start:end], x[first + start : first + end])
                b += cuda.gridDim.x
                begin = b * chunk
        cuda.syncthreads()
        b = cuda.blockIdx.x
        begin = b * chunk
        while begin < size:
            epoch = epochs[y, b]
            part = theirs[begin : min(begin + chunk, size)]
            ll_recv_block(part, slots[epoch & 1, peer, words * b :], epoch)
            b += cuda.gridDim.x
            begin = b * chunk

    return ll_bytes


class LL(Method):
    """A method by LL. A packet is two words for 8 bytes of data. A subclass has

    name          of the method, as "all_gather ll"
    personalized  whether x has a segment for each rank
    """

    threads = 128
    blocks = 2  # of a grid, at most, for each multiprocessor

    @property
    def chunk(self):
        """Bytes: 8 for each thread."""
        return 8 * self.threads

    def prepare(self, max_nbytes):
        world = self.world
        world.check_reach(self.name)
        n, self.peers = world.n_ranks, max(1, world.n_ranks - 1)
        chunks = max(1, -(-max_nbytes // (n * self.chunk)))
        self.slots = self.zeros(
            (2, n, chunks * 2 * self.threads), "uint64", f"{self.name.replace(' ', '.')}.slots"
        )
        self.epochs = world.xp.zeros((self.peers, chunks), "uint64")
        self.most = dict.fromkeys(("uint64", "uint8"), 1)  # blocks for a peer
        for dtype in self.most:
            nothing = world.xp.empty(0, dtype)
            fit = self._bind(1, nothing, nothing, False).resident_blocks
            most = min(fit, self.blocks * world.backend.multiprocessors) // self.peers
            self.most[dtype] = max(1, most)
            self._bind(chunks, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-out.nbytes // (self.world.n_ranks * self.chunk)), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        dtype, how = out.dtype.name, (in_place, out.size // self.world.n_ranks)
        if dtype == "uint64":
            kernel = ll_words_kernel(self.personalized)
        else:
            kernel = ll_bytes_kernel(self.personalized)
            how += -(-self.chunk // self.peers) + 15 & -16, self.chunk, 2 * self.threads
        grid = min(chunks, self.most[dtype]), self.peers
        return self.launch(kernel, grid, x, out, *how, self.slots, self.epochs, pdl=True)


_tables = types.Array(types.uint64, 3, "C"), types.Array(types.uint64, 2, "C")
_how = types.boolean, types.int64


def gpu_kernels(personalized, op):
    """-> the GPU_KERNELS of a module whose method is made of these."""
    of_words, of_bytes = ([types.Array(dtype, 1, "C")] * 2 for dtype in (types.uint64, types.uint8))
    return {
        f"ll_{op}": (ll_words_kernel(personalized), (*of_words, *_how, *_tables)),
        f"ll_{op}[bytes]": (ll_bytes_kernel(personalized), (*of_bytes, *_how, *[types.int64] * 3, *_tables)),
    }
