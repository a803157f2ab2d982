"""The primitives as PTX: the ordering that was asked for, in the instruction that has it, in its place."""

import re

import numpy as np
import pytest
from emulated import untyped
from fast import slow
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda import types
from ptx import (
    AMPERE,
    HOPPER,
    compile_ptx,
    instructions,
    link,
    machine_code,
    position,
    resources,
)

import shmemkit
from shmemkit import device as sk

ARCHITECTURES = pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
INTEGERS = [types.uint64, types.int64, types.uint32, types.int32]
DTYPES = [
    types.boolean,
    types.uint8,
    types.int16,
    types.float16,
    types.bfloat16,
    types.float32,
    types.int32,
    types.float64,
    types.uint64,
    types.complex64,
    types.complex128,
]


def array(dtype):
    return types.Array(dtype, 1, "C")


def count(ptx, pattern):
    return sum(bool(re.search(pattern, line)) for line in instructions(ptx))


def assert_lean(ptx):
    """No calls, no 64-bit division, no detour through floating point, no reference counting."""
    for line in instructions(ptx):
        assert not re.match(r"(call|div\.[su]64|rem\.[su]64|cvt\.rn\.f64)", line), f"{line}\n{ptx}"
    assert "NRT_" not in ptx


# ---- LL


@ARCHITECTURES
@pytest.mark.parametrize("form", ["warp", "block"])
def test_ll_moves_two_words_at_a_time(form, cc):
    """Each word is one 64-bit access of an instruction that stores or loads two; both flags are looked at."""
    pack, recv = getattr(sk, f"ll_pack_{form}"), getattr(sk, f"ll_recv_{form}")
    pass_on = getattr(sk, f"ll_recv_pack_{form}")

    def packs(lines, x, flag):
        pack(lines, x, flag)

    def receives(lines, x, flag):
        recv(x, lines, flag)

    def passes_on(lines, x, flag):
        pass_on(x, lines, 6, flag)

    stores, loads = "st.relaxed.sys.global.v2.b64", "ld.relaxed.sys.global.v2.b64"
    words = array(types.uint64)
    for kernel, has_stores, has_loads in (
        (packs, True, False),
        (receives, False, True),
        (passes_on, True, True),
    ):
        ptx = compile_ptx(kernel, (words, words, types.uint32), cc)
        assert_lean(ptx)
        assert (stores in ptx, loads in ptx) == (has_stores, has_loads)
        if has_loads:  # at the first look, and in the loop
            assert count(ptx, r"setp\.(ne|eq)\.[sub]32") >= 4


@pytest.mark.parametrize(
    ("lines", "data", "message"),
    [
        (array(types.uint32), array(types.uint8), "contiguous 1-D array of uint64"),
        (array(types.uint64), types.Array(types.uint8, 1, "A"), "it must be a contiguous array"),
        (array(types.uint64), types.float32, "it must be a contiguous array"),
    ],
)
def test_ll_refuses(lines, data, message):
    def kernel(lines, x):
        sk.ll_pack_block(lines, x, 1)

    with pytest.raises(TypingError, match=message):
        compile_ptx(kernel, (lines, data), refused=True)


# ---- OpenSHMEM's signals

SET, GE = sk.SignalOp.SIGNAL_SET, sk.ComparisonType.CMP_GE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: sk.signal_wait_until(f, 1, GE), "value is a ComparisonType, which is for compare"),
        (lambda f: sk.signal_wait(f, 1, GE), "value is a ComparisonType, which is for compare"),
        (lambda f: sk.signal_op(f, SET, 1, 0), "signal_val is a SignalOp, which is for signal_op"),
        (lambda f: sk.signal_op(f, 1, GE, 0), "signal_op is a ComparisonType, which is for compare"),
        (lambda f: sk.put_signal(f, f, f, 1, 0, SET), "pe is a SignalOp, which is for signal_op"),
    ],
)
def test_enums_in_the_wrong_place(call, message):
    with pytest.raises(TypingError, match=message):
        compile_ptx(call, (array(types.uint64),), refused=True)


