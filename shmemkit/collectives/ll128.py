"""LL128 exchanges: all-gather, reduce-scatter, and one-shot all-reduce. Each rank sends all ranks x, or each
of them another segment of x. What arrives is stored by rank, or combined. (All-to-all has a kernel of its
own.)

Tiles     480 bytes of what a rank gets, in the registers of a warp (``shmemkit.device.packets.ll128_tiles``)
Slots     slots[buffer, k], on every rank: the tiles of rank k, in lines of 128 bytes. Only rank k writes
          them, over NVLink
Epochs    epochs[i], local: of tile i. The epoch is the flag and selects the buffer. Device-resident, so
          graph-safe

  a warp, for its tiles i in ascending order. Steps 1 and 2 of the next tile come before step 3, so that
  packets are under way while the warp waits:
          1. load tile i of what each rank gets; store it to slots[buffer, me] on that rank, with the flag.
             The rank sends to itself, too
          2. add 1 to the tile's epoch
          3. poll tile i in slots[buffer] of all ranks at once, until all have the flag. Store the tiles to
             the segments of the output, or combine them in the order of the ranks and store the result

All ranks combine in the same order. So the bits are the same in every run, and an all-reduce has the same
bits on all ranks.

No race: the double-buffer lemma (docs/protocols.md). x may lie in out where the result goes: a warp loads its
tile before it stores the result, and no other warp reads that tile. (What is loaded beyond an end is not
stored.) No deadlock: ascending-order progress.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll128_load_tiles,
    ll128_store_tiles,
    load_tile,
    rank,
    store_tile,
    symm_at,
)

from .packet_tiles import (
    Exchange,
    combining,
    copying,
    kernels_of,
    loading_segments,
    storing_segments,
    tiles_of,
    words_of,
)


@functools.cache
def ll128_kernel(n, personalized, op=None, dtype=None):
    """-> the kernel of `n` ranks. `personalized`: x has a segment for each rank. With `op`, as "sum", it
    combines what arrives, of `dtype`, a name as "float16"."""
    load = loading_segments(n) if personalized else _loading_one(n)
    store = storing_segments(n) if op is None else _storing_result(op, dtype, n)

    @cuda.jit(device=True)
    def send(x, size, slots, epochs, i, me):
        """Steps 1 and 2 -> the flag"""
        epoch = types.uint32(epochs[i] + 1)
        ll128_store_tiles(slots, n * (epoch & 1) + me, i, load(x, size, i), epoch)
        cuda.syncwarp()  # all threads have read the counter
        if cuda.threadIdx.x & 31 == 0:
            epochs[i] = epoch
        return epoch

    @cuda.jit
    def ll128(x, out, size, tiles, slots, epochs):
        """Send each rank `x`, or its segment of it, to `out`.

        x, out  complex128, uint64 or uint8, as of ``load_tile``; x has n segments if they are personalized,
                else one; out has n, or one if they are combined. They may be the same, or one a segment of
                the other, as the kinds of collectives allow it
        size    elements of a segment
        tiles   of 480 bytes, which it has
        slots   uint64 (2 * n, words of the capacity), symmetric, zeros at first
        epochs   uint32 (tiles of the capacity,), zeros at first
        grid    any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        warps, t = cuda.blockDim.x >> 5, cuda.threadIdx.x
        i, me = types.uint32(cuda.blockIdx.x * warps + (t >> 5)), rank()
        griddepcontrol_wait(x, out, size, symm_at(slots, 0), epochs, me, i)
        griddepcontrol_launch_dependents()
        step, done, epoch, sent = types.uint32(warps * cuda.gridDim.x), i, types.uint32(0), types.uint32(0)
        while done < tiles:
            if i < tiles:
                sent = send(x, size, slots, epochs, i, me)
            if done < i:
                store(out, size, done, ll128_load_tiles(slots, n * (epoch & 1), n, done, epoch))
                done = types.uint32(done + step)
            i, epoch = types.uint32(i + step), sent

    return ll128


def _loading_one(n):
    copies = copying(n)

    @cuda.jit(device=True)
    def load(x, size, i):
        return copies(load_tile(x, i))

    return load


def _storing_result(op, dtype, n):
    combine = combining(op, dtype, n)

    @cuda.jit(device=True)
    def store(out, size, i, tiles):
        store_tile(out, i, combine(tiles))

    return store


class LL128(Exchange):
    """A method by LL128."""

    def prepare_slots(self, n_bytes):
        tiles, n = tiles_of(n_bytes), self.world.n_ranks
        self.check(self.name, 2 * n * tiles)
        self.slots = self.zeros((2 * n, words_of(tiles)), "uint64", f"{self.name.replace(' ', '.')}.slots")
        self.epochs = self.world.xp.zeros(tiles, "uint32")

    def _bind(self, x, out, segment, dtype=None):
        kernel = ll128_kernel(self.world.n_ranks, self.personalized, self.op, dtype)
        tiles = tiles_of(segment)
        args = x, out, segment // out.itemsize, tiles, self.slots, self.epochs
        return self.launch_tiles(kernel, tiles, *args)


_tables = types.Array(types.uint64, 2, "C"), types.Array(types.uint32, 1, "C")


def gpu_kernels(op, personalized, combined):
    """-> the GPU_KERNELS of a module whose method is by LL128, for the collective `op`"""
    more = types.int64, types.int64, *_tables
    return kernels_of(f"ll128_{op}", ll128_kernel, more, personalized, combined)
