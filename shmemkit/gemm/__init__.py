"""Matrix products: out = activation(x @ w + bias).

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
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from shmemkit.backends.streams import address_of_stream
from shmemkit.device.cuda.float_storage import ELEMENTS
from shmemkit.operations.operation import Declared, Given, nothing
from shmemkit.operations.plans import Plans
from shmemkit.runtime.budget import checked_sms
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import current
from shmemkit.support import gpus
from shmemkit.support.renamed import renamed
from shmemkit.support.settings import one_of, shown
from shmemkit.typing import Activation, AnyArray, AnyStream, ArrayT, GemmMethod

from .block_scales import BLOCK, MAX_REACH
from .epilogue import ACTIVATIONS
from .problem import FLOAT8, HALVES, Gpu, Problem
from .simt import DTYPES, Simt
from .sm80 import Sm80
from .sm90_host import Sm90

__all__ = ["METHODS", "Gemm", "bind_product", "gpu_of", "matmul"]

PLANS = 512  # bound calls that a Gemm keeps
METHODS = {"sm90": Sm90, "sm80": Sm80, "simt": Simt}
SCALES = "scales[0]", "scales[1]"  # as arrays of a call
INTEGERS = tuple(name for name in DTYPES if "int" in name)


class OfProducts(Declared):
    """Which dtypes the arrays x, out and bias of products may have."""

    OPERANDS = tuple(map(as_dtype, DTYPES))

    def _dtype_of(self, name, arrays):
        if name == "x":
            return self.OPERANDS
        if name.startswith("out"):
            return _results_of(arrays["x"].dtype)
        if name.startswith("bias"):
            out = arrays[name.replace("bias", "out")].dtype
            return (out, np.dtype("float32")) if out.name in HALVES else out
        return super()._dtype_of(name, arrays)


@functools.cache
def _results_of(dtype):
    """-> the dtypes that products of operands of `dtype`, NumPy's or PyTorch's, may have."""
    name = str(dtype).removeprefix("torch.")
    if name in (*HALVES, FLOAT8):
        names = "bfloat16" if name == FLOAT8 else name, *ELEMENTS
    else:
        names = name, *(INTEGERS if name in INTEGERS else ())
    return tuple(map(as_dtype, dict.fromkeys(names))) if name in (*DTYPES, FLOAT8) else (dtype,)


def check_activation(who, activation, dtype):
    """ValueError for one that is not of operands of `dtype`."""
    allowed = [name for name in ACTIVATIONS if dtype.kind not in "iu" or name in (None, "relu")]
    one_of(who, "activation", activation, allowed)


class Product(OfProducts):
    """What Gemm and GroupedGemm have in common: a call is of this rank's GPU alone, and of the World that is
    current then, if there is one. A subclass has

    _compute  (gpu, x, w, out, bias, activation, scales) -> run(stream); scales: two of them or None
    """

    OPERANDS = (*OfProducts.OPERANDS, as_dtype(FLOAT8))
    _compute: Callable[..., Callable]

    def __init__(self, sms):
        self.sms = checked_sms(self._who, sms)
        self._plans = Plans(PLANS, self._synchronize)

    @property
    def world(self) -> Any:
        return current() or _alone()

    def _synchronize(self):
        """Not on the emulator, which keeps arrays as long as they are used."""
        if self.world.backend.name != "emulator":
            self.world.synchronize()

    def _product(self, arrays, scales, activation, stream):
        """Enqueue a call of `arrays`, with `scales`, or None. -> out"""
        one_of(self._who, "activation", activation, ACTIVATIONS)
        if scales is not None:
            if not isinstance(scales, (tuple, list)) or len(scales) != 2 or any(x is None for x in scales):
                raise TypeError(
                    f"{self._who}: scales is {shown(scales)}; it must be a tuple of two arrays, or None"
                )
            arrays.update(zip(SCALES, scales, strict=True))
        return self._enqueue(arrays, stream, activation=activation, world=self.world)["out"]

    def _new_shape(self, name, arrays):
        return *arrays["x"].shape[:1], *arrays["w"].shape[1:2]

    def _bind(self, x, activation, world, **others):
        check_activation(self._who, activation, x.dtype)
        scales = tuple(others.pop(name) for name in SCALES if name in others) or None
        self._check_scales(x, scales)
        gpu = gpu_of(world).limited(self.sms)
        run = self._compute(gpu, x=x, activation=activation, scales=scales, **others)
        return world.on_its_stream(run) if isinstance(world, Alone) else run

    def _check_scales(self, x, scales):
        if (x.dtype.name == FLOAT8) != (scales is not None):
            needed = f"only {FLOAT8} has some" if scales else "it must be a tuple of two arrays"
            given = "given" if scales else None
            raise ValueError(f"{self._who}: x is {x.dtype} and scales is {given}; {needed}")
        for name, array in zip(SCALES, scales or (), strict=False):
            steps = list(zip(array.shape, array.strides, strict=True))
            reach = sum((size - 1) * step for size, step in steps)
            if min(array.strides) < 0 or reach >= MAX_REACH:
                raise ValueError(
                    f"{self._who}: {name} has strides {array.strides}; they must be 0 or more, and lead less "
                    f"than {MAX_REACH} bytes far. Give a copy"
                )


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

    ARRAYS = {
        "x": Given("m k", contiguous=False, align=0),
        "w": Given("k n", "x", contiguous=False, align=0),
        "out": Given("m n", contiguous=False, align=0, new=True),
        "bias": Given("n", contiguous=False, align=0, optional=True),
        SCALES[0]: Given(f"m k/{BLOCK}", "float32", contiguous=False, align=0, optional=True),
        SCALES[1]: Given(f"k/{BLOCK} n/{BLOCK}", "float32", contiguous=False, align=0, optional=True),
    }

    def __init__(self, method: GemmMethod = "auto", order: Callable | None = None, *, sms: int | None = None):
        one_of("Gemm", "method", method, ("auto", *METHODS))
        super().__init__(sms)
        self.method, self.order = method, _device_function(order)

    @renamed(a="x", b="w")
    def __call__(
        self,
        x: ArrayT,
        w: AnyArray,
        out: ArrayT | None = None,
        *,
        bias: AnyArray | None = None,
        activation: Activation | None = None,
        scales: tuple[AnyArray, AnyArray] | None = None,
        stream: AnyStream | None = None,
    ) -> ArrayT:
        """Enqueue ``out = activation(x @ w + bias)``. -> out

        Arguments, result, bits, capture and errors are those of `matmul`.
        """
        arrays = {"x": x, "w": w, "out": out, "bias": bias}
        return self._product(arrays, scales, activation, stream)

    def _compute(self, gpu, x, w, **others):
        return bind_product(Problem(x, w, **others), gpu, self.method, self.order)


def _device_function(order):
    """The `order` of a Gemm, for kernels."""
    if order is None:
        return None
    function = getattr(order, "py_func", order)
    if not callable(function):
        raise TypeError(f"Gemm: order is {shown(order)}; it must be a function (turn, n_m, n_n) -> (m, n)")
    return order if order is not function else cuda.jit(device=True)(function)


def bind_product(problem, gpu, method="auto", order=None, keeps_arrays=False):
    """-> run(stream), which computes a Problem of arrays of `gpu.arrays`, by a method and in an order as in
    Gemm; ``run._launch`` is its launch. The arrays have been checked, and the caller keeps them alive, unless
    it `keeps_arrays`. ValueError if no method can compute it."""
    if not problem.out.size:
        return nothing
    usual = ["sm90"] if problem.scales else ["simt"] if gpu.arrays.ndarray is np.ndarray else [*METHODS]
    method = chosen("Gemm", METHODS, method, usual, problem, gpu)
    run = METHODS[method](problem, gpu, order=order)
    if not (keeps_arrays or method == "sm90"):  # whose arguments are its tensor maps
        run._launch.forget_arrays()
    return run


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


@renamed(a="x", b="w")
def matmul(
    x: ArrayT,
    w: AnyArray,
    out: ArrayT | None = None,
    *,
    bias: AnyArray | None = None,
    activation: Activation | None = None,
    scales: tuple[AnyArray, AnyArray] | None = None,
    stream: AnyStream | None = None,
    method: GemmMethod = "auto",
    sms: int | None = None,
) -> ArrayT:
    """Enqueue ``out = activation(x @ w + bias)`` on this rank's GPU alone. -> out

    x, w        (M, K) and (K, N), of one dtype: bfloat16, float16, float32, float64, an integer, or
                float8_e4m3fn with `scales`. M, N and K may be 0. Any strides of whole elements, so a weight
                (N, K) is given as its .T. Rows, or columns, that are contiguous and begin at multiples of 16
                bytes are computed fastest
    out         (M, N), any strides, apart from all others. bfloat16, float16 or float32 for operands of these
                two or float8, any integer for integers, else the operands' dtype. Default: a new array of x's
                kind and dtype, of float8 bfloat16
    bias        (N,), added to each row; of out's dtype, or float32 where out is bfloat16 or float16
    activation  None, "relu", "gelu" (exact, by erf) or "silu", as in PyTorch; None or "relu" for integers
    scales      of float8: those of x, (M, ceil(K / 128)), one for 128 of K of a row; and those of w,
                (ceil(K / 128), ceil(N / 128)), one for 128 of K by 128 columns. float32, with strides of 0 or
                more. Of a weight w.T, give scales.T. One scale for all: ``numpy.broadcast_to``. See
                docs/float8.md
    stream      default: PyTorch's current one if any array is a tensor on a GPU, else the World's, or CuPy's
                current one without a World. It is not ordered with other streams
    method      "auto", the first of these that can compute the product (on the emulator "simt"), or
                  sm90  wgmma and the TMA: compute capability 9.0, bfloat16 or float16, contiguous rows or
                        columns that begin at multiples of 16 bytes; float8, where rows of x and columns of w
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
    return gemm(x, w, out, bias=bias, activation=activation, scales=scales, stream=stream)


