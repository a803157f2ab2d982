"""Symmetric arrays: they have the same shape and dtype on every rank, each in its rank's symmetric heap.

``zeros``, ``empty``, ``full``, ``array``, ``signals`` and ``free`` are collective: all ranks call them, in
the same order. If the ranks ask for different arrays, every rank raises. The arrays are CuPy arrays on GPUs
and NumPy arrays on the emulator. ``free`` gives memory back; the World frees the rest when it is finalized.
An array that the program drops without ``free`` stays allocated until then, and is reported as a leak.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from shmemkit.support.agreement import as_message, by_text, check_equal, raise_on_all, ranks_text, reported_by
from shmemkit.support.arrays import as_array, is_tensor, stream_of
from shmemkit.support.call_site import users_call
from shmemkit.support.dtypes import OF_ML_DTYPES, REDUCIBLE, numpy_dtype
from shmemkit.support.host_program import current_world
from shmemkit.support.settings import integer, listed, shown
from shmemkit.typing import AnyArray, Array, DType, Shape, Stream

DTYPES = (*REDUCIBLE, "bool", "complex64", "complex128")


def as_dtype(dtype, who=""):
    """`dtype`, also PyTorch's, as NumPy's; bfloat16 and float8 are those of ml_dtypes. TypeError for what is
    not a dtype, ValueError for one that arrays cannot have. `who`, as "zeros(): ", begins the message."""
    if type(dtype).__module__ == "torch":
        dtype = str(dtype).removeprefix("torch.")
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    if name in OF_ML_DTYPES:
        return numpy_dtype(name)
    try:
        found = None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        kind = ValueError if isinstance(dtype, (str, type, np.dtype)) else TypeError
        text = found or (dtype.__name__ if isinstance(dtype, type) else shown(dtype))
        raise kind(f"{who}dtype is {text}; it must be {listed(DTYPES)}")
    if not found.isnative:
        raise ValueError(
            f"{who}dtype {found} has the other byte order. Use {found.name!r}, and convert the data"
        )
    return found


def as_shape(shape, who="", argument="shape"):
    """`shape`, an integer or a sequence of them, as a tuple. TypeError or ValueError for others, of this
    `argument`; `who` as of ``as_dtype``."""
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    kind = ValueError
    try:
        result = tuple(integer("", "", n) for n in sizes)
    except TypeError:
        kind, result = TypeError, (-1,)
    if any(n < 0 for n in result):
        text = tuple(sizes) if sizes is shape else shown(shape)
        needed = "an integer of 0 or more, or a tuple of such integers"
        raise kind(f"{who}{argument} is {text}; it must be {needed}")
    return result


class _Owner:
    """Keeps a symmetric allocation known as long as an array or a view of it lives."""

    __slots__ = ("__weakref__",)


class _Allocation:
    def __init__(self, raw, number, name, shape, dtype, owner):
        self.raw, self.number, self.name, self.shape, self.dtype = raw, number, name, shape, dtype
        self.owner = weakref.ref(owner)

    def __str__(self):
        return f"{self.name} {self.dtype} {self.shape}"


class SymmetricMemory:
    """The allocating half of a World or a Group, which has these:"""

    backend: Any
    rank: int
    n_ranks: int
    node_ranks: range
    xp: ModuleType
    stream: Stream
    _gather_all: Callable[..., list]
    _check_alive: Callable[[str], None]
    _kind: str  # "World" or "group"

    def _init_memory(self):
        self._slabs, self._unused = {}, set()  # of groups, by number; numbers that this rank has left
        self._allocations = {}  # address -> _Allocation
        self._count = 0  # allocations so far
        self._dropped = []  # of them, those whose arrays were gone at the last allocation or free

    def empty(self, shape: Shape, dtype: DType = "float32", name: str | None = None) -> Array:
        """Allocate a symmetric array without setting its content. Collective.

        shape   an integer of 0 or more, or a tuple of them
        dtype   float16, bfloat16, float8_e4m3fn, float8_e5m2, float32, float64, a signed or unsigned integer,
                bool or complex. Kernels take a view of float8 as uint8
        name    a string that appears in reports

        On the emulator floats are NaN at first, and the check for races reports kernels that read elements
        which nobody has written. TypeError or ValueError, on every rank, for a wrong shape or dtype, or if
        the ranks ask for different ones; MemoryError, on every rank, when the symmetric heap is full.
        """
        self._check_alive("empty")
        raw, result = self._allocate("empty", lambda: (shape, dtype), name)
        if self.backend.name == "emulator":
            self.backend.leave_empty(raw)
            self._gather_all("empty")  # no rank writes before all have it
        return result

    def full(
        self,
        shape: Shape,
        fill_value: npt.ArrayLike | Array,
        dtype: DType = "float32",
        name: str | None = None,
    ) -> Array:
        """Allocate a symmetric array and fill it with `fill_value`. Collective; see ``empty``.

        fill_value  a number that the dtype can hold, or an array that broadcasts to the shape; it may differ
                    from rank to rank

        Every rank's array is filled before any rank returns.
        """
        self._check_alive("full")

        def checked():
            _check_fill(fill_value, as_shape(shape, "full(): "), as_dtype(dtype, "full(): "))
            return shape, dtype

        _, result = self._allocate("full", checked, name)
        self._store(result, fill_value)
        self._content_is_there("full")
        return result

    def zeros(self, shape: Shape, dtype: DType = "float32", name: str | None = None) -> Array:
        """Allocate a symmetric array of zeros. Collective; see ``empty``. Every rank's array is zero before
        any rank returns."""
        self._check_alive("zeros")
        return self._zeros(lambda: (shape, dtype), name)

    def _zeros(self, checked, name):
        raw, result = self._allocate("zeros", checked, name)
        with self.stream:
            raw.fill(0)
        self._content_is_there("zeros")
        return result

    def array(
        self, values: npt.ArrayLike | AnyArray, dtype: DType | None = None, name: str | None = None
    ) -> Array:
        """Allocate a symmetric array and copy `values` to it. Collective; see ``empty``.

        values  an array, a PyTorch tensor or a nested list of numbers; its shape is the same on every rank,
                the numbers may differ
        dtype   default: that of `values`
        """
        self._check_alive("array")
        source = None

        def checked():
            nonlocal source
            source = _numbers(values, self.xp)
            # NumPy's may have another byte order; the copy has this machine's
            native = as_dtype(source.dtype.newbyteorder("="), "array(): the values' ")
            return source.shape, native if dtype is None else dtype

        _, result = self._allocate("array", checked, name)
        if is_tensor(values) and values.is_cuda:
            self.backend.follow(None, stream_of(None, values))
        self._store(result, source)
        self._content_is_there("array")
        return result

    def _store(self, result, values):
        """``result[...] = values``, on the World's stream. CuPy cannot convert to float8; the host does."""
        on_host = self.xp.ndarray is np.ndarray
        with self.stream:
            if "float8" in result.dtype.name and not on_host:
                host = values.get() if isinstance(values, self.xp.ndarray) else np.asarray(values)
                values = np.broadcast_to(host, result.shape).astype(result.dtype).view("uint8")
                result = result.view("uint8")
            result[...] = values if on_host else self.xp.asarray(values)

    def signals(self, n: Shape, name: str | None = None) -> Array:
        """Allocate `n` symmetric signals, or an array of them of shape `n`: uint64 zeros, for ``wait``,
        ``notify`` and ``put_signal``. Collective; see ``empty``."""
        self._check_alive("signals")
        name = "signals" if name is None else name
        return self._zeros(lambda: (as_shape(n, "signals(): ", "n"), "uint64"), name)

    def free(self, array: Array) -> None:
        """Give the memory of a symmetric array back, when this rank's kernels have ended and its messages
        have been delivered. Collective.

        array  what zeros, empty, full, array or signals returned, the same array on every rank; not a view

        TypeError or ValueError, on every rank, for anything else.
        """
        self._check_alive("free")
        self.backend.synchronize()  # a kernel may still write into it
        request = error = where = None
        try:
            self._check_array(array)
            where = self.backend.address(array)
            allocation = self._allocations.get(where)
            if allocation is None or (array.shape, array.dtype) != (allocation.shape, allocation.dtype):
                whole, _ = SymmetricMemory._allocation_of(self, array)
                raise ValueError(
                    f"free(): array is not in symmetric memory of this {self._kind}, or it was freed before"
                    if whole is None
                    else f"free(): array is a view of the symmetric array {whole.name!r}. Give that array "
                    "itself"
                )
            request = f"array {allocation.number} ({allocation.dtype} {allocation.shape})"
        except (TypeError, ValueError) as e:
            error = e
        self._agree("free", "All ranks must free the same array", request, error, "free")
        self.backend.free(self._allocations.pop(where).raw)

    def peer_view(self, array: AnyArray, rank: int) -> Array:
        """Return the same symmetric array of another `rank`, as an array that this rank's host can read and
        write. Not collective.

        array  a symmetric array, or a view of one
        rank   0 to n_ranks - 1

        ValueError when `array` is not symmetric, or `rank` cannot be reached through shared memory or NVLink.
        """
        self._check_alive("peer_view")
        rank = integer("peer_view()", "rank", rank, 0, self.n_ranks - 1)
        try:
            mine = self._as_array(array)
        except TypeError:
            needed = "it must be a symmetric array, as shmemkit.zeros() makes"
            raise TypeError(f"peer_view(): array is {shown(array)}; {needed}") from None
        if not self.is_symmetric(mine):
            raise ValueError(
                f"peer_view(): array, {mine.dtype} {mine.shape}, is not in symmetric memory of this "
                f"{self._kind}. Make it with its zeros() or the like"
            )
        return mine if rank == self.rank else self.backend.peer_view(mine, rank)

    def is_symmetric(self, array: AnyArray) -> bool:
        """Return whether `array` lies in a symmetric array of this World (or group, or what that is made of)
        that has not been freed. Not collective."""
        return self.place_of(array) is not None

    def place_of(self, array: AnyArray) -> tuple[str, int] | None:
        """Return (name, offset in bytes) of the symmetric array that `array` lies in, or None. Not
        collective."""
        self._check_alive("place_of")
        allocation, offset = self._allocation_of(array)
        return None if allocation is None else (allocation.name, offset)

    def rest_of(self, array: AnyArray) -> Array | None:
        """Return the memory from `array` on to the end of the symmetric array that it lies in, as 1-D uint8,
        or None if it lies in none. Not collective."""
        self._check_alive("rest_of")
        allocation, offset = self._allocation_of(array)
        return None if allocation is None else allocation.raw[offset:]

    def _allocation_of(self, array):
        """-> the allocation that `array` lies in, and its offset there in bytes; or (None, 0)"""
        at = self.backend.address(self._as_array(array))
        for start, allocation in self._allocations.items():
            if 0 <= at - start < allocation.raw.nbytes:
                return allocation, at - start
        return None, 0

    def multicast_view(self, array: Array) -> Array:
        """Return `array`, symmetric, as a multicast array of this node's ranks (NVLink SHARP, NVLS).
        Collective.

        It has the same shape and dtype; a store to it goes to each of these ranks.

        It is an argument for kernels; only the functions of ``shmemkit.device`` that begin with multimem_
        may use its elements. It is valid as long as `array` is not freed.

        ValueError, on every rank, when a rank has no multicast address, with the reason: multicast is turned
        off (NVSHMEM_DISABLE_NVLS), the GPU is older than Hopper or not at an NVSwitch, NVSHMEM has none, or
        `array` is not symmetric. On the emulator every node has multicast.
        """
        self._check_alive("multicast_view")
        view = reason = None
        try:
            if not (isinstance(array, self.xp.ndarray) and self.is_symmetric(array)):
                raise ValueError("array is not symmetric. Make it with shmemkit.zeros() or the like")
            view = self.backend.multicast_view(array, self.node_ranks)
        except ValueError as error:
            reason = str(error)
        refusals = [
            (ranks, text) for ranks, text in by_text(self._gather_all("multicast_view", reason)) if text
        ]
        if refusals:
            said = "; ".join(f"{ranks_text(ranks)}: {text}" for ranks, text in refusals)
            raise reported_by(0, ValueError(f"multicast_view(): there is no multicast address. {said}"))
        return view

    # -- inside
    def _as_array(self, array) -> Any:
        """`array`, also a PyTorch tensor or another of the same memory, as one of the World's."""
        if isinstance(array, self.xp.ndarray):
            return array
        return as_array(f"{users_call('place_of')!s}()", "array", array, self.xp)

    def _check_array(self, array):
        if not isinstance(array, kind := self.xp.ndarray):
            raise TypeError(
                f"{users_call('place_of')!s}(): array is {shown(array)}; it must be a {kind.__module__}."
                f"{kind.__name__} in symmetric memory"
            )

    def _allocate(self, call, checked, name):
        """``checked()`` -> (shape, dtype), or raises TypeError or ValueError."""
        request, error, who = None, None, f"{users_call(call)!s}(): "
        try:
            shape, dtype = checked()
            shape, dtype = as_shape(shape, who), as_dtype(dtype, who)
            if not (name is None or isinstance(name, str)):
                raise TypeError(f"{who}name is {shown(name)}; it must be a string or None")
            request = f"for {dtype.name} {shape}"
        except (TypeError, ValueError) as e:
            error = e
        self._agree(call, "A symmetric array has the same shape and dtype on all ranks", request, error)
        n_bytes = math.prod(shape) * dtype.itemsize
        raw = self.backend.allocate(n_bytes)
        owner = _Owner()
        result = self.backend.as_array(raw, shape, dtype, owner)
        self._count += 1
        name = name or f"array {self._count}"
        self.backend.describe(raw, name, dtype)
        self._allocations[self.backend.address(raw)] = _Allocation(
            raw, self._count, name, shape, dtype, owner
        )
        return raw, result

    def _agree(self, call, rule, request, error, verb="ask"):
        """Every rank brings its `request`, or the `error` that it found. Raises on all ranks if one of them
        has an error, or they differ."""
        self._dropped = self._leaks()
        mine = as_message(error), request, f"{users_call(call)}", frozenset(self._unused)
        refusals, requests, places, unused = zip(*self._gather_all(call, mine), strict=True)
        for number in sorted(frozenset.intersection(*unused)):  # every rank has left these groups
            self._unused.remove(number)
            self.backend.free_slab(self._slabs.pop(number))
        raise_on_all(error, refusals)
        if len(set(requests)) > 1 and len(set(places)) > 1:
            requests = [f"{request} in {place}" for request, place in zip(requests, places, strict=True)]
        check_equal(requests, rule, verb)

    def _content_is_there(self, call):
        self.stream.synchronize()
        self._gather_all(call)

    def _leaks(self):
        """Allocations whose arrays are gone."""
        return [a for a in self._allocations.values() if a.owner() is None]


