"""What the bench measures: data, and whether a result is right. Here is what all cases have, and those of the
collectives, with NCCL's and PyTorch's calls."""

from collections.abc import Callable
from typing import Any

import numpy as np

import shmemkit as sk
from shmemkit.runtime.world import World

from .nccl import SINCE_2_28, SUM, TYPES, UINT8
from .refusal import agreed
from .sizes import size_text

PERIOD = 4194301  # random elements, a prime number; larger data repeat them: making them takes seconds


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
    together, `expected`, as bytes.

    `n_bytes` are rounded down to `unit` bytes per rank (or up to one element): `bytes` of the full array.

    A subclass has

    op, about, size             of the command: its name, what else it is, what its bytes are of
    passes                      how often (n - 1) / n of the bytes go over each link
    of_rank                     whether a result is a rank's segment
    call, each, root            NCCL's call: its name, whether it counts a rank's elements, and the root
    make(), flip(), torch()
    """

    about, size, passes, of_rank, each = "", "", 1, False, True
    root: tuple[int, ...] = ()
    call: str
    expected: Any

    def __init__(self, world, n_bytes, dtype, unit=16):
        self.world, self.dtype, self.n_bytes = world, dtype, n_bytes
        self.segment = max(n_bytes // world.n_ranks // unit * unit, dtype.itemsize)
        self.bytes = self.segment * world.n_ranks
        self.host, self.made_of = named(self.op), (world, self.bytes)
        self.result = ((self.segment if self.of_rank else self.bytes) // dtype.itemsize,)

    def random(self, rank):
        return np.random.default_rng([rank, self.n_bytes])

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
        raise ValueError(f"PyTorch's {self.op} works in place: it has no other result, and calls may add up")

    def kind(self):
        """-> bytes of what NCCL counts, and the arguments behind the count"""
        return 1, (UINT8,)

    def nccl(self, comm, x, out):
        """NCCL's call, on addresses; comm: ``nccl.Communicator``."""
        unit, kind = self.kind()
        comm(self.call, x, out, (self.segment if self.each else self.bytes) // unit, *kind, *self.root)

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


class _ToRoot(Case):
    """To rank 0; what the others get is empty."""

    root = (0,)

    def output(self, empty=None):
        return self._of_root(super().output(empty))

    def _of_root(self, array):
        return array if self.world.rank == 0 else array[:0]


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


class _Exchanged(_Bytes):
    """Older NCCLs have no such call: each segment is sent and received."""

    def nccl(self, comm, x, out):
        if comm.library.code >= SINCE_2_28:
            super().nccl(comm, x, out)
            return
        sides = (x, self.x.nbytes), (out, self.expected.nbytes)  # one segment goes to the root, or comes

        def parts(address, n):
            return [(address + i, self.segment, i // self.segment) for i in range(0, n, self.segment)]

        comm.exchange(*(parts(*side) for side in sides))


class AllGatherCase(_Bytes):
    op, size, call = "all_gather", "gathered", "AllGather"

    def make(self):
        ranks = range(self.world.n_ranks)
        parts = [self.bytes_of(r, self.segment) for r in ranks]
        self._put(parts[self.world.rank], np.concatenate(parts))

    def torch(self, distributed, x, out):
        distributed.all_gather_into_tensor(out, x)


class AllToAllCase(_Exchanged):
    op, size, call = "all_to_all", "the full array", "AlltoAll"

    def make(self):
        me, n = self.world.rank, self.world.n_ranks
        arrays = [self.bytes_of(r, self.bytes).reshape(n, -1) for r in range(n)]
        self._put(arrays[me].reshape(-1), np.concatenate([array[me] for array in arrays]))

    def torch(self, distributed, x, out):
        distributed.all_to_all_single(out, x)


class BroadcastCase(_Bytes):
    op, about, call, each, root = "broadcast", "from rank 0", "Broadcast", False, (0,)

    @property
    def passes(self):
        """All bytes come to each rank."""
        return self.world.n_ranks / max(1, self.world.n_ranks - 1)

    def make(self):
        x, sent = (self.bytes_of(r, self.bytes) for r in (self.world.rank, 0))
        self._put(x, sent.copy())


class GatherCase(_ToRoot, _Exchanged, AllGatherCase):
    op, about, call = "gather", "to rank 0", "Gather"

    def make(self):
        super().make()
        self.expected = self._of_root(self.expected)

    def torch(self, distributed, x, out):
        parts = list(out.chunk(self.world.n_ranks)) if self.world.rank == 0 else None
        distributed.gather(x, parts, dst=0)


class ScatterCase(_Exchanged):
    op, about, size, call, of_rank, root = "scatter", "from rank 0", "scattered", "Scatter", True, (0,)

    def make(self):
        whole = self.bytes_of(0, self.bytes)
        mine = whole.reshape(self.world.n_ranks, -1)[self.world.rank].copy()
        self._put(whole if self.world.rank == 0 else whole[:0], mine)

    def torch(self, distributed, x, out):
        parts = list(x.chunk(self.world.n_ranks)) if self.world.rank == 0 else None
        distributed.scatter(out, parts, src=0)


class _Sums(Case):
    """Sums of small integers, which every dtype holds exactly, in whatever order they are added."""

    LEAST, MOST = 3, 8
    about, each, signs = "sums", False, ("x", "total")

    def kind(self):
        return self.dtype.itemsize, (TYPES[self.dtype.name], SUM)

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


class ReduceCase(_ToRoot, _Sums):
    op, about, call = "reduce", "sums, to rank 0", "Reduce"

    def _mine(self, total):
        return self._of_root(total)


class AllReduceCase(_Sums):
    op, passes, call = "all_reduce", 2, "AllReduce"


class ReduceScatterCase(_Sums):
    op, size, call, of_rank, each = "reduce_scatter", "the full array", "ReduceScatter", True, True

    def _mine(self, total):
        return total.reshape(self.world.n_ranks, -1)[self.world.rank].copy()

    def torch(self, distributed, x, out):
        import torch

        dtype = getattr(torch, self.dtype.name)
        distributed.reduce_scatter_tensor(out.view(dtype), x.view(dtype))


_cases = AllGatherCase, AllReduceCase, ReduceScatterCase, AllToAllCase
_of_roots = BroadcastCase, GatherCase, ScatterCase, ReduceCase
CASES = {case.op: case for case in (*_cases, *_of_roots)}  # what matters most comes first


def named(op):
    """The name of the class of one of CASES."""
    return "".join(map(str.capitalize, op.split("_")))


def host_of(op):
    """The class."""
    return getattr(sk, named(op))


def methods(op):
    """The names that --methods takes."""
    return (*host_of(op).methods, "auto")


def title_of(case):
    """Of a table."""
    return ", ".join(filter(None, (case.op, case.about))) + f" (size: {case.size})" * bool(case.size)
