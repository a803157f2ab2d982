"""All-reduce by multimem, inside a node: the NVSwitch combines the data of all ranks (NVLink SHARP, NVLS).
There are two methods, for what the instruction supports: "sum" of int32, uint32, int64, uint64, float16,
bfloat16, float32 and float64, "max" and "min" of these but float32 and float64. float16 and bfloat16 are
added in float32 and rounded once (.acc::f32).

The switch chooses the order in which it adds floating-point numbers. The bits may differ from those of other
methods, and from run to run. The switch also decides what NaN becomes in "max" and "min".

``one_shot``: each rank loads the whole array, combined. For small messages. The switch combines for each rank
separately, so floating-point sums may differ between ranks in the last bit.

Inputs    inputs[buffer, b], on every rank: part b of its array, one part for each block. The rank writes it
          at its own address; all ranks load it at the multicast address
Signals   inputs_full[b, k], on every rank: the last epoch whose part b of rank k is in its inputs (only rank
          k sets it, on all ranks at once)
Epochs    epochs[b], local: of block b; the epoch selects the buffer. Device-resident, so graph-safe

  block b:
          1. copy part b of x to inputs[buffer, b]; syncthreads
          2. fence between the two addresses of inputs; set inputs_full[b, me] on all ranks to the epoch
                                                                     release, sys: publishes the part
          3. wait until inputs_full[b, k] >= epoch, for all k        acquire, sys: sees their parts
          4. load inputs[buffer, b], combined, and store it to the output; add 1 to the epochs

No race: the double-buffer lemma (docs/protocols.md), for part b. All ranks give it the same slot and count
its epochs alike, whatever the sizes of the calls. x may be out: a block copies its part of x before it writes
the same part of out.

``two_shot``: each rank loads one segment, combined, and stores the result on all ranks. For larger messages.
One rank combines an element, so all ranks get the same bits.

Segments  the array is cut into n_ranks segments, one for each rank; a segment is cut into as many parts as
          there are blocks. Block b has part b of all segments
Scratch   scratch[k, b], on every rank: part b of segment k of its array, later the combined part. The rank
          writes its inputs at its own address. Rank k loads and then stores it on all ranks at once, at the
          multicast address
Signals   inputs_full[b, k] and results_full[b, k], on every rank: the last epoch whose inputs of rank k are
          in its scratch, and whose results of segment k are here (only rank k sets them, on all ranks at
          once)
Epochs    epochs[b], local, as above

  block b:
          1. copy the parts b of x to scratch[:, b]; syncthreads
          2. fence between the two addresses; set inputs_full[b, me] on all  release, sys: publishes the parts
          3. wait until inputs_full[b, k] >= epoch, for all k                  acquire, sys: sees their parts
          4. load scratch[me, b], combined, and store it there again, on all ranks; syncthreads
          5. set results_full[b, me] on all                                    release, sys: publishes results
          6. wait until results_full[b, k] >= epoch, for all k                 acquire, sys: sees the results
          7. fence between the two addresses; copy scratch[:, b] to the output; add 1 to the epochs

No race, without a double buffer: only rank k loads scratch[k, b] of other ranks, and each thread stores where
it alone has loaded. A rank writes its scratch again in the next epoch, after it has copied the results. x may
be out: all parts b of x are in scratch[:, b] before the block writes those of out.

No deadlock, in both: a block waits for the blocks of the same number on the other ranks. They do what it
waits for before their own wait for it, in the order of the steps. All blocks are co-resident.
"""

import functools

from numba import cuda
from numba.cuda import types

from shmemkit.device import (
    copy_block,
    multimem_fence,
    multimem_reduce_vec16,
    multimem_store,
    multimem_store_vec16,
    num_ranks,
    rank,
    store_word,
    wait_block,
)
from shmemkit.device.packets.multimem import vec16_dtypes
from shmemkit.operations.method import Method, cut, parts_of
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.support.settings import listed

OPS = {"sum": "add", "max": "max", "min": "min"}
MINIMUM_CC = (9, 0)


