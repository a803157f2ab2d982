"""Broadcast by LL128: the root stores its tiles to all others, in lines of 128 bytes. For middling
messages: the root sends n_ranks - 1 times the message.

Tiles     480 bytes of the array, in the registers of a warp (``shmemkit.device.packets.ll128_tiles``)
Chunks    of a tile for each warp of a block
Slots     slots[buffer], on every rank but the root: the tiles. Only the root writes them, over NVLink
Signals   empty[k, c], on the root: the last epoch whose chunk c rank k has read. Only rank k sets it
Epochs    epochs[c], local: of chunk c. The epoch is the flag and selects the buffer. Device-resident, so
          graph-safe

  block b, for its chunks c = b, b + gridDim.x, ..., on the root, each warp for its tile:
          1. load the tile, and meanwhile wait until empty[k, c] is at least the epoch less 2, for all k
                                                             acquire, sys: the buffer is empty
          2. store it to slots[buffer] of all others, with the flag, and to the output
  on another rank:
          1. poll the tile in slots[buffer] until it has the flag, and store it to the output; syncthreads
          2. set empty[me, c] on the root to the epoch                       release, sys: after the reads
  both:   syncthreads, and add 1 to the chunk's epoch

No race: the credit lemma (docs/protocols.md), with two buffers. So the root may be two epochs ahead, and
packets of later epochs arrive while other ranks are late. x may be out: a warp loads its tile before it
stores it. What other warps load of the tile, beyond the end of theirs, they do not store. No deadlock: the
root waits for what the others did two epochs before; they wait for the root, which waits for nothing of
this epoch; all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll128_load_some,
    ll128_store_tile,
    load_tile,
    notify,
    num_ranks,
    rank,
    store_tile,
    symm_at,
    wait,
)

from ..packet_tiles import Tiles, tiles_of, words_of


@cuda.jit
def ll128_broadcast(x, out, in_place, root, tiles, capacity, slots, empty, epochs):
    """Store the root's `x` in `out`.

    x, out    complex128, uint64 or uint8, as of ``load_tile``, of the same size; x counts on the root only
    in_place  whether x is out
    tiles     of 480 bytes, which it has
    capacity  tiles that it may have
    slots     uint64 (2 * words of the capacity,), symmetric, zeros at first
    empty      uint64 (n_ranks, chunks of the capacity), symmetric, zeros at first
    epochs     uint64 (chunks of the capacity,), zeros at first
    grid      any number of blocks of whole warps, one-dimensional, as the blocks are; up to 33 ranks
    """
    warps, t, me, n = cuda.blockDim.x >> 5, cuda.threadIdx.x, rank(), num_ranks()
    c, y = cuda.blockIdx.x, 1 + (t & 31)
    waited = me + y if me + y < n else me + y - n
    griddepcontrol_wait(x, out, root, tiles, capacity, symm_at(slots, 0), empty, epochs, waited)
    griddepcontrol_launch_dependents()
    while c * warps < tiles:
        i, epoch = c * warps + (t >> 5), epochs[c] + 1
        at, flag = i + capacity if epoch & 1 else i, types.uint32(epoch)
        if i < tiles:
            if me == root:
                words = load_tile(x, i)
                if (epoch > 2) & (y < n):
                    wait(empty[waited, c:], 1, "sys", "acquire", epoch - 2)
                cuda.syncwarp()
                s = 1
                while s < n:
                    ll128_store_tile(slots, at, words, flag, me + s if me + s < n else me + s - n)
                    s += 1
                if not in_place:
                    store_tile(out, i, words)
            else:
                (words,) = ll128_load_some(slots, (at,), flag)
                store_tile(out, i, words)
        cuda.syncthreads()  # all threads have read the counter, and the slots
        if t == 0:
            if me != root:
                notify(empty[me, c:], root, epoch, "set", "sys")
            epochs[c] = epoch
        c += cuda.gridDim.x


class LL128(Tiles):
    """The method "ll128" of ``Broadcast``."""

    threads, blocks = 128, 8  # a signal says that four tiles are read
    most_ranks = 33  # a thread of a warp for each other one

    def prepare(self, max_nbytes, root):
        self.root, xp = root, self.world.xp
        self.capacity = tiles_of(max_nbytes)
        self.check("broadcast ll128", 2 * self.capacity)
        chunks = -(-self.capacity // (self.threads // 32))
        self.slots = self.zeros((2 * words_of(self.capacity),), "uint64", "broadcast.ll128.slots")
        self.empty_signals = self.zeros((self.world.n_ranks, chunks), "uint64", "broadcast.ll128.empty")
        self.epochs = xp.zeros(chunks, "uint64")
        self.bind_kinds(self._bind, False, 0)

    def bind(self, x, out, in_place):
        return self._bind(*self.wide(x, out, x.nbytes), in_place, x.nbytes)

    def _bind(self, x, out, in_place, n_bytes):
        tiles = tiles_of(n_bytes)
        args = in_place, self.root, tiles, self.capacity, self.slots, self.empty_signals, self.epochs
        return self.launch_tiles(ll128_broadcast, tiles, x, out, *args)


_arrays = [types.Array(types.uint64, d, "C") for d in (1, 2, 1)]
GPU_KERNELS = {
    f"ll128_broadcast[{words}]": (
        ll128_broadcast,
        (*[types.Array(words, 1, "C")] * 2, types.boolean, *[types.int64] * 3, *_arrays),
    )
    for words in (types.complex128, types.uint64, types.uint8)
}
