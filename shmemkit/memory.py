"""Symmetric arrays: the same shape and dtype on every rank, each on its own part of the symmetric heap.

``zeros``, ``empty``, ``full``, ``array``, ``signals`` and ``free`` are collective: every rank calls them, in
the same order. Each checks that all ranks asked for the same; if they did not, every rank raises. The arrays
are CuPy arrays on GPUs and NumPy arrays on the emulator. ``free`` gives memory back; what is left, the World
frees when it is finalized. An array that was dropped without ``free`` cannot be freed before that: it is
reported then, as a leak.
"""

import math
import operator
import weakref

import numpy as np

from .site import users_call

DTYPES = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
DTYPES += ["complex64", "complex128"]


def as_dtype(dtype):
    """`dtype` as a NumPy dtype; bfloat16 is that of ml_dtypes. ValueError for what kernels cannot hold."""
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    try:
        result = None if dtype is None else np.dtype(dtype).name
    except TypeError:
        result = None
    if result not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    if not np.dtype(dtype).isnative:
        raise ValueError(f"dtype {dtype!r} is of another byte order than this machine's: use {result!r}")
    return np.dtype(result)


def as_shape(shape):
    """`shape`, an integer or a sequence of them, as a tuple."""
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    try:
        result = tuple(-1 if isinstance(n, bool) else operator.index(n) for n in sizes)
    except TypeError:
        result = (-1,)
    if any(n < 0 for n in result):
        raise ValueError(f"shape {shape!r}: a non-negative integer or a tuple of them is allowed")
    return result


