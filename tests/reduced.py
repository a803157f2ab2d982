"""What reductions should give, in NumPy: for the tests of AllReduce and ReduceScatter."""

import numpy as np

UFUNCS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def combined(op, arrays):
    """In the order given, float16 and bfloat16 in float32."""
    dtype = arrays[0].dtype
    wide = [a.astype("float32") if dtype.name in ("float16", "bfloat16") else a for a in arrays]
    total = wide[0]
    with np.errstate(all="ignore"):
        for array in wide[1:]:
            total = UFUNCS[op](total, array)
        return (total / total.dtype.type(len(arrays)) if op == "avg" else total).astype(dtype)
