"""Matrix products: out = activation(a @ b + bias).

    y = sk.matmul(x, w)                                      # by the current World, if there is one
    sk.matmul(x, w, out, bias=bias, activation="gelu")

    gemm = sk.Gemm("sm80")                                   # one that keeps a method
    gemm(x, w, out)

Methods, of which "auto" takes the first that can compute what is given:

  sm90   wgmma, TMA: GPUs of compute capability 9.0, float16 and bfloat16, rows at multiples of 16 bytes, and
         those of out as long as that, too
  sm80   mma.sync, cp.async: from 8.0 on, float16 and bfloat16, contiguous rows or columns
  simt   ordinary arithmetic: every GPU, dtype and stride

On the emulator "auto" is simt, which is emulated fastest; the others by name.
"""

import functools
import sys

import numpy as np

from shmemkit import world as _world
from shmemkit.device.elements import ELEMENTS
from shmemkit.memory import as_dtype

from .epilogue import ACTIVATIONS
from .problem import HALVES, Gpu, Problem, address_of, not_of_tensor_cores
from .simt import DTYPES, Simt
from .sm80 import Sm80
from .sm90_host import rows_that_cannot_be_stored

__all__ = ["METHODS", "Gemm", "gpu_of", "matmul"]

PLANS = 256  # bound calls that a Gemm keeps
EMULATED_SHARED = 232448  # bytes of shared memory per block, as on Hopper


class Sm90:
    """A product that is bound to the kernel of sm90.py: call it with a stream."""

    @staticmethod
    def unsupported(problem, gpu):
        """-> why it cannot compute `problem`, or None."""
        a, b, out, _, _ = problem
        if gpu.compute_capability[0] != 9:
            return f"compute capability {gpu.compute_capability}: 9.0 is allowed"
        if reason := not_of_tensor_cores(problem) or rows_that_cannot_be_stored(out):
            return reason
        for array, inner in (a, _inner(a)), (b, 1 - _inner(b.T)), (out, 1):
            size, step = array.shape[1 - inner], array.strides[1 - inner]
            consecutive = array.shape[inner] == 1 or array.strides[inner] == array.dtype.itemsize
            if not consecutive or address_of(array) % 16 or (size > 1 and (step <= 0 or step % 16)):
                return (
                    f"strides {array.strides}, or the address: contiguous rows (operands: or columns) that "
                    "begin at multiples of 16 bytes are allowed"
                )
        return None

    def __init__(self, problem, gpu):
        from . import sm90_host

        self._gemm = sm90_host.Gemm(*problem, arrays=gpu.arrays, sms=gpu.multiprocessors)
        self._gemm.operands = None  # as for the others, the caller keeps them alive
        if gpu.arrays is not np:
            gpu.arrays.cuda.get_current_stream().synchronize()  # what the kernel needs besides is there

    def __call__(self, stream=None):
        self._gemm(stream)


def _inner(array):
    """The dimension of an operand that is taken as contiguous, of (rows, K): K, if either may be."""
    return 1 if array.shape[1] == 1 or array.strides[1] == array.dtype.itemsize else 0


METHODS = {"sm90": Sm90, "sm80": Sm80, "simt": Simt}


