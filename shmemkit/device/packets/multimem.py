"""Multimem: stores to all GPUs of a node at once, and loads that combine what all of them have. The NVSwitch
does it (NVLink SHARP, NVLS): one store of a GPU, or one answer to it, for any number of them.

`array` is here a multicast view of a symmetric array, an argument that the host program has made
(``World.multicast_view``), or a slice or row of one. Nothing else may be done with a view: an ordinary load
or store at a multicast address is undefined (in the emulator an error). GPUs of compute capability 9.0 and
later; nothing here compiles for older ones.

The array and its view are two addresses of the same memory, and an acquire orders accesses through one of
them only. So between a store through the view and ordinary accesses to what it stored there is, besides a
release and an acquire, a `multimem_fence`: after the acquire, or before the release. The end of the storing
kernel will do, too. (PTX ISA: "Proxies". An element that is stored to be polled needs none.)

An element that is stored, of 4 or 8 bytes, arrives on each GPU in one piece; the 16 bytes of a vector do as
four pieces of 4 bytes, in any order. The GPUs see it at different times.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np

from shmemkit.compiler.ptx import (
    TypingError,
    asm,
    element_address,
    gpu,
    gpu_function,
    itemsize,
    load_bytes,
    types,
)
from shmemkit.support.dtypes import REDUCIBLE
from shmemkit.support.settings import listed
from shmemkit.typing import Array

from ..argument_checks import (
    NUMBERS,
    check_aligned,
    check_array,
    check_choice,
    check_emulated_array,
    check_emulated_words,
    check_integer,
    check_words,
    literal_choice,
)
from ..cuda.thread_index import block_thread, block_threads, warp_thread, warp_threads
from ..emulator import current_thread, device_view, multicast_memory
from ..shmem.ordered_access import check_quad, check_vector, vector_at
from .ll import by_alignment, sharing, words_of

__all__ = [
    "multimem_copy_block",
    "multimem_copy_warp",
    "multimem_fence",
    "multimem_red",
    "multimem_reduce",
    "multimem_reduce_vec16",
    "multimem_store",
    "multimem_store_vec16",
]

STORES, REDS, OPS = ("weak", "relaxed", "release"), ("relaxed", "release"), ("add", "min", "max")
_ORDERINGS = {"weak": "weak", "relaxed": "relaxed.sys", "release": "release.sys"}
_HALVES = {  # two of which a register has
    name: getattr(types, name) for name, kind in REDUCIBLE.items() if kind.multimem and kind.bytes == 2
}
_UFUNCS = {"add": np.add, "min": np.minimum, "max": np.maximum}


def multimem_fence() -> None:
    """Order accesses through multicast views before it and ordinary accesses of the same memory after it, and
    the other way round; of this thread and of those it has acquired from. One thread."""
    multicast_memory.fence(current_thread("multimem_fence"))


_fence = asm("fence.proxy.alias;")


@gpu(multimem_fence)
def _():
    return lambda: _fence()


# ---- elements


def multimem_store(
    array: Array, index: int, value: float, semantic: Literal["weak", "relaxed", "release"] = "weak"
) -> None:
    """``array[index] = value`` on every GPU of the node.

    array      a multicast view, 1-D, of int32, uint32, int64, uint64, float32 or float64
    index      0 <= index < array.size, not checked on the GPU
    value      converted to the array's dtype
    semantic   "weak": an ordinary store. "relaxed": one that others may poll; it arrives whole. "release":
               a thread that acquires it (`wait`, `ld_acquire` with scope "sys", of its own array) sees what
               this thread did and saw before. So one instruction signals all ranks. Relaxed and release are
               of scope "sys". A literal

    One thread; for a block's stores ``cuda.syncthreads()`` first.
    """
    thread = current_thread("multimem_store")
    check_choice("multimem_store", "semantic", semantic, STORES)
    arrays = _replicas_of_words("multimem_store", thread, array, index)
    multicast_memory.store(thread, arrays, index, np.array([value]).astype(array.dtype), semantic)


@gpu(multimem_store)
def _(array, index, value, semantic="weak"):
    check_words("multimem_store", "array", array, NUMBERS)
    check_integer("multimem_store", index=index)
    dtype = array.dtype
    store = _store(dtype, literal_choice("multimem_store", "semantic", semantic, STORES))
    return lambda array, index, value, semantic="weak": store(element_address(array, index), dtype(value))


@functools.cache
def _store(dtype, semantic):
    kind = f"{'f' if isinstance(dtype, types.Float) else 'b'}{dtype.bitwidth}"
    text = f"multimem.st.{_ORDERINGS[semantic]}.global.{kind} [$0], $1;"
    return asm(text, types.void, (types.uint64, dtype))


def multimem_red(
    array: Array, index: int, value: float, semantic: Literal["relaxed", "release"] = "relaxed"
) -> None:
    """``array[index] += value`` on every GPU of the node, atomically on each, without a result.

    array      a multicast view, 1-D, of int32, uint32, int64, uint64, float32 or float64
    index      0 <= index < array.size, not checked on the GPU
    value      converted to the array's dtype
    semantic   "relaxed" or "release", as of `multimem_store`, of scope "sys"; a literal

    One thread. Several threads and ranks may add to one element, also with `red_release` and `notify`.
    """
    thread = current_thread("multimem_red")
    check_choice("multimem_red", "semantic", semantic, REDS)
    for there in _replicas_of_words("multimem_red", thread, array, index):
        thread.atomic(there, index, lambda old: old + value, "sys", semantic)


@gpu(multimem_red)
def _(array, index, value, semantic="relaxed"):
    check_words("multimem_red", "array", array, NUMBERS)
    check_integer("multimem_red", index=index)
    dtype = array.dtype
    add = _red(dtype, literal_choice("multimem_red", "semantic", semantic, REDS))
    return lambda array, index, value, semantic="relaxed": add(element_address(array, index), dtype(value))


@functools.cache
def _red(dtype, semantic):
    kind = f"{'f' if isinstance(dtype, types.Float) else 'u'}{dtype.bitwidth}"
    text = f"multimem.red.{_ORDERINGS[semantic]}.global.add.{kind} [$0], $1;"
    return asm(text, types.void, (types.uint64, dtype))


def multimem_reduce(array: Array, index: int, op: Literal["add", "min", "max"] = "add") -> Any:
    """``array[index]`` of all GPUs of the node, combined: their sum, minimum or maximum.

    array   a multicast view, 1-D, of int32, uint32, int64 or uint64, or, for "add", of float32 or float64
    index   0 <= index < array.size, not checked on the GPU
    op      "add", "min" or "max", a literal
    ->      of the array's dtype. Floating-point numbers are added in an order that is not defined

    One thread; ordinary loads, which order nothing: after an acquire of what each GPU has released.
    """
    thread = current_thread("multimem_reduce")
    check_choice("multimem_reduce", "op", op, OPS)
    arrays = _replicas_of_words("multimem_reduce", thread, array, index, _reducible(op))
    elements = multicast_memory.load(thread, arrays, index, 1)
    return device_view(_combined(op, elements))[0]


@gpu(multimem_reduce)
def _(array, index, op="add"):
    op = literal_choice("multimem_reduce", "op", op, OPS)
    check_words("multimem_reduce", "array", array, _reducible(op))
    check_integer("multimem_reduce", index=index)
    reduce = _reduce(array.dtype, op)
    return lambda array, index, op="add": reduce(element_address(array, index))


def _combined(op, elements):
    """In the emulator: the rows of `elements`, combined."""
    with np.errstate(all="ignore"):
        return _UFUNCS[op].reduce(elements, dtype=elements.dtype)


def _reducible(op):
    return NUMBERS if op == "add" else NUMBERS[:4]


@functools.cache
def _reduce(dtype, op):
    return asm(f"{_ld_reduce(dtype, op)} $0, [$1];", dtype, (types.uint64,))


def _ld_reduce(dtype, op):
    kind = "f" if isinstance(dtype, types.Float) else "s" if dtype.signed and op != "add" else "u"
    return f"multimem.ld_reduce.weak.global.{op}.{kind}{dtype.bitwidth}"


# ---- 16 bytes at a time


def multimem_store_vec16(
    array: Array, index: int, words: tuple[int, ...], semantic: Literal["weak", "relaxed", "release"] = "weak"
) -> None:
    """Store 4 uint32 to the 16 bytes that start at ``array[index]``, on every GPU of the node.

    array      a multicast view, 1-D and contiguous, of any dtype
    index      of an element whose address is a multiple of 16
    words      a tuple of 4 uint32, as `load_vec16` and `multimem_reduce_vec16` give it
    semantic   as of `multimem_store`; the four words arrive each by itself

    One thread.
    """
    thread = current_thread("multimem_store_vec16")
    check_choice("multimem_store_vec16", "semantic", semantic, STORES)
    arrays = _replicas_of_vector("multimem_store_vec16", thread, array, index)
    values = np.array([int(word) & 0xFFFFFFFF for word in words], np.uint32).view(array.dtype)
    multicast_memory.store(thread, arrays, index, values, semantic)


@gpu(multimem_store_vec16)
def _(array, index, words, semantic="weak"):
    size = check_vector("multimem_store_vec16", array, index)
    check_quad("multimem_store_vec16", words)
    store = _store_vector(literal_choice("multimem_store_vec16", "semantic", semantic, STORES))

    def impl(array, index, words, semantic="weak"):
        store(_address(array) + types.uint64(index * size), words[0], words[1], words[2], words[3])

    return impl


@functools.cache
def _store_vector(semantic):
    # Vectors are of floating-point numbers only; as a store, it moves any bits.
    text = f"multimem.st.{_ORDERINGS[semantic]}.global.v4.f32 [$0], {{$1, $2, $3, $4}};"
    return asm(text, types.void, (types.uint64, *[types.uint32] * 4))


def multimem_reduce_vec16(
    array: Array, index: int, op: Literal["add", "min", "max"] = "add"
) -> tuple[int, ...]:
    """The 16 bytes that start at ``array[index]`` of all GPUs of the node, combined element by element.

    array   a multicast view, 1-D and contiguous, of int32, uint32, int64, uint64, float16 or bfloat16, or,
            for "add", of float32 or float64
    index   of an element whose address is a multiple of 16
    op      "add", "min" or "max", a literal
    ->      a tuple of 4 uint32, the bits of the elements. Sums of float16 and bfloat16 are formed in float32
            and rounded once; floating-point numbers are added in an order that is not defined

    One thread; ordinary loads, as `multimem_reduce`: one instruction for float16, bfloat16 and float32, one
    for each element for others.
    """
    thread = current_thread("multimem_reduce_vec16")
    check_choice("multimem_reduce_vec16", "op", op, OPS)
    arrays = _replicas_of_vector("multimem_reduce_vec16", thread, array, index)
    if array.dtype.name not in vec16_dtypes(op):
        raise TypeError(_not_reducible(array.dtype, op))
    elements = multicast_memory.load(thread, arrays, index, 16 // array.itemsize)
    if array.dtype.name in _HALVES:
        with np.errstate(over="ignore", invalid="ignore"):  # out of range becomes infinite; NaN stays
            elements = _combined(op, elements.astype(np.float32)).astype(array.dtype)
    else:
        elements = _combined(op, elements)
    words: Any = device_view(elements.view(np.uint32))
    return tuple(words[i] for i in range(4))


@gpu(multimem_reduce_vec16)
def _(array, index, op="add"):
    size = check_vector("multimem_reduce_vec16", array, index)
    op = literal_choice("multimem_reduce_vec16", "op", op, OPS)
    if array.dtype not in (*_reducible(op), *_HALVES.values()):
        raise TypingError(_not_reducible(array.dtype, op))
    reduce = _reduce_vector(array.dtype, op)
    return lambda array, index, op="add": reduce(_address(array) + types.uint64(index * size))


def vec16_dtypes(op):
    """The names of the dtypes that `multimem_reduce_vec16` combines by `op`."""
    return *map(str, _reducible(op)), *_HALVES


def _not_reducible(dtype, op):
    allowed = listed(vec16_dtypes(op))
    return f"multimem_reduce_vec16(): array is of {dtype}; for op {op!r} it must be of {allowed}"


@functools.cache
def _reduce_vector(dtype, op):
    if dtype in _HALVES.values() or dtype == types.float32:
        kind = REDUCIBLE["bfloat16" if dtype == types.bfloat16 else str(dtype)].multimem
        precision = ".acc::f32" if op == "add" and dtype != types.float32 else ""
        text = f"multimem.ld_reduce.weak.global.{op}{precision}.v4.{kind} {{$0, $1, $2, $3}}, [$4];"
    elif dtype.bitwidth == 32:
        text = " ".join(f"{_ld_reduce(dtype, op)} ${k}, [$4+{4 * k}];" for k in range(4))
    else:
        load, kind = _ld_reduce(dtype, op), "f64" if dtype == types.float64 else "b64"
        text = f"{{ .reg .{kind} a, b; {load} a, [$4]; {load} b, [$4+8]; "
        text += "mov.b64 {$0, $1}, a; mov.b64 {$2, $3}, b; }"
    return asm(text, types.UniTuple(types.uint32, 4), (types.uint64,))


# ---- copies


def multimem_copy_block(dst: Array, src: Array) -> None:
    """Copy `src` to `dst` on every GPU of the node, the work shared by the threads of the block.

    dst   a multicast view, contiguous, of any dtype and shape, at a multiple of 16 bytes
    src   contiguous, any dtype, shape and alignment, in global memory (of this rank, not a view) or shared
          memory; not overlapping. ``src.nbytes`` bytes are copied, in memory order. Where they are no
          multiple of 4, up to 3 bytes after them in `dst` become zero: stores are of 4 bytes at least

    All threads of the block call it with the same arguments. There is no barrier inside, before or after:
    ``cuda.syncthreads()``, then one thread publishes all of it, by `multimem_store` or `multimem_red` with
    "release", or by a `notify` of each.
    """
    _copy_share("block", "multimem_copy_block", dst, src)


def multimem_copy_warp(dst: Array, src: Array) -> None:
    """`multimem_copy_block` by the threads of a warp, with ``cuda.syncwarp()`` for ``cuda.syncthreads()``."""
    _copy_share("warp", "multimem_copy_warp", dst, src)


def _copy_share(group, name, dst, src):
    """In the emulator: the calling thread's share."""
    thread, share = sharing(group, name, dst, src)
    arrays = multicast_memory.replicas(thread, dst, name)
    n = src.nbytes
    padded = (n + 3) & -4
    check_emulated_array(name, "dst", dst.local)
    check_emulated_array(name, "src", src)
    check_aligned(name, "dst", dst.local, 16)
    if dst.nbytes < padded:
        raise IndexError(
            f"{name}(): dst has {dst.nbytes} bytes; it must have {padded} or more for the {n} of src, "
            "rounded up to a multiple of 4"
        )
    units = share((n + 15) // 16)
    first, last = 16 * units.start, min(padded, 16 * units.stop)
    if first < last:
        data = np.zeros(last - first, np.uint8)
        part = thread.bytes_of("read", src, first, min(n, last))
        data[: part.size] = part
        multicast_memory.write(thread, arrays, first, data)


def _implement(primitive, thread, threads):
    @gpu(primitive)
    def _(dst, src):
        name = primitive.__name__
        for what, array in (("dst", dst), ("src", src)):
            check_array(name, what, array)
        size = itemsize(src.dtype)
        copy = by_alignment(_copy_words, size, most=16)
        return lambda dst, src: copy(src, _address(dst), src.size * size, thread(), threads())


_implement(multimem_copy_block, block_thread, block_threads)
_implement(multimem_copy_warp, warp_thread, warp_threads)


@functools.cache
def _copy_words(width):
    load, load_byte = _loading(width), load_bytes(1)
    store, store_word = _store_vector("weak"), _store(types.uint32, "weak")

    @gpu_function
    def copy(src, address, n_bytes, thread, threads):
        whole = n_bytes & -16
        step = threads * 16
        i = thread * 16
        while width == 16 and i + 3 * step < whole:  # four loads under way
            a = load(src, i)
            b = load(src, i + step)
            c = load(src, i + 2 * step)
            d = load(src, i + 3 * step)
            store(address + types.uint64(i), a[0], a[1], a[2], a[3])
            store(address + types.uint64(i + step), b[0], b[1], b[2], b[3])
            store(address + types.uint64(i + 2 * step), c[0], c[1], c[2], c[3])
            store(address + types.uint64(i + 3 * step), d[0], d[1], d[2], d[3])
            i += 4 * step
        while i < whole:
            a = load(src, i)
            store(address + types.uint64(i), a[0], a[1], a[2], a[3])
            i += step
        if i == whole:  # it is this thread's turn
            while i < n_bytes:
                word, end = types.uint32(0), min(i + 4, n_bytes)
                for k in range(i, end):
                    word |= types.uint32(load_byte(src, k)) << types.uint32(8 * (k - i))
                store_word(address + types.uint64(i), word)
                i += 4

    return copy


@functools.cache
def _loading(width):
    """``load(array, offset)`` of 16 bytes as 4 uint32, by loads of `width` bytes."""
    load_half, _ = words_of(min(width, 8))

    @gpu_function
    def load(array, offset):
        return load_half(array, offset) + load_half(array, offset + 8)

    return load_bytes(16) if width == 16 else load


# ---- checks


def _replicas_of_words(primitive, thread, array, index, allowed=NUMBERS):
    """In the emulator: `array` on each PE of the node, of an `allowed` dtype; it has an element `index`."""
    arrays = multicast_memory.replicas(thread, array, primitive)
    check_emulated_words(primitive, "array", array.local, allowed)
    if not 0 <= index < array.size:
        raise IndexError(f"{primitive}(): index is {index}; it must be 0 to {array.size - 1}")
    return arrays


def _replicas_of_vector(primitive, thread, array, index):
    """In the emulator: `array` on each PE of the node; 16 bytes, aligned, begin at its element `index`."""
    arrays = multicast_memory.replicas(thread, array, primitive)
    vector_at(primitive, array.local, index)
    return arrays


@gpu_function
def _address(array):
    return element_address(array, 0)
