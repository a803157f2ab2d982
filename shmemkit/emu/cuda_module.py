"""The stand-in for ``numba.cuda`` inside emulated kernels."""

import operator
from collections import defaultdict
from operator import index
from sys import _getframe
from types import ModuleType
from typing import Any

import numpy as np
from numba import cuda as numba_cuda
from numba import types

from shmemkit.compiler.numba_internals import as_dtype
from shmemkit.support.dtypes import numpy_dtype

from . import libdevice
from .cuda_integers import CASTS, FLOATS, SIZED_CASTS, Int32, Unsigned, wrap
from .device_arrays import device_view, uninitialised
from .grid import Dim3
from .half_precision import BF16, FP16
from .thread import group_thread
from .vector_types import VECTOR_TYPES
from .workers import current

WARP_SIZE = 32
_FULL = (1 << 32) - 1
_U64 = (1 << 64) - 1
LISTED = "docs/numba.md lists what is; the rest needs GPUs"


class Namespace:
    """`cuda.<name>` with `members`; what is missing raises NotImplementedError."""

    def __init__(self, name, members=()):
        self._name = name
        self.__dict__.update(members)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"{self._name}.{name} is not emulated. {LISTED}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self._name} is not emulated. {LISTED}")


class _Shared(Namespace):
    def array(self, shape, dtype, alignment=None):
        """One array per call site, function and block; shape 0 is the dynamic shared memory of the launch."""
        frame = _getframe(1)
        block = current().thread.block
        # The globals tell functions apart that a factory made from the same code.
        site = id(frame.f_globals), frame.f_code, frame.f_lasti
        return block.launch.shared_array(block, site, shape, _dtype(dtype))


class _Local(Namespace):
    def array(self, shape, dtype, alignment=None):
        """A new array of this thread."""
        return uninitialised(shape, _dtype(dtype), current().thread.block.launch.is_sized)


class _Const(Namespace):
    def array_like(self, array):
        return device_view(array)


def _dtype(dtype):
    """The NumPy dtype of a Numba or NumPy type."""
    if isinstance(dtype, (np.dtype, type, str)) or hasattr(dtype, "dtype"):
        return np.dtype(dtype)
    if isinstance(dtype, (types.Record, types.NestedArray, types.Complex, types.Boolean)):
        return as_dtype(dtype)
    return numpy_dtype(str(dtype))


def _atomic(compute, converts=False):
    """The operation of cuda.atomic that stores ``compute(old, value)``. With `converts`, `value` is first
    converted to the dtype of the array."""

    def operation(self, array, index, value):
        if converts:
            value = _as_element(array, value)
        return self._update(array, index, lambda old: compute(old, value))

    return operation


class _Atomic(Namespace):
    """cuda.atomic: each returns the old value."""

    def _update(self, array, index, function):
        if isinstance(index, tuple):
            if len(index) != array.ndim:
                raise IndexError(
                    f"{self._name}: the index is {index}; it must have {array.ndim} numbers, one for "
                    "each dimension of the array"
                )
            *outer, index = index
            array = array[tuple(outer)] if outer else array
        return current().thread.atomic(array, index + len(array) if index < 0 else index, function)

    add, sub = _atomic(operator.add), _atomic(operator.sub)
    and_, or_, xor = _atomic(operator.and_), _atomic(operator.or_), _atomic(operator.xor)
    exch = _atomic(lambda old, value: value)
    inc = _atomic(lambda old, limit: 0 if old >= limit else old + 1, True)
    dec = _atomic(lambda old, limit: limit if old == 0 or old > limit else old - 1, True)
    # With a NaN on either side nothing is stored; for the last two, a NaN counts as missing.
    max = _atomic(lambda old, value: value if value > old else old, True)
    min = _atomic(lambda old, value: value if value < old else old, True)
    nanmax = _atomic(lambda old, value: value if value > old or old != old else old, True)
    nanmin = _atomic(lambda old, value: value if value < old or old != old else old, True)

    def cas(self, array, index, old, value):
        expected = _as_element(array, old)
        return self._update(array, index, lambda now: value if now == expected else now)

    def compare_and_swap(self, array, old, value):
        return self.cas(array, 0, old, value)


def _as_element(array, value):
    """`value`, converted to the dtype of `array`."""
    return wrap(value, array.dtype) if array.dtype.kind in "iu" else value


class _Grid(Namespace):
    def sync(self):
        group_thread("block", "grid.sync").grid_barrier()


