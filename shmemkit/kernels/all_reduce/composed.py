"""All-reduce as a reduce-scatter and an all-gather: for large messages, which take the same time on the links
that way as in one kernel.

  "push"         both by stores into the peers' memory (``reduce_scatter/push.py`` and
                 ``all_gather/push_1d.py``), one after the other
  "copy_engine"  both by copy engines (``reduce_scatter/copy_engine.py`` and ``all_gather/copy_staged.py``;
                 into a symmetric output without staged memory)

Both work on my segment of `out`, in place. An array that is not n_ranks segments of a multiple of 16 bytes
goes through `padded`, symmetric, where it is, there and back, the larger part of the time in local memory.

With "push" each of the two has its own signals and scratch, and argues for itself that its calls may follow
each other without a barrier. The second one begins on a stream when the first has ended on it: my segment of
out is complete. It may be that another rank is still in the first one: it reads only its own x and what is
sent to it, never another's out. Only one rank combines an element, in the order of the ranks.

With "copy_engine" the second one begins earlier, so that the links are busy all the time: half of my segment
goes to one rank as soon as all else has been sent, and has been combined before; then all of it to the
others; and at last the rest, in two pieces, so that little remains to be stored.
Its staged memory is its own, and read by kernels of its own; it may be written after the first one's barrier,
like that one's. A symmetric out may be written then, too: if it is x, then only that range of segment me on
rank k is which has come here, and has been combined. There, a barrier ends the call.
"""

from shmemkit.kernels.all_gather.copy_staged import CopyStaged
from shmemkit.kernels.all_gather.push_1d import Push1D
from shmemkit.kernels.copied_pieces import Step, cuts_of, one_by_one
from shmemkit.kernels.method import Method
from shmemkit.kernels.reduce_scatter import copy_engine, push


class _Composed(Method):
    """A subclass has the two methods, `scattering` and `gathering`; its `name`; and _bind: as ``bind``, of
    whole segments."""

    def prepare(self, max_nbytes, op):
        n = self.world.n_ranks
        self.unit = 16 * n  # bytes
        room = max(1, -(-max_nbytes // self.unit)) * self.unit
        self.parts = []  # which are freed
        for method, *args in ((self.scattering, room, op), (self.gathering, room)):
            self.parts.append(method(self.world, *args))
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

    name, scattering, gathering = "push", push.Push, Push1D

    def _bind(self, x, out, in_place, dtype):
        mine, (scatter, gather) = self._segment(out), self.parts
        first, second = scatter.bind(x, mine, in_place, dtype), gather.bind(mine, out, True)

        def run(stream):
            first(stream)
            second(stream)

        return run


class CopyEngine(_Composed):
    """The method "copy_engine" of ``AllReduce``."""

    name, scattering, gathering = "copy_engine", copy_engine.CopyEngine, CopyStaged

    def _bind(self, x, out, in_place, dtype):
        mine, n, (scatter, gather) = self._segment(out), self.world.n_ranks, self.parts
        if n == 1:
            return scatter.bind(x, mine, in_place, dtype)
        _, half, most, size = cuts_of(mine.size, out.itemsize, 1 / 2, 7 / 8)
        steps = scatter.steps(x, mine, dtype, one_by_one([0, half, size], n))
        first, rest = [(1, 0, half)], [*((y, 0, size) for y in range(2, n)), (1, half, most), (1, most, size)]
        for combined, portions in ((n - 2, first), (len(steps) - 1, rest)):
            if self.world.is_symmetric(out):
                of_portions = (scatter.copies_of([mine] * n, *its, out=mine) for its in portions)
                its = [Step([copy for copies in of_portions for copy in copies])]
            else:
                its = gather.steps([mine] * n, out, portions)
            steps += [its[0]._replace(after=combined), *its[1:]]
        if self.world.is_symmetric(out):
            steps.append(Step(kernel=scatter.barrier))
        return lambda stream: scatter.run(steps, stream)