# ---- wait


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("semantic", ["acquire", "relaxed"])
@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_wait_loads_as_asked(scope, semantic, dtype):
    def kernel(signals, out, value):
        out[0] = sk.wait(signals[2:], 1, scope, semantic, value)

    ptx = compile_ptx(kernel, (array(dtype), array(types.int64), types.int64))
    assert (
        count(ptx, rf"^ld\.{semantic}\.{scope}\.global\.u{dtype.bitwidth} ")
        == count(ptx, r"^ld\.(acq|rel)")
        > 0
    )
    assert_lean(ptx)


@pytest.mark.each_value
@pytest.mark.parametrize("compare", ["ge", "eq", "ne", "gt", "le", "lt"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_wait_compares_in_the_dtype_of_the_signals(dtype, compare):
    def kernel(signals, value):
        sk.wait(signals, 1, "sys", "acquire", value, compare)

    ptx = compile_ptx(kernel, (array(dtype), types.int64))
    assert_lean(ptx)
    inverse = {"ge": "lt", "eq": "ne", "ne": "eq", "gt": "le", "le": "gt", "lt": "ge"}
    sign = "[su]" if compare in ("eq", "ne") else ("s" if dtype.signed else "u")
    loop = [line for line in instructions(ptx) if line.startswith("setp")]
    assert loop and all(
        re.match(rf"setp\.({compare}|{inverse[compare]})\.({sign}|b)(32|64)", line) for line in loop
    )


def spin(flags, value):
    while sk.ld_acquire(flags, 0) != value:
        pass


def wait_acquire(flags, value):
    sk.wait(flags, 1, "sys", "acquire", value)


def wait_relaxed(flags, value):
    sk.wait(flags, 1, "gpu", "relaxed", value, "eq")


def wait_block(flags, value):
    sk.wait_block(flags, 1, "sys", "acquire", value)


@pytest.mark.parametrize("kernel", [spin, wait_acquire, wait_relaxed, wait_block])
def test_the_load_is_in_the_loop(kernel):
    ptx = compile_ptx(kernel, (array(types.uint64), types.uint64))
    assert re.search(r"(\$L__BB\w+):[^:]*\bld\.(acquire|relaxed)\.[^:]*\bbra\s+\1;", ptx), ptx


def test_wait_for_one_has_no_loop_over_the_signals():
    def one(signals, n, value):
        sk.wait(signals, 1, "sys", "acquire", value)

    def many(signals, n, value):
        sk.wait(signals, n, "sys", "acquire", value)

    branches = [
        count(compile_ptx(kernel, (array(types.uint64), types.int64, types.int64)), "bra")
        for kernel in (one, many)
    ]
    assert branches[0] <= 2 < branches[1]


@pytest.mark.each_value
@pytest.mark.parametrize("wait", [sk.wait, sk.wait_warp, sk.wait_block], ids=lambda w: w.__name__)
@pytest.mark.parametrize("n", [1, None])
def test_data_is_loaded_after_the_wait(wait, n):
    """Also by the compilers: the same element is loaded before the wait and again after it."""

    if n == 1:

        def kernel(signals, data, out, n, value):
            i = cuda.threadIdx.x
            before = data[i]
            wait(signals, 1, "sys", "acquire", value)
            out[i] = data[i] - before

    else:

        def kernel(signals, data, out, n, value):
            i = cuda.threadIdx.x
            before = data[i]
            wait(signals, n, "sys", "acquire", value)
            out[i] = data[i] - before

    numbers = array(types.float32)
    ptx = compile_ptx(kernel, (array(types.uint64), numbers, numbers, types.int64, types.int64))
    first, second = (i for i, line in enumerate(instructions(ptx)) if line.startswith("ld.global.f32"))
    acquires = [i for i, line in enumerate(instructions(ptx)) if line.startswith("ld.acquire.sys")]
    assert first < min(acquires) and max(acquires) < second
    if wait is not sk.wait:
        meet = position(ptx, r"^bar\.sync" if wait is sk.wait_block else r"^bar\.warp\.sync")
        assert max(acquires) < meet < second
    assert_lean(ptx)


@pytest.mark.each_value
@pytest.mark.parametrize("wait", [sk.wait, sk.wait_warp, sk.wait_block], ids=lambda w: w.__name__)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_wait_without_a_value_waits_for_1(dtype, wait):
    def written_out(signals, n):
        wait(signals, n, "sys", "acquire", 1, "eq")

    def left_out(signals, n):
        wait(signals, n, "sys", "acquire", compare="eq")

    def body(kernel):
        lines = instructions(compile_ptx(kernel, (array(dtype), types.int64)))
        return [line for line in lines if not line.startswith("ld.param")]  # which have the kernel's name

    assert body(left_out) == body(written_out)


@pytest.mark.parametrize("integer", INTEGERS, ids=str)
def test_any_integer_may_count_the_signals(integer):
    def kernel(signals, n):
        sk.wait(signals, n, "sys", "acquire", n)
        sk.wait_block(signals, n, "sys", "acquire", n)

    assert_lean(compile_ptx(kernel, (array(types.uint64), integer)))


def test_data_is_loaded_after_the_wait_in_machine_code():
    def kernel(signals, data, out, value):
        i = cuda.threadIdx.x
        before = data[i]
        sk.wait(signals, 1, "sys", "acquire", value)
        out[i] = data[i] - before

    numbers = array(types.float32)
    sass = machine_code(compile_ptx(kernel, (array(types.uint64), numbers, numbers, types.int64)))
    loads = re.findall(r"LDG\.E\S*", sass)
    assert loads[0] == "LDG.E" and loads[-1] == "LDG.E" and len(loads) >= 3
    assert all(load.endswith("64.STRONG.SYS") for load in loads[1:-1])


# ---- consume_token


def sources(ptx, pattern):
    """All registers that the operands of the instruction matching `pattern` were computed from."""
    lines = instructions(ptx)
    at = position(ptx, pattern)
    wanted = set(re.findall(r"%\w+", lines[at]))
    for line in reversed(lines[:at]):
        registers = re.findall(r"%\w+", line)
        if registers and not line.startswith(("st", "red")) and registers[0] in wanted:
            wanted |= set(registers)
    return wanted


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_consume_token_is_a_data_dependency(dtype):
    def kernel(signals, data, out, value):
        token = sk.wait(signals, 1, "sys", "acquire", value)
        data = sk.consume_token(data, token)
        out[0] = data[cuda.threadIdx.x]

    numbers = array(types.float32)
    ptx = compile_ptx(kernel, (array(dtype), numbers, numbers, types.int64))
    token = re.search(r"ld\.acquire\S+ (%\w+),", ptx).group(1)
    assert token in sources(ptx, r"^ld\.global\.f32")
    assert position(ptx, r"^ld\.acquire") < position(ptx, r"^sub\.u64 (%\w+), (%\w+), \2;")
    assert_lean(ptx)


def test_consume_token_of_an_integer():
    def kernel(signals, data, out, i, value):
        i = sk.consume_token(i, sk.wait(signals, 1, "sys", "acquire", value))
        out[0] = data[i]

    numbers = array(types.float32)
    for integer in (types.int64, types.uint32):
        ptx = compile_ptx(kernel, (array(types.uint64), numbers, numbers, integer, types.int64))
        token = re.search(r"ld\.acquire\S+ (%\w+),", ptx).group(1)
        assert token in sources(ptx, r"^ld\.global\.f32")


# ---- notify, release, fences


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("sig_op", ["set", "add"])
@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_notify_is_a_release_after_the_data(scope, sig_op, dtype):
    def kernel(signals, data, peer, value):
        data[cuda.threadIdx.x] = 1
        cuda.syncthreads()
        sk.notify(signals, peer, value, sig_op, scope)

    ptx = compile_ptx(kernel, (array(dtype), array(types.float32), types.int64, types.int64))
    bits = dtype.bitwidth
    release = (
        rf"^st\.release\.{scope}\.global\.u{bits}"
        if sig_op == "set"
        else rf"^red\.release\.{scope}\.global\.add\.u{bits}"
    )
    assert position(ptx, r"^st\.global") < position(ptx, r"^bar\.sync") < position(ptx, release)
    assert count(ptx, r"\.release\.") == 1
    assert "shmemkit_world" in ptx
    assert_lean(ptx)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [*INTEGERS, types.float32, types.float64], ids=str)
@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_acquire_and_release(scope, dtype):
    def kernel(a):
        sk.st_release(a, 1, sk.ld_acquire(a, 0, scope), scope)
        sk.red_release(a, 2, 1, scope)

    ptx = compile_ptx(kernel, (types.Array(dtype, 1, "A"),))
    kind = f"{'f' if isinstance(dtype, types.Float) else 'u'}{dtype.bitwidth}"
    assert count(ptx, rf"^ld\.acquire\.{scope}\.global\.{kind} ") == 1
    assert count(ptx, rf"^st\.release\.{scope}\.global\.{kind} ") == 1
    assert count(ptx, rf"^red\.release\.{scope}\.global\.add\.{kind} ") == 1
    assert_lean(ptx)


def test_threadfence():
    def kernel(a):
        a[0] = 1
        sk.threadfence("gpu")
        sk.threadfence("sys", "acq_rel")
        sk.threadfence("block", "acq_rel")
        a[0] = 2

    ptx = compile_ptx(kernel, (array(types.float32),))
    fences = [position(ptx, rf"^fence\.{f};") for f in (r"sc\.gpu", r"acq_rel\.sys", r"acq_rel\.cta")]
    stores = [i for i, line in enumerate(instructions(ptx)) if line.startswith("st.global")]
    assert stores[0] < fences[0] < fences[1] < fences[2] < stores[1]


def test_default_scope_is_sys():
    def kernel(a):
        sk.st_release(a, 1, sk.ld_acquire(a, 0))
        sk.notify(a, 0, 1)

    ptx = compile_ptx(kernel, (array(types.uint64),))
    assert count(ptx, r"\.(acquire|release)\.sys\.") == count(ptx, r"\.(acquire|release)\.") == 3


# ---- peers


def test_peers_cost_a_constant_and_an_addition():
    def kernel(a, out, peer):
        theirs = sk.symm_at(a, peer)
        out[0] = theirs[1] + sk.rank() * sk.num_ranks()
        sk.get_peer_array(a, peer)[0] = 1

    ptx = compile_ptx(kernel, (array(types.int32), array(types.int32), types.int64))
    assert count(ptx, r"^ld\.const\.\w+ .*shmemkit_world\]") and count(
        ptx, r"^ld\.const\.\w+ .*shmemkit_world\+8\]"
    )
    # still known as global memory
    assert count(ptx, r"^ld\.global\.[su]32") == 1 and count(ptx, r"^st\.global\.u32") == 2
    assert_lean(ptx)


def test_symm_at_keeps_shape_and_strides():
    def kernel(a, out):
        theirs = sk.symm_at(a, 1)
        out[0] = theirs[1, 2] * theirs.shape[0]

    for layout, load in (
        ("C", "ld.global.f64"),
        ("A", "ld.f64"),
    ):  # numba itself does not know strided ones as global
        ptx = compile_ptx(kernel, (types.Array(types.float64, 2, layout), array(types.float64)))
        assert sum(line.startswith(load) for line in instructions(ptx)) == 1


@pytest.mark.parametrize("lto", [False, True])
def test_table_of_peers_is_linked_in(lto):
    def kernel(a):
        sk.notify(a, sk.rank(), 1)

    assert b"shmemkit_world" in link(kernel, (array(types.uint64),), lto)


# ---- copies


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [*DTYPES[:2], *slow(*DTYPES[2:])], ids=str)
@pytest.mark.parametrize("copy", [sk.copy_block, sk.copy_warp], ids=lambda c: c.__name__)
def test_copies_are_16_bytes_wide_and_4_deep(copy, dtype):
    def kernel(dst, src, peer):
        copy(sk.symm_at(dst, peer), src)

    ptx = compile_ptx(kernel, (array(dtype), array(dtype), types.int64))
    accesses = "".join(
        {"ld": "l", "st": "s"}[line[:2]]
        for line in instructions(ptx)
        if re.match(r"(ld|st)\.global\.v4\.[ubf]32", line)
    )
    assert "llllssss" in accesses
    assert not count(
        ptx, r"^(ld|st)\.(local|volatile|[ubf]\d)"
    )  # not through registers in memory, nor generic
    assert_lean(ptx)


