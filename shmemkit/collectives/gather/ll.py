"""Gather by LL: all ranks store flag-in-data packets to the root. For small messages.

Slots     slots[buffer, k], on the root: the packets of rank k (``device.packets.ll``). Only rank k writes
          them, over NVLink
Signals   empty[c], on every rank but the root: the last epoch whose chunk c of this rank the root has read.
          Only the root sets it
Epochs    epochs[y, c], local: of chunk c, a word for each thread of a block: sent, or received from rank
          root + 1 + y modulo the ranks. Device-resident, so graph-safe

  block (b, 0), for its chunks c = b, b + gridDim.x, ..., on a rank that sends:
          1. wait until empty[c] is at least the epoch less 2               acquire, sys: the buffer is empty
          2. store the words to slots[buffer, me] on the root, with the flag
  block (b, y), on the root, with peer = root + 1 + y modulo the ranks:
          1. poll the words in slots[buffer, peer], and store them to the output; syncthreads
          2. set empty[c] on the peer to the epoch                          release, sys: after the reads
             the blocks of y = 0 also copy the root's own words
  all:    add 1 to the chunk's epoch

No race: the credit lemma (docs/protocols.md), with two buffers. The flags of a slot only grow, until the 32
bits of LL's flags wrap. No deadlock: a sender waits for what the root did two epochs before; the root waits
for senders, which wait for nothing of this epoch.
"""

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll_load,
    ll_store,
    load_word,
    n_words,
    notify,
    num_ranks,
    rank,
    span,
    store_word,
    symm_at,
    wait,
)

from ..method import Method

BLOCKS = 2  # of a grid, at most, for each multiprocessor


@cuda.jit
def ll_gather(x, out, in_place, root, slots, empty, epochs):
    """Gather the `x` of all ranks in the root's `out`, by rank.

    x, out    uint64 or uint8, 1-D: out has n_ranks times as many elements, and counts on the root only
    in_place  whether x is the root's part of out
    slots     uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
    empty      uint64 (chunks of the capacity,), symmetric, zeros at first
    epochs     uint64 (n_ranks - 1 or 1, chunks of the capacity), zeros at first
    grid      (any number, n_ranks - 1 on the root, else 1), but at least 1; one-dimensional blocks
    """
    b, y, t, threads = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.blockDim.x
    me, n, length, size = rank(), num_ranks(), x.size, n_words(x)
    peer = root + 1 + y
    if peer >= n:
        peer -= n
    there = symm_at(slots, root)
    griddepcontrol_wait(x, out, there, empty, epochs, me, size, peer)
    griddepcontrol_launch_dependents()
    c = b
    while c * threads < size:
        i, epoch = c * threads + t, epochs[y, c] + 1
        if i < size:
            if me != root:
                word = load_word(x, i)
                if epoch > 2:
                    wait(empty[c:], 1, "sys", "acquire", epoch - 2)
                ll_store(there[epoch & 1, me], i, word, epoch)
            else:
                if y == 0 and not in_place:
                    store_word(span(out, me * length, length), i, load_word(x, i))
                if peer != me:
                    word = ll_load(slots[epoch & 1, peer], i, epoch)
                    store_word(span(out, peer * length, length), i, word)
        cuda.syncthreads()  # all threads have read the counter, and the slots
        if t == 0:
            if me == root and peer != me:
                notify(empty[c:], peer, epoch, "set", "sys")
            epochs[y, c] = epoch
        c += cuda.gridDim.x


class LL(Method):
    """The method "ll" of ``Gather``."""

    threads = 128

    def prepare(self, max_nbytes, root):
        world = self.world
        world.check_reach("gather ll")
        self.root, n = root, world.n_ranks
        self.peers = max(1, n - 1) if world.rank == root else 1
        words = max(1, -(-max_nbytes // (8 * n)))
        chunks = -(-words // self.threads)
        self.slots = self.zeros((2, n, 2 * words), "uint64", "gather.ll.slots")
        self.empty_signals = self.zeros(chunks, "uint64", "gather.ll.empty")
        self.epochs = world.xp.zeros((self.peers, chunks), "uint64")
        for dtype in ("uint8", "uint64"):
            nothing = world.xp.empty(0, dtype)
            self._bind(chunks, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // (8 * self.threads)), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        most = max(1, BLOCKS * self.world.backend.multiprocessors // self.peers)
        args = x, out, in_place, self.root, self.slots, self.empty_signals, self.epochs
        return self.launch(ll_gather, (min(chunks, most), self.peers), *args, pdl=True)


_one, _two, _three = (types.Array(types.uint64, d, "C") for d in (1, 2, 3))
GPU_KERNELS = {
    f"ll_gather[{words}]": (
        ll_gather,
        (*[types.Array(words, 1, "C")] * 2, types.boolean, types.int64, _three, _one, _two),
    )
    for words in (types.uint64, types.uint8)
}
