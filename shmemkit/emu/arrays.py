"""Arrays as kernels see them: NumPy views of device memory whose integers behave as on the GPU.

Floating-point arrays are plain ``numpy.ndarray`` views. Integer arrays give 64-bit integers (``ints.py``) and wrap what is stored.
"""

import numpy as np

from .ints import Unsigned, from_scalar, wrap

_get, _set, _item = np.ndarray.__getitem__, np.ndarray.__setitem__, np.ndarray.item


class SignedArray(np.ndarray):
    """Signed integers (and booleans): elements are Python integers."""

    __slots__ = ()

    def __getitem__(self, index):
        if type(index) is int and self.ndim == 1:  # the common case, fast
            return _item(self, index)
        value = _get(self, index)
        return value if isinstance(value, np.ndarray) else from_scalar(value)

    def __setitem__(self, index, value):
        try:
            _set(self, index, value)
        except OverflowError:
            _set(self, index, wrap(value, self.dtype))


class UnsignedArray(SignedArray):
    """Unsigned integers: elements are Unsigned."""

    __slots__ = ()

    def __getitem__(self, index):
        if type(index) is int and self.ndim == 1:
            return Unsigned(_item(self, index))
        value = _get(self, index)
        return value if isinstance(value, np.ndarray) else from_scalar(value)


def device_view(array):
    """`array` as a kernel sees it (the same memory)."""
    kind = array.dtype.kind
    if kind == "u":
        return array.view(UnsignedArray)
    if kind in "ib":
        return array.view(SignedArray)
    return array.view(np.ndarray)


def uninitialised(shape, dtype):
    """New memory with no meaningful content: every byte 0xFF, so that floats are NaN and a use of it shows."""
    array = np.empty(shape, np.dtype(dtype))
    if array.size:
        array.reshape(-1).view(np.uint8)[:] = 0xFF
    return device_view(array)


def address(array):
    """The address of the first element."""
    return array.__array_interface__["data"][0]
