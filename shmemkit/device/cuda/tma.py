"""Boxes of matrices between global and shared memory, by the tensor memory accelerator (TMA). Hopper and
later.

A tensor map describes a matrix in global memory, and the box of it that one instruction moves; it is made on
the host, by `tensor_map`. A thread names the box's first element; what lies outside of the matrix is read as
zeros and not written. In shared memory the box lies row after row, its 16-byte units swizzled, so that
neither rows nor columns of it collide in the memory's banks: unit p of row r, of rows of 128 bytes, is at
unit ``p ^ (r % 8)`` (of 64 bytes, ``p ^ (r // 2 % 4)``; of 32, ``p ^ (r // 4 % 2)``). The tensor cores read
it so.

Loads complete on an mbarrier (``device.cuda.mbarrier``), stores in groups of the thread that asked for
them. The TMA is a proxy of its own: what threads have stored to shared memory before, it sees after
`fence_proxy_async`.

PTX ISA: cp.async.bulk.tensor, "Tensors", "Async proxy"; CUDA driver API: cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import functools

import numpy as np

from shmemkit.compiler.ptx import TypingError, asm, data_address, gpu, itemsize, shared_address, types
from shmemkit.support.settings import listed
from shmemkit.typing import Array

from ..argument_checks import check_contiguous, check_integer, check_words, not_literal
from ..emulator import current_thread, fence_proxy, reads_shared
from ..emulator import tensor_maps as emulated

__all__ = [
    "bulk_commit_group",
    "bulk_load",
    "bulk_store",
    "bulk_wait_group",
    "bulk_wait_group_read",
    "fence_proxy_async",
    "fence_proxy_async_global",
    "padding",
    "tensor_map",
    "tensormap_acquire",
    "tma_load",
    "tma_load_multicast",
    "tma_store",
]

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
SWIZZLED_ROWS = (128, 64, 32)  # bytes of a box's rows


def tma_load(tile: Array, tensor_map: Array, x: int, y: int, barriers: Array, i: int) -> None:
    """Copy the box of `tensor_map` that begins at row y, column x to `tile`.

    tile         contiguous, in shared memory, at a multiple of 1024 bytes of it (of 256 for rows of 32 bytes,
                 512 of 64)
    tensor_map   uint64 (16,): what ``tensor_map`` returned on the host
    x, y         elements; may be negative, or beyond the end. x is at a multiple of 16 bytes: for others the
                 GPU stops with an illegal instruction
    barriers[i]  the mbarrier that counts the bytes of the box as they are written, also of the part outside
                 of the matrix: announce them by `mbarrier_arrive_expect_tx`

    One thread calls it, and it returns at once. Threads that read the tile call `mbarrier_wait` first.
    """
    emulated.load(current_thread("tma_load"), tile, tensor_map, x, y, barriers, i, None)


def tma_load_multicast(
    tile: Array, tensor_map: Array, x: int, y: int, barriers: Array, i: int, blocks: int
) -> None:
    """`tma_load` to several blocks of the cluster at once.

    The box goes to the address of `tile` in each block, and barriers[i] of that block counts its bytes.

    blocks   an integer with bit b set for block b of the cluster
    """
    emulated.load(current_thread("tma_load_multicast"), tile, tensor_map, x, y, barriers, i, blocks)


@reads_shared
def tma_store(tensor_map: Array, x: int, y: int, tile: Array) -> None:
    """Copy `tile` to the box of `tensor_map` that begins at row y, column x. See `tma_load`.

    It writes whole 16 bytes. If the rows of a matrix are no multiple of 16 bytes, it also writes behind their
    ends.

    One thread calls it, after all threads that have stored to the tile have called `fence_proxy_async` and
    then met at a barrier (``syncwarp``, ``syncthreads``). It returns at once. Call `bulk_commit_group`, then
    `bulk_wait_group_read` before the tile is overwritten, and `bulk_wait_group` before the result is
    published.
    """
    emulated.store(current_thread("tma_store"), tensor_map, x, y, tile)


def bulk_load(tile: Array, src: Array, barriers: Array, i: int) -> None:
    """Copy all of `src` to the beginning of `tile`.

    tile   contiguous, in shared memory, at a multiple of 16 bytes
    src    contiguous, in global memory, a multiple of 16 bytes at a multiple of 16 bytes; of this rank or of
           a peer (`symm_at`)

    One thread calls it; barriers[i] counts the bytes, as in `tma_load`. To read what other ranks have sent,
    the thread calls `wait` and then `fence_proxy_async_global` first.
    """
    emulated.bulk_load(current_thread("bulk_load"), tile, src, barriers, i)


@reads_shared
def bulk_store(dst: Array, tile: Array) -> None:
    """Copy `tile` to `dst`, of this rank or of a peer (`symm_at`), as much of it as `dst` has room for.

    See `bulk_load` for the arguments and `tma_store` for the rest. After `bulk_wait_group` the thread sees
    `dst` written: its next release publishes it, as does that of a thread that has met it at a barrier since.
    """
    emulated.bulk_store(current_thread("bulk_store"), dst, tile)


def bulk_commit_group() -> None:
    """Close a group: it has this thread's stores since the last group."""
    emulated.commit(current_thread("bulk_commit_group"))


