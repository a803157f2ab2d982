"""A ``@cuda.jit`` kernel as plain Python that the emulator can run.

The function keeps its code; its globals and closure are replaced by what they mean on the emulator: ``cuda``
becomes the stand-in of ``cuda_module.py``, Numba's and NumPy's integer types become casts that wrap, arrays
of the host become constants, device functions are treated the same way, and the device modules of nvshmem4py
and their functions become the stand-ins that ``use_device_modules`` was given. Arrays of the device stay
memory that others change, as for Numba. The primitives of ``shmemkit.device`` need nothing: their Python
bodies are the emulator's.

Kernels that ask for the width of integers (`cuda.clz`) are translated so that these know it.
"""

import functools
import types

import numba
import numpy as np
from numba import cuda as numba_cuda

from shmemkit.compiler.type_check import captured_as_memory
from shmemkit.support.host_program import current_world
from shmemkit.support.names_in_code import names_in

from . import signatures
from .arithmetic import HELPERS, MATH, code_of, math_module, number, to_float
from .array_module import is_on_device
from .async_proxy import reaches
from .cuda_integers import CASTS, FLOATS, SIZED_CASTS, from_scalar, sized
from .cuda_module import Cuda, Lazy, Namespace, SizedCuda, cast_of
from .device_arrays import device_view
from .thread import Thread
from .workers import running

_device_modules = dict


def use_device_modules(modules):
    """Take ``modules()`` -> {name: stand-in} instead of the modules of those names."""
    global _device_modules
    if modules is not _device_modules:
        _device_modules = modules
        _stand_ins.cache_clear()


@functools.cache
def _stand_ins(is_sized=False):
    """Name of a module -> what kernels see instead."""
    cuda = SizedCuda() if is_sized else Cuda()
    casts = SIZED_CASTS if is_sized else CASTS
    return {
        **_device_modules(),
        "numba.cuda": cuda,
        "numpy": types.SimpleNamespace(**{**vars(np), **casts}),
        "numba": types.SimpleNamespace(
            **{**vars(numba), **casts, **FLOATS, "cuda": cuda, "types": _types(numba.types, casts)}
        ),
    }


def _types(module, casts):
    return types.SimpleNamespace(**{**vars(module), **casts, **FLOATS})


def _module(module, is_sized):
    name = module.__name__
    if name == "math":
        return math_module
    stand_ins = _stand_ins(is_sized)
    if name in stand_ins:
        return stand_ins[name]
    if name in ("numba.core.types", "numba.cuda.types", "numba.types"):
        return _types(module, SIZED_CASTS if is_sized else CASTS)
    if name.startswith("numba.cuda."):
        last = name.rpartition(".")[2]
        return getattr(Cuda, last, None) or Namespace(f"cuda.{last}")
    return module


def _machine():
    """What the program runs on; None without a World."""
    here = running()
    if isinstance(here, Thread):
        return here.block.machine
    return getattr(getattr(current_world(), "backend", None), "machine", None)


def _memory_of(array):
    """The machine on whose device `array` is, or None."""
    machine = _machine()
    return machine if machine is not None and is_on_device(array, machine) else None


captured_as_memory(lambda array: _memory_of(array) is not None)


