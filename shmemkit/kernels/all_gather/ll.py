"""All-gather by LL or LL128: lines that say themselves that they have arrived. The fastest for small and
middling messages.

Lines     lines[half, k], on every rank: what rank k sends here, packed (``shmemkit.device.ll``, ``ll128``).
          Written by rank k only, over NVLink
Counters  calls[y, c], local: how often chunk c of a segment has gone to the y-th peer; it gives the flag and
          the half. In device memory, so that a replayed graph counts on

  block (b, y), with peer = me + y modulo the ranks, for its chunks c = b, b + gridDim.x, ...:
          1. store my chunk to lines[half, me] on the peer, with the flag
          2. poll lines[half, peer] until they have the flag, and store the data to my output
          3. add 1 to the chunk's counter
  (y = 0: copies my own part)

A chunk is always the same bytes of the lines, and both sides count it alike, whatever the lengths of the
calls. So the flags of a line only grow, and a line that has the flag has the data of this call (until the
flags of LL begin again after 2**32 calls).

No race on the lines, although nobody acknowledges: I write to half h of a chunk again two calls with it
later. In the one between, the peer's chunk has come, which the peer sends in a launch that begins after its
launch before has ended: it has read what half h held. No deadlock: a block sends before it waits, and waits
for what the peer's block of the same number sends; all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import (
    copy_block,
    ll128_pack_block,
    ll128_recv_block,
    ll_pack_block,
    ll_recv_block,
    num_ranks,
    rank,
    symm_at,
)
from shmemkit.kernels.method import Method


def _kernel(pack, recv):
    @cuda.jit
    def all_gather(x, out, in_place, chunk, words, lines, calls):
        """Gather the `x` of all ranks in `out`, by rank; x.size may be anything up to what the lines hold.

        x, out    1-D, uint64 or uint8: x.size elements, and n_ranks times as many
        in_place  whether x is my part of out
        chunk     elements of a chunk; what they are packed into are `words` words
        lines     uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
        calls     uint64 (n_ranks, chunks of the capacity), zeros at first
        grid      (any number, n_ranks), the same on all ranks
        """
        y, n, size = cuda.blockIdx.y, num_ranks(), x.size
        me = rank()
        peer = me + y
        if peer >= n:  # a remainder would be a division, of a good part of a microsecond
            peer -= n
        theirs, there = out[peer * size : (peer + 1) * size], symm_at(lines, peer)
        b = cuda.blockIdx.x
        begin = b * chunk
        while begin < size:
            part = x[begin : min(begin + chunk, size)]
            if y == 0:
                if not in_place:
                    copy_block(theirs[begin : begin + part.size], part)
            else:
                call = calls[y, b]
                pack(there[call & 1, me, words * b :], part, call + 1)
            b += cuda.gridDim.x
            begin = b * chunk
        if y == 0:
            return
        b = cuda.blockIdx.x
        begin = b * chunk
        while begin < size:
            call = calls[y, b]
            part = theirs[begin : min(begin + chunk, size)]
            recv(part, lines[call & 1, peer, words * b :], call + 1)
            b += cuda.gridDim.x
            begin = b * chunk
        cuda.syncthreads()  # all threads have read the counters
        if cuda.threadIdx.x == 0:
            b = cuda.blockIdx.x
            while b * chunk < size:
                calls[y, b] += 1
                b += cuda.gridDim.x

    return all_gather


ll_all_gather = _kernel(ll_pack_block, ll_recv_block)
ll128_all_gather = _kernel(ll128_pack_block, ll128_recv_block)


class LL(Method):
    """The method "ll" of ``AllGather``: two words of lines for 8 bytes."""

    protocol = ll_all_gather, 8, 2  # kernel, bytes of a unit, words it is packed into
    threads = 128
    chunk = 1024  # bytes: 8 for each thread
    max_blocks = 264  # of a grid: two for each multiprocessor of H200

    def __init__(self, world, max_nbytes):
        if world.backend.compute_capability < (9, 0):
            self.max_blocks = 104  # all that need more registers there are resident on A100
        super().__init__(world, max_nbytes)

    def prepare(self, max_nbytes):
        self.world.check_reach("all_gather ll")
        n, (_, unit, words) = self.world.n_ranks, self.protocol
        chunks = max(1, -(-max_nbytes // (n * self.chunk)))
        self.lines = self.zeros((2, n, chunks * (self.chunk // unit * words)), "uint64", "all_gather.lines")
        self.calls = self.world.xp.zeros((n, chunks), "uint64")
        for dtype in ("uint8", "uint64"):
            nothing = self.world.xp.empty(0, dtype)
            self._bind(chunks, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // self.chunk), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        n, (kernel, unit, words) = self.world.n_ranks, self.protocol
        grid = min(chunks, max(1, self.max_blocks // n)), n
        of_chunk = self.chunk // x.itemsize, self.chunk // unit * words
        return self.launch(kernel, grid, x, out, in_place, *of_chunk, self.lines, self.calls)


class LL128(LL):
    """The method "ll128" of ``AllGather``: 128 words of lines for 960 bytes."""

    protocol = ll128_all_gather, 960, 128
    threads = 256
    chunk = 8 * 960  # bytes: 960 for each warp

    def prepare(self, max_nbytes):
        self.world.check_reach("all_gather ll128", nvlink=True)
        super().prepare(max_nbytes)


_words, _table = types.Array(types.uint64, 3, "C"), types.Array(types.uint64, 2, "C")
GPU_KERNELS = {
    f"{name}_all_gather[{dtype}]": (
        kernel,
        (*[types.Array(dtype, 1, "C")] * 2, types.boolean, types.int64, types.int64, _words, _table),
    )
    for dtype in (types.uint8, types.uint64)
    for name, kernel in (("ll", ll_all_gather), ("ll128", ll128_all_gather))
}
