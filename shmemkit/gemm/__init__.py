"""Matrix products: out = activation(a @ b + bias).

    y = sk.matmul(x, w)                                      # by the current World, if there is one
    sk.matmul(x, w, out, bias=bias, activation="gelu")

    gemm = sk.Gemm("sm80")                                   # one that keeps a method
    gemm(x, w, out)

Methods, of which "auto" takes the first that can compute what is given:

  sm90   wgmma, TMA: GPUs of compute capability 9.0, float16, bfloat16 and float8 (block_scales.py), rows at
         multiples of 16 bytes, and those of out as long as that, too
  sm80   mma.sync, cp.async: from 8.0 on, float16 and bfloat16, contiguous rows or columns
  simt   ordinary arithmetic: every GPU, dtype and stride

On the emulator "auto" is simt, which is emulated fastest, but for float8; the others by name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from shmemkit.backends.streams import address_of_stream
from shmemkit.device.cuda.float_storage import ELEMENTS
from shmemkit.operations.plans import Plans
from shmemkit.runtime.budget import checked_sms
from shmemkit.runtime.world import current
from shmemkit.support import gpus
from shmemkit.support.arrays import (
    address_of,
    call_on,
    converted,
    keyed,
    new_output,
    overlap,
    stream_of,
    with_shape,
)
from shmemkit.support.dtypes import numpy_dtype
from shmemkit.support.settings import array_text, listed, one_of, shown
from shmemkit.typing import Activation, AnyArray, AnyStream, ArrayT, GemmMethod

from .block_scales import BLOCK, MAX_REACH
from .epilogue import ACTIVATIONS
from .problem import FLOAT8, HALVES, Gpu, Problem, is_aligned
from .simt import DTYPES, Simt
from .sm80 import Sm80
from .sm90_host import Sm90

__all__ = ["METHODS", "Gemm", "bind_product", "check", "gpu_of", "matmul"]

PLANS = 512  # bound calls that a Gemm keeps
METHODS = {"sm90": Sm90, "sm80": Sm80, "simt": Simt}
SCALES = "scales[0]", "scales[1]"  # arguments, in errors
OPTIONAL = "bias", "scales"  # what the names of arrays begin with that may be None


class Product:
    """What Gemm and GroupedGemm have in common: calls that are bound to arrays, and kept."""

    _who: str  # in errors

    def __init__(self, sms):
        self.sms = checked_sms(self._who, sms)
        self._plans = Plans(PLANS, _synchronize)

    def _enqueue(self, given, scales, shape_of, bind, activation, stream):
        """Enqueue a product of the arrays `given`, {name: array}, with `scales`, or None. -> that named
        "out": where None is given, a new one of the kind and the dtype of the first, of float8 bfloat16.

        shape_of(*arrays)          -> the shape of such a result, by the operands
        bind(arrays, scales, gpu)  -> run(stream), for arrays of `gpu.arrays`; scales: two of them or None
        """
        one_of(self._who, "activation", activation, ACTIVATIONS)
        given = {**given, **dict(zip(SCALES, _pair(self._who, scales), strict=True))}
        world = current()
        gpu = gpu_of(world).limited(self.sms)
        if world is None:
            stream, waits = stream_of(stream, *given.values()), False
        else:
            stream, waits = call_on(world, stream, *given.values())
        like, out = next(iter(given.values())), given["out"]
        operands = {
            name: with_shape(self._who, name, x, gpu.arrays)
            for name, x in given.items()
            if name not in ("out", "bias") and not name.startswith("scales")
        }
        if out is None:
            shape = shape_of(*operands.values())
            after = functools.partial(follow, gpu.arrays) if world is None else world.backend.follow
            dtype: Any = next(iter(operands.values())).dtype
            if str(dtype).endswith(FLOAT8):
                dtype = numpy_dtype("bfloat16")
            out = new_output(like, shape, dtype, gpu.arrays, stream, after)
        key, arrays = keyed(self._who, {**given, **operands, "out": out}, gpu.arrays, OPTIONAL)
        key = activation, world, *key
        run = self._plans.get(key)
        if run is None:
            arrays = converted(self._who, arrays, gpu.arrays, OPTIONAL)
            scales = [arrays.pop(name) for name in SCALES]
            run = bind(arrays, None if scales[0] is None else tuple(scales), gpu)
        if stream is None and world is None:
            stream = _cupy().cuda.get_current_stream()
        capturing = _captures(world, stream)
        self._plans.keep(key, run, capturing)
        run(stream)
        if waits and world is not None:
            world.stream.synchronize()
        return out


class Gemm(Product):
    """Matrix products of one method, in one order of tiles: `matmul` keeps such objects.

    method  as of `matmul`
    order   the order of the result's tiles: a function (turn, n_m, n_n) -> (m, n), the row and column of the
            tile that comes after `turn` others, of n_m by n_n tiles. Each tile comes once, else a call
            raises ValueError. The function computes with integers, like those of
            ``shmemkit.device.swizzle``. It is compiled as a device function, and the host calls it, too. The
            method decides the size of a tile. The result is the same in every order. Default: the method's
            own order
    sms     as of `matmul`

    It keeps kernels by the arrays' addresses, shapes, strides and dtypes, and must live as long as its
    calls, and graphs that captured some. TypeError if `order` is not a function.
    """

    _who = "Gemm"

    def __init__(self, method: GemmMethod = "auto", order: Callable | None = None, *, sms: int | None = None):
        one_of("Gemm", "method", method, ("auto", *METHODS))
        super().__init__(sms)
        self.method, self.order = method, _device_function(order)

    def __call__(
        self,
        a: ArrayT,
        b: AnyArray,
        out: ArrayT | None = None,
        *,
        bias: AnyArray | None = None,
        activation: Activation | None = None,
        scales: tuple[AnyArray, AnyArray] | None = None,
        stream: AnyStream | None = None,
    ) -> ArrayT:
        """Enqueue ``out = activation(a @ b + bias)``. -> out

        Arguments, result, bits, capture and errors are those of `matmul`.
        """
        given = {"a": a, "b": b, "out": out, "bias": bias}

        def bind(arrays, scales, gpu):
            problem = Problem(**arrays, activation=activation, scales=scales)
            return bind_product(problem, gpu, self.method, self.order)

        return self._enqueue(given, scales, _shape_of, bind, activation, stream)


def _device_function(order):
    """The `order` of a Gemm, for kernels."""
    if order is None:
        return None
    function = getattr(order, "py_func", order)
    if not callable(function):
        raise TypeError(f"Gemm: order is {shown(order)}; it must be a function (turn, n_m, n_n) -> (m, n)")
    return order if order is not function else cuda.jit(device=True)(function)


def bind_product(problem, gpu, method="auto", order=None):
    """-> run(stream), which computes a Problem of arrays of `gpu.arrays`, by a method and in an order as in
    Gemm. The caller keeps the arrays alive. ValueError if no method can compute it."""
    check(problem)
    if not problem.out.size:
        return lambda stream: None
    usual = ["sm90"] if problem.scales else ["simt"] if gpu.arrays.ndarray is np.ndarray else [*METHODS]
    method = chosen("Gemm", METHODS, method, usual, problem, gpu)
    return METHODS[method](problem, gpu, order=order)


def chosen(who, methods, method, usual, problem, gpu):
    """-> the name of the method: `method`, or if that is "auto" the first of the `usual` ones that can
    compute the problem. ValueError if none can. methods: {name: class}"""
    reasons = {}
    for name in usual if method == "auto" else [method]:
        reasons[name] = methods[name].unsupported(problem, gpu)
        if reasons[name] is None:
            return name
    why = ". ".join(f"Method {name!r} cannot be used: {reason}" for name, reason in reasons.items())
    raise ValueError(f"{who}: {why}" + (". Use method='auto'" if method != "auto" else ""))


def matmul(
    a: ArrayT,
    b: AnyArray,
    out: ArrayT | None = None,
    *,
    bias: AnyArray | None = None,
    activation: Activation | None = None,
    scales: tuple[AnyArray, AnyArray] | None = None,
    stream: AnyStream | None = None,
    method: GemmMethod = "auto",
    sms: int | None = None,
) -> ArrayT:
    """Enqueue ``out = activation(a @ b + bias)`` on this rank's GPU alone. -> out

    a, b        (M, K) and (K, N), of one dtype: bfloat16, float16, float32, float64, an integer, or
                float8_e4m3fn with `scales`. M, N and K may be 0. Any strides of whole elements, so a weight
                (N, K) is given as w.T. Rows, or columns, that are contiguous and begin at multiples of 16
                bytes are computed fastest
    out         (M, N), any strides, apart from all others. bfloat16, float16 or float32 for operands of these
                two or float8, any integer for integers, else the operands' dtype. Default: a new array of a's
                kind and dtype, of float8 bfloat16
    bias        (N,), added to each row; of out's dtype, or float32 where out is bfloat16 or float16
    activation  None, "relu", "gelu" (exact, by erf) or "silu", as in PyTorch; None or "relu" for integers
    scales      of float8: those of a, (M, ceil(K / 128)), one for 128 of K of a row; and those of b,
                (ceil(K / 128), ceil(N / 128)), one for 128 of K by 128 columns. float32, with strides of 0 or
                more. Of a weight w.T, give scales.T. One scale for all: ``numpy.broadcast_to``. See
                docs/float8.md
    stream      default: PyTorch's current one if any array is a tensor on a GPU, else the World's, or CuPy's
                current one without a World. It is not ordered with other streams
    method      "auto", the first of these that can compute the product (on the emulator "simt"), or
                  sm90  wgmma and the TMA: compute capability 9.0, bfloat16 or float16, contiguous rows or
                        columns that begin at multiples of 16 bytes; float8, where rows of a and columns of b
                        are contiguous, M, N and K 1 or more, and rows of out a multiple of 16 bytes
                  sm80  mma.sync and cp.async: from 8.0 on, bfloat16 or float16, contiguous rows or columns
                  simt  ordinary arithmetic: all else
    sms         the most multiprocessors that it uses, 1 or more; None: all that help

    Arrays are CuPy's (on the emulator NumPy's), PyTorch tensors, or others on this GPU that have
    __cuda_array_interface__ or DLPack. On a GPU no World is needed, on the emulator one is.

    Sums are in float32 (of float64 in float64, of integers modulo 2**64) and are rounded once. Equal calls
    on one GPU give equal bits. When the stream has run the call, later work on it sees out.

    The first call for arrays at new addresses binds a kernel, and may compile it, in seconds: it cannot be
    in the capture of a graph. Later calls with the same arrays only launch, and may be captured. The caller
    keeps the arrays alive until the stream has run the call, and those of captured calls as long as the
    graph is used.

    TypeError or ValueError for wrong arguments; RuntimeError without GPU and World.
    """
    one_of("matmul()", "method", method, ("auto", *METHODS))
    gemm = kept(Gemm, method, sms)
    return gemm(a, b, out, bias=bias, activation=activation, scales=scales, stream=stream)


def kept(kind, method, sms):
    """-> the Gemm, or another `kind` of Product, of that method and `sms` that calls without an object use"""
    world, key = current(), (kind, method, checked_sms(kind._who, sms))
    found = _without_world if world is None else world.kept
    if key not in found:
        found[key] = kind(method, sms=sms)
    return found[key]


_without_world = {}


def gpu_of(world):
    """-> the Gpu on which a World computes; if there is no World (None), CuPy's current GPU"""
    if world is not None and world.backend.name == "emulator":
        backend = world.backend
        return Gpu(backend.compute_capability, backend.multiprocessors, backend.block_shared, np)
    if world is None:
        _check_gpus()
    return _of_device(_cupy().cuda.Device().id)


