"""OpenSHMEM's atomics on one element of a symmetric array, through NVSHMEM: any rank, over NVLink or the
network.

Each is called by one thread, acts on the first element of its array on rank `pe` (``atomic_add(counts[3:], 1,
pe)``) and is atomic among these functions, on elements of one dtype. The fetching ones return the old value
when it is here; the others return at once and are delivered after `quiet`. None orders anything else: `fence`
or `quiet`.
"""

from __future__ import annotations

from typing import Any

from shmemkit.compiler.ptx import data_pointer, gpu
from shmemkit.typing import Array

from ..argument_checks import INTEGERS, NUMBERS, check_array, check_integer
from ..emulator import current_thread, wrap
from .nvshmem_functions import nvshmem, to_pe

__all__ = [
    "atomic_add",
    "atomic_and",
    "atomic_compare_swap",
    "atomic_fetch",
    "atomic_fetch_add",
    "atomic_fetch_and",
    "atomic_fetch_inc",
    "atomic_fetch_or",
    "atomic_fetch_xor",
    "atomic_inc",
    "atomic_or",
    "atomic_set",
    "atomic_swap",
    "atomic_xor",
]


def _on_pe(name, array, pe, function):
    """In the emulator: array[0] = function(array[0]) on rank `pe`, or a load (None). -> the old value"""
    thread = current_thread(name)
    theirs = thread.block.machine.peer(thread.block, array, thread.members.pe(pe))
    one = theirs[(0,) * (theirs.ndim - 1)] if theirs.ndim > 1 else theirs
    return thread.atomic(one, 0, function, "sys")


def _send(name, array, pe, function):
    """In the emulator: the same, without a result: delivered later."""
    current_thread(name).atomic_on(array, pe, function)


def _check(name, array, dtypes, pe):
    check_array(name, "src" if name == "atomic_fetch" else "dst", array, dtypes=dtypes, contiguous=False)
    check_integer(name, pe=pe)


def _without_value(dtypes):
    """Decorator: NVSHMEM's function of the same name is the GPU implementation of ``primitive(dst, pe)``."""

    def register(primitive):
        name = primitive.__name__

        @gpu(primitive)
        def _(dst, pe):
            _check(name, dst, dtypes, pe)
            call = nvshmem(name)
            pe_of = to_pe()
            return lambda dst, pe: call(dst, pe_of(pe))

        return primitive

    return register


def _with_value(dtypes, by_dtype=False):
    """Decorator: the same for ``primitive(dst, value, pe)``. `by_dtype`: NVSHMEM's functions are named after
    the dtype. (nvshmem4py 0.4's own overloads of those on bits name functions that it has not.)"""

    def register(primitive):
        name = primitive.__name__

        @gpu(primitive)
        def _(dst, value, pe):
            _check(name, dst, dtypes, pe)
            dtype, pe_of = dst.dtype, to_pe()
            call = nvshmem(f"{dtype}_{name}" if by_dtype else name)
            if by_dtype:
                return lambda dst, value, pe: call(data_pointer(dst), dtype(value), pe_of(pe))
            return lambda dst, value, pe: call(dst, dtype(value), pe_of(pe))

        return primitive

    return register


_bitwise = _with_value(INTEGERS, by_dtype=True)


# ---- read, write, swap


def atomic_fetch(src: Array, pe: int) -> Any:
    """The value of ``src[0]`` on rank `pe`; 32- and 64-bit integers and floats."""
    return _on_pe("atomic_fetch", src, pe, None)


@gpu(atomic_fetch)
def _(src, pe):
    _check("atomic_fetch", src, NUMBERS, pe)
    call = nvshmem("atomic_fetch")
    pe_of = to_pe()
    return lambda src, pe: call(src, pe_of(pe))


@_with_value(NUMBERS)
def atomic_set(dst: Array, value: float, pe: int) -> None:
    """``dst[0] = value`` on rank `pe`; 32- and 64-bit integers and floats."""
    _send("atomic_set", dst, pe, lambda old: value)