def bulk_wait_group(n: int) -> None:
    """Wait until all but the last `n` groups of stores by this thread are written. It may publish them then.

    n  a literal
    """
    emulated.wait_group(current_thread("bulk_wait_group"), n, "written")


def bulk_wait_group_read(n: int) -> None:
    """Wait until all but the last `n` groups of stores by this thread have read their tiles.

    The tiles may be overwritten then.

    n  a literal
    """
    emulated.wait_group(current_thread("bulk_wait_group_read"), n, "read")


def fence_proxy_async() -> None:
    """Order this thread's stores to shared memory before later asynchronous copies and tensor-core products.

    That holds for copies and products by this thread, and by threads that it meets at a barrier afterwards.
    """
    fence_proxy(current_thread("fence_proxy_async"))


def fence_proxy_async_global() -> None:
    """As `fence_proxy_async`, for global memory.

    It includes what this thread has acquired: call it between a `wait` for data of other ranks and a
    `tma_load` of them.
    """
    current_thread("fence_proxy_async_global").fence_proxy()


def padding(array: Array, alignment: int) -> int:
    """Return the bytes from the beginning of `array`, in shared memory, to the next multiple of `alignment`.

    `alignment` is a power of two. Declare a dynamic array with an alignment of 16. The compiler would take a
    larger one for granted, and this would be 0. But a kernel that is linked, as with `symm_at` or `rank`,
    gets the array behind its static arrays.
    """
    current_thread("padding")
    return -emulated.address(array) % alignment


def tensormap_acquire(tensor_map: Array) -> None:
    """Let this thread's `tma_load` and `tma_store` see `tensor_map` as others have written it.

    It is needed once per launch, since the map lies in global memory, not among the kernel's parameters.
    """
    emulated.described(current_thread("tensormap_acquire"), tensor_map)


# ---- on the GPU

_U32, _I32, _I64 = types.uint32, types.int32, types.int64
_SHARED_TILE = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
_load = asm(f"{_SHARED_TILE} [$0], [$1, {{$2, $3}}], [$4];", types.void, (_U32, _I64, _I32, _I32, _U32))
_load_multicast = asm(
    f"{_SHARED_TILE}.multicast::cluster [$0], [$1, {{$2, $3}}], [$4], $5;",
    types.void,
    (_U32, _I64, _I32, _I32, _U32, types.uint16),
)
_store = asm(
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$1, $2}], [$3];",
    types.void,
    (_I64, _I32, _I32, _U32),
)
_load_bytes = asm(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    types.void,
    (_U32, _I64, _U32, _U32),
)
_store_bytes = asm(
    "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", types.void, (_I64, _U32, _U32)
)
_commit = asm("cp.async.bulk.commit_group;")
_fence_shared = asm("fence.proxy.async.shared::cta;")
_fence_global = asm("fence.proxy.async.global;")
_acquire = asm("fence.proxy.tensormap::generic.acquire.sys [$0], 128;", types.void, (_I64,))


@functools.cache
def _wait_group(kind, n):
    return asm(f"cp.async.bulk.wait_group{kind} {n};")


@gpu(tma_load)
def _(tile, tensor_map, x, y, barriers, i):
    _check("tma_load", tensor_map, x=x, y=y, i=i)
    check_words("tma_load", "barriers", barriers, (types.uint64,))

    def impl(tile, tensor_map, x, y, barriers, i):
        barrier = shared_address(barriers) + _U32(8 * i)
        _load(shared_address(tile), data_address(tensor_map), x, y, barrier)

    return impl


@gpu(tma_load_multicast)
def _(tile, tensor_map, x, y, barriers, i, blocks):
    _check("tma_load_multicast", tensor_map, x=x, y=y, i=i, blocks=blocks)
    check_words("tma_load_multicast", "barriers", barriers, (types.uint64,))

    def impl(tile, tensor_map, x, y, barriers, i, blocks):
        barrier = shared_address(barriers) + _U32(8 * i)
        _load_multicast(shared_address(tile), data_address(tensor_map), x, y, barrier, blocks)

    return impl


@gpu(tma_store)
def _(tensor_map, x, y, tile):
    _check("tma_store", tensor_map, x=x, y=y)
    return lambda tensor_map, x, y, tile: _store(data_address(tensor_map), x, y, shared_address(tile))


@gpu(bulk_load)
def _(tile, src, barriers, i):
    check_contiguous("bulk_load", tile=tile, src=src)
    check_words("bulk_load", "barriers", barriers, (types.uint64,))
    check_integer("bulk_load", i=i)
    size = itemsize(src.dtype)

    def impl(tile, src, barriers, i):
        barrier = shared_address(barriers) + _U32(8 * i)
        _load_bytes(shared_address(tile), data_address(src), src.size * size, barrier)

    return impl