def _translate(value, name, is_sized):
    """What `value`, found under `name` in a kernel's globals or closure, is on the emulator."""
    if isinstance(value, types.ModuleType):
        return _module(value, is_sized)
    if hasattr(value, "py_func"):
        return signatures.converting(value, rebind(value.py_func, is_sized))
    if isinstance(value, type) and issubclass(value, np.integer):
        return (SIZED_CASTS if is_sized else CASTS)[np.dtype(value).name]
    if isinstance(value, numba.types.Type):
        cast = cast_of(value, is_sized)
        return value if cast is None else cast
    if isinstance(value, np.ndarray):
        if (machine := _memory_of(value)) is not None:
            return machine.seen(value, is_sized)
        constant = np.array(value)  # no access of the program's, as value.copy() might be
        constant.flags.writeable = False
        return device_view(constant, is_sized)
    if isinstance(value, np.generic):
        return sized(value) if is_sized else from_scalar(value)
    if type(value).__name__ == "ExternFunction":  # of cuda.declare_device
        return Namespace(f"the external function {value.name}")
    if isinstance(value, types.BuiltinFunctionType):
        return MATH.get(value, value)
    if type(value) is tuple:
        return tuple(map(number, value))
    module = getattr(value, "__module__", None) or ""
    if isinstance(value, types.FunctionType) and module.startswith("nvshmem."):
        side = "bindings" if module.startswith("nvshmem.bindings") else "core"
        return getattr(_stand_ins()[f"nvshmem.{side}.device.numba"], value.__name__)
    if module.startswith("numba.cuda."):
        return _of_cuda(value, name, is_sized)
    return number(value)


def _of_cuda(value, name, is_sized):
    """What a script took from numba.cuda: ``from numba.cuda import syncthreads, threadIdx``, ``add =
    cuda.atomic.add``."""
    path = getattr(value, "__qualname__", name).split(".")
    theirs, ours = numba_cuda, _stand_ins(is_sized)["numba.cuda"]
    for step in path:
        theirs = getattr(theirs, step, None)
    if theirs is not value:
        part = getattr(value, "__module__", "").rpartition(".")[2]  # from numba.cuda.libdevice import sinf
        part = part.removeprefix("cuda_")
        if not isinstance(getattr(Cuda, part, None), Namespace):
            return value
        last = path[-1]  # of bf16.hadd, it is __hadd
        path = [part, last if last in vars(getattr(Cuda, part)) else last.lstrip("_")]
    if isinstance(getattr(Cuda, path[0], None), property):
        return Lazy(ours, path[0])
    try:
        for step in path:
            ours = getattr(ours, step)
    except NotImplementedError:
        return Namespace("cuda." + ".".join(path))
    return ours


_WIDTH_MATTERS = (numba_cuda.clz, numba_cuda.brev, numba_cuda.popc)


def _asks_for_width(function):
    """Whether `function` reaches what depends on the width of integers; not so shmemkit's own."""
    return reaches(
        function,
        lambda value: isinstance(value, type) and value in _WIDTH_MATTERS,
        lambda other: not (other.__module__ or "").startswith("shmemkit."),
    )


def rebind(function, is_sized=None):
    """`function` with its globals and closure translated; once per function, as Numba freezes them when it
    compiles. `is_sized`: as the kernel that calls it; None: it is a kernel."""
    versions = function.__dict__.setdefault("__emulated__", {})
    new = versions.get(is_sized)
    if new is not None:
        return new
    if is_sized is None:
        versions[None] = new = rebind(function, _asks_for_width(function))
        return new
    code, translated = code_of(function), {**function.__globals__, **HELPERS}
    cells = {name: types.CellType() for name in function.__code__.co_freevars}
    defaults = function.__defaults__ and tuple(map(number, function.__defaults__))
    new = types.FunctionType(
        code, translated, function.__name__, defaults, tuple(cells[name] for name in code.co_freevars) or None
    )
    new.__kwdefaults__ = function.__kwdefaults__ and {
        k: number(v) for k, v in function.__kwdefaults__.items()
    }
    new.__is_sized__ = is_sized
    versions[is_sized] = new  # before its globals: functions may refer to each other
    try:
        for name in names_in(function.__code__)[0]:
            if name in translated:
                translated[name] = _translate(translated[name], name, is_sized)
            elif name == "float":
                translated[name] = to_float
        for (name, cell), old in zip(cells.items(), function.__closure__ or (), strict=True):
            cell.cell_contents = _translate(old.cell_contents, name, is_sized)
    except BaseException:
        del versions[is_sized]
        raise
    return new
