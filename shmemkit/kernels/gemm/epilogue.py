"""What a GEMM does to its results before they are stored: a bias for each column, an activation, rounding."""

import functools
import math

import numpy as np
from numba import cuda

from shmemkit.device.elements import ELEMENTS, element

ACTIVATIONS = (None, "relu", "gelu", "silu")


def inline(function):
    """A device function that is there once for each call, so that constants and tuples reach it."""
    return cuda.jit(device=True, forceinline=True)(function)


@functools.cache
def activating(activation, dtype):
    """-> ``activate(x)``, for kernels, of `dtype`, as PyTorch defines it"""
    wide = np.dtype(dtype).type
    zero, half, one, root_half = wide(0), wide(0.5), wide(1), wide(math.sqrt(0.5))
    largest = wide(math.log(np.finfo(wide).max) - 1) if wide in (np.float32, np.float64) else zero

    @inline
    def identity(x):
        return x

    @inline
    def relu(x):
        return zero if x < zero else x  # NaN stays

    @inline
    def gelu(x):
        return x * half * (one + math.erf(x * root_half))

    @inline
    def silu(x):
        return x / (one + math.exp(min(-x, largest)))  # which is finite

    return {None: identity, "relu": relu, "gelu": gelu, "silu": silu}[activation]


@functools.cache
def finishing(bias_dtype, activation, dtype="float32"):
    """-> ``finish(x, bias, column)``, for kernels: activation(x + bias[column]), all of `dtype`

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

        @inline
        def finish(x, bias, column):
            return activate(x + bias[column])

    return finish
