"""Memory of this GPU and of its peers: where it is, and loads and stores with an ordering.

An *acquire* load that reads what a *release* store wrote sees everything that was before that store: the
storing thread's own earlier accesses, and those of threads that it met at a barrier or acquired from (the
PTX memory model's causality order is transitive). Both sides must name a scope that contains the other:
"gpu" for threads of one GPU, "sys" for threads of any GPU of the host and for the CPU.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np

from shmemkit.compiler.ptx import (
    TypingError,
    asm,
    element_address,
    gpu,
    gpu_moved,
    itemsize,
    load_bytes,
    store_bytes,
    types,
)
from shmemkit.typing import Array, FenceScope, FenceSemantic, Scope

from ..argument_checks import (
    NUMBERS,
    SCOPES,
    check_aligned,
    check_array,
    check_choice,
    check_emulated_array,
    check_emulated_integer,
    check_emulated_words,
    check_integer,
    check_words,
    described,
    literal_choice,
)
from ..emulator import Unsigned, address, current_thread
from .peers import offset_of

__all__ = [
    "get_peer_array",
    "ld_acquire",
    "load_vec16",
    "peer_at",
    "red_release",
    "st_release",
    "store_vec16",
    "symm_at",
    "threadfence",
]

_SUFFIXES = {
    types.int32: "u32",
    types.uint32: "u32",
    types.int64: "u64",
    types.uint64: "u64",
    types.float32: "f32",
    types.float64: "f64",
}
_LEVELS = {"block": "cta", "gpu": "gpu", "sys": "sys"}
_FENCES = {"seq_cst": "sc", "acq_rel": "acq_rel"}


@functools.cache
def load(dtype, semantic, scope):
    """``load(address) -> dtype``: semantic "acquire" or "relaxed"."""
    return asm(f"ld.{semantic}.{scope}.global.{_SUFFIXES[dtype]} $0, [$1];", dtype, (types.uint64,))


@functools.cache
def store(dtype, scope):
    """``store(address, value)``, a release."""
    return asm(f"st.release.{scope}.global.{_SUFFIXES[dtype]} [$0], $1;", types.void, (types.uint64, dtype))


@functools.cache
def add(dtype, scope):
    """``add(address, value)``, an atomic release without a result."""
    return asm(
        f"red.release.{scope}.global.add.{_SUFFIXES[dtype]} [$0], $1;", types.void, (types.uint64, dtype)
    )


# ---- peers


def symm_at(array: Array, rank: int) -> Array:
    """The same symmetric array on `rank`, for ordinary loads and stores over NVLink (or PCIe peer access).

    array   a symmetric array, or a slice or row of one; any dtype and shape
    rank    0 .. num_ranks() - 1, not checked on the GPU; this rank gives the array itself
    ->      an array of the same type and shape

    Any thread may call it; it costs one load from constant memory and one addition, and orders nothing.
    Loads and stores through it are as unordered as any: publish with `notify`, `st_release` or
    `red_release`, read after `wait` or `ld_acquire`, at scope "sys". For ranks whose memory is mapped here
    only: for others the address is one whose use faults (in the emulator, an error); there use `put`, `get`
    and their kin.
    """
    return current_thread("symm_at").peer(array, rank)


@gpu_moved(symm_at)
def _(array, rank):
    _check_peer("symm_at", array, rank)
    return lambda array, rank: offset_of(rank)


def get_peer_array(arr: Array, pe: int) -> Array:
    """`symm_at` under nvshmem4py's name."""
    return current_thread("get_peer_array").peer(arr, pe)


@gpu_moved(get_peer_array)
def _(arr, pe):
    _check_peer("get_peer_array", arr, pe)
    return lambda arr, pe: offset_of(pe)


def peer_at(array: Array, offsets: Array, rank: int) -> Array:
    """`symm_at`, with a table that the kernel gets as an argument.

    offsets  int64, in global memory: for each rank the bytes from a symmetric array here to its own, the same
             for all arrays

    For kernels with `setmaxnreg_inc`: ptxas ignores that where a kernel is linked with the table of `symm_at`
    and `notify`.
    """
    return current_thread("peer_at").peer(array, rank)