def _numbers(values, module):
    """`values` as an array of NumPy or `module`."""
    if isinstance(values, (np.ndarray, module.ndarray)):
        return values
    on_gpu = module.ndarray is not np.ndarray
    if is_tensor(values):
        values = (values if on_gpu else values.cpu()).detach().resolve_conj().resolve_neg()
        return as_array("array()", "values", values, module if values.is_cuda else np)
    try:
        if on_gpu and hasattr(values, "__cuda_array_interface__"):
            return module.asarray(values)
        found = module.from_dlpack(values) if hasattr(values, "__dlpack__") else np.asarray(values)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise ValueError(f"array(): values is {shown(values)} that is not an array: {error}") from None
    if not hasattr(values, "dtype") and found.dtype.name not in DTYPES:
        needed = "it must be an array, a PyTorch tensor or a nested list of numbers"
        raise TypeError(f"array(): values is {shown(values)}; {needed}")
    return found


def _check_fill(value, shape, dtype):
    """TypeError or ValueError unless ``full`` can store `value`. CuPy's arrays are not read."""
    text, kind = shown(value), ValueError
    try:
        if not hasattr(value, "dtype") or isinstance(value, (np.ndarray, np.generic)):
            fill = np.asarray(value)
            numbers = fill.dtype.name in DTYPES and (fill.dtype.kind != "c" or dtype.kind == "c")
            kind = ValueError if numbers else TypeError
            with np.errstate(all="ignore"):
                np.empty(fill.shape, dtype)[...] = value
            value = fill
        text = f"{value.dtype} {value.shape}" if value.shape else text
        if kind is ValueError and np.broadcast_shapes(value.shape, shape) == shape:
            return
    except (TypeError, ValueError, OverflowError):
        pass
    raise kind(f"full(): fill_value is {text}; it must be a number of {dtype}, or an array of shape {shape}")


def empty(shape: Shape, dtype: DType = "float32", name: str | None = None) -> Array:
    return current_world(required=True).empty(shape, dtype, name)


def full(
    shape: Shape, fill_value: npt.ArrayLike | Array, dtype: DType = "float32", name: str | None = None
) -> Array:
    return current_world(required=True).full(shape, fill_value, dtype, name)


def zeros(shape: Shape, dtype: DType = "float32", name: str | None = None) -> Array:
    return current_world(required=True).zeros(shape, dtype, name)


def array(values: npt.ArrayLike | AnyArray, dtype: DType | None = None, name: str | None = None) -> Array:
    return current_world(required=True).array(values, dtype, name)


def signals(n: Shape, name: str | None = None) -> Array:
    return current_world(required=True).signals(n, name)


def free(array: Array) -> None:
    return current_world(required=True).free(array)


def peer_view(array: AnyArray, rank: int) -> Array:
    return current_world(required=True).peer_view(array, rank)


for _function in (empty, full, zeros, array, signals, free, peer_view):
    _function.__doc__ = getattr(SymmetricMemory, _function.__name__).__doc__
