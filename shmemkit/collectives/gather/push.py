"""Gather by push: stores into the root's memory, and a full signal for each chunk. For larger messages.

Parts     what one rank gives is cut into as many parts as there are blocks per rank
Scratch   scratch[buffer, k, b], on the root: part b of what rank k gives. Only rank k writes it
Signals   full[k, b], on the root: how much of part b of rank k is there. Only rank k sets it
          empty[b], on every other rank: the last epoch whose part b of this rank the root has read. Only
          the root sets it
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer. Device-resident, so graph-safe

  block (b, 0), on a rank that sends:
          1. wait until empty[b] is at least the epoch less 2               acquire, sys: the buffer is empty
             for each chunk of part b:
          2. copy the chunk to scratch[buffer, me, b] on the root, syncthreads
          3. set full[me, b] there (``chunked_transfer.put``)               release, sys: publishes the chunk
  block (b, y), on the root, with peer = root + y modulo the ranks:
     y > 0:  for each chunk:
          1. wait for it at full[peer, b]                                   acquire, sys: sees the chunk
          2. copy it from scratch[buffer, peer, b] to the output; syncthreads
             after the last one:
          3. set empty[b] on the peer to the epoch                          release, sys: after the reads
     y = 0:  copy part b of the root's own array to the output
  all:    add 1 to the epoch

No race: the credit lemma (docs/protocols.md), with two buffers. No deadlock: a sender waits for what the
root did two epochs before; the root waits for senders, which wait for nothing of this epoch; all blocks are
resident.

Few blocks send: the blocks of all ranks share the root's links, and the root has one for each of them.
"""

from numba import cuda, types

from shmemkit.device import copy_block, notify, num_ranks, rank, wait_block

from ..chunked_transfer import CHUNKS, chunk_of, put, receive
from ..method import Method
from ..push import cut, parts_of


@cuda.jit
def push_gather(x, out, in_place, root, part, chunk, scratch, full, empty, epochs):
    """Gather the `x` of all ranks in the root's `out`, by rank.

    x, out    uint8, 1-D: out has n_ranks times as many elements, and counts on the root only
    in_place  whether x is the root's part of out
    part      elements of a part: gridDim.x of them are x
    chunk     elements of a chunk, a multiple of 8192: CHUNKS or fewer of them are a part
    scratch   uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
    full   uint64 (n_ranks, parts at most), symmetric, zeros at first
    empty      uint64 (parts at most,), symmetric, zeros at first
    epochs     uint64 (n_ranks or 1, parts at most), zeros at first
    grid      (parts, n_ranks on the root, else 1)
    """
    me, n, size, b, y = rank(), num_ranks(), x.size, cuda.blockIdx.x, cuda.blockIdx.y
    peer = root + y
    if peer >= n:
        peer -= n
    begin, end = min(b * part, size), min((b + 1) * part, size)
    epoch = epochs[y, b] + 1
    buffer, base = epoch & 1, CHUNKS * epoch
    if me != root:
        if epoch > 2:
            wait_block(empty[b:], 1, "sys", "acquire", epoch - 2)
        there = scratch[buffer, me, b, : end - begin]
        put(there, x[begin:end], full[me, b:], base, chunk, root)
    elif y > 0:
        theirs = out[peer * size + begin : peer * size + end]
        receive(theirs, scratch[buffer, peer, b], full[peer, b:], base, chunk)
    elif not in_place:
        copy_block(out[me * size + begin : me * size + end], x[begin:end])
    cuda.syncthreads()  # all threads have read the counter, and the scratch
    if cuda.threadIdx.x == 0:
        if peer != me and me == root:
            notify(empty[b:], peer, epoch, "set", "sys")
        epochs[y, b] = epoch


class Push(Method):
    """The method "push" of ``Gather``.

    part, chunk  bytes that are worth a block, and a signal
    senders      blocks that send to the root, at most, or one of each rank; it has twice as many
    """

    part, chunk, senders = 1 << 15, 1 << 17, 48

    def prepare(self, max_nbytes, root):
        world, n = self.world, self.world.n_ranks
        world.check_reach("gather push")
        self.root, self.ranks = root, n if world.rank == root else 1
        self.blocks, capacity = parts_of(max_nbytes, n, max(1, self.senders // max(1, n - 1)), self.part)
        self.scratch = self.empty((2, n, self.blocks, capacity), "uint8", "gather.push.scratch")
        self.full = self.zeros((n, self.blocks), "uint64", "gather.push.full")
        self.empty_signals = self.zeros(self.blocks, "uint64", "gather.push.empty")
        self.epochs = world.xp.zeros((self.ranks, self.blocks), "uint64")
        nothing = world.xp.empty(0, "uint8")
        self._bind(self.blocks, nothing, nothing, False, 0)

    def bind(self, x, out, in_place):
        x, out = x.view("uint8"), out.view("uint8")
        parts, part = cut(x.size, self.blocks, self.part)
        return self._bind(parts, x, out, in_place, part)

    def _bind(self, parts, x, out, in_place, part):
        args = x, out, in_place, self.root, part, chunk_of(part, self.chunk)
        args += self.scratch, self.full, self.empty_signals, self.epochs
        return self.launch(push_gather, (parts, self.ranks), *args)


_bytes, (_one, _two) = types.Array(types.uint8, 1, "C"), (types.Array(types.uint64, d, "C") for d in (1, 2))
_signature = (
    *(_bytes, _bytes, types.boolean, types.int64, types.int64, types.int64),
    *(types.Array(types.uint8, 4, "C"), _two, _one, _two),
)
GPU_KERNELS = {"push_gather": (push_gather, _signature)}
