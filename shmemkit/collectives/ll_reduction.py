"""LL reductions: reduce-scatter and one-shot all-reduce. Each rank sends every other rank its segment of x,
or all of x, and combines what it receives.

Slots     slots[buffer, k], on every rank: the packets of rank k (``device.packets.ll``). Only rank k writes
          them, over NVLink
Epochs    epochs[c], local: of chunk c, a word for each thread of a block. The epoch is the flag and selects
          the buffer. Device-resident, so graph-safe

  block b, for its chunks c = b, b + gridDim.x, ...; each thread has one word of a chunk:
          1. for each other rank, the next one first: store the word of what it gets to slots[buffer, me] on
             it, with the flag
          2. add 1 to the chunk's epoch
          3. for all ranks k in ascending order: poll the word in slots[buffer, k] (the own word is in x) and
             combine it; store the result

All ranks combine in the order of the ranks. So the bits are the same in every run, and an all-reduce has the
same bits on all ranks.

No race: the double-buffer lemma (docs/protocols.md). out may be x, or the own segment of x: a thread sends
its word, if others get it, and reads it again, before it writes it. No deadlock: a block sends all its chunks
before it waits, and all blocks are resident.
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
                personalized, n_ranks times; out may be x, or the own segment of it
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
