"""All-reduce as a reduce-scatter and an all-gather, one after the other: for large messages, which take the
same time on the links that way as in one kernel.

  "push"         both by stores into the peers' memory (``reduce_scatter/push.py``, ``all_gather/push_1d.py``)
  "copy_engine"  both by copy engines (``reduce_scatter/copy_engine.py``; ``all_gather/copy_engine.py`` into a
                 symmetric output, ``all_gather/copy_staged.py`` else): few multiprocessors are taken

Both work on my segment of `out`, in place. An array that is not n_ranks segments of a multiple of 16 bytes
goes through `padded`, symmetric, where it is, there and back, the larger part of the time in local memory.

Each of the two has its own signals and scratch, and argues for itself that its calls may follow each other
without a barrier. The second one begins on a stream when the first has ended on it: my segment of out is
complete. It may be that another rank is still in the first one: it reads only its own x and what is sent to
it, never another's out. Only one rank combines an element, in the order of the ranks.
"""

from shmemkit.kernels.all_gather.copy_engine import CopyPush
from shmemkit.kernels.all_gather.copy_staged import CopyStaged
from shmemkit.kernels.all_gather.push_1d import Push1D
from shmemkit.kernels.method import Method
from shmemkit.kernels.reduce_scatter import copy_engine, push


class _Composed(Method):
    """A subclass has the two methods, `scatter` and `gather`, the latter for an output in private memory and
    for a symmetric one, and its `name`."""

    def prepare(self, max_nbytes, op):
        n = self.world.n_ranks
        self.unit = 16 * n  # bytes
        room = max(1, -(-max_nbytes // self.unit)) * self.unit
        self.parts = {}
        for kind, *args in ((self.scatter, room, op), *((kind, room) for kind in self.gather)):
            if kind not in self.parts:
                self.parts[kind] = kind(self.world, *args)
        self.padded = self.empty(room, "uint8", f"all_reduce.{self.name}.padded")

    def bind(self, x, out, in_place, dtype):
        if out.nbytes % self.unit == 0:
            return self._in_turn(self._bind(x, out, in_place, dtype))
        backend, view = self.world.backend, self.padded[: out.nbytes]
        whole = self.padded[: -(-out.nbytes // self.unit) * self.unit].view("uint64")
        enter, leave = backend.copy(view, x.view("uint8")), backend.copy(out.view("uint8"), view)
        return self._in_turn(
            [
                lambda stream: enter(backend.handle(stream)),
                *self._bind(whole, whole, True, dtype),
                lambda stream: leave(backend.handle(stream)),
            ]
        )

    def _bind(self, x, out, in_place, dtype):
        scatter = self.parts[self.scatter]
        gather = self.parts[self.gather[self.world.is_symmetric(out)]]
        segment = out.size // self.world.n_ranks
        mine = out[self.world.rank * segment :][:segment]
        return scatter.bind(x, mine, in_place, dtype), gather.bind(mine, out, True)

    @staticmethod
    def _in_turn(steps):
        def run(stream):
            for step in steps:
                step(stream)

        return run

    def free(self):
        while self.parts:
            self.parts.popitem()[1].free()
        super().free()


class Push(_Composed):
    """The method "push" of ``AllReduce``."""

    name, scatter, gather = "push", push.Push, (Push1D, Push1D)


class CopyEngine(_Composed):
    """The method "copy_engine" of ``AllReduce``."""

    name, scatter, gather = "copy_engine", copy_engine.CopyEngine, (CopyStaged, CopyPush)