class Gemm:
    """Matrix products by one method. Keeps what it has compiled and bound, by the arrays' addresses, shapes,
    strides and dtypes, so that a call for arrays that it has seen is a launch.

    method  "auto" or one of METHODS
    """

    def __init__(self, method="auto"):
        if method != "auto" and method not in METHODS:
            raise ValueError(f"Gemm: method={method!r}: 'auto', {', '.join(map(repr, METHODS))} are allowed")
        self.method, self._plans = method, {}

    def __call__(self, a, b, out=None, *, bias=None, activation=None, stream=None):
        """out = activation(a @ b + bias), enqueued. -> out

        a, b        (M, K) and (K, N), of one dtype: bfloat16, float16, float32, float64 or integers, of any
                    strides; also M, N or K of 0. CuPy arrays, or any with the CUDA Array Interface or DLPack,
                    as PyTorch's; on the emulator NumPy's. Fastest: rows at multiples of 16 bytes
        out         (M, N), apart from a, b and bias. Of bfloat16 and float16 operands one of those or
                    float32, of integers any integers, else of their dtype. Default: a new array of the
                    operands' dtype
        bias        (N,), of out's dtype, or float32 where that is narrower; added to each row
        activation  None, "relu", "gelu" (exact, by erf) or "silu", as in PyTorch; of integers None or "relu"
        stream      default: the World's, or without one CuPy's current stream

        Added up in float32 (float64 of float64; integers modulo 2**64), and rounded once. Equal calls on one
        GPU give equal bits. The first call for arrays at new places binds a kernel, and perhaps compiles it:
        not inside the capture of a graph. The caller keeps the arrays and this Gemm alive until it has been
        computed; for a graph that captures calls the arrays, as long as it is used.

        TypeError or ValueError for what is not allowed; RuntimeError without GPU and World.
        """
        world = _world.current()
        if out is None:
            out = _new_output(a, b, world)
            if world is not None and stream not in (None, world.stream):
                world.backend.follow(stream, None)  # what used the memory before may be under way
        arrays = {"a": a, "b": b, "out": out} | ({} if bias is None else {"bias": bias})
        keys = list(map(_key, arrays.values()))
        if None in keys:
            arrays = {name: _array(name, x, gpu_of(world).arrays) for name, x in arrays.items()}
            keys = list(map(_key, arrays.values()))
        key = activation, world, *keys
        run = self._plans.get(key)
        if run is None:
            if len(self._plans) == PLANS:
                if gpu_of(world).arrays is not np:
                    _cupy().cuda.runtime.deviceSynchronize()  # their memory may be in use
                self._plans.clear()
            run = self._plans[key] = self._plan(activation, world, **arrays)
        if stream is None and world is None:
            stream = _cupy().cuda.get_current_stream()
        run(stream)
        return out

    def _plan(self, activation, world, **arrays):
        gpu = gpu_of(world)
        arrays = {name: _array(name, x, gpu.arrays) for name, x in arrays.items()}
        problem = Problem(**{"bias": None, **arrays}, activation=activation)
        _check(problem)
        if not problem.out.size:
            return lambda stream: None
        if self.method != "auto":
            method = METHODS[self.method]
            if reason := method.unsupported(problem, gpu):
                raise ValueError(f"Gemm: method={self.method!r}: {reason}; method='auto' takes another one")
            return method(problem, gpu)
        for method in METHODS.values() if gpu.arrays is not np else [Simt]:
            if method.unsupported(problem, gpu) is None:
                return method(problem, gpu)
        raise AssertionError("simt computes what was checked")


def matmul(a, b, out=None, *, bias=None, activation=None, stream=None, method="auto"):
    """out = activation(a @ b + bias), by a ``Gemm`` of that method, which is kept: see ``Gemm.__call__``.
    -> out"""
    return _kept(method, _world.current())(a, b, out, bias=bias, activation=activation, stream=stream)


def _kept(method, world):
    kept = _without_world if world is None else world.kept
    key = Gemm, method
    if key not in kept:
        kept[key] = Gemm(method)
    return kept[key]


_without_world = {}


def gpu_of(world):
    """-> the Gpu that a World computes on; without one (None), CuPy's current one"""
    if world is not None and world.backend.name == "emulator":
        backend = world.backend
        return Gpu(backend.compute_capability, backend.multiprocessors, EMULATED_SHARED, np)
    if world is None and _world.n_gpus() == 0:
        raise RuntimeError("Gemm: no GPU, and no World that would be emulated: call shmemkit.init() first")
    return _of_device(_cupy().cuda.Device().id)


@functools.cache
def _of_device(number):
    cupy = _cupy()
    device = cupy.cuda.Device(number)
    attributes, capability = device.attributes, device.compute_capability
    return Gpu(
        (int(capability[:-1]), int(capability[-1])),
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerBlockOptin"],
        cupy,
    )


def _cupy():
    import cupy

    return cupy


# ---- arrays of others


def _key(array):
    """What tells arrays apart, as far as a bound launch is concerned; None: it must be converted first."""
    if hasattr(array, "data_ptr"):  # PyTorch
        return array.data_ptr(), array.shape, array.stride(), array.dtype
    if isinstance(array, np.ndarray) or hasattr(getattr(array, "data", None), "ptr"):  # NumPy, CuPy
        return address_of(array), array.shape, array.strides, array.dtype
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return None
    return interface["data"][0], interface["shape"], interface.get("strides"), interface["typestr"]


