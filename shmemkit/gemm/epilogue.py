"""The last step of a GEMM before it stores its results: a bias for each column, an activation, rounding."""

import functools
import math
from typing import get_args

import numpy as np
from numba import cuda, types

from shmemkit.compiler.ptx import gpu
from shmemkit.device.cuda.float_storage import ELEMENTS, element
from shmemkit.device.emulator import current_thread
from shmemkit.typing import Activation

ACTIVATIONS = (None, *get_args(Activation))


def inline(function):
    """A device function that is there once for each call, so that constants and tuples reach it."""
    return cuda.jit(device=True, forceinline=True)(function)


def silu(x):
    """x * sigmoid(x), for kernels; where exp(-x) is infinite it is -0, and of -inf NaN, as in PyTorch."""
    current_thread("silu")
    with np.errstate(all="ignore"):
        return x / (1 + np.exp(-x))


@gpu(silu)
def _(x):
    one = np.dtype(x.name).type(1)

    def impl(x):
        return x / (one + math.exp(-x))

    return impl


@functools.cache
def activating(activation, dtype):
    """-> ``activate(x)``, for kernels, of `dtype`, as PyTorch defines it"""
    wide = np.dtype(dtype).type
    zero, half, one, root_half = wide(0), wide(0.5), wide(1), wide(math.sqrt(0.5))

    @inline
    def identity(x):
        return x

    @inline
    def relu(x):
        return zero if x < zero else x  # NaN stays

    @inline
    def gelu(x):
        return x * half * (one + math.erf(x * root_half))

    return {None: identity, "relu": relu, "gelu": gelu, "silu": silu}[activation]


@functools.cache
def finishing(bias_dtype, activation, dtype="float32"):
    """-> ``finish(x, bias, column)``, for kernels: activation(x + bias[column]), computed in `dtype`

    bias_dtype  "bfloat16" or "float16", for a bias that is given as uint16, or any other; None: without one,
                and what is passed is not used
    activation  None, "relu", "gelu" (x * Phi(x), by erf) or "silu" (x * sigmoid(x))
    """
    activate = activating(activation, dtype)
    if bias_dtype is None:

        @inline
        def finish(x, bias, column):
            return activate(x)

    elif bias_dtype in ELEMENTS:
        widen = element(bias_dtype).widen

        @inline
        def finish(x, bias, column):
            return activate(x + widen(bias[column]))

    else:
        number = getattr(types, dtype)  # of integers, signed and unsigned, numba's sum would be a float64

        @inline
        def finish(x, bias, column):
            return activate(number(number(x) + number(bias[column])))

    return finish