class _CooperativeGroups(Namespace):
    def this_grid(self):
        return _Grid("grid_group")


def _exchange(mask, value, function):
    """The lanes of `mask` bring a value each; ``function(values by thread_id)`` runs once. -> its result. It
    orders no memory."""
    thread = current().thread
    part = thread.block.meeting(thread, "warp", mask & _FULL, "a shuffle, vote or match")
    return part.join(thread, value, function)


def _vote(function):
    """A warp operation with one result for all lanes."""
    return lambda self, mask, value: _exchange(mask, value, function)


def _lanes(threads):
    return Int32(sum([1 << i % WARP_SIZE for i in threads]))


def _match_any(values):
    """-> value -> the lanes that have it"""
    threads = defaultdict(list)
    for i, value in values.items():
        threads[value].append(i)
    return {value: _lanes(those) for value, those in threads.items()}


def _shuffle(source):
    """Take the value of lane ``source(lane, argument)``; the own one where that lane takes no part."""

    def shuffle(self, mask, value, argument):
        values, thread = _exchange(mask, value, dict), current().thread
        lane = thread.thread_id % WARP_SIZE
        return values.get(thread.thread_id - lane + source(lane, argument), value)

    return shuffle


class Cuda:
    """`cuda.` names of kernels. What is missing raises NotImplementedError."""

    threadIdx = property(lambda self: current().thread.threadIdx)
    blockIdx = property(lambda self: current().thread.block.blockIdx)
    blockDim = property(lambda self: current().thread.block.blockDim)
    gridDim = property(lambda self: current().thread.block.gridDim)
    laneid = property(lambda self: current().thread.lane)
    warpsize = WARP_SIZE
    shared, local, const = _Shared("cuda.shared"), _Local("cuda.local"), _Const("cuda.const")
    atomic, cg = _Atomic("cuda.atomic"), _CooperativeGroups("cuda.cg")
    libdevice = Namespace("cuda.libdevice", libdevice.FUNCTIONS)
    fp16, bf16 = Namespace("cuda.fp16", vars(FP16)), Namespace("cuda.bf16", vars(BF16))

    def grid(self, ndim):
        thread = current().thread
        block, index = thread.block, thread.threadIdx
        x = block.blockIdx.x * block.blockDim.x + index.x
        if ndim == 1:
            return x
        y = block.blockIdx.y * block.blockDim.y + index.y
        if ndim == 2:
            return x, y
        return x, y, block.blockIdx.z * block.blockDim.z + index.z

    def gridsize(self, ndim):
        block = current().thread.block
        sizes = tuple(g * b for g, b in zip(block.gridDim, block.blockDim, strict=True))
        return sizes[0] if ndim == 1 else sizes[:ndim]

    # -- synchronisation
    @staticmethod
    def syncthreads():  # Thread.syncthreads, with a call less: most switches are made here
        thread = current().thread
        block, frame = thread.block, _getframe(1)
        if frame.f_lasti != block.at or frame.f_code is not block.code:
            block.comes(thread, "syncthreads", frame)
        if len(block.parked) + 1 == block.alive:
            block.release()
        else:
            block.parked.append(thread)
            block.park()

    def _vote_block(self, kind, predicate, function):
        thread = current().thread
        block = thread.block
        block.comes(thread, kind, _getframe(2), block.meeting(thread, "block", what=kind))
        return thread.rendezvous("block", bool(predicate), lambda votes: function(votes.values()), what=kind)

    def syncthreads_count(self, predicate):
        return self._vote_block("syncthreads_count", predicate, sum)

    def syncthreads_and(self, predicate):
        return self._vote_block("syncthreads_and", predicate, lambda votes: int(all(votes)))

    def syncthreads_or(self, predicate):
        return self._vote_block("syncthreads_or", predicate, lambda votes: int(any(votes)))

    def syncwarp(self, mask=_FULL):
        current().thread.rendezvous("warp", None, lambda values: None, mask & _FULL)

    def threadfence(self):
        current().thread.threadfence("gpu")

    def threadfence_block(self):
        current().thread.threadfence("block")

    def threadfence_system(self):
        current().thread.threadfence("sys")

    def nanosleep(self, nanoseconds):
        current().thread.sleep()

    # -- warps
    def activemask(self):
        """All lanes of the warp: which of them a GPU would run together cannot be known. Unsigned, as Numba
        has it."""
        return Unsigned((1 << current().thread.warp_size()) - 1)

    def lanemask_lt(self):
        return Unsigned((1 << current().thread.lane) - 1)

    shfl_sync = _shuffle(lambda lane, source: source % WARP_SIZE)
    shfl_up_sync = _shuffle(lambda lane, delta: lane - delta)
    shfl_down_sync = _shuffle(lambda lane, delta: lane + delta)
    shfl_xor_sync = _shuffle(lambda lane, mask: lane ^ mask)
    all_sync = _vote(lambda values: all(values.values()))
    any_sync = _vote(lambda values: any(values.values()))
    eq_sync = _vote(lambda values: len({bool(v) for v in values.values()}) == 1)
    ballot_sync = _vote(lambda values: _lanes([i for i, v in values.items() if v]))

    def match_any_sync(self, mask, value):
        return _exchange(mask, value, _match_any)[value]

    def match_all_sync(self, mask, value):
        values = _exchange(mask, value, dict)
        return (_lanes(values), True) if all(v == value for v in values.values()) else (Int32(0), False)

    # -- loads and stores with a hint for the cache (C functions: the frame below is the kernel's)
    ldca = ldcg = ldcs = ldlu = ldcv = staticmethod(operator.getitem)
    stcg = stcs = stwb = stwt = staticmethod(operator.setitem)

    # -- integers and arithmetic
    def popc(self, x):
        return (int(x) & (1 << x.bits) - 1 if hasattr(x, "bits") else index(x) & _U64).bit_count()

    def ffs(self, x):
        return (x & -x).bit_length() if x else 0

    def clz(self, x):
        bits = getattr(x, "bits", 64)
        return bits - (index(x) & (1 << bits) - 1).bit_length()

    def brev(self, x):
        """Of uint64 the 64 bits, of others the low 32, as Numba converts them."""
        bits = 64 if isinstance(x, Unsigned) and x.bits == 64 else 32
        return Unsigned(libdevice.reversed_bits(index(x), bits))

    def fma(self, a, b, c):
        kind = np.float32 if {type(a), type(b), type(c)} <= _FLOAT32 else np.float64
        return libdevice.fma(kind(a), kind(b), kind(c))

    def cbrt(self, x):
        return np.cbrt(x if isinstance(x, np.floating) else np.float64(x))

    def selp(self, predicate, a, b):
        return a if predicate else b


