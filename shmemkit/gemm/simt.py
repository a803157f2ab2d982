"""Matrix product by ordinary arithmetic: any GPU, any strides, floats and integers; and the emulator.

    out[M, N] = activation(A[M, K] @ B[K, N] + bias[N])

A block of 256 threads computes 64 by 64 elements of out, a thread 4 by 4 of them, in registers. For 16 of K
at a time:

  1. each thread brings 4 elements of A's and 4 of B's tile to shared memory; beyond the edges, zeros
  2. syncthreads: they are there
  3. each thread adds up the products of its rows and columns
  4. syncthreads: they have been read

float16 and bfloat16 are widened, and added up in float32. Integers are computed modulo 2**64, and out gets
the low bits. They are int64, which "relu" may find negative, or uint64 if both operands and out are unsigned.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from shmemkit.compiler.ptx import gpu, gpu_function
from shmemkit.device.cuda.float_storage import ELEMENTS, element
from shmemkit.device.cuda.register_tuples import for_each_part
from shmemkit.device.cuda.subarrays import span
from shmemkit.device.emulator import current_thread
from shmemkit.runtime.launch import bind
from shmemkit.support.settings import listed

from .epilogue import finishing, inline
from .problem import check_order
from .sm80 import grouping

TILE, DEPTH, PART, THREADS = 64, 16, 4, 256
# In shared memory, four rows (of B, columns) lie together: 4 of each k, as a thread reads them. Four elements
# more spread what the threads of a warp read over the banks.
FOUR_ROWS = DEPTH * PART + 4
SLAB = TILE // PART * FOUR_ROWS
GROUP = 8  # tile rows that are computed together, for the L2 cache
DTYPES = "bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()


def stored(dtype):
    """What an array of `dtype` is given to the kernel as."""
    return element(dtype).stored if dtype in ELEMENTS else dtype


def wide(dtype, out_dtype):
    """What products of elements of `dtype` are added up in, for results of `out_dtype`."""
    if dtype in ELEMENTS:
        return "float32"
    kinds = {np.dtype(dtype).kind, np.dtype(out_dtype).kind}
    return "float64" if kinds == {"f"} else "uint64" if kinds == {"u"} else "int64"


class _Products(NamedTuple):
    """zeros() -> acc; add(acc, a, b) -> acc plus, for each of DEPTH, the products of 4 elements of a and 4
    of b; 16 numbers, row after row. By any thread; a and b are 1-D arrays in shared memory."""

    zeros: Any
    add: Any


@functools.cache
def _products(dtype):
    zero = np.dtype(dtype).type(0)

    def zeros():
        current_thread("zeros")
        return np.zeros(PART * PART, dtype)

    def add(acc, a, b):
        thread = current_thread("add")
        rows, columns = (
            thread.bytes_of("read", x, 0, x.nbytes).view(dtype).reshape(DEPTH, PART) for x in (a, b)
        )
        with np.errstate(all="ignore"):
            return acc + (rows.T @ columns).reshape(-1)

    @gpu_function
    def along_a_row(acc, x, y):
        return acc[0] + x * y[0], acc[1] + x * y[1], acc[2] + x * y[2], acc[3] + x * y[3]

    @gpu(zeros)
    def _():
        nothing = (zero,) * (PART * PART)
        return lambda: nothing

    @gpu(add)
    def _(acc, a, b):
        def impl(acc, a, b):
            for k in range(0, DEPTH * PART, PART):
                y = b[k], b[k + 1], b[k + 2], b[k + 3]
                low = along_a_row(acc[:4], a[k], y) + along_a_row(acc[4:8], a[k + 1], y)
                high = along_a_row(acc[8:12], a[k + 2], y) + along_a_row(acc[12:], a[k + 3], y)
                acc = low + high
            return acc

        return impl

    return _Products(zeros, add)


@functools.cache
def simt_kernel(dtype, out_dtype, a_by_k, b_by_k, bias_dtype=None, activation=None, order=None):
    """-> the kernel, which takes arrays (M, K), (K, N) and (M, N), of any strides, as ``stored`` says

    a_by_k, b_by_k   whether K is where A's, B's elements are closest: neighbouring threads load along it
    order            the tiles' order, a device function (turn, n_m, n_n) -> (m, n), as of ``grouping``
    """
    order = order or grouping(GROUP)
    sum_dtype = wide(dtype, out_dtype)
    shared_type = getattr(types, sum_dtype)
    zeros, add = _products(sum_dtype)
    zero = np.dtype(sum_dtype).type(0)
    finish = finishing(bias_dtype, activation, sum_dtype)
    if dtype in ELEMENTS:
        widen = element(dtype).widen
    else:
        widen = inline(lambda x: x)
    if out_dtype in ELEMENTS:
        narrow = element(out_dtype).narrow
    else:
        narrow = inline(lambda x: x)
    rounds = TILE * DEPTH // THREADS

    @inline
    def my_place(by_k, i):
        """-> which of TILE rows or columns, which of DEPTH"""
        t = cuda.threadIdx.x + i * THREADS
        if by_k:
            return t >> 4, t & 15
        return t & 63, t >> 6

    @inline
    def place(row, k):
        return (row >> 2) * FOUR_ROWS + k * PART + (row & 3)

    @inline
    def store_row(part, i, arguments):
        out, bias, row, column = arguments
        row += i
        if row < out.shape[0]:
            for j in range(PART):
                if column + j < out.shape[1]:
                    # A register cannot be indexed.
                    x = part[0] if j == 0 else part[1] if j == 1 else part[2] if j == 2 else part[3]
                    out[row, column + j] = narrow(finish(x, bias, column + j))

    store = for_each_part(PART, store_row)

    @cuda.jit(launch_bounds=(THREADS, 1))
    def gemm_simt(a, b, out, bias):
        a_slab = cuda.shared.array(SLAB, shared_type)
        b_slab = cuda.shared.array(SLAB, shared_type)
        mine_of_a = span(a_slab, (cuda.threadIdx.x >> 4) * FOUR_ROWS, DEPTH * PART)
        mine_of_b = span(b_slab, (cuda.threadIdx.x & 15) * FOUR_ROWS, DEPTH * PART)
        m, n, depth = out.shape[0], out.shape[1], a.shape[1]
        n_m, n_n, turn = (m + TILE - 1) >> 6, (n + TILE - 1) >> 6, cuda.blockIdx.x
        row, column = (cuda.threadIdx.x >> 4) * PART, (cuda.threadIdx.x & 15) * PART
        while turn < n_m * n_n:
            i, j = order(turn, n_m, n_n)
            row0, column0 = i * TILE, j * TILE
            acc = zeros()
            k0 = 0
            while k0 < depth:
                for i in range(rounds):
                    at, k = my_place(a_by_k, i)
                    x = zero
                    if row0 + at < m and k0 + k < depth:
                        x = shared_type(widen(a[row0 + at, k0 + k]))
                    a_slab[place(at, k)] = x
                    at, k = my_place(b_by_k, i)
                    y = zero
                    if column0 + at < n and k0 + k < depth:
                        y = shared_type(widen(b[k0 + k, column0 + at]))
                    b_slab[place(at, k)] = y
                cuda.syncthreads()  # 2
                acc = add(acc, mine_of_a, mine_of_b)
                cuda.syncthreads()  # 4
                k0 += DEPTH
            store(acc, (out, bias, row0 + row, column0 + column))
            turn += cuda.gridDim.x

    return gemm_simt


class Simt:
    """A product that is bound to the kernel: call it with a stream."""

    @staticmethod
    def unsupported(problem, gpu):
        """-> why it cannot compute `problem`, or None."""
        dtype = problem.a.dtype.name
        return None if dtype in DTYPES else f"the dtype is {dtype}; it must be {listed(DTYPES)}"

    def __init__(self, problem, gpu, order=None):
        a, b, out, bias, activation, _ = problem
        (m, n, _), dtype = problem.size, a.dtype.name
        a_by_k = abs(a.strides[1]) <= abs(a.strides[0])
        b_by_k = abs(b.strides[0]) <= abs(b.strides[1])
        bias_dtype = None if bias is None else bias.dtype.name
        bias = out[0] if bias is None else bias
        tiles = math.ceil(m / TILE), math.ceil(n / TILE)
        check_order(order, *tiles)
        kernel = simt_kernel(dtype, out.dtype.name, a_by_k, b_by_k, bias_dtype, activation, order)
        arrays = [x.view(stored(x.dtype.name)) for x in (a, b, out, bias)]
        self._launch = bind(kernel, gpu.blocks(math.prod(tiles)), THREADS, tuple(arrays))

    def __call__(self, stream=None):
        self._launch(stream)


def _listed(dtype, out_dtype, bias_dtype=None, activation=None, layout="C"):
    kernel = simt_kernel(dtype, out_dtype, layout != "F", layout == "F", bias_dtype, activation)
    a, out = (getattr(types, stored(name)) for name in (dtype, out_dtype))
    bias = getattr(types, stored(bias_dtype or out_dtype))
    arrays = types.Array(a, 2, layout), types.Array(a, 2, layout), types.Array(out, 2, "C"), bias[::1]
    return kernel, arrays


GPU_KERNELS = {
    "float32": _listed("float32", "float32"),
    "float32 silu": _listed("float32", "float32", "float32", "silu", "F"),
    "float64 gelu": _listed("float64", "float64", "float64", "gelu", "A"),
    "bfloat16": _listed("bfloat16", "bfloat16", "float32", "relu", "A"),
    "int8": _listed("int8", "int32"),
    "uint64": _listed("uint64", "uint64", "uint64"),
    "uint64 signed": _listed("uint64", "int64", "int64", "relu"),
}
