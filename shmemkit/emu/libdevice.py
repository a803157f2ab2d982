"""``cuda.libdevice`` inside emulated kernels.

Names, arguments and results are those of Numba's table. A function of float32 is computed in float64 and
rounded, so that its last digits are better than those of a GPU. Directed rounding is exact.
"""

import ctypes
import ctypes.util
import functools
import math
import statistics
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from shmemkit.compiler.numba_internals import libdevice_functions

from .cuda_integers import CASTS, FLOATS, wrap

_CONVERT = {**CASTS, **FLOATS}
_OF_FLOAT = {"d": np.float64, "f": np.float32}
_int32, _int64, _uint32, _uint64 = (CASTS[name] for name in ("int32", "int64", "uint32", "uint64"))


def rounded(exact, dtype, mode):
    """The Fraction `exact`, not 0, as a float of `dtype`; to nearest (rn), down (rd), up (ru), to 0 (rz)."""
    try:
        near = dtype(float(exact))  # may be rounded twice
    except OverflowError:
        near = dtype(math.inf if exact > 0 else -math.inf)
    options = [near, *(np.nextafter(near, dtype(limit)) for limit in (-math.inf, math.inf))]
    if mode == "rn":
        bits = f"u{near.itemsize}"
        return min(options, key=lambda x: (abs(_fraction(x) - exact), int(_bits(x, bits)) & 1))
    if mode == "rd" or mode == "rz" and exact > 0:
        return max(x for x in options if float(x) <= exact)
    return min(x for x in options if float(x) >= exact)


def _fraction(x):
    """Infinity counts as the power of two after the largest number."""
    if np.isfinite(x):
        return Fraction(float(x))
    return Fraction(2) ** (ml_dtypes.finfo(type(x)).maxexp) * (1 if x > 0 else -1)


def _square_root(x):
    """-> a fraction nearer to the root of `x` than floats can tell, on the right side of them."""
    scale = 1 << 256
    root = math.isqrt(x.numerator * x.denominator * scale * scale)
    exact = root * root == x.numerator * x.denominator * scale * scale
    return Fraction(2 * root + (not exact), 2 * x.denominator * scale)


_EXACT: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "sqrt": lambda a: _square_root(a),
    "fma": lambda a, b, c: a * b + c,
}
_ORDINARY: dict[str, Any] = {**_EXACT, "sqrt": np.sqrt, "rcp": lambda a: type(a)(1) / a}


def exactly(name, dtype, mode, *arguments):
    """The operation `name` on floats of `dtype`, rounded once."""
    with np.errstate(all="ignore"):
        if all(map(np.isfinite, arguments)):
            try:
                exact = _EXACT[name](*(Fraction(float(a)) for a in arguments))
            except (ZeroDivisionError, ValueError):
                exact = 0
            if exact:
                return rounded(exact, dtype, mode)
        return dtype(_ORDINARY[name](*arguments))


def fma(a, b, c):
    """`a`, `b`, `c`: of one dtype."""
    return exactly("fma", type(a), "rn", a, b, c)


def to_integer(x, dtype, mode):
    """The float `x` as an integer of `dtype`, rounded; the nearest one that there is, 0 for NaN."""
    limits, x = np.iinfo(dtype), float(x)
    if math.isnan(x):
        return 0
    if math.isinf(x):
        return int(limits.max if x > 0 else limits.min)
    value = {"rn": round, "rd": math.floor, "ru": math.ceil, "rz": math.trunc}[mode](x)
    return int(min(max(value, int(limits.min)), int(limits.max)))


_SOURCES = {"double": "f8", "float": "f4", "int": "i4", "uint": "u4", "ll": "i8", "ull": "u8"}


def _conversion(source, target, mode):
    if source in ("double", "float"):
        if target in ("double", "float"):
            return lambda x: rounded(Fraction(float(x)), np.float32, mode) if np.isfinite(x) and x else x
        return lambda x: to_integer(x, np.dtype(_SOURCES[target]), mode)
    dtype = np.dtype(_SOURCES[source])
    into = {"double": np.float64, "float": np.float32}[target]
    return lambda x: rounded(Fraction(int(wrap(x, dtype))), into, mode) if x else into(0)


@functools.cache
def _libm(name, n_integers, n_floats):
    """A function of the C library: integers first, then doubles."""
    function = getattr(ctypes.CDLL(ctypes.util.find_library("m")), name)
    function.argtypes = [ctypes.c_int] * n_integers + [ctypes.c_double] * n_floats
    function.restype = ctypes.c_double
    return function


def _of_libm(names, n_integers, n_floats):
    """-> name -> the function, which is looked up when it is called"""
    return {
        name: lambda *arguments, name=name: _libm(name, n_integers, n_floats)(*arguments)
        for name in names.split()
    }


def _erfcx(x):
    if x < 25:
        return math.exp(x * x) * math.erfc(x)
    return (1 - 0.5 / x**2 + 0.75 / x**4) / (x * math.sqrt(math.pi))


