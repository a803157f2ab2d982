"""Team operations of NVSHMEM, called from kernels by one thread per PE (the others of its warp or block wait for it)."""

import numpy as np

from .network import copy

N_TEAMS = 4  # world, shared, node, and the same local rank of every node


class Collectives:
    def __init__(self, machine):
        self.machine = machine
        self.arrivals = {}  # PE -> (N_TEAMS, n_pes) counters in its symmetric heap: who has come how often
        self.epochs = {}  # (PE, team members) -> meetings so far

    def add_pe(self, heap):
        """Called for every local PE, first of all its allocations."""
        counters = heap.allocate(N_TEAMS * heap.n_pes * 8).view(np.uint64).reshape(N_TEAMS, heap.n_pes)
        self.arrivals[heap.pe] = counters

    def meet(self, thread, pes):
        """Wait until every PE of `pes` is here. Its arrival publishes its earlier writes."""
        me, machine = thread.pe, self.machine
        row = len(pes) == machine.n_pes and 0 or (2 if pes[-1] - pes[0] + 1 == len(pes) else 3)
        epoch = self.epochs[me, row] = self.epochs.get((me, row), 0) + 1
        mine = self.arrivals[me][row]
        for pe in pes:
            thread.atomic(machine.heaps[me].on(mine, pe), me, lambda old: old + np.uint64(1))
        for pe in pes:
            thread.wait(mine, pe, "ge", epoch)

    def broadcast(self, thread, pes, dst, src, root=0):
        """dst of every PE = src of the team's member `root`."""
        self._pull(thread, pes, lambda peer: copy(dst, peer(src, pes[root]), "broadcast"))

    def fcollect(self, thread, pes, dst, src):
        """dst = the src of all members, one after another."""
        n = src.size

        def pull(peer):
            for i, pe in enumerate(pes):
                copy(_flat(dst)[i * n : (i + 1) * n], peer(src, pe), "fcollect")

        self._pull(thread, pes, pull)

    def alltoall(self, thread, pes, dst, src):
        """dst[i] = the part of member i's src that is meant for me; src and dst hold one equal part per member."""
        n, me = min(src.size, dst.size) // len(pes), pes.index(thread.pe)

        def pull(peer):
            for i, pe in enumerate(pes):
                copy(_flat(dst)[i * n : (i + 1) * n], _flat(peer(src, pe))[me * n : (me + 1) * n], "alltoall")

        self._pull(thread, pes, pull)

    def reduce(self, thread, pes, dst, src, op="sum"):
        """dst = the elementwise reduction of all members' src."""
        n = min(src.size, dst.size)
        self._reduce(thread, pes, dst, src, slice(0, n), op)

    def reducescatter(self, thread, pes, dst, src, op="sum"):
        """dst = my part of the elementwise reduction of all members' src; src holds one equal part per member."""
        n, me = min(dst.size, src.size // len(pes)), pes.index(thread.pe)
        self._reduce(thread, pes, dst, src, slice(me * n, (me + 1) * n), op)

    def _reduce(self, thread, pes, dst, src, part, op):
        self.meet(thread, pes)
        parts = [np.asarray(_flat(self.machine.peer(thread.block, src, pe)))[part] for pe in pes]
        result = parts[0].copy()
        with np.errstate(over="ignore"):
            for other in parts[1:]:
                result = _REDUCE[op](result, other).astype(result.dtype)
        self.meet(thread, pes)  # everybody has read: dst may be src
        copy(dst, result, "reduce")

    def _pull(self, thread, pes, function):
        self.meet(thread, pes)
        function(lambda array, pe: self.machine.peer(thread.block, array, pe))
        self.meet(thread, pes)


def _flat(array):
    return array.reshape(-1)


_REDUCE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
