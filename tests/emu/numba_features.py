"""What numba-cuda documents, on the emulator: a program for each feature, which checks what it gives.

    python tests/emu/numba_features.py      the table of docs/numba.md

A feature that the emulator lacks has the reason, and a program that says so.
"""

import cmath
import enum
import math
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, from_dtype, guvectorize, int32, vectorize
from numba.cuda import libdevice
from numba.cuda.libdevicefuncs import functions as libdevice_table
from numba.cuda.random import (
    create_xoroshiro128p_states,
    init_xoroshiro128p_states_cpu,
    xoroshiro128p_dtype,
    xoroshiro128p_normal_float32,
    xoroshiro128p_normal_float64,
    xoroshiro128p_uniform_float32,
    xoroshiro128p_uniform_float64,
)

import shmemkit as sk

FULL = 0xFFFFFFFF


class Feature(NamedTuple):
    section: str
    names: str
    note: str
    program: object
    lacks: bool


FEATURES: list[Feature] = []


def feature(section, names, note="", lacks=False):
    """Decorator: the program of a feature. With `lacks` it raises NotImplementedError."""

    def add(program):
        FEATURES.append(Feature(section, names, note, program, lacks))
        return program

    return add


def run(kernel, *arguments, grid=1, block=1, stream=0, shared=0):
    """-> the last argument, an array that the kernel has filled"""
    kernel[grid, block, stream, shared](*arguments)
    cuda.synchronize()
    return arguments[-1]


def same(found, expected, rtol=0):
    np.testing.assert_allclose(np.asarray(found, "c16"), np.asarray(expected, "c16"), rtol=rtol)


# ---- kernels

KERNELS = "Kernels and device functions"


@cuda.jit(device=True)
def doubled(x):
    return x * 2


@feature(KERNELS, "`@cuda.jit`, device functions, recursion, closures")
def device_functions():
    @cuda.jit
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    @cuda.jit
    def kernel(out):
        out[0], out[1] = doubled(21), factorial(5)

    same(run(kernel, np.zeros(2)), [42, 120])


@feature(
    KERNELS,
    '`@cuda.jit("void(int32[:], float32)")`, lists of signatures, device functions with a signature',
    "numbers are converted as the signature says; other arrays are refused",
)
def signatures():
    @cuda.jit("float32(int8)", device=True)
    def narrow(x):
        return x * 0.1

    @cuda.jit("void(int8, float64[:])")
    def kernel(n, out):
        out[0], out[1] = n, narrow(n + 256)

    same(run(kernel, 257, np.zeros(2)), [1, np.float32(0.1)])
    try:
        kernel[1, 1](1, np.zeros(2, "i4"))
    except TypeError as error:
        assert "its signature takes" in str(error)
    else:
        raise AssertionError("it took another array")


@feature(
    KERNELS,
    "`fastmath`, `debug`, `opt`, `lineinfo`, `max_registers`, `inline`, `forceinline`, `cache`, "
    "`launch_bounds`, `lto`; `kernel.specialize`",
    "they change nothing",
)
def options():
    @cuda.jit(fastmath=True, max_registers=32, lineinfo=True, launch_bounds=(32, 1))
    def kernel(out):
        out[0] = 1

    out = np.zeros(1)
    same(run(kernel.specialize(out), out), [1])


