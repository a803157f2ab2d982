"""Rows: each rank sends each other rank x, or its segment of x, in a row of the grid of its own. For
all-to-all, and for all-gather by LL. By any packet transport (``device.packets.transports``).

Segments  segment k of out comes from rank k
Slots     slots[buffer, k], on every rank: the units of rank k. Only rank k writes them
Epochs    epochs[k], local: of each group of units to rank k; they select the buffer. Device-resident, so
          graph-safe

  a thread, or a warp of LL128, of a block (b, y), with k = me + 1 + y modulo the ranks, for its units i in
  ascending order. Steps 1 and 2 of the next unit come before step 3, so that packets are under way while it
  waits:
          1. load unit i of what rank k gets; send it to slots[buffer, me] on rank k
          2. add 1 to the group's epoch
          3. wait for unit i in slots[buffer, k], and store it to segment k of out
     k = me: load unit i of the rank's own segment, and store it. No such row if x is in out already

A thread has a unit of one rank, not of all ranks. So more packets are under way at once, and none that has
arrived waits for other ranks. Each multiprocessor gets blocks of all ranks, so all links are used alike.

With fewer blocks than ranks (a budget of multiprocessors) the kernel is that of ``exchange.py``: each thread
has the units of all ranks.

No race: the double-buffer lemma (docs/protocols.md), for the units that two ranks exchange; of Lamport, to
consume a slot includes to reset it. No deadlock: ascending-order progress, for each pair of ranks.
"""

import functools

from numba import cuda, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    num_ranks,
    rank,
    span,
    symm_at,
)
from shmemkit.device.packets.transports import LAMPORT, LL, LL128, indexing, rank_after
from shmemkit.operations.packet_method import PacketMethod

from .exchange import exchange_kernel

u32 = types.uint32


@functools.cache
def rows_kernel(t, personalized):
    """-> the kernel of transport `t`; `personalized`: x has a segment for each rank."""
    load, store, send, receive, shift = t.load, t.store, t.send, t.receive, t.group.bit_length() - 1
    index, stride, counter, leads, end_of = indexing(t)

    @cuda.jit
    def rows(x, out, size, units, slots, row_units, low, high, epochs):
        """Send each rank `x`, or its segment of it, to `out`.

        x, out     of one of the transport's kinds of words: out has n_ranks segments, x too if they are
                   personalized, else one. They lie apart, or x is the rank's own segment of out
        size       elements of a segment
        units      of a segment
        slots, row_units, low, high
                   the channel, of 2 * n_ranks rows
        epochs     uint32 (n_ranks * row_units / group,), zeros at first
        grid       (any number, n_ranks, or n_ranks - 1 if x is in out) of blocks of whole warps
        """
        me, n = rank(), num_ranks()
        k = rank_after(me, 1 + cuda.blockIdx.y)
        i, step, end, channel = index(), stride(), end_of(units), (slots, row_units, low, high)
        its, theirs = span(x, k * size, size) if personalized else x, span(out, k * size, size)
        groups = row_units >> shift
        counts = span(epochs, k * groups, groups)
        there, here, buffer = u32(me * row_units), u32(k * row_units), u32(n * row_units)
        griddepcontrol_wait(its, theirs, counts, symm_at(slots, k), there, here, buffer, i, end, step)
        griddepcontrol_launch_dependents()
        if k == me:
            while i < units:
                store(theirs, i, load(its, i))
                i = u32(i + step)
        else:
            done, epoch, sent = i, u32(0), u32(0)
            while done < end:
                if i < end:
                    sent = u32(counts[counter(i)] + 1)
                    if i < units:
                        send(channel, u32((sent & 1) * buffer + there + i), load(its, i), sent, k)
                    cuda.syncwarp()  # all threads have read the counter
                    if leads(i):
                        counts[counter(i)] = sent
                if done < i:
                    if done < units:
                        words = receive(channel, u32((epoch & 1) * buffer + here + done), epoch)
                        store(theirs, done, words)
                    done = u32(done + step)
                i, epoch = u32(i + step), sent

    return rows


class Rows(PacketMethod):
    """A method of this schedule: transport `t`; whether x is `personalized`."""

    personalized, _any_blocks = False, True

    def prepare(self, max_nbytes):
        t, n = self.t, self.world.n_ranks
        n_bytes = -(-max_nbytes // n)
        self.at_once = self.sms is not None and self.sms < n  # a block has units of all ranks
        self.check_ranks()
        self.channel = t.channel(self, 2 * n, n_bytes, self.array_name("slots"))
        self.epochs = self.world.xp.zeros(n * t.groups_of(n_bytes), "uint32")
        for in_place in (False, True):
            self.bind_kinds(self._bind, 0, in_place)

    def bind(self, x, out, in_place):
        segment = out.nbytes // self.world.n_ranks
        return self._bind(*self.t.wide(self.world, x, out, segment), segment, in_place)

    @staticmethod
    def kernel_of(n_ranks, op, dtype, t, personalized=False, **_):
        return rows_kernel(t, personalized)

    def _bind(self, x, out, segment, in_place):
        units, rows = self.t.units_of(segment), max(1, self.world.n_ranks - in_place)
        n, args = self.world.n_ranks, (*self.channel, self.epochs)
        kernel = self.kernel_of(n, None, None, self.t, self.personalized)
        if self.at_once:
            kernel, rows = exchange_kernel(self.t, n, self.personalized), 1
        return self.launch_units(kernel, units, x, out, segment // out.itemsize, units, *args, grid_rows=rows)


GPU_KERNELS = {
    f"{t.name}[{personalized},{kind}]": (rows_kernel(t, personalized), {"x out": kind})
    for t, personalized in ((LL, False), (LL, True), (LL128, True), (LAMPORT, True))
    for kind in t.kinds
}
