"""A ``@cuda.jit`` kernel as plain Python that the emulator can run.

The function keeps its code; its globals and closure are replaced by what they mean on the emulator: ``cuda`` becomes the
stand-in of ``emu/cuda.py``, Numba's and NumPy's integer types become casts that wrap, device functions are treated the same
way, and the functions of ``nvshmem.core.device.numba`` become ours of the same name. The primitives of ``shmemkit.device``
need nothing: their Python bodies are the emulator's.
"""

import functools
import sys
import types

import numba
import numpy as np
from numba import cuda as numba_cuda

from .cuda import Cuda
from .ints import CASTS

_MODULES = {}  # id(module) -> stand-in


def _stand_ins():
    if not _MODULES:
        cuda = Cuda()
        _MODULES[id(numba_cuda)] = cuda
        _MODULES[id(np)] = types.SimpleNamespace(**{**vars(np), **CASTS})
        _MODULES[id(numba)] = types.SimpleNamespace(**{**vars(numba), **CASTS, "cuda": cuda})
    for name in ("nvshmem.core.device.numba", "nvshmem.bindings.device.numba"):
        if name in sys.modules and id(sys.modules[name]) not in _MODULES:
            from .. import device

            _MODULES[id(sys.modules[name])] = device
    return _MODULES


def _translate(value, name):
    """What `value`, found under `name` in a kernel's globals or closure, is on the emulator."""
    if isinstance(value, types.ModuleType):
        return _stand_ins().get(id(value), value)
    if hasattr(value, "py_func"):
        return rebind(value.py_func)
    if isinstance(value, type) and issubclass(value, np.integer):
        return CASTS[np.dtype(value).name]
    if isinstance(value, numba.types.Integer) and not isinstance(value, numba.types.IntegerLiteral):
        return CASTS[value.name]
    module = getattr(value, "__module__", None) or ""
    if isinstance(value, types.FunctionType) and module.startswith("nvshmem."):
        from .. import device

        if not hasattr(device, value.__name__):
            raise NotImplementedError(f"{module}.{value.__name__} is not emulated")
        return getattr(device, value.__name__)
    if module.startswith("numba.cuda") and hasattr(Cuda, value.__name__ if hasattr(value, "__name__") else name):
        return getattr(_stand_ins()[id(numba_cuda)], getattr(value, "__name__", name))
    return value


def _names(code):
    """The global names that `code` and the functions inside it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


_rebound = {}


def rebind(function):
    """`function` with its globals and closure translated; once per function, as Numba freezes them when it compiles."""
    if function in _rebound:
        return _rebound[function]
    translated = dict(function.__globals__)
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    new = types.FunctionType(function.__code__, translated, function.__name__, function.__defaults__, cells or None)
    new.__kwdefaults__ = function.__kwdefaults__
    _rebound[function] = new  # before its globals: functions may refer to each other
    for name in _names(function.__code__):
        if name in translated:
            translated[name] = _translate(translated[name], name)
    for cell, name, old in zip(cells, function.__code__.co_freevars, function.__closure__ or ()):
        cell.cell_contents = _translate(old.cell_contents, name)
    return functools.update_wrapper(new, function)
