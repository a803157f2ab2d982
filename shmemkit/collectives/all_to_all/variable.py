"""All-to-all of different numbers of rows, which only the GPUs know: they tell each other in the kernel.

Rows      x has rows for rank 0, then for rank 1, and so on: splits[k] for rank k. Those that arrive lie in
          out one after another, in the order of the ranks
Table     table[k, :], on every rank: the splits of rank k, and how many rows its out has room for. A split
          is negative if x has fewer rows than that. Only rank k writes its row
Inbox     on every rank: where the others store rows, at their position in out. It is `out` itself, if that
          is symmetric, else a scratch as large
Outbox    of several nodes, as large as x: the rows for far ranks, whose memory is not mapped here. NVSHMEM
          reads them
Signals   told[k], on every rank: the last epoch for which row k of the table is here. It is a credit, too:
          rank k's inbox may be written. Only rank k sets it
          full[k, b]: the last epoch in which block b of rank k has stored all its rows for this rank. Only
          rank k sets it
Epochs    epochs[b], local: of block b. Device-resident, so graph-safe. All launches of an object have the
          same grid

What one rank sends another lands whole or not at all. All ranks find this from the table, and from the
table where everything lands, by the same sums. Each block has a part of it, cut alike on both sides.

  block b:
          1. block 0 only: store the own row of the table on all ranks, itself included; syncthreads
             set told[me] there to the epoch                       release, sys: after what used out
             (to far ranks: put the row, and its signal)           the signal follows the data
          2. wait until told[k] here is at least the epoch, for all k        acquire, sys, also of the network
             copy the table to shared memory; syncthreads
          3. store part b of the rows for each other rank in its inbox; syncthreads
          4. set full[me, b] there                                 release, sys: publishes the parts
             (far ranks, first of all in 3: copy the part to the outbox, put it to their inbox, and its
             signal, also of parts without rows)
          5. copy part b of the rank's rows for itself to out; block 0 also writes out_splits
          6. for each other rank k: wait until full[k, b] here is the epoch        acquire, sys
             and copy part b of its rows from the inbox to out, unless they are the same

No race, with single buffers:
  - Inbox: a rank writes that of rank k after told[k] of this epoch. Rank k sets it in a launch that begins
    after its previous launch, which read the inbox, has ended. No two parts of an epoch overlap
  - Table: a rank writes its row on another rank again one epoch later, when its own launch has ended. In
    that launch it waited for full of all blocks there, which they set after they had read the table
  - splits may be out_splits: block 0 alone uses them, and reads before it writes
  - What the network reads: by the put lemma (docs/protocols.md). The rank writes its row again one epoch
    later, when the others have set full after they had received it. It writes the outbox after their told of
    the next epoch, from a launch that begins when the previous one has ended, which waited for the put

No deadlock: block 0 sends the table before it waits. Each block waits for block 0 of all ranks, then for
the blocks of its number, which wait for nothing else. All blocks are co-resident.
"""

from __future__ import annotations

import functools

from numba import cuda, int64

from shmemkit.device import (
    copy_block,
    notify,
    num_ranks,
    rank,
    signal_wait_until,
    symm_at,
    wait,
    wait_block,
)
from shmemkit.device.packets.transports import rank_after
from shmemkit.operations.method import Method
from shmemkit.operations.operation import Given
from shmemkit.runtime.world import World
from shmemkit.typing import AnyArray, AnyStream, ArrayT

from ..collective import Collective
from ..network import GE, put, wait_for

PART = 1 << 15  # bytes that are worth a block, and a message
MAX_RANKS = 72  # whose table fits into the shared memory of a block
MAX_TABLE = MAX_RANKS * (MAX_RANKS + 1)


@cuda.jit(device=True)
def _split(splits, k, rows):
    """How many rows go to rank k; negative if not all of them are in x, of `rows` rows."""
    first, j = 0, 0
    while j < k:
        first += min(max(splits[j], 0), rows - first)
        j += 1
    count = max(splits[k], 0)
    return count if count <= rows - first else -count