@_with_value(NUMBERS)
def atomic_swap(dst: Array, value: float, pe: int) -> Any:
    """``dst[0] = value`` on rank `pe`; 32- and 64-bit integers and floats. -> the old value"""
    return _on_pe("atomic_swap", dst, pe, lambda old: value)


def atomic_compare_swap(dst: Array, cond: int, value: int, pe: int) -> int:
    """``dst[0] = value`` on rank `pe` if it is equal to `cond`; 32- and 64-bit integers. -> the old value"""
    return _on_pe("atomic_compare_swap", dst, pe, lambda old: value if old == wrap(cond, dst.dtype) else old)


@gpu(atomic_compare_swap)
def _(dst, cond, value, pe):
    _check("atomic_compare_swap", dst, INTEGERS, pe)
    call, dtype = nvshmem("atomic_compare_swap"), dst.dtype
    pe_of = to_pe()
    return lambda dst, cond, value, pe: call(dst, dtype(cond), dtype(value), pe_of(pe))


# ---- arithmetic


@_without_value(INTEGERS)
def atomic_inc(dst: Array, pe: int) -> None:
    """``dst[0] += 1`` on rank `pe`; 32- and 64-bit integers."""
    _send("atomic_inc", dst, pe, lambda old: old + 1)


@_without_value(INTEGERS)
def atomic_fetch_inc(dst: Array, pe: int) -> int:
    """``dst[0] += 1`` on rank `pe`; 32- and 64-bit integers. -> the old value"""
    return _on_pe("atomic_fetch_inc", dst, pe, lambda old: old + 1)


@_with_value(INTEGERS)
def atomic_add(dst: Array, value: int, pe: int) -> None:
    """``dst[0] += value`` on rank `pe`; 32- and 64-bit integers."""
    _send("atomic_add", dst, pe, lambda old: old + value)


@_with_value(INTEGERS)
def atomic_fetch_add(dst: Array, value: int, pe: int) -> int:
    """``dst[0] += value`` on rank `pe`; 32- and 64-bit integers. -> the old value"""
    return _on_pe("atomic_fetch_add", dst, pe, lambda old: old + value)


# ---- bits


@_bitwise
def atomic_and(dst: Array, value: int, pe: int) -> None:
    """``dst[0] &= value`` on rank `pe`; 32- and 64-bit integers."""
    _send("atomic_and", dst, pe, lambda old: old & value)


@_bitwise
def atomic_fetch_and(dst: Array, value: int, pe: int) -> int:
    """``dst[0] &= value`` on rank `pe`; 32- and 64-bit integers. -> the old value"""
    return _on_pe("atomic_fetch_and", dst, pe, lambda old: old & value)


@_bitwise
def atomic_or(dst: Array, value: int, pe: int) -> None:
    """``dst[0] |= value`` on rank `pe`; 32- and 64-bit integers."""
    _send("atomic_or", dst, pe, lambda old: old | value)


@_bitwise
def atomic_fetch_or(dst: Array, value: int, pe: int) -> int:
    """``dst[0] |= value`` on rank `pe`; 32- and 64-bit integers. -> the old value"""
    return _on_pe("atomic_fetch_or", dst, pe, lambda old: old | value)


@_bitwise
def atomic_xor(dst: Array, value: int, pe: int) -> None:
    """``dst[0] ^= value`` on rank `pe`; 32- and 64-bit integers."""
    _send("atomic_xor", dst, pe, lambda old: old ^ value)


@_bitwise
def atomic_fetch_xor(dst: Array, value: int, pe: int) -> int:
    """``dst[0] ^= value`` on rank `pe`; 32- and 64-bit integers. -> the old value"""
    return _on_pe("atomic_fetch_xor", dst, pe, lambda old: old ^ value)
