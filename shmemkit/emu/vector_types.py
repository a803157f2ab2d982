"""CUDA's vector types inside emulated kernels: ``cuda.float32x4(x, y, z, w)`` and their aliases."""

from typing import Any

from numba import cuda

from .cuda_integers import CASTS, FLOATS

_AXES = "xyzw"


class Vector:
    """`n` numbers of one type."""

    __slots__ = ()
    n, convert = 0, int

    def __init__(self, *arguments):
        """Numbers, and other vectors, `n` elements in all."""
        elements: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Vector):
                elements += [getattr(argument, axis) for axis in argument.__slots__]
            else:
                elements.append(argument)
        if len(elements) != self.n:
            raise TypeError(
                f"cuda.{type(self).__name__}: {len(elements)} elements are given; it takes {self.n}, as "
                "numbers or as other vectors"
            )
        for axis, element in zip(self.__slots__, elements, strict=True):
            object.__setattr__(self, axis, type(self).convert(element))

    def __setattr__(self, axis, value):
        raise AttributeError(f"cuda.{type(self).__name__}: {axis} cannot be set. Make a new vector")

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(str(getattr(self, axis)) for axis in self.__slots__)})"


def _vector_type(name):
    n = int(name[-1])
    convert = (CASTS | FLOATS)[name[:-2]]
    return type(name, (Vector,), {"__slots__": tuple(_AXES[:n]), "n": n, "convert": staticmethod(convert)})


# What Numba has under these names -> what they are here.
VECTOR_TYPES: dict[Any, Any] = {
    getattr(cuda, f"{base}x{n}"): _vector_type(f"{base}x{n}")
    for base in "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64".split()
    for n in (1, 2, 3, 4)
}
