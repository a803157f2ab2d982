"""Arithmetic of one instruction or a few, for kernels: Python's operators become longer code."""

import numpy as np

from shmemkit.compiler.ptx import asm, gpu, types

from ..emulator import current_thread, from_scalar


def exp2(x):
    """2 ** x of a float32, with a relative error of 2**-22; 0 where that is below 2**-126."""
    current_thread("exp2")
    with np.errstate(all="ignore"):
        return np.exp2(np.float32(x))


def reciprocal(x):
    """1 / x of a float32, with a relative error of 2**-23; 0 of infinities, infinite of less than 2**-126."""
    current_thread("reciprocal")
    with np.errstate(all="ignore"):
        return np.float32(1) / np.float32(x)


def divided_by(x, y):
    """x // y of two uint32."""
    current_thread("divided_by")
    return from_scalar(np.uint32(x) // np.uint32(y))


_exp2 = asm("ex2.approx.ftz.f32 $0, $1;", types.float32, (types.float32,), pure=True)
_reciprocal = asm("rcp.approx.ftz.f32 $0, $1;", types.float32, (types.float32,), pure=True)
_divide = asm("div.u32 $0, $1, $2;", types.uint32, (types.uint32,) * 2, pure=True)


@gpu(exp2)
def _(x):
    return lambda x: _exp2(types.float32(x))


@gpu(reciprocal)
def _(x):
    return lambda x: _reciprocal(types.float32(x))


@gpu(divided_by)
def _(x, y):
    return lambda x, y: _divide(types.uint32(x), types.uint32(y))