@pytest.mark.slow
@ARCHITECTURES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_need_no_local_memory(dtype, cc):
    def kernel(dst, src, peer):
        sk.copy_block(sk.symm_at(dst, peer), src)
        sk.copy_warp(dst, src)

    needed = resources(compile_ptx(kernel, (array(dtype), array(dtype), types.int64), cc), cc)
    assert (needed.spills, needed.stack) == (0, 0)
    assert needed.registers <= 64


def test_copy_to_shared_memory():
    def kernel(src):
        tile = cuda.shared.array(256, types.float32)
        sk.copy_block(tile, src)
        cuda.syncthreads()
        sk.copy_block(src[256:], tile)

    ptx = compile_ptx(kernel, (array(types.float32),))
    assert count(ptx, r"^ld\.global\.v4") and count(ptx, r"^st\.shared\.v4")
    assert count(ptx, r"^ld\.shared\.v4") and count(ptx, r"^st\.global\.v4")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vec16(dtype):
    def kernel(a, i):
        x, y, z, w = sk.load_vec16(a, i)
        sk.store_vec16(a, 0, (w, z, y, x))

    ptx = compile_ptx(kernel, (array(dtype), types.int64))
    assert count(ptx, r"^ld\.global\.v4\.[ubf]32") == count(ptx, r"^st\.global\.v4\.[ubf]32") == 1
    assert_lean(ptx)


