"""CuPy for scripts: NumPy arrays with CuPy's methods.

What CuPy enqueues on its current stream is done at once, after the work on that stream. Conversions between
NumPy and CuPy arrays that CuPy refuses are not refused.
"""

import numpy as np

from shmemkit.emu.device_arrays import address
from shmemkit.emu.launch_hook import DeviceArray
from shmemkit.emu.run import current_host
from shmemkit.emu.stand_in_modules import Served, StandIn, named, not_served

from . import cupy_cuda
from .current_process import current


def _settle():
    host = current_host()
    if host is not None and host.process is not None:
        host.process.settle()


class ndarray(np.ndarray, Served):
    """A CuPy array. Elements and reductions are arrays without dimensions, as CuPy's."""

    __module__ = "cupy"

    def __getitem__(self, index):
        _settle()
        if not isinstance(index, tuple):
            index = (index,)
        if not any(i is Ellipsis for i in index) and all(isinstance(i, (int, np.integer)) for i in index):
            index = (*index, Ellipsis)  # an element is a view, too
        result = super().__getitem__(tuple(_plain(i) for i in index))
        return _wrapped(result)

    def __setitem__(self, index, value):
        _settle()
        index = tuple(_plain(i) for i in index) if isinstance(index, tuple) else _plain(index)
        super().__setitem__(index, _plain(value))

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        _settle()
        if kwargs.get("out") is not None:
            kwargs["out"] = tuple(_plain(o) for o in kwargs["out"])
        result = getattr(ufunc, method)(*map(_plain, inputs), **kwargs)
        return _wrapped(result)

    def __array_function__(self, function, types, args, kwargs):
        _settle()
        return _wrapped(super().__array_function__(function, types, args, kwargs))

    @property
    def data(self):
        return cupy_cuda.MemoryPointer(self, address(self))

    @property
    def device(self):
        return cupy_cuda.Device()

    @property
    def __cuda_array_interface__(self):
        return {**self.__array_interface__, "version": 3, "stream": 1}

    def __repr__(self):
        return repr(np.array(self, subok=False))

    def get(self, stream=None, order="C", out=None, blocking=True):
        """A NumPy copy, once the work on the current stream, or on `stream`, has finished."""
        _wait(stream)
        if out is None:
            return np.array(self, order=order, subok=False)
        out[...] = _plain(self)
        return out

    def set(self, array, stream=None):
        _wait(stream)
        self[...] = array

    def __reduce__(self):
        return asarray, (np.array(self, subok=False),)


def _wait(stream):
    from .streams import find

    process = current("cupy")
    process.settle()
    (process.stream if stream is None else find(stream)).synchronize()


def _plain(value):
    return value.view(np.ndarray) if isinstance(value, ndarray) else value


