"""OpenSHMEM's one-sided transfers, through NVSHMEM: any rank, over NVLink or the network.

A *put* has read its source when it returns. Its data has arrived after the caller's `quiet`; or, as the
target sees it, once the target has read a signal that follows the put. A *non-blocking* (`_nbi`) put may
read its source, and a non-blocking get may write its destination, at any time until the caller's `quiet`. A
`fence` keeps puts to one rank in order; nothing else does.

One thread calls the plain form. All threads of a warp or block call `_warp` and `_block`, with the same
arguments, and share the work. Such a call begins and ends with a barrier of the warp or block. So it sends
what its threads stored before, and its local part is complete for all of them when it returns.

Wrong arguments are TypingError when a kernel is compiled, and TypeError or ValueError on the emulator.
"""

from __future__ import annotations

from typing import Any

from shmemkit.compiler.ptx import TypingError, bits_of, from_bits, gpu, itemsize, types, unsigned_view
from shmemkit.typing import Array

from ..argument_checks import (
    SIGNALS,
    check_array,
    check_contiguous,
    check_emulated_integer,
    check_emulated_words,
    check_integer,
    check_words,
)
from ..emulator import current_thread, uninitialised
from ..enums import signal_op_name
from .groups import ENTER, called_by, called_by_a_thread
from .nvshmem_functions import nvshmem, signal_array, to_pe

__all__ = [
    "fence",
    "g",
    "get",
    "get_block",
    "get_nbi",
    "get_nbi_block",
    "get_nbi_warp",
    "get_warp",
    "p",
    "put",
    "put_block",
    "put_nbi",
    "put_nbi_block",
    "put_nbi_warp",
    "put_signal",
    "put_signal_block",
    "put_signal_nbi",
    "put_signal_nbi_block",
    "put_signal_nbi_warp",
    "put_signal_warp",
    "put_warp",
    "quiet",
]


def _transferring(kind, name, group):
    """The family of ``put(dst, src, pe)``. On the GPU it is NVSHMEM's function of that name. Elements move as
    unsigned integers of their size, so that every dtype has a function."""
    enter, (verb, *forms) = ENTER[group], kind.split("_")

    def transfer(dst, src, pe):
        thread = enter(group, name, dst, src, pe)
        thread.together(group, lambda: getattr(thread, verb)(dst, src, pe, nbi="nbi" in forms))

    def on_gpu(dst, src, pe):
        check_contiguous(name, dst=dst, src=src)
        check_integer(name, pe=pe)
        call = nvshmem(name)
        pe_of = to_pe()
        return lambda dst, src, pe: call(unsigned_view(dst), unsigned_view(src), pe_of(pe))

    return transfer, on_gpu


def _signalling(kind, name, group):
    """Likewise that of ``put_signal(dst, src, signal_var, signal_val, signal_op, pe)``."""
    enter, nbi = ENTER[group], kind.endswith("_nbi")

    def transfer(dst, src, signal_var, signal_val, signal_op, pe):
        thread = enter(group, name, dst, src, signal_var, signal_val, signal_op, pe)

        def put():
            check_emulated_words(name, "signal_var", signal_var, SIGNALS)
            check_emulated_integer(name, signal_val=signal_val, signal_op=signal_op, pe=pe)
            op = signal_op_name(name, signal_op)
            thread.put(dst, src, pe, nbi, signal_var, signal_val, op)

        thread.together(group, put)

    def on_gpu(dst, src, signal_var, signal_val, signal_op, pe):
        check_contiguous(name, dst=dst, src=src)
        check_words(name, "signal_var", signal_var, SIGNALS)
        check_integer(name, signal_val=signal_val, signal_op=signal_op, pe=pe)
        call = nvshmem(name)
        pe_of = to_pe()

        def impl(dst, src, signal_var, signal_val, signal_op, pe):
            value, op = types.uint64(signal_val), types.int32(signal_op)
            call(unsigned_view(dst), unsigned_view(src), signal_array(signal_var), value, op, pe_of(pe))

        return impl

    return transfer, on_gpu


# ---- one element


def p(dst: Array, src: complex, pe: int) -> None:
    """Store the number `src` to ``dst[0]`` on rank `pe`.

    dst   symmetric array of elements of 1, 2, 4 or 8 bytes
    src   a number, converted to dst's dtype

    One thread. It has arrived after `quiet`. It arrives as a whole, so it may be a flag that the target
    waits for.
    """
    thread = current_thread("p")
    value = uninitialised(1, dst.dtype)
    value[0] = src
    thread.put(dst, value, pe, word=True)


@gpu(p)
def _(dst, src, pe):
    _check_element("p", "dst", dst)
    check_integer("p", pe=pe)
    call = nvshmem("p")
    pe_of = to_pe()
    return lambda dst, src, pe: call(unsigned_view(dst), bits_of(dst, src), pe_of(pe))


