"""All-gather by LL or LL128: lines that say themselves that they have arrived. The fastest for small and
middling messages.

Lines     lines[half, k], on every rank: what rank k sends here, packed (``shmemkit.device.ll``, ``ll128``).
          Written by rank k only, over NVLink
Counters  calls[y, c], local: how often chunk c of a segment has gone to the peer me + 1 + y; it gives the
          flag and the half. In device memory, so that a replayed graph counts on

  block (b, y), with peer = me + 1 + y modulo the ranks, for its chunks c = b, b + gridDim.x, ...:
          1. store my chunk to lines[half, me] on the peer, with the flag
          2. add 1 to the chunk's counter; copy a share of the chunk to my own part of the output
          3. poll lines[half, peer] until they have the flag, and store the data to my output

A chunk is always the same bytes of the lines, and both sides count it alike, whatever the lengths of the
calls. So the flags of a line only grow, and a line that has the flag has the data of this call (until the
flags of LL begin again after 2**32 calls).

No race on the lines, although nobody acknowledges: I write to half h of a chunk again two calls with it
later. In the one between, the peer's chunk has come, which the peer sends when its launch before has ended
(after griddepcontrol_wait): it has read what half h held. No deadlock: a block sends all that it has to send
before it waits, and all blocks are resident. That the next launch begins early (PDL) changes neither: its
blocks come when all of this one are resident, and touch nothing until these have ended.

``ll_all_gather`` is for arrays of whole, aligned words of 8 bytes: a thread for each, and a third of the
instructions. ``ll_all_gather_bytes`` is for all others: lines, chunks and counters are
the same, so that the ranks need not choose alike.
"""

from numba import cuda, types

from shmemkit.device import (
    copy_block,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll128_pack_block,
    ll128_recv_block,
    ll_load,
    ll_pack_block,
    ll_recv_block,
    ll_store,
    num_ranks,
    rank,
    symm_at,
)
from shmemkit.kernels.method import Method


@cuda.jit
def ll_all_gather(x, out, in_place, lines, calls):
    """Gather the `x` of all ranks in `out`, by rank.

    x, out    uint64, 1-D: x.size elements, any number up to what the lines hold, and n_ranks times as many
    in_place  whether x is my part of out
    lines     uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
    calls     uint64 (peers, chunks of the capacity), zeros at first
    grid      (any number, peers): n_ranks - 1, but at least 1
    block     one-dimensional; an element of a chunk for each thread
    """
    b, y, t, threads = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
    me, n, size = rank(), num_ranks(), x.size
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
            value = x[i]  # before the counter, so that both are on their way at once
            call = calls[y, c] + 1
            ll_store(there[call & 1, me], i, value, call)
            if y == 0 and not in_place:
                out[me * size + i] = value
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
            out[peer * size + i] = ll_load(lines[call & 1, peer], i, call)
        c += cuda.gridDim.x


def _kernel(pack, recv):
    @cuda.jit
    def all_gather(x, out, own, chunk, words, lines, calls):
        """Gather the `x` of all ranks in `out`, by rank, as ``ll_all_gather``, with

        x, out  uint64 or uint8
        own     elements of a chunk that each of its blocks copies to my part of out; 0 where that is x
        chunk   elements of a chunk; what they are packed into are `words` words
        """
        y, n, size = cuda.blockIdx.y, num_ranks(), x.size
        me = rank()
        peer = me + 1 + y
        if peer >= n:
            peer -= n
        mine, theirs = out[me * size : (me + 1) * size], out[peer * size : (peer + 1) * size]
        there = symm_at(lines, peer)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        b = cuda.blockIdx.x
        begin = b * chunk
        while begin < size:
            call = calls[y, b] + 1
            pack(there[call & 1, me, words * b :], x[begin : min(begin + chunk, size)], call)
            b += cuda.gridDim.x
            begin = b * chunk
        cuda.syncthreads()  # all threads have read the counters
        if cuda.threadIdx.x == 0:
            b = cuda.blockIdx.x
            while b * chunk < size:
                calls[y, b] += 1
                b += cuda.gridDim.x
        if own:
            b = cuda.blockIdx.x
            begin = b * chunk
            while begin < size:
                first = begin + own * y
                last = min(first + own, min(begin + chunk, size))
                if first < last:
                    copy_block(mine[first:last], x[first:last])
                b += cuda.gridDim.x
                begin = b * chunk
        cuda.syncthreads()
        b = cuda.blockIdx.x
        begin = b * chunk
        while begin < size:
            call = calls[y, b]
            part = theirs[begin : min(begin + chunk, size)]
            recv(part, lines[call & 1, peer, words * b :], call)
            b += cuda.gridDim.x
            begin = b * chunk

    return all_gather


