"""Exchange by chunked stores (``collectives.chunked_transfer``): each rank sends all others x (all-gather),
or a segment each (all-to-all, reduce-scatter). What arrives is stored by rank, or combined.

The staged kernel is for outputs in private memory, which peers cannot write, and for all reductions.

Scratch   scratch[buffer, row_of(k, me), b], on every rank: part b of what rank k sends it. Only rank k writes
          it
Signals   full[k, b], on every rank: how much of that is there. Only rank k sets it

  block (b, 0), for each peer me + 1, me + 2, ... modulo the ranks:
          1. put part b of its segment to the scratch there         release, sys (see ``put_to_all``)
  block (b, 1), to store, for each peer me - 1, me - 2, ... modulo the ranks, the order in which parts arrive:
          2. receive its part b                                     acquire, sys
  block (b, 1), to combine, for each chunk of part b:
          2. wait for it at full[k, b], for all k                   acquire, sys: sees the chunks of all ranks
          3. combine them and the own one in the order of the ranks, and store the result

So a rank sends to one other, and receives from one other, at a time. All combine in the same order: the bits
are the same in every run.

No race: the double-buffer lemma (docs/protocols.md), for part b. The output may be the rank's own segment of
x: that is sent to no rank, and a thread loads its words before it stores them. No deadlock: senders wait for
nobody, receivers for senders; all blocks are co-resident.

The direct kernel is for an output in symmetric memory: the same part of the same array on all ranks.

Signals   arrivals[k, b], on every rank: the last barrier that block b of rank k has reached
Epochs    direct_epochs[0, b], local: of block b

  block b:  1. barrier with blocks b of all ranks       release and acquire, sys: the outs may be written
            2. copy part b of each peer's segment to segment me of its out; then the own part
            3. barrier again                            release and acquire, sys: publishes all parts b

No race: a peer writes out after the first barrier, which follows all earlier work of this rank's stream.
Later work follows the second barrier of all parts. No deadlock: each block signals before it waits, and all
blocks are co-resident.

One block for each multiprocessor stores to one peer after the other. On four GPUs this filled the links
better than few blocks of the TMA, and better than some blocks for each peer. Of the staged kernel a
multiprocessor has a block of each kind, which share its registers: 256 threads of 128.
"""

import functools

from numba import cuda

from shmemkit.device import (
    copy_block,
    n_words,
    num_ranks,
    rank,
    reduction,
    span,
    store_word,
    symm_at,
    wait,
)
from shmemkit.device.cuda.combine_rows import combining
from shmemkit.device.packets.transports import rank_after
from shmemkit.operations.method import cut, parts_of

from ..chunked_transfer import (
    CHUNKS,
    ChunkedMethod,
    block_barrier,
    device,
    notify_all,
    part_of_block,
    put,
    receive,
    row_of,
    senders_of,
)
from ..network import end_epoch


@functools.cache
def direct_kernel(personalized):
    """-> the direct kernel; `personalized`: x has a segment for each rank."""

    @cuda.jit
    def push_direct(x, out, in_place, segment, part, arrivals, epochs):
        """Send each rank `x`, or its segment of it, to `out`, symmetric.

        x, out    uint8, 1-D: out has n_ranks segments, x too if they are personalized, else one
        in_place  whether x is the own segment of out
        segment   elements of a segment
        part      elements of a part: gridDim.x of them are a segment, or more
        arrivals  uint64 (n_ranks, parts at most), symmetric, zeros at first
        epochs    uint64 (1, parts at most), zeros at first
        grid      (parts,)
        """
        me, n, b = rank(), num_ranks(), cuda.blockIdx.x
        begin, size = part_of_block(part, segment)
        epoch = epochs[0, b] + 1
        block_barrier(arrivals, b, 2 * epoch - 1)
        cuda.syncthreads()
        s = 1
        while s < n + (not in_place):  # the own segment comes last
            peer = rank_after(me, s)
            its = span(x, peer * segment * personalized + begin, size)
            copy_block(span(symm_at(out, peer), me * segment + begin, size), its)
            s += 1
        cuda.syncthreads()
        block_barrier(arrivals, b, 2 * epoch)
        end_epoch(epochs, (0, b), epoch)

    return push_direct


