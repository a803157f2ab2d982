"""Arrays as kernels see them: NumPy views of device memory whose integers behave as on the GPU.

Integer arrays give 64-bit integers (``cuda_integers.py``) and wrap what is stored. Floating-point arrays are
NumPy's: an operation of a float32 and a Python number is rounded to float32, where Numba may compute it in
float64.
"""

import ctypes
from sys import _getframe

import numpy as np

from .cuda_integers import Unsigned, from_scalar, sized, wrap

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


class Record:
    """Element `index` of an array of records: a name for its memory, as in Numba."""

    __slots__ = ("_array", "_index")

    def __init__(self, array, index):
        object.__setattr__(self, "_array", array)
        object.__setattr__(self, "_index", index)

    def __getattr__(self, name):
        return self._array.field_of(name, self._index, _getframe(1))

    def __setattr__(self, name, value):
        self._array.set_field_of(name, self._index, value, _getframe(1))

    def __getitem__(self, name):
        return self._array.field_of(self._name(name), self._index, _getframe(1))

    def __setitem__(self, name, value):
        self._array.set_field_of(self._name(name), self._index, value, _getframe(1))

    def _name(self, name):
        """Of a field, or its number."""
        return name if isinstance(name, str) else self._array.dtype.names[name]

    def __repr__(self):
        return f"a record of {self._array.dtype}"


def loaded(value):
    """A Record, loaded; other values as they are."""
    return value._array.whole(value._index) if type(value) is Record else value


class Fields:
    """Of arrays of a structured dtype: those by name."""

    __slots__ = ()

    def __getattr__(self, name):
        if name in (self.dtype.names or ()):
            return self.field(name)
        raise AttributeError(f"an array of records of {self.dtype} has no attribute {name!r}")


class RecordArray(Fields, DeviceView):
    """Elements of a structured dtype: ``x[i].a``, ``x[i]["a"]``, ``x["a"][i]`` and ``x.a[i]``."""

    is_sized = False

    def __getitem__(self, index):
        if isinstance(index, str):
            return self.field(index)
        value = _get(self, index)
        return value if isinstance(value, np.ndarray) else Record(self, index)

    def __setitem__(self, index, value):
        _set(self, index, loaded(value))

    def field(self, name):
        """That part of each record: an array."""
        fields = self.__dict__.setdefault("_fields", {})
        if name not in fields:
            if name not in (self.dtype.names or ()):
                raise AttributeError(f"records of {self.dtype} have no field {name!r}")
            fields[name] = device_view(np.asarray(self)[name], self.is_sized)
        return fields[name]

    def __array_finalize__(self, _):
        self.__dict__.pop("_fields", None)

    def field_of(self, name, index, _):
        return self.field(name)[index]

    def set_field_of(self, name, index, value, _):
        self.field(name)[index] = loaded(value)

    def whole(self, index):
        return _get(self, index)


class SizedRecordArray(RecordArray):
    is_sized = True


class SizedArray(IntegerArray):
    """Integers of a kernel that asks for their width: each knows how many bits it has."""

    __slots__ = ()

    def __getitem__(self, index):
        value = _get(self, index)
        return value if isinstance(value, np.ndarray) else sized(value)

    def view(self, dtype):
        return device_view(np.ndarray.view(np.asarray(self), dtype), True)


def device_view(array, is_sized=False):
    """`array` as a kernel sees it (the same memory); `is_sized`: a kernel that asks for the width of
    integers."""
    kind = array.dtype.kind
    if kind == "V" and array.dtype.names:
        view = SizedRecordArray if is_sized else RecordArray
    elif kind not in "iub":
        view = DeviceView
    elif is_sized and kind != "b":
        view = SizedArray
    elif array.ndim != 1:
        view = IntegerArray
    else:
        view = UnsignedVector if kind == "u" else SignedVector
    return np.ndarray.view(array, view)


def uninitialised(shape, dtype, is_sized=False):
    """New memory with no meaningful content: every byte 0xFF, so that floats are NaN and a use of it
    shows."""
    array = np.empty(shape, np.dtype(dtype))
    if array.size:
        array.reshape(-1).view(np.uint8)[:] = 0xFF
    return device_view(array, is_sized)


def address(array):
    """The address of the first element."""
    try:  # four times as fast; dtypes of ml_dtypes have no buffers
        return ctypes.addressof(
            ctypes.c_char.from_buffer(array if array.dtype.kind != "V" else array.view(np.uint8))
        )
    except (TypeError, ValueError, BufferError):  # empty, read-only, with gaps
        return array.__array_interface__["data"][0]
