"""Two shots: each rank combines one segment, which all ranks send it, and sends the result to all. An
all-reduce for middling messages, by LL128 or Lamport.

Segments  the array is cut into n_ranks segments of equally many units, one for each rank. Where the last
          segments are shorter, ranks send anything and store nothing
Slots     inputs[k, s], on every rank: units of its segment of rank k's array. results[k, s]: units of segment
          k, combined. Only rank k writes them.
          LL128   there are `ring` of each, or fewer if a segment has fewer units; unit i has slot s = i
                  modulo their number
          Lamport one for each unit, i = s, in each of two buffers
Epochs    epochs[s], local: of slot s, or of a warp's slots. It selects the buffer. Device-resident, so
          graph-safe

  a warp of LL128, or a thread, for its units i, one after the other:
          1. load unit i of all segments; send that of segment k to inputs[me, s] on rank k, also on this one
          2. add 1 to the epoch
          3. wait for inputs[:, s], of all ranks at once; combine them in the order of the ranks; send the
             result to results[me, s] on all ranks
          4. wait for results[:, s], of all ranks at once; store them to the segments of the output

All units of a slot of LL128 belong to one warp: if a segment has more units than there are slots, the number
of warps divides that of the slots. So large messages need no more slots than `ring` for each multiprocessor:
three times as many as it has warps in flight, so that many numbers of warps divide them.

One rank combines an element, in the order of the ranks: all ranks get the same bits, in every run.

No race by LL128, without a double buffer. All ranks give unit i the same slot and count its epochs alike,
whatever the sizes of the calls and the grids.

- A rank writes inputs[me, s] on rank k again in the next epoch of slot s. In this one it has received
  results[k, s], which rank k sends after it has read inputs[:, s].
- A rank writes results[me, s] on rank k again in the next epoch of slot s, after inputs[k, s] has come. Rank
  k sends that after it has read results[:, s]: in the same warp, or in a launch that has ended.
  Accesses are relaxed, but each send depends on what was loaded: a warp votes that its lanes have all flags,
  and stores after the branch.
- x may be out: a warp loads its units of x before it writes the same units of out. What other warps load
  there lies beyond the end of their segments, and is not stored.

No race by Lamport: the double-buffer lemma (docs/protocols.md). To consume a slot includes to reset it, in a
launch that must have ended before the slot is written again: so there is no ring. Between two writes of
inputs[me, s] or results[me, s] of a buffer, on rank k, there is a launch in which the other buffer is used;
in it this rank receives inputs[k, s].

No deadlock: ascending-order progress (docs/protocols.md); in each step a warp sends before it waits.
"""

import functools
import math

from numba import cuda, types

from shmemkit.device import (
    begin_phase,
    end_phase,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    rank,
    symm_at,
)
from shmemkit.device.cuda.unroll import for_each, tuple_of
from shmemkit.device.packets.transports import LAMPORT, LL128, MOST_BYTES, indexing, rank_after
from shmemkit.device.packets.units import combining, device, kernel_types, repeating
from shmemkit.operations.packet_method import PacketMethod

u32 = types.uint32
u64 = types.uint64
BUFFERS = {LL128: 1, LAMPORT: 2}


@functools.cache
def _in_segments(t):
    """-> load(k, (x, segment, i, me)): the unit i that the k-th rank gets; and store(k, words, (out, segment,
    i)): unit i of segment k. By Lamport the threads of a warp go on together where a segment ends. Beyond it
    they load zeros and store nothing."""
    load_unit, store_unit, unit_bytes = t.load, t.store, t.unit_bytes

    @device
    def is_there(x, k, segment, i):
        return i < segment and u64(k * segment + i) * u64(unit_bytes) < u64(x.size) * u64(x.itemsize)

    @device
    def load(k, arguments):
        x, segment, i, _ = arguments
        return load_unit(x, k * segment + i)

    @device
    def store(k, words, arguments):
        out, segment, i = arguments
        store_unit(out, k * segment + i, words)

    @device
    def load_there(k, arguments):
        x, segment, i, me = arguments
        k = rank_after(me, k + 1)
        if is_there(x, k, segment, i):
            return load_unit(x, k * segment + i)
        return u64(0), u64(0)

    @device
    def store_there(k, words, arguments):
        out, segment, i = arguments
        if is_there(out, k, segment, i):
            store_unit(out, k * segment + i, words)

    return (load, store) if not t.rotates else (load_there, store_there)


@functools.cache
def _rows(t, n):
    """-> row(epoch, k): the row of the slots that is the k-th of a buffer's 2 n, inputs and results."""

    @device
    def the_only(epoch, k):
        return k

    @device
    def of_two(epoch, k):
        return u32((epoch & 1) * (2 * n) + k)

    return the_only if BUFFERS[t] == 1 else of_two


