"""Broadcast by LL: the root stores flag-in-data packets to all others. For small messages.

Slots     slots[buffer], on every rank but the root: the packets (``device.packets.ll``). Only the root
          writes them, over NVLink
Signals   empty[k, c], on the root: the last epoch whose chunk c rank k has read. Only rank k sets it
Epochs    epochs[c], local: of chunk c, a word for each thread of a block. Device-resident, so graph-safe

  block b, for its chunks c = b, b + gridDim.x, ..., on the root:
          1. wait until empty[k, c] is at least the epoch less 2, for all k  acquire, sys
          2. store the words to slots[buffer] of all others, with the flag
  on another rank:
          1. poll the words in slots[buffer], and store them to the output; syncthreads
          2. set empty[me, c] on the root to the epoch                       release, sys: after the reads
  both:   add 1 to the chunk's epoch

No race: the credit lemma (docs/protocols.md), with two buffers. No deadlock: the root waits for what the
others did two epochs before; they wait for the root, which waits for nothing of this epoch.
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
    store_word,
    symm_at,
    wait,
)

from ..method import Method

BLOCKS = 1  # of a grid, at most, for each multiprocessor


@cuda.jit
def ll_broadcast(x, out, in_place, root, slots, empty, epochs):
    """Store the root's `x` in `out`.

    x, out    uint64 or uint8, 1-D, of the same size; x counts on the root only
    in_place  whether x is out
    slots     uint64 (2, words of the capacity), symmetric, zeros at first
    empty      uint64 (n_ranks, chunks of the capacity), symmetric, zeros at first
    epochs     uint64 (chunks of the capacity,), zeros at first
    grid      any number of blocks, one-dimensional, as the blocks are
    """
    t, threads = cuda.threadIdx.x, cuda.blockDim.x
    me, n, size = rank(), num_ranks(), n_words(out)
    griddepcontrol_wait(x, out, root, symm_at(slots, 0), empty, epochs, me, size)
    griddepcontrol_launch_dependents()
    c = cuda.blockIdx.x
    while c * threads < size:
        i, epoch = c * threads + t, epochs[c] + 1
        if me == root:
            if epoch > 2:
                y = t + 1
                while y < n:
                    peer = me + y if me + y < n else me + y - n
                    wait(empty[peer, c:], 1, "sys", "acquire", epoch - 2)
                    y += threads
            cuda.syncthreads()
            if i < size:
                word = load_word(x, i)
                y = 1
                while y < n:
                    peer = me + y if me + y < n else me + y - n
                    ll_store(symm_at(slots, peer)[epoch & 1], i, word, epoch)
                    y += 1
                if not in_place:
                    store_word(out, i, word)
        else:
            if i < size:
                store_word(out, i, ll_load(slots[epoch & 1], i, epoch))
            cuda.syncthreads()
            if t == 0:
                notify(empty[me, c:], root, epoch, "set", "sys")
        if t == 0:  # all threads have read the counter
            epochs[c] = epoch
        c += cuda.gridDim.x


class LL(Method):
    """The method "ll" of ``Broadcast``."""

    threads = 128

    def prepare(self, max_nbytes, root):
        self.world.check_reach("broadcast ll")
        self.root, words = root, max(1, -(-max_nbytes // 8))
        chunks = -(-words // self.threads)
        self.slots = self.zeros((2, 2 * words), "uint64", "broadcast.ll.slots")
        self.empty_signals = self.zeros((self.world.n_ranks, chunks), "uint64", "broadcast.ll.empty")
        self.epochs = self.world.xp.zeros(chunks, "uint64")
        for dtype in ("uint8", "uint64"):
            nothing = self.world.xp.empty(0, dtype)
            self._bind(1, nothing, nothing, False)

    def bind(self, x, out, in_place):
        return self._bind(-(-x.nbytes // (8 * self.threads)), x, out, in_place)

    def _bind(self, chunks, x, out, in_place):
        grid = min(chunks, BLOCKS * self.world.backend.multiprocessors)
        args = x, out, in_place, self.root, self.slots, self.empty_signals, self.epochs
        return self.launch(ll_broadcast, grid, *args, pdl=True)


_one, _two = types.Array(types.uint64, 1, "C"), types.Array(types.uint64, 2, "C")
GPU_KERNELS = {
    f"ll_broadcast[{words}]": (
        ll_broadcast,
        (*[types.Array(words, 1, "C")] * 2, types.boolean, types.int64, _two, _two, _one),
    )
    for words in (types.uint64, types.uint8)
}
