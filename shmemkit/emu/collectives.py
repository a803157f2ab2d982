"""Team operations of NVSHMEM, called from kernels by one thread per PE; others of its warp or block wait.

Each is carried out by every PE pulling what it needs, between two barriers. NVSHMEM promises less: when a
call returns, this PE's arrays are finished with, and the PEs that it has data from have entered. So for races
each PE accesses its own arrays alone, learns only what those PEs did before they entered, and knows nothing
from the second barrier. The dst of a broadcast may be written as soon as its root has entered.

What a PE learns in a barrier is what the others did before they came to it. The counters cannot tell that: a
PE that is at its next barrier already has counted on, after it did more.
"""

import sys

import numpy as np

from .device_arrays import address
from .errors import EmulatorError
from .network import copy, flat
from .report import kernel_line, who
from .thread import Thread


class Collectives:
    def __init__(self, machine):
        self.machine = machine
        self.known = {}  # (group, team's PEs, number) -> PE -> (what it calls, when it came, what it knew)
        self.callers = {}  # (PE, group, row of arrivals) -> thread that called last, when it was through

    def barrier_of(self, thread, pes, call, sources=None):
        """Wait until every PE of `pes` is here, in the same `call`. What those of `sources` (default: all)
        did before has happened. -> PE -> (its call, when it came, what it knew then)"""
        me, machine, members = thread.pe, self.machine, thread.members
        row = members.row(pes)
        caller = me, members.key, row
        self._check_alone(thread, caller, call)
        members.epochs[row] += 1
        epoch, mine = members.epochs[row], members.arrivals[row]
        barrier = members.key, tuple(pes)
        known = self._come(thread, (*barrier, epoch), call)
        for pe in pes:
            there = machine.heaps[me].on(mine, pe)
            Thread.atomic(thread, there, members.rank, lambda old: old + np.uint64(1), "sys")
        for pe in pes:
            k = members.pes.index(pe)
            thread.wait_until(
                address(mine) + k * mine.itemsize,
                lambda k=k: mine.item(k) >= epoch,
                lambda pe=pe, k=k: (
                    f"rank {pe} in a barrier, sync or collective of ranks {_ranks(pes)} "
                    f"({mine.item(k)} calls there, {epoch} here)"
                ),
            )
        for pe in pes if sources is None else sources:
            if pe in known:  # it is of this process
                thread.learn(known[pe][2])
        self.known.pop((*barrier, epoch - 1), None)  # all have left that one, for all have come to this
        checked = machine.races is not None
        self.callers[caller] = thread, (thread.moment or thread.now()) if checked else thread
        return known

    def _check_alone(self, thread, caller, call):
        """One thread of a PE, warp or block is in a collective call of a team at a time."""
        before, through = self.callers.get(caller, (thread, thread))
        self.callers[caller] = thread, None
        if before is thread or through is before:
            return
        if through is None or not through.before(thread.clock):
            raise EmulatorError(
                f"{call}: {who(thread)} and {who(before)} call it, and no barrier orders them; only one "
                f"thread, warp or block of a rank may call it at a time\n  {kernel_line(sys._getframe())}"
            )

    def _come(self, thread, barrier, call):
        """-> what is known of the PEs in this barrier. All members of a team make the same calls in the same
        order."""
        known, me = self.known.setdefault(barrier, {}), thread.pe
        known[me] = call, *thread.came()
        for pe, (other, *_) in known.items():
            if other != call:
                raise EmulatorError(
                    f"ranks disagree: rank {pe} calls {other}, rank {me} calls {call}. All ranks of a team "
                    "must make the same calls in the same order"
                )
        return known

    def broadcast(self, thread, pes, dst, src, root=0):
        """dst of every PE = src of the team's member `root`."""
        if not 0 <= root < len(pes):
            raise ValueError(f"broadcast(): root is {root}; it must be 0 to {len(pes) - 1}, in the team")
        call = f"broadcast(root={root}) of {_described(src)}"

        def pull(peer):
            copy(dst, peer(src, pes[root]), "broadcast")

        self._pull(thread, pes, call, dst, src, pull, [pes[root]])

    def fcollect(self, thread, pes, dst, src):
        """dst = the src of all members, one after another."""
        target, n = flat(dst, "fcollect", "dst"), src.size
        _check_size("fcollect", "dst", dst, n * len(pes))

        def pull(peer):
            for i, pe in enumerate(pes):
                copy(target[i * n : (i + 1) * n], peer(src, pe), "fcollect")

        self._pull(thread, pes, f"fcollect of {_described(src)}", dst, src, pull)

    def alltoall(self, thread, pes, dst, src):
        """dst[i] = this rank's part of member i's src. src and dst hold one equal part per member."""
        target, n, me = flat(dst, "alltoall", "dst"), src.size // len(pes), pes.index(thread.pe)
        _check_size("alltoall", "dst", dst, n * len(pes))

        def pull(peer):
            for i, pe in enumerate(pes):
                theirs = flat(peer(src, pe), "alltoall", "src")
                copy(target[i * n : (i + 1) * n], theirs[me * n : (me + 1) * n], "alltoall")

        self._pull(thread, pes, f"alltoall of {_described(src)}", dst, src, pull)

    def reduce(self, thread, pes, dst, src, op="sum"):
        """dst = the elementwise reduction of all members' src."""
        _check_size("reduce", "dst", dst, src.size)
        self._reduce("reduce", thread, pes, dst, src, slice(0, src.size), op)

    def reducescatter(self, thread, pes, dst, src, op="sum"):
        """dst = this rank's part of the elementwise reduction of all members' src, which holds one equal part
        per member."""
        n, me = dst.size, pes.index(thread.pe)
        _check_size("reducescatter", "src", src, n * len(pes))
        self._reduce("reducescatter", thread, pes, dst, src, slice(me * n, (me + 1) * n), op)

    def _reduce(self, name, thread, pes, dst, src, part, op):
        if op not in _REDUCE:
            *others, last = map(repr, _REDUCE)
            raise ValueError(f"{name}(): op is {op!r}; it must be {', '.join(others)} or {last}")
        call = f"{name}(op={op!r}) of {_described(src)}"
        self.barrier_of(thread, pes, call)
        thread.touch("read", src)
        parts = [flat(self.machine.peer(thread.block, src, pe), name, "src")[part] for pe in pes]
        result = parts[0].copy()
        with np.errstate(over="ignore"):
            for other in parts[1:]:
                result = _REDUCE[op](result, other).astype(result.dtype)
        self.barrier_of(thread, pes, call, sources=())  # everybody has read: dst may be src
        thread.touch("write", dst, result.size)
        copy(dst, result, name)

    def _pull(self, thread, pes, call, dst, src, function, sources=None):
        known = self.barrier_of(thread, pes, call, sources)
        thread.touch("read", src)
        for pe in sources or ():
            if pe != thread.pe and pe in known:  # it writes here as soon as it has come
                thread.written_since(dst, known[pe][1:])
        thread.touch("write", dst)
        function(lambda array, pe: self.machine.peer(thread.block, array, pe))
        self.barrier_of(thread, pes, call, sources=())


def _described(src):
    return f"{src.size} {src.dtype}"


def _ranks(pes):
    return f"{pes[0]} to {pes[-1]}" if pes[-1] - pes[0] + 1 == len(pes) else ", ".join(map(str, pes))


def _check_size(name, label, array, n):
    if array.size < n:
        raise ValueError(f"{name}(): {label} has {array.size} elements; it must have {n} or more")


_REDUCE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