def kept(kind, method, sms):
    """-> the Gemm, or another `kind` of Product, of that method and `sms` that calls without an object use"""
    world, key = current(), (kind, method, checked_sms(kind._who, sms))
    found = _without_world if world is None else world.kept
    if key not in found:
        found[key] = kind(method, sms=sms)
    return found[key]


_without_world = {}


class Alone:
    """What `Declared` needs of a World, where there is none: CuPy's current GPU. A stream of None is CuPy's
    current one."""

    def __init__(self, cupy):
        self.name, self.finalized, self.n_ranks, self.stream = "cupy", False, 1, None
        self.xp, self.backend, self.runtime = cupy, self, cupy.cuda.runtime

    def address(self, array):
        return array.data.ptr

    def synchronize(self):
        self.runtime.deviceSynchronize()

    def on_its_stream(self, run):
        """-> `run`, a call that is bound, for streams as above"""
        return lambda stream: run(self.xp.cuda.get_current_stream() if stream is None else stream)

    def capture_of(self, stream):
        """True or None: that is not known better."""
        return bool(self.runtime.streamIsCapturing(self._handle(stream))) or None

    def follow(self, later, earlier):
        """Like that of a World's backend."""
        later, earlier = self._handle(later), self._handle(earlier)
        captures = self.runtime.streamIsCapturing
        if later != earlier and not captures(later) and not captures(earlier):
            event = self.xp.cuda.Event(disable_timing=True)
            self.runtime.eventRecord(event.ptr, earlier)
            self.runtime.streamWaitEvent(later, event.ptr)

    def _handle(self, stream):
        return address_of_stream(self.xp.cuda.get_current_stream() if stream is None else stream)


@functools.cache
def _alone():
    if gpus.n_gpus() == 0:
        raise RuntimeError("Gemm: there is no GPU, and no World to emulate one. Call shmemkit.init() first")
    return Alone(_cupy())


def gpu_of(world):
    """-> the Gpu on which a World computes, or CuPy's current one"""
    backend = world.backend
    if backend.name == "emulator":
        return Gpu(backend.compute_capability, backend.multiprocessors, backend.block_shared, np)
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
