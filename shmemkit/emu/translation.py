"""A ``@cuda.jit`` kernel as plain Python that the emulator can run.

The function keeps its code; its globals and closure are replaced by what they mean on the emulator: ``cuda``
becomes the stand-in of ``cuda_module.py``, Numba's and NumPy's integer types become casts that wrap, arrays
become constants, device functions are treated the same way, and the device modules of nvshmem4py and their
functions become the stand-ins that ``use_device_modules`` was given. The primitives of ``shmemkit.device``
need nothing: their Python bodies are the emulator's.
"""

import functools
import types

import numba
import numpy as np
from numba import cuda as numba_cuda

from .async_proxy import names_in
from .cuda_integers import CASTS, FLOATS, from_scalar
from .cuda_module import Cuda, Lazy, Namespace
from .device_arrays import device_view

_device_modules = dict


def use_device_modules(modules):
    """Take ``modules()`` -> {name: stand-in} instead of the modules of those names."""
    global _device_modules
    if modules is not _device_modules:
        _device_modules = modules
        _stand_ins.cache_clear()


@functools.cache
def _stand_ins():
    """Name of a module -> what kernels see instead."""
    cuda = Cuda()
    return {
        **_device_modules(),
        "numba.cuda": cuda,
        "numpy": types.SimpleNamespace(**{**vars(np), **CASTS}),
        "numba": types.SimpleNamespace(
            **{**vars(numba), **CASTS, **FLOATS, "cuda": cuda, "types": _types(numba.types)}
        ),
    }


def _types(module):
    return types.SimpleNamespace(**{**vars(module), **CASTS, **FLOATS})


def _module(module):
    name = module.__name__
    stand_ins = _stand_ins()
    if name in stand_ins:
        return stand_ins[name]
    if name in ("numba.core.types", "numba.cuda.types", "numba.types"):
        return _types(module)
    if name.startswith("numba.cuda."):
        last = name.rpartition(".")[2]
        return getattr(Cuda, last, None) or Namespace(f"cuda.{last}")
    return module


def _translate(value, name):
    """What `value`, found under `name` in a kernel's globals or closure, is on the emulator."""
    if isinstance(value, types.ModuleType):
        return _module(value)
    if hasattr(value, "py_func"):
        return rebind(value.py_func)
    if isinstance(value, type) and issubclass(value, np.integer):
        return CASTS[np.dtype(value).name]
    if isinstance(value, numba.types.Integer) and not isinstance(value, numba.types.IntegerLiteral):
        return CASTS[value.name]
    if isinstance(value, numba.types.Float):
        return FLOATS[value.name]
    if isinstance(value, np.ndarray):
        constant = value.copy()
        constant.flags.writeable = False
        return device_view(constant)
    if isinstance(value, np.generic):
        return from_scalar(value)
    module = getattr(value, "__module__", None) or ""
    if isinstance(value, types.FunctionType) and module.startswith("nvshmem."):
        side = "bindings" if module.startswith("nvshmem.bindings") else "core"
        return getattr(_stand_ins()[f"nvshmem.{side}.device.numba"], value.__name__)
    if module.startswith("numba.cuda."):
        return _of_cuda(value, name)
    return value


def _of_cuda(value, name):
    """What a script took from numba.cuda: ``from numba.cuda import syncthreads, threadIdx``, ``add =
    cuda.atomic.add``."""
    path = getattr(value, "__qualname__", name).split(".")
    theirs, ours = numba_cuda, _stand_ins()["numba.cuda"]
    for step in path:
        theirs = getattr(theirs, step, None)
    if theirs is not value:
        part = getattr(value, "__module__", "").rpartition(".")[2]  # from numba.cuda.libdevice import sinf
        if not isinstance(getattr(Cuda, part, None), Namespace):
            return value
        path = [part, name]
    if isinstance(getattr(Cuda, path[0], None), property):
        return Lazy(ours, path[0])
    try:
        for step in path:
            ours = getattr(ours, step)
    except NotImplementedError:
        return Namespace("cuda." + ".".join(path))
    return ours


def rebind(function):
    """`function` with its globals and closure translated; once per function, as Numba freezes them when it
    compiles."""
    new = function.__dict__.get("__emulated__")
    if new is not None:
        return new
    translated = dict(function.__globals__)
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    new = types.FunctionType(
        function.__code__, translated, function.__name__, function.__defaults__, cells or None
    )
    new.__kwdefaults__ = function.__kwdefaults__
    function.__emulated__ = new  # before its globals: functions may refer to each other
    try:
        for name in names_in(function.__code__):
            if name in translated:
                translated[name] = _translate(translated[name], name)
        for cell, name, old in zip(
            cells, function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            cell.cell_contents = _translate(old.cell_contents, name)
    except BaseException:
        del function.__emulated__
        raise
    return new
