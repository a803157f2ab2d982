"""The dtypes that reductions combine, in one table; and dtypes by their names."""

from typing import NamedTuple

import numpy as np

OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # what NumPy itself does not have


class Reducible(NamedTuple):
    """How elements of a dtype are combined.

    bytes     of an element
    wide      the dtype that they are widened to and combined in; the result is rounded once
    multimem  the type in PTX that ``multimem.ld_reduce`` takes them as; None where it combines none of them
    """

    bytes: int
    wide: str
    multimem: str | None = None


REDUCIBLE = {
    "float16": Reducible(2, "float32", "f16x2"),
    "bfloat16": Reducible(2, "float32", "bf16x2"),
    "float32": Reducible(4, "float32", "f32"),
    "float64": Reducible(8, "float64", "f64"),
    "float8_e4m3fn": Reducible(1, "float32"),
    "float8_e5m2": Reducible(1, "float32"),
    "int8": Reducible(1, "int8"),
    "int16": Reducible(2, "int16"),
    "int32": Reducible(4, "int32", "s32"),
    "int64": Reducible(8, "int64", "s64"),
    "uint8": Reducible(1, "uint8"),
    "uint16": Reducible(2, "uint16"),
    "uint32": Reducible(4, "uint32", "u32"),
    "uint64": Reducible(8, "uint64", "u64"),
}


def numpy_dtype(name):
    """The dtype of this name, as NumPy's; TypeError if there is none."""
    if name in OF_ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def widening(name):
    """How many times as many bytes a reducible dtype takes when it is widened."""
    return numpy_dtype(REDUCIBLE[name].wide).itemsize // REDUCIBLE[name].bytes
