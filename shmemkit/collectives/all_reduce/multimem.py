"""All-reduce by multimem, inside a node: the NVSwitch combines what all ranks have (NVLink SHARP, NVLS).
Two ways, of what the instruction can: "sum" of int32, uint32, int64, uint64, float16, bfloat16, float32 and
float64, "max" and "min" of these but float32 and float64. float16 and bfloat16 are added in float32 and
rounded once (.acc::f32).

The switch adds floating-point numbers in an order of its own: other bits are possible than of other methods,
and in another run. What NaN becomes in "max" and "min" is the switch's, too.

``one_shot``: each rank loads all of it, combined: small messages. As the switch combines for each rank by
itself, their sums of floating-point numbers may differ in the last bit.

Inputs    inputs[half, b], on every rank: part b of its array, one for each block. Written by this rank, at
          its own address; loaded by all, at the multicast address of all ranks' inputs
Signals   ready[b, k], on every rank: the number of the last call whose part b of rank k is in its inputs
          (only rank k sets it, on all ranks at once)
Counters  calls[b], local: how many calls block b has taken part in: the number of a call, and the half. In
          device memory, so that a replayed graph counts on

  block b:
          1. copy part b of x to inputs[half, b]; syncthreads
          2. a fence between the two addresses that it has; set ready[b, me] on all ranks to the number of
             this call                                               release, sys: publishes the part
          3. wait until ready[b, k] here is at least that, for all k acquire, sys: sees theirs
          4. load inputs[half, b], combined, and store it to the output; add 1 to the counter

No race: part b is always at the same place, and all ranks count it alike, whatever the lengths of the calls.
I write half h of it again two calls with it later. In the one between, ready of all ranks has come, which
they set in launches that begin after their launches before have ended: they have loaded what half h held.
x may be out: a block has copied its part of x before it writes the same of out.

``two_shot``: each rank loads one segment of it, combined, and stores that on all: larger messages. One rank
combines an element, so that all have the same bits.

Segments  the array is cut into n_ranks segments, rank k's being the k-th; a segment into as many parts as
          there are blocks. Part b of all segments is block b's
Scratch   scratch[k, b], on every rank: part b of segment k of its array; then of all ranks' arrays, combined.
          Written by this rank, at its own address; loaded, and then written, by rank k on all ranks at once,
          at the multicast address
Signals   ready[b, k] and done[b, k], on every rank: the number of the last call whose parts b of rank k's
          array are in its scratch, and whose result of segment k is here (only rank k sets them, on all
          ranks at once)
Counters  calls[b], local, as above

  block b:
          1. copy the parts b of x to scratch[:, b]; syncthreads
          2. a fence between the two addresses; set ready[b, me] on all    release, sys: publishes the parts
          3. wait until ready[b, k] here is at least that, for all k       acquire, sys: sees theirs
          4. load scratch[me, b], combined, and store it there again, on all ranks; syncthreads
          5. set done[b, me] on all                                        release, sys: publishes the result
          6. wait until done[b, k] here is at least that, for all k        acquire, sys: sees theirs
          7. a fence between the two addresses; copy scratch[:, b] to the output; add 1 to the counter

No race, with nothing double-buffered: nobody but rank k loads scratch[k, b] of others, and a thread stores
where it alone has loaded before. I write mine again in the next call, when I have copied what rank k stored.
x may be out: all parts b of x are in scratch[:, b] before the same of out are written.

No deadlock, in both: what a block waits for, the blocks of the same number on the other ranks do before they
wait for that of others, in the order of the steps; all blocks are resident.
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
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.support.settings import listed

from ..method import Method

OPS = {"sum": "add", "max": "max", "min": "min"}
PART = 1 << 13  # bytes that are worth a block
MAX_BLOCKS = 104  # of a grid; resident on all GPUs that have multicast
MINIMUM_CC = (9, 0)


@functools.cache
def one_shot_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    combine, size = OPS[op], as_dtype(dtype).itemsize
    per_word = 8 // size

    @cuda.jit
    def multimem_one_shot(x, out, part, inputs_all, inputs, ready_all, ready, calls):
        """Combine the `x` of all ranks in `out`; all ranks are of one node.

        x           uint8, 1-D
        out         uint64 or uint8, 1-D, as many bytes; may be the same
        part        bytes of a part, a multiple of 16: gridDim.x of them are x
        inputs      uint8 (2, parts at most, bytes of a part at most), symmetric; the last is a multiple of 16
        inputs_all  its multicast view, as elements of `dtype`
        ready       uint64 (parts at most, n_ranks), symmetric, zeros at first
        ready_all   its multicast view
        calls       uint64 (parts at most,), zeros at first
        grid        parts, one-dimensional, as the blocks are
        """
        b, t = cuda.blockIdx.x, cuda.threadIdx.x
        begin, end = min(b * part, x.size), min((b + 1) * part, x.size)
        call = calls[b] + 1
        half = call & 1
        copy_block(inputs[half, b], x[begin:end])  # 1
        cuda.syncthreads()
        if t == 0:  # 2
            multimem_fence()
            multimem_store(ready_all[b], rank(), call, "release")
        wait_block(ready[b], num_ranks(), "sys", "acquire", call)  # 3
        i, first, last = 2 * t, begin >> 3, end - begin + 7 >> 3
        while i < last:  # 4
            words = multimem_reduce_vec16(inputs_all[half, b], i * per_word, combine)
            store_word(out, first + i, _pair(words[0], words[1]))
            if i + 1 < last:
                store_word(out, first + i + 1, _pair(words[2], words[3]))
            i += 2 * cuda.blockDim.x
        if t == 0:  # all threads have read it before the barrier
            calls[b] = call

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
    def multimem_two_shot(
        x, out, segment, part, scratch_all, scratch, ready_all, ready, done_all, done, calls
    ):
        """Combine the `x` of all ranks in `out`; all ranks are of one node.

        x, out         uint8, 1-D, of the same size; may be the same
        segment, part  bytes of a segment, n_ranks of which are x, and of a part, gridDim.x of which are a
                       segment: multiples of 16
        scratch        uint8 (n_ranks, parts at most, bytes of a part at most), symmetric; the last is a
                       multiple of 16
        scratch_all    its multicast view, as elements of `dtype`
        ready, done    uint64 (parts at most, n_ranks), symmetric, zeros at first
        ready_all, done_all
                       their multicast views
        calls          uint64 (parts at most,), zeros at first
        grid           parts, one-dimensional, as the blocks are
        """
        b, t, me, n = cuda.blockIdx.x, cuda.threadIdx.x, rank(), num_ranks()
        call = calls[b] + 1
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
            multimem_store(ready_all[b], me, call, "release")
        wait_block(ready[b], n, "sys", "acquire", call)  # 3
        i, vectors = t, min(length, x.size - me * segment - begin) + 15 >> 4
        while i < vectors:  # 4
            words = multimem_reduce_vec16(scratch_all[me, b], i * per_vector, combine)
            multimem_store_vec16(scratch_all[me, b], i * per_vector, words)
            i += cuda.blockDim.x
        cuda.syncthreads()
        if t == 0:  # 5
            multimem_store(done_all[b], me, call, "release")
        wait_block(done[b], n, "sys", "acquire", call)  # 6
        multimem_fence()  # 7
        k = 0
        while k < n:
            start = min(k * segment + begin, x.size)
            copy_block(out[start : min(start + length, x.size)], scratch[k, b])
            k += 1
        if t == 0:
            calls[b] = call

    return multimem_two_shot


class _Multimem(Method):
    """What both have in common; a subclass has its `name`."""

    def _begin(self, op, nbytes):
        """Refuse what cannot be; -> (blocks, bytes of a part at most), for `nbytes` bytes at most."""
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
        self.blocks = max(1, min(MAX_BLOCKS, -(-nbytes // PART)))
        self.calls = world.xp.zeros(self.blocks, "uint64")
        return self.blocks, max(min(PART, nbytes), -(-nbytes // self.blocks)) + 15 & -16

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

    def _parts(self, nbytes):
        """-> (blocks, bytes of a part) of a call with `nbytes` bytes."""
        blocks = min(self.blocks, -(-nbytes // PART))
        return blocks, -(-nbytes // blocks) + 15 & -16


class MultimemOneShot(_Multimem):
    """The method "multimem_one_shot" of ``AllReduce``."""

    name = "multimem_one_shot"

    def prepare(self, max_nbytes, op):
        blocks, room = self._begin(op, max(1, max_nbytes))
        self.inputs_all, self.inputs = self._multicast(self.empty, (2, blocks, room), "uint8", "inputs")
        self.ready = self._multicast(self.zeros, (blocks, self.world.n_ranks), "uint64", "ready")

    def bind(self, x, out, in_place, dtype):
        self._check(dtype)
        blocks, part = self._parts(x.nbytes)
        args = x.view("uint8"), out, part, self.inputs_all.view(dtype), self.inputs, *self.ready, self.calls
        return self.launch(one_shot_kernel(self.op, dtype.name), blocks, *args)


class MultimemTwoShot(_Multimem):
    """The method "multimem_two_shot" of ``AllReduce``."""

    name = "multimem_two_shot"

    def prepare(self, max_nbytes, op):
        n = self.world.n_ranks
        blocks, room = self._begin(op, self._segment(max(1, max_nbytes)))
        self.scratch_all, self.scratch = self._multicast(self.empty, (n, blocks, room), "uint8", "scratch")
        self.ready = self._multicast(self.zeros, (blocks, n), "uint64", "ready")
        self.done = self._multicast(self.zeros, (blocks, n), "uint64", "done")

    def _segment(self, nbytes):
        """Its bytes: whole vectors."""
        return -(-nbytes // self.world.n_ranks) + 15 & -16

    def bind(self, x, out, in_place, dtype):
        self._check(dtype)
        segment = self._segment(x.nbytes)
        blocks, part = self._parts(segment)
        x, out, scratch_all = x.view("uint8"), out.view("uint8"), self.scratch_all.view(dtype)
        args = x, out, segment, part, scratch_all, self.scratch, *self.ready, *self.done, self.calls
        return self.launch(two_shot_kernel(self.op, dtype.name), blocks, *args)


_CASES = (
    ("sum", "bfloat16"),
    ("sum", "float16"),
    ("sum", "float32"),
    ("sum", "float64"),
    ("max", "int32"),
    ("min", "uint64"),
)
_bytes, _scratch = types.Array(types.uint8, 1, "C"), types.Array(types.uint8, 3, "C")
_view = {dtype: types.Array(getattr(types, dtype), 3, "C") for _, dtype in _CASES}
_two, _one = (types.Array(types.uint64, d, "C") for d in (2, 1))
GPU_KERNELS = {
    **{
        f"multimem_one_shot[{op},{dtype},{words}]": (
            one_shot_kernel(op, dtype),
            (_bytes, types.Array(words, 1, "C"), types.int64, _view[dtype], _scratch, _two, _two, _one),
        )
        for words, cases in ((types.uint64, _CASES), (types.uint8, _CASES[:1]))
        for op, dtype in cases
    },
    **{
        f"multimem_two_shot[{op},{dtype}]": (
            two_shot_kernel(op, dtype),
            (_bytes, _bytes, types.int64, types.int64, _view[dtype], _scratch, *[_two] * 4, _one),
        )
        for op, dtype in _CASES
    },
}
