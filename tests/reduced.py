"""What reductions should give, in NumPy: for the tests of AllReduce and ReduceScatter."""

import numpy as np

LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344}
UFUNCS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def combined(op, arrays):
    """In the order given, float16, bfloat16 and float8 in float32; float8 saturates."""
    dtype = arrays[0].dtype
    narrow = dtype.name in ("float16", "bfloat16", *LARGEST)
    wide = [a.astype("float32") if narrow else a for a in arrays]
    total = wide[0]
    with np.errstate(all="ignore"):
        for array in wide[1:]:
            total = UFUNCS[op](total, array)
        total = total / total.dtype.type(len(arrays)) if op == "avg" else total
        return float8(total, dtype) if dtype.name in LARGEST else total.astype(dtype)


def float8(numbers, dtype):
    """float32 numbers as cvt.rn.satfinite makes float8 of them."""
    most = LARGEST[dtype.name]
    with np.errstate(all="ignore"):
        result = np.clip(numbers, -most, most).astype(dtype)
    result[np.isnan(numbers)] = np.uint8(0x7F).view(dtype)
    return result
