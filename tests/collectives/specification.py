"""Calls of each collective whose results are checked, for test_every_method.py and tests of one method."""

from dataclasses import dataclass

import numpy as np
from reduced import combined

import shmemkit as sk
from shmemkit.collectives.collective import Collective
from shmemkit.collectives.registry import collectives
from shmemkit.runtime.symmetric_memory import as_dtype


@dataclass(frozen=True)
class Specification:
    """What a collective says that it does (``Collective``): `gathers`, `scatters`, `reduces`, and what each
    rank gets. Its results are compared with that, bit by bit."""

    kind: type[Collective]

    def __getattr__(self, name):
        return getattr(self.kind, f"_{name}")

    @property
    def root(self):
        return self.kind._rooted

    @property
    def in_place(self):
        return not (self.gathers and self.scatters)

    def make(self, world, nbytes, method="auto", op="sum", root=0, sms=None):
        return self.kind._made(world, nbytes, method, root, op, sms)

    def given(self, call, size, dtype, n):
        """What all ranks give in `call`: other integers each time."""
        shape = (n, size) if self.scatters else (size,)
        generators = (np.random.default_rng([call, rank]) for rank in range(n))
        return [generator.integers(0, 100, shape).astype(as_dtype(dtype)) for generator in generators]

    def wanted(self, given, method, rank, op="sum", root=0):
        """What `rank` gets."""
        if self.reduces:
            if self.scatters:
                given = [array[rank] for array in given]
            return combined(op, [given[k] for k in self.kind._combined(method, rank, len(given))])
        return self.kind._moved(np, given, rank, root)

    def call(self, made, x, out, stream=None):
        """One call; x or out is None on ranks that do not give or get."""
        rank, root = made.world.rank, getattr(made, "root", 0)
        return made(
            x if self.gives(rank, root) else None, out if self.gets(rank, root) else None, stream=stream
        )

    def places(self, n, size, where, mine):
        """-> elements of each array that is needed, and for x and out, as of ``calls``: which array has it,
        where it begins there, its shape. `mine` is the segment of one in the other, if they are in place."""
        shapes = [(n, size) if many else (size,) for many in (self.scatters, self.gathers)]
        of_x, of_out = lengths = [int(np.prod(shape)) for shape in shapes]
        if where == "apart":
            sizes, begins = lengths, [(0, 0), (1, 0)]
        elif where == "touching":
            sizes, begins = [of_out + of_x], [(0, of_out), (0, 0)]
        else:
            sizes = [max(lengths)]
            begins = [(0, mine * size if length < max(lengths) else 0) for length in lengths]
        return sizes, [(*begin, shape) for begin, shape in zip(begins, shapes, strict=True)]


def views(arrays, places, first):
    """-> x and out, at their `places` in the parts of `arrays` that begin with element `first`."""
    return [
        arrays[which][first + begin : first + begin + int(np.prod(shape))].reshape(shape)
        for which, begin, shape in places
    ]


ALL = {kind.__name__: Specification(kind) for kind in collectives().values()}


def full(what, n, size, dtype):
    """-> bytes of the larger array; float8 counts twice, by methods whose totals travel"""
    counts = 2 if what.reduces and "float8" in as_dtype(dtype).name else 1
    return counts * what.kind._segments(n) * size * as_dtype(dtype).itemsize


def calls(
    name,
    method,
    sizes,
    dtype="float32",
    op="sum",
    root=0,
    unaligned=0,
    where="apart",
    symmetric=False,
    world=None,
    xp=np,
    sms=None,
):
    """Calls of the collective `name` on segments of `sizes` elements, one after another, by one object.

    What lies around x and out stays, and x, too. The private arrays of rank 0 are aligned, also if others'
    are not. x and out lie `where`: "apart"; "in place"; "touching", x right behind out; or "some in place":
    on some ranks, others in each call. `xp` makes the arrays.
    """
    what, world = ALL[name], world or sk.init()
    n, me, dtype = world.n_ranks, world.rank, as_dtype(dtype)
    made = what.make(world, full(what, n, max(sizes), dtype), method, op, root, sms)
    host = np.array if xp is np else world.asnumpy
    for call, size in enumerate(sizes):
        here, first = where, unaligned * (1 if symmetric else me)
        if where == "some in place":
            here = "apart" if (call + me) % 3 else "in place"
        given = what.given(call, size, dtype, n)
        lengths, places = what.places(n, size, here, root if what.root else me)
        arrays = [(made.output if symmetric else xp.zeros)(first + length + 5, dtype) for length in lengths]
        for array in arrays:
            array[:] = 0
        x, out = views(arrays, places, first)
        x[...] = xp.asarray(given[me])
        wanted = [host(array) for array in arrays]
        if what.gets(me, root):
            views(wanted, places, first)[1][...] = what.wanted(given, method, me, op, root)
        if symmetric:
            world.barrier()
        assert what.call(made, x, out) is (out if what.gets(me, root) else None)
        world.synchronize()
        for array, want in zip(arrays, wanted, strict=True):
            np.testing.assert_array_equal(host(array).view("uint8"), want.view("uint8"))
        if symmetric:
            world.host_barrier()  # the host's next writes to symmetric arrays are no part of the call
    made.free()


def few_calls(name, method, sizes, dtype="uint64", root=0, symmetric=False):
    """Calls for explorations: no host waits between them, and each has an output of its own."""
    what, world = ALL[name], sk.init()
    n, me, results = world.n_ranks, world.rank, []
    made = what.make(world, full(what, n, max(sizes), dtype), method, "sum", root)
    for call, size in enumerate(sizes):
        given = what.given(call, size, dtype, n)
        shape = (n, size) if what.gathers else (size,)
        results.append(((made.output if symmetric else np.zeros)(shape, dtype), given))
        what.call(made, given[me], results[-1][0])
    world.synchronize()
    for out, given in results:
        if what.gets(me, root):
            np.testing.assert_array_equal(out, what.wanted(given, method, me, "sum", root))


def explored(n_ranks, *args, nodes=1, **options):
    """-> what all schedules of ``few_calls(*args)`` on `n_ranks` ranks have shown"""
    options = {"exhaustive": True, "local_size": n_ranks // nodes, "heap_size": 1 << 18, **options}
    return sk.emu.explore(few_calls, n_ranks, args, **options)
