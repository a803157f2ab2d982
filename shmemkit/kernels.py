"""The kernels of collectives, to launch in a pipeline of your own or to call in a kernel of your own.

    k = kernels.all_reduce(n_ranks, "sum", "float32", transport="ll128")
    scratch = k.scratch(world, x.nbytes)
    k[scratch.grid, scratch.block, stream](x, out, *scratch)

They are the very kernels that ``sk.AllReduce`` and the other objects bind, made by the same functions and
compiled for the same types. docs/kernels.md is about them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from numba import cuda

from .collectives.all_gather import AllGather
from .collectives.all_reduce import AllReduce
from .collectives.all_to_all import AllToAll
from .collectives.barrier import Barrier, barrier_kernel
from .collectives.collective import Collective, Reducing, check_reducible
from .collectives.queue import Queue, as_words, queue_kernel
from .collectives.reduce_scatter import ReduceScatter
from .compiler.numba_internals import normalize_kernel_dimensions
from .device.cuda.word_reductions import OPS
from .device.packets.transports import AT_ONCE
from .gemm import Gemm, bind_product, check_activation, gpu_of
from .gemm.problem import Problem
from .operations.method import Method, agree, agree_on
from .operations.operation import Operation
from .runtime.launch import Launch
from .runtime.symmetric_memory import as_dtype
from .runtime.world import Group, World, check_world
from .support.arrays import converted, new_array, overlap, unlocked
from .support.settings import integer, listed, one_of
from .typing import Activation, AnyArray, DType, GemmMethod, Op

__all__ = [
    "BarrierKernel",
    "CollectiveKernel",
    "GemmKernel",
    "Kernel",
    "QueueKernel",
    "Scratch",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "available",
    "barrier",
    "gemm",
    "queue",
    "reduce_scatter",
]


def __dir__():
    return __all__


class Scratch:
    """What a kernel takes besides x and out: ``k[scratch.grid, scratch.block, stream](x, out, *scratch)``.

    args         integers and arrays, symmetric and local ones: a tuple, which kernels of your own can take as
                 one argument
    grid, block  of a launch, blocks that all fit on the GPU at once; () for tiles

    A captured graph does not keep it alive: the program does, and frees it after the last replay.
    """

    def __init__(
        self,
        args: tuple,
        free: Callable[[], None],
        launch: Any = None,
        of: Callable[[int], Scratch] | None = None,
    ):
        self.args, self._free, self._of = args, free, of
        self.grid, self.block = (launch.grid, launch.block) if launch else ((), ())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.args)

    def of(self, nbytes: int) -> Scratch:
        """The same memory for an x of `nbytes` bytes. ValueError if they are more than it was made for."""
        if self._of is None:
            raise ValueError("of(): this scratch is not of arrays of one size; use it as it is")
        return self._of(nbytes)

    def free(self) -> None:
        """Give the memory back, also that of what ``of`` returned. Collective."""
        self._free()


class Kernel:
    """A kernel of a collective, made for a number of ranks, and by the functions of this module for an op and
    a dtype. What it takes and returns, and what it orders: docs/kernels.md.

    kernel     the @cuda.jit kernel, for ``kernel[grid, block, stream](...)`` with all its `arguments`
    arguments  a text: the names, dtypes and shapes of its arguments, and which grids it can have
    n_ranks    the ranks of the World that it is for
    method     of the collective's object, whose kernel it is: "two_shot_ll128"
    """

    method: str | None = None
    _alike: dict[str, Any] = {}  # what all ranks make it with
    _x_and_out, _object_name = True, "Barrier"
    _any_blocks = False  # whether a launch may have fewer blocks in a row of its grid

    def __init__(self, who: str, kernel: Any, n_ranks: int):
        self._who, self.kernel, self.n_ranks = who, kernel, n_ranks
        # By the arguments of a Scratch: (its host object, what goes before them, the Scratch); None: freed
        self._made: dict[tuple, Any] = {}

    @property
    def arguments(self) -> str:
        return _arguments_of(self.kernel)

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        """``k[grid, block, stream](x, out, *scratch)``: Numba's own launch of `kernel`, with x and out viewed
        as the words that it takes. A CUDA graph can capture it. TypeError or ValueError for wrong arrays, for
        a scratch that was made for others, and for another grid or block than it has; RuntimeError after the
        World's end."""
        launch = self.kernel[configuration]
        grid, block = normalize_kernel_dimensions(*configuration[:2])

        def call(*arguments):
            given = arguments[2:] if self._x_and_out else arguments
            made = self._made.get(_key(given))
            if made is None:
                raise self._wrong_launch(arguments)
            host, before, scratch = made
            host._check_alive()
            self._check_grid(grid, block, scratch)
            launch(*before(*arguments[: 2 * self._x_and_out]), *given)

        return call

    def _check_grid(self, grid, block, scratch):
        (most, *rows), (blocks, *given) = scratch.grid, grid
        fits = blocks == most or self._any_blocks and blocks < most
        if block != scratch.block or given != rows or not fits:
            or_fewer = " or fewer in the first direction" * self._any_blocks
            raise ValueError(
                f"{self._who}: the grid is {grid}, the block {block}; they must be {scratch.grid}{or_fewer}, "
                f"and {scratch.block}. Give [scratch.grid, scratch.block, stream]"
            )

    def _wrong_launch(self, arguments):
        takes = "(x, out, *scratch)" if self._x_and_out else "(*scratch)"
        if any(isinstance(each, Scratch) for each in arguments):
            reason = "a Scratch is given as one argument. Write a star before it"
        elif len(arguments) <= 2 * self._x_and_out:
            reason = "no scratch is given"
        elif _key(arguments[2 * self._x_and_out :]) in self._made:
            reason = "the scratch was freed. Make another one"
        elif self._made.get(_key(arguments[1:])):
            reason = "no out is given"
        else:
            reason = "the scratch is of another kernel, or of tiles. Give what scratch() of this one returned"
        return ValueError(f"{self._who}: a launch takes {takes}; {reason}")

    @property
    def device(self) -> Any:
        """ValueError: it has no form for tiles."""
        raise ValueError(f"{self._who}: it has no form for tiles")

    def __repr__(self):
        return f"<{self._who} of {self.n_ranks} ranks: {self._words}>"

    @property
    def _words(self):
        return self.method or self.kernel.py_func.__name__

    def _check_world(self, world):
        check_world(self._who, world)
        if isinstance(world, Group):
            raise ValueError(
                f"{self._who}: world is a group; kernel[...] launches with the ranks of the World. Make the "
                f"host object of the group: sk.{self._object_name}(group, ...)"
            )
        if world.n_ranks != self.n_ranks:
            raise ValueError(
                f"{self._who}: n_ranks is {self.n_ranks}, and the World has {world.n_ranks} ranks. Make the "
                "kernel with n_ranks=world.n_ranks"
            )

    def _agree(self, world, what, check):
        """All ranks make a scratch with the same arguments, ``check()`` -> {name: value}, or all raise."""
        check_world(self._who, world)

        def checked():
            self._check_world(world)
            return {"method": self._words, **self._alike, **check()}

        agree_on(world, f"{self._who}: {what}", checked)

    def _keep(self, host: Operation, rest, launch=None, before=None, of=None):
        """-> a Scratch of the arguments `rest`, in the memory of `host`. Of a `launch` of `kernel`,
        ``before(*arrays)`` is what the kernel takes before them."""

        def free():
            self._made.update({key: None for key, made in self._made.items() if made and made[0] is host})
            host.free()

        host._who = self._who  # in messages
        scratch = Scratch(_as_numba_has_it(host.world, tuple(rest)), free, launch, of)
        if launch is not None:
            self._made[_key(scratch)] = host, before, scratch
        return scratch