# ---- barriers


def test_grid_barrier():
    def kernel(state, data):
        data[cuda.grid(1)] = 1
        sk.grid_barrier(state)
        data[0] = 2

    for dtype in (types.uint32, types.uint64):
        ptx = compile_ptx(kernel, (array(dtype), array(types.float32)))
        lines = instructions(ptx)
        syncs = [i for i, line in enumerate(lines) if line.startswith("bar.sync")]
        inside = "\n".join(lines[syncs[0] : syncs[1]])
        for expected in ("atom.add.acq_rel.gpu", "st.release.gpu", "ld.acquire.gpu", "st.relaxed.gpu"):
            assert f"{expected}.global.u{dtype.bitwidth}" in inside
        stores = [i for i, line in enumerate(lines) if line.startswith("st.global")]
        assert stores[0] < syncs[0] and syncs[1] < stores[1]
        assert_lean(ptx)


def test_barrier_of_all_ranks_over_symmetric_signals():
    def kernel(arrivals, epoch, data):
        data[cuda.threadIdx.x] = 1
        sk.barrier_all_block(arrivals, epoch)
        data[0] = 2

    ptx = compile_ptx(kernel, (array(types.uint64), array(types.uint64), array(types.float32)))
    lines = instructions(ptx)
    syncs = [i for i, line in enumerate(lines) if line.startswith("bar.sync")]
    stores = [
        i
        for i, line in enumerate(lines)
        if line.startswith("st.global.f32") or line.startswith("st.global.u32")
    ]
    add, acquire = position(ptx, r"^red\.release\.sys\.global\.add"), position(ptx, r"^ld\.acquire\.sys")
    assert stores[0] < syncs[0] < add < acquire < syncs[1] < stores[1]
    assert syncs[0] < position(ptx, r"^ld\.global\.u64") < syncs[1] < position(ptx, r"^st\.global\.u64")
    assert_lean(ptx)


