"""Accumulators of `warpgroup_mma` in shared memory: as a matrix, swizzled as `tma_store` takes it; or packed,
in the order of the threads, for others that have the same. Hopper and later.

The machine code must keep (docs/machine_code.md): whole warp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from shmemkit.compiler.ptx import asm, gpu, gpu_function, shared_address, types

from ..emulator import group_thread
from ..emulator import tensor_maps as emulated
from .float_storage import element

__all__ = ["fragment_store", "packed_add", "packed_store"]

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@functools.cache
def fragment_store(dtype: str, row_bytes: int) -> Callable:
    """-> ``store(tile, i, part)``, for kernels: a warp stores 16 rows of 16 columns of its accumulators.

    They are stored as `dtype`: "bfloat16" or "float16", rounded to nearest even, or "float32".

    tile       16 rows of `row_bytes` (128, 64 or 32) in shared memory, swizzled as described in
               ``shmemkit.device.cuda.tma``; begins at a multiple of 1024 bytes of it
    i          which 16 columns of the tile, from 0
    part       the 8 accumulators of the thread for them: elements 8 j to 8 j + 7, of
               ``shmemkit.device.cuda.wgmma``

    All threads of a warp call it together. After its stores each thread calls `fence_proxy_async`, then
    ``syncwarp``; then `tma_store` may follow.
    """

    def store(tile, i, part):
        emulated.store_fragment(
            group_thread("warp", "fragment_store", tile, i, meets=False), tile, row_bytes, i, part, dtype
        )

    @gpu(store)
    def _(tile, i, part):
        return _of_halves(dtype, row_bytes) if ITEMSIZE[dtype] == 2 else _of_floats(row_bytes)

    return store


@functools.cache
def packed_store(dtype: str) -> Callable:
    """-> ``store(tile, i, part)``, for kernels: a warp stores 8 accumulators of each thread, side by side.

    They are stored as `dtype`: "bfloat16" or "float16", rounded to nearest even, or "float32". It takes half
    the instructions of `fragment_store`, and no swizzle.

    tile   of shared memory; it begins at a multiple of 16 bytes
    i      which 512 bytes of it (of float32 1024), from 0
    part   the thread's 8 accumulators

    All threads of a warp call it together. After its stores each thread calls `fence_proxy_async`, then
    ``syncwarp``; then `bulk_store` may follow.
    """

    def store(tile, i, part):
        emulated.store_packed(
            group_thread("warp", "packed_store", tile, i, meets=False), tile, int(i), part, dtype
        )

    @gpu(store)
    def _(tile, i, part):
        return _pack_halves(dtype) if ITEMSIZE[dtype] == 2 else _pack_floats

    return store


@functools.cache
def packed_add(dtype: str) -> Callable:
    """-> ``add(tile, i, part)``, for kernels, which returns 8 accumulators: `part` plus what `tile` has.

    `packed_store` has stored to `tile`, there or where it was copied from, by a warp whose accumulators are
    of the same rows and columns. All threads of a warp call it together.
    """

    def add(tile, i, part):
        stored = emulated.packed(
            group_thread("warp", "packed_add", tile, i, meets=False), tile, int(i), dtype
        )
        return tuple(x + y for x, y in zip(part, stored, strict=True))

    @gpu(add)
    def _(tile, i, part):
        return _add_halves(dtype) if ITEMSIZE[dtype] == 2 else _add_floats

    return add


_U32, _F32 = types.uint32, types.float32
_lane = asm("mov.u32 $0, %laneid;", types.int32, pure=True)
_store_matrices = asm(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", types.void, (_U32,) * 5
)
_store_two = asm("st.shared.v2.f32 [$0], {$1, $2};", types.void, (_U32, _F32, _F32))
# Which bits of the row are exchanged into the number of a 16-byte unit: (shift, mask)
ROW_BITS = {128: (0, 7), 64: (1, 3), 32: (2, 1)}


def _of_halves(dtype, row_bytes):
    pack = element(dtype).pack
    shift, mask = ROW_BITS[row_bytes]

    def impl(tile, i, part):
        # The four 8 by 8 matrices: rows 0-7 and 8-15 of the first 8 columns, then of the others; lane l names
        # row l % 8 of matrix l / 8.
        lane = _lane()
        row = lane & 15
        unit = (2 * i + (lane >> 4)) ^ (row >> shift & mask)
        _store_matrices(
            shared_address(tile) + _U32(row * row_bytes + unit * 16),
            pack(part[0], part[1]),
            pack(part[2], part[3]),
            pack(part[4], part[5]),
            pack(part[6], part[7]),
        )

    return impl


def _of_floats(row_bytes):
    shift, mask = ROW_BITS[row_bytes]

    def impl(tile, i, part):
        lane = _lane()
        row, column = lane >> 2, lane & 3
        swizzle = row >> shift & mask  # of row + 8, too
        first = shared_address(tile) + _U32(row * row_bytes + (column & 1) * 8)
        low = _U32(((4 * i + (column >> 1)) ^ swizzle) * 16)
        high = _U32(((4 * i + 2 + (column >> 1)) ^ swizzle) * 16)
        below = _U32(8 * row_bytes)
        _store_two(first + low, part[0], part[1])
        _store_two(first + low + below, part[2], part[3])
        _store_two(first + high, part[4], part[5])
        _store_two(first + high + below, part[6], part[7])

    return impl


_store_words = asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", types.void, (_U32,) * 5)
_store_four = asm("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", types.void, (_U32, *(_F32,) * 4))
_load_words = asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", types.UniTuple(_U32, 4), (_U32,))
_load_four = asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", types.UniTuple(_F32, 4), (_U32,))


def _pack_halves(dtype):
    pack = element(dtype).pack

    def impl(tile, i, part):
        _store_words(
            shared_address(tile) + _U32(512 * i + 16 * _lane()),
            pack(part[0], part[1]),
            pack(part[2], part[3]),
            pack(part[4], part[5]),
            pack(part[6], part[7]),
        )

    return impl


def _pack_floats(tile, i, part):
    first = shared_address(tile) + _U32(1024 * i + 16 * _lane())
    _store_four(first, part[0], part[1], part[2], part[3])
    _store_four(first + _U32(512), part[4], part[5], part[6], part[7])


def _add_halves(dtype):
    widen = element(dtype).widen

    @gpu_function
    def low(word):
        return widen(types.uint16(word & _U32(0xFFFF)))

    @gpu_function
    def high(word):
        return widen(types.uint16(word >> _U32(16)))

    def impl(tile, i, part):
        a, b, c, d = _load_words(shared_address(tile) + _U32(512 * i + 16 * _lane()))
        return (
            part[0] + low(a),
            part[1] + high(a),
            part[2] + low(b),
            part[3] + high(b),
            part[4] + low(c),
            part[5] + high(c),
            part[6] + low(d),
            part[7] + high(d),
        )

    return impl


def _add_floats(tile, i, part):
    first = shared_address(tile) + _U32(1024 * i + 16 * _lane())
    a, b = _load_four(first), _load_four(first + _U32(512))
    return (
        part[0] + a[0],
        part[1] + a[1],
        part[2] + a[2],
        part[3] + a[3],
        part[4] + b[0],
        part[5] + b[1],
        part[6] + b[2],
        part[7] + b[3],
    )
