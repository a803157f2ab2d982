"""MPI's reductions."""

import functools
import operator

import numpy as np

from shmemkit.emu.stand_in_modules import refuse

_INSTEAD = "Use the lower-case methods"


class Op:
    """``MPI.SUM`` and the like. `objects` and `arrays` combine two objects, or two arrays by elements."""

    def __init__(self, name, objects, arrays):
        self.name, self._objects, self._arrays = name, objects, arrays

    @classmethod
    def Create(cls, function, commute=False):
        """An operation of the script's own, on objects."""
        refused = refuse("an operation of MPI.Op.Create with buffers", _INSTEAD)
        return cls(getattr(function, "__name__", "an operation"), function, refused)

    def Free(self):
        pass

    def __call__(self, x, y):
        return self._objects(x, y)

    def __repr__(self):
        return f"MPI.{self.name}"

    def of_objects(self, values):
        return functools.reduce(self._objects, values)

    def of_arrays(self, arrays):
        if len({(a.dtype, a.size) for a in arrays}) > 1:
            given = ", ".join(f"{a.size} {a.dtype}" for a in arrays)
            raise ValueError(f"{self}: the ranks' buffers are {given}; they must be of one type and size")
        with np.errstate(over="ignore"):
            return functools.reduce(lambda a, b: self._arrays(a, b).astype(a.dtype), arrays)


def _first_of(compare):
    """(value, location): the value that wins, the lowest location of equal ones."""

    def choose(x, y):
        if x[0] == y[0]:
            return (x[0], min(x[1], y[1]))
        return x if compare(x[0], y[0]) else y

    return choose


_no_pairs = refuse("MINLOC or MAXLOC of buffers", _INSTEAD)

OPS = {
    op.name: op
    for op in (
        Op("SUM", operator.add, np.add),
        Op("PROD", operator.mul, np.multiply),
        Op("MAX", max, np.maximum),
        Op("MIN", min, np.minimum),
        Op("LAND", lambda x, y: bool(x) and bool(y), np.logical_and),
        Op("LOR", lambda x, y: bool(x) or bool(y), np.logical_or),
        Op("LXOR", lambda x, y: bool(x) != bool(y), np.logical_xor),
        Op("BAND", operator.and_, np.bitwise_and),
        Op("BOR", operator.or_, np.bitwise_or),
        Op("BXOR", operator.xor, np.bitwise_xor),
        Op("MAXLOC", _first_of(operator.gt), _no_pairs),
        Op("MINLOC", _first_of(operator.lt), _no_pairs),
    )
}