# ---- mistakes are found when compiling


def misuse(call, *argument_types):
    with pytest.raises(Exception) as caught:
        compile_ptx(call, argument_types, refused=True)
    return str(caught.value)


def test_errors_say_what_was_given_and_what_is_allowed():
    signals, value = array(types.uint64), types.int64
    wrong = {
        "wait(): scope is 'cluster'; it must be 'gpu' or 'sys'": lambda s, v: sk.wait(
            s, 1, "cluster", "acquire", v
        ),
        "semantic is 'release'; it must be 'acquire' or 'relaxed'. A wait or a load acquires": lambda s, v: (
            sk.wait(s, 1, "sys", "release", v)
        ),
        "compare is 'geq'; it must be 'ge', 'eq', 'ne', 'gt', 'le' or 'lt'": lambda s, v: sk.wait(
            s, 1, "sys", "acquire", v, "geq"
        ),
        "scope is a variable of type int64; it must be a literal in the call, 'gpu' or 'sys'": lambda s, v: (
            sk.wait(s, 1, v, "acquire", v)
        ),
        "value is of type float64; it must be an integer": lambda s, v: sk.wait(s, 1, "sys", "acquire", 1.5),
        "sig_op is 'sub'; it must be 'set' or 'add'": lambda s, v: sk.notify(s, 0, v, "sub"),
        "scope is 'block'; it must be": lambda s, v: sk.ld_acquire(s, 0, "block"),
        "scope is 'host'; it must be 'block', 'gpu' or 'sys'": lambda s, v: sk.threadfence("host"),
        "array is of type int64; it must be an array": lambda s, v: sk.symm_at(v, 0),
        "src is a non-contiguous 1-D array of uint64; it must be a contiguous array. Slice": lambda s, v: (
            sk.copy_block(s, s[::2])
        ),
        "value is of type float64; it must be an array or an integer": lambda s, v: sk.consume_token(1.5, v),
        "words is of type int64; it must be a tuple of 4 uint32": lambda s, v: sk.store_vec16(s, 0, v),
        "arrivals or epoch is missing": lambda s, v: sk.barrier_all_block(s),
    }
    for message, call in wrong.items():
        assert message in misuse(call, signals, value)


