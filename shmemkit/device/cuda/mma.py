"""Matrix products by the tensor cores, a warp at a time, and what brings the operands to them: GPUs of
compute capability 8.0 and later.

  cp_async, cp_async_commit, cp_async_wait    from global to shared memory, past the registers, while the
                                              thread does something else
  ldmatrix, ldmatrix_trans                    from shared memory to the registers of a warp
  warp_mma(m, n, dtype)                       products of those (mma.sync)

A warp's operands and results are spread over its lanes' registers, as tuples. In units of 32 bits, lane l
has, of a matrix of 8 rows of 8 elements of 16 bits, elements 2 * (l % 4) and the next one of row l // 4. PTX
ISA: "Matrix multiply-accumulate", mma.m16n8k16, ldmatrix, cp.async.

The machine code must keep (docs/machine_code.md): whole warp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from shmemkit.compiler.ptx import TypingError, asm, element_address, float_zeros, gpu, shared_address, types
from shmemkit.support.dtypes import numpy_dtype
from shmemkit.typing import Array

from ..argument_checks import check_aligned, check_array, check_choice, check_integer, literal_choice
from ..emulator import copies_of, current_thread, from_scalar, group_thread

__all__ = [
    "WarpMma",
    "cp_async",
    "cp_async_commit",
    "cp_async_wait",
    "ldmatrix",
    "ldmatrix_trans",
    "warp_mma",
]

MMA_DTYPES = ("bfloat16", "float16")
WIDTHS = (16, 8, 4)
MAX_GROUPS = 8


def cp_async(
    shared: Array, offset: int, array: Array, index: int, n_bytes: int, width: Literal[4, 8, 16]
) -> None:
    """Begin to copy `n_bytes` from ``array[index]`` on to byte `offset` of shared memory.

    shared   an array in shared memory, contiguous; offset: a multiple of width
    array    in global memory, 1-D, contiguous, of any dtype; the address of array[index] is a multiple of
             width. With n_bytes = 0 it is not read
    n_bytes  0 to width; the rest of the `width` bytes becomes zeros
    width    16, 8 or 4, written out in the call

    Any thread may call it. The bytes are there for this thread after ``cp_async_wait``, for the others of its
    block after a barrier behind that; the source may change only then, too. It reads what the thread has
    acquired before.
    """
    thread = current_thread("cp_async")
    check_choice("cp_async", "width", width, WIDTHS)
    offset, index, n_bytes = int(offset), int(index), int(n_bytes)
    size = array.itemsize
    if not 0 <= n_bytes <= width:
        raise ValueError(f"cp_async(): n_bytes is {n_bytes}; it must be 0 to {width}, the width")
    if not 0 <= offset <= shared.nbytes - width or offset % width:
        raise ValueError(
            f"cp_async(): offset is {offset}; it must be a multiple of {width}, the width, 0 to "
            f"{shared.nbytes - width} in shared memory of {shared.nbytes} bytes"
        )
    if n_bytes and not 0 <= index * size <= array.nbytes - n_bytes:
        raise IndexError(
            f"cp_async(): index is {index} and n_bytes {n_bytes}; the bytes must lie in array, which has "
            f"{array.size} elements of {size} bytes"
        )
    if n_bytes:
        check_aligned("cp_async", f"array[{index}]", np.asarray(array)[index:], width)

    def arrive():
        room = thread.bytes_of("write", shared, offset, offset + width)
        room[:] = 0
        if n_bytes:
            room[:n_bytes] = thread.bytes_of("read", array, index * size, index * size + n_bytes)

    thread.bytes_of("write", shared, offset, offset + width)[:] = 0xFF
    if n_bytes:
        thread.bytes_of("read", array, index * size, index * size + n_bytes)
    copies_of(thread).issue(arrive)


def cp_async_commit() -> None:
    """Close a group: it has this thread's copies since the last commit. A group may be empty."""
    copies_of(current_thread("cp_async_commit")).commit()


