"""Arrays as kernels see them: NumPy views of device memory whose integers behave as on the GPU.

Integer arrays give 64-bit integers (``cuda_integers.py``) and wrap what is stored. Floating-point arrays are
NumPy's: an operation of a float32 and a Python number is rounded to float32, where Numba may compute it in
float64.
"""

import ctypes

import numpy as np

from .cuda_integers import Unsigned, from_scalar, wrap

_get, _set, _item = np.ndarray.__getitem__, np.ndarray.__setitem__, np.ndarray.item


class DeviceView(np.ndarray):
    """Floating-point numbers."""

    __slots__ = ()

    def view(self, dtype):
        """The same bytes as another dtype."""
        return device_view(np.ndarray.view(np.asarray(self), dtype))


class IntegerArray(DeviceView):
    """Integers (and booleans) of any number of dimensions: signed elements are Python integers, others
    Unsigned."""

    __slots__ = ()

    def __getitem__(self, index):
        value = _get(self, index)
        return value if isinstance(value, np.ndarray) else from_scalar(value)

    def __setitem__(self, index, value):
        try:
            _set(self, index, value)
        except OverflowError:
            _set(self, index, wrap(value, self.dtype))


class SignedVector(IntegerArray):
    """One dimension of signed integers, indexed fast."""

    __slots__ = ()

    def __getitem__(self, index):
        kind = type(index)
        if kind is int:
            return _item(self, index)
        return _get(self, index) if kind is slice else _other(self, index)

    def reshape(self, *shape):
        return _of_any_dimension(np.ndarray.reshape(self, *shape))


class UnsignedVector(SignedVector):
    """One dimension of unsigned integers, indexed fast."""

    __slots__ = ()

    def __getitem__(self, index):
        kind = type(index)
        if kind is int:
            return Unsigned(_item(self, index))
        return _get(self, index) if kind is slice else _other(self, index)


def _other(vector, index):
    value = _get(vector, index)
    return _of_any_dimension(value) if isinstance(value, np.ndarray) else from_scalar(value)


def _of_any_dimension(array):
    return array if array.ndim == 1 else np.ndarray.view(array, IntegerArray)


def device_view(array):
    """`array` as a kernel sees it (the same memory)."""
    kind = array.dtype.kind
    if kind not in "iub":
        view = DeviceView
    elif array.ndim != 1:
        view = IntegerArray
    else:
        view = UnsignedVector if kind == "u" else SignedVector
    return np.ndarray.view(array, view)


def uninitialised(shape, dtype):
    """New memory with no meaningful content: every byte 0xFF, so that floats are NaN and a use of it
    shows."""
    array = np.empty(shape, np.dtype(dtype))
    if array.size:
        array.reshape(-1).view(np.uint8)[:] = 0xFF
    return device_view(array)


def address(array):
    """The address of the first element."""
    try:  # four times as fast; dtypes of ml_dtypes have no buffers
        return ctypes.addressof(
            ctypes.c_char.from_buffer(array if array.dtype.kind != "V" else array.view(np.uint8))
        )
    except (TypeError, ValueError, BufferError):  # empty, read-only, with gaps
        return array.__array_interface__["data"][0]