@cuda.jit(device=True)
def part_of(b, size, shift, least):
    """-> (begin, end) of block b's part of `size` elements: of whole lines, and of `least` or more"""
    part = max(((size + (1 << shift) - 1) >> shift) + 127 & -128, least)
    return min(b * part, size), min((b + 1) * part, size)


@cuda.jit(device=True)
def _first(table, source, target, n):
    """The row of `target`'s out where the rows of `source` begin, or -1 if they do not land.

    table  int64, 1-D: n + 1 for each rank, its splits and the room of its out
    """
    room, first, k = table[target * (n + 1) + n], 0, 0
    while k < source:
        count = table[k * (n + 1) + target]
        if count > 0 and count <= room - first:
            first += count
        k += 1
    count = table[source * (n + 1) + target]
    return first if count >= 0 and count <= room - first else -1


@functools.cache
def all_to_all_v_kernel(network, least=PART):
    """-> the kernel; `network`: some ranks are far, on other nodes; `least`: elements of a message to them"""

    @cuda.jit(device=True)
    def is_near(near, k):
        return near[k] != 0 if network else True

    @cuda.jit
    def push_all_to_all_v(
        x, splits, out, landed, row, rows, room, inbox, staged, outbox, near, shift, table, told, full, epochs
    ):
        """Give rank k the next splits[k] rows of `x`; what the others give comes to `out`.

        x, out          uint8, 1-D: rows * row and room * row bytes; they do not overlap
        splits, landed  int64 (n_ranks,): what each rank gets, and what has come from it; may be the same
        inbox           uint8, 1-D, symmetric, as large as any rank's out: from out on, or, if `staged`, apart
        outbox, near    for far ranks: uint8, 1-D, symmetric, as large as any rank's x; and uint8 (n_ranks,),
                        1 for those that are not
        shift           gridDim.x is 1 << shift, in all launches
        table           int64 (n_ranks * (n_ranks + 1),), symmetric; up to MAX_RANKS ranks
        told            uint64 (n_ranks,), symmetric, zeros at first
        full            uint64 (n_ranks, blocks), likewise
        epochs          uint64 (blocks,), zeros at first
        """
        counts = cuda.shared.array(MAX_TABLE, int64)  # the table
        begins = cuda.shared.array(MAX_RANKS, int64)  # the row of x where those for rank k begin
        there = cuda.shared.array(MAX_RANKS, int64)  # the row of rank k's out where they land, or -1
        here = cuda.shared.array(MAX_RANKS, int64)  # the row of out here where those of rank k land, or -1
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n = rank(), num_ranks()
        epoch = epochs[b] + 1
        mine = me * (n + 1)
        if b == 0:  # 1
            i = t
            while i <= n:
                count = room
                if i < n:
                    count = _split(splits, i, rows)
                k = 0
                while k < n:
                    if is_near(near, k):
                        symm_at(table, k)[mine + i] = count
                    k += 1
                i += threads
            cuda.syncthreads()
            if network:
                my_row, k = table[mine : mine + n + 1], 0
                while k < n:
                    if near[k] == 0:
                        put(my_row, my_row, told[me:], epoch, k)
                    k += 1
            k = t
            while k < n:
                if is_near(near, k):
                    notify(told[me:], k, epoch, "set", "sys")
                k += threads
        k = t
        while k < n:  # 2
            if not network or near[k] != 0:
                wait(told[k:], 1, "sys", "acquire", epoch)
            else:
                signal_wait_until(told[k:], GE, epoch)
            k += threads
        cuda.syncthreads()
        i = t
        while i < n * (n + 1):
            counts[i] = table[i]
            i += threads
        cuda.syncthreads()
        k = t
        while k < n:
            begin, j = 0, 0
            while j < k:
                begin += max(counts[mine + j], 0)
                j += 1
            begins[k], there[k], here[k] = begin, _first(counts, me, k, n), _first(counts, k, me, n)
            k += threads
        cuda.syncthreads()
        for passes in range(1 + network):  # 3; far ranks first: the network takes longer
            far, y = network and passes == 0, 1
            while y < n:
                peer = rank_after(me, y)
                size = counts[mine + peer] * row if there[peer] >= 0 else 0
                begin, end = part_of(b, size, shift, least if far else 0)
                at, to = begins[peer] * row, there[peer] * row
                its = x[at + begin : at + end]
                if network and far and near[peer] == 0:  # `network`: or numba compiles it for one node, too
                    source = outbox[at + begin : at + end]
                    copy_block(source, its)  # a put begins with a barrier of the block
                    put(inbox[to + begin : to + end], source, full[me, b:], epoch, peer)
                elif not far and is_near(near, peer):
                    copy_block(symm_at(inbox, peer)[to + begin : to + end], its)
                y += 1
        cuda.syncthreads()
        k = t
        while k < n:  # 4
            if k != me and is_near(near, k):
                notify(full[me, b:], k, epoch, "set", "sys")
            k += threads
        y = 0
        while y < n:  # 5 and 6
            peer = rank_after(me, y)
            if y > 0:
                if not network or near[peer] != 0:
                    wait_block(full[peer, b:], 1, "sys", "acquire", epoch)
                else:
                    wait_for(full[peer, b:], epoch)
            if here[peer] >= 0 and (staged or y == 0):
                size = counts[peer * (n + 1) + me] * row
                begin, end = part_of(b, size, shift, 0 if is_near(near, peer) else least)
                to = here[peer] * row
                at = begins[me] * row if y == 0 else to
                source = x if y == 0 else inbox
                copy_block(out[to + begin : to + end], source[at + begin : at + end])
            y += 1
        if b == 0:
            k = t
            while k < n:
                count = counts[k * (n + 1) + me]
                landed[k] = count if here[k] >= 0 else -abs(count)
                k += threads
        if t == 0:
            epochs[b] = epoch

    return push_all_to_all_v


