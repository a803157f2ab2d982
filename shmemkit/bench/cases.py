"""What the collectives' benchmarks do: random data, what comes of them, and NCCL's and PyTorch's calls."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shmemkit.runtime.world import World

from .nccl import SINCE_2_28, SUM, TYPES, UINT8
from .refusal import agreed

PERIOD = 4194301  # random elements, a prime number; larger data repeat them: making them takes seconds


def negate(array):
    """Change all signs."""
    bits = 8 * array.dtype.itemsize
    words = array.view(f"uint{bits}")
    words ^= words.dtype.type(1 << bits - 1)


class Checked:
    """A case's results. A subclass has `world` and

    _found(out)   -> "", or what is wrong with this rank's result
    """

    world: World
    _found: Callable[[Any], str]

    def spoil(self, out):
        """Make all of `out` NaN, on every rank, before any of them goes on. Collective."""
        out.view("uint8").fill(0xFF)
        self.world.synchronize()
        self.world.host_barrier()

    def check(self, out):
        """-> "", or what is wrong, the same on every rank. Refused without the memory for it. Collective."""
        self.world.synchronize()
        found = agreed(self.world, lambda: self._found(out))
        return next(filter(None, self.world.host_allgather(found)), "")


class Case(Checked):
    """Random data of one size, once ``make`` has made them: `x`, this rank's, 1-D, and what all ranks' make
    together, `expected`, as bytes.

    `n_bytes` are rounded down to `unit` bytes per rank (or up to one element): `bytes` of the full array.
    `passes` is how often (n - 1) / n of them go over each link.

    A subclass has `op`, its name, `passes`, make(), flip(), which changes the data so that what was right is
    wrong in every element, and
        nccl(comm, x, out)          NCCL's call, on addresses; comm: ``nccl.Communicator``
        torch(distributed, x, out)  PyTorch's, on tensors of bytes; ValueError where there is none
    """

    passes = 1
    expected: Any

    def __init__(self, world, n_bytes, dtype, unit=16):
        self.world, self.dtype, self.n_bytes = world, dtype, n_bytes
        self.segment = max(n_bytes // world.n_ranks // unit * unit, dtype.itemsize)
        self.bytes = self.segment * world.n_ranks

    def random(self, rank):
        return np.random.default_rng([rank, self.n_bytes])

    def output(self, empty=None):
        """An array for the result: this rank's own, or of ``empty(elements, dtype)``."""
        return (empty or self.world.xp.empty)(self.expected.size // self.dtype.itemsize, self.dtype)

    def spoil(self, out):
        """Make every byte of `out` wrong, on every rank, before any of them goes on. Collective."""
        self.world.xp.invert(self.expected, out=out.view("uint8"))
        self.world.synchronize()
        self.world.host_barrier()

    def _found(self, out):
        differ = out.reshape(-1).view("uint8") != self.expected
        if not bool(differ.any()):
            return ""
        count, first = int(differ.sum()), int(differ.argmax())
        return (
            f"wrong: on rank {self.world.rank} {count} of {differ.size} bytes differ, the first at {first}, "
            f"in the part of rank {first // self.segment}"
        )


class _Bytes(Case):
    """Any bytes."""

    def flip(self):
        for array in (self.x.view("uint8"), self.expected):
            self.world.xp.invert(array, out=array)

    def bytes_of(self, rank, n):
        return np.resize(np.frombuffer(self.random(rank).bytes(min(n, PERIOD)), "uint8"), n)

    def _put(self, x, expected):
        xp = self.world.xp
        self.x = xp.array(x.view(self.dtype))  # NumPy's would be read-only otherwise
        self.expected = xp.asarray(expected)


class AllGatherCase(_Bytes):
    op = "all_gather"

    def make(self):
        ranks = range(self.world.n_ranks)
        parts = [self.bytes_of(r, self.segment) for r in ranks]
        self._put(parts[self.world.rank], np.concatenate(parts))

    def nccl(self, comm, x, out):
        comm("AllGather", x, out, self.segment, UINT8)

    def torch(self, distributed, x, out):
        distributed.all_gather_into_tensor(out, x)


class AllToAllCase(_Bytes):
    op = "all_to_all"

    def make(self):
        me, n = self.world.rank, self.world.n_ranks
        arrays = [self.bytes_of(r, self.bytes).reshape(n, -1) for r in range(n)]
        self._put(arrays[me].reshape(-1), np.concatenate([array[me] for array in arrays]))

    def nccl(self, comm, x, out):
        if comm.library.code >= SINCE_2_28:
            comm("AlltoAll", x, out, self.segment, UINT8)
            return
        parts = [(rank * self.segment, self.segment, rank) for rank in range(self.world.n_ranks)]
        comm.exchange(*([(at + start, size, rank) for start, size, rank in parts] for at in (x, out)))

    def torch(self, distributed, x, out):
        distributed.all_to_all_single(out, x)


class BroadcastCase(_Bytes):
    """From rank 0."""

    op = "broadcast"

    @property
    def passes(self):
        """All bytes come to each rank."""
        return self.world.n_ranks / max(1, self.world.n_ranks - 1)

    def make(self):
        x, sent = (self.bytes_of(r, self.bytes) for r in (self.world.rank, 0))
        self._put(x, sent.copy())

    def nccl(self, comm, x, out):
        comm("Broadcast", x, out, self.bytes, UINT8, 0)

    def torch(self, distributed, x, out):
        raise ValueError("PyTorch's broadcast works in place, so that the root has no result in `out`")


class GatherCase(AllGatherCase):
    """To rank 0; what the others get is empty."""

    op = "gather"

    def make(self):
        super().make()
        self.expected = self._of_root(self.expected)

    def output(self, empty=None):
        out = (empty or self.world.xp.empty)(self.bytes // self.dtype.itemsize, self.dtype)
        return self._of_root(out)

    def _of_root(self, array):
        return array if self.world.rank == 0 else array[:0]

    def nccl(self, comm, x, out):
        if comm.library.code >= SINCE_2_28:
            comm("Gather", x, out, self.segment, UINT8, 0)
            return
        ranks = range(self.world.n_ranks) if self.world.rank == 0 else ()
        received = [(out + rank * self.segment, self.segment, rank) for rank in ranks]
        comm.exchange([(x, self.segment, 0)], received)

    def torch(self, distributed, x, out):
        parts = list(out.chunk(self.world.n_ranks)) if self.world.rank == 0 else None
        distributed.gather(x, parts, dst=0)


class ScatterCase(_Bytes):
    """From rank 0."""

    op = "scatter"

    def make(self):
        whole = self.bytes_of(0, self.bytes)
        mine = whole.reshape(self.world.n_ranks, -1)[self.world.rank].copy()
        self._put(whole if self.world.rank == 0 else whole[:0], mine)

    def nccl(self, comm, x, out):
        if comm.library.code >= SINCE_2_28:
            comm("Scatter", x, out, self.segment, UINT8, 0)
            return
        ranks = range(self.world.n_ranks) if self.world.rank == 0 else ()
        sent = [(x + rank * self.segment, self.segment, rank) for rank in ranks]
        comm.exchange(sent, [(out, self.segment, 0)])

    def torch(self, distributed, x, out):
        parts = list(x.chunk(self.world.n_ranks)) if self.world.rank == 0 else None
        distributed.scatter(out, parts, src=0)


class _Sums(Case):
    """Sums of small integers, which every dtype holds exactly, in whatever order they are added."""

    LEAST, MOST = 3, 8

    def make(self):
        world, n = self.world, self.bytes // self.dtype.itemsize
        made = min(n, PERIOD)
        total = np.zeros(made, "uint8")
        for rank in range(world.n_ranks):
            part = self.random(rank).integers(self.LEAST, self.MOST, made, "uint8")
            total += part
            if rank == world.rank:
                self.x = world.xp.asarray(np.resize(part.astype(self.dtype), n))
        self.total = world.xp.asarray(self._mine(np.resize(total.astype(self.dtype), n)))
        self.expected = self.total.view("uint8")

    def _mine(self, total):
        return total

    def flip(self):
        """All signs change."""
        for array in (self.x, self.total):
            negate(array)


class ReduceCase(_Sums):
    """To rank 0; what the others get is empty."""

    op = "reduce"

    def _mine(self, total):
        return total if self.world.rank == 0 else total[:0]

    def output(self, empty=None):
        out = (empty or self.world.xp.empty)(self.bytes // self.dtype.itemsize, self.dtype)
        return out if self.world.rank == 0 else out[:0]

    def nccl(self, comm, x, out):
        comm("Reduce", x, out, self.bytes // self.dtype.itemsize, TYPES[self.dtype.name], SUM, 0)

    def torch(self, distributed, x, out):
        raise ValueError("PyTorch's reduce works in place, so that repeated calls would add up")


class AllReduceCase(_Sums):
    op, passes = "all_reduce", 2

    def nccl(self, comm, x, out):
        comm("AllReduce", x, out, self.bytes // self.dtype.itemsize, TYPES[self.dtype.name], SUM)

    def torch(self, distributed, x, out):
        raise ValueError("PyTorch's all_reduce works in place, so that repeated calls would add up")


class ReduceScatterCase(_Sums):
    op = "reduce_scatter"

    def _mine(self, total):
        return total.reshape(self.world.n_ranks, -1)[self.world.rank].copy()

    def nccl(self, comm, x, out):
        comm("ReduceScatter", x, out, self.segment // self.dtype.itemsize, TYPES[self.dtype.name], SUM)

    def torch(self, distributed, x, out):
        import torch

        dtype = getattr(torch, self.dtype.name)
        distributed.reduce_scatter_tensor(out.view(dtype), x.view(dtype))


_moved = AllGatherCase, AllToAllCase, BroadcastCase, GatherCase, ScatterCase
CASES = {case.op: case for case in (*_moved, AllReduceCase, ReduceScatterCase, ReduceCase)}
