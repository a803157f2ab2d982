"""``world.xp`` of the emulator: NumPy, but that arrays of the host are copied where CuPy copies them."""

import functools
import types

import numpy as np

from .device_arrays import address
from .host_arrays import HostArray
from .ufuncs import DeviceArray


class OnDevice(HostArray):
    """An array that a function of ``world.xp`` has made, or that was computed from one."""


def is_on_device(a, machine):
    """Whether the array `a` is symmetric memory of `machine`, or such as functions of a GPU's libraries
    make."""
    if isinstance(a, (HostArray, DeviceArray)) or hasattr(a, "__cuda_array_interface__"):
        return True
    return isinstance(a, np.ndarray) and machine.located(address(a)) != (None, None)


class ArrayModule(types.ModuleType):
    """NumPy. Its ``asarray`` and the like share arrays of the device, symmetric ones or those that functions
    of this module or Numba made, and copy others."""

    def __init__(self, machine):
        super().__init__("numpy")
        self._machine, self.ndarray = machine, np.ndarray  # which is asked for at each call
        for name in ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray"):
            setattr(self, name, functools.partial(self._converted, getattr(np, name)))

    def _converted(self, function, a, *args, **kwargs):
        result = function(a, *args, **kwargs)
        shares = result is a or result.base is not None
        if shares and not is_on_device(a, self._machine):
            result, shares = result.copy("K"), False
        return _on_device(result if shares else _allocated(result))

    def __getattr__(self, name):
        found = getattr(np, name)
        if isinstance(found, type) or isinstance(found, np.ufunc) or not callable(found):
            return found

        @functools.wraps(found)
        def function(*args, **kwargs):
            return _on_device(_allocated(found(*args, **kwargs)))

        setattr(self, name, function)  # to make it takes longer than most calls
        return function


def _allocated(result):
    """`result`, which may have memory of its own. ValueError for what CuPy does not allocate."""
    if isinstance(result, np.ndarray) and result.base is None and "float8" in result.dtype.name:
        raise ValueError(
            f"Unsupported dtype {result.dtype}: as CuPy, world.xp makes no arrays of float8. Use sk.empty or "
            f"sk.array, or a view of bytes: xp.asarray(x.view('uint8')).view(ml_dtypes.{result.dtype})"
        )
    return result


def _on_device(result):
    return result.view(OnDevice) if type(result) is np.ndarray else result
