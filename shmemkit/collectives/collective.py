"""What the host objects of collectives share: their methods, calls on any stream and in graphs, and symmetric
outputs.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from shmemkit.device import reduction
from shmemkit.device.cuda.word_reductions import OPS
from shmemkit.operations.operation import Given, WithOutputs, nothing
from shmemkit.runtime.world import OutOfReach, World
from shmemkit.support.arrays import converted, new_output
from shmemkit.support.settings import integer, one_of
from shmemkit.support.sizes import size_text
from shmemkit.typing import Op

from . import tuning

MethodT = TypeVar("MethodT", bound=str)
_UFUNCS = {"sum": "add", "avg": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


class Collective(WithOutputs, Generic[MethodT]):
    """A subclass names the type of its methods' names, and has

    _METHODS  {name: (schedule, transport, settings)} of packets, as ``collectives/schedules`` have them; or a
              class like ``Method``; or (class, None, settings). It is called with the World, the bytes of the
              largest full array, what ``_options`` gives, the settings, and `sms`
    _scatters whether x has a segment for each rank; else it is one
    _gathers  whether out has a segment of each rank; else it is one
    _moved    (NumPy or CuPy, what all ranks give, rank, root) -> what that rank gets; root is 0 of those
              without one. A ``Reducing`` has ``_combined`` instead

    By these, shapes and sizes are checked, x may be out, or lie in it, or out in x, and ``shmemkit bench``,
    ``shmemkit check`` and the tests know what is right. The full array is the larger one of a call's two.

    It may have ``_checked_options()`` -> {name: value}: what else its methods are made with; TypeError or
    ValueError for what cannot be.
    """

    ARRAYS = {
        "x": Given(dtype=None, align=1),
        "out": Given(dtype=None, align=1, new=True, may_be="any"),
    }
    _gathers = _scatters = _reduces = False
    _rooted: Literal["gives", "gets"] | None = None  # what the root alone does with the array of all
    _moved: Callable[..., Any]
    _combined: Callable[..., Any]
    _METHODS: dict[str, Any] = {}
    _table: str  # its name in the tuning table, as "all_gather"
    methods: tuple[str, ...]
    max_nbytes: int
    _options: dict[str, Any]
    _choices: Any
    _out_is_alike = False  # whether out, and not x, is of the same size on all ranks
    _one_place = True  # whether a symmetric `out` is the same part of symmetric memory on all ranks

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls._table = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        cls.methods = tuple(cls._METHODS)

    @classmethod
    def _expected(cls, xp, given, rank, root=0, op="sum"):
        """What `rank` gets of what all ranks give, as arrays of `xp`: NumPy or CuPy."""
        return cls._moved(xp, given, rank, root)

    @classmethod
    def _gives(cls, rank, root):
        """Whether `rank` gives x."""
        return rank == root or not (cls._rooted == "gives" and cls._scatters)

    @classmethod
    def _gets(cls, rank, root):
        """Whether `rank` gets out."""
        return rank == root or cls._rooted != "gets"

    @classmethod
    def _made(cls, world, max_nbytes, method: Any = "auto", root=0, op="sum", sms=None):
        """An object with those of `root` and `op` that this collective takes."""
        options: dict[str, Any] = {"root": root} if cls._rooted else {}
        options |= {"op": op} if cls._reduces else {}
        return cls(world, max_nbytes, method=method, **options, sms=sms)

    def __init__(
        self,
        world: World,
        max_nbytes: int,
        method: MethodT | Literal["auto"] = "auto",
        *,
        sms: int | None = None,
    ):
        def check():
            name = self._who
            self.method = one_of(name, "method", method, (*self._METHODS, "auto"))
            self.max_nbytes = integer(name, "max_nbytes", max_nbytes, 0)
            self._options = self._checked_options()
            return {"max_nbytes": self.max_nbytes, "method": method, **self._options}

        super().__init__(world, check, sms)
        self._address, self._array = world.backend.address, world.xp.ndarray
        self.refused = {}
        try:
            if method != "auto":
                self._methods = {method: self._make(method, self.max_nbytes)}
            else:
                built = tuning.build(world, self._table, self.max_nbytes, self._make, self.sms)
                self._methods, self._choices, self.refused, self._chosen_by = built
        except (ValueError, MemoryError) as error:
            self.free()
            if isinstance(error, OutOfReach) and method != "auto":
                error.args = (f"{error}. method='auto' takes one that can be used here, if there is one",)
            raise
        self._parts += self._methods.values()

    def _checked_options(self):
        return {}

    def _make(self, name, max_nbytes):
        if name not in self._METHODS:
            raise ValueError("there is no such method")
        return self._maker(name)(self.world, max_nbytes, *self._options.values(), sms=self.sms)

    @classmethod
    def _maker(cls, name: str) -> Callable:
        """-> what makes the method `name`: ``make(world, max_nbytes, *options, sms=None)``.
        Collective."""
        match cls._METHODS[name]:
            case (kind, None, settings):
                return functools.partial(kind, **settings)
            case (schedule, transport, *settings):
                return functools.partial(
                    schedule, name=f"{cls._table} {name}", t=transport, **dict(*settings)
                )
            case kind:
                return kind

    def _call(self, x, out, stream):
        world, array = self.world, self._array
        if not (isinstance(x, array) and (out is None or isinstance(out, array))):
            return self._enqueue(self._named(x, out), stream)["out"]
        if world.finalized:
            self._check_alive()
        if stream is world.stream:
            stream = None
        if out is None:
            out = new_output(x, self._shape(x.shape), x.dtype, world.xp, stream, world.backend.follow)
        address = self._address
        key = address(x), address(out), x.shape, out.shape, x.strides, out.strides, x.dtype, out.dtype
        run = self._plans.get(key)
        if run is None:
            self._check_alive()
            run = self._plan(converted(self._who, self._named(x, out), world.xp), {})
            self._plans.keep(key, run)
        alike = out if self._out_is_alike else x
        self._order.before(stream, self._who, alike, shared=out if self._one_place else None)
        run(stream)
        return out

    def _in_order(self, stream, arrays):
        out = arrays["out"]
        alike = out if self._out_is_alike else arrays["x"]
        self._order.before(stream, self._who, alike, shared=out if self._one_place else None)

    def _new_shape(self, name, arrays):
        return self._shape(arrays["x"].shape)

    def _sides(self, x, out):
        """-> x and out of a call on this rank; ValueError where one must not be given, or must be."""
        return x, out

    def _check_call(self, *given):
        named = self._named(*self._sides(*given))
        super()._check_call(*[named[name] for name in self.ARRAYS])

    def _named(self, x, out):
        """The arrays, first that which all ranks give."""
        return {"out": out, "x": x} if self._out_is_alike else {"x": x, "out": out}

    def _bind(self, x, out):
        """Bind the method for these arrays."""
        self._sizes(x, out)
        name, full = self._who, self._full(x, out)
        times = max((method.counts(x.dtype.name) for method in self._methods.values()), default=1)
        if times * full > self.max_nbytes:
            of = {out.nbytes: "out", x.nbytes: "x"}.get(full, "the whole array")
            raise ValueError(
                f"{name}: {of} has {full} bytes"
                f"{f', which count {times} times, since totals of {x.dtype} travel as float32' * (times > 1)}"
                f", more than max_nbytes={self.max_nbytes}. Make "
                f"{'an' if name[0] == 'A' else 'a'} {name} with a larger max_nbytes"
            )
        at, to = self._address(x), self._address(out)
        offset = self._in_place(x, out)
        in_place = offset is not None and at == to + offset
        if at < to + out.nbytes and to < at + x.nbytes and not in_place:
            raise ValueError(f"{name}: x and out overlap; they must lie apart{self._or_in_place()}")
        if not x.size:
            return nothing
        method = self._methods[self.method_for(times * full, self.world.is_symmetric(out))]
        return self._bind_method(method, x.reshape(-1), out.reshape(-1), in_place)

    def _is_written(self, name, arrays):
        return name == "out" and self._writes(arrays["x"], arrays["out"])

    def _writes(self, x, out):
        """Whether a call writes `out` on this rank."""
        return True

    def _check_out(self, x, out, size, of_which=""):
        """ValueError unless out is of x's dtype, with `size` elements."""
        if x.dtype != out.dtype or out.size != size:
            raise ValueError(
                f"{self._who}: x is {x.dtype} {x.shape}, and out is {out.dtype} {out.shape}; out must be "
                f"{x.dtype} with {size} elements{of_which}"
            )

    def _sizes(self, x, out):
        """ValueError, with what is needed, unless their sizes fit."""
        n = self.world.n_ranks
        if self._scatters and x.size % n:
            raise ValueError(
                f"{self._who}: x is {x.shape}; the number of its elements must be a multiple of {n}, the "
                "ranks"
            )
        if self._gathers == self._scatters:
            self._check_out(x, out, x.size)
        elif self._gathers:
            self._check_out(x, out, n * x.size, f", x of each of {n} ranks")
        else:
            self._check_out(x, out, x.size // n, f", the part of one of {n} ranks")

    def _shape(self, shape):
        """The shape of a new output, by that of x."""
        n = self.world.n_ranks
        if self._gathers == self._scatters:
            return shape
        if self._gathers:
            return n, *shape
        if shape and shape[0] % n == 0:
            return (shape[0] // n, *shape[1:])
        return (math.prod(shape) // n,)

    def _in_place(self, x, out):
        """The byte offset of x from out at which the two may overlap, or None if they never may."""
        if self._gathers and self._scatters:
            return None
        return self.world.rank * (self._gathers * x.nbytes - self._scatters * out.nbytes)

    def _or_in_place(self):
        if self._gathers and self._scatters:
            return ""
        if self._gathers == self._scatters:
            return ", or be the same"
        part, full = ("x", "out") if self._gathers else ("out", "x")
        return f", or {part} must be its own part of {full}, {full}[{'root' if self._rooted else 'rank'}]"

    @classmethod
    def _segments(cls, n_ranks):
        """How many segments the full array has."""
        return n_ranks if cls._gathers or cls._scatters else 1

    def _full(self, x, out):
        """Bytes of the full array."""
        if self._gathers == self._scatters:
            return x.nbytes
        return self.world.n_ranks * min(x.nbytes, out.nbytes)

    def _bind_method(self, method, x, out, in_place):
        return method.bind(*self._words(x, out), in_place)

    def _words(self, x, out):
        """Both as uint64 where their addresses and sizes allow, else as uint8."""
        address = self._address
        unit = "uint8" if (address(x) | address(out) | x.nbytes | out.nbytes) % 8 else "uint64"
        return x.view(unit), out.view(unit)

    def method_for(self, nbytes: int, symmetric: bool = False) -> str:
        """-> the name of the method for a full array (the larger one of x and out) of `nbytes` bytes, up to
        max_nbytes; with `symmetric`, for a result in symmetric memory. TypeError or ValueError for any other
        `nbytes`.
        """
        integer(self._who, "nbytes", nbytes, 0, self.max_nbytes)
        if self.method != "auto":
            return self.method
        return tuning.method_at(self._choices[symmetric], nbytes)

    def describe(self) -> str:
        """-> which method calls take, by size, and from where that choice came: a table that was measured on
        this GPU model, one of other numbers of ranks, or a model."""
        world, name = self.world, self._who
        n = world.n_ranks
        where = f"{n} rank{'s' * (n > 1)} on {world.backend.gpu_name}"
        if self.method != "auto":
            return f"{name}, {where}: {self.method}, as given"
        lines = [f"{name}, {where}: {self._chosen_by}"]
        for output, symmetric in (("private", False), ("symmetric", True)):
            taken = [f"{m} up to {size_text(most)}" if most else m for most, m in self._choices[symmetric]]
            lines.append(f"  {output}: {', then '.join(taken)}")
        lines += [f"  not {method}: {why}" for method, why in self.refused.items()]
        return "\n".join(lines)


class Reducing(Collective[MethodT]):
    """One that combines the arrays of all ranks."""

    _reduces = True

    @classmethod
    def _combined(cls, method, rank, n):
        """The ranks whose arrays `rank` gets combined, in this order."""
        return range(n)

    @classmethod
    def _expected(cls, xp, given, rank, root=0, op="sum"):
        given = [given[k] for k in cls._combined("", rank, len(given))]
        given = [x[rank] for x in given] if cls._scatters else given
        total = functools.reduce(getattr(xp, _UFUNCS[op]), given)
        return total // len(given) if op == "avg" else total

    def __init__(
        self,
        world: World,
        max_nbytes: int,
        op: Op = "sum",
        method: MethodT | Literal["auto"] = "auto",
        *,
        sms: int | None = None,
    ):
        self.op = op
        super().__init__(world, max_nbytes, method, sms=sms)

    def _checked_options(self):
        one_of(self._who, "op", self.op, OPS)
        return {**super()._checked_options(), "op": self.op}

    def _sizes(self, x, out):
        super()._sizes(x, out)
        check_reducible(self._who, self.op, x.dtype)

    def _bind_method(self, method, x, out, in_place):
        return method.bind(*self._words(x, out), in_place, x.dtype)


class OfRoot(Collective[MethodT]):
    """One with a root, the rank that gives or gets the whole array."""

    _rooted, _one_place = "gives", False

    def __init__(
        self,
        world: World,
        max_nbytes: int,
        root: int = 0,
        method: MethodT | Literal["auto"] = "auto",
        *,
        sms: int | None = None,
    ):
        self.root = root
        super().__init__(world, max_nbytes, method, sms=sms)

    def _checked_options(self):
        self.root = checked_root(type(self).__name__, self.world, self.root)
        return {"root": self.root}

    def _in_place(self, x, out):
        return super()._in_place(x, out) if self.world.rank == self.root else 0

    def method_for(self, nbytes: int, symmetric: bool = False) -> str:
        """-> the name of the method for a full array (the larger one of x and out) of `nbytes` bytes, up to
        max_nbytes. `symmetric` changes nothing, since other ranks do not know where a result lies. TypeError
        or ValueError for any other `nbytes`.
        """
        return super().method_for(nbytes)


class ForRoot(OfRoot[MethodT]):
    """One of which the root alone gets the result."""

    _rooted = "gets"

    def _to_root(self, x, out, stream):
        if self.world.rank == self.root:
            return self._call(x, out, stream)
        self._call(*self._sides(x, out), stream)
        return None

    def _sides(self, x, out):
        if self.world.rank == self.root:
            return x, out
        if out is not None:
            raise ValueError(
                f"{self._who}: out is given on rank {self.world.rank}; it must be None there. The root, "
                f"rank {self.root}, gets the result"
            )
        return x, x

    def _sizes(self, x, out):
        if self.world.rank == self.root:
            super()._sizes(x, out)

    def _writes(self, x, out):
        return self.world.rank == self.root


def checked_root(name, world, root):
    """`root` as a rank; TypeError or ValueError for what is none."""
    return integer(name, "root", root, 0, world.n_ranks - 1)


def check_reducible(name, op, dtype):
    """ValueError for what `op` cannot combine."""
    if not dtype.isnative:
        raise ValueError(
            f"{name}: x has dtype {dtype.str}; it must be of this machine's byte order. Convert it"
        )
    if dtype == "bool":
        view = "x.view('uint8')" + " (of a tensor, x.view(torch.uint8))" * ("torch" in sys.modules)
        raise ValueError(
            f"{name}: x has dtype bool, which cannot be reduced; give {view} with op 'max' (any) or 'min' "
            "(all)"
        )
    try:
        reduction(op, dtype.name)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
