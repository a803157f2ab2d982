"""The arguments of a GEMM method, and how errors show them."""

import operator
from typing import Any, NamedTuple

import numpy as np

from shmemkit.device.cuda.float_storage import ELEMENTS
from shmemkit.runtime.budget import within
from shmemkit.support.settings import listed

HALVES = ("bfloat16", "float16")
FLOAT8 = "float8_e4m3fn"


class Problem(NamedTuple):
    """out = activation(a @ b + bias): arrays (m, k), (k, n), (m, n), (n,) or None, of any strides, on which
    ``Gemm`` has checked shapes and dtypes; of float8, the scales of a and b, as of `matmul`."""

    a: Any
    b: Any
    out: Any
    bias: Any
    activation: str | None
    scales: tuple[Any, Any] | None = None

    @property
    def size(self) -> tuple[int, int, int]:
        """m, n, k"""
        return *self.out.shape, self.a.shape[1]


def not_of_tensor_cores(problem, dtypes=HALVES):
    """-> why tensor cores do not compute it, of operands that are one of `dtypes`, or None."""
    given, result = problem.a.dtype.name, problem.out.dtype.name
    if given not in dtypes or result not in ELEMENTS:
        return (
            f"the operands are {given} and the result is {result}; they must be {listed(dtypes)}, and the "
            f"result {listed(ELEMENTS)}"
        )
    if not all(problem.size):
        return f"M, N and K are {problem.size}; they must be 1 or more"
    bias = problem.bias
    if bias is not None and bias.size > 1 and bias.strides[0] != bias.dtype.itemsize:
        return f"bias has a stride of {bias.strides[0]} bytes; it must be contiguous"
    return None


class Gpu(NamedTuple):
    """Where it is computed. `arrays` is CuPy, or on the emulator NumPy. With a budget, `sms`, products use so
    many multiprocessors at most."""

    compute_capability: tuple
    multiprocessors: int
    shared_bytes: int  # that a block may have
    arrays: Any
    sms: int | None = None

    def limited(self, sms):
        """-> the same, within a budget; None: none"""
        most = self.multiprocessors
        return self if sms is None else self._replace(multiprocessors=min(most, sms), sms=sms)

    def blocks(self, wanted):
        """-> the blocks of a launch, of as many as are wanted"""
        return within("product", self.sms, wanted)

    @property
    def capability(self):
        """ "9.0" """
        return ".".join(map(str, self.compute_capability))


def arrays_of(array) -> Any:
    """CuPy or NumPy."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def check_order(order, n_m, n_n):
    """ValueError unless `order`, of a Gemm's (None: a method's own), gives each of n_m by n_n tiles once."""
    function, given = getattr(order, "py_func", order), set()
    for turn in range(n_m * n_n if order is not None else 0):
        tile = function(turn, n_m, n_n)
        try:
            m, n = map(operator.index, tile)
        except (TypeError, ValueError):
            m = n = -1
        if not (0 <= m < n_m and 0 <= n < n_n) or (m, n) in given:
            raise ValueError(
                f"Gemm: order gives {tile} for turn {turn} of {n_m} by {n_n} tiles; it must give each tile "
                "(m, n) once"
            )
        given.add((m, n))


def flat(array, dtype):
    """The memory of an array with strides that are not negative, from its first element to its last, as a
    1-D array of `dtype`, as wide as its elements, or as some in a row of which all is a multiple."""
    if not array.size:
        return array.reshape(-1).view(dtype)
    itemsize = array.dtype.itemsize
    steps = zip(array.shape, array.strides, strict=True)
    n = 1 + sum((size - 1) * stride // itemsize for size, stride in steps)
    arrays: Any = arrays_of(array)
    strided = arrays.lib.stride_tricks.as_strided
    return strided(array, (n,), (itemsize,)).view(dtype)
