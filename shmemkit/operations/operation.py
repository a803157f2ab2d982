"""One declaration of an operation: the arrays of its calls. What the host does with them follows from it.

    class AttentionCombine(Operation):
        ARRAYS = {
            "partial": Given("batch heads head_dim"),
            "lse": Given("batch heads", "float32", align=0),
            "out": Given("batch own_heads head_dim", new=True, may_be="partial"),
        }
        LIMITS = {"batch": ("max_batch", "batch entries")}

A call, ``self._enqueue({"partial": partial, "lse": lse, "out": None}, stream)``:

  1. decides on the stream: PyTorch's current one for its tensors, else the World's
  2. makes the outputs that are left out
  3. finds the call that is bound to arrays at these addresses; else it checks them all, and binds one
  4. orders it behind the earlier calls of the World (runtime/stream_order.py), and launches it
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shmemkit.runtime.budget import checked_sms
from shmemkit.runtime.stream_order import shared_order
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World, check_world
from shmemkit.support.arrays import (
    call_on,
    check_contiguous,
    check_writable,
    converted,
    keyed,
    new_output,
    overlap,
    unlocked,
    unowned,
    with_shape,
)
from shmemkit.support.settings import array_text, listed
from shmemkit.typing import Array, DType, Shape

from .method import agree_on
from .plans import Plans, plans_of


@dataclass(frozen=True)
class Given:
    """An array of a call.

    dims        the names of its dimensions. A name is an attribute of the object, or a size that all arrays
                of a call share, or n_ranks; two may be multiplied or divided: "n_ranks*m". "k/128", by a
                number, is rounded up. One that ends with "#" is of its own in each of several arrays,
                "w[0]", "w[1]"... "": one element. None: the operation checks the shape
    dtype       its name, that of another array, or "dtype": the object's. None: the operation checks it
    align       bytes that its address is a multiple of. 0: those of an element. 1: any address
    contiguous  whether it must be C-contiguous; else it may have any strides of whole elements
    new         a call may leave it out, and gets a new one, of the kind of the first array
    optional    a call may leave it out
    written     a call writes it, as all that are `new`
    may_be      the array that a written one may be; it overlaps no other. "any": the operation checks that
    """

    dims: str | None = None
    dtype: str | None = "dtype"
    align: int = 16
    contiguous: bool = True
    new: bool = False
    optional: bool = False
    written: bool = False
    may_be: str | None = None

    @functools.cached_property
    def names(self) -> list[str]:
        """Of its dimensions."""
        return (self.dims or "").split()


class Declared:
    """What enqueues calls of arrays that it declares. A subclass has

    ARRAYS  {name: Given}
    LIMITS  {dimension: (attribute that is its largest size, what it counts)}. Where one is 0, a call does
            nothing
    _bind   (**arrays, **numbers) -> run(stream), for arrays that are checked, or None
    world   the World, or a group of it
    _plans  the Plans of bound calls

    and may override what follows ``_enqueue``.
    """

    ARRAYS: dict[str, Given] = {}
    LIMITS: dict[str, tuple[str, str]] = {}
    world: Any
    _who: str
    _bind: Callable[..., Callable]
    _plans: Plans
    _parts: Any = ()  # what ``free`` frees; None once it has
    _or_same = ", or be the same"  # how an array may lie in that which it `may_be`
    dtype: Any

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls._who = cls.__name__
        cls._optional = tuple(name for name, given in cls.ARRAYS.items() if given.optional)
        cls._new = {name for name, given in cls.ARRAYS.items() if given.new}

    def _enqueue(self, arrays, stream, **numbers):
        """Enqueue a call of `arrays`, {name: array or None}; `numbers` belong to it as they do.
        -> arrays, with the new ones"""
        who, world = self._who, self.world
        if self._parts is None or world.finalized:
            self._check_alive()
        stream, waits = call_on(world, stream, *arrays.values())
        for name, array in arrays.items():
            if array is None and name.partition("[")[0] in self._new:
                arrays = self._with_outputs(arrays, stream)
                break
        key, known = keyed(who, arrays, world.xp, self._optional)
        if numbers:
            key = *numbers.values(), *key
        run, owning = self._plans.get(key), self._plans.synchronize is not None
        if run is None or owning:
            if run is None:
                run = self._plan(converted(who, known, world.xp, self._optional), numbers)
            self._plans.keep(key, run, owning and world.backend.capture_of(stream) is not None)
        self._in_order(stream, known)
        run(stream)
        if waits:
            world.stream.synchronize()
        return arrays

    def _with_outputs(self, arrays, stream):
        """-> `arrays`, with new ones where None is given"""
        world, arrays, new = self.world, dict(arrays), []
        for name, array in arrays.items():
            if not isinstance(array, world.xp.ndarray):
                given = self._declared(name)
                if given.new and array is None:
                    new.append(name)
                elif not (given.new or array is None and given.optional):
                    arrays[name] = with_shape(self._who, name, array, world.xp)
        like = next(array for array in arrays.values() if array is not None)
        for name in new:
            shape, kind = self._new_shape(name, arrays), self._dtype_of(name, arrays)
            kind = like.dtype if kind is None else kind[0] if isinstance(kind, tuple) else kind
            arrays[name] = new_output(like, shape, kind, world.xp, stream, world.backend.follow)
        return arrays

    def _plan(self, arrays, numbers):
        """Check `arrays`, and bind a call to them."""
        sizes = self._check(arrays)
        if self._is_empty(sizes):
            return nothing
        own = unowned if self._plans.synchronize else lambda x: x  # else the launches forget the arrays
        given = {name: None if x is None else own(unlocked(x)) for name, x in arrays.items()}
        return self._bind(**given, **numbers)

    def _check_call(self, *given):
        """TypeError or ValueError for what a call of these arrays would refuse on this rank."""
        arrays = self._with_outputs(dict(zip(self.ARRAYS, given, strict=True)), None)
        self._plan(converted(self._who, arrays, self.world.xp, self._optional), {})

    def _check(self, arrays):
        """TypeError or ValueError for wrong ones. -> {dimension: size}"""
        who, sizes = self._who, {"n_ranks": self.world.n_ranks}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        for name, array in arrays.items():
            given = self._declared(name)
            self._check_kind(name, array, sizes, arrays)
            steps = [step for step, size in zip(array.strides, array.shape, strict=True) if size > 1]
            if given.contiguous:
                check_contiguous(who, name, array)
            elif any(step % array.itemsize for step in steps):
                raise ValueError(
                    f"{who}: {name} has strides {array.strides}; they must be multiples of its elements' "
                    f"{array.itemsize} bytes. Give a copy"
                )
            address, unit = self.world.backend.address(array), given.align or array.dtype.itemsize
            if array.nbytes and address % unit:
                raise ValueError(
                    f"{who}: {name} begins at address {address:#x}; it must be a multiple of {unit}. Give a "
                    "copy"
                )
            if self._is_written(name, arrays):
                check_writable(who, name, array)
                if array.size and 0 in steps:
                    raise ValueError(
                        f"{who}: {name} is a broadcast array, whose elements share memory; give another one"
                    )
        for name, array in arrays.items():
            may_be = self._declared(name).may_be
            if not self._is_written(name, arrays) or may_be == "any":
                continue
            for other, against in arrays.items():
                same = other == may_be and self._is_same(array, against)
                if other != name and not same and overlap(array, against):
                    or_same = self._or_same if other == may_be else ""
                    raise ValueError(f"{who}: {name} and {other} overlap; they must lie apart{or_same}")
        return sizes

    def _check_kind(self, name, array, sizes, arrays):
        """ValueError for a wrong shape or dtype; `sizes` gets the dimensions that this array is the first to
        have."""
        who, given, kinds = self._who, self._declared(name), self._dtype_of(name, arrays)
        kinds = kinds if isinstance(kinds, tuple) else () if kinds is None else (kinds,)
        dims, known = given.names, [self._size_of(dim, sizes) for dim in given.names]
        fits = given.dims is None or (_fits(known, array.shape) if dims else array.size == 1)
        if array.dtype.hasobject or not fits or kinds and array.dtype not in kinds:
            needed, hint = [listed(kind.name for kind in kinds)] if kinds else [], ""
            if array.dtype.hasobject:
                numbers = "".join(needed) or "numbers, as float32"
                raise TypeError(f"{who}: {name} has Python objects; it must have {numbers}")
            if dims:
                texts = [dim if size is None else str(size) for dim, size in zip(dims, known, strict=True)]
                needed.append(f"({', '.join(texts)}{',' * (len(dims) == 1)})")
            elif given.dims == "":
                needed.append("of one element")
            turned = *array.shape[:-2], *array.shape[:-3:-1]
            if not fits and not given.contiguous and _fits(known, turned):
                hint = f". Give {name}.{'T' if array.ndim == 2 else 'swapaxes(-2, -1)'}"
            raise ValueError(f"{who}: {name} is {array_text(array)}; it must be {' '.join(needed)}{hint}")
        sizes.update((dim, n) for dim, n in zip(dims, array.shape, strict=False) if not hasattr(self, dim))
        for dim in dims:
            if dim in self.LIMITS and sizes[dim] > (limit := getattr(self, self.LIMITS[dim][0])):
                most, what = self.LIMITS[dim]
                raise ValueError(
                    f"{who}: {name} has {sizes[dim]} {what}, more than {most}={limit}. Make "
                    f"{'an' if who[0] in 'AE' else 'a'} {who} with a larger {most}"
                )

    def _declared(self, name):
        """The declaration of an array."""
        return self.ARRAYS.get(name) or self._of_family(name)

    @classmethod
    @functools.cache
    def _of_family(cls, name):
        family, _, index = name.partition("[")
        given = cls.ARRAYS[family]
        if given.dims is None or "#" not in given.dims:
            return given
        return replace(given, dims=given.dims.replace("#", index[:-1]))

    def _size_of(self, dim, sizes):
        """-> a dimension's size, or None where it is not known"""
        for sign, combine in (("*", operator.mul), ("/", operator.floordiv)):
            if sign in dim:
                first, _, second = dim.partition(sign)
                x, y = self._size_of(first, sizes), self._size_of(second, sizes)
                if second.isdigit():
                    return None if x is None else -(-x // int(second))
                if sign == "/" and x and y and x % y:
                    raise ValueError(f"{self._who}: {first} is {x}; it must be a multiple of {second}, {y}")
                return None if x is None or y is None else combine(x, y)
        return getattr(self, dim, sizes.get(dim))

    # -- what a subclass may override
    def _is_empty(self, sizes):
        """Whether a call of these sizes does nothing, on any rank."""
        return 0 in (sizes[dim] for dim in self.LIMITS)

    def _new_shape(self, name, arrays):
        """The shape of a new array, by the others, which may be wrong ones."""
        sizes = {"n_ranks": self.world.n_ranks}
        for other, array in arrays.items():
            given = self._declared(other)
            if not (given.new or given.optional):
                sizes = {**dict(zip(given.names, array.shape, strict=False)), **sizes}
        return tuple([self._size_of(dim, sizes) or 0 for dim in self._declared(name).names])

    def _dtype_of(self, name, arrays) -> Any:
        """The dtype that it must have; a tuple of several, of which a new one has the first; None for any."""
        kind = self._declared(name).dtype
        if kind in arrays:
            return arrays[kind].dtype
        return self.dtype if kind == "dtype" else kind and as_dtype(kind)

    def _is_written(self, name, arrays):
        """Whether a call on this rank writes it."""
        return self._declared(name).new or self._declared(name).written

    def _in_order(self, stream, arrays):
        """What is enqueued on the stream from now on comes behind what must precede it."""

    def _is_same(self, x, y):
        address = self.world.backend.address
        return address(x) == address(y) and x.shape == y.shape and x.dtype == y.dtype

    def _check_alive(self):
        """RuntimeError once it was freed, or its World finalized."""


class Operation(Declared):
    """A Declared of all ranks, who call it in one order. A subclass may have

    ALIKE   the names of arrays of the same size and dtype on all ranks, which the emulator compares; without
            names, the first one

    world  the World, or a group of it
    check  () -> {name: value}: the arguments that must be equal on all ranks. It raises TypeError or
           ValueError, on any rank, for wrong ones, and sets attributes
    sms    the budget of multiprocessors, or None
    """

    ALIKE: tuple[str, ...] | None = ()
    world: World
    _parts: Any = None
    _methods: Any  # {name: method}, of those that choose one of several
    method: Any
    sms: int | None

    def __init__(self, world: World, check: Callable[[], dict], sms: int | None = None):
        check_world(self._who, world)
        self.world = world

        def checked():
            given = check()
            self.sms = checked_sms(self._who, sms)
            return {**given, "sms": self.sms}

        agree_on(world, self._who, checked)
        self._parts, self._outputs, self._methods = [], [], {}
        self._plans, self._order = plans_of(world), shared_order(world)

    def _part(self, kind, *args, **settings):
        """-> kind(*args), within the budget, which ``free`` frees."""
        self._parts.append(kind(*args, sms=self.sms, **settings))
        return self._parts[-1]

    def _in_order(self, stream, arrays):
        """What is enqueued on the stream from now on comes behind the earlier calls of the World."""
        alike = self.ALIKE or list(arrays)[:1]
        self._order.before(stream, self._who, *[arrays[name] for name in alike])

    def _check_alive(self):
        if self.world.finalized:
            check_world(self._who, self.world)
        if self._parts is None:
            raise RuntimeError(f"{self._who}: it was freed; make a new one")

    def free(self) -> None:
        """Give the symmetric memory back, when this rank's GPU work has ended. Afterwards neither the object
        nor graphs that captured its calls can be used. Collective.
        """
        self._plans.clear()
        while self._parts:
            self._parts.pop().free()
        self._parts, self._methods = None, {}
        while self._outputs:
            output = self._outputs.pop(0)
            if self.world.is_symmetric(output):  # not freed already
                self.world.free(output)


class WithOutputs(Operation):
    """An Operation whose results may lie in symmetric memory."""

    def output(self, shape: Shape, dtype: DType) -> Array:
        """-> a symmetric array for a result, of this shape and dtype on all ranks: CuPy's, on the emulator
        NumPy's. The object frees it in ``free``. Errors as of ``sk.empty``. Collective.
        """
        self._check_alive()
        name = f"{getattr(self, '_table', self._who)}.output[{len(self._outputs)}]"
        self._outputs.append(self.world.empty(shape, dtype, name))
        return self._outputs[-1]


def _fits(known, shape):
    """Whether sizes that are known, or None, are those of a shape."""
    return len(known) == len(shape) and all(m in (None, n) for m, n in zip(known, shape, strict=True))


def nothing(stream):
    """A bound call of no elements."""