def cp_async_wait(n: int) -> None:
    """Wait until all but the last `n` groups of this thread have arrived. n: 0 to 7, a constant."""
    copies = copies_of(current_thread("cp_async_wait"))
    check_choice("cp_async_wait", "n", n, range(MAX_GROUPS))
    copies.wait(n)


def ldmatrix(shared: Array, offset: int) -> tuple[int, ...]:
    """Load four matrices of 8 by 8 elements of 16 bits. -> this lane's registers of them, a tuple of four
    uint32

    shared   an array in shared memory, contiguous
    offset   where a row of 16 bytes begins, a multiple of 16: that of lane 8 * i + j is row j of matrix i

    All lanes of a warp call it together. Like ordinary loads it orders nothing.
    """
    return _loaded(group_thread("warp", "ldmatrix", shared), "ldmatrix", shared, offset, lambda rows: rows)


def ldmatrix_trans(shared: Array, offset: int) -> tuple[int, ...]:
    """As ``ldmatrix``, but the matrices are transposed: for matrices that are stored by columns."""
    return _loaded(
        group_thread("warp", "ldmatrix_trans", shared),
        "ldmatrix_trans",
        shared,
        offset,
        lambda rows: rows.transpose(0, 2, 1),
    )


def _loaded(thread, primitive, shared, offset, turned):
    """In the emulator."""
    offset = int(offset)
    if not 0 <= offset <= shared.nbytes - 16 or offset % 16:
        raise ValueError(
            f"{primitive}(): offset is {offset}; it must be a multiple of 16, 0 to {shared.nbytes - 16} in "
            f"shared memory of {shared.nbytes} bytes"
        )
    row = thread.bytes_of("read", shared, offset, offset + 16).view(np.uint16)

    def distribute(rows):
        matrices = np.stack([rows[t] for t in sorted(rows)]).reshape(4, 8, 8)
        return np.ascontiguousarray(turned(matrices)).view(np.uint32).reshape(4, 32).T

    return tuple(map(from_scalar, _together(thread, primitive, row.copy(), distribute)[thread.lane]))


def _together(thread, what, value, function):
    """A rendezvous of all lanes of a warp; no memory is ordered."""
    if thread.warp_size() < 32:
        raise ValueError(f"{what}(): the warp has {thread.warp_size()} threads; it must have 32")
    return thread.block.meeting(thread, "warp", what=what).join(thread, value, function)


class WarpMma(NamedTuple):
    """Functions for kernels, called by all lanes of a warp together; they touch no memory.

    zero()          -> acc of zeros
    mma(acc, a, b)  -> acc + a @ b, in float32

    acc   4 * m * n float32: element 4 * (i * n + j) + 2 * r + c is row 16 * i + 8 * r + lane // 4, column
          8 * j + 2 * (lane % 4) + c
    a     4 * m uint32, for 16 * m rows of 16: four by four what ``ldmatrix`` gives of the quarters in the
          order of rows, then columns: (0, 0), (8, 0), (0, 8), (8, 8)
    b     2 * n uint32, for 8 * n columns of 16: two by two what ``ldmatrix`` gives of the columns, as rows of
          a matrix of 8 by 8: of the first eight elements of each, then of the others
    """

    zero: Callable
    mma: Callable


@functools.cache
def warp_mma(m: int, n: int, dtype: str) -> WarpMma:
    """-> the WarpMma of 16 * m by 8 * n results, of "bfloat16" or "float16" operands"""
    check_choice("warp_mma", "dtype", dtype, MMA_DTYPES)
    functions = _emulated(m, n, dtype)
    _register(*functions, m, n, dtype)
    return functions


# ---- in the emulator: acc is an array


