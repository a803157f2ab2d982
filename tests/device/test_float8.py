"""Sums, products, maxima and minima of float8, word by word: every pair of values, rounding, saturation; on
the emulator, and as PTX. (test_gpu_float8.py has the same on GPUs.)"""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, types
from ptx import AMPERE, HOPPER, compile_ptx, instructions, resources
from ptx_in_python import Gpu
from reduced import combined, float8

import shmemkit as sk
from shmemkit.compiler.ptx import GPU
from shmemkit.device import reduction
from shmemkit.device.cuda.float8 import four_e4m3

DTYPES = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OPS = ("sum", "prod", "max", "min", "avg")


def every_pair(dtype):
    """-> two arrays of all pairs of the 256 values"""
    values = np.arange(256, dtype="uint8").view(dtype)
    return [np.ascontiguousarray(part) for part in (np.repeat(values, 256), np.tile(values, 256))]


def reducing(op, dtype):
    first, add, result = reduction(op, dtype.name)

    @cuda.jit
    def kernel(xs, out):
        """xs: uint64 (arrays, words); out: uint64 (words,)"""
        i = cuda.grid(1)
        while i < out.size:
            total = first(xs[0, i])
            for k in range(1, xs.shape[0]):
                total = add(total, xs[k, i])
            out[i] = result(total, xs.shape[0])
            i += cuda.gridsize(1)

    return kernel


def reduced(op, arrays, module=np, stream=0):
    """What `module`, CuPy or NumPy, and a kernel on `stream` make of them."""
    words = module.asarray(np.array([array.view("uint64") for array in arrays]))
    out = module.zeros(words.shape[1], "uint64")
    reducing(op, arrays[0].dtype)[8, 32, stream](words, out)
    return out


def test_the_largest_numbers():
    assert [float(ml_dtypes.finfo(dtype).max) for dtype in DTYPES] == [448, 57344]


@pytest.mark.every(3)
@dtypes
@pytest.mark.parametrize("op", OPS)
def test_every_pair(pes, op, dtype):
    """Among them are sums and products half-way between two values, subnormal ones and too large ones."""

    def main():
        world = sk.init()
        pair = every_pair(dtype)
        out = reduced(op, pair)
        world.synchronize()
        np.testing.assert_array_equal(out.view("uint8"), combined(op, pair).view("uint8"))

    pes(1).run(main)


@dtypes
def test_every_value_is_itself(pes, dtype):
    """Alone, but that infinities saturate and that there is one NaN."""

    def main():
        world = sk.init()
        x = np.arange(256, dtype="uint8").view(dtype)
        out = reduced("sum", [x])
        world.synchronize()
        wide = x.astype("float32")
        finite = np.isfinite(wide)
        assert (out.view("uint8")[finite] == x.view("uint8")[finite]).all()
        assert (out.view("uint8")[np.isnan(wide)] == 0x7F).all()
        largest = float(ml_dtypes.finfo(dtype).max)
        assert (
            out.view(dtype)[np.isinf(wide)].astype("float32") == np.sign(wide[np.isinf(wide)]) * largest
        ).all()

    pes(1).run(main)


@dtypes
def test_they_are_rounded_once(pes, dtype):
    """16 and eight times 0.5 or 0.25: each sum of two would be 16."""
    little = 0.5 if dtype == DTYPES[0] else 1.0

    def main():
        world = sk.init()
        arrays = [np.full(8, 16, dtype)] + [np.full(8, little, dtype)] * 8
        out = reduced("sum", arrays)
        world.synchronize()
        assert (out.view(dtype).astype("float32") == 16 + 8 * little).all()

    assert float8(np.float32([16 + little]), dtype).astype("float32") == 16
    pes(1).run(main)


@dtypes
def test_rounding_half_way(dtype):
    """The reference: half-way between neighbours, the even one; a little beside, the nearer one."""
    values = np.arange(0x7C if dtype == DTYPES[1] else 0x7F, dtype="uint8").view(dtype)
    wide = values.astype("float32")
    for low, high, k in zip(wide, wide[1:], itertools.count(), strict=False):
        middle = (low + high) / np.float32(2)
        beside = [np.nextafter(middle, low), middle, np.nextafter(middle, high)]
        found = float8(np.float32(beside), dtype).view("uint8")
        assert found.tolist() == [k, k + k % 2, k + 1]


def as_floats(operation):
    return lambda *words: np.float32(operation(*(word.view(np.float32) for word in words))).view(np.uint32)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "shr.s32": lambda a, b: (a.view(np.int32) >> np.int32(b)).view(np.uint32),
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "add.u32": np.add,
    "sub.u32": np.subtract,
    "mul.f32": as_floats(np.multiply),
    "add.rn.f32": as_floats(np.add),
    "min.f32": as_floats(np.fmin),
    "abs.f32": as_floats(np.abs),
    "setp.eq.f32": lambda a, b: a.view(np.float32) == b.view(np.float32),
    "setp.lt.f32": lambda a, b: a.view(np.float32) < b.view(np.float32),
    "setp.nan.f32": lambda a, b: np.isnan(a.view(np.float32)),
    "selp.b32": lambda a, b, p: a if p else b,
    "selp.f32": lambda a, b, p: a if p else b,
}