@untyped  # Numba would come first
def test_the_emulator_says_the_same():
    calls = [
        lambda s, f: sk.wait(s, 1, "cta", "acquire", 1),
        lambda s, f: sk.wait_block(s, 1, "sys", "acq_rel", 1),
        lambda s, f: sk.notify(s, 0, 1, "set", "inter_node"),
        lambda s, f: sk.notify(s[0], 0, 1),
        lambda s, f: sk.signal_op(s, 1.5, 9, 0),
        lambda s, f: sk.signal_wait_until(s, 1, GE),
        lambda s, f: sk.copy_block(s, s[::2]),
        lambda s, f: sk.put(s, f, 0),
        lambda s, f: sk.put(s, s[::2], 0),
        lambda s, f: sk.load_vec16(s[::2], 0),
        lambda s, f: sk.ll_pack_block(f, s, 1),
        lambda s, f: sk.load_tile(f, 0),
        lambda s, f: sk.cp_async_wait(9),
    ]
    for call in calls:
        kernel = cuda.jit(call)
        with pytest.raises(shmemkit.emu.EmulatorError) as caught:
            shmemkit.emu.run(
                lambda k=kernel: (shmemkit.init(), k[1, 32](shmemkit.signals(8), np.zeros(8, "f4"))), 1
            )
        said = re.match(r"\w+: (.*)", str(caught.value))[1]
        assert said in misuse(call, array(types.uint64), array(types.float32))


def test_signals_must_be_integers():
    def kernel(signals):
        sk.wait(signals, 1, "sys", "acquire", 1)

    assert "signals is a 1-D array of float32; it must be" in misuse(kernel, array(types.float32))
    assert (
        "is a 2-D array of uint64; it must be a 1-D array of int32, uint32, int64 or uint64. Pass a row"
        in misuse(kernel, types.Array(types.uint64, 2, "C"))
    )


def test_literals_by_keyword_and_default():
    def kernel(s, v):
        sk.wait(s, 1, value=v, semantic="relaxed", scope="gpu")
        sk.notify(s, rank=0, value=v)

    assert count(compile_ptx(kernel, (array(types.uint64), types.int64)), r"^ld\.relaxed\.gpu")