@functools.cache
def one_shot_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    combine, size = OPS[op], as_dtype(dtype).itemsize
    per_word = 8 // size

    @cuda.jit
    def multimem_one_shot(x, out, part, inputs_all, inputs, inputs_full_all, inputs_full, epochs):
        """Combine the `x` of all ranks in `out`; all ranks are of one node.

        x                uint8, 1-D
        out              uint64 or uint8, 1-D, as many bytes; may be the same
        part             bytes of a part, a multiple of 16: gridDim.x of them are x
        inputs           uint8 (2, parts at most, bytes of a part at most), symmetric; the last is a multiple
                         of 16
        inputs_all       its multicast view, as elements of `dtype`
        inputs_full      uint64 (parts at most, n_ranks), symmetric, zeros at first
        inputs_full_all  its multicast view
        epochs           uint64 (parts at most,), zeros at first
        grid             parts, one-dimensional, as the blocks are
        """
        b, t = cuda.blockIdx.x, cuda.threadIdx.x
        begin, end = min(b * part, x.size), min((b + 1) * part, x.size)
        epoch = epochs[b] + 1
        buffer = epoch & 1
        copy_block(inputs[buffer, b], x[begin:end])  # 1
        cuda.syncthreads()
        if t == 0:  # 2
            multimem_fence()
            multimem_store(inputs_full_all[b], rank(), epoch, "release")
        wait_block(inputs_full[b], num_ranks(), "sys", "acquire", epoch)  # 3
        i, first, last = 2 * t, begin >> 3, end - begin + 7 >> 3
        while i < last:  # 4
            words = multimem_reduce_vec16(inputs_all[buffer, b], i * per_word, combine)
            store_word(out, first + i, _pair(words[0], words[1]))
            if i + 1 < last:
                store_word(out, first + i + 1, _pair(words[2], words[3]))
            i += 2 * cuda.blockDim.x
        if t == 0:  # all threads have read it before the barrier
            epochs[b] = epoch

    return multimem_one_shot


@cuda.jit(device=True)
def _pair(low, high):
    return types.uint64(low) | types.uint64(high) << types.uint64(32)


@functools.cache
def two_shot_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    combine, size = OPS[op], as_dtype(dtype).itemsize
    per_vector = 16 // size

    @cuda.jit
    def multimem_two_shot(x, out, segment, part, scratches, inputs, results, epochs):
        """Combine the `x` of all ranks in `out`; all ranks are of one node.

        x, out         uint8, 1-D, of the same size; may be the same
        segment, part  bytes of a segment, n_ranks of which are x, and of a part, gridDim.x of which are a
                       segment: multiples of 16
        scratches      two: the multicast view, as elements of `dtype`, of an array, and that array: uint8
                       (n_ranks, parts at most, bytes of a part at most), symmetric; the last is a multiple of
                       16
        inputs, results
                       of each the multicast view of its full signals, and they: uint64 (parts at most,
                       n_ranks), symmetric, zeros at first
        epochs         uint64 (parts at most,), zeros at first
        grid           parts, one-dimensional, as the blocks are
        """
        scratch_all, scratch = scratches
        (inputs_full_all, inputs_full), (results_full_all, results_full) = inputs, results
        b, t, me, n = cuda.blockIdx.x, cuda.threadIdx.x, rank(), num_ranks()
        epoch = epochs[b] + 1
        begin = min(b * part, segment)
        length = min(part, segment - begin)
        k = 0
        while k < n:  # 1
            start = min(k * segment + begin, x.size)
            copy_block(scratch[k, b], x[start : min(start + length, x.size)])
            k += 1
        cuda.syncthreads()
        if t == 0:  # 2
            multimem_fence()
            multimem_store(inputs_full_all[b], me, epoch, "release")
        wait_block(inputs_full[b], n, "sys", "acquire", epoch)  # 3
        i, vectors = t, min(length, x.size - me * segment - begin) + 15 >> 4
        while i < vectors:  # 4
            words = multimem_reduce_vec16(scratch_all[me, b], i * per_vector, combine)
            multimem_store_vec16(scratch_all[me, b], i * per_vector, words)
            i += cuda.blockDim.x
        cuda.syncthreads()
        if t == 0:  # 5
            multimem_store(results_full_all[b], me, epoch, "release")
        wait_block(results_full[b], n, "sys", "acquire", epoch)  # 6
        multimem_fence()  # 7
        k = 0
        while k < n:
            start = min(k * segment + begin, x.size)
            copy_block(out[start : min(start + length, x.size)], scratch[k, b])
            k += 1
        if t == 0:
            epochs[b] = epoch

    return multimem_two_shot