_FLOAT32 = {np.float32}


class SizedCuda(Cuda):
    """Of kernels that ask for the width of integers."""

    threadIdx = property(lambda self: _sized(current().thread.threadIdx))
    blockIdx = property(lambda self: _sized(current().thread.block.blockIdx))
    blockDim = property(lambda self: _sized(current().thread.block.blockDim))
    gridDim = property(lambda self: _sized(current().thread.block.gridDim))
    laneid = property(lambda self: Int32(current().thread.lane))


def _sized(index):
    return Dim3(*map(Int32, index))


class _Missing:
    """A name of numba.cuda that is not emulated. (A `__getattr__` of Cuda would cost time at each name.)"""

    def __init__(self, name):
        self.name = name

    def __get__(self, cuda, _):
        if cuda is None:
            return None
        raise NotImplementedError(f"cuda.{self.name} is not emulated. {LISTED}")


class Lazy:
    """`threadIdx` and the like, imported by name: their components are looked up when they are used."""

    def __init__(self, cuda, name):
        self._cuda, self._name = cuda, name

    def __getattr__(self, axis):
        return getattr(getattr(self._cuda, self._name), axis)


def cast_of(value, sized=False) -> Any:
    """What the Numba type `value` of a number is in a kernel; None: nothing here."""
    if isinstance(value, types.Integer) and not isinstance(value, types.IntegerLiteral):
        return (SIZED_CASTS if sized else CASTS)[value.name]
    if isinstance(value, types.Float):
        return FLOATS[value.name]
    if isinstance(value, types.Complex):
        return as_dtype(value).type
    if isinstance(value, types.Boolean):
        return bool
    return BF16.bfloat16 if value is numba_cuda.bfloat16 else None


for _name in dir(numba_cuda):
    _value = getattr(numba_cuda, _name)
    if not hasattr(Cuda, _name) and not isinstance(_value, ModuleType):
        if isinstance(_value, type) and _value in VECTOR_TYPES:
            setattr(Cuda, _name, VECTOR_TYPES[_value])
        elif (_cast := cast_of(_value)) is not None:
            setattr(Cuda, _name, staticmethod(_cast))
            setattr(SizedCuda, _name, staticmethod(cast_of(_value, True)))
        else:
            setattr(Cuda, _name, _Missing(_name))