def _array(name, x, arrays):
    """`x` as an array of `arrays`, CuPy or NumPy; the same memory."""
    if isinstance(x, arrays.ndarray):
        return x
    where = "NumPy arrays" if arrays is np else "CuPy arrays, or any with the CUDA Array Interface or DLPack,"
    if not (hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")) or (
        arrays is not np and (isinstance(x, np.ndarray) or not getattr(x, "is_cuda", True))
    ):
        raise TypeError(f"Gemm: {name} is a {type(x).__module__}.{type(x).__qualname__}: {where} are allowed")
    x = x.detach() if hasattr(x, "detach") else x
    if str(getattr(x, "dtype", "")) == "torch.bfloat16":  # which not all know
        torch = sys.modules["torch"]
        return arrays.from_dlpack(x.view(torch.int16)).view(as_dtype("bfloat16"))
    if hasattr(x, "__cuda_array_interface__") and arrays is not np:
        return arrays.asarray(x)
    return arrays.from_dlpack(x)


def _new_output(a, b, world):
    if not (getattr(a, "ndim", 0) == getattr(b, "ndim", 0) == 2):
        raise ValueError(_shapes(a, b))
    shape = a.shape[0], b.shape[1]
    if hasattr(a, "new_empty"):  # PyTorch
        return a.new_empty(shape)
    return gpu_of(world).arrays.empty(shape, a.dtype)


def _shapes(a, b):
    given = " and ".join(str(getattr(x, "shape", type(x).__name__)) for x in (a, b))
    return f"Gemm: a and b are {given}: (M, K) and (K, N) are allowed"


def _check(problem):
    a, b, out, bias, activation = problem
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(_shapes(a, b))
    dtype = a.dtype.name
    if b.dtype != a.dtype or dtype not in DTYPES:
        raise ValueError(f"Gemm: a is {a.dtype}, b {b.dtype}: one dtype of {', '.join(DTYPES)} is allowed")
    shape = a.shape[0], b.shape[1]
    if out.shape != shape:
        raise ValueError(f"Gemm: out is {out.shape}: {shape} is allowed")
    integers = a.dtype.kind in "iu"
    allowed = list(ELEMENTS) if dtype in HALVES else [dtype]
    if integers:
        allowed = [name for name in DTYPES if "int" in name]
    if out.dtype.name not in allowed:
        raise ValueError(f"Gemm: out is {out.dtype}: of {dtype} operands {', '.join(allowed)} are allowed")
    if bias is not None:
        allowed = [out.dtype.name] + (["float32"] if out.dtype.name in HALVES else [])
        if bias.shape != shape[1:] or bias.dtype.name not in allowed:
            raise ValueError(
                f"Gemm: bias is {bias.dtype} {bias.shape}: {' or '.join(allowed)} {shape[1:]} is allowed"
            )
    if activation not in ACTIVATIONS or (integers and activation in ("gelu", "silu")):
        activations = [x for x in ACTIVATIONS if not integers or x not in ("gelu", "silu")]
        raise ValueError(f"Gemm: activation={activation!r}: {', '.join(map(repr, activations))} are allowed")
    for name, array in (("a", a), ("b", b), ("bias", bias)):
        if array is not None and _overlap(array, out):
            raise ValueError(f"Gemm: out overlaps {name}: arrays that lie apart are allowed")
    steps = zip(out.strides, out.shape, strict=True)
    if out.size and any(stride == 0 and size > 1 for stride, size in steps):
        raise ValueError("Gemm: elements of out are one in memory: give an array that was not broadcast")


def _overlap(x, y):
    if not (x.size and y.size):
        return False
    (first, last), (begin, end) = _extent(x), _extent(y)
    return first < end and begin < last


def _extent(array):
    """-> addresses of an array's first byte, and of the one after its last"""
    steps = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    first = address_of(array) + sum(step for step in steps if step < 0)
    return first, first + sum(map(abs, steps)) + array.dtype.itemsize
