"""All-gather by LL: every word says itself that it has arrived. The fastest for small messages.

Lines     lines[half, k], on every rank: what rank k sends here, as LL words (``shmemkit.device.ll``). Written
          by rank k only, over NVLink
Counters  calls[y, c], local: how often chunk c, CHUNK bytes of a segment, has gone to the y-th peer; it gives
          the flag and the half. In device memory, so that a replayed graph counts on

  block (b, y), with peer = me + y modulo the ranks, for its chunks c = b, b + gridDim.x, ...:
          1. store my chunk to lines[half, me] on the peer, with the flag
          2. poll lines[half, peer] until all words have the flag, and store the data to my output
          3. add 1 to the chunk's counter

A chunk is always the same bytes of the lines, and both sides count it alike, whatever the lengths of the
calls. So the flags of a word only grow, and a word that has the flag has the data of this call, until the
flags begin again after 2**32 calls.

No race on the lines, although nobody acknowledges: I write to half h of a chunk again two calls with it
later. In the one between, the peer's chunk has come, which the peer sends in a launch that begins after its
launch before has ended: it has read what half h held. No deadlock: a block sends before it waits, and waits
for what the peer's block of the same number sends; all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import copy_block, ll_pack_block, ll_recv_block, num_ranks, rank, symm_at
from shmemkit.kernels.method import Method

CHUNK = 4096  # bytes of a segment that a block sends at once: 8 for each of 512 threads
LINES = CHUNK // 8  # each of two words
MAX_BLOCKS = 108  # of a grid: resident on A100 and later, one per multiprocessor


@cuda.jit
def ll_all_gather(x, out, in_place, chunk, lines, calls):
    """Gather the `x` of all ranks in `out`, by rank; x.size may be anything up to what the lines hold.

    x, out    1-D, uint64 or uint8: x.size elements, and n_ranks times as many
    in_place  whether x is my part of out
    chunk     elements of a chunk, which are CHUNK bytes
    lines     uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
    calls     uint64 (n_ranks, chunks of the capacity), zeros at first
    grid      (any number, n_ranks), the same on all ranks; any number of threads
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
            ll_pack_block(there[call & 1, me, 2 * LINES * b :], part, call + 1)
        b += cuda.gridDim.x
        begin = b * chunk
    if y == 0:
        return
    b = cuda.blockIdx.x
    begin = b * chunk
    while begin < size:
        call = calls[y, b]
        part = theirs[begin : min(begin + chunk, size)]
        ll_recv_block(part, lines[call & 1, peer, 2 * LINES * b :], call + 1)
        b += cuda.gridDim.x
        begin = b * chunk
    cuda.syncthreads()  # all threads have read the counters
    if cuda.threadIdx.x == 0:
        b = cuda.blockIdx.x
        while b * chunk < size:
            calls[y, b] += 1
            b += cuda.gridDim.x


class LL(Method):
    """The method "ll" of ``AllGather``."""

    def prepare(self, max_nbytes):
        n = self.world.n_ranks
        chunks = max(1, -(-max_nbytes // (n * CHUNK)))
        self.lines = self.zeros((2, n, 2 * LINES * chunks), "uint64", "all_gather.ll.lines")
        self.calls = self.world.xp.zeros((n, chunks), "uint64")
        for dtype in ("uint8", "uint64"):
            nothing = self.world.xp.empty(0, dtype)
            self._bind(chunks, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // CHUNK), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        n = self.world.n_ranks
        grid = min(chunks, max(1, MAX_BLOCKS // n)), n
        elements = CHUNK // x.itemsize
        return self.launch(ll_all_gather, grid, x, out, in_place, elements, self.lines, self.calls)


_words, _table = types.Array(types.uint64, 3, "C"), types.Array(types.uint64, 2, "C")
GPU_KERNELS = {
    f"ll_all_gather[{dtype}]": (
        ll_all_gather,
        (*[types.Array(dtype, 1, "C")] * 2, types.boolean, types.int64, _words, _table),
    )
    for dtype in (types.uint8, types.uint64)
}
