"""All-to-all by LL: words that say themselves that they have arrived. The fastest for small messages.

Segments  x and out have one for each rank: segment k of x goes to rank k, segment k of out comes from it
Lines     lines[half, k], on every rank: what rank k sends here, packed (``shmemkit.device.ll``). Written by
          rank k only, over NVLink
Counters  calls[y, c], local: how often chunk c, of a word for each thread of a block, has gone to the peer
          me + 1 + y; it gives the flag and the half. In device memory, so that a replayed graph counts on

  block (b, y), with peer = me + 1 + y modulo the ranks, for its chunks c = b, b + gridDim.x, ...; a thread
  for its word of each:
          1. store the word of x's segment `peer` to lines[half, me] on the peer, with the flag; the blocks of
             y = 0 also copy that of my own segment to the output
          2. add 1 to the chunk's counter
          3. poll the word in lines[half, peer] until it has the flag, and store it to the output

No race on the lines, although nobody acknowledges: I write to half h of a chunk again two calls with it
later. In the one between, the peer's chunk has come, which the peer sends when its launch before has ended
(after griddepcontrol_wait): it has read what half h held. Both sides count a chunk alike, whatever the
lengths of the calls, so the flags of a line only grow, and a line that has the flag has the data of this call
(until the flags of LL begin again after 2**32 calls). No deadlock: a block sends all that it has to send
before it waits, and all blocks are resident. That the next launch begins early (PDL) changes neither: its
blocks come when all of this one are resident, and touch nothing until these have ended.

``ll_all_to_all`` is for segments of whole, aligned words of 8 bytes, ``ll_all_to_all_bytes`` for all others.
Lines, chunks and counters are the same, so that the ranks need not choose alike.
"""

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll_load,
    ll_store,
    load_word,
    num_ranks,
    rank,
    store_word,
    symm_at,
)
from shmemkit.kernels.method import Method


@cuda.jit(device=True)
def _load(x, k, segment, i):
    """Word i of segment k."""
    return x[k * segment + i]


@cuda.jit(device=True)
def _store(out, k, segment, i, word):
    out[k * segment + i] = word


@cuda.jit(device=True)
def _load_bytes(x, k, segment, i):
    return load_word(x[k * segment : (k + 1) * segment], i)


@cuda.jit(device=True)
def _store_bytes(out, k, segment, i, word):
    store_word(out[k * segment : (k + 1) * segment], i, word)


def _kernel(load, store):
    @cuda.jit
    def all_to_all(x, out, segment, size, lines, calls):
        """Exchange the segments of `x`, to `out`.

        x, out   uint64 or uint8, 1-D, of n_ranks segments; they do not overlap
        segment  elements of a segment, any number up to what the lines hold
        size     words of 8 bytes that it takes
        lines    uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
        calls    uint64 (peers, chunks of the capacity), zeros at first
        grid     (any number, peers): n_ranks - 1, but at least 1
        block    one-dimensional
        """
        b, y, t, threads = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
        me, n = rank(), num_ranks()
        peer = me + 1 + y
        if peer >= n:  # a remainder would be a division, of a good part of a microsecond
            peer -= n
        there = symm_at(lines, peer)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        c = b
        while c * threads < size:
            i = c * threads + t
            if i < size:
                word = load(x, peer, segment, i)  # before the counter, so that both are on their way at once
                call = calls[y, c] + 1
                ll_store(there[call & 1, me], i, word, call)
                if y == 0 and peer != me:
                    store(out, me, segment, i, load(x, me, segment, i))
            c += cuda.gridDim.x
        cuda.syncthreads()  # all threads have read the counters
        if t == 0:
            c = b
            while c * threads < size:
                calls[y, c] += 1
                c += cuda.gridDim.x
        cuda.syncthreads()
        c = b
        while c * threads < size:
            i = c * threads + t
            if i < size:
                call = calls[y, c]
                store(out, peer, segment, i, ll_load(lines[call & 1, peer], i, call))
            c += cuda.gridDim.x

    return all_to_all


ll_all_to_all = _kernel(_load, _store)
ll_all_to_all_bytes = _kernel(_load_bytes, _store_bytes)
KERNELS = {"uint64": ll_all_to_all, "uint8": ll_all_to_all_bytes}


class LL(Method):
    """The method "ll" of ``AllToAll``."""

    threads = 128
    blocks = 2  # of a grid, at most, for each multiprocessor

    def prepare(self, max_nbytes):
        world = self.world
        world.check_reach("all_to_all ll")
        n, self.peers = world.n_ranks, max(1, world.n_ranks - 1)
        words = max(1, -(-max_nbytes // (8 * n)))
        chunks = -(-words // self.threads)
        self.lines = self.zeros((2, n, 2 * words), "uint64", "all_to_all.ll.lines")
        self.calls = world.xp.zeros((self.peers, chunks), "uint64")
        self.most = dict.fromkeys(KERNELS, 1)  # blocks for a peer
        for dtype in KERNELS:
            nothing = world.xp.empty(0, dtype)
            fit = self._bind(1, nothing, nothing).resident_blocks
            most = min(fit, self.blocks * world.backend.multiprocessors) // self.peers
            self.most[dtype] = max(1, most)
            self._bind(chunks, nothing, nothing)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // (8 * self.world.n_ranks * self.threads)), x, out)

    def _bind(self, chunks, x, out):
        dtype, segment = x.dtype.name, x.size // self.world.n_ranks
        size = segment * x.itemsize + 7 >> 3
        grid = min(chunks, self.most[dtype]), self.peers
        return self.launch(KERNELS[dtype], grid, x, out, segment, size, self.lines, self.calls, pdl=True)


_rest = types.int64, types.int64, types.Array(types.uint64, 3, "C"), types.Array(types.uint64, 2, "C")
GPU_KERNELS = {
    name: (kernel, (*[types.Array(dtype, 1, "C")] * 2, *_rest))
    for name, kernel, dtype in (
        ("ll_all_to_all", ll_all_to_all, types.uint64),
        ("ll_all_to_all_bytes", ll_all_to_all_bytes, types.uint8),
    )
}