class _Multimem(Method):
    """What both have in common; a subclass has its `name`.

    part        bytes that are worth a block
    max_blocks  of a grid; resident on all GPUs that have multicast
    """

    part, max_blocks = 1 << 13, 104

    def _begin(self, op, nbytes):
        """-> (blocks, bytes of a part at most), for up to `nbytes`; ValueError if op or World do not suit."""
        world, self.op = self.world, op
        if op not in OPS:
            raise ValueError(
                f"AllReduce: op is {op!r}; with method {self.name!r} it must be {listed(map(repr, OPS))}, "
                "which the NVSwitch can do"
            )
        if world.n_nodes > 1:
            raise ValueError(
                f"AllReduce: method {self.name!r} is for one node, where multicast ends; there are "
                f"{world.n_nodes}. Use a method without multicast"
            )
        self.blocks, room = parts_of(nbytes, 1, self.within(self.max_blocks), self.part, 16)
        self.epochs = world.xp.zeros(self.blocks, "uint64")
        return self.blocks, room

    def _multicast(self, make, shape, dtype, name):
        """-> the multicast view of a new symmetric array, and the array. Collective."""
        array = make(shape, dtype, f"all_reduce.{self.name}.{name}")
        return self.world.multicast_view(array), array

    def _check(self, dtype):
        allowed = vec16_dtypes(OPS[self.op])
        if dtype.name not in allowed:
            raise ValueError(
                f"AllReduce: x is {dtype.name}; with method {self.name!r} and op={self.op!r} it must be "
                f"{listed(allowed)}, which the NVSwitch can do"
            )


class MultimemOneShot(_Multimem):
    """The method "multimem_one_shot" of ``AllReduce``."""

    name = "multimem_one_shot"

    def prepare(self, max_nbytes, op):
        blocks, room = self._begin(op, max_nbytes)
        self.inputs_all, self.inputs = self._multicast(self.empty, (2, blocks, room), "uint8", "inputs")
        self.inputs_full = self._multicast(self.zeros, (blocks, self.world.n_ranks), "uint64", "inputs_full")

    def bind(self, x, out, in_place, dtype):
        self._check(dtype)
        blocks, part = cut(x.nbytes, self.blocks, self.part, 16)
        inputs = self.inputs_all.view(dtype), self.inputs, *self.inputs_full
        kernel = one_shot_kernel(self.op, dtype.name)
        return self.launch(kernel, blocks, x.view("uint8"), out, part, *inputs, self.epochs)


class MultimemTwoShot(_Multimem):
    """The method "multimem_two_shot" of ``AllReduce``."""

    name = "multimem_two_shot"

    def prepare(self, max_nbytes, op):
        n = self.world.n_ranks
        blocks, room = self._begin(op, self._segment(max_nbytes))
        self.scratch_all, self.scratch = self._multicast(self.empty, (n, blocks, room), "uint8", "scratch")
        self.inputs_full = self._multicast(self.zeros, (blocks, n), "uint64", "inputs_full")
        self.results_full = self._multicast(self.zeros, (blocks, n), "uint64", "results_full")

    def _segment(self, nbytes):
        """Its bytes: whole vectors."""
        return -(-nbytes // self.world.n_ranks) + 15 & -16

    def bind(self, x, out, in_place, dtype):
        self._check(dtype)
        segment = self._segment(x.nbytes)
        blocks, part = cut(segment, self.blocks, self.part, 16)
        args = x.view("uint8"), out.view("uint8"), segment, part, (self.scratch_all.view(dtype), self.scratch)
        kernel = two_shot_kernel(self.op, dtype.name)
        return self.launch(kernel, blocks, *args, self.inputs_full, self.results_full, self.epochs)


_CASES = (
    ("sum", "bfloat16"),
    ("sum", "float16"),
    ("sum", "float32"),
    ("sum", "float64"),
    ("max", "int32"),
    ("min", "uint64"),
)
GPU_KERNELS = {
    **{
        f"multimem_one_shot[{op},{dtype},{words}]": (
            one_shot_kernel(op, dtype),
            {"out": words, "inputs_all": dtype},
        )
        for words, cases in (("uint64", _CASES), ("uint8", _CASES[:1]))
        for op, dtype in cases
    },
    **{
        f"multimem_two_shot[{op},{dtype}]": (two_shot_kernel(op, dtype), {"scratches.0": dtype})
        for op, dtype in _CASES
    },
}
