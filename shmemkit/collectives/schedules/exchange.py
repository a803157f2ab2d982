"""Exchange: each rank sends all ranks x, or each of them another segment of x. What arrives is stored by rank
(all-gather), or combined (reduce-scatter, one-shot all-reduce). By any packet transport
(``device.packets.transports``).

Slots     slots[buffer, k], on every rank: the units of rank k. Only rank k writes them
Epochs    of each group of units; they select the buffer. Device-resident, so graph-safe

  a thread, or a warp of LL128, for its units i in ascending order. Steps 1 and 2 of the next unit come before
  step 3, so that packets are under way while it waits:
          1. load unit i of what each rank gets; send it to slots[buffer, me] on that rank
          2. add 1 to the group's epoch
          3. wait for unit i in slots[buffer] of all ranks. Store the units to the segments of the output, or
             combine them in the order of the ranks and store the result

LL128 and Lamport hold the units of all ranks in registers, and poll them at once; a rank sends to itself,
too. LL takes one rank after the other, so any number of ranks, and its own unit from x.

All ranks combine in the same order. So the bits are the same in every run, and an all-reduce has the same
bits on all ranks.

No race: the double-buffer lemma (docs/protocols.md); of Lamport, to consume a slot includes to reset it. x
may lie in out where the result goes: a unit of x is loaded before the result is stored, and nobody else
stores there. (What LL128 loads beyond an end, it does not store.) No deadlock: ascending-order progress.
"""

import functools

import numpy as np
from numba import cuda, types

from shmemkit.compiler.ptx import TypingError, gpu, itemsize
from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    num_ranks,
    rank,
    span,
    symm_at,
)
from shmemkit.device.argument_checks import check_aligned
from shmemkit.device.emulator import current_thread
from shmemkit.device.packets.transports import LAMPORT, LL, LL128, indexing, rank_after
from shmemkit.device.packets.units import (
    REDUCTIONS,
    combining,
    combining_one_by_one,
    device,
    sending,
    storing,
)
from shmemkit.operations.packet_method import PacketMethod
from shmemkit.runtime.symmetric_memory import as_dtype

u32 = types.uint32


@functools.cache
def _at_once(t, n, personalized, op, dtype):
    """-> send(channel, buffer, i, x, size, epoch, me), take(channel, buffer, i, x, out, size, epoch, me)"""
    send_all, receive, store_unit = sending(t, n, personalized), t.receive_all(n), t.store
    store_all = storing(t, n)
    combine = combining(op, dtype, n) if op else None

    @device
    def send(channel, buffer, i, x, size, epoch, me):
        send_all(channel, u32(buffer * n + me), i, x, size, epoch, me)

    @device
    def take(channel, buffer, i, x, out, size, epoch, me):
        arrived = receive(channel, u32(buffer * n), i, epoch)
        if combine is None:
            store_all(arrived, (out, size, i))
        else:
            store_unit(out, i, combine(arrived))

    return send, take


@functools.cache
def _one_by_one(t, personalized, op, dtype):
    """The same for any number of ranks; it combines words."""
    load, store, send_unit = t.load, t.store, t.send

    @device
    def own(x, size, i, k):
        return load(span(x, k * size, size) if personalized else x, i)

    @device
    def send(channel, buffer, i, x, size, epoch, me):
        slot, y = u32((buffer * num_ranks() + me) * channel[1] + i), 1
        words = own(x, size, i, me)
        while y < num_ranks():
            k = rank_after(me, y)
            send_unit(channel, slot, own(x, size, i, k) if personalized else words, epoch, k)
            y += 1

    if op is None:
        return send, storing_one_by_one(t, own)
    combine = combining_one_by_one(t, op, dtype)

    @device
    def take(channel, buffer, i, x, out, size, epoch, me):
        slot = u32(buffer * num_ranks() * channel[1] + i)
        store(out, i, combine(channel, slot, own(x, size, i, me), epoch, me))

    return send, take