@gpu_moved(peer_at)
def _(array, offsets, rank):
    _check_peer("peer_at", array, rank)
    check_words("peer_at", "offsets", offsets, (types.int64,))
    return lambda array, offsets, rank: types.uint64(offsets[rank])


def _check_peer(primitive, array, rank):
    check_array(primitive, "array", array, contiguous=False)
    check_integer(primitive, rank=rank)


# ---- ordered loads and stores


def ld_acquire(array: Array, index: int, scope: Scope = "sys") -> Any:
    """``array[index]``, an acquire load: this thread's later accesses see what preceded the release that it
    read.

    array   1-D, of int32, uint32, int64, uint64, float32 or float64, in global memory (this rank's or
            `symm_at`)
    index   0 <= index < array.size, not checked on the GPU
    scope   "gpu" or "sys", a literal

    One thread. May be polled: ``while ld_acquire(flags, i) != 1: pass``; `wait` says the same in one call.
    """
    thread = current_thread("ld_acquire")
    check_choice("ld_acquire", "scope", scope, SCOPES)
    check_emulated_words("ld_acquire", "array", array, NUMBERS)
    return thread.spin_load(array, index, scope)


@gpu(ld_acquire)
def _(array, index, scope="sys"):
    check_words("ld_acquire", "array", array, NUMBERS)
    check_integer("ld_acquire", index=index)
    read = load(array.dtype, "acquire", literal_choice("ld_acquire", "scope", scope, SCOPES))
    return lambda array, index, scope="sys": read(element_address(array, index))


def st_release(array: Array, index: int, value: float, scope: Scope = "sys") -> None:
    """``array[index] = value``, a release store.

    array   1-D, of int32, uint32, int64, uint64, float32 or float64, in global memory (this rank's or
            `symm_at`)
    index   0 <= index < array.size, not checked on the GPU
    value   converted to the array's dtype
    scope   "gpu" or "sys", a literal

    One thread. A thread that acquires the value sees everything that this thread did and saw before. To
    publish a whole block's stores: ``cuda.syncthreads()``, then one thread releases. It does not wait for
    non-blocking puts that are still in flight: call `quiet` first.
    """
    thread = current_thread("st_release")
    check_choice("st_release", "scope", scope, SCOPES)
    check_emulated_words("st_release", "array", array, NUMBERS)
    thread.store(array, index, value, scope)


@gpu(st_release)
def _(array, index, value, scope="sys"):
    check_words("st_release", "array", array, NUMBERS)
    check_integer("st_release", index=index)
    dtype = array.dtype
    write = store(dtype, literal_choice("st_release", "scope", scope, SCOPES))
    return lambda array, index, value, scope="sys": write(element_address(array, index), dtype(value))


def red_release(array: Array, index: int, value: float, scope: Scope = "sys") -> None:
    """``array[index] += value``, atomically and as a release, without a result; otherwise like `st_release`.

    Several threads and ranks may add to one element. A thread that acquires a sum sees what preceded each of
    its additions.
    """
    thread = current_thread("red_release")
    check_choice("red_release", "scope", scope, SCOPES)
    check_emulated_words("red_release", "array", array, NUMBERS)
    thread.atomic(array, index, lambda old: old + value, scope, "release")


@gpu(red_release)
def _(array, index, value, scope="sys"):
    check_words("red_release", "array", array, NUMBERS)
    check_integer("red_release", index=index)
    dtype = array.dtype
    write = add(dtype, literal_choice("red_release", "scope", scope, SCOPES))
    return lambda array, index, value, scope="sys": write(element_address(array, index), dtype(value))


