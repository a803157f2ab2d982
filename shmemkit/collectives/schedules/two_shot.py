"""Two shots: each rank combines one segment, which all ranks send it, and sends the result to all. An
all-reduce for middling messages, by LL128.

Segments  the array is cut into n_ranks segments of equally many units, one for each rank. Where the last
          segments are shorter, ranks send anything and store nothing
Slots     inputs[k, s], on every rank: units of its segment of rank k's array. results[k, s]: units of segment
          k, combined. Only rank k writes them. There are `ring` of each, or fewer if a segment has fewer
          units; unit i has slot s = i modulo their number
Epochs    epochs[s], local: of slot s. Device-resident, so graph-safe

  a warp, for its units i, one after the other:
          1. load unit i of all segments; send that of segment k to inputs[me, s] on rank k, also on this one
          2. add 1 to the slot's epoch
          3. wait for inputs[:, s], of all ranks at once; combine them in the order of the ranks; send the
             result to results[me, s] on all ranks
          4. wait for results[:, s], of all ranks at once; store them to the segments of the output

All units of a slot belong to one warp: if a segment has more units than there are slots, the number of warps
divides that of the slots. So large messages need no more slots than `ring` for each multiprocessor: three
times as many as it has warps in flight, so that many numbers of warps divide them.

One rank combines an element, in the order of the ranks: all ranks get the same bits, in every run.

No race, without a double buffer. All ranks give unit i the same slot and count its epochs alike, whatever the
sizes of the calls and the grids.

- A rank writes inputs[me, s] on rank k again in the next epoch of slot s. In this one it has received
  results[k, s], which rank k sends after it has read inputs[:, s].
- A rank writes results[me, s] on rank k again in the next epoch of slot s, after inputs[k, s] has come. Rank
  k sends that after it has read results[:, s]: in the same warp, or in a launch that has ended.
  Accesses are relaxed, but each send depends on what was loaded: a warp votes that its lanes have all flags,
  and stores after the branch.
- x may be out: a warp loads its units of x before it writes the same units of out. What other warps load
  there lies beyond the end of their segments, and is not stored.

Lamport's slots must be reset, in a launch that has ended: they would need a double buffer for the inputs.

No deadlock: ascending-order progress (docs/protocols.md); in each step a warp sends before it waits.
"""

import functools

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
from shmemkit.device.packets.transports import LL128, MOST_BYTES, indexing
from shmemkit.device.packets.units import combining, device, repeating
from shmemkit.operations.packet_method import PacketMethod

u32 = types.uint32


@functools.cache
def two_shot_kernel(t, n, op, dtype):
    """-> the kernel of transport `t` and `n` ranks that reduces `dtype`, a name as "float16", by `op`, as
    "sum"."""
    load_unit, store_unit, send, receive = t.load, t.store, t.send_all(n), t.receive_all(n)
    combine, (index, stride, counter, leads, _) = combining(op, dtype, n), indexing(t)

    @device
    def load_of(k, arguments):
        x, segment, i = arguments
        return load_unit(x, k * segment + i)

    @device
    def store_of(k, words, arguments):
        out, segment, i = arguments
        store_unit(out, k * segment + i, words)

    load, store, copies = tuple_of(n, load_of), for_each(n, store_of), repeating(n)

    @cuda.jit
    def two_shot(x, out, size, segment, slots, row_units, low, high, epochs):
        """Combine the `x` of all ranks in `out`.

        x, out   of one of the transport's kinds of words, of the same size; may be the same
        size     elements of x
        segment  units of a segment, n of which are x
        slots, row_units, low, high
                 the channel, of 2 * n rows: inputs, then results
        epochs   uint32 (row_units,), zeros at first
        grid     any number of blocks of whole warps, one-dimensional, as the blocks are; if segment >
                 row_units, their warps divide row_units
        """
        i, step, me, channel = index(), stride(), rank(), (slots, row_units, low, high)
        s, end = i, u32(row_units)
        griddepcontrol_wait(x, out, segment, symm_at(slots, 0), epochs, me, i)
        griddepcontrol_launch_dependents()
        while i < segment:
            epoch = u32(epochs[counter(s)] + 1)
            begin_phase("reduce-scatter")
            send(channel, me, s, load((x, segment, i)), epoch, me)
            cuda.syncwarp()  # all threads have read the counter
            if leads(s):
                epochs[counter(s)] = epoch
            words = combine(receive(channel, 0, s, epoch))
            end_phase("reduce-scatter")
            begin_phase("all-gather")
            send(channel, n + me, s, copies(words), epoch, me)
            store(receive(channel, n, s, epoch), (out, segment, i))
            end_phase("all-gather")
            i, s = u32(i + step), u32(s + step)
            if s >= end:
                s = u32(s - end)
            cuda.syncwarp()  # the counter may be read again

    return two_shot


class TwoShot(PacketMethod):
    """A method of this schedule: transport `t`.

    ring  slots of a row, at most, in blocks for each multiprocessor: a number with many divisors
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
        self.ring_units = self.ring_blocks * self.units_of_block
        segment = t.unit_bytes * min(self._segment(max_nbytes), self.ring_units)
        self.check_ranks()
        self.channel = t.channel(self, 2 * n, segment, self.array_name("slots"))
        self.epochs = self.world.xp.zeros(t.groups_of(segment), "uint32")

    def _segment(self, n_bytes):
        """-> its units"""
        return max(1, -(-self.t.units_of(n_bytes) // self.world.n_ranks))

    @staticmethod
    def kernel_of(n_ranks, op, dtype, t, **_):
        return two_shot_kernel(t, n_ranks, op, dtype)

    def bind(self, x, out, in_place, dtype):
        kernel = self.kernel_of(self.world.n_ranks, self.op, dtype.name, self.t)
        segment = self._segment(x.nbytes)
        x, out = self.t.wide(self.world, x, out, x.nbytes)
        ring = self.ring_blocks if segment > self.ring_units else None
        args = x.size, segment, *self.channel, self.epochs
        return self.launch_units(kernel, segment, x, out, *args, divides=ring)


GPU_KERNELS = {
    f"ll128[{op},{dtype},{n},{kind}]": (two_shot_kernel(LL128, n, op, dtype), {"x out": kind})
    for op, dtype, n, kind in (
        ("sum", "bfloat16", 4, "complex128"),
        ("sum", "float32", 2, "complex128"),
        ("sum", "float16", 4, "uint8"),
        ("max", "float32", 8, "uint64"),
        ("prod", "int8", 16, "complex128"),
        ("avg", "float8_e4m3fn", 4, "complex128"),
    )
}