def ranks_text(ranks):
    """ "rank 3", or "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


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
    """The allocating half of a World; it has `backend`, `rank`, `n_ranks`, `_meet` and `_check_alive`."""

    def _init_memory(self):
        self._allocations = {}  # address -> _Allocation
        self._count = 0  # allocations so far
        self._dropped = []  # of them, those whose arrays were gone at the last allocation or free

    def empty(self, shape, dtype="float32", name=None):
        """A symmetric array with undefined content (on the emulator floats are NaN, and the check for
        races reports kernels that read what nobody has written).

        `shape`: a non-negative integer or a tuple of them. `dtype`: float16, bfloat16, float32, float64, a
        signed or unsigned integer, bool or complex. `name` appears in reports. Collective: when the ranks ask
        for different things, every rank raises ValueError with what each asked for. MemoryError when the
        symmetric heap is full.
        """
        self._check_alive("empty")
        raw, result = self._allocate("empty", shape, dtype, name)
        if self.backend.name == "emulator":
            self.backend.leave_empty(raw)
            self._meet("empty")  # nobody writes before it is there
        return result

    def full(self, shape, fill_value, dtype="float32", name=None):
        """A symmetric array filled with `fill_value`; see ``empty``. Every rank has its content before any
        rank returns."""
        self._check_alive("full")
        _, result = self._allocate("full", shape, dtype, name)
        with self.stream:
            result[...] = fill_value
        self._content_is_there("full")
        return result

    def zeros(self, shape, dtype="float32", name=None):
        """A symmetric array of zeros; see ``empty``. Every rank's is zero before any rank returns."""
        self._check_alive("zeros")
        raw, result = self._allocate("zeros", shape, dtype, name)
        with self.stream:
            raw.fill(0)
        self._content_is_there("zeros")
        return result

    def array(self, values, dtype=None, name=None):
        """A symmetric copy of `values`: array-like, of the same shape and dtype on every rank; the values may
        differ."""
        self._check_alive("array")
        if not hasattr(values, "dtype"):
            values = self.xp.from_dlpack(values) if hasattr(values, "__dlpack__") else np.asarray(values)
        if dtype is None:  # NumPy's have a byte order; the copy is in this machine's
            dtype = values.dtype.newbyteorder("=") if isinstance(values.dtype, np.dtype) else values.dtype
        _, result = self._allocate("array", values.shape, dtype, name)
        with self.stream:
            result[...] = self.xp.asarray(values)
        self._content_is_there("array")
        return result

    def signals(self, n, name=None):
        """`n` symmetric signals: uint64 zeros, what ``wait``, ``notify`` and ``put_signal`` work on."""
        self._check_alive("signals")
        return self.zeros(n, "uint64", name or "signals")

    def free(self, array):
        """Give a symmetric array back. Collective; `array` is what zeros, empty, full, array or signals
        returned."""
        self._check_alive("free")
        self.backend.synchronize()  # a kernel may still write into it
        where = self.backend.address(array) if isinstance(array, self.xp.ndarray) else None
        allocation = self._allocations.get(where)
        request = error = None
        if allocation is None or (array.shape, array.dtype) != (allocation.shape, allocation.dtype):
            error = ValueError("free: not a symmetric array of this World, a view of one, or freed before")
        else:
            request = f"number {allocation.number}, {allocation.dtype} {allocation.shape}"
        self._agree("free", "free is called with the same array", request, error)
        self.backend.free(self._allocations.pop(where).raw)

    def peer_view(self, array, rank):
        """The same symmetric array on another `rank`, as an array that this rank's host can read and write.

        ValueError when `array` is not symmetric, or that rank is not reachable through shared memory or
        NVLink.
        """
        self._check_alive("peer_view")
        try:
            rank = operator.index(rank)
        except TypeError:
            raise TypeError(f"peer_view: rank={rank!r}: an integer is allowed") from None
        if not 0 <= rank < self.n_ranks:
            raise ValueError(f"peer_view: rank {rank} does not exist; ranks are 0 to {self.n_ranks - 1}")
        return array if rank == self.rank else self.backend.peer_view(array, rank)

    def is_symmetric(self, array):
        """Whether `array` lies in a symmetric array of this World that has not been freed. Not collective."""
        return self.place_of(array) is not None

    def place_of(self, array):
        """-> (name, offset in bytes) of the symmetric array that `array` lies in, or None. Not collective."""
        self._check_alive("place_of")
        at = self.backend.address(array)
        for start, allocation in self._allocations.items():
            if 0 <= at - start < allocation.raw.nbytes:
                return allocation.name, at - start
        return None

    def multicast_view(self, array):
        """`array`, symmetric, as the multicast array of all ranks of my node (NVLink SHARP, NVLS): of the
        same shape and dtype, and a store to it goes to each of them. Collective.

        It is an argument for kernels; only the functions of ``shmemkit.device`` that begin with multimem_
        may use its elements. It is valid as long as `array` is not freed.

        ValueError, on every rank, when a rank has no such address, and why: multicast is turned off
        (NVSHMEM_DISABLE_NVLS), its GPU is older than Hopper or not at an NVSwitch, NVSHMEM has none, or
        `array` is not symmetric. On the emulator every node has multicast.
        """
        self._check_alive("multicast_view")
        view = reason = None
        try:
            if not (isinstance(array, self.xp.ndarray) and self.is_symmetric(array)):
                raise ValueError("the array is not symmetric; make it with shmemkit.zeros or the like")
            view = self.backend.multicast_view(array, self.node_ranks)
        except ValueError as error:
            reason = str(error)
        refusals = {}
        for rank, text in enumerate(self._meet("multicast_view", reason)):
            refusals.setdefault(text, []).append(rank)
        refusals.pop(None, None)
        if refusals:
            said = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in refusals.items())
            error = ValueError(f"multicast_view: there is none. {said}")
            error.shown_by = 0
            raise error
        return view

    # -- inside
    def _allocate(self, call, shape, dtype, name):
        request, error = None, None
        try:
            shape, dtype = as_shape(shape), as_dtype(dtype)
            request = f"{dtype.name} {shape}"
        except ValueError as e:
            error = e
        self._agree(call, "a symmetric array has the same shape and dtype", request, error)
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

    def _agree(self, call, rule, request, error):
        """Every rank brings its `request`, or the `error` that it found. Raises on all ranks if they
        differ."""
        self._dropped = self._leaks()
        answers = self._meet(call, (None if error else request, f"{users_call(call)}"))
        if error is not None:
            raise error
        if any(r != request for r, _ in answers):
            ranks, one_place = {}, len({place for _, place in answers}) == 1
            for rank, (r, place) in enumerate(answers):
                of = "" if one_place else f" in {place}"
                ranks.setdefault((r or "something invalid") + of, []).append(rank)
            asked = "; ".join(f"{ranks_text(k)}: {r}" for r, k in ranks.items())
            error = ValueError(f"{rule} on every rank, but they asked for {asked}")
            error.shown_by = 0
            raise error

    def _content_is_there(self, call):
        self.stream.synchronize()
        self._meet(call)

    def _leaks(self):
        """Allocations whose arrays are gone."""
        return [a for a in self._allocations.values() if a.owner() is None]


def _current():
    from . import world

    return world.current(required=True)


def empty(shape, dtype="float32", name=None):
    return _current().empty(shape, dtype, name)


def full(shape, fill_value, dtype="float32", name=None):
    return _current().full(shape, fill_value, dtype, name)


def zeros(shape, dtype="float32", name=None):
    return _current().zeros(shape, dtype, name)


def array(values, dtype=None, name=None):
    return _current().array(values, dtype, name)


def signals(n, name=None):
    return _current().signals(n, name)


def free(array):
    return _current().free(array)


def peer_view(array, rank):
    return _current().peer_view(array, rank)


for _function in (empty, full, zeros, array, signals, free, peer_view):
    _function.__doc__ = getattr(SymmetricMemory, _function.__name__).__doc__