def _quantile(p):
    if p in (0, 1):
        return math.copysign(math.inf, p - 0.5)
    return statistics.NormalDist().inv_cdf(p) if 0 < p < 1 else math.nan


def _refined(first, function, slope):
    """x such that ``function(x)`` is what is asked for, from a first guess by steps of Newton."""

    def inverse(y):
        x = first(y)
        for _ in range(2):
            if math.isfinite(x) and slope(x):
                x -= (function(x) - y) / slope(x)
        return x

    return inverse


def _density(x):
    return math.exp(-x * x) * 2 / math.sqrt(math.pi)


_erfinv = _refined(lambda y: _quantile((y + 1) / 2) / math.sqrt(2), math.erf, _density)
_erfcinv = _refined(lambda y: -_quantile(y / 2) / math.sqrt(2), math.erfc, lambda x: -_density(x))


def _ilogb(x):
    if x == 0 or math.isnan(x):
        return -(2**31)
    return 2**31 - 1 if math.isinf(x) else math.frexp(x)[1] - 1


def _remquo(x, y):
    remainder = _libm("remainder", 0, 2)(x, y)
    if math.isnan(remainder) or math.isinf(y):
        return remainder, 0
    quotient = int((Fraction(float(x)) - Fraction(remainder)) / Fraction(float(y)))
    return remainder, (abs(quotient) & 7) * (-1 if quotient < 0 else 1)


def _frexp(x):
    return math.frexp(x) if math.isfinite(x) else (x, 0)


def _ldexp(x, n):
    try:
        return math.ldexp(x, n)
    except OverflowError:
        return math.copysign(math.inf, x)


def _pi(function):
    """``function(pi * x)``, exact where x is a multiple of 1/2."""

    def of_pi(x):
        if not math.isfinite(x):
            return math.nan
        x = math.fmod(x, 2)
        quarters = x * 2
        if quarters == int(quarters):
            values = (0, 1, 0, -1) if function is math.sin else (1, 0, -1, 0)
            return float(values[int(quarters) % 4])
        return function(math.pi * x)

    return of_pi


def _byte_perm(x, y, selector):
    source = (_uint32(x) | _uint32(y) << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(source[selector >> 4 * i & 7] for i in range(4)), "little")


def reversed_bits(x, bits):
    return int(f"{int(x) & (1 << bits) - 1:0{bits}b}"[::-1], 2)


def _bits(x, dtype):
    return np.array(x).view(dtype)[()]


_sinpi, _cospi = _pi(math.sin), _pi(math.cos)


def _sign_bit(x):
    return int(np.signbit(x))


def _mul24(a, b):
    return wrap(int(a) << 8, np.dtype("i4")) * wrap(int(b) << 8, np.dtype("i4")) >> 16