@gpu(bulk_store)
def _(dst, tile):
    check_contiguous("bulk_store", dst=dst, tile=tile)
    size = itemsize(dst.dtype)
    return lambda dst, tile: _store_bytes(data_address(dst), shared_address(tile), dst.size * size)


def _check(primitive, tensor_map, **integers):
    check_words(primitive, "tensor_map", tensor_map, (types.uint64,))
    check_integer(primitive, **integers)


@gpu(padding)
def _(array, alignment):
    check_integer("padding", alignment=alignment)
    return lambda array, alignment: -types.int64(shared_address(array)) & (alignment - 1)


@gpu(bulk_commit_group)
def _():
    return lambda: _commit()


def _implement_wait(primitive, kind):
    @gpu(primitive)
    def _(n):
        wait = _wait_group(kind, literal_integer(primitive.__name__, "n", n))
        return lambda n: wait()


_implement_wait(bulk_wait_group, "")
_implement_wait(bulk_wait_group_read, ".read")


def literal_integer(primitive, name, given):
    """At compile time: the integer that `given`, a numba type, stands for."""
    if not isinstance(given, types.IntegerLiteral):
        raise TypingError(not_literal(primitive, name, given, "such as 1"))
    return given.literal_value


@gpu(fence_proxy_async)
def _():
    return lambda: _fence_shared()


@gpu(fence_proxy_async_global)
def _():
    return lambda: _fence_global()


@gpu(tensormap_acquire)
def _(tensor_map):
    check_words("tensormap_acquire", "tensor_map", tensor_map, (types.uint64,))
    return lambda tensor_map: _acquire(data_address(tensor_map))


# ---- on the host


def tensor_map(array: Array, box: tuple[int, int]) -> Array:
    """Make a tensor map of `array`, on the host, for kernels. -> uint64 (16,), where the array is

    array   2-D, of 2- or 4-byte floats or float8_e4m3fn, with rows of consecutive elements (an array whose
            columns are consecutive: give its transpose). Rows and the array begin at multiples of 16 bytes
    box     (rows, columns) that one `tma_load` or `tma_store` moves; rows of 128, 64 or 32 bytes, at most 256
            of them

    ValueError for what the TMA cannot do. The map holds the address: keep the array alive. The call copies
    the map to the GPU and waits for that, so do not call it in a stream capture.
    """
    rows, columns, pitch, itemsize, address = _checked(array, box)
    if isinstance(array, np.ndarray):
        return emulated.encode(array, box)
    from cuda.bindings import driver

    enum = driver.CUtensorMapDataType
    dtype = {
        "bfloat16": enum.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": enum.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "float32": enum.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        "float8_e4m3fn": enum.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[str(array.dtype)]
    swizzle = driver.CUtensorMapSwizzle
    swizzles = dict(
        zip(
            SWIZZLED_ROWS,
            (
                swizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                swizzle.CU_TENSOR_MAP_SWIZZLE_64B,
                swizzle.CU_TENSOR_MAP_SWIZZLE_32B,
            ),
            strict=True,
        )
    )
    error, encoded = driver.cuTensorMapEncodeTiled(
        dtype,
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(pitch)],
        [driver.cuuint32_t(box[1]), driver.cuuint32_t(box[0])],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles[box[1] * itemsize],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error:
        raise RuntimeError(f"tensor_map(): cuTensorMapEncodeTiled failed: {error}")
    import cupy

    return cupy.asarray(np.array([int(word) for word in encoded.opaque], np.uint64))


def _checked(array, box):
    """-> rows, columns, bytes from row to row, bytes per element, address"""
    given = f"of {array.dtype}, shape {array.shape} and strides {array.strides}"
    if array.ndim != 2 or str(array.dtype) not in DTYPES:
        raise ValueError(f"tensor_map(): array is {given}; it must be a 2-D array of {listed(DTYPES)}")
    rows, columns = array.shape
    itemsize = array.dtype.itemsize
    pitch = array.strides[0] if rows > 1 else -(-columns * itemsize // 16) * 16
    if 0 in array.shape or (columns > 1 and array.strides[1] != itemsize):
        raise ValueError(
            f"tensor_map(): array is {given}; it must not be empty, and the elements of a row must be "
            "consecutive"
        )
    address = emulated.address(array) if isinstance(array, np.ndarray) else array.data.ptr
    if pitch % 16 or pitch < 0 or address % 16:
        raise ValueError(
            f"tensor_map(): array is {given}, at address {address:#x}; each row must begin at a multiple of "
            "16 bytes. Pad the rows, or copy the array"
        )
    if box[1] * itemsize not in SWIZZLED_ROWS or not 1 <= box[0] <= 256:
        raise ValueError(
            f"tensor_map(): box is {box} and array of {array.dtype}; a box must have 1 to 256 rows, of 128, "
            "64 or 32 bytes"
        )
    return rows, columns, pitch, itemsize, address
