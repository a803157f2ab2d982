"""All-reduce as a reduce-scatter and an all-gather: for large messages, which take the same time on the links
that way as in one kernel.

  "push"         both by stores into the peers' memory (``reduce_scatter/push.py`` and
                 ``all_gather/push_1d.py``), one after the other
  "copy_engine"  both by copy engines: ``reduce_scatter/copy_engine.py``, and copies of the results to all
                 outputs

Both work on my segment of `out`, in place. An array that is not n_ranks segments of a multiple of 16 bytes
goes through `padded`, symmetric, where it is, there and back, the larger part of the time in local memory.

With "push" each of the two has its own signals and scratch, and argues for itself that its calls may follow
each other without a barrier. The second one begins on a stream when the first has ended on it: my segment of
out is complete. It may be that another rank is still in the first one: it reads only its own x and what is
sent to it, never another's out. Only one rank combines an element, in the order of the ranks.

With "copy_engine" the second one begins earlier, so that the links are busy all the time: half of my result
is copied as soon as all else has been sent, and has been combined before; then all of those of others, and at
last the rest. Its barriers, of all ranks, come

  1. beside the copies of x: the call before has ended everywhere. These copies need none: all places have
     been empty since barrier 3 of the call before
  2. when half of my result is combined, and what it is made of has been copied from my x; 3. likewise, all
  4. at the end, into a symmetric out: all results are there

A symmetric out: my result is combined in it, and copied to the outs of the others after barriers 2 and 3.
These may be written since barrier 1; if x is out, then barriers 2 and 3 tell that what was there has been
sent.

Another one: my result is combined in `result`, symmetric, stored from there to my out, and copied to their
outs by the others, after barriers 2 and 3. If x is out: a rank's copies of others' results come after those
of its x. result may be combined again after barrier 1 of the next call: its copies have ended.
"""

from shmemkit.device import PIECE_BYTES

from ..all_gather.push_1d import Push1D
from ..copy_engine_exchange import LINE, enqueue
from ..method import Method
from ..own_segment import bind_store
from ..reduce_scatter import copy_engine, push


class _Composed(Method):
    """A subclass has its `name`; prepare_parts(room, op), which appends to `parts` what is freed; and _bind:
    as ``bind``, of whole segments."""

    def prepare(self, max_nbytes, op):
        n = self.world.n_ranks
        self.unit = 16 * n  # bytes
        room = max(1, -(-max_nbytes // self.unit)) * self.unit
        self.parts = []
        try:
            self.prepare_parts(room, op)
        except ValueError as refusal:
            raise type(refusal)(f"all_reduce {self.name}: {refusal}") from None
        self.padded = self.empty(room, "uint8", f"all_reduce.{self.name}.padded")

    def bind(self, x, out, in_place, dtype):
        if out.nbytes % self.unit == 0:
            return self._bind(x, out, in_place, dtype)
        backend, view = self.world.backend, self.padded[: out.nbytes]
        whole = self.padded[: -(-out.nbytes // self.unit) * self.unit].view("uint64")
        enter, leave = backend.copy(view, x.view("uint8")), backend.copy(out.view("uint8"), view)
        reduce = self._bind(whole, whole, True, dtype)

        def run(stream):
            enter(backend.handle(stream))
            reduce(stream)
            leave(backend.handle(stream))

        return run

    def _segment(self, out):
        size = out.size // self.world.n_ranks
        return out[self.world.rank * size :][:size]

    def free(self):
        while self.parts:
            self.parts.pop().free()
        super().free()


class Push(_Composed):
    """The method "push" of ``AllReduce``."""

    name = "push"

    def prepare_parts(self, room, op):
        self.parts.append(push.Push(self.world, room, op))
        self.parts.append(Push1D(self.world, room))

    def _bind(self, x, out, in_place, dtype):
        mine, (scatter, gather) = self._segment(out), self.parts
        first, second = scatter.bind(x, mine, in_place, dtype), gather.bind(mine, out, True)

        def run(stream):
            first(stream)
            second(stream)

        return run


class CopyEngine(_Composed):
    """The method "copy_engine" of ``AllReduce``."""

    name = "copy_engine"

    def prepare_parts(self, room, op):
        self.parts.append(copy_engine.CopyEngine(self.world, room, op))
        self.result = self.empty(room // self.world.n_ranks, "uint8", "all_reduce.copy_engine.result")

    def _bind(self, x, out, in_place, dtype):
        mine, n, (scatter,) = self._segment(out), self.world.n_ranks, self.parts
        if n == 1:
            return scatter.bind(x, mine, in_place, dtype)
        world, order = self.world, self.world.backend.order
        pushed = world.is_symmetric(out)
        result = mine if pushed else self.result[: mine.nbytes].view(out.dtype)
        pieces = mine.nbytes // PIECE_BYTES
        half = min(pieces, pieces // 2 + LINE - 1 & -LINE)
        cut, segments = half * PIECE_BYTES // out.itemsize, scatter.segments_of(x)
        early = scatter.copies(segments, range(1, n - 1))
        late = [scatter.copies(segments, [n - 1], *part) for part in ((0, half), (half, pieces))]
        parts = scatter.combining(x, result[:cut], dtype), scatter.combining(x, result[cut:], dtype, half)
        copied, barrier = self._pushed if pushed else self._pulled, scatter.barrier
        copies = (
            copied(out, result, [(1, 0, cut)]),
            copied(out, result, [*((y, 0, mine.size) for y in range(2, n)), (1, cut, mine.size)]),
        )
        own = None if pushed else bind_store(self, mine, result)

        def run(stream):
            main, beside = scatter.fork(stream)
            enqueue(early, beside)
            if early:
                order(main, beside)
            enqueue(late[0], beside)
            barrier(stream)  # 1
            parts[0](stream)
            order(main, beside)
            enqueue(late[1], beside)
            barrier(stream)  # 2
            order(beside, main)
            parts[1](stream)
            order(main, beside)
            barrier(stream)  # 3
            enqueue(copies[0], beside)
            order(beside, main)
            if not pushed:
                own(stream)
            enqueue(copies[1], beside)
            order(main, beside)
            if pushed:
                barrier(stream)  # 4

        return run

    def _pushed(self, out, result, portions):
        """-> copies of these `portions`, (y, first, end): elements of mine to the y-th rank after this one"""
        world, copies = self.world, []
        for y, first, end in portions:
            if first < end:
                theirs = world.peer_view(result[first:end], (world.rank + y) % world.n_ranks)
                copies.append(world.backend.copy(theirs, result[first:end]))
        return copies

    def _pulled(self, out, result, portions):
        """-> likewise, of those of the y-th rank after this one to its segment of `out`"""
        world, size, copies = self.world, result.size, []
        for y, first, end in portions:
            if first < end:
                k = (world.rank + y) % world.n_ranks
                theirs = world.peer_view(result[first:end], k)
                copies.append(world.backend.copy(out[k * size :][first:end], theirs))
        return copies