class PushV(Method):
    """The method of ``AllToAllV``.

    part         bytes that are worth a block, and a message
    max_blocks   of a grid; a power of 2
    max_senders  likewise, if some ranks are far: each block sends each of these a message
    """

    part, max_blocks, max_senders = PART, 64, 16

    def prepare(self, max_nbytes):
        world, n = self.world, self.world.n_ranks
        if n > MAX_RANKS:
            raise ValueError(
                f"AllToAllV: there are {n} ranks; at most {MAX_RANKS} can be. AllToAll has no limit"
            )
        reached = world.host_allgather((world.near(), world.backend.multiprocessors))
        near = [mine and theirs[world.rank] for mine, (theirs, _) in zip(world.near(), reached, strict=True)]
        far = not all(all(of_rank) for of_rank, _ in reached)
        most = self.within(
            min(self.max_senders if far else self.max_blocks, *(count for _, count in reached))
        )
        self.shift = max(1, min(most, max_nbytes // self.part)).bit_length() - 1
        self.blocks = 1 << self.shift
        self.near = world.xp.asarray(near).astype("uint8")
        self.kernel = all_to_all_v_kernel(far, self.part)
        self.scratch = self.empty(max(1, max_nbytes), "uint8", "all_to_all.variable.scratch")
        self.outbox = self.scratch
        if far:
            self.threads = min(self.threads, 256)  # of some 200 registers
            self.outbox = self.empty(max(1, max_nbytes), "uint8", "all_to_all.variable.outbox")
        self.table = self.empty(n * (n + 1), "int64", "all_to_all.variable.table")
        self.told = self.zeros(n, "uint64", "all_to_all.variable.told")
        self.full = self.zeros((n, self.blocks), "uint64", "all_to_all.variable.full")
        self.epochs = world.xp.zeros(self.blocks, "uint64")
        nothing, splits = world.xp.empty(0, "uint8"), world.xp.zeros(n, "int64")
        self._bind(nothing, splits, nothing, splits, 1, 0, 0)

    def bind(self, x, splits, out, out_splits):
        """Of arrays of rows."""
        row = x.itemsize
        for size in x.shape[1:]:
            row *= size
        flat = x.reshape(-1).view("uint8"), splits, out.reshape(-1).view("uint8"), out_splits
        return self._bind(*flat, row, len(x), len(out))

    def _bind(self, x, splits, out, out_splits, row, rows, room):
        # Peers slice their own inbox to find the same bytes here: it is not shorter if their out is.
        inbox = self.world.rest_of(out)
        staged = inbox is None
        inbox = self.scratch if staged else inbox
        return self.launch(
            *(self.kernel, self.blocks, x, splits, out, out_splits, row, rows, room, inbox, staged),
            *(self.outbox, self.near, self.shift, self.table, self.told, self.full, self.epochs),
        )


class AllToAllV(Collective):
    """Send rows of an array to each rank; only the GPUs know how many. Collective.

    ``exchange = sk.AllToAllV(world, max_nbytes)``, then ``exchange(x, splits, out, out_splits)``.
    ``help(sk.collectives)`` has the rules that all collectives share: arrays, streams, order, graphs, memory
    and errors. The host never reads the splits. There is one method: stores to ranks within reach, NVSHMEM
    to all others. It takes symmetric memory of max_nbytes, or twice that if a rank is out of reach.

    world       the World; up to 72 ranks, else ValueError
    max_nbytes  bytes of the largest array on any rank, x or out
    sms         the most multiprocessors that its kernel uses, 1 or more; None: as many as are tuned
    """

    ARRAYS = {
        "x": Given(dtype=None, align=1),
        "splits": Given("n_ranks", "int64", align=0),
        "out": Given(dtype=None, align=1, written=True),
        "out_splits": Given("n_ranks", "int64", align=0, written=True, may_be="splits"),
    }
    _METHODS = {"push": PushV}

    def __init__(self, world: World, max_nbytes: int, *, sms: int | None = None):
        super().__init__(world, max_nbytes, "push", sms=sms)

    def __call__(
        self,
        x: AnyArray,
        splits: AnyArray,
        out: ArrayT,
        out_splits: ArrayT,
        *,
        stream: AnyStream | None = None,
    ) -> tuple[ArrayT, ArrayT]:
        """Enqueue one exchange of rows. -> (out, out_splits)

        x           C-contiguous, any dtype, of shape (rows, ...). The number of rows may differ from rank to
                    rank, the rest of the shape may not. The first splits[0] rows go to rank 0, the next
                    splits[1] to rank 1, and so on. What is left over goes nowhere
        splits      int64 (n_ranks,), contiguous, on the GPU; less than 0 is 0
        out         C-contiguous, of x's dtype and shape but for the number of rows, apart from x
        out_splits  int64 (n_ranks,), contiguous, on the GPU: how many rows come from each rank; may be
                    `splits`
        stream      default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        When the stream has run it, the rows of rank 0 are at the beginning of out, those of rank 1 follow,
        and so on. Rows of `out` behind them keep their content. The m rows of rank k land all or not at all.
        If `out` has no room for them, or rank k has fewer rows than it splits, then out_splits[k] is -m and
        the rows of the next rank take their place. So the positive out_splits add up to the valid rows of
        out.
        """
        self._enqueue({"x": x, "splits": splits, "out": out, "out_splits": out_splits}, stream)
        return out, out_splits

    def _in_order(self, stream, arrays):
        rows = arrays["x"]  # any number of them on each rank
        self._order.before(stream, f"AllToAllV of rows of {rows.dtype} {rows.shape[1:]}")

    def _is_written(self, name, arrays):
        return self.ARRAYS[name].written

    def _bind(self, x, splits, out, out_splits):
        if x.dtype != out.dtype or not x.ndim or x.shape[1:] != out.shape[1:] or x.ndim != out.ndim:
            raise ValueError(
                f"AllToAllV: x is {x.dtype} {x.shape}, and out is {out.dtype} {out.shape}; both must have "
                "rows of one dtype and shape, any number of them"
            )
        for name, array in (("x", x), ("out", out)):
            if array.nbytes > self.max_nbytes:
                raise ValueError(
                    f"AllToAllV: {name} has {array.nbytes} bytes, more than max_nbytes={self.max_nbytes}. "
                    "Make an AllToAllV with a larger max_nbytes"
                )
        return self._methods["push"].bind(x, splits, out, out_splits)


GPU_KERNELS = {
    "push_all_to_all_v": all_to_all_v_kernel(False),
    "push_all_to_all_v_network": all_to_all_v_kernel(True),
}
