"""Scatter by push: the root stores each rank's segment into its memory, with a full signal for each chunk.
For larger messages. (``gather/push.py`` is the way back.)

Parts     a segment is cut into as many parts as there are blocks that send to a rank
Scratch   scratch[buffer, b], on every rank but the root: part b of its segment. Only the root writes it
Signals   full[b], there: how much of part b is there. Only the root sets it
          empty[k, b], on the root: the last epoch whose part b rank k has read. Only rank k sets it
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer. Device-resident, so graph-safe

  block (b, y), on the root, with peer = root + y modulo the ranks:
     y > 0:  1. wait until empty[peer, b] is at least the epoch less 2       acquire, sys: the buffer is empty
             for each chunk of part b:
             2. copy the chunk to scratch[buffer, b] on the peer, syncthreads
             3. set full[b] there (``chunked_transfer.put``)                 release, sys: publishes the chunk
     y = 0:  copy part b of the root's own segment to its output
  block (b, 0), on another rank, for each chunk:
             1. wait for it at full[b]                                       acquire, sys: sees the chunk
             2. copy it from scratch[buffer, b] to the output; syncthreads
             after the last one:
             3. set empty[me, b] on the root to the epoch                    release, sys: after the reads
  all:    add 1 to the epoch

No race: the credit lemma (docs/protocols.md), with two buffers. No deadlock: the root waits for what the
others did two epochs before; they wait for the root, which waits for nothing of this epoch; all blocks are
resident.
"""

from numba import cuda, types

from shmemkit.device import copy_block, notify, num_ranks, rank, wait_block

from ..chunked_transfer import CHUNKS, chunk_of, put, receive
from ..method import Method
from ..push import cut, parts_of, senders_of


@cuda.jit
def push_scatter(x, out, in_place, root, part, chunk, scratch, full, empty, epochs):
    """Store this rank's segment of the root's `x` in `out`.

    x, out    uint8, 1-D: x has n_ranks times as many elements, and counts on the root only
    in_place  whether out is the root's segment of x
    part      elements of a part: gridDim.x of them are a segment
    chunk     elements of a chunk, a multiple of 8192: CHUNKS or fewer of them are a part
    scratch   uint8 (2, parts at most, elements of a part at most), symmetric
    full      uint64 (parts at most,), symmetric, zeros at first
    empty     uint64 (n_ranks, parts at most), symmetric, zeros at first
    epochs    uint64 (n_ranks or 1, parts at most), zeros at first
    grid      (parts, n_ranks on the root, else 1)
    """
    me, n, size, b, y = rank(), num_ranks(), out.size, cuda.blockIdx.x, cuda.blockIdx.y
    peer = root + y
    if peer >= n:
        peer -= n
    begin, end = min(b * part, size), min((b + 1) * part, size)
    epoch = epochs[y, b] + 1
    buffer, base = epoch & 1, CHUNKS * epoch
    if me != root:
        receive(out[begin:end], scratch[buffer, b], full[b:], base, chunk)
    elif y > 0:
        if epoch > 2:
            wait_block(empty[peer, b:], 1, "sys", "acquire", epoch - 2)
        its = x[peer * size + begin : peer * size + end]
        put(scratch[buffer, b, : end - begin], its, full[b:], base, chunk, peer)
    elif not in_place:
        copy_block(out[begin:end], x[me * size + begin : me * size + end])
    cuda.syncthreads()  # all threads have read the counter, and the scratch
    if cuda.threadIdx.x == 0:
        if me != root:
            notify(empty[me, b:], root, epoch, "set", "sys")
        epochs[y, b] = epoch


class Push(Method):
    """The method "push" of ``Scatter``.

    part, chunk  bytes that are worth a block, and a signal
    senders      blocks of the root that send, at most: one for each of H200's multiprocessors
    """

    part, chunk, senders = 1 << 13, 1 << 15, 132

    def prepare(self, max_nbytes, root):
        world, n = self.world, self.world.n_ranks
        world.check_reach("scatter push")
        self.root, self.ranks = root, n if world.rank == root else 1
        most = max(1, senders_of(world, self.senders) // n)
        self.parts, capacity = parts_of(max_nbytes, n, most, self.part)
        self.scratch = self.empty((2, self.parts, capacity), "uint8", "scatter.push.scratch")
        self.full = self.zeros(self.parts, "uint64", "scatter.push.full")
        self.empty_signals = self.zeros((n, self.parts), "uint64", "scatter.push.empty")
        self.epochs = world.xp.zeros((self.ranks, self.parts), "uint64")
        nothing = world.xp.empty(0, "uint8")
        self._bind(self.parts, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        parts, part = cut(out.size, self.parts, self.part)
        return self._bind(parts, x, out, in_place, part)

    def _bind(self, parts, x, out, in_place, part):
        args = x, out, in_place, self.root, part, chunk_of(part, self.chunk)
        args += self.scratch, self.full, self.empty_signals, self.epochs
        return self.launch(push_scatter, (parts, self.ranks), *args)


_bytes, (_one, _two) = types.Array(types.uint8, 1, "C"), (types.Array(types.uint64, d, "C") for d in (1, 2))
_signature = (
    *(_bytes, _bytes, types.boolean, types.int64, types.int64, types.int64),
    *(types.Array(types.uint8, 3, "C"), _one, _two, _two),
)
GPU_KERNELS = {"push_scatter": (push_scatter, _signature)}
