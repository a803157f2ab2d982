"""Arithmetic of emulated kernels against Numba's compiler for the CPU, which types in the same way."""

import math

import numba
import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

import shmemkit as sk

SCALE, TABLE = 0.1, (0.5, 3)


def hash_of(x, y, f, g, alpha):
    h = x
    for _ in range(20):
        h = h * 6364136223846793005 + y
    return h >> 17


def shifted_product(x, y, f, g, alpha):
    return (x * y) >> 3


def product_in_a_variable(x, y, f, g, alpha):
    product = x * y
    product -= y
    return product // 1000


def comparison(x, y, f, g, alpha):
    if x * y < x + y:
        return 1
    return 2


def mean(x, y, f, g, alpha):
    return (x + y) // 2


def remainder_of_a_shift(x, y, f, g, alpha):
    return (x << 7) % 1001


def power(x, y, f, g, alpha):
    return (x**5) >> 2


def quotients(x, y, f, g, alpha):
    return x // y * 7 + x % y


def true_quotient(x, y, f, g, alpha):
    return x / y


def quotient_of_product(x, y, f, g, alpha):
    return x * x / 3


def in_place(x, y, f, g, alpha):
    x //= y
    x *= 31
    x %= 1000
    return x


def conditional(x, y, f, g, alpha):
    return (x * x if y > 0 else x + 1) >> 1


def literal(x, y, f, g, alpha):
    return f * 0.1 + g


def argument(x, y, f, g, alpha):
    return f * alpha


def of_a_module(x, y, f, g, alpha):
    return f * SCALE * TABLE[0]


def of_float32_alone(x, y, f, g, alpha):
    return f * g + g


def accumulated(x, y, f, g, alpha):
    total = 0.0
    for _ in range(5):
        total += f
    return total


def with_math(x, y, f, g, alpha):
    return math.sqrt(f) * g + math.fabs(g)


def with_float(x, y, f, g, alpha):
    return float(f) * g + float(x)


def quotient_of_floats(x, y, f, g, alpha):
    return f / g + f / 3


def float_over_integer(x, y, f, g, alpha):
    return f / y


WHOLE = [hash_of, shifted_product, product_in_a_variable, comparison, mean, remainder_of_a_shift, power]
WHOLE += [quotients, true_quotient, quotient_of_product, in_place, conditional]
FLOATS = [literal, argument, of_a_module, of_float32_alone, accumulated, with_math, with_float]
FLOATS += [quotient_of_floats, float_over_integer]
integers = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), -7, -1, 0, 1, 2, 3, 2**63 - 1])
floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=0, max_value=2.0**60)


def emulated(function, *arguments):
    device = cuda.jit(function)

    @cuda.jit
    def kernel(x, y, f, g, alpha, out):
        out[0] = device(x[0], y[0], f[0], g[0], alpha)

    out = np.zeros(1, "f8" if function in FLOATS or "true" in function.__name__ else "i8")
    if function is quotient_of_product:
        out = np.zeros(1)
    x, y, f, g, alpha = arguments
    with sk.init("emulator"):
        kernel[1, 1](np.array([x]), np.array([y]), np.array([f], "f4"), np.array([g], "f4"), alpha, out)
    return out[0]


compiled = {f: numba.njit(f, error_model="numpy") for f in WHOLE + FLOATS}


@pytest.mark.every(4)
@pytest.mark.parametrize("function", WHOLE)
@given(x=integers, y=integers)
@examples(200)
def test_integers(function, x, y):
    if (x, y) == (-(2**63), -1):
        return  # C's undefined behaviour
    numbers = x, y, np.float32(0.5), np.float32(0.25), 0.5
    np.testing.assert_array_equal(emulated(function, *numbers), compiled[function](*numbers))


@pytest.mark.every(4)
@pytest.mark.parametrize("function", FLOATS)
@given(f=floats, g=floats, y=st.integers(-5, 5), alpha=st.floats(-1e9, 1e9))
@examples(200)
def test_floats(function, f, g, y, alpha):
    numbers = 3, y, np.float32(f), np.float32(g), alpha
    np.testing.assert_array_equal(emulated(function, *numbers), compiled[function](*numbers))


@pytest.mark.parametrize("function", [math.log, math.sqrt, math.acos, math.exp, math.floor])
@pytest.mark.parametrize("x", [-2.0, 0.0, 1e5, math.inf, math.nan])
def test_math_never_raises(function, x):
    """Outside of the domain, too, as on a GPU."""

    @cuda.jit
    def kernel(x, out):
        out[0] = function(x)

    out, numpy = np.zeros(1), {math.acos: np.arccos}.get(function) or getattr(np, function.__name__)
    with sk.init("emulator"):
        kernel[1, 1](x, out)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(out[0], numpy(x), rtol=1e-15)


def test_lines_of_a_kernel_that_is_compiled_anew():
    """A report names the line, and shows it."""

    @cuda.jit
    def kernel(x, n):
        y = x[0] // n
        x[5 + y] = 1  # outside

    with (
        sk.init("emulator"),
        pytest.raises(sk.emu.OutOfBoundsError, match=r"arithmetic\.py:\d+: x\[5 \+ y\] = 1"),
    ):
        kernel[1, 1](np.zeros(3, "i8"), 0)


def test_a_kernel_without_a_source():
    namespace = {"cuda": cuda}
    exec("def kernel(x, out):\n    out[0] = x[0] * 0.1\n    out[1] = x[1] // 2\n", namespace)
    out = np.zeros(2)
    with sk.init("emulator"):
        cuda.jit(namespace["kernel"])[1, 1](np.array([0.3, 7], "f4"), out)
    assert list(out) == [np.float64(np.float32(0.3)) * 0.1, 3]


@pytest.mark.parametrize("scale", [2, 5])
def test_functions_of_one_factory_keep_their_constants(scale):
    def scaled(x, n):
        return x * scale // n

    assert emulated_with(scaled, 7, 3) == 7 * scale // 3


def emulated_with(function, x, n):
    device, out = cuda.jit(function), np.zeros(1, "i8")

    @cuda.jit
    def kernel(x, n, out):
        out[0] = device(x, n)

    with sk.init("emulator"):
        kernel[1, 1](x, n, out)
    return out[0]


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "uint64"])
def test_integers_by_zero_are_zero(dtype):
    @cuda.jit
    def kernel(x, out):
        out[0], out[1] = x[0] // x[1], x[0] % x[1]

    out = np.ones(2)
    with sk.init("emulator"):
        kernel[1, 1](np.array([7, 0], dtype), out)
    assert list(out) == [0, 0]
