"""libdevice, half precision, records and widths on the emulator, beyond the programs of numba_features.py."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, from_dtype, types
from numba.cuda import bf16, fp16
from numba.cuda.libdevicefuncs import functions

import shmemkit as sk

TABLE = {name.removeprefix("__nv_"): value for name, value in functions.items()}
numbers = st.floats(-1e6, 1e6, width=32)


@pytest.fixture(autouse=True)
def untyped(monkeypatch):
    """Kernels here look at the types of results, which Numba does not compile."""
    monkeypatch.setenv("SHMEMKIT_TYPING", "0")


def call(function, *arguments, dtype="f8"):
    """What a kernel gets from it."""

    @cuda.jit
    def kernel(out):
        result = function(*arguments)
        if type(result) is tuple:
            out[: len(result)] = result
        else:
            out[0] = result

    out = np.zeros(2, dtype)
    with sk.init("emulator"):
        kernel[1, 1](out)
    return out


@pytest.mark.parametrize("name", TABLE)
def test_each_function_of_libdevice_is_there(name):
    result, parameters = TABLE[name]
    given = [0.5 if isinstance(p.ty, types.Float) else 1 for p in parameters if not p.is_ptr]
    out = call(getattr(cuda.libdevice, name), *given)
    assert not np.isnan(out).any() or name in ("acosh", "acoshf", "erfcinv")


REFERENCE = {
    "sin": np.sin, "cosf": np.cos, "expf": np.exp, "tanh": np.tanh, "cbrt": np.cbrt, "hypot": np.hypot,
    "fmodf": np.fmod, "atan2": np.arctan2, "floorf": np.floor, "rint": np.rint, "fmax": np.fmax,
    "log1p": np.log1p, "rsqrt": lambda x: 1 / np.sqrt(x), "erff": np.vectorize(math.erf),
    "tgamma": np.vectorize(math.gamma),
    "normcdf": lambda x: (1 + math.erf(x / math.sqrt(2))) / 2,
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("x, y", [(0.25, 3.0), (1.5, 0.75), (4.0, 2.5)])
def test_functions_of_floats(name, x, y):
    n = len(TABLE[name][1])
    expected = REFERENCE[name](*(x, y)[:n])
    single = str(TABLE[name][0]) == "float32"
    np.testing.assert_allclose(
        call(getattr(cuda.libdevice, name), *(x, y)[:n])[0], expected, 1e-7 if single else 1e-14
    )


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("kind, dtype", [("f", np.float32), ("d", np.float64)])
@given(a=numbers, b=numbers)
@examples(30)
def test_directed_rounding(operation, kind, dtype, a, b):
    if f"{kind}{operation}_rn" not in TABLE:  # dsub
        return
    a, b = Fraction(a), Fraction(b) or Fraction(1)
    exact = {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b}[operation]
    near, down, up, zero = (
        call(getattr(cuda.libdevice, f"{kind}{operation}_{mode}"), float(a), float(b))[0]
        for mode in ("rn", "rd", "ru", "rz")
    )
    assert down <= exact <= up and near in (down, up) and abs(zero) == min(abs(down), abs(up))
    if down != up:
        assert np.nextafter(dtype(down), dtype(np.inf)) == up


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
@examples(30)
def test_integer_functions(a, b):
    lib = cuda.libdevice
    assert call(lib.mulhi, a, b)[0] == a * b >> 32 and call(lib.hadd, a, b)[0] == (a + b) >> 1
    unsigned = a % 2**32
    assert call(lib.clz, a)[0] == 32 - unsigned.bit_length() and call(lib.popc, a)[0] == unsigned.bit_count()
    assert call(lib.brev, a, dtype="i8")[0] % 2**32 == int(f"{unsigned:032b}"[::-1], 2)


@pytest.mark.parametrize(
    "module, dtype, to_half, name",
    [(fp16, np.float16, "__float2half", "half"), (bf16, ml_dtypes.bfloat16, "float2bfloat16", "bfloat16")],
)
@given(x=st.floats(-70000, 70000, width=32), y=st.floats(-100, 100, width=32))
@examples(30)
def test_half_precision(module, dtype, to_half, name, x, y):
    with np.errstate(over="ignore"):
        nearest = dtype(np.float32(x))
    down, up, near = (call(getattr(module, f"{to_half}_{m}"), x)[0] for m in ("rd", "ru", "rn"))
    assert down <= np.float32(x) <= up and near == nearest
    a, b = dtype(y), dtype(y / 3)
    for function, expected in ((module.hadd, a + b), (module.hmul, a * b), (module.hmax, max(a, b))):
        np.testing.assert_array_equal(call(function, y, float(b))[0], float(expected))
    assert call(module.hlt, y, float(b))[0] == (a < b)


pair = np.dtype([("a", "i4"), ("b", "f4")])
packed = np.dtype([("flag", "i1"), ("value", "f8"), ("part", pair, 2)])


@pytest.mark.parametrize("races", [False, True])
def test_records_of_any_layout(races):
    @cuda.jit
    def kernel(x, out):
        i = cuda.threadIdx.x
        x[i].flag = i - 1
        x[i].value = x[i].flag * 0.5
        x[i].part[1].a = 40000 * i
        x[i].part[0] = x[i].part[1]
        out[i] = x[i].part[0].a + x[i]["part"]["a"][1]

    def main():
        sk.init()
        x, out = np.zeros(3, packed), np.zeros(3)
        kernel[1, 3](x, out)
        return x, out

    ((x, out),) = sk.emu.run(main, 1, races=races)
    np.testing.assert_array_equal(x["flag"], [-1, 0, 1])
    np.testing.assert_array_equal(x["value"], [-0.5, 0, 0.5])
    np.testing.assert_array_equal(out, [0, 80000, 160000])


def races_of(kernel):
    def main():
        sk.init()
        kernel[1, 64](np.zeros(1, pair))

    sk.emu.run(main, 1, races=True)


def test_threads_may_write_different_fields():
    @cuda.jit
    def kernel(x):
        if cuda.threadIdx.x == 0:
            x[0].a = 1
        elif cuda.threadIdx.x == 32:
            x[0].b = 1

    races_of(kernel)


def test_threads_race_for_one_field():
    @cuda.jit
    def kernel(x):
        if cuda.threadIdx.x % 32 == 0:
            x[0].a = cuda.threadIdx.x

    with pytest.raises(sk.emu.RaceError, match=r"x\[0\]\.a = cuda"):
        races_of(kernel)


def test_a_field_that_is_not_there():
    @cuda.jit
    def kernel(x):
        x[0].c = 1

    with sk.init("emulator"), pytest.raises(sk.emu.EmulatorError, match="have no field 'c'"):
        kernel[1, 1](np.zeros(1, pair))


@pytest.mark.parametrize("dtype", "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split())
@pytest.mark.parametrize("races", [False, True])
def test_widths(dtype, races):
    bits, cast = np.dtype(dtype).itemsize * 8, getattr(np, dtype)

    @cuda.jit(device=True)
    def zeros_before(x):
        return cuda.clz(x)

    @cuda.jit
    def kernel(x, n, out):
        shared = cuda.shared.array(1, cast)
        shared[0] = x[0]
        value = x[0]
        out[0], out[1], out[2] = zeros_before(value), zeros_before(shared[0]), cuda.clz(cast(1))
        out[3], out[4], out[5] = cuda.popc(x[1]), cuda.clz(x[0] + x[0]), cuda.clz(n)

    def main():
        sk.init()
        x, out = np.array([1, 0], dtype), np.zeros(6)
        x[1:] = np.invert(x[1:])
        kernel[1, 1](x, np.int16(1), out)
        return out

    (out,) = sk.emu.run(main, 1, races=races)
    np.testing.assert_array_equal(out, [bits - 1, bits - 1, bits - 1, bits, 62, 15])


record_type = from_dtype(pair)


def test_signatures_of_records_and_arrays():
    @cuda.jit([types.void(record_type[:], types.int8[:, :]), types.void(record_type[:], types.float32[:, :])])
    def kernel(x, y):
        y[0, 0] = x[0].a

    for dtype in ("i1", "f4"):
        y = np.zeros((1, 1), dtype)
        with sk.init("emulator"):
            kernel[1, 1](np.ones(1, pair), y)
        assert y == 1
    with sk.init("emulator"), pytest.raises(TypeError, match="its signature takes"):
        kernel[1, 1](np.ones(1, pair), np.zeros((1, 1)))
