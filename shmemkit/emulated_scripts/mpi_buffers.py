"""Buffers as mpi4py's upper-case methods take them."""

import numpy as np


class MPIError(RuntimeError):
    """``MPI.Exception``"""

    __module__, __qualname__ = "mpi4py.MPI", "Exception"

    def Get_error_class(self):
        return 16

    Get_error_code = Get_error_class


class Datatype:
    """``MPI.DOUBLE`` and the like."""

    def __init__(self, name, dtype):
        self.name, self.dtype = name, np.dtype(dtype)

    def Get_size(self):
        return self.dtype.itemsize

    size = property(Get_size)

    def __repr__(self):
        return f"MPI.{self.name}"


_OF_DTYPE = {
    "int8": "CHAR SIGNED_CHAR INT8_T",
    "int16": "SHORT INT16_T",
    "int32": "INT INT32_T",
    "int64": "LONG LONG_LONG INT64_T",
    "uint8": "BYTE UNSIGNED_CHAR UINT8_T",
    "uint16": "UNSIGNED_SHORT UINT16_T",
    "uint32": "UNSIGNED UINT32_T",
    "uint64": "UNSIGNED_LONG UNSIGNED_LONG_LONG UINT64_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "bool": "BOOL C_BOOL",
    "complex64": "COMPLEX",
    "complex128": "DOUBLE_COMPLEX",
}
TYPES = {name: Datatype(name, dtype) for dtype, names in _OF_DTYPE.items() for name in names.split()}


class _InPlace:
    def __repr__(self):
        return "MPI.IN_PLACE"


IN_PLACE = _InPlace()


def _flat(buffer):
    """`buffer` as a one-dimensional NumPy array of its memory."""
    if not isinstance(buffer, np.ndarray):
        buffer = (
            np.frombuffer(buffer, np.uint8) if isinstance(buffer, (bytes, bytearray)) else np.asarray(buffer)
        )
    if not buffer.flags.c_contiguous:
        raise BufferError("MPI: the array is not contiguous; a buffer must be. Copy it")
    return buffer.view(np.ndarray).reshape(-1)


def _typed(array, datatype):
    if isinstance(datatype, str):
        datatype = Datatype(datatype, datatype)
    return array if datatype is None else array.view(datatype.dtype)


def elements(spec):
    """The elements that `spec` names: an array, or (array, type), (array, count), (array, count, type)."""
    if spec is None:
        return np.empty(0, np.uint8)
    if not isinstance(spec, (list, tuple)):
        return _flat(spec)
    array, counts, datatype = _parsed(spec)
    array = _typed(_flat(array), datatype)
    return array if counts is None else array[: np.sum(_counts(counts))]


def _parsed(spec):
    """-> (array, counts, type)"""
    array, *rest = spec
    datatype = rest.pop() if rest and isinstance(rest[-1], (Datatype, str)) else None
    if len(rest) == 2:  # counts and displacements
        return array, tuple(rest), datatype
    return array, rest[0] if rest else None, datatype


def _counts(counts):
    return counts[0] if isinstance(counts, tuple) and len(counts) == 2 and np.ndim(counts[0]) else counts


class Parts:
    """A buffer with a part for each of `n` ranks: equal ones, or (array, counts, type), (array, (counts,
    displacements), type)."""

    def __init__(self, spec, n):
        counts = datatype = displacements = None
        if isinstance(spec, (list, tuple)):
            spec, counts, datatype = _parsed(spec)
        array = _typed(_flat(spec), datatype)
        if isinstance(counts, tuple) and len(counts) == 2 and np.ndim(counts[0]):
            counts, displacements = counts
        if counts is None or np.ndim(counts) == 0:
            each = array.size // n if counts is None else int(counts)
            if counts is None and array.size % n:
                raise ValueError(
                    f"MPI: the buffer has {array.size} elements; it must have a multiple of {n}, an "
                    "equal part for each rank"
                )
            counts = [each] * n
        if displacements is None:
            displacements = np.cumsum([0, *counts[:-1]])
        self.parts = [array[int(d) : int(d) + int(c)] for c, d in zip(counts, displacements, strict=True)]

    def __getitem__(self, rank):
        return self.parts[rank]

    def __iter__(self):
        return iter(self.parts)

    def fill(self, call, values):
        for part, value in zip(self.parts, values, strict=True):
            chunk(call, part, value)


def chunk(call, out, data):
    """Copy the bytes of `data` to the beginning of `out`."""
    if data.nbytes > out.nbytes:
        raise MPIError(
            f"MPI_ERR_TRUNCATE: {call}(): {data.nbytes} bytes came, more than the {out.nbytes} of the buffer"
        )
    out.view(np.uint8)[: data.nbytes] = data.view(np.uint8)
