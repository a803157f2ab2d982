"""``@vectorize(target="cuda")``, ``@guvectorize(target="cuda")`` and ``cuda.reduce``: Numba's own code, which
launches kernels, with arrays of the emulator in the place of a GPU's."""

from typing import Any

import numba
import numpy as np
from numba import cuda

from shmemkit.compiler import numba_internals

from .host_arrays import HostArray

vectorizers: Any = numba_internals.vectorizers


class DeviceArray(np.ndarray):
    """What cuda.to_device and cuda.device_array return: a NumPy array with Numba's methods."""

    __cuda_ndarray__ = True

    def copy_to_host(self, ary=None, stream=0):
        if ary is None:
            return np.array(self)
        ary[...] = self
        return ary

    def copy_to_device(self, ary, stream=0):
        self[...] = ary

    def split(self, section, stream=0):
        """In parts of `section` elements."""
        return [self[first : first + section] for first in range(0, self.size, section)]

    def is_c_contiguous(self):
        return self.flags.c_contiguous


def is_device_array(array):
    return isinstance(array, (DeviceArray, HostArray))


def as_device_array(array, sync=True):
    return np.asarray(array).view(DeviceArray)


def _core(builder, signature):
    """-> (the device function, the type of its result), which Numba infers on the CPU if it is not given"""
    function = cuda.jit(signature, device=True)(builder.pyfunc)
    result = signature.return_type
    if result is None:
        result = numba.njit(signature.args)(builder.pyfunc).nopython_signatures[0].return_type
    return function, result


def _broadcast(_, array, shape):
    shape = shape if isinstance(shape, tuple) else (shape,)
    return np.broadcast_to(array, shape).view(DeviceArray)


# Where nothing is compiled.
BUILDING = [(vectorizers.CUDAVectorize, "_compile_core", _core)]
CALLING = [
    *(
        (owner, name, function)
        for owner in (vectorizers.CUDAUFuncMechanism, vectorizers._CUDAGUFuncCallSteps)
        for name, function in (
            ("is_device_array", lambda _, array: is_device_array(array)),
            ("as_device_array", lambda _, array: as_device_array(array)),
        )
    ),
    (vectorizers.CUDAUFuncMechanism, "broadcast_device", _broadcast),
    (vectorizers.CUDAGeneralizedUFunc, "_broadcast_scalar_input", _broadcast),
    (vectorizers.CUDAGeneralizedUFunc, "_broadcast_add_axis", _broadcast),
]