@feature(KERNELS, "`kernel[grid, block, stream, shared]`, `kernel.forall(n)`")
def launches():
    @cuda.jit
    def kernel(out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = cuda.gridsize(1)

    assert run(kernel, np.zeros(5), grid=2, block=3, stream=cuda.stream())[4] == 6
    out = np.zeros(200)
    kernel.forall(200)(out)
    assert out.all()


@feature(KERNELS, "`cuda.In`, `Out`, `InOut`", "the host's memory is the device's")
def hints():
    @cuda.jit
    def kernel(x, out):
        out[0] = x[0]

    x, out = np.ones(1), np.zeros(1)
    kernel[1, 1](cuda.In(x), cuda.Out(out))
    same(out, [1])


@feature(
    KERNELS,
    "`cuda.declare_device`, `link=` of CUDA C++, PTX or LTO-IR",
    "there is no compiler for it",
    lacks=True,
)
def linked():
    outside = cuda.declare_device("outside", "int32(int32)")

    @cuda.jit
    def kernel(out):
        out[0] = outside(1)

    run(kernel, np.zeros(1))


@feature(
    KERNELS,
    "`inspect_asm`, `inspect_llvm`, `inspect_sass`, `inspect_types`",
    "nothing is compiled. `cuda.compile_ptx` compiles without a GPU, and is Numba's own",
    lacks=True,
)
def inspection():
    @cuda.jit
    def kernel(out):
        out[0] = 1

    kernel.inspect_asm()


# ---- threads

THREADS = "Threads"


@feature(THREADS, "`threadIdx`, `blockIdx`, `blockDim`, `gridDim`, `grid`, `gridsize`, `laneid`, `warpsize`")
def indices():
    @cuda.jit
    def kernel(out):
        x, y = cuda.grid(2)
        out[x, y] = (
            cuda.threadIdx.x + 10 * cuda.blockIdx.y + 100 * cuda.blockDim.x + 1000 * cuda.gridDim.y
            + 10000 * cuda.laneid + cuda.warpsize
        )  # fmt: skip

    out = run(kernel, np.zeros((4, 2)), grid=(2, 2), block=(2, 1))
    same(out, [[2232, 2242], [12233, 12243]] * 2)


@feature(THREADS, "`syncthreads`, `syncthreads_count`, `_and`, `_or`, `syncwarp`")
def barriers():
    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        out[t, 0] = cuda.syncthreads_count(int32(t > 0))
        out[t, 1], out[t, 2] = cuda.syncthreads_and(int32(t > 0)), cuda.syncthreads_or(int32(t > 0))
        cuda.syncwarp()
        cuda.syncthreads()

    same(run(kernel, np.zeros((3, 3)), block=3), [[2, 0, 1]] * 3)


@feature(
    THREADS,
    "`threadfence`, `threadfence_block`, `threadfence_system`, `nanosleep`",
    "fences matter with `races=True`",
)
def fences():
    @cuda.jit
    def kernel(out):
        out[0] = 1
        cuda.threadfence_block()
        cuda.threadfence()
        cuda.threadfence_system()
        cuda.nanosleep(20)

    run(kernel, np.zeros(1))


@feature(THREADS, "`cg.this_grid().sync()`", "an error where not all blocks run at once")
def grid_groups():
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        x[i] = i
        cuda.cg.this_grid().sync()
        out[i] = x[cuda.gridsize(1) - 1 - i]

    same(run(kernel, np.zeros(6), np.zeros(6), grid=3, block=2), np.arange(6)[::-1])


@feature(
    THREADS,
    "`shfl_sync`, `shfl_up_sync`, `shfl_down_sync`, `shfl_xor_sync`, `all_sync`, `any_sync`, `eq_sync`, "
    "`ballot_sync`, `match_any_sync`, `match_all_sync`, `activemask`, `lanemask_lt`",
    "`activemask` is all lanes of the warp; `lanemask_lt` is that of the lane",
)
def warps():
    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        out[t, 0], out[t, 1] = cuda.shfl_sync(FULL, t, 3), cuda.shfl_up_sync(FULL, t, 1)
        out[t, 2], out[t, 3] = cuda.shfl_down_sync(FULL, t, 1), cuda.shfl_xor_sync(FULL, t, 1)
        out[t, 4], out[t, 5] = cuda.all_sync(FULL, t < 9), cuda.any_sync(FULL, t > 9)
        out[t, 6], out[t, 7] = cuda.eq_sync(FULL, t // 4), cuda.ballot_sync(FULL, t & 1)
        out[t, 8], out[t, 9] = cuda.match_any_sync(FULL, t // 4), cuda.match_all_sync(FULL, t)[0]
        out[t, 10], out[t, 11] = cuda.activemask(), cuda.lanemask_lt()

    out = run(kernel, np.zeros((32, 12), "i8"), block=32)
    same(out[5], [3, 4, 6, 4, 0, 1, 0, np.int32(-0x55555556), 0xF0, 0, FULL, 31])


# ---- memory

MEMORY = "Memory of kernels"


@feature(MEMORY, "`shared.array`, dynamic shared memory, `local.array`, `const.array_like`")
def arrays():
    table = np.array([5, 6])

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        shared, dynamic = cuda.shared.array(2, int32), cuda.shared.array(0, float32)
        local, constant = cuda.local.array((2, 2), float32), cuda.const.array_like(table)
        shared[t], dynamic[t], local[1, t] = t, t + 1, t + 2
        cuda.syncthreads()
        out[t, 0], out[t, 1], out[t, 2], out[t, 3] = shared[1 - t], dynamic[1 - t], local[1, t], constant[t]

    same(run(kernel, np.zeros((2, 4)), block=2, shared=8), [[1, 2, 2, 5], [0, 1, 3, 6]])


ATOMICS = {  # name -> (the argument, the element after it was 5)
    "add": (3, 8),
    "sub": (3, 2),
    "and_": (4, 4),
    "or_": (2, 7),
    "xor": (1, 4),
    "inc": (5, 0),
    "dec": (3, 3),
    "exch": (9, 9),
    "max": (7, 7),
    "min": (2, 2),
    "nanmax": (7, 7),
    "nanmin": (2, 2),
}


@feature(
    MEMORY,
    "`atomic." + "`, `".join([*ATOMICS, "cas", "compare_and_swap"]) + "`",
    "each returns the old value",
)
def atomics():
    for name, (value, after) in ATOMICS.items():
        namespace = {"cuda": cuda, "value": value}
        exec(f"def kernel(x, out):\n    out[0] = cuda.atomic.{name}(x, 0, value)", namespace)
        x = np.array([5], "u4")
        same(run(cuda.jit(namespace["kernel"]), x, np.zeros(1)), [5])
        same(x, [after])

    @cuda.jit
    def swap(x, out):
        out[0], out[1] = cuda.atomic.cas(x, 0, 5, 7), cuda.atomic.compare_and_swap(x, 5, 9)

    x = np.array([5])
    same(run(swap, x, np.zeros(2)), [5, 7])
    same(x, [7])


@feature(
    MEMORY,
    "`ldca`, `ldcg`, `ldcs`, `ldlu`, `ldcv`, `stcg`, `stcs`, `stwb`, `stwt`",
    "ordinary loads and stores",
)
def cache_hints():
    @cuda.jit
    def kernel(x, out):
        cuda.stcg(out, 0, cuda.ldca(x, 0) + cuda.ldcg(x, 1) + cuda.ldcs(x, 2))
        cuda.stcs(out, 1, cuda.ldlu(x, 0))
        cuda.stwb(out, 2, cuda.ldcv(x, 1))
        cuda.stwt(out, 3, 4)

    same(run(kernel, np.array([1, 2, 3]), np.zeros(4)), [6, 1, 2, 4])


record_dtype = np.dtype([("a", "i4"), ("b", "f8"), ("v", "f4", 3)], align=True)
record_type = from_dtype(record_dtype)


@feature(
    MEMORY,
    "Structured dtypes: `x[i].a`, `x[i]['a']`, `x.a[i]`, nested arrays and records, shared and local arrays "
    "of records, records as arguments",
    "races are those of a field",
)
def records():
    @cuda.jit
    def kernel(x, one, out):
        x[1].a = x[0].a + 1
        x[1]["v"][2] = 9
        r = x[1]
        r.b = 0.5
        x[2] = r
        shared, local = cuda.shared.array(2, record_type), cuda.local.array(1, record_type)
        shared[1], local[0].a = x[2], 3
        one.a += 1
        out[0], out[1], out[2] = x.a[1], shared[1].b, local[0].a

    x, one = np.ones(3, record_dtype), np.ones(1, record_dtype)
    same(run(kernel, x, one[0], np.zeros(3)), [2, 0.5, 3])
    assert x[2] == x[1] and x[2]["v"][2] == 9 and one["a"] == 2


@feature(MEMORY, "Slices, `view`, `reshape`, `ravel`, `T`, `shape`, `strides`, `size`, `ndim`")
def views():
    @cuda.jit
    def kernel(x, out):
        out[0] = x[1:].view(np.uint32)[1, 1]
        out[1], out[2] = x.reshape(6)[4], x.T[1, 2]
        out[3], out[4], out[5] = x.shape[0], x.strides[0], x.size + x.ndim

    x = np.arange(6, dtype="i4").reshape(3, 2)
    same(run(kernel, x, np.zeros(6)), [5, 4, 5, 3, 8, 8])


# ---- arithmetic

ARITHMETIC = "Numbers"


@feature(ARITHMETIC, "`popc`, `clz`, `brev`, `ffs`", "of the width that the value was loaded or cast with")
def integer_intrinsics():
    @cuda.jit
    def kernel(x, u, out):
        out[0], out[1], out[2], out[3] = cuda.popc(x[0]), cuda.clz(x[1]), cuda.brev(u[0]), cuda.ffs(x[2])
        out[4], out[5] = cuda.clz(x[1] + 0), cuda.clz(np.int16(1))

    x, u = np.array([-1, 1, 12], "i4"), np.array([1], "u8")
    same(run(kernel, x, u, np.zeros(6)), [32, 31, 2.0**63, 3, 63, 15])


@feature(ARITHMETIC, "`fma`, `cbrt`, `selp`", "`fma` rounds once")
def float_intrinsics():
    @cuda.jit
    def kernel(x, out):
        out[0], out[1] = cuda.fma(x[0], x[0], -1.0), cuda.cbrt(27.0)
        out[2] = cuda.selp(x[0] > 1, 2, 3)

    x = np.array([1 + 2.0**-30])
    same(run(kernel, x, np.zeros(3)), [2.0**-29 + 2.0**-60, 3, 2], 1e-15)


@feature(
    ARITHMETIC,
    f"`cuda.libdevice`: all {len(libdevice_table)} functions",
    "directed rounding is exact; others are computed in float64 and rounded, also `fast_`",
)
def libdevice_functions():
    @cuda.jit
    def kernel(out):
        out[0], out[1] = libdevice.sinf(0.5), cuda.libdevice.mulhi(1 << 30, 8)
        out[2], out[3] = cuda.libdevice.fadd_ru(1.0, 1e-20), cuda.libdevice.erfinv(0.5)
        out[4], out[5] = libdevice.sincos(0.5)

    expected = [np.float32(math.sin(0.5)), 2, 1 + 2.0**-23, 0.4769362762044699, math.sin(0.5), math.cos(0.5)]
    same(run(kernel, np.zeros(6)), expected, 1e-15)


@feature(ARITHMETIC, "float16 and `cuda.fp16`; bfloat16 and `cuda.bf16`", "each result is rounded once")
def half_precision():
    @cuda.jit
    def kernel(x, out):
        out[0], out[1] = cuda.fp16.hadd(x[0], x[1]), cuda.fp16.hfma(x[0], x[1], x[0])
        out[2], out[3] = x[0] * x[1], cuda.fp16.hgt(x[0], x[1])
        out[4] = cuda.bf16.float2bfloat16_rd(0.1)

    x = np.array([0.1, 3], "f2")
    tenth, three = x.astype("f8")
    expected = [np.float16(tenth + three), np.float16(tenth * three + tenth), x[0] * x[1], 0, 0.099609375]
    same(run(kernel, x, np.zeros(5)), expected)


@feature(ARITHMETIC, "Vector types: `float32x4`, `uint8x2`, `float4`, `int2`, ...")
def vector_types():
    @cuda.jit
    def kernel(out):
        v = cuda.float32x4(1, 2, 3, 4)
        w = cuda.float4(cuda.float2(5, 6), v.w, cuda.int32x1(7).x)
        out[0], out[1], out[2], out[3] = w.x, w.y, w.z, cuda.uint8x2(257, 0).x

    same(run(kernel, np.zeros(4)), [5, 6, 4, 1])


@feature(
    ARITHMETIC, "Integers of 64 bits that wrap, casts, `//`, `%`, `/` and `%` by zero", "without an exception"
)
def integers():
    @cuda.jit
    def kernel(x, zero, out):
        out[0], out[1], out[2] = (x[0] + x[0]) >> 1, x[1] // 2, x[1] % 3
        out[3], out[4], out[5] = x[1] // zero, x[1] % zero, np.int8(x[2])

    x = np.array([2**63 - 1, -7, 200])
    same(run(kernel, x, 0, np.zeros(6)), [-1, -4, 2, 0, 0, -56])


@feature(
    ARITHMETIC,
    "float32 with a Python float is float64; `math` and `float()` keep float32",
    "in `+`, `-` and `*` a float32 with an *integer* stays float32; Numba makes float64 of it",
)
def floats():
    @cuda.jit
    def kernel(x, alpha, n, out):
        out[0], out[1], out[2] = x[0] * 0.1, x[0] * alpha, math.sqrt(x[0])
        out[3], out[4], out[5] = n / 3, x[0] / n, math.sqrt(-1.0) if n else 0

    x = np.array([0.3], "f4")
    third = float(x[0])
    expected = [third * 0.1, third * 0.7, np.sqrt(x[0]), 2 / 3, third / 2]
    out = run(kernel, x, 0.7, 2, np.zeros(6))
    same(out[:5], expected)
    assert math.isnan(out[5])


@feature(
    ARITHMETIC, "complex numbers, `math`, `cmath`, NumPy's ufuncs, `abs`, `min`, `max`, `round`, `pow`, enums"
)
def functions():
    class Color(enum.IntEnum):
        RED = 3

    @cuda.jit
    def kernel(z, out):
        out[0], out[1] = z[0] * z[0], cmath.exp(z[0])
        out[2], out[3] = math.hypot(3.0, 4.0), np.sin(0.5)
        out[4], out[5] = max(min(abs(-5), 7), 2) + round(2.5) + pow(2, 3), Color.RED

    expected = [-3 + 4j, cmath.exp(1 + 2j), 5, np.sin(0.5), 5 + 2 + 8, 3]
    same(run(kernel, np.array([1 + 2j]), np.zeros(6, "c16")), expected, 1e-15)


# ---- Python in kernels

PYTHON = "Python in kernels"


@feature(
    PYTHON,
    "tuples, `None`, `for`, `while`, `range`, `enumerate`, `zip`, `len`, constants of the module",
)
def python():
    @cuda.jit
    def kernel(pair, nothing, out):
        for i, value in enumerate(pair):
            out[i] = value
        if nothing is None:
            out[2] = len(pair)

    same(run(kernel, (3, 4), None, np.zeros(3)), [3, 4, 2])


@feature(
    PYTHON, "`print`, `assert`, `raise`", "an exception ends the run; without `debug=True` a GPU ignores it"
)
def exceptions():
    @cuda.jit
    def kernel(out):
        if out[0] > 0:
            raise ValueError("too large")
        assert out[0] == 0

    run(kernel, np.zeros(1))


# ---- random numbers, ufuncs

LIBRARY = "What is built on kernels"


@feature(
    LIBRARY,
    "`cuda.random`: xoroshiro128p",
    "the same bits as Numba's; normal numbers to the last digits",
)
def random():
    @cuda.jit
    def kernel(states, out):
        i = cuda.grid(1)
        out[i, 0], out[i, 1] = (
            xoroshiro128p_uniform_float32(states, i),
            xoroshiro128p_uniform_float64(states, i),
        )
        out[i, 2], out[i, 3] = (
            xoroshiro128p_normal_float32(states, i),
            xoroshiro128p_normal_float64(states, i),
        )

    states = create_xoroshiro128p_states(3, seed=7)
    out = run(kernel, states, np.zeros((3, 4)), block=3)
    compiled, expected = np.zeros(3, xoroshiro128p_dtype), np.zeros((3, 4))  # by Numba's compiler for the CPU
    init_xoroshiro128p_states_cpu(compiled, 7, 0)
    for i in range(3):
        expected[i] = (
            xoroshiro128p_uniform_float32(compiled, i), xoroshiro128p_uniform_float64(compiled, i),
            xoroshiro128p_normal_float32(compiled, i), xoroshiro128p_normal_float64(compiled, i),
        )  # fmt: skip
    same(out[:, :2], expected[:, :2])
    same(out, expected, 1e-6)
    assert (np.asarray(states) == compiled).all()


@feature(LIBRARY, '`@vectorize(target="cuda")`, `ufunc.reduce`, `@guvectorize(target="cuda")`')
def ufuncs():
    @vectorize(["float32(float32, float32)", "int64(int64, int64)"], target="cuda")
    def add(a, b):
        return a + b

    @guvectorize(["void(float64[:], float64[:], float64[:])"], "(n),(n)->()", target="cuda")
    def dot(a, b, out):
        out[0] = 0
        for i in range(a.shape[0]):
            out[0] += a[i] * b[i]

    x = np.arange(5, dtype="f4")
    same(add(x, x), 2 * x)
    same(add(np.arange(3), 1), [1, 2, 3])
    same(add(cuda.to_device(x), cuda.to_device(x)).copy_to_host(), 2 * x)
    assert add.reduce(x) == 10
    same(dot(np.ones((2, 3)), np.full((2, 3), 2.0)), [6, 6])


@feature(LIBRARY, "`cuda.reduce`, `cuda.Reduce`")
def reduction():
    total = cuda.reduce(lambda a, b: a + b)
    same([total(np.arange(300.0)), total(np.arange(7), init=5)], [44850, 26])


# ---- the host

HOST = "The host"


@feature(
    HOST,
    "`to_device`, `device_array`, `device_array_like`, `copy_to_host`, `copy_to_device`, `pinned_array`, "
    "`mapped_array`, `managed_array`, `pinned`, `mapped`, `as_cuda_array`, `is_cuda_array`",
    "all memory is the host's",
)
def host_arrays():
    x = cuda.to_device(np.arange(3))
    y = cuda.device_array_like(x)
    y.copy_to_device(x)
    same(y.copy_to_host(), [0, 1, 2])
    arrays = cuda.device_array(2), cuda.pinned_array(2), cuda.mapped_array(2), cuda.managed_array(2)
    assert all(a.shape == (2,) for a in arrays) and cuda.is_cuda_array(x)
    host = np.zeros(2)
    with cuda.pinned(host), cuda.mapped(host) as seen:
        seen[:] = 1
    same(host, [1, 1])


@feature(
    HOST,
    "`stream`, `default_stream`, `external_stream`, `event`, `event_elapsed_time`, `synchronize`, "
    "`auto_synchronize`",
    "times mean nothing",
)
def streams():
    stream, event = cuda.stream(), cuda.event()
    with stream.auto_synchronize():
        event.record(stream)
        event.wait(stream)
    event.synchronize()
    cuda.default_stream().synchronize()


@feature(
    HOST,
    "`gpus`, `select_device`, `get_current_device`, `current_context`, memory managers, IPC handles, "
    "`profile_start`",
    "without a GPU. `shmemkit emu script.py` has a device for each rank",
    lacks=True,
)
def devices():
    cuda.current_context()


def table():
    lines = []
    for section in dict.fromkeys(f.section for f in FEATURES):
        lines += ["", f"| {section} | | |", "| --- | --- | --- |"]
        lines += [
            f"| {f.names} | {'no' if f.lacks else 'yes'} | {f.note} |"
            for f in FEATURES
            if f.section == section
        ]
    return "\n".join(lines[1:])


def main(program):
    sk.init()
    program()


if __name__ == "__main__":
    print(table())