@functools.cache
def _check_gpus():
    if gpus.n_gpus() == 0:
        raise RuntimeError("Gemm: there is no GPU, and no World to emulate one. Call shmemkit.init() first")


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


def follow(cupy, later, earlier):
    """``backend.follow`` of a World, for programs without one: a stream of None is CuPy's current stream."""
    current = cupy.cuda.get_current_stream()
    later, earlier = (address_of_stream(current if stream is None else stream) for stream in (later, earlier))
    captures = cupy.cuda.runtime.streamIsCapturing
    if later != earlier and not captures(later) and not captures(earlier):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, earlier)
        cupy.cuda.runtime.streamWaitEvent(later, event.ptr)


def _captures(world, stream):
    if world is not None:
        return world.backend.capture_of(stream) is not None
    return _cupy().cuda.runtime.streamIsCapturing(address_of_stream(stream))


def _synchronize():
    """Wait for the GPU, if there is one. The emulator keeps arrays as long as they are used."""
    if "cupy" in sys.modules and gpus.n_gpus():
        _cupy().cuda.runtime.deviceSynchronize()


def _cupy():
    import cupy

    return cupy


def _shape_of(a, b):
    if not a.ndim == b.ndim == 2:
        raise ValueError(_shapes(a, b))
    return a.shape[0], b.shape[1]


