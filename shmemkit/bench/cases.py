"""What the bench measures: data, and whether a result is right. Here is what all cases have, and those of the
collectives, with NCCL's and PyTorch's calls."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import shmemkit as sk
from shmemkit.collectives.registry import collectives
from shmemkit.runtime.world import World

from .nccl import SINCE_2_28, SUM, TYPES, UINT8
from .refusal import agreed
from .sizes import size_text

PERIOD = 4194301  # random elements, a prime number; larger data repeat them: making them takes seconds


def host_of(op):
    """The class of a collective, as "all_gather"."""
    return collectives()[op]


def negate(array):
    """Change all signs."""
    bits = 8 * array.dtype.itemsize
    words = array.view(f"uint{bits}")
    words ^= words.dtype.type(1 << bits - 1)


class Checked:
    """What is measured. A subclass has `world` and

    op, bytes      of its rows
    dtype, result  of a result: its dtype and shape
    signs          the names of arrays of which it changes all signs, so that what was right is wrong
    make()         makes the data
    _found(out)    -> "", or what is wrong with this rank's result

    and perhaps

    shape_text  of its rows; default: none
    operations  of a call; default: not counted
    iters       calls in a CUDA graph; default: by its bytes

    and for ``Ours``

    host, made_of  the name of the class, and what it is made of
    given          the names of arrays that a call takes
    options        and its keywords
    """

    world: World
    dtype: Any
    op: str
    bytes: int
    result: tuple
    x: Any
    make: Callable
    host: str
    made_of: tuple = ()
    given: tuple[str, ...] = ("x",)
    _found: Callable[[Any], str]
    signs: tuple[str, ...] = ()
    shape_text: str | None = None
    operations = 0
    iters: int | None = None
    options: dict[str, Any] = {}

    @property
    def text(self):
        """What progress calls it."""
        return self.shape_text or (size_text(self.bytes) if self.bytes else self.op)

    @property
    def arguments(self):
        return [getattr(self, name) for name in self.given]

    def object(self, **chosen):
        """-> the object of ours, for a method and a budget"""
        return getattr(sk, self.host)(*self.made_of, **chosen)

    def output(self, empty=None):
        """An array for the result: this rank's own, or of ``empty(shape, dtype)``."""
        return (empty or self.world.xp.empty)(self.result, self.dtype)

    def output_for(self, host, symmetric):
        """The same for a host object of ours."""
        return self.output(host.output if symmetric else None)

    def choice(self, host, symmetric):
        """-> the method that "auto" takes, or None"""

    def rates(self, us, entry):
        """-> what a row has of it, besides its time, for an Entry"""
        return {}

    def flip(self):
        """Change the data so that what was right is wrong."""
        for name in self.signs:
            negate(getattr(self, name))

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
    together, `total`, with its bytes, `expected`. Sums are of small integers, which every dtype holds
    exactly, in whatever order they are added. A root is rank 0.

    `n_bytes` are rounded down to `unit` bytes per rank (or up to one element): `bytes` of the full array.

    A subclass has the name of its collective, `op`, and perhaps

    passes   how often (n - 1) / n of the bytes go over each link
    call     NCCL's call, if it has another name; `since_2_28`: older NCCLs do not have it
    torch()

    By what the collective declares it has `about`, and `size`: what else it is, what its bytes are of.
    """

    LEAST, MOST = 3, 8
    passes, signs, call, since_2_28 = 1, ("x", "total"), "", False
    total: Any
    expected: Any

    def __init_subclass__(cls):
        cls.what = what = host_of(cls.op)
        of_root = {"gives": "from rank 0", "gets": "to rank 0"}.get(what._rooted or "")
        cls.about = ", ".join(filter(None, ("sums" if what._reduces else "", of_root)))
        cls.size = "the full array" if what._scatters else "gathered" if what._gathers else ""

    def __init__(self, world, n_bytes, dtype, unit=16):
        self.world, self.dtype, self.n_bytes = world, dtype, n_bytes
        self.segment = max(n_bytes // world.n_ranks // unit * unit, dtype.itemsize)
        self.bytes = self.segment * world.n_ranks
        self.host, self.made_of = named(self.op), (world, self.bytes)
        of_rank = self.what._scatters and not self.what._gathers
        self.result = ((self.segment if of_rank else self.bytes) // dtype.itemsize,)

    def random(self, rank):
        return np.random.default_rng([rank, self.n_bytes])

    def part(self, rank):
        """What a rank gives, uint8, before it is repeated: bytes, or numbers to add up."""
        unit, _ = self.kind()
        if self.what._reduces:
            return self.random(rank).integers(self.LEAST, self.MOST, min(self.bytes // unit, PERIOD), "uint8")
        return np.frombuffer(self.random(rank).bytes(min(self.bytes, PERIOD)), "uint8")

    def whole(self, part):
        what, (unit, _) = self.what, self.kind()
        n_bytes = self.segment if what._gathers and not what._scatters else self.bytes
        part = np.resize(part.astype(self.dtype) if what._reduces else part, n_bytes // unit)
        return part.reshape(self.world.n_ranks, -1) if what._scatters else part

    def make(self):
        what, me, xp = self.what, self.world.rank, self.world.xp
        x, n = self.whole(self.part(me)), self.world.n_ranks
        if what._reduces:
            total = self.whole(functools.reduce(np.add, map(self.part, what._combined("", me, n))))
            total = total[me] if what._scatters else total
        else:
            given = [self.whole(self.part(rank)) for rank in range(1 if what._rooted == "gives" else n)]
            total = what._expected(np, given, me)
        total = self._of_root(total)
        if not what._gives(me, 0):
            x = x[:0]
        # NumPy's would be read-only otherwise
        self.x, self.total = (xp.array(array.reshape(-1).view(self.dtype)) for array in (x, total))
        self.expected = self.total.view("uint8")

    def _of_root(self, array):
        """What others get of a collective to a root is empty."""
        return array if self.what._gets(self.world.rank, 0) else array[:0]

    def output(self, empty=None):
        return self._of_root(super().output(empty))

    def flip(self):
        if self.what._reduces:
            super().flip()
            return
        for array in (self.x.view("uint8"), self.expected):
            self.world.xp.invert(array, out=array)

    @property
    def arguments(self):
        return [self.x if self.x.size else None]  # of a scatter, only the root has one

    def choice(self, host, symmetric):
        return host.method_for(self.bytes, symmetric)

    def rates(self, us, entry):
        n = self.world.n_ranks
        return {"bus_GBps": self.passes * self.bytes * (n - 1) / n / us / 1e3}

    def torch(self, distributed, x, out):
        """PyTorch's call, on tensors of bytes."""
        raise ValueError(f"PyTorch has no {self.op} with another result than x; in place, calls may add up")

    def kind(self):
        """-> bytes of what NCCL counts, and the arguments behind the count"""
        return (self.dtype.itemsize, (TYPES[self.dtype.name], SUM)) if self.what._reduces else (1, (UINT8,))

    def nccl(self, comm, x, out):
        """NCCL's call, on addresses; comm: ``nccl.Communicator``."""
        if self.since_2_28 and comm.library.code < SINCE_2_28:  # each segment is sent and received
            sides = (x, self.x.nbytes), (out, self.expected.nbytes)  # one goes to the root, or comes
            comm.exchange(*map(self._segments, *zip(*sides, strict=True)))
            return
        unit, kind = self.kind()
        size = self.segment if self.what._gathers or self.what._scatters else self.bytes
        call, root = self.call or self.what.__name__, (0,) if self.what._rooted else ()
        comm(call, x, out, size // unit, *kind, *root)

    def _segments(self, address, n_bytes):
        return [(address + i, self.segment, i // self.segment) for i in range(0, n_bytes, self.segment)]

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


class AllGatherCase(Case):
    op = "all_gather"

    def torch(self, distributed, x, out):
        distributed.all_gather_into_tensor(out, x)


class AllToAllCase(Case):
    op, call, since_2_28 = "all_to_all", "AlltoAll", True

    def torch(self, distributed, x, out):
        distributed.all_to_all_single(out, x)


class BroadcastCase(Case):
    op = "broadcast"

    @property
    def passes(self):
        """All bytes come to each rank."""
        return self.world.n_ranks / max(1, self.world.n_ranks - 1)


class GatherCase(Case):
    op, since_2_28 = "gather", True

    def torch(self, distributed, x, out):
        parts = list(out.chunk(self.world.n_ranks)) if self.world.rank == 0 else None
        distributed.gather(x, parts, dst=0)


class ScatterCase(Case):
    op, since_2_28 = "scatter", True

    def torch(self, distributed, x, out):
        parts = list(x.chunk(self.world.n_ranks)) if self.world.rank == 0 else None
        distributed.scatter(out, parts, src=0)


class AllReduceCase(Case):
    op, passes = "all_reduce", 2


class ReduceScatterCase(Case):
    op = "reduce_scatter"

    def torch(self, distributed, x, out):
        import torch

        dtype = getattr(torch, self.dtype.name)
        distributed.reduce_scatter_tensor(out.view(dtype), x.view(dtype))


_cases = AllGatherCase, AllReduceCase, ReduceScatterCase, AllToAllCase, BroadcastCase, GatherCase, ScatterCase
CASES = {case.op: case for case in _cases}  # what matters most comes first
CASES |= {
    op: type(f"{kind.__name__}Case", (Case,), {"op": op})
    for op, kind in collectives().items()
    if op not in CASES
}


def named(op):
    """The name of the class of a collective, as "all_gather"."""
    return host_of(op).__name__


def methods(op):
    """The names that --methods takes."""
    return (*host_of(op).methods, "auto")


def title_of(case):
    """Of a table."""
    return ", ".join(filter(None, (case.op, case.about))) + f" (size: {case.size})" * bool(case.size)