def g(src: Array, pe: int) -> Any:
    """Load ``src[0]`` of rank `pe`. One thread; elements of 1, 2, 4 or 8 bytes. -> the value, once it is here

    An earlier `p` of this thread to that element may still be in flight: call `quiet` between them.
    """
    thread = current_thread("g")
    value = uninitialised(1, src.dtype)
    thread.get(value, src, pe, word=True)
    return value[0]


@gpu(g)
def _(src, pe):
    _check_element("g", "src", src)
    check_integer("g", pe=pe)
    call = nvshmem("g")
    pe_of = to_pe()
    return lambda src, pe: from_bits(src, call(unsigned_view(src), pe_of(pe)))


def _check_element(primitive, name, array):
    check_array(primitive, name, array)
    if itemsize(array.dtype) not in (1, 2, 4, 8):
        raise TypingError(
            f"{primitive}(): {name} has elements of {itemsize(array.dtype)} bytes; they must have 1, 2, 4 "
            "or 8"
        )


# ---- put


@called_by_a_thread(_transferring)
def put(dst: Array, src: Array, pe: int) -> None:
    """Copy the local `src` to the symmetric `dst` on rank `pe`.

    dst, src   contiguous arrays of one dtype, any dtype and shape; ``min(dst.size, src.size)`` elements are
               copied

    One thread. `src` may be overwritten when it returns. The data has arrived after `quiet`.
    """


put_warp = called_by("warp", put)
"""`put` by all threads of a warp."""
put_block = called_by("block", put)
"""`put` by all threads of a block."""


@called_by_a_thread(_transferring)
def put_nbi(dst: Array, src: Array, pe: int) -> None:
    """`put` that returns at once: `src` must stay as it is until `quiet`. One thread."""


put_nbi_warp = called_by("warp", put_nbi)
"""`put_nbi` by all threads of a warp."""
put_nbi_block = called_by("block", put_nbi)
"""`put_nbi` by all threads of a block."""


# ---- get


@called_by_a_thread(_transferring)
def get(dst: Array, src: Array, pe: int) -> None:
    """Copy the symmetric `src` of rank `pe` to the local `dst`, and return when the data is here.

    dst, src   contiguous arrays of one dtype, any dtype and shape; ``min(dst.size, src.size)`` elements are
               copied

    One thread.
    """


get_warp = called_by("warp", get)
"""`get` by all threads of a warp."""
get_block = called_by("block", get)
"""`get` by all threads of a block."""


@called_by_a_thread(_transferring)
def get_nbi(dst: Array, src: Array, pe: int) -> None:
    """`get` that returns at once: `dst` has the data after `quiet`. One thread."""


get_nbi_warp = called_by("warp", get_nbi)
"""`get_nbi` by all threads of a warp."""
get_nbi_block = called_by("block", get_nbi)
"""`get_nbi` by all threads of a block."""


# ---- put with signal


@called_by_a_thread(_signalling)
def put_signal(dst: Array, src: Array, signal_var: Array, signal_val: int, signal_op: int, pe: int) -> None:
    """`put`, then set ``signal_var[0]`` on the same rank, or add to it.

    When rank `pe` reads the new value with `signal_wait_until`, the data has arrived.

    dst, src     as for `put`
    signal_var   symmetric, 1-D, of uint64 (or int64)
    signal_val   an integer
    signal_op    SignalOp.SIGNAL_SET or SignalOp.SIGNAL_ADD
    pe           the rank that gets both

    One thread. `src` may be overwritten when it returns. The signal follows the data of this put, not that of
    other puts: give each of several puts in flight its own signal, or put a `fence` between them.
    """


put_signal_warp = called_by("warp", put_signal)
"""`put_signal` by all threads of a warp."""
put_signal_block = called_by("block", put_signal)
"""`put_signal` by all threads of a block."""


@called_by_a_thread(_signalling)
def put_signal_nbi(
    dst: Array, src: Array, signal_var: Array, signal_val: int, signal_op: int, pe: int
) -> None:
    """`put_signal` that returns at once: `src` must stay as it is until `quiet`. One thread."""


put_signal_nbi_warp = called_by("warp", put_signal_nbi)
"""`put_signal_nbi` by all threads of a warp."""
put_signal_nbi_block = called_by("block", put_signal_nbi)
"""`put_signal_nbi` by all threads of a block."""


# ---- ordering


def fence() -> None:
    """Order puts: this thread's puts and signals before it reach each rank before those after it. One thread.

    It does not say when they arrive, and orders nothing between different ranks.
    """
    current_thread("fence").fence()


@gpu(fence)
def _():
    call = nvshmem("fence")
    return lambda: call()


def quiet() -> None:
    """Complete transfers: when it returns, this thread's earlier puts, signals and non-blocking gets have
    been delivered. One thread."""
    current_thread("quiet").quiet()


@gpu(quiet)
def _():
    call = nvshmem("quiet")
    return lambda: call()
