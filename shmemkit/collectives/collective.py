"""What the host objects of collectives share: their methods, calls on any stream and in graphs, and symmetric
outputs.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from shmemkit.device import reduction
from shmemkit.runtime.budget import checked_sms
from shmemkit.runtime.stream_order import shared_order
from shmemkit.runtime.world import OutOfReach, World, check_world
from shmemkit.support.arrays import (
    call_on,
    check_writable,
    converted,
    keyed,
    new_output,
    unlocked,
    with_shape,
)
from shmemkit.support.settings import array_text, integer, one_of
from shmemkit.support.sizes import size_text
from shmemkit.typing import Array, DType, Shape

from . import tuning
from .bound_calls import Plans
from .method import agree_on

PLANS, EMULATED_PLANS = 1024, 64  # bound calls that are kept; the emulator's keep their arrays alive


class Collective:
    """A subclass has

    _table    its name in the tuning table, as "all_gather"
    _METHODS  {name: (schedule, transport, settings)} of packets, as ``collectives/schedules`` have them; or a
              class like ``Method``; or (class, None, settings). It is called with the World, the bytes of the
              largest full array, what ``_options`` gives, the settings, and `sms`. And `methods`, their names
    _shape    (shape of x) -> the shape of a new output
    _sizes    (x, out): ValueError, with what is needed, unless their sizes fit
    _in_place (x, out): by how many bytes x lies behind out where they may overlap, None where they may not;
              `_overlap` says it

    and may have ``_checked_options()`` -> {name: value}: what else its methods are made with; TypeError or
    ValueError for what cannot be.

    The full array is the larger one of a call's two.
    """

    _table: str
    _METHODS: dict[str, Any]
    methods: tuple[str, ...]
    max_nbytes: int
    sms: int | None
    _options: dict[str, Any]
    _choices: Any
    _overlap: str
    _shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    _sizes: Callable[[Any, Any], None]
    _in_place: Callable[[Any, Any], int | None]
    _out_is_alike = False  # whether out, and not x, is of the same size on all ranks
    _writes_out = True  # whether this rank gets a result
    _one_place = True  # whether a symmetric `out` is the same part of symmetric memory on all ranks

    def __init__(self, world: World, max_nbytes: int, method: str, sms: int | None = None):
        self._name = name = type(self).__name__
        check_world(name, world)
        self.world, self.method = world, method
        self._address, self._array = world.backend.address, world.xp.ndarray

        def check():
            one_of(name, "method", method, (*self._METHODS, "auto"))
            self.max_nbytes = integer(name, "max_nbytes", max_nbytes, 0)
            self._options, self.sms = self._checked_options(), checked_sms(name, sms)
            return {"max_nbytes": self.max_nbytes, "method": method, "sms": self.sms, **self._options}

        agree_on(world, name, check)
        self._methods: Any = {}  # None once it is freed
        self._plans, self._outputs, self.refused = plans_of(world), [], {}
        self._order = shared_order(world)
        try:
            if method != "auto":
                self._methods[method] = self._make(method, self.max_nbytes)
            else:
                built = tuning.build(world, self._table, self.max_nbytes, self._make, self.sms)
                self._methods, self._choices, self.refused, self._chosen_by = built
        except (ValueError, MemoryError) as error:
            self.free()
            if isinstance(error, OutOfReach) and method != "auto":
                error.args = (f"{error}. method='auto' takes one that can be used here, if there is one",)
            raise

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
        world, array, result, waits = self.world, self._array, out, False
        if world.finalized:
            check_world(self._name, world)
        if not isinstance(x, array) or not (out is None or isinstance(out, array)):
            (stream, waits), given = call_on(world, stream, x, out), x
            x = with_shape(self._name, "x", x, world.xp)
            if out is given:
                out = x
        elif stream is world.stream:
            stream = None
        if out is None:
            shape, follow = self._shape(x.shape), world.backend.follow
            result = out = new_output(x, shape, x.dtype, world.xp, stream, follow)
        if isinstance(x, array) and isinstance(out, array):
            address = self._address
            key = address(x), address(out), x.shape, out.shape, x.strides, out.strides, x.dtype, out.dtype
        else:
            key, arrays = keyed(self._name, {"x": x, "out": out}, world.xp)
            x, out = arrays.values()
        run = self._plans.get(key)
        if run is None:
            run = self._plan(key, *converted(self._name, {"x": x, "out": out}, world.xp).values())
        alike = out if self._out_is_alike else x
        self._order.before(stream, self._name, alike, shared=out if self._one_place else None)
        run(stream)
        if waits:
            world.stream.synchronize()
        return result

    def _plan(self, key, x, out):
        """Bind the method for these arrays; bound calls are kept by address."""
        name = self._name
        self._check_alive()
        for argument, array in (("x", x), ("out", out)):
            if array.dtype.hasobject:
                raise TypeError(f"{name}: {argument} has Python objects; it must have numbers, as float32")
            check_contiguous(name, argument, array)
        if self._writes(x, out):
            check_writable(name, "out", out)
        self._sizes(x, out)
        x, out = unlocked(x), unlocked(out)
        full = self._full(x, out)
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
            raise ValueError(f"{name}: x and out overlap; {self._overlap}")
        run = _nothing
        if x.size:
            method = self.method_for(times * full, self.world.is_symmetric(out))
            run = self._bind(self._methods[method], x.reshape(-1), out.reshape(-1), in_place)
        self._plans.keep(key, run)
        return run

    def _writes(self, x, out):
        """Whether a call writes `out` on this rank."""
        return self._writes_out

    def _shape_of_segment(self, shape):
        """-> the shape of a rank's segment of an array of this shape"""
        n = self.world.n_ranks
        if shape and shape[0] % n == 0:
            return (shape[0] // n, *shape[1:])
        return (math.prod(shape) // n,)

    def _full(self, x, out):
        """Bytes of the full array."""
        return max(x.nbytes, out.nbytes)

    def _bind(self, method, x, out, in_place):
        return method.bind(*self._words(x, out), in_place)

    def _words(self, x, out):
        """Both as uint64 where their addresses and sizes allow, else as uint8."""
        address = self._address
        unit = "uint8" if (address(x) | address(out) | x.nbytes | out.nbytes) % 8 else "uint64"
        return x.view(unit), out.view(unit)

    def _check_alive(self):
        if self._methods is None:
            raise RuntimeError(f"{self._name}: it was freed; make a new one")

    def output(self, shape: Shape, dtype: DType) -> Array:
        """-> a symmetric array for a result, of this shape and dtype on all ranks: CuPy's, on the emulator
        NumPy's. The object frees it in ``free``. Errors as of ``sk.empty``. Collective.
        """
        self._check_alive()
        self._outputs.append(self.world.empty(shape, dtype, f"{self._table}.output[{len(self._outputs)}]"))
        return self._outputs[-1]

    def method_for(self, nbytes: int, symmetric: bool = False) -> str:
        """-> the name of the method for a full array (the larger one of x and out) of `nbytes` bytes, up to
        max_nbytes; with `symmetric`, for a result in symmetric memory. TypeError or ValueError for any other
        `nbytes`.
        """
        integer(self._name, "nbytes", nbytes, 0, self.max_nbytes)
        if self.method != "auto":
            return self.method
        return tuning.method_at(self._choices[symmetric], nbytes)

    def describe(self) -> str:
        """-> which method calls take, by size, and from where that choice came: a table that was measured on
        this GPU model, one of other numbers of ranks, or a model."""
        world, name = self.world, self._name
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

    def free(self) -> None:
        """Give the symmetric memory back, also that of the outputs, when this rank's GPU work has ended.
        Afterwards neither the object nor graphs that captured its calls can be used. Collective.
        """
        methods, self._methods = self._methods, None
        self._plans.clear()
        for method in (methods or {}).values():
            method.free()
        while self._outputs:
            output = self._outputs.pop(0)
            if self.world.is_symmetric(output):  # not freed already
                self.world.free(output)


class OfRoot(Collective):
    """One with a root, the rank that gives or gets the whole array."""

    _one_place = False

    def __init__(self, world: World, max_nbytes: int, root: int, method: str, sms: int | None = None):
        self.root = root
        super().__init__(world, max_nbytes, method, sms)

    def _checked_options(self):
        self.root = checked_root(type(self).__name__, self.world, self.root)
        return {"root": self.root}

    def _to_root(self, x, out, stream):
        """A call of which the root alone gets the result."""
        self._writes_out = self.world.rank == self.root
        if self._writes_out:
            return self._call(x, out, stream)
        if out is not None:
            raise ValueError(
                f"{self._name}: out is given on rank {self.world.rank}; it must be None there. The root, "
                f"rank {self.root}, gets the result"
            )
        self._call(x, x, stream)
        return None

    def method_for(self, nbytes: int, symmetric: bool = False) -> str:
        """-> the name of the method for a full array (the larger one of x and out) of `nbytes` bytes, up to
        max_nbytes. `symmetric` changes nothing, since other ranks do not know where a result lies. TypeError
        or ValueError for any other `nbytes`.
        """
        return super().method_for(nbytes)


def plans_of(world):
    return Plans(EMULATED_PLANS if world.backend.name == "emulator" else PLANS)


def run_bound(host, who, arrays, stream, waits, optional=(), **numbers):
    """Enqueue a call of `host`: the one that was bound to arrays like these before, or a new one.

    host     has `world`, `_plans`, `_order`, and _plan(**arrays, **numbers) -> run(stream)
    arrays   {name: array}; calls are compared by the first one
    numbers  which belong to the call as the arrays do
    stream, waits  as of ``call_on``
    """
    world, first = host.world, next(iter(arrays))
    key, known = keyed(who, arrays, world.xp, optional)
    key = *key, *numbers.values()
    run = host._plans.get(key)
    if run is None:
        run = host._plan(**converted(who, known, world.xp, optional), **numbers)
        host._plans.keep(key, run)
    host._order.before(stream, who, known[first])
    run(stream)
    if waits:
        world.stream.synchronize()


def check_contiguous(name, argument, array):
    if not array.flags.c_contiguous:
        instead = "a C-contiguous `out`" if argument.startswith("out") else "a copy"
        if argument in ("x", "y") and "torch" in sys.modules:
            instead += f": of a tensor, {argument}.contiguous()"
        raise ValueError(
            f"{name}: {argument} is {array_text(array)}; it must be C-contiguous. Give {instead}"
        )


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


def _nothing(stream):
    pass