ll_all_gather_bytes = _kernel(ll_pack_block, ll_recv_block)
ll128_all_gather = _kernel(ll128_pack_block, ll128_recv_block)


class LL(Method):
    """The method "ll" of ``AllGather``: two words of lines for 8 bytes."""

    name, nvlink = "ll", False
    kernel_of = {"uint64": ll_all_gather, "uint8": ll_all_gather_bytes}
    unit, words = 8, 2  # bytes of a unit, words it is packed into
    threads = 128
    blocks = 2  # of a grid, at most, for each multiprocessor

    @property
    def chunk(self):
        """Bytes: 8 for each thread."""
        return 8 * self.threads

    def prepare(self, max_nbytes):
        world = self.world
        world.check_reach(f"all_gather {self.name}", nvlink=self.nvlink)
        n, self.peers = world.n_ranks, max(1, world.n_ranks - 1)
        chunks = max(1, -(-max_nbytes // (n * self.chunk)))
        words = chunks * (self.chunk // self.unit * self.words)
        self.lines = self.zeros((2, n, words), "uint64", "all_gather.lines")
        self.calls = world.xp.zeros((self.peers, chunks), "uint64")
        self.most = dict.fromkeys(self.kernel_of, 1)  # blocks for a peer
        for dtype in self.kernel_of:
            nothing = world.xp.empty(0, dtype)
            fit = self._bind(1, nothing, nothing, False).resident_blocks
            most = min(fit, self.blocks * world.backend.multiprocessors) // self.peers
            self.most[dtype] = max(1, most)
            self._bind(chunks, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // self.chunk), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        dtype = x.dtype.name
        kernel, grid = self.kernel_of[dtype], (min(chunks, self.most[dtype]), self.peers)
        if kernel is ll_all_gather:
            how = (in_place,)
        else:
            chunk = self.chunk // x.itemsize
            own = 0 if in_place or self.world.n_ranks == 1 else -(-chunk // self.peers) + 15 & -16
            how = own, chunk, self.chunk // self.unit * self.words
        return self.launch(kernel, grid, x, out, *how, self.lines, self.calls, pdl=True)


class LL128(LL):
    """The method "ll128" of ``AllGather``: 128 words of lines for 960 bytes."""

    name, nvlink = "ll128", True
    kernel_of = {"uint64": ll128_all_gather, "uint8": ll128_all_gather}
    unit, words = 960, 128
    threads = 192
    chunk = 6 * 960  # bytes: 960 for each warp
    blocks = 5


_words, _table = types.Array(types.uint64, 3, "C"), types.Array(types.uint64, 2, "C")


def _arrays(dtype):
    return types.Array(dtype, 1, "C"), types.Array(dtype, 1, "C")


GPU_KERNELS = {
    "ll_all_gather": (ll_all_gather, (*_arrays(types.uint64), types.boolean, _words, _table)),
} | {
    f"{name}[{dtype}]": (kernel, (*_arrays(dtype), types.int64, types.int64, types.int64, _words, _table))
    for name, kernel, dtype in (
        ("ll_all_gather_bytes", ll_all_gather_bytes, types.uint8),
        ("ll128_all_gather", ll128_all_gather, types.uint8),
        ("ll128_all_gather", ll128_all_gather, types.uint64),
    )
}