_PLAIN: dict[str, Any] = {
    name: getattr(np, numpy)
    for name, numpy in {
        **{
            n: n for n in "cbrt ceil copysign cos cosh exp exp2 expm1 fabs floor fmax fmin fmod hypot".split()
        },
        **{n: n for n in "log log10 log1p log2 rint sin sinh sqrt tan tanh trunc".split()},
        **{f"a{n}": f"arc{n}" for n in "cos cosh sin sinh tan tanh tan2".split()},
        "nearbyint": "rint",
        "pow": "power",
    }.items()
}
_PLAIN |= {
    "erf": math.erf,
    "erfc": math.erfc,
    "erfcx": _erfcx,
    "erfinv": _erfinv,
    "erfcinv": _erfcinv,
    "exp10": lambda x: np.power(10.0, x),
    "fdividef": lambda x, y: x / y,
    "frexp": _frexp,
    "ilogb": _ilogb,
    "ldexp": _ldexp,
    "llrint": lambda x: to_integer(x, np.dtype("i8"), "rn"),
    "llround": lambda x: to_integer(_libm("round", 0, 1)(x), np.dtype("i8"), "rz"),
    "modf": lambda x: np.modf(x),
    "normcdf": lambda x: math.erfc(-x / math.sqrt(2)) / 2,
    "normcdfinv": _quantile,
    "powi": lambda x, n: np.power(x, float(n)),
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "remquo": _remquo,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "scalbn": _ldexp,
    "sincos": lambda x: (np.sin(x), np.cos(x)),
    "sincospi": lambda x: (_sinpi(x), _cospi(x)),
    "sinpi": _sinpi,
    "cospi": _cospi,
    **_of_libm("j0 j1 lgamma logb round tgamma y0 y1", 0, 1),
    **_of_libm("fdim remainder", 0, 2),
    **_of_libm("jn yn", 1, 1),
}
_WHOLE: dict[str, Any] = {  # of one width, or not of floats computed in float64
    "abs": abs,
    "llabs": abs,
    "brev": lambda x: reversed_bits(x, 32),
    "brevll": lambda x: reversed_bits(x, 64),
    "byte_perm": _byte_perm,
    "clz": lambda x: 32 - _uint32(x).bit_length(),
    "clzll": lambda x: 64 - _uint64(x).bit_length(),
    "popc": lambda x: _uint32(x).bit_count(),
    "popcll": lambda x: _uint64(x).bit_count(),
    "ffs": lambda x: (x & -x).bit_length(),
    "ffsll": lambda x: (x & -x).bit_length(),
    "double2hiint": lambda x: int(_bits(x, "i8")) >> 32,
    "double2loint": lambda x: int(_bits(x, "i8")),
    "hiloint2double": lambda hi, lo: _bits(np.uint64(_uint32(hi) << 32 | _uint32(lo)), "f8"),
    "double_as_longlong": lambda x: _bits(x, "i8"),
    "longlong_as_double": lambda x: _bits(np.int64(x), "f8"),
    "float_as_int": lambda x: _bits(x, "i4"),
    "int_as_float": lambda x: _bits(np.int32(x), "f4"),
    "float2half_rn": lambda x: _bits(np.float16(x), "i2"),
    "half2float": lambda x: np.float32(_bits(np.int16(x), "f2")),
    "finitef": lambda x: int(np.isfinite(x)),
    "isfinited": lambda x: int(np.isfinite(x)),
    **dict.fromkeys(("isinfd", "isinff"), lambda x: int(np.isinf(x))),
    **dict.fromkeys(("isnand", "isnanf"), lambda x: int(np.isnan(x))),
    **dict.fromkeys(("signbitd", "signbitf"), _sign_bit),
    **dict.fromkeys(("max", "llmax"), max),
    **dict.fromkeys(("min", "llmin"), min),
    **dict.fromkeys(("umax",), lambda a, b: max(_uint32(a), _uint32(b))),
    **dict.fromkeys(("umin",), lambda a, b: min(_uint32(a), _uint32(b))),
    **dict.fromkeys(("ullmax",), lambda a, b: max(_uint64(a), _uint64(b))),
    **dict.fromkeys(("ullmin",), lambda a, b: min(_uint64(a), _uint64(b))),
    "hadd": lambda a, b: a + b >> 1,
    "rhadd": lambda a, b: a + b + 1 >> 1,
    "uhadd": lambda a, b: int(_uint32(a)) + int(_uint32(b)) >> 1,
    "urhadd": lambda a, b: int(_uint32(a)) + int(_uint32(b)) + 1 >> 1,
    "mul24": _mul24,
    "umul24": lambda a, b: (int(a) & 0xFFFFFF) * (int(b) & 0xFFFFFF),
    "mulhi": lambda a, b: a * b >> 32,
    "umulhi": lambda a, b: int(_uint32(a)) * int(_uint32(b)) >> 32,
    "mul64hi": lambda a, b: a * b >> 64,
    "umul64hi": lambda a, b: int(_uint64(a)) * int(_uint64(b)) >> 64,
    "sad": lambda x, y, z: abs(x - y) + z,
    "usad": lambda x, y, z: abs(int(_uint32(x)) - int(_uint32(y))) + z,
    "fma": fma,
    "fmaf": fma,
    "frsqrt_rn": lambda x: 1 / np.sqrt(np.float64(x)),
    "saturatef": lambda x: np.float32(0) if x != x else min(max(x, np.float32(0)), np.float32(1)),
    "nextafter": np.nextafter,
    "nextafterf": np.nextafter,
}


def _implementation(name):
    """What computes `name`, of converted arguments."""
    if name in _WHOLE:
        return _WHOLE[name]
    base, _, mode = name.rpartition("_")
    if mode in ("rn", "rd", "ru", "rz"):
        source, two, target = base.partition("2")
        if two:
            return _conversion(source, target, mode)
        if base in ("fma", "fmaf"):
            return functools.partial(exactly, "fma", np.float32 if base == "fmaf" else np.float64, mode)
        return functools.partial(exactly, base[1:], _OF_FLOAT[base[0]], mode)
    name = name.removeprefix("fast_")
    plain = _PLAIN.get(name) or _PLAIN[name.removesuffix("f")]
    return lambda *arguments: plain(*(float(a) if isinstance(a, np.floating) else a for a in arguments))


def _function(name, result, parameters):
    compute = _implementation(name)
    given = [_CONVERT[str(p.ty)] for p in parameters if not p.is_ptr]
    results = [_CONVERT[str(p.ty)] for p in parameters if p.is_ptr]
    if str(result) != "none":
        results.insert(0, _CONVERT[str(result)])

    def function(*arguments):
        if len(arguments) != len(given):
            raise TypeError(
                f"cuda.libdevice.{name}: {len(arguments)} arguments are given; it takes {len(given)}"
            )
        with np.errstate(all="ignore"):
            value: Any = compute(*(convert(a) for convert, a in zip(given, arguments, strict=True)))
            if len(results) == 1:
                return results[0](value)
            return tuple(convert(v) for convert, v in zip(results, value, strict=True))

    function.__name__ = name
    return function


NAMES = [name.removeprefix("__nv_") for name in libdevice_functions]
FUNCTIONS = {name: _function(name, *libdevice_functions[f"__nv_{name}"]) for name in NAMES}
