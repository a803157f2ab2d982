"""float8_e4m3fn and float8_e5m2 in kernels, which hold them in integers.

What is rounded to float8 saturates, as PTX's cvt.rn.satfinite does: what is larger than 448 or 57344, and an
infinity, becomes that number, with its sign. A NaN becomes 0x7F. The instruction needs compute capability
8.9. Some integer instructions can take its place, so that all GPUs have float8, with the same bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from shmemkit.compiler.ptx import asm, extend_half, gpu, gpu_function, types
from shmemkit.support.dtypes import numpy_dtype

from ..emulator import current_thread, from_scalar


class Float8(NamedTuple):
    """Bits of the mantissa, bias of the exponent, the largest number."""

    mantissa: int
    bias: int
    most: float


FLOAT8 = {"float8_e4m3fn": Float8(3, 7, 448.0), "float8_e5m2": Float8(2, 15, 57344.0)}


def saturated(numbers, name):
    """float32 `numbers` as float8, for the emulator."""
    nan, most = np.isnan(numbers), FLOAT8[name].most
    found = np.clip(numbers, -most, most).astype(numpy_dtype(name))
    found.view(np.uint8)[nan] = 0x7F
    return found


@functools.cache
def four_e4m3(by_instruction):
    """-> ``pack(a, b, c, d)``, for kernels, by any thread: four float32 as float8_e4m3fn, in an uint32, the
    first one in its lowest byte. The instruction needs compute capability 8.9."""

    def pack(a, b, c, d):
        current_thread("pack")
        return from_scalar(saturated(np.array([a, b, c, d], np.float32), "float8_e4m3fn").view(np.uint32)[0])

    pair = asm(
        _INSTRUCTION if by_instruction else _INSTEAD, types.uint32, (types.float32, types.float32), pure=True
    )

    @gpu(pack)
    def typed(a, b, c, d):
        return lambda a, b, c, d: types.uint32(pair(c, d) << types.uint32(16) | pair(a, b))

    return pack


# ---- on the GPU

_float_of_e4m3 = asm(  # exponent and mantissa in those of a float32: a number that is 2**120 times too small
    "{ .reg .b32 a; .reg .f32 f, g; .reg .pred p; shl.b32 a, $1, 24; shr.s32 a, a, 4; "
    "and.b32 a, a, 0x87ffffff; mov.b32 f, a; mul.f32 f, f, 0f7B800000; "  # 2**120
    "abs.f32 g, f; setp.eq.f32 p, g, 0f43F00000; selp.f32 $0, 0f7FC00000, f, p; }",  # 480 stands for NaN
    types.float32,
    (types.uint32,),
    pure=True,
)


@gpu_function
def _widen_e4m3(word):
    return _float_of_e4m3(types.uint32(word))


@gpu_function
def _widen_e5m2(word):
    """It is the upper half of a float16."""
    return extend_half(types.uint16(types.uint32(word) << types.uint32(8)))


def _narrowing(name, to, number):
    """-> PTX: `to`, a register of 32 bits, gets the bits of the float8 nearest to the float32 `number`.

    The last place of `places` is that of the smallest float8: to add it to a number that becomes subnormal
    rounds this, and leaves its bits in those of the sum."""
    mantissa, bias, most = FLOAT8[name]
    dropped = 23 - mantissa
    limits = most, 2.0 ** (1 - bias), 2.0 ** (dropped + 1 - bias)
    largest, normal, places = (f"{bits:08X}" for bits in np.array(limits, np.float32).view(np.uint32))
    return (
        "{ .reg .b32 a, b, c; .reg .f32 f, g; .reg .pred p; "
        f"abs.f32 f, {number}; min.f32 f, f, 0f{largest}; "
        f"add.rn.f32 g, f, 0f{places}; mov.b32 c, g; sub.u32 c, c, 0x{places}; "
        f"mov.b32 a, f; shr.u32 b, a, {dropped}; and.b32 b, b, 1; add.u32 a, a, b; "
        f"add.u32 a, a, {(1 << dropped - 1) - 1}; shr.u32 a, a, {dropped}; "
        f"sub.u32 a, a, {127 - bias << mantissa}; "
        f"setp.lt.f32 p, f, 0f{normal}; selp.b32 a, c, a, p; "
        f"mov.b32 b, {number}; shr.u32 b, b, 24; and.b32 b, b, 0x80; or.b32 a, a, b; "
        f"setp.nan.f32 p, {number}, {number}; selp.b32 {to}, 0x7f, a, p; }}"
    )


def conversions_of_float8(name):
    """-> widen(word), narrow(number) -> word, for kernels on GPUs, of the lowest byte of a word"""
    round_to_float8 = asm(_narrowing(name, "$0", "$1"), types.uint32, (types.float32,), pure=True)

    @gpu_function
    def narrow(number):
        return types.uint64(round_to_float8(number))

    return _widen_e4m3 if name == "float8_e4m3fn" else _widen_e5m2, narrow


_INSTRUCTION = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h; }"
_INSTEAD = (
    f"{{ .reg .b32 x, y; {_narrowing('float8_e4m3fn', 'x', '$1')} "
    f"{_narrowing('float8_e4m3fn', 'y', '$2')} shl.b32 y, y, 8; or.b32 $0, x, y; }}"
)