def _emulated(m, n, dtype):
    def widened(registers):
        halves = np.array(registers, np.uint32).reshape(8, 4, -1).view(np.uint16)
        return halves.view(numpy_dtype(dtype)).astype(np.float32)

    def zero():
        current_thread("zero")
        return np.zeros(4 * m * n, np.float32)

    def multiply(lanes):
        acc, a, b = (list(of_lanes) for of_lanes in zip(*(lanes[t] for t in sorted(lanes)), strict=True))
        # Letters: row group, quad; tile of rows or columns; half of columns, of rows; element.
        rows = widened(a).reshape(8, 4, m, 2, 2, 2).transpose(2, 4, 0, 3, 1, 5).reshape(16 * m, 16)
        columns = widened(b).reshape(8, 4, n, 2, 2).transpose(2, 0, 3, 1, 4).reshape(8 * n, 16)
        with np.errstate(all="ignore"):
            product = (rows @ columns.T).reshape(m, 2, 8, n, 4, 2).transpose(2, 4, 0, 3, 1, 5)
            return np.stack(acc) + product.reshape(32, -1)

    def mma(acc, a, b):
        thread = group_thread("warp", "mma")
        if (len(acc), len(a), len(b)) != (4 * m * n, 4 * m, 2 * n):
            raise ValueError(
                f"mma(): acc, a and b have {len(acc)}, {len(a)} and {len(b)} elements; they must have "
                f"{4 * m * n}, {4 * m} and {2 * n}"
            )
        return _together(thread, "mma", (acc, a, b), multiply)[thread.lane]

    return WarpMma(zero, mma)


# ---- on the GPU


def _register(zero, mma, m, n, dtype):
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    size = 4 * m * n
    text = ""
    for i in range(m):
        for j in range(n):
            result, a, b = 4 * (i * n + j), 2 * size + 4 * i, 2 * size + 4 * m + 2 * j
            acc, rows, columns = (
                ", ".join(f"${first + k}" for k in range(count))
                for first, count in ((result, 4), (a, 4), (b, 2))
            )
            text += (
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
                f"{{{acc}}}, {{{rows}}}, {{{columns}}}, {{{acc}}}; "
            )
    accumulators = types.UniTuple(types.float32, size)
    operands = types.UniTuple(types.uint32, 4 * m), types.UniTuple(types.uint32, 2 * n)
    multiply = asm(text, accumulators, (accumulators, *operands), tied=True, pure=True, together=True)
    zeros = float_zeros(size)

    @gpu(zero)
    def _():
        return lambda: zeros()

    @gpu(mma)
    def _(acc, a, b):
        if (acc, a, b) != (accumulators, *operands):
            raise TypingError(
                f"mma(): acc, a and b are of types {acc}, {a} and {b}; they must be {accumulators}, "
                f"{operands[0]} and {operands[1]}"
            )
        return lambda acc, a, b: multiply(acc, a, b)


def _check_shared(primitive, shared):
    check_array(primitive, "shared", shared)


@functools.cache
def _copy(width):
    cache = "cg" if width == 16 else "ca"
    return asm(
        f"cp.async.{cache}.shared.global.L2::128B [$0], [$1], {width}, $2;",
        types.void,
        (types.uint32, types.uint64, types.uint32),
    )


@gpu(cp_async)
def _(shared, offset, array, index, n_bytes, width):
    _check_shared("cp_async", shared)
    check_integer("cp_async", offset=offset, index=index, n_bytes=n_bytes)
    check_array("cp_async", "array", array, 1)
    copy = _copy(literal_choice("cp_async", "width", width, WIDTHS))

    def impl(shared, offset, array, index, n_bytes, width):
        copy(shared_address(shared) + types.uint32(offset), element_address(array, index), n_bytes)

    return impl


_commit = asm("cp.async.commit_group;")


@gpu(cp_async_commit)
def _():
    return lambda: _commit()


_waits = [asm(f"cp.async.wait_group {n};") for n in range(MAX_GROUPS)]


@gpu(cp_async_wait)
def _(n):
    wait = _waits[literal_choice("cp_async_wait", "n", n, range(MAX_GROUPS))]
    return lambda n: wait()


def _loading(primitive, modifier):
    load = asm(
        f"ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        types.UniTuple(types.uint32, 4),
        (types.uint32,),
    )

    @gpu(primitive)
    def _(shared, offset):
        _check_shared(primitive.__name__, shared)
        check_integer(primitive.__name__, offset=offset)
        return lambda shared, offset: load(shared_address(shared) + types.uint32(offset))


_loading(ldmatrix, "")
_loading(ldmatrix_trans, ".trans")
