"""Matrix products of Hopper's tensor cores (compute capability 9.0 only): four warps, a warpgroup, multiply
tiles that lie in shared memory, asynchronously, and add to float32 accumulators in their registers.

    products = warpgroup_mma(256, "bfloat16")   # on the host: 64 rows by 256 columns

    acc = products.zeros()                      # in a kernel, all threads of the warpgroup
    acc = products.multiply(acc, a, b, True)    # acc += a b, of 64 columns of a; under way
    wgmma_wait_group(1)                         # the products before the last have read their tiles
    acc = products.wait(acc)                    # all are done: acc may be read

Accumulators: a tuple of n / 2 float32 per thread. Of thread t, element 4 j + 2 h + c is row
``t // 32 * 16 + t % 32 // 4 + 8 h``, column ``8 j + t % 4 * 2 + c``.

PTX ISA: wgmma.mma_async, "Asynchronous Warpgroup Level Matrix Operations"; setmaxnreg.

The machine code must keep (docs/machine_code.md): whole warpgroup.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

from shmemkit.compiler.ptx import TypingError, asm, float_zeros, gpu, gpu_function, shared_address, types

from ..argument_checks import check_choice, described
from ..emulator import current_thread, group_thread, reads_shared
from ..emulator import tensor_cores as emulated
from .tma import literal_integer

__all__ = [
    "WarpgroupMma",
    "setmaxnreg_dec",
    "setmaxnreg_inc",
    "warpgroup_mma",
    "wgmma_wait_group",
]

ROW_BYTES = 128  # of a tile
SLAB = 64  # of the inner dimension: what such rows hold, of elements of 2 bytes
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}
MAJORS = ("k", "mn")


class WarpgroupMma(NamedTuple):
    """Functions for kernels; all threads of a warpgroup call them together.

    zeros()                   -> accumulators
    multiply(acc, a, b, add)  -> accumulators of a product that is under way: acc + a b, or, if `add` is
                              false, a b. Only the next `multiply` and `wait` may use them. The product may
                              read `a` and `b` at any time until then
    wait(acc, n=0)            -> the accumulators, when all products but the last `n`, a literal, are done;
                              theirs must be among these
    """

    zeros: Callable
    multiply: Callable
    wait: Callable


@functools.cache
def warpgroup_mma(
    n: int, dtype: str, a_major: Literal["k", "mn"] = "k", b_major: Literal["k", "mn"] = "k"
) -> WarpgroupMma:
    """-> the WarpgroupMma of 64 rows of a matrix A by `n` columns of B, 64 deep, of float8 128.

    n         8 to 256, a multiple of 8
    dtype     "bfloat16", "float16" or "float8_e4m3fn", of both. Sums of float8 keep about 14 bits (see
              ``shmemkit.gemm.block_scales``), and both operands are "k"
    a_major   "k": in the tile `a`, 8192 bytes, a row of A is a row (64 rows of 128 bytes). "mn": a column of
              A is
    b_major   "k": in the tile `b` a column of B is a row (n rows of 128 bytes). "mn": a row of B is; n / 64
              such tiles of 64 columns, one after another, 8192 bytes each, the last one perhaps not all used

    Tiles are swizzled, as `tma_load` of boxes with rows of 128 bytes leaves them, and begin at a multiple of
    1024 bytes of shared memory. What threads have stored there, the tensor cores see after
    `fence_proxy_async`.
    """
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"warpgroup_mma(): n is {n}; it must be a multiple of 8, 8 to 256")
    check_choice("warpgroup_mma", "dtype", dtype, tuple(DTYPES))
    check_choice("warpgroup_mma", "a_major", a_major, tuple(MAJORS))
    check_choice("warpgroup_mma", "b_major", b_major, tuple(MAJORS))
    if dtype == "float8_e4m3fn" and (a_major, b_major) != ("k", "k"):
        raise ValueError(
            f"warpgroup_mma(): a_major is {a_major!r} and b_major {b_major!r}; of {dtype} both must be 'k'"
        )

    def zeros():
        current_thread("wgmma zeros")
        return emulated.zeros(n)

    @reads_shared
    def multiply(acc, a, b, add):
        thread, operands = group_thread("warpgroup", "wgmma multiply", None, a, b, add), []
        for tile, major, extent in (a, a_major, emulated.ROWS), (b, b_major, n):
            descriptor = at_address(_DESCRIPTOR[major], emulated.shared_address(thread, tile))
            operands.append(emulated.Operand(tile, descriptor, _STEP[major], major, extent, dtype))
        return emulated.multiply(thread, acc, operands[0], operands[1], add, n)

    def wait(acc, n=0):
        thread = group_thread("warpgroup", "wgmma wait", n, meets=False)
        emulated.wait_group(thread, n)
        return emulated.settled(thread, acc)

    _register(zeros, multiply, wait, n, DTYPES[dtype], a_major, b_major)
    return WarpgroupMma(zeros, multiply, wait)


def wgmma_wait_group(n: int) -> None:
    """Wait until all but the last `n` calls of `multiply` by this warpgroup are done.

    n  a literal

    All threads of the warpgroup call it. Afterwards the tiles of those products may be overwritten. To read
    the accumulators, call ``WarpgroupMma.wait``.
    """
    emulated.wait_group(group_thread("warpgroup", "wgmma_wait_group", n, meets=False), n)


def setmaxnreg_inc(n: int) -> None:
    """Raise the registers of this warpgroup to `n` per thread; n is a literal, a multiple of 8.

    It waits until other warpgroups have released registers. All threads of the warpgroup call it once. The
    kernel must have launch_bounds and be linked with LTO; otherwise ptxas ignores it.
    """
    group_thread("warpgroup", "setmaxnreg_inc", n, meets=False)


def setmaxnreg_dec(n: int) -> None:
    """Lower the registers of this warpgroup to `n` per thread; n is a literal, a multiple of 8. See
    `setmaxnreg_inc`."""
    group_thread("warpgroup", "setmaxnreg_dec", n, meets=False)


# ---- on the GPU

_U32, _I64 = types.uint32, types.int64
_fence = asm("wgmma.fence.sync.aligned;")
_commit = asm("wgmma.commit_group.sync.aligned;")


@functools.cache
def _wait_group(n):
    return asm(f"wgmma.wait_group.sync.aligned {n};")


# A matrix descriptor: where the tile begins (bits 0-13), the leading and stride byte offsets (16-29, 32-45),
# all in units of 16 bytes, and the swizzle of 128 bytes (1 at 62-63). Rows of 128 bytes in groups of 8 are
# 1024 bytes apart: the stride offset. The leading one is that from tile to tile of 64 columns of an operand
# that is not K-major; of one that is, it is not used.
_DESCRIPTOR = {
    "k": 1 << 62 | 1024 >> 4 << 32 | 1 << 16,
    "mn": 1 << 62 | 1024 >> 4 << 32 | 8192 >> 4 << 16,
}
# From what one instruction multiplies to what the next does: 32 bytes in each row, or 16 rows of 128 bytes.
_STEP = {"k": 32 >> 4, "mn": 16 * 128 >> 4}


@gpu_function
def at_address(descriptor, address):
    """The descriptor of a tile at `address` in shared memory, of which 18 bits count: in a cluster those from
    24 on are the block's number, and would change the leading offset."""
    return descriptor | (address & 0x3FFFF) >> 4