def threadfence(scope: FenceScope, semantic: FenceSemantic = "seq_cst") -> None:
    """Order what this thread did and saw before it and what it does after, for observers within `scope`.

    scope      "block", "gpu" or "sys", a literal
    semantic   "seq_cst" as CUDA's __threadfence family, or "acq_rel", cheaper and enough to publish data
               before an ordinary store of a flag and to read data after an ordinary (volatile) load of it

    One thread. It orders this thread's own loads and stores, over NVLink too; it does not complete puts: see
    `quiet`.
    """
    thread = current_thread("threadfence")
    check_choice("threadfence", "scope", scope, tuple(_LEVELS))
    check_choice("threadfence", "semantic", semantic, tuple(_FENCES))
    thread.threadfence(scope)


@gpu(threadfence)
def _(scope, semantic="seq_cst"):
    level = _LEVELS[literal_choice("threadfence", "scope", scope, tuple(_LEVELS))]
    kind = _FENCES[literal_choice("threadfence", "semantic", semantic, tuple(_FENCES))]
    fence = _fence(kind, level)
    return lambda scope, semantic="seq_cst": fence()


@functools.cache
def _fence(kind, level):
    return asm(f"fence.{kind}.{level};")


# ---- 16 bytes at a time


def load_vec16(array: Array, index: int) -> tuple[int, ...]:
    """The 16 bytes that start at ``array[index]``, as a tuple of 4 uint32, in one load.

    array   1-D and contiguous, of any dtype
    index   of an element whose address is a multiple of 16 (otherwise the GPU faults; an error in the
            emulator)

    One thread. An ordinary load; orders nothing.
    """
    thread = current_thread("load_vec16")
    index, _ = vector_at("load_vec16", array, index)
    first = index * array.itemsize
    part = thread.bytes_of("read", array, first, first + 16)
    words: Any = map(Unsigned, struct.unpack("4I", part))
    return tuple(words)


@gpu(load_vec16)
def _(array, index):
    size = check_vector("load_vec16", array, index)
    read = load_bytes(16)
    return lambda array, index: read(array, index * size)


def store_vec16(array: Array, index: int, words: tuple[int, ...]) -> None:
    """Store 4 uint32 to the 16 bytes that start at ``array[index]``, in one store. See `load_vec16`."""
    current_thread("store_vec16")
    index, count = vector_at("store_vec16", array, index)
    elements = np.array([int(word) & 0xFFFFFFFF for word in words], np.uint32).view(array.dtype)
    array[index : index + count] = elements


@gpu(store_vec16)
def _(array, index, words):
    size = check_vector("store_vec16", array, index)
    check_quad("store_vec16", words)
    write = store_bytes(16)
    return lambda array, index, words: write(array, index * size, words)


def vector_at(primitive, array, index):
    """In the emulator: -> the index, and how many elements 16 bytes are, if they are aligned."""
    check_emulated_integer(primitive, index=index)
    check_emulated_array(primitive, "array", array, 1)
    index, count = int(index), 16 // array.itemsize
    if 16 % array.itemsize:
        raise TypeError(
            f"{primitive}(): array has elements of {array.itemsize} bytes; they must have 1, 2, 4, 8 or 16"
        )
    if not 0 <= index <= array.size - count:
        raise IndexError(
            f"{primitive}(): index is {index}; it must be 0 to {array.size - count}, since 16 bytes are "
            f"{count} of the {array.size} elements"
        )
    if (address(array) + index * array.itemsize) % 16:
        check_aligned(primitive, f"array[{index}]", array[index:], 16)
    return index, count


def check_vector(primitive, array, index):
    """On the GPU, at compile time. -> bytes of an element"""
    check_integer(primitive, index=index)
    check_array(primitive, "array", array, 1)
    return itemsize(array.dtype)


def check_quad(primitive, words):
    """On the GPU, at compile time."""
    if not (
        isinstance(words, types.UniTuple) and words.count == 4 and isinstance(words.dtype, types.Integer)
    ):
        raise TypingError(f"{primitive}(): words is {described(words)}; it must be a tuple of 4 uint32")
