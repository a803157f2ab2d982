"""Reductions by LL: each rank sends all others words that say themselves that they have arrived, and combines
what it gets. What reduce-scatter and all-reduce in one shot share: each rank gets another segment of x, or
all get all of it.

Lines     slots[buffer, k], on every rank: what rank k sends here, packed (``device.packets.ll``). Written by
          rank k only, over NVLink
Counters  epochs[c], local: how often chunk c, of a word for each thread of a block, has been sent; it gives
          the flag and the half. In device memory, so that a replayed graph counts on

  block b, for its chunks c = b, b + gridDim.x, ...; a thread for its word of each:
          1. for each other rank, from the next one on: store the word of what it gets to slots[buffer, me] on
             it, with the flag
          2. add 1 to the chunk's counter
          3. for all ranks k, in their order: poll the word in slots[buffer, k], my own is in x, and combine
          it;
             store the result

They combine in the order of the ranks, so the bits are the same in every run, and of an all-reduce on all
ranks.

No race: chunk c is always at the same place, and all ranks count it alike, whatever the lengths of the calls.
I write to half h of it again two calls with it later, and in the one between the chunks of all ranks have
come, which they send when their launches before have ended: they have read what half h held. out may be x,
or my segment of it: a thread has sent its word, if others get it, and reads it again, before it writes it. No
deadlock: a block sends all that it has to send before it waits; all blocks are resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll_load,
    ll_store,
    load_word,
    n_words,
    num_ranks,
    rank,
    reduction,
    span,
    store_word,
    symm_at,
)

from .method import Method

BLOCKS = 2  # of a grid, at most, for each multiprocessor


@functools.cache
def ll_combined_kernel(op, dtype, personalized):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"; `personalized`: x has a
    segment for each rank."""
    first, add, result = reduction(op, dtype)

    @cuda.jit
    def ll_combined(x, out, slots, epochs):
        """Combine what all ranks send in `out`.

        x, out  uint64 or uint8 (the bytes of elements of `dtype`), 1-D, x as large as out or, if it is
                personalized, n_ranks times; out may be x, or my segment of it
        slots   uint64 (2, n_ranks, words of the capacity), symmetric, zeros at first
        epochs   uint64 (chunks of the capacity,), zeros at first
        grid    any number of blocks, one-dimensional, as the blocks are
        """
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n, size, length = rank(), num_ranks(), n_words(out), out.size
        griddepcontrol_wait(x, out, symm_at(slots, 0), epochs, me, size)
        griddepcontrol_launch_dependents()
        c = b
        while c * threads < size:
            i = c * threads + t
            if i < size:
                epoch = epochs[c] + 1
                y = 1
                while y < n:
                    peer = me + y
                    if peer >= n:
                        peer -= n
                    at = peer * length if personalized else 0
                    word = load_word(span(x, at, length), i)
                    ll_store(symm_at(slots, peer)[epoch & 1, me], i, word, epoch)
                    y += 1
            c += cuda.gridDim.x
        cuda.syncthreads()  # all threads have read the counters
        if t == 0:
            c = b
            while c * threads < size:
                epochs[c] += 1
                c += cuda.gridDim.x
        cuda.syncthreads()
        at = me * length if personalized else 0
        mine = span(x, at, length)
        c = b
        while c * threads < size:
            i = c * threads + t
            if i < size:
                epoch = epochs[c]
                word = load_word(mine, i)
                total = first(word if me == 0 else ll_load(slots[epoch & 1, 0], i, epoch))
                k = 1
                while k < n:
                    total = add(total, word if me == k else ll_load(slots[epoch & 1, k], i, epoch))
                    k += 1
                store_word(out, i, result(total, n))
            c += cuda.gridDim.x

    return ll_combined


class LLCombined(Method):
    """A method by LL. A subclass has its `name`, as "reduce_scatter ll", and `personalized`, as above."""

    threads = 128

    def prepare(self, max_nbytes, op):
        world, n = self.world, self.world.n_ranks
        world.check_reach(self.name)
        self.op, words = op, max(1, -(-max_nbytes // (8 * n if self.personalized else 8)))
        self.slots = self.zeros((2, n, 2 * words), "uint64", f"{self.name.replace(' ', '.')}.slots")
        self.epochs = world.xp.zeros(-(-words // self.threads), "uint64")

    def bind(self, x, out, in_place, dtype):
        chunks = -(-out.nbytes // (8 * self.threads))
        grid = min(chunks, BLOCKS * self.world.backend.multiprocessors)
        kernel = ll_combined_kernel(self.op, dtype.name, self.personalized)
        return self.launch(kernel, grid, x, out, self.slots, self.epochs, pdl=True)


_slots, _epochs = types.Array(types.uint64, 3, "C"), types.Array(types.uint64, 1, "C")


def gpu_kernels(op, personalized):
    """-> the GPU_KERNELS of a module whose method is made of these, for the collective `op`."""
    return {
        f"ll_{op}[{how},{dtype},{words}]": (
            ll_combined_kernel(how, dtype, personalized),
            (*[types.Array(words, 1, "C")] * 2, _slots, _epochs),
        )
        for how, dtype, words in (
            ("sum", "bfloat16", types.uint64),
            ("sum", "float16", types.uint8),
            ("max", "float32", types.uint64),
            ("avg", "float64", types.uint64),
            ("prod", "int8", types.uint64),
        )
    }