def _register(zeros, multiply, wait, n, dtype, a_major, b_major):
    count = n // 2
    accumulators = types.UniTuple(types.float32, count)
    registers = ", ".join(f"${i}" for i in range(count))
    a, b, add = (f"${2 * count + i}" for i in range(3))
    depth, transposed = 16, f", {a_major == 'mn':d}, {b_major == 'mn':d}"
    if dtype == "e4m3":
        depth, transposed = 32, ""
    product = asm(
        f"{{ .reg .pred add; setp.ne.b32 add, {add}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{dtype}.{dtype} "
        f"{{{registers}}}, {a}, {b}, add, 1, 1{transposed}; }}",
        accumulators,
        (accumulators, _I64, _I64, _U32),
        tied=True,
    )
    a_base, b_base = _I64(_DESCRIPTOR[a_major]), _I64(_DESCRIPTOR[b_major])
    a_step, b_step = _I64(_STEP[a_major]), _I64(_STEP[b_major])
    none = float_zeros(count)

    @gpu(zeros)
    def _():
        return lambda: none()

    @gpu(multiply)
    def _(acc, a, b, add):
        if acc != accumulators:
            raise TypingError(
                f"multiply(): acc is {described(acc)}; it must be {accumulators}, which zeros() of this "
                "WarpgroupMma returns"
            )

        def impl(acc, a, b, add):
            a_tile = at_address(a_base, _I64(shared_address(a)))
            b_tile = at_address(b_base, _I64(shared_address(b)))
            _fence()
            acc = product(acc, a_tile, b_tile, add)
            acc = product(acc, a_tile + a_step, b_tile + b_step, 1)
            acc = product(acc, a_tile + 2 * a_step, b_tile + 2 * b_step, 1)
            acc = product(acc, a_tile + 3 * a_step, b_tile + 3 * b_step, 1)
            _commit()
            return acc

        return impl

    @gpu(wait)
    def _(acc, n=0):
        n = literal_integer("wait", "n", n) if n != 0 else 0
        done = asm(f"wgmma.wait_group.sync.aligned {n};", accumulators, (accumulators,), tied=True)
        return lambda acc, n=0: done(acc)


@gpu(wgmma_wait_group)
def _(n):
    wait = _wait_group(literal_integer("wgmma_wait_group", "n", n))
    return lambda n: wait()


def _implement_setting(primitive, direction):
    @gpu(primitive)
    def _(n):
        change = asm(f"setmaxnreg.{direction}.sync.aligned.u32 {literal_integer('setmaxnreg', 'n', n)};")
        return lambda n: change()


_implement_setting(setmaxnreg_inc, "inc")
_implement_setting(setmaxnreg_dec, "dec")