def _arguments_of(kernel):
    signature = inspect.signature(kernel.py_func)
    return f"{kernel.py_func.__name__}{signature}\n\n{inspect.getdoc(kernel.py_func) or ''}".strip()


def _key(args):
    return tuple(a if isinstance(a, int) else id(a) for a in args)


def _as_numba_has_it(world, given):
    """An array of CuPy as one of Numba: of CuPy's, Numba waits for the stream, which a capture refuses. On
    the emulator as a new one, too. Tuples of them likewise."""
    if isinstance(given, tuple):
        return tuple(_as_numba_has_it(world, each) for each in given)
    if isinstance(given, int):
        return given
    return given.view() if world.backend.name == "emulator" else cuda.as_cuda_array(given, sync=False)


# ---- of collectives with methods


class CollectiveKernel(Kernel):
    """What ``all_reduce`` and the others return: a Kernel whose ``scratch(world, nbytes)`` and ``tiles`` make
    what it takes."""

    def __init__(self, of: type[Collective], n_ranks: int, method: str, op: str | None, dtype: Any):
        self._of, self.method, self._dtype = of, method, dtype
        self._object_name = of.__name__
        self._kind, self._settings = _entry(of, method)
        self._alike = {"op": op, "dtype": dtype and dtype.name}
        self._any_blocks = getattr(self._kind, "_any_blocks", False)
        kernel = self._kind.kernel_of(n_ranks, **self._alike, **self._settings)
        super().__init__(_who(of), kernel, n_ranks)
        self._n_before = list(inspect.signature(self.kernel.py_func).parameters).index("out") + 1

    def scratch(self, world: World, nbytes: int) -> Scratch:
        """What launches take besides x and out, of an x of `nbytes` bytes, and of an out as the collective
        has it. It compiles and loads the kernel. Collective.

        Both begin at multiples of 16 bytes, as CuPy makes them. Launches with one scratch, and what its
        ``of`` returns, follow each other: on one stream, or ordered by events, in one order on all ranks.

        TypeError or ValueError, on all ranks, for wrong arguments, and where the kernel cannot run;
        MemoryError if the symmetric heap is full.
        """
        self._agree(world, "scratch", lambda: {"nbytes": self._checked_bytes(nbytes)})
        host, most = self._object(world, max(nbytes, self._out_bytes(nbytes))), nbytes

        @functools.cache
        def made(nbytes):
            x, out = (self._example(world, size) for size in (nbytes, self._out_bytes(nbytes)))
            launch = self._bound(host, x, out)
            rest = launch.args[self._n_before :]

            def before(x, out):
                x, out = converted(self._who, {"x": x, "out": out}, world.xp).values()
                given = self._before(host, x, out, nbytes, rest)
                host._order.compare(self._who, x)
                return [_as_numba_has_it(world, a) for a in given]

            return self._keep(host, rest, launch, before, of)

        def of(nbytes):
            host._check_alive()
            nbytes = self._checked_bytes(nbytes)
            if nbytes > most:
                raise ValueError(
                    f"{self._who}: this scratch is for {most} bytes, and not for {nbytes}. Make another one: "
                    f"scratch(world, {nbytes})"
                )
            return made(nbytes)

        agree(world, lambda: of(most), host.free)
        return of(most)

    def tiles(self, world: World, nbytes: int, n: int) -> Scratch:
        """The scratch of ``device``, for `n` tiles, of which x has `nbytes` bytes or fewer. Collective.
        Errors as of ``scratch``."""
        _ = self.device  # or ValueError

        def check():
            return {"nbytes": self._checked_bytes(nbytes), "n": integer(self._who, "n", n, 1)}

        self._agree(world, "tiles", check)
        t, parts = self._settings["t"], self.n_ranks if self._settings.get("personalized") else 1
        units = t.groups_of(nbytes // parts) * t.group
        segments = 1 if self._settings.get("whole") else self.n_ranks
        host = self._object(world, segments * n * units * t.unit_bytes)
        (method,) = host._methods.values()
        return self._keep(host, (units, *method.channel, method.epochs))

    @property
    def device(self) -> Any:
        """``device(x, out, tile, scratch)``, for kernels of your own: the same for a tile, by all threads of
        a block. ``tiles`` makes its scratch. ValueError for kernels that have no such form.

        x, out   1-D, C-contiguous, at multiples of 16 bytes, of the kernel's dtype, which it does not check:
                 what the collective takes for this tile. Of an all-reduce, `out` may be `x`
        tile     its number, below that of ``tiles``: equal on all ranks, and once in a launch
        scratch  its `args`

        It begins and ends with cuda.syncthreads(): what the block stored in x is sent, and the block may
        read `out`. Blocks are one-dimensional, of whole warps, and wait for the other ranks: all must fit on
        the GPU at once.
        """
        if not hasattr(self._kind, "tile_of"):
            able = [name for name in available(self._of) if hasattr(_entry(self._of, name)[0], "tile_of")]
            have = f"{listed(able)} {'have' if len(able) > 1 else 'has'} one" if able else "none has one"
            raise ValueError(f"{self._who}: {self.method} has no form for tiles; {have}")
        return self._kind.tile_of(self.n_ranks, **self._alike, **self._settings)

    def _object(self, world, nbytes):
        """The host object that has the memory."""
        op, dtype = self._alike.values()
        options: Any = {"op": op} if op else {}
        times = getattr(self._kind, "counts", Method.counts)(dtype)
        host = self._of(world, times * nbytes, method=self.method, **options)
        for method in host._methods.values():
            method._keeps_arrays = True
        return host

    def _bound(self, host, x, out) -> Launch:
        """What the host object binds for these arrays."""
        if self._dtype and x.dtype != self._dtype:
            raise ValueError(f"{self._who}: x is {x.dtype}; it must be {self._dtype}, as of the kernel")
        launch = host._plan({"x": x, "out": out}, {})
        if getattr(launch, "kernel", None) is not self.kernel:
            raise ValueError(
                f"{self._who}: {self.method} has another kernel for several nodes, and for an out in "
                "symmetric memory. Give another out, or take the host object"
            )
        return launch

    def _before(self, host, x, out, nbytes, rest):
        """The arguments before `rest`, for these arrays."""
        if x.nbytes != nbytes:
            take = f"Take scratch.of({x.nbytes})" if x.nbytes else "Launch nothing for an empty x"
            raise ValueError(f"{self._who}: x has {x.nbytes} bytes, and this scratch is for {nbytes}. {take}")
        if self._of is not AllReduce and overlap(x, out):
            raise ValueError(f"{self._who}: x and out overlap; they must lie apart")
        given = self._bound(host, x, out).args
        if _numbers(given[self._n_before :]) != _numbers(rest):
            addresses = {"x": host.world.backend.address(x), "out": host.world.backend.address(out)}
            at = next(f"{name} begins at {a:#x}" for name, a in addresses.items() if a % 16)
            raise ValueError(f"{self._who}: {at}; it must be a multiple of 16 bytes")
        return given[: self._n_before]

    def _example(self, world, nbytes):
        dtype = self._dtype or as_dtype("uint8")
        return new_array(world.xp, nbytes // dtype.itemsize, dtype)

    def _out_bytes(self, nbytes):
        n = self.n_ranks
        return nbytes * n if self._of is AllGather else nbytes // n if self._of is ReduceScatter else nbytes

    def _checked_bytes(self, nbytes):
        nbytes, unit = integer(self._who, "nbytes", nbytes, 1), self._dtype.itemsize if self._dtype else 1
        unit *= self.n_ranks if self._of in (ReduceScatter, AllToAll) else 1
        if nbytes % unit:
            raise ValueError(
                f"{self._who}: nbytes is {nbytes}; it must be a multiple of {unit}, whole elements for each "
                "rank"
            )
        return nbytes


def _numbers(arguments):
    return [a for a in arguments if isinstance(a, int)]


def _who(of):
    return f"kernels.{of._table}"


def _entry(of: Any, method: str) -> tuple[Any, dict[str, Any]]:
    """-> (the method's class, its settings, the transport `t` among them), of the table of a collective"""
    match of._METHODS[method]:
        case (kind, t, *settings):
            return kind, {"t": t, **dict(*settings)}
        case kind:
            return kind, {"t": None}


def available(of: type[Collective]) -> dict[str, tuple[str, str | None]]:
    """-> {method: (schedule, transport)} of a collective: those of one kernel, which this module makes."""
    found = {}
    for name in of._METHODS:
        kind, settings = _entry(of, name)
        if hasattr(kind, "kernel_of"):
            t = settings["t"]
            schedule = name.removesuffix(t.name).rstrip("_") or kind.__name__.lower() if t else name
            found[name] = schedule, t and t.name
    return found


def _made(of, n_ranks, schedule, transport, op=None, dtype=None):
    """-> the first of a collective's kernels that is of this schedule and transport, where they are given"""
    who, known = _who(of), available(of)
    for name, given, column in (("schedule", schedule, 0), ("transport", transport, 1)):
        one_of(
            who, name, given, [None, *dict.fromkeys(word[column] for word in known.values() if word[column])]
        )
    able = [m for m, words in known.items() if schedule in (None, words[0]) and transport in (None, words[1])]
    if not able:
        have = [f"{s} by {t}" if t else s for s, t in known.values()]
        raise ValueError(
            f"{who}: schedule {schedule!r} has no transport {transport!r}; there are {listed(have, 'and')}"
        )
    kind, settings = _entry(of, able[0])
    at_once = getattr(kind, "at_once", False) and settings["t"].receive_all
    n_ranks = integer(who, "n_ranks", n_ranks, 1, AT_ONCE if at_once else None)
    if issubclass(of, Reducing):
        one_of(who, "op", op, OPS)
        dtype = as_dtype(dtype, f"{who}: ")
        check_reducible(who, op, dtype)
    return CollectiveKernel(of, n_ranks, able[0], op, dtype)


def all_reduce(
    n_ranks: int, op: Op, dtype: DType, *, schedule: str | None = None, transport: str | None = None
) -> CollectiveKernel:
    """-> a kernel of all-reduce: x and out of one size. `out` may be `x`.

    n_ranks    the ranks of the World
    op, dtype  as of `AllReduce`
    schedule   "one_shot", "two_shot", "ring" or "double_tree"; None: the first that has the transport
    transport  of packets, for "one_shot" "ll", "ll128" or "lamport", for "two_shot" "ll128"; None: the first
               that the schedule has

    TypeError or ValueError for others; the message has a list.
    """
    return _made(AllReduce, n_ranks, schedule, transport, op, dtype)


def reduce_scatter(
    n_ranks: int, op: Op, dtype: DType, *, schedule: str | None = None, transport: str | None = None
) -> CollectiveKernel:
    """-> a kernel of reduce-scatter: x of n_ranks segments, out of one.

    n_ranks    the ranks of the World
    op, dtype  as of `ReduceScatter`
    schedule   "exchange", "push" or "ring"; None: the first that has the transport
    transport  of packets, for "exchange" "ll", "ll128" or "lamport"; None: the first that the schedule has

    TypeError or ValueError for others; the message has a list.
    """
    return _made(ReduceScatter, n_ranks, schedule, transport, op, dtype)


def all_gather(
    n_ranks: int, *, schedule: str | None = None, transport: str | None = None
) -> CollectiveKernel:
    """-> a kernel of all-gather, of any dtype: x of one segment, out of n_ranks.

    n_ranks    the ranks of the World
    schedule   "rows", "exchange", "pull" or "push_1d"; None: the first that has the transport
    transport  of packets, for "rows" "ll", for "exchange" "ll128" or "lamport"; None: the first that the
               schedule has

    TypeError or ValueError for others; the message has a list.
    """
    return _made(AllGather, n_ranks, schedule, transport)


def all_to_all(
    n_ranks: int, *, schedule: str | None = None, transport: str | None = None
) -> CollectiveKernel:
    """-> a kernel of all-to-all, of any dtype: x and out of n_ranks segments.

    n_ranks    the ranks of the World
    schedule   "rows" or "push"; None: the first that has the transport
    transport  of packets, for "rows" "ll", "ll128" or "lamport"; None: the first that the schedule has

    TypeError or ValueError for others; the message has a list.
    """
    return _made(AllToAll, n_ranks, schedule, transport)


# ---- the others


class BarrierKernel(Kernel):
    """What ``barrier`` returns."""

    _x_and_out = False

    def scratch(self, world: World) -> Scratch:
        """What launches take, ``k[scratch.grid, scratch.block, stream](*scratch)``. Collective. TypeError or
        ValueError, on all ranks, for a wrong World."""
        self._agree(world, "scratch", dict)
        host = Barrier(world)
        (method,) = host._parts
        if method.run.kernel is not self.kernel:
            host.free()
            raise ValueError(f"{self._who}: it is for ranks that reach each other by stores. Use sk.Barrier")

        def before():
            host._order.compare(self._who)
            return ()

        return self._keep(host, (*method._arrays, method.epoch), method.run, before)


def barrier(n_ranks: int) -> BarrierKernel:
    """-> the kernel of a barrier of all ranks on a stream. What any rank enqueues after it sees what every
    rank enqueued before it. TypeError or ValueError for a wrong `n_ranks`, the ranks of the World."""
    return BarrierKernel("kernels.barrier", barrier_kernel, integer("kernels.barrier", "n_ranks", n_ranks, 1))


class QueueKernel(Kernel):
    """What ``queue`` returns."""

    def scratch(
        self,
        world: World,
        n_slots: int,
        item_size: int,
        dtype: DType = "float32",
        to: int | None = None,
        n_producers: int = 16,
        n_consumers: int = 4,
        block: int = 128,
    ) -> Scratch:
        """What launches take besides x and out, of any number of rows of `item_size` elements. Arguments and
        errors are those of `Queue`. Collective."""
        self._agree(world, "scratch", dict)
        host = Queue(world, n_slots, item_size, dtype, to, n_producers, n_consumers, block, "kernels.queue")

        def before(x, out):
            arrays = converted(self._who, {"x": x, "out": out}, world.xp)
            host._check(arrays)
            return [_as_numba_has_it(world, as_words(a)) for a in arrays.values()]

        return self._keep(host, host._rest, host._launch, before)


def queue(n_ranks: int) -> QueueKernel:
    """-> the kernel of a `Queue`: it pushes the rows of x to a rank, and pops what arrives into the rows of
    out. TypeError or ValueError for a wrong `n_ranks`, the ranks of the World."""
    return QueueKernel("kernels.queue", queue_kernel, integer("kernels.queue", "n_ranks", n_ranks, 1))


class GemmKernel:
    """What ``gemm`` returns: ``g.kernel[g.grid, g.block, stream, g.shared](*g.args)``.

    kernel              the @cuda.jit kernel
    arguments           a text: the names, dtypes and shapes of its arguments
    args                the arguments, for the arrays that it was made for, which it keeps alive
    grid, block, shared of a launch: blocks, threads, bytes of dynamic shared memory
    """

    def __init__(self, world: World, launch: Launch, arrays: Any):
        self._arrays, self.kernel = arrays, launch.kernel
        self.grid, self.block, self.shared = launch.grid, launch.block, launch.shared
        self.args = _as_numba_has_it(world, launch.args)

    @property
    def arguments(self) -> str:
        return _arguments_of(self.kernel)


def gemm(
    world: World,
    x: AnyArray,
    w: AnyArray,
    out: AnyArray,
    *,
    bias: AnyArray | None = None,
    activation: Activation | None = None,
    method: GemmMethod = "auto",
) -> GemmKernel:
    """-> the kernel of ``out = activation(x @ w + bias)`` that `Gemm` binds for these arrays: their sizes,
    and on Hopper their addresses, are in its arguments. Not collective.

    Arguments and errors are those of `Gemm`; float8 has none. It asks the driver for the shared memory that
    Numba's launches of it need. They order nothing but their stream.
    """
    check_world("kernels.gemm", world)
    product = Gemm(method)
    arrays = converted("kernels.gemm", {"x": x, "w": w, "out": out, "bias": bias}, world.xp, ("bias",))
    product._check(arrays)
    check_activation("kernels.gemm", activation, arrays["x"].dtype)
    product._check_scales(arrays["x"], None)
    if not arrays["out"].size:
        raise ValueError(f"kernels.gemm: out is {arrays['out'].shape}; it must have elements")
    a, b, c, d = (None if array is None else unlocked(array) for array in arrays.values())
    problem = Problem(a, b, c, d, activation)
    run: Any = bind_product(problem, gpu_of(world), method, keeps_arrays=True)
    return GemmKernel(world, run._launch, problem)