class Conversions(Gpu):
    """Executes instructions on registers of 32 bits, one after another."""

    def run(self, ptx, *given):
        if "float32 of the float16" in ptx:
            return np.uint16(given[0]).view(np.float16).astype(np.float32)
        words = {f"${k}": np.array(x)[()].view(np.uint32) for k, x in enumerate(given, 1)}

        def word(name):
            if name in words:
                return words[name]
            return np.uint32(int(name[2:], 16) if name.startswith(("0f", "0x")) else int(name))

        for line in filter(None, map(str.strip, ptx.strip("{ }").split(";"))):
            name, operands = line.split(None, 1)
            if name != ".reg":
                target, *sources = operands.split(", ")
                with np.errstate(all="ignore"):
                    words[target] = INSTRUCTIONS[name](*map(word, sources))
        return words["$0"].view(np.float32 if "selp.f32 $0" in ptx else np.uint32)


def flat(total):
    return sum(map(flat, total), []) if isinstance(total, tuple) else [total]


def nested(numbers):
    half = len(numbers) // 2
    return (nested(numbers[:half]), nested(numbers[half:])) if half else numbers[0]


@dtypes
def test_the_instructions_convert_as_the_emulator_does(monkeypatch, dtype):
    """All 256 values to float32, and back; float32 half-way between any two, beside that, and anywhere."""
    Conversions(monkeypatch)
    combine = reduction("sum", dtype.name)
    first, result = GPU[combine.first](None), GPU[combine.result](None, None)
    values = np.arange(256, dtype="uint8").view(dtype)
    wide = values.astype("float32")
    widened = [flat(first(word)) for word in values.view("uint64")]
    np.testing.assert_array_equal(np.concatenate(widened), wide)
    numbers = np.unique(wide[np.isfinite(wide)])
    middles = (numbers[1:] + numbers[:-1]) / np.float32(2)
    anywhere = np.random.default_rng(0).integers(0, 1 << 32, 1000, "uint32").view("float32")
    given = [numbers, middles, *(np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)), anywhere]
    given = np.concatenate(
        [*given, np.float32([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1e-30, 449, 1e30])]
    )
    given = np.concatenate([given, np.zeros(-given.size % 8, "float32")])
    words = np.array([result(nested(list(eight)), 1) for eight in given.reshape(-1, 8)], "uint64")
    np.testing.assert_array_equal(words.view("uint8"), float8(given, dtype).view("uint8"))


def packing(by_instruction):
    pack = four_e4m3(by_instruction)

    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        while i < out.size:
            out[i] = pack(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3])
            i += cuda.gridsize(1)

    return kernel


@pytest.mark.parametrize("by_instruction", [False, True])
def test_four_numbers(by_instruction):
    """Half-way between any two, beside that, and special ones."""
    values = np.sort(np.arange(0x7F, dtype="uint8").view(DTYPES[0]).astype("float32"))
    middles = (values[1:] + values[:-1]) / np.float32(2)
    x = np.concatenate([values, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.inf)])
    x = np.concatenate([x, -x, np.float32([np.nan, np.inf, -np.inf, 449, 1e30, 1e-30])])
    x = np.concatenate([x, np.zeros(-x.size % 4)]).astype("float32")

    def main():
        sk.init()
        out = np.zeros(x.size // 4, "uint32")
        packing(by_instruction)[2, 32](x, out)
        sk.current().synchronize()
        np.testing.assert_array_equal(out.view("uint8"), float8(x, DTYPES[0]).view("uint8"))

    sk.emu.run(main, 1)


@pytest.mark.parametrize(
    ("by_instruction", "cc", "count"), [(True, HOPPER, 2), (False, HOPPER, 0), (False, AMPERE, 0)]
)
def test_ptx_of_four_numbers(by_instruction, cc, count):
    """The instruction where it is asked for, and only there."""
    ptx = compile_ptx(packing(by_instruction), (types.float32[::1], types.uint32[::1]), cc)
    assert resources(ptx, cc).spills == resources(ptx, cc).stack == 0
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == count


@pytest.mark.each_value
@dtypes
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["hopper", "ampere"])
def test_ptx(op, dtype, cc):
    """Without the instructions that need compute capability 8.9."""
    ptx = compile_ptx(reducing(op, dtype), (types.uint64[:, ::1], types.uint64[::1]), cc)
    assert resources(ptx, cc).spills == resources(ptx, cc).stack == 0
    assert not [line for line in instructions(ptx) if re.match(r"cvt\..*e[45]m[23]", line)]
