"""The stand-in for ``numba.cuda`` inside emulated kernels."""

import sys

import numpy as np
from greenlet import getcurrent

from .arrays import uninitialised
from .ints import CASTS

WARP_SIZE = 32
_FULL = (1 << 32) - 1
_U64 = (1 << 64) - 1


class _Shared:
    def array(self, shape, dtype, alignment=None):
        """One array per call site and block; shape 0 is the dynamic shared memory of the launch."""
        frame = sys._getframe(1)
        block = getcurrent().block
        return block.launch.shared_array(block, (frame.f_code, frame.f_lasti), shape, _dtype(dtype))


class _Local:
    def array(self, shape, dtype, alignment=None):
        """A new array of this thread."""
        return uninitialised(shape, _dtype(dtype))


class _Const:
    def array_like(self, array):
        return array


def _dtype(dtype):
    """The NumPy dtype of a Numba or NumPy type."""
    if isinstance(dtype, (np.dtype, type, str)) or hasattr(dtype, "dtype"):
        return np.dtype(dtype)
    if str(dtype) == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(str(dtype))


class _Atomic:
    """cuda.atomic: each returns the old value."""

    def _update(self, array, index, function):
        thread = getcurrent()
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, tuple):
            array, index = array[index[:-1]], index[-1]
        return thread.atomic(array, index, function)

    def add(self, array, index, value):
        return self._update(array, index, lambda old: old + value)

    def sub(self, array, index, value):
        return self._update(array, index, lambda old: old - value)

    def and_(self, array, index, value):
        return self._update(array, index, lambda old: old & value)

    def or_(self, array, index, value):
        return self._update(array, index, lambda old: old | value)

    def xor(self, array, index, value):
        return self._update(array, index, lambda old: old ^ value)

    def inc(self, array, index, limit):
        return self._update(array, index, lambda old: 0 if old >= limit else old + 1)

    def dec(self, array, index, limit):
        return self._update(array, index, lambda old: limit if old == 0 or old > limit else old - 1)

    def exch(self, array, index, value):
        return self._update(array, index, lambda old: value)

    def max(self, array, index, value):
        return self._update(array, index, lambda old: value if value > old or old != old else old)

    def min(self, array, index, value):
        return self._update(array, index, lambda old: value if value < old or old != old else old)

    nanmax, nanmin = max, min

    def cas(self, array, index, old, value):
        return self._update(array, index, lambda now: value if now == old else now)

    def compare_and_swap(self, array, old, value):
        return self.cas(array, 0, old, value)


class _Grid:
    def sync(self):
        getcurrent().grid_barrier()


class _CooperativeGroups:
    def this_grid(self):
        return _Grid()


def _warp(function):
    """A warp operation on the lanes' values: `function(me, values by lane, *arguments)`."""

    def operation(self, mask, value, *arguments):
        thread = getcurrent()
        values = thread.block.meeting(thread, "warp", mask).join(
            thread, value, lambda values: {thread_id % WARP_SIZE: v for thread_id, v in values.items()}
        )
        return function(thread.lane, values, value, *arguments)

    return operation


def _matching(values, value):
    return sum(1 << lane for lane, v in values.items() if v == value)


def _segment(lane, width):
    return lane // width * width


class Cuda:
    """`cuda.` names of kernels. What is missing raises NotImplementedError."""

    threadIdx = property(lambda self: getcurrent().threadIdx)
    blockIdx = property(lambda self: getcurrent().block.blockIdx)
    blockDim = property(lambda self: getcurrent().block.blockDim)
    gridDim = property(lambda self: getcurrent().block.gridDim)
    laneid = property(lambda self: getcurrent().lane)
    warpsize = WARP_SIZE
    shared, local, const, atomic, cg = _Shared(), _Local(), _Const(), _Atomic(), _CooperativeGroups()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"cuda.{name} is not emulated")

    def grid(self, ndim):
        thread = getcurrent()
        block, index = thread.block, thread.threadIdx
        x = block.blockIdx.x * block.blockDim.x + index.x
        if ndim == 1:
            return x
        y = block.blockIdx.y * block.blockDim.y + index.y
        if ndim == 2:
            return x, y
        return x, y, block.blockIdx.z * block.blockDim.z + index.z

    def gridsize(self, ndim):
        block = getcurrent().block
        sizes = tuple(g * b for g, b in zip(block.gridDim, block.blockDim))
        return sizes[0] if ndim == 1 else sizes[:ndim]

    # -- synchronisation
    def syncthreads(self):
        getcurrent().syncthreads()

    def _vote_block(self, predicate, function):
        thread = getcurrent()
        return thread.block.meeting(thread, "block").join(thread, bool(predicate), lambda votes: function(votes.values()))

    def syncthreads_count(self, predicate):
        return self._vote_block(predicate, sum)

    def syncthreads_and(self, predicate):
        return self._vote_block(predicate, lambda votes: int(all(votes)))

    def syncthreads_or(self, predicate):
        return self._vote_block(predicate, lambda votes: int(any(votes)))

    def syncwarp(self, mask=_FULL):
        thread = getcurrent()
        thread.block.meeting(thread, "warp", mask).join(thread, None, lambda values: None)

    def threadfence(self):
        """Memory is sequentially consistent here."""

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, nanoseconds):
        thread = getcurrent()
        thread.block.scheduler.spin(thread, lambda: "its turn after nanosleep")

    # -- warps
    def activemask(self):
        thread = getcurrent()
        return (1 << thread.warp_size()) - 1

    def lanemask_lt(self):
        return (1 << getcurrent().lane) - 1

    def _shuffle(source):
        def function(lane, values, value, *arguments):
            return values.get(source(lane, *arguments), value)

        return _warp(function)

    shfl_sync = _shuffle(lambda lane, src, width=32: _segment(lane, width) + src % width)
    shfl_up_sync = _shuffle(lambda lane, delta, width=32: lane - delta if lane - delta >= _segment(lane, width) else lane)
    shfl_down_sync = _shuffle(
        lambda lane, delta, width=32: lane + delta if lane + delta < _segment(lane, width) + width else lane
    )
    shfl_xor_sync = _shuffle(lambda lane, mask, width=32: lane ^ mask)
    all_sync = _warp(lambda lane, values, value: all(values.values()))
    any_sync = _warp(lambda lane, values, value: any(values.values()))
    eq_sync = _warp(lambda lane, values, value: len({bool(v) for v in values.values()}) == 1)
    ballot_sync = _warp(lambda lane, values, value: sum(1 << i for i, v in values.items() if v))
    match_any_sync = _warp(lambda lane, values, value: _matching(values, value))

    def match_all_sync(self, mask, value):
        matching = self.match_any_sync(mask, value)
        return (matching, True) if matching == self.activemask() else (0, False)

    # -- integers and arithmetic
    def popc(self, x):
        return bin(x & _U64).count("1")

    def ffs(self, x):
        return (x & -x).bit_length() if x else 0

    def fma(self, a, b, c):
        return a * b + c

    def cbrt(self, x):
        return np.cbrt(x)

    def selp(self, predicate, a, b):
        return a if predicate else b


for _name, _cast in CASTS.items():
    setattr(Cuda, _name, _cast)
for _name in ("float16", "float32", "float64"):
    setattr(Cuda, _name, getattr(np, _name))
