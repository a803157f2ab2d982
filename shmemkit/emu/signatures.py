"""``@cuda.jit("void(int32[:], float32)")``: nothing is compiled for the emulator, but numbers are converted.

Without a GPU nothing is compiled at all, whether or not a World lives: such functions are mostly decorated
before.
"""

import functools
import sys

import numpy as np
from numba import types

from shmemkit.compiler.numba_internals import CUDADispatcher
from shmemkit.compiler.type_check import close, declare, declared_for
from shmemkit.support.gpus import n_gpus

from .cuda_module import cast_of
from .ufuncs import BUILDING


def of_kernel(kernel):
    """{types of the arguments: type of the result}, as given to the decorator."""
    known = declared_for(kernel)
    if not known and getattr(kernel, "specialized", False):  # compiled for a GPU that is there
        known = {arguments: None for arguments in kernel.overloads}
    return known


def _converter(numba_type):
    return (numba_type is not None and cast_of(numba_type)) or (lambda value: value)


def _fits(value, numba_type):
    """Whether a kernel with an argument of this type takes `value`."""
    is_array = isinstance(numba_type, types.Array)
    if isinstance(value, np.ndarray):
        dtype = getattr(value, "dtype", None)
        return is_array and value.ndim == numba_type.ndim and _name(numba_type.dtype) in (None, str(dtype))
    return not is_array or not isinstance(value, (bool, int, float, complex, np.generic))


def _name(numba_type):
    """That of a number's NumPy dtype; None for others."""
    return str(numba_type) if isinstance(numba_type, types.Number) else None


def converted(kernel, arguments):
    """`arguments` of a launch, as the signature of `kernel` has them; TypeError where it takes no such."""
    signatures = of_kernel(kernel)
    if not signatures:
        return arguments
    fitting = [s for s in signatures if len(s) == len(arguments) and all(map(_fits, arguments, s))]
    if not fitting:
        given = ", ".join(
            f"{a.dtype}[{', '.join(':' * a.ndim)}]" if isinstance(a, np.ndarray) else type(a).__name__
            for a in arguments
        )
        taken = " or ".join(f"({', '.join(map(str, s))})" for s in signatures)
        raise TypeError(
            f"kernel {kernel.py_func.__name__}: the arguments are ({given}); its signature takes {taken}. "
            "Convert the arrays, or decorate it without a signature"
        )
    if len(fitting) > 1:
        return arguments
    return [
        _converter(t)(a) if isinstance(a, (bool, int, float, complex, np.generic)) else a
        for a, t in zip(arguments, fitting[0], strict=True)
    ]


def converting(kernel, function):
    """The plain `function` of a device function: with one signature, numbers are converted as it says."""
    signatures = of_kernel(kernel)
    if len(signatures) != 1:
        return function
    ((arguments, result),) = signatures.items()
    converters = [cast_of(t) for t in arguments]
    if not any(converters) and _is_no_number(result):
        return function
    convert, into = [_converter(t) for t in arguments], _converter(result)

    @functools.wraps(function)
    def device_function(*given):
        if len(given) != len(convert):
            return function(*given)
        return into(function(*[c(g) for c, g in zip(convert, given, strict=True)]))

    device_function.__wrapped__ = function
    return device_function


def _is_no_number(numba_type):
    return numba_type is None or cast_of(numba_type) is None


# (owner, name, what is there where nothing is compiled)
NOT_COMPILED = [
    (CUDADispatcher, "compile", declare),
    (CUDADispatcher, "compile_device", declare),
    (CUDADispatcher, "disable_compile", close),
    *BUILDING,
]


def _unless_there_is_a_gpu(theirs, ours):
    """Numba's function, and ours where a decorator calls it that could not compile anything. That is known
    when it is called: CUDA is not to begin because of an import."""

    @functools.wraps(theirs)
    def function(*args, **kwargs):
        decorates = sys._getframe(1).f_globals["__name__"] in DECORATORS
        return (ours if decorates and not n_gpus() else theirs)(*args, **kwargs)

    return function


DECORATORS = "numba.cuda.decorators", "numba.cuda.deviceufunc"

for _owner, _attribute, _ours in NOT_COMPILED:
    setattr(_owner, _attribute, _unless_there_is_a_gpu(getattr(_owner, _attribute), _ours))