@device
def put_to_all(scratch, buffer, x, stride, begin, size, full, value, chunk):
    """Put part b of segment k of `x`, which begins with element k * stride, to each other rank k.

    The last part is announced in chunks, for a receiver that copies meanwhile. The parts before it are
    announced as a whole: an announcement costs the block the time in which its stores arrive. Parts of a
    single chunk are all announced at the end.
    """
    me, n, b = rank(), num_ranks(), cuda.blockIdx.x
    signal, s = full[me, b:], 1
    while s < n:
        peer = rank_after(me, s)
        its, dst = span(x, peer * stride + begin, size), scratch[buffer, row_of(me, peer), b]
        put(dst, its, signal, value, chunk if s == n - 1 else size, peer, size > chunk)
        s += 1
    if size <= chunk:
        cuda.syncthreads()
        notify_all(signal, value + CHUNKS)


@device
def store_all(own, out, in_place, segment, part, chunk, scratch, words, full, buffer, value):
    """Store part b of each rank's segment in `out`, as it arrives."""
    me, n, b, s = rank(), num_ranks(), cuda.blockIdx.x, 1
    begin, size = part_of_block(part, segment)
    if not in_place:
        copy_block(span(out, me * segment + begin, size), span(own, begin, size))
    while s < n:
        peer = rank_after(me, n - s)
        theirs = span(out, peer * segment + begin, size)
        receive(theirs, scratch[buffer, row_of(peer, me), b], full[peer, b:], value, chunk)
        s += 1


@functools.cache
def combining_all(op, dtype, n_ranks):
    """-> a function as ``store_all``, which combines part b of all segments, of `dtype`, by `op`."""
    _, _, result = reduction(op, dtype)
    one, four = combining(op, dtype, n_ranks, own_row=False)

    @device
    def combine_all(own, out, in_place, segment, part, chunk, scratch, words, full, buffer, value):
        me, n, b = rank(), num_ranks(), cuda.blockIdx.x
        t, threads, size = cuda.threadIdx.x, cuda.blockDim.x, n_words(out)
        begin, end = min(b * (part >> 3), size), min((b + 1) * (part >> 3), size)
        room = scratch.shape[3] >> 3
        stride = scratch.shape[2] * room
        at = buffer * scratch.shape[1] * stride + b * room - begin
        i = begin + t
        while True:
            begin = min(begin + (chunk >> 3), end)
            value += 1
            k = t
            while k < n:
                if k != me:
                    wait(full[k, b:], 1, "sys", "acquire", value)
                k += threads
            cuda.syncthreads()
            while i + 3 * threads < begin:
                p, q, r, s = four(own, words, at, stride, me, n, i, threads)
                store_word(out, i, result(p, n))
                store_word(out, i + threads, result(q, n))
                store_word(out, i + 2 * threads, result(r, n))
                store_word(out, i + 3 * threads, result(s, n))
                i += 4 * threads
            while i < begin:
                store_word(out, i, result(one(own, words, at, stride, me, n, i), n))
                i += threads
            if begin >= end:
                break

    return combine_all


@functools.cache
def staged_kernel(personalized, op=None, dtype=None, n_ranks=None):
    """-> the staged kernel. With `op`, as "sum", it combines `dtype`, a name as "float16"."""
    take = combining_all(op, dtype, n_ranks) if op else store_all

    @cuda.jit(max_registers=128)  # so that two blocks of 256 threads fit on a multiprocessor
    def push_staged(x, own, out, in_place, segment, words, part, chunk, scratch, full, epochs):
        """Send each rank `x`, or its segment of it, to `out`.

        x         uint8, 1-D: of n_ranks segments if they are personalized, else one
        own       the rank's own segment: uint8, or what out is
        out       uint8, 1-D, of n_ranks segments; or of one, if they are combined, and also uint64
        in_place  whether own is in out
        segment   bytes of a segment
        words     the scratch, 1-D, as uint64
        part      bytes of a part, a multiple of 128: gridDim.x of them are a segment, or more
        chunk     bytes of a chunk, a multiple of 8192: CHUNKS or fewer of them are a part
        scratch   uint8 (2, n_ranks - 1, parts at most, bytes of a part at most), symmetric
        full      uint64 (n_ranks, parts at most), symmetric, zeros at first
        epochs    uint64 (2, parts at most), zeros at first
        grid      (parts, 2), of one-dimensional blocks
        """
        b, y = cuda.blockIdx.x, cuda.blockIdx.y
        epoch = epochs[y, b] + 1
        buffer, value = epoch & 1, CHUNKS * epoch
        if y == 0:
            begin, size = part_of_block(part, segment)
            put_to_all(scratch, buffer, x, segment * personalized, begin, size, full, value, chunk)
        else:
            take(own, out, in_place, segment, part, chunk, scratch, words, full, buffer, value)
        end_epoch(epochs, (y, b), epoch)

    return push_staged