def storing_one_by_one(t, own):
    """-> a `take` that stores the units of all ranks; ``own(x, size, i, k)`` is the rank's own one."""
    receive, store = t.receive, t.store

    @device
    def take(channel, buffer, i, x, out, size, epoch, me):
        n, k = num_ranks(), 0
        while k < n:
            slot = u32((buffer * n + k) * channel[1] + i)
            words = own(x, size, i, me) if k == me else receive(channel, slot, epoch)
            store(span(out, k * size, size), i, words)
            k += 1

    return take


@functools.cache
def exchange_kernel(t, n, personalized, op=None, dtype=None, of_block=False):
    """-> the kernel of transport `t` and `n` ranks (any number, where `t` takes one after the other).
    `personalized`: x has a segment for each rank. With `op`, as "sum", it combines what arrives, of `dtype`,
    a name as "float16". `of_block`: the same as a device function, whose units are those of one block."""
    how = (t, n, personalized, op, dtype) if t.receive_all else (t, personalized, op, dtype)
    send, take = (_at_once if t.receive_all else _one_by_one)(*how)
    index, stride, counter, leads, end_of = indexing(t, of_block)

    @(device if of_block else cuda.jit)
    def exchange(x, out, size, units, slots, row_units, low, high, epochs):
        """Send each rank `x`, or its segment of it, to `out`.

        x, out     of one of the transport's kinds of words; x has n segments if they are personalized, else
                   one; out has n, or one if they are combined. They may be the same, or one a segment of the
                   other, as the kinds of collectives allow it
        size       elements of a segment
        units      of a segment
        slots, row_units, low, high
                   the channel, of 2 * n rows
        epochs     uint32 (row_units / group,), zeros at first
        grid       any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        i, step, me, count = index(), stride(), rank(), u32(units)
        end, channel = u32(end_of(count)), (slots, row_units, low, high)
        griddepcontrol_wait(x, out, size, symm_at(slots, 0), epochs, me, i)
        griddepcontrol_launch_dependents()
        done, epoch, sent = i, u32(0), u32(0)
        while done < end:
            if i < end:
                sent = u32(epochs[counter(i)] + 1)
                if i < count:
                    send(channel, sent & 1, i, x, size, sent, me)
                cuda.syncwarp()  # all threads have read the counter
                if leads(i):
                    epochs[counter(i)] = sent
            if done < i:
                if done < count:
                    take(channel, epoch & 1, done, x, out, size, epoch, me)
                done = u32(done + step)
            i, epoch = u32(i + step), sent

    return exchange


@functools.cache
def checking(t, dtype):
    """-> check(x, out, number, scratch) of a tile: on the emulator all of it, on a GPU, at compile time, how
    large elements of `dtype` are, which is None for any"""

    def check(x, out, number, scratch):
        most, epochs, segment = scratch[0], scratch[-1], min(x.size, out.size) * x.itemsize
        tiles, block = epochs.size * t.group // most, tuple(current_thread("tile").block.blockDim)
        if block[0] % 32 or block[1:] != (1, 1):
            raise ValueError(f"tile: the block is {block}; it must be one-dimensional, of whole warps of 32")
        for name, array in (("x", x), ("out", out)):
            check_aligned("tile", name, array, 16)
            if dtype and array.dtype.name != dtype:
                raise TypeError(f"tile: {name} is {array.dtype}; it must be {dtype}, as of the kernel")
        if not 0 <= number < tiles:
            raise IndexError(f"tile: its number is {number}; the scratch is for 0 to {tiles - 1}")
        if t.units_of(segment) > most:
            raise ValueError(
                f"tile: it has {segment} bytes; the scratch is for {most * t.unit_bytes} at most. Give "
                "tiles() more nbytes"
            )

    @gpu(check)
    def _(x, out, number, scratch):
        if dtype and {itemsize(x.dtype), itemsize(out.dtype)} != {as_dtype(dtype).itemsize}:
            raise TypingError(
                f"tile: x has elements of {x.dtype} and out of {out.dtype}; they must be {dtype}"
            )
        return lambda x, out, number, scratch: None

    return check


@functools.cache
def exchange_tile(t, n, personalized, op=None, dtype=None):
    """-> ``tile(x, out, number, scratch)``, a device function: the same for a tile of a user's kernel, by all
    threads of a block. `scratch` is (units of a tile at most, *the channel, epochs), of rows of whole tiles;
    the units of tile `number` are those from number * that on.

    Each tile has units, and so epochs, of its own. So the lemmas hold as for launches, if a tile is sent once
    in a launch.
    """
    exchange, check = exchange_kernel(t, n, personalized, op, dtype, of_block=True), checking(t, dtype)
    group, slot_words, unit_bytes = t.group, t.slot_words, u32(t.unit_bytes)
    widest = getattr(np, t.kinds[0])
    width = np.dtype(widest).itemsize

    @device
    def tile(x, out, number, scratch):
        check(x, out, number, scratch)
        most, slots, row_units, low, high, epochs = scratch
        first, segment = number * most, min(x.size, out.size) * x.itemsize
        units = u32(u32(segment) + u32(unit_bytes - 1)) // unit_bytes
        slots = span(slots, first * slot_words, slots.size - first * slot_words)
        epochs = span(epochs, first // group, most // group)
        cuda.syncthreads()
        if segment % width:
            x, out = x.view(np.uint8), out.view(np.uint8)
            exchange(x, out, segment, units, slots, row_units, low, high, epochs)
        else:
            x, out = x.view(widest), out.view(widest)
            exchange(x, out, segment // width, units, slots, row_units, low, high, epochs)
        cuda.syncthreads()

    return tile


class Exchange(PacketMethod):
    """A method of this schedule: transport `t`; whether x is `personalized`; whether the full array is one
    segment (`whole`), as of an all-reduce, and not one for each rank."""

    at_once = _any_blocks = True
    personalized = whole = False

    def prepare(self, max_nbytes, op=None):
        t, n = self.t, self.world.n_ranks
        self.op, self.n_segments = op, 1 if self.whole else n
        n_bytes = -(-max_nbytes // self.n_segments)
        self.check_ranks()
        self.channel = t.channel(self, 2 * n, n_bytes, self.array_name("slots"))
        self.epochs = self.world.xp.zeros(t.groups_of(n_bytes), "uint32")
        if op is None:
            self.bind_kinds(self._bind, 0)

    def bind(self, x, out, in_place, dtype=None):
        segment = max(x.nbytes, out.nbytes) // self.n_segments
        return self._bind(*self.t.wide(self.world, x, out, segment), segment, dtype and dtype.name)

    @staticmethod
    def kernel_of(n_ranks, op, dtype, t, personalized=False, **_):
        return exchange_kernel(t, n_ranks, personalized, op, dtype)

    @staticmethod
    def tile_of(n_ranks, op, dtype, t, personalized=False, **_):
        return exchange_tile(t, n_ranks, personalized, op, dtype)

    def _bind(self, x, out, segment, dtype=None):
        t = self.t
        kernel = self.kernel_of(self.world.n_ranks, self.op, dtype, t, self.personalized)
        units = t.units_of(segment)
        args = segment // out.itemsize, units, *self.channel, self.epochs
        return self.launch_units(kernel, units, x, out, *args)


def _listed(t, personalized, combined):
    """On sm_80, some with a segment for each rank spill registers: those of many ranks, and those by words
    and bytes."""
    last = len(t.kinds) - 1
    cases = [(n, t.kinds[min(k, last)]) for n, k in ((4, 0), (8, 1), (4, 2), (16, 0), (2, 0))]
    return {
        f"{t.name}[{','.join(map(str, (personalized, *how, n, kind)))}]": (
            exchange_kernel(t, n, personalized, *how),
            {"x out": kind},
            *[(9, 0)] * (personalized and (n, kind) != cases[0]),
        )
        for how, (n, kind) in zip(REDUCTIONS if combined else [()] * 5, cases, strict=True)
    }


GPU_KERNELS = {
    name: kernel
    for t in (LL, LL128, LAMPORT)
    for personalized, combined in ((False, False), (True, False), (True, True), (False, True))
    for name, kernel in _listed(t, personalized, combined).items()
}
