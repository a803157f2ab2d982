"""Integers of emulated kernels against what Numba's typing rules and 64-bit machine arithmetic give."""

import importlib
import operator

import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, types
from numba.cuda.target import CUDATypingContext

import shmemkit as sk
from shmemkit.emu.cuda_integers import CASTS, Int32, Unsigned, from_scalar, wrap
from shmemkit.emu.device_arrays import device_view

DTYPES = "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
BINARY = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
BITWISE = (operator.and_, operator.or_, operator.xor)
SHIFTS = (operator.lshift, operator.rshift)
few = examples(200)


@pytest.fixture(scope="module")
def numba_type():
    """(operator, argument types) -> the type of the result, as Numba compiles it for the GPU."""
    context = CUDATypingContext()
    context.refresh()

    def resolve(op, *arguments):
        given = tuple(getattr(types, a) for a in arguments)
        return context.resolve_function_type(context.resolve_value_type(op), given, {}).return_type

    return resolve


def to_64_bits(value, signed):
    value = int(value) & (2**64 - 1)
    return value - 2**64 if signed and value >> 63 else value


def by_machine(op, a, b, result_type):
    """`op` in the machine: both operands converted to the result's type, the result cut to 64 bits."""
    signed = result_type.signed
    b = b if op in SHIFTS else to_64_bits(b, signed)
    return to_64_bits(op(to_64_bits(a, signed), b), signed)


def numbers(dtype):
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    return st.integers(low, high) | st.sampled_from([low, low + 1, 0, 1, high - 1, high])


@st.composite
def pairs(draw):
    a, b = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    return a, draw(numbers(a)), b, draw(numbers(b))


@given(pairs(), st.sampled_from(BINARY + BITWISE))
@examples(400)
def test_arithmetic_is_that_of_numba(numba_type, pair, op):
    left, a, right, b = pair
    x, y = CASTS[left](a), CASTS[right](b)
    result = numba_type(op, left, right)
    if op in (operator.floordiv, operator.mod) and to_64_bits(b, result.signed) == 0:
        return
    mine = op(x, y)
    expected = by_machine(op, a, b, result)
    assert (type(mine) is Unsigned) == (not result.signed)
    if type(x) is int and type(y) is int:  # signed values are exact until they are stored or cast
        mine = to_64_bits(mine, True)
    assert int(mine) == expected


@given(st.sampled_from(DTYPES), st.data(), st.sampled_from(SHIFTS), st.integers(0, 63))
@few
def test_shifts_have_the_type_of_the_left_operand(dtype, data, op, by):
    value = data.draw(numbers(dtype))
    mine = op(CASTS[dtype](value), by)
    signed = dtype.startswith("int")
    assert (type(mine) is Unsigned) == (not signed)
    assert to_64_bits(mine, signed) == to_64_bits(op(value, by), signed)


@pytest.mark.parametrize("op", [operator.neg, operator.invert, abs, operator.pos])
@given(data=st.data())
@few
def test_unary(op, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    value = data.draw(numbers(dtype))
    mine = op(CASTS[dtype](value))
    signed = dtype.startswith("int")
    assert type(mine) is (int if signed else Unsigned)
    assert to_64_bits(mine, signed) == to_64_bits(op(value), signed)


@given(st.sampled_from(DTYPES), st.integers(-(2**70), 2**70))
@few
def test_casts_and_stores_keep_the_low_bits(dtype, value):
    bits = np.dtype(dtype).itemsize * 8
    reference = np.array([value & (2**bits - 1)], f"u{bits // 8}").view(dtype)[0]
    cast = wrap(value, np.dtype(dtype))
    assert cast == reference and type(cast) is type(from_scalar(reference))
    assert CASTS[dtype](value) == reference
    array = device_view(np.zeros(3, dtype))
    array[1] = value
    assert array[1] == reference and array[0] == array[2] == 0


@given(st.sampled_from(DTYPES), st.data())
@few
def test_loads_are_64_bits_wide(dtype, data):
    values = data.draw(st.lists(numbers(dtype), min_size=2, max_size=5))
    array = device_view(np.array(values, dtype))
    loaded = [array[i] for i in range(len(values))]
    assert [int(x) for x in loaded] == values
    assert all(type(x) is (Unsigned if dtype.startswith("u") else int) for x in loaded)
    rows = device_view(np.array([values, values], dtype))
    assert int(rows[1, 0]) == int(rows[1][0]) == int(rows[-1, 0]) == values[0]
    assert type(rows[1, 0]) is type(loaded[0]) is type(rows[1][0])


def test_examples():
    u, i = CASTS["uint64"], CASTS["int64"]
    assert u(3) - u(5) == 2**64 - 2 and type(u(3) - u(5)) is Unsigned
    assert u(3) - i(5) == -2 and i(3) - u(5) == -2 and type(u(3) - i(5)) is int
    assert u(2**64 - 1) + 1 == 0, "a literal is signed"
    assert 1 + u(2**64 - 1) == 0
    assert u(2**64 - 1) // 2 == -1 and u(2**64 - 1) // u(2) == 2**63 - 1
    assert CASTS["int8"](100) + CASTS["int8"](100) == 200
    assert CASTS["uint32"](-1) == 2**32 - 1 and CASTS["uint8"](3.9) == 3
    assert u(7) / 2 == 3.5 and u(2) * 0.5 == 1.0 and u(1) == 1.0
    assert -1 < u(0) < 1


def test_int32_masks():
    assert Int32(2**32 - 1) == -1 and Int32(1 << 31) == -(2**31) and Int32(5) == 5


@cuda.jit
def narrow_sums(x, y, out):
    i = cuda.grid(1)
    out[i, 0] = x[i] + y[i]
    out[i, 1] = x[i] - y[i]
    out[i, 2] = np.uint32(x[i]) >> 1
    out[i, 3] = types.int8(x[i] + y[i])
    out[i, 4] = (x[i] - y[i]) // 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_a_kernel(dtype):
    """The same through a launch: arrays, np.uint32() and types.int8() of a kernel's globals."""
    edges = np.array([np.iinfo(dtype).min, 0, 1, 5, np.iinfo(dtype).max], dtype)
    x, y = (a.ravel() for a in np.meshgrid(edges, edges))
    out = np.zeros((x.size, 5), "int64")
    wide = np.uint64 if dtype.startswith("u") else np.int64

    with sk.init("emulator"):
        narrow_sums[5, 5](x, y, out)

    a, b = x.astype(wide), y.astype(wide)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out[:, 0], (a + b).astype("int64"))
        np.testing.assert_array_equal(out[:, 1], (a - b).astype("int64"))
        np.testing.assert_array_equal(out[:, 2], a.astype("uint32") >> 1)
        np.testing.assert_array_equal(out[:, 3], (a + b).astype("int8"))
        if dtype != "int64":  # signed overflow before a division is the documented exception
            halves = a - b
            np.testing.assert_array_equal(out[:, 4], (halves.astype("int64") // 2))


def test_numba_types_by_each_of_its_names():
    """Once something has imported numba.types, ``from numba import types`` is that module, with that name."""
    namespace = {"cuda": cuda, "types": importlib.import_module("numba.types")}
    exec("def cast(x, out):\n    out[0] = types.int8(x[0])\n", namespace)
    out = np.zeros(1, "int64")
    with sk.init("emulator"):
        cuda.jit(namespace["cast"])[1, 1](np.full(1, 200), out)
    assert out[0] == 200 - 256