class PushExchange(ChunkedMethod):
    """A method of this schedule.

    personalized  whether x has a segment for each rank
    shared        None, or an object whose scratch, signals and epochs it uses: each launch of either is an
                  epoch, on all ranks
    """

    personalized, shared = False, None

    def prepare(self, max_nbytes, op=None):
        """With an op, it is a reduce-scatter."""
        world, n = self.world, self.world.n_ranks
        self.op = op
        if not self.shared:
            world.check_reach(self.name)
            self.senders = senders_of(world, self.senders)
            self.make(max_nbytes, n, self.within(self.senders, 2), max(1, n - 1), n)
        else:
            for name in ("segment", "parts", "channel", "senders"):
                setattr(self, name, getattr(self.shared, name))
        if op is None:
            self.direct_parts = parts_of(max_nbytes, n, self.within(self.senders), self.part)[0]
            self.arrivals = self.zeros((n, self.direct_parts), "uint64", self.array_name("arrivals"))
            self.direct_epochs = world.xp.zeros((1, self.direct_parts), "uint64")
            nothing = world.xp.empty(0, "uint8")
            for bind in (self._bind_direct, self._bind_staged):
                bind(nothing, nothing, False, self.segment)

    def bind(self, x, out, in_place, dtype=None):
        if self.op:
            return self._bind_staged(x, out, in_place, out.nbytes, dtype.name)
        x, out = x.view("uint8"), out.view("uint8")
        bind = self._bind_direct if self.world.is_symmetric(out) else self._bind_staged
        return bind(x, out, in_place, out.size // self.world.n_ranks)

    def _bind_direct(self, x, out, in_place, segment):
        parts, part = cut(segment, self.direct_parts, self.part)
        args = x, out, in_place, segment, part, self.arrivals, self.direct_epochs
        return self.launch(direct_kernel(self.personalized), parts, *args)

    @staticmethod
    def kernel_of(n_ranks, op, dtype, personalized=False, **_):
        return staged_kernel(personalized, *((op, dtype, n_ranks) if op else ()))

    def _bind_staged(self, x, out, in_place, segment, dtype=None):
        size = x.size // self.world.n_ranks
        own = x[self.world.rank * size :][:size] if self.personalized else x
        args = x.view("uint8"), own, out, in_place, segment, self.channel[0].reshape(-1).view("uint64")
        kernel = self.kernel_of(self.world.n_ranks, self.op, dtype, self.personalized)
        return self.launch_parts(kernel, 2, segment, *args, threads=-(-self.threads // 2))


GPU_KERNELS = {
    f"{name}[{personalized}]": (make(personalized), given)
    for name, make, given in (("direct", direct_kernel, {}), ("staged", staged_kernel, {"own out": "uint8"}))
    for personalized in (True, False)
} | {
    f"reduced[{op},{dtype},{n},{words}]": (staged_kernel(True, op, dtype, n), {"own out": words})
    for op, dtype, n, words in (
        ("sum", "bfloat16", 4, "uint64"),
        ("sum", "float16", 8, "uint8"),
        ("max", "float32", 8, "uint64"),
        ("avg", "float64", 2, "uint64"),
        ("prod", "int8", 16, "uint64"),
        ("sum", "float8_e4m3fn", 4, "uint64"),
        ("avg", "float8_e5m2", 2, "uint8"),
    )
}