@functools.cache
def two_shot_kernel(t, n, op, dtype):
    """-> the kernel of transport `t` and `n` ranks that reduces `dtype`, a name as "float16", by `op`, as
    "sum"."""
    (load_of, store_of), row, send, receive = _in_segments(t), _rows(t, n), t.send_all(n), t.receive_all(n)
    combine, (index, stride, counter, leads, end_of) = combining(op, dtype, n), indexing(t)
    load, store, copies = tuple_of(n, load_of), for_each(n, store_of), repeating(n)

    @cuda.jit
    def two_shot(x, out, size, segment, slots, row_units, low, high, epochs):
        """Combine the `x` of all ranks in `out`.

        x, out   of one of the transport's kinds of words, of the same size; may be the same
        size     elements of x
        segment  units of a segment, n of which are x
        slots, row_units, low, high
                 the channel, of 2 * n rows for each buffer: inputs, then results
        epochs   uint32 (row_units / group,), zeros at first
        grid     any number of blocks of whole warps, one-dimensional, as the blocks are; if segment >
                 row_units, their warps divide row_units
        """
        i, step, me, channel = index(), stride(), rank(), (slots, row_units, low, high)
        s, ring, end = i, u32(row_units), end_of(segment)
        griddepcontrol_wait(x, out, segment, symm_at(slots, 0), epochs, me, i)
        griddepcontrol_launch_dependents()
        while i < end:
            epoch = u32(epochs[counter(s)] + 1)
            begin_phase("reduce-scatter")
            send(channel, row(epoch, me), s, load((x, segment, i, me)), epoch, me)
            cuda.syncwarp()  # all threads have read the counter
            if leads(s):
                epochs[counter(s)] = epoch
            words = combine(receive(channel, row(epoch, 0), s, epoch))
            end_phase("reduce-scatter")
            begin_phase("all-gather")
            send(channel, row(epoch, n + me), s, copies(words), epoch, me)
            store(receive(channel, row(epoch, n), s, epoch), (out, segment, i))
            end_phase("all-gather")
            i, s = u32(i + step), u32(s + step)
            if s >= ring:
                s = u32(s - ring)
            cuda.syncwarp()  # the counter may be read again

    return two_shot


class TwoShot(PacketMethod):
    """A method of this schedule: transport `t`.

    ring  slots of a row of LL128, at most, in blocks for each multiprocessor: a number with many divisors
    """

    at_once, ring = True, 48

    def prepare(self, max_nbytes, op):
        t, n = self.t, self.world.n_ranks
        if max_nbytes > MOST_BYTES:
            raise ValueError(
                f"{self.name}: max_nbytes is {max_nbytes}; it must be {MOST_BYTES} at most, since "
                "packets are counted in 32 bits. Take another method"
            )
        self.op = op
        most = min(self.world.host_allgather(self.world.backend.multiprocessors))
        self.ring_blocks = self.ring * self.within(most)
        self.ring_units = math.inf if BUFFERS[t] == 2 else self.ring_blocks * self.units_of_block
        segment = t.unit_bytes * min(self._segment(max_nbytes), self.ring_units)
        self.check_ranks()
        self.channel = t.channel(self, 2 * n * BUFFERS[t], segment, self.array_name("slots"))
        self.epochs = self.world.xp.zeros(t.groups_of(segment), "uint32")

    def _segment(self, n_bytes):
        """-> its units"""
        return max(1, -(-self.t.units_of(n_bytes) // self.world.n_ranks))

    def bind(self, x, out, in_place, dtype):
        kernel = two_shot_kernel(self.t, self.world.n_ranks, self.op, dtype.name)
        segment = self._segment(x.nbytes)
        x, out = self.t.wide(self.world, x, out, x.nbytes)
        ring = self.ring_blocks if segment > self.ring_units else None
        args = x.size, segment, *self.channel, self.epochs
        return self.launch_units(kernel, segment, x, out, *args, divides=ring)


GPU_KERNELS = {
    f"{t.name}[{op},{dtype},{n},{kind}]": (
        two_shot_kernel(t, n, op, dtype),
        kernel_types(t, types.Array(types.uint32, 1, "C"))[kind],
    )
    for t in (LL128, LAMPORT)
    for op, dtype, n, kind in (
        ("sum", "bfloat16", 4, "complex128"),
        ("sum", "float32", 2, "complex128"),
        ("sum", "float16", 4, "uint8"),
        ("max", "float32", 8, "uint64"),
        ("prod", "int8", 16, "complex128"),
        ("avg", "float8_e4m3fn", 4, "complex128"),
    )
}
