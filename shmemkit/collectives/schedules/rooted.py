"""Rooted: the root sends all others x, or each of them its segment of x (broadcast, scatter); or all others
send the root theirs, which it stores by rank or combines (gather, reduce). By LL or LL128
(``device.packets.transports``).

Chunks    a unit for each thread, or warp of LL128, of a block
Epochs    epochs[y, c], local: of chunk c, in row y of the grid; it selects the buffer. Device-resident, so
          graph-safe

From the root:

Slots     slots[buffer], on every rank but the root: the units. Only the root writes them
Signals   empty[k, c], on the root: the last epoch whose chunk c rank k has read. Only rank k sets it

  block b, for its chunks c = b, b + gridDim.x, ..., on a root that broadcasts, for all other ranks k:
  block (b, y), on a root that scatters, for rank k = root + y modulo the ranks (in a grid of fewer rows it
  goes on with y + gridDim.y):
          1. load the unit of what rank k gets. Wait until empty[k, c] is at least the epoch less 2
                                                                     acquire, sys: the buffer is empty
          2. send the unit to slots[buffer] of rank k
             The root's own unit is stored
  block b, on another rank:
          1. wait for the unit in slots[buffer], and store it to the output; syncthreads
          2. set empty[me, c] on the root to the epoch                       release, sys: after the reads
  both:   syncthreads, and add 1 to the chunk's epoch

To the root:

Slots     slots[buffer, k], on the root: the units of rank k. Only rank k writes them
Signals   empty[c], on every rank: the last epoch whose chunk c of this rank the root has read. Only the root
          sets it

  block b, for its chunks, on a rank that sends:
          1. load the unit; wait until empty[c] is at least the epoch less 2   acquire, sys
          2. send it to slots[buffer, me] on the root
  block (b, y), on the root that gathers, with k = root + y modulo the ranks, and so on, as above:
          1. wait for the unit in slots[buffer, k], and store it to segment k of the output; syncthreads
          2. set empty[c] on rank k to the epoch                             release, sys: after the reads
     k = root: store the root's own unit, if x is not in the output
  block b, on the root that combines:
          1. LL128, of up to AT_ONCE ranks: send the unit to slots[buffer, me], too; wait for the unit in
             slots[buffer] of all ranks at once
             otherwise: wait for one after the other; the own unit is in x
             combine them in the order of the ranks and store the result; syncthreads
          2. set empty[c] on all other ranks to the epoch                    release, sys: after the reads
  all:    add 1 to the chunk's epoch

No race: the credit lemma (docs/protocols.md), with two buffers. So a sender may be two epochs ahead of a
receiver, and packets of later epochs arrive while others are late. The unit that the root sends to itself
needs no credit: the same thread, or warp, reads it. x may lie in out where the result goes: a unit is loaded
before the result is stored, and nobody else reads there. (Lamport is left out: it takes the end of a launch,
not a credit, to order the reset of a slot. A credit at the beginning of the next epoch would do, but would
let the sender be one epoch ahead, not two.)

No deadlock: a sender waits for what receivers did two epochs before; they wait for the sender, which waits
for nothing of this epoch; all blocks are resident.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    notify,
    num_ranks,
    rank,
    span,
    symm_at,
    wait,
)
from shmemkit.device.packets.transports import AT_ONCE, LL, LL128, in_block, rank_after
from shmemkit.device.packets.units import combining, combining_one_by_one
from shmemkit.operations.packet_method import PacketMethod

u32 = types.uint32


@functools.cache
def from_root_kernel(t, personalized):
    """-> the kernel of transport `t`; `personalized`: x has a segment for each rank."""
    load, store, send, receive = t.load, t.store, t.send, t.receive
    unit_of, units_of = in_block(t)

    @cuda.jit
    def from_root(x, out, size, units, slots, row_units, low, high, root, in_place, empty, epochs):
        """Store the root's `x`, or the rank's segment of it, in `out`.

        x, out     of one of the transport's kinds of words; x counts on the root only
        size       elements of out
        units      of out
        slots, row_units, low, high
                   the channel, of 2 rows
        in_place   whether the root's share of x is out
        empty      uint64 (n_ranks, chunks of the capacity), symmetric, zeros at first
        epochs     uint64 (rows of the grid, chunks of the capacity), zeros at first
        grid       (any number, 1, or on a root that scatters any number up to n_ranks) of blocks of whole
                   warps, of as many threads in all launches
        """
        thread, y, me, n = cuda.threadIdx.x, cuda.blockIdx.y if personalized else 0, rank(), num_ranks()
        first, per_block, channel = unit_of(), units_of(), (slots, row_units, low, high)
        rows = n if personalized and me == root else 1
        griddepcontrol_wait(x, out, size, units, symm_at(slots, 0), empty, epochs, root, first)
        griddepcontrol_launch_dependents()
        while y < rows:
            begin, end = (max(1, y), y + 1) if personalized else (1, n)  # of the ranks after the root
            c = cuda.blockIdx.x
            while c * per_block < units:
                i, epoch = u32(c * per_block + first), epochs[y, c] + 1
                slot, inside = u32((epoch & 1) * row_units + i), i < units
                if me == root:
                    its = span(x, rank_after(me, y) * size, size) if personalized else x
                    words = load(its, min(i, u32(units - 1)))
                    if epoch > 2:
                        s = begin + (thread & 31)
                        while s < end:
                            wait(empty[rank_after(me, s), c:], 1, "sys", "acquire", epoch - 2)
                            s += 32
                    cuda.syncwarp()
                    if inside:
                        s = begin
                        while s < end:
                            send(channel, slot, words, u32(epoch), rank_after(me, s))
                            s += 1
                        if y == 0 and not in_place:
                            store(out, i, words)
                elif inside:
                    store(out, i, receive(channel, slot, u32(epoch)))
                cuda.syncthreads()  # all threads have read the counter, and the slots
                if thread == 0:
                    if me != root:
                        notify(empty[me, c:], root, epoch, "set", "sys")
                    epochs[y, c] = epoch
                c += cuda.gridDim.x
            y += cuda.gridDim.y

    return from_root


@functools.cache
def to_root_kernel(t, op=None, dtype=None, n=None):
    """-> the kernel of transport `t`. With `op`, as "sum", it combines `dtype`, a name as "float16": of `n`
    ranks all at once, or of any number one after the other."""
    load, store, send, receive = t.load, t.store, t.send, t.receive
    unit_of, units_of = in_block(t)
    receive_all = t.receive_all(n) if n else None
    combine = combining(op, dtype, n) if n else combining_one_by_one(t, op, dtype) if op else None

    @cuda.jit
    def to_root(x, out, size, units, slots, row_units, low, high, root, in_place, empty, epochs):
        """Gather or combine the `x` of all ranks in the root's `out`.

        x, out     of one of the transport's kinds of words; out counts on the root only: n_ranks segments
                   that x is as large as, or one
        size       elements of x
        units      of x
        slots, row_units, low, high
                   the channel, of 2 * n_ranks rows
        in_place   whether x is the root's part of out
        empty      uint64 (1, chunks of the capacity), symmetric, zeros at first
        epochs     uint64 (rows of the grid, chunks of the capacity), zeros at first
        grid       (any number, 1, or on a root that gathers any number up to n_ranks) of blocks of whole
                   warps, of as many threads in all launches
        """
        thread, y, me, ranks = cuda.threadIdx.x, cuda.blockIdx.y, rank(), num_ranks()
        first, per_block, channel = unit_of(), units_of(), (slots, row_units, low, high)
        rows = ranks if combine is None and me == root else 1
        griddepcontrol_wait(x, out, size, units, symm_at(slots, root), empty, epochs, first, rows)
        griddepcontrol_launch_dependents()
        while y < rows:
            k, c = rank_after(root, y), cuda.blockIdx.x
            while c * per_block < units:
                i, epoch = u32(c * per_block + first), epochs[y, c] + 1
                row = u32((epoch & 1) * ranks)
                base = u32(row * row_units + i)
                if me != root or receive_all is not None:
                    # Of LL128, what lies beyond the end may be loaded; others store the last unit in place.
                    words = load(x, i if receive_all is not None else min(i, u32(units - 1)))
                    if me != root and epoch > 2:
                        if thread & 31 == 0:
                            wait(empty[0, c:], 1, "sys", "acquire", epoch - 2)
                        cuda.syncwarp()
                    if i < units:
                        send(channel, u32(base + me * row_units), words, u32(epoch), root)
                if me == root and i < units:
                    if receive_all is not None:
                        store(out, i, combine(receive_all(channel, row, i, u32(epoch))))
                    elif combine is not None:
                        store(out, i, combine(channel, base, load(x, i), u32(epoch), me))
                    else:
                        its = span(out, k * size, size)
                        if k != me:
                            store(its, i, receive(channel, u32(base + k * row_units), u32(epoch)))
                        elif not in_place:
                            store(its, i, load(x, i))
                cuda.syncthreads()  # all threads have read the counter, and the slots
                if me == root:
                    if combine is None:
                        if thread == 0 and k != me:
                            notify(empty[0, c:], k, epoch, "set", "sys")
                    else:
                        s = 1 + thread
                        while s < ranks:
                            notify(empty[0, c:], rank_after(me, s), epoch, "set", "sys")
                            s += cuda.blockDim.x
                if thread == 0:
                    epochs[y, c] = epoch
                c += cuda.gridDim.x
            y += cuda.gridDim.y

    return to_root


class Rooted(PacketMethod):
    """A method of this schedule: transport `t`."""

    @staticmethod
    def grid_of(t):
        return 128, max(2, t.blocks // 2)  # a signal says that units of so many threads are read

    def make(self, n_bytes, rows, credit_rows, many):
        """Slots, signals and counters for segments of `n_bytes` or fewer; `many`: the root's grid has a row
        for each rank. Collective."""
        world = self.world
        self.check_ranks()
        self.rows = world.n_ranks if many and world.rank == self.root else 1
        self.channel = self.t.channel(self, rows, n_bytes, self.array_name("slots"))
        chunks = -(-max(1, self.t.units_of(n_bytes)) // self.units_of_block)
        self.empty_signals = self.zeros((credit_rows, chunks), "uint64", self.array_name("empty"))
        self.epochs = world.xp.zeros((self.rows, chunks), "uint64")

    def launch_rooted(self, kernel, x, out, segment, in_place):
        units = self.t.units_of(segment)
        args = *self.channel, self.root, in_place, self.empty_signals, self.epochs
        return self.launch_units(
            *(kernel, units, x, out, segment // x.itemsize, units, *args),
            grid_rows=min(self.rows, self.sms or self.rows),
        )


class FromRoot(Rooted):
    """Broadcast; scatter, if `personalized`."""

    personalized = False

    def prepare(self, max_nbytes, root):
        n, many = self.world.n_ranks, self.personalized
        self.root = root
        self.make(-(-max_nbytes // n) if many else max_nbytes, 2, n, many)
        self.bind_kinds(self._bind, 0, False)

    def bind(self, x, out, in_place):
        return self._bind(*self.t.wide(self.world, x, out, out.nbytes), out.nbytes, in_place)

    def _bind(self, x, out, segment, in_place):
        return self.launch_rooted(from_root_kernel(self.t, self.personalized), x, out, segment, in_place)


class ToRoot(Rooted):
    """Gather, or reduce: then its argument is the op, too."""

    def prepare(self, max_nbytes, root, op=None):
        n = self.world.n_ranks
        self.root, self.op = root, op
        self.at_once_of = n if op and self.t.receive_all and n <= AT_ONCE else None
        self.make(max_nbytes if op else -(-max_nbytes // n), 2 * n, 1, op is None)
        if op is None:
            self.bind_kinds(self._bind, 0, False)

    def bind(self, x, out, in_place, dtype=None):
        return self._bind(
            *self.t.wide(self.world, x, out, x.nbytes), x.nbytes, in_place, dtype and dtype.name
        )

    def _bind(self, x, out, segment, in_place, dtype=None):
        kernel = to_root_kernel(self.t, self.op, dtype, self.at_once_of)
        return self.launch_rooted(kernel, x, out, segment, in_place)


GPU_KERNELS = {
    f"{name}[{t.name},{kind}]": (kernel, {"x out": kind})
    for t in (LL, LL128)
    for name, kernel in (
        ("broadcast", from_root_kernel(t, False)),
        ("scatter", from_root_kernel(t, True)),
        ("gather", to_root_kernel(t)),
        ("reduce sum float16", to_root_kernel(t, "sum", "float16")),
        ("reduce avg float64", to_root_kernel(t, "avg", "float64")),
        *[
            (f"reduce {op} {dtype} of {n}", to_root_kernel(t, op, dtype, n))
            for n, op, dtype in ((4, "sum", "float16"), (8, "avg", "float64"), (16, "prod", "int8"))
            if t.receive_all
        ],
    )
    for kind in t.kinds
}