def _shapes(a, b):
    shapes: list[Any] = [getattr(x, "shape", ()) for x in (a, b)]
    given = " and ".join(str(getattr(x, "shape", type(x).__name__)) for x in (a, b))
    weight = all(len(shape) == 2 for shape in shapes) and shapes[0][1] == shapes[1][1]
    hint = ". Give a weight of shape (N, K) as b.T" if weight else ""
    return f"Gemm: a and b are {given}; they must be (M, K) and (K, N){hint}"


def check(problem):
    """ValueError for a Problem that no method can compute."""
    a, b, out, bias, activation, scales = problem
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(_shapes(a, b))
    dtype = a.dtype.name
    allowed = (*DTYPES, FLOAT8)
    if b.dtype != a.dtype or dtype not in allowed:
        raise ValueError(f"Gemm: a is {a.dtype} and b is {b.dtype}; both must be one of {listed(allowed)}")
    k_blocks, n_blocks = (-(-size // BLOCK) for size in b.shape)
    check_scales("Gemm", a, scales, (a.shape[0], k_blocks), (k_blocks, n_blocks), out)
    shape = a.shape[0], b.shape[1]
    if out.shape != shape:
        raise ValueError(f"Gemm: out is {out.shape}; it must be {shape}")
    integers = a.dtype.kind in "iu"
    allowed = list(ELEMENTS) if dtype in (*HALVES, FLOAT8) else [dtype]
    if integers:
        allowed = [name for name in DTYPES if "int" in name]
    if out.dtype.name not in allowed:
        raise ValueError(f"Gemm: out is {out.dtype}; of {dtype} operands it must be {listed(allowed)}")
    if bias is not None:
        allowed = [out.dtype.name] + (["float32"] if out.dtype.name in HALVES else [])
        if bias.shape != shape[1:] or bias.dtype.name not in allowed:
            raise ValueError(
                f"Gemm: bias is {bias.dtype} {bias.shape}; it must be {listed(allowed)} {shape[1:]}"
            )
    if activation not in ACTIVATIONS or (integers and activation in ("gelu", "silu")):
        activations = [x for x in ACTIVATIONS if not integers or x not in ("gelu", "silu")]
        one_of("Gemm", "activation", activation, activations)
    check_memory("Gemm", out, a=a, b=b, bias=bias)


def _pair(who, scales):
    if scales is None:
        return None, None
    if not isinstance(scales, (tuple, list)) or len(scales) != 2 or any(x is None for x in scales):
        raise TypeError(f"{who}: scales is {shown(scales)}; it must be a tuple of two arrays, or None")
    return scales


def check_scales(who, operand, scales, shape_of_a, shape_of_b, out):
    """ValueError unless `scales` are what operands like `operand` have: None, or arrays of these shapes."""
    needed = f"float32 {shape_of_a} and {shape_of_b}, one of each block of {BLOCK}"
    if (operand.dtype.name == FLOAT8) != (scales is not None):
        given = "None" if scales is None else "given"
        needed = f"of {FLOAT8} they must be {needed}" if scales is None else f"only {FLOAT8} has some"
        raise ValueError(f"{who}: the operands are {operand.dtype} and scales is {given}; {needed}")
    if scales is None:
        return
    (a, b), shapes = scales, (shape_of_a, shape_of_b)
    if (a.shape, b.shape) != shapes or {a.dtype.name, b.dtype.name} != {"float32"}:
        raise ValueError(f"{who}: scales are {array_text(a)} and {array_text(b)}; they must be {needed}")
    steps = [(size - 1, step) for x in scales for size, step in zip(x.shape, x.strides, strict=True)]
    if min(step for _, step in steps) < 0 or sum(size * step for size, step in steps) >= MAX_REACH:
        raise ValueError(
            f"{who}: scales have strides {a.strides} and {b.strides}; they must be 0 or more, and lead less "
            f"than {MAX_REACH} bytes far. Give copies"
        )
    check_memory(who, out, **dict(zip(SCALES, scales, strict=True)))


def check_memory(who, out, **operands):
    """ValueError for arrays that lie where no kernel can take them."""
    for name, array in {**operands, "out": out}.items():
        if array is not None and not is_aligned(array):
            raise ValueError(
                f"{who}: {name} has strides {array.strides} and address {address_of(array):#x}; they must be "
                f"multiples of its elements' {array.dtype.itemsize} bytes. Give a copy"
            )
    for name, array in operands.items():
        if array is not None and overlap(array, out):
            raise ValueError(f"{who}: out overlaps {name}; it must be another array")
    steps = zip(out.strides, out.shape, strict=True)
    if out.size and any(stride == 0 and size > 1 for stride, size in steps):
        raise ValueError(f"{who}: out is a broadcast array, whose elements share memory; it must not be one")
