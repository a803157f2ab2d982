"""``cuda.fp16`` and ``cuda.bf16`` inside emulated kernels: each result is rounded once, to nearest."""

import math
import operator
import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from shmemkit.compiler.numba_internals import bf16, fp16

from .cuda_integers import CASTS, from_scalar
from .libdevice import rounded, to_integer

_INTEGERS = {"char": "int8", "short": "int16", "int": "int32", "ll": "int64"}
_INTEGERS |= {f"u{name}": f"u{dtype}" for name, dtype in _INTEGERS.items()}
_INTEGERS |= {dtype: dtype for dtype in list(_INTEGERS.values())}
_FLOATS = {"float": np.float32, "float32": np.float32, "double": np.float64, "float64": np.float64}
_ARITHMETIC: dict[str, Any] = {
    "div": operator.truediv,
    "max": np.fmax,
    "min": np.fmin,
    "max_nan": np.maximum,
    "min_nan": np.minimum,
    "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "exp10": lambda a: np.power(10.0, a),
    "tanh_approx": np.tanh,
    **{name: getattr(operator, name) for name in "abs add mul neg sub".split()},
} | {
    name: getattr(np, name)
    for name in "ceil cos exp exp2 floor log log10 log2 rint sin sqrt tanh trunc".split()
}
_COMPARISONS: dict[str, Any] = {name: getattr(operator, name) for name in "eq ne ge gt le lt".split()}


class Half:
    """The functions of ``cuda.fp16``, or of ``cuda.bf16``, of elements `dtype` (a NumPy scalar type)."""

    def __init__(self, dtype, module):
        self._dtype = dtype
        for name in dir(module):
            function = self._function(name.lstrip("_"))
            if function is not None:
                setattr(self, name, self._quiet(function))
        if dtype is not np.float16:
            self.bfloat16 = dtype

    @staticmethod
    def _quiet(function):
        def quiet(*arguments):
            with np.errstate(all="ignore"):
                return function(*arguments)

        return quiet

    def _function(self, name) -> Any:
        """What is called `name`; None: nothing here."""
        dtype = self._dtype
        if match := re.fullmatch(r"(\w+?)(?:2|_to_)(?:half|bfloat16)(?:_(r[nduz]))?", name):
            source, mode = match.groups()
            if source in _FLOATS:
                return lambda x: self._rounded(_FLOATS[source](x), mode or "rn")
            if source in _INTEGERS:
                return lambda x: self._rounded(int(CASTS[_INTEGERS[source]](x)), mode or "rn")
        if match := re.fullmatch(r"(?:half|bfloat16)(?:2|_to_)(\w+?)(?:_(r[nduz]))?", name):
            target, mode = match.groups()
            if target in _FLOATS:
                return lambda x: _FLOATS[target](dtype(x))
            if target in _INTEGERS:
                integer = CASTS[_INTEGERS[target]]
                return lambda x: integer(to_integer(dtype(x), integer.dtype, mode or "rz"))
        if match := re.fullmatch(r"(\w+)_as_(\w+)", name):
            source, target = (dtype if n in ("half", "bfloat16") else self._word(n) for n in match.groups())
            return lambda x: from_scalar(
                np.array(x if source is dtype else CASTS[np.dtype(source).name](x))
                .astype(source)
                .view(target)[()]
            )
        if not name.startswith("h"):
            return None
        name = name[1:]
        if name in ("isinf", "isnan"):
            test = getattr(np, name)
            return lambda a: int(test(dtype(a)))
        if name in _COMPARISONS:  # false with a NaN, but for ne, which is ordered, too
            compare = _COMPARISONS[name]
            return lambda a, b: bool(compare(dtype(a), dtype(b)) and a == a and b == b)
        if name.removesuffix("u") in _COMPARISONS:
            compare = _COMPARISONS[name.removesuffix("u")]
            return lambda a, b: bool(compare(dtype(a), dtype(b)) or a != a or b != b)
        base = re.sub("_(rn|sat|relu)$", "", name)
        after = {"_sat": self._saturated, "_relu": self._no_negative}.get(name[len(base) :], lambda x: x)
        if base == "fma":
            return lambda a, b, c: after(self._fma(dtype(a), dtype(b), dtype(c)))
        if base in _ARITHMETIC:
            compute = _ARITHMETIC[base]
            return lambda *arguments: after(dtype(compute(*(np.float64(dtype(a)) for a in arguments))))
        return None

    @staticmethod
    def _word(name):
        return np.dtype(_INTEGERS[name])

    def _fma(self, a, b, c):
        if all(map(math.isfinite, map(float, (a, b, c)))):
            exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
            if exact:
                return self._rounded(exact, "rn")
        return self._dtype(np.float64(a) * np.float64(b) + np.float64(c))

    def _rounded(self, value, mode):
        """The number `value`, rounded once."""
        value = value if isinstance(value, (int, Fraction)) else float(value)
        if not value or not math.isfinite(value):
            return self._dtype(value)
        return rounded(Fraction(value), self._dtype, mode)

    def _saturated(self, x):
        return self._dtype(0) if x != x else min(max(x, self._dtype(0)), self._dtype(1))

    def _no_negative(self, x):
        return x if x != x else max(x, self._dtype(0))


FP16, BF16 = Half(np.float16, fp16), Half(ml_dtypes.bfloat16, bf16)