def _wrapped(value):
    if isinstance(value, (tuple, list)):
        parts = map(_wrapped, value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    return value.view(ndarray) if isinstance(value, np.ndarray) else value


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    """A copy; with ``copy=False``, an array of the device, of Numba as well, shares its memory if it can."""
    _settle()
    if isinstance(obj, DeviceArray):
        obj = obj.view(ndarray)
    if isinstance(obj, ndarray) and obj.ndim >= ndmin and not copy:
        return np.asanyarray(obj, dtype, order)
    return np.array(_deep(obj), dtype=dtype, order=order, ndmin=ndmin).view(ndarray)


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    return array(a, dtype, copy=bool(copy), order=order or "K")


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    if isinstance(a, ndarray):
        return a.get(stream, order, out)
    return np.asarray(a)


def from_dlpack(x):
    return np.from_dlpack(x).view(ndarray)


def get_array_module(*arrays):
    import sys

    return sys.modules["cupy"] if any(isinstance(a, ndarray) for a in arrays) else np


def scatter_add(a, slices, value):
    _settle()
    np.add.at(_plain(a), slices, _plain(value))


class _Pool:
    """Memory pools hold nothing."""

    def free_all_blocks(self, stream=None):
        pass

    def used_bytes(self):
        return 0

    total_bytes = n_free_blocks = used_bytes


_POOL = _Pool()

# What CuPy has of NumPy, and does the same.
_TYPES = (
    "bool_ broadcast_shapes can_cast complex128 complex64 dtype e finfo float16 float32 float64 floating "
    "generic iinfo inf int16 int32 int64 int8 integer intp isscalar issubdtype nan ndim newaxis number pi "
    "promote_types result_type shape size uint16 uint32 uint64 uint8 uintp"
).split()
_FUNCTIONS = (
    "abs absolute add all allclose amax amin any append arange argmax argmin argsort argwhere around "
    "array_equal ascontiguousarray atleast_1d atleast_2d bincount bitwise_and bitwise_or bitwise_xor "
    "broadcast_to ceil clip column_stack concatenate conj copy copyto cos cosh count_nonzero cumprod "
    "cumsum diag diff divide divmod dot einsum empty empty_like equal exp exp2 expand_dims expm1 eye fabs "
    "flatnonzero flip floor floor_divide fmax fmin fmod full full_like gcd greater greater_equal hstack "
    "hypot identity indices invert isclose isfinite isin isinf isnan kron lcm left_shift less less_equal "
    "linspace log log10 log1p log2 logical_and logical_not logical_or logical_xor logspace matmul max "
    "maximum mean median meshgrid min minimum mod moveaxis multiply nan_to_num nanmax nanmin nansum "
    "negative nonzero not_equal ones ones_like outer pad percentile power prod ptp quantile ravel "
    "reciprocal remainder repeat reshape right_shift roll rot90 round searchsorted sign sin sinh sort "
    "split sqrt square squeeze stack std subtract sum swapaxes take tan tanh tensordot tile trace "
    "transpose tri tril triu true_divide unique unravel_index var vdot vstack where zeros zeros_like"
).split()


_LINALG = (
    "cholesky det eigh eigvalsh inv lstsq matrix_power matrix_rank norm pinv qr slogdet solve svd".split()
)
_TESTING = "assert_allclose assert_array_almost_equal assert_array_equal assert_array_less".split()


def _served(name, owner=np):
    function = getattr(owner, name)

    def served(*args, **kwargs):
        _settle()
        args = [_deep(a) for a in args]
        return _wrapped(function(*args, **{k: _deep(v) for k, v in kwargs.items() if k != "blocking"}))

    served.__name__ = name
    return served


def _deep(value):
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else _plain(value)


class _Random(StandIn):
    """``cupy.random``: NumPy's generator of the PE."""

    def __init__(self):
        super().__init__("cupy.random", {})

    def __getattr__(self, name):
        if name == "default_rng":
            return lambda seed=None: _Generator(np.random.default_rng(seed))
        if name == "RandomState":
            return lambda seed=None: _Generator(np.random.RandomState(seed))
        if name in _Generator.NAMES and hasattr(np.random.RandomState, name):
            return getattr(_Generator(current("cupy.random").random), name)
        return super().__getattr__(name)


class _Generator:
    NAMES = (
        "beta binomial bytes choice exponential gamma integers normal permutation poisson rand randint randn "
        "random random_sample seed shuffle standard_normal uniform"
    ).split()

    def __init__(self, generator):
        self._generator = generator

    def __getattr__(self, name):
        if name.startswith("_") or name not in self.NAMES:
            raise AttributeError(name) if name.startswith("_") else not_served(f"cupy.random.{name}")
        method = getattr(self._generator, name)

        def draw(*args, dtype=None, **kwargs):
            _settle()
            result = _wrapped(method(*map(_plain, args), **kwargs))
            return result if dtype is None else _wrapped(result.astype(dtype))

        return draw


def modules():
    """-> the stand-ins, by name"""
    members = {name: getattr(np, name) for name in _TYPES}
    members |= {name: _served(name) for name in _FUNCTIONS}
    members |= named(ndarray, array, asarray, asnumpy, from_dlpack, get_array_module)
    members.update(
        asanyarray=asarray,
        get_default_memory_pool=lambda: _POOL,
        get_default_pinned_memory_pool=lambda: _POOL,
        is_available=lambda: True,
        float_=np.float64,
        __version__=f"emulated, NumPy {np.__version__}",
    )
    return {
        "cupy": StandIn("cupy", members),
        "cupy.linalg": StandIn("cupy.linalg", {name: _served(name, np.linalg) for name in _LINALG}),
        "cupy.random": _Random(),
        "cupy.testing": StandIn("cupy.testing", {name: _served(name, np.testing) for name in _TESTING}),
        **cupy_cuda.modules(),
    }
