"""Multimem as PTX: the instruction that was asked for, with its ordering, type and vector, and nothing else
at a multicast address."""

import re

import numpy as np
import pytest
from numba.core.errors import TypingError
from numba.cuda import types
from ptx import AMPERE, compile_ptx, instructions, link, resources
from ptx_in_python import Gpu

from shmemkit import device as sk
from shmemkit.device.packets import ll, multimem

ORDERINGS = {"weak": "weak", "relaxed": "relaxed.sys", "release": "release.sys"}
NUMBERS = [types.int32, types.uint32, types.int64, types.uint64, types.float32, types.float64]


def array(dtype, ndim=1):
    return types.Array(dtype, ndim, "C")


def only(ptx, pattern):
    """The one instruction that is a multimem one, or a fence; ptxas takes it."""
    found = [line for line in instructions(ptx) if re.match("multimem|fence|membar", line)]
    assert len(found) == 1 and re.fullmatch(pattern, found[0]), found
    assert resources(ptx).spills == 0
    return found[0]


def lean(ptx):
    lines = instructions(ptx)
    return not any(re.match(r"(call|div\.[su]64|rem\.[su]64|cvt\.rn\.f64)", line) for line in lines) and (
        "NRT_" not in ptx and ".local" not in ptx
    )


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("semantic", ORDERINGS)
def test_store(semantic, dtype):
    def kernel(view, i, value):
        sk.multimem_store(view, i, value, semantic)

    ptx = compile_ptx(kernel, (array(dtype), types.int64, dtype))
    kind = "f" if isinstance(dtype, types.Float) else "b"
    only(ptx, rf"multimem\.st\.{ORDERINGS[semantic]}\.global\.{kind}{dtype.bitwidth} \[%rd\d+\], %\w+;")
    assert lean(ptx)
    assert not any(line.startswith("st.") for line in instructions(ptx))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("semantic", ["relaxed", "release"])
def test_red(semantic, dtype):
    def kernel(view, i, value):
        sk.multimem_red(view, i, value, semantic)

    ptx = compile_ptx(kernel, (array(dtype), types.int64, dtype))
    kind = "f" if isinstance(dtype, types.Float) else "u"
    pattern = rf"multimem\.red\.{semantic}\.sys\.global\.add\.{kind}{dtype.bitwidth} \[%rd\d+\], %\w+;"
    only(ptx, pattern)
    assert lean(ptx)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("op", ["add", "min", "max"])
def test_reduce(op, dtype):
    def kernel(view, i, out):
        out[0] = sk.multimem_reduce(view, i, op)

    signature = array(dtype), types.int64, array(dtype)
    if isinstance(dtype, types.Float) and op != "add":
        with pytest.raises(
            TypingError, match=f"array is a 1-D array of {dtype}; it must be a 1-D array of int32, "
        ):
            compile_ptx(kernel, signature, refused=True)
        return
    ptx = compile_ptx(kernel, signature)
    kind = "f" if isinstance(dtype, types.Float) else "s" if dtype.signed and op != "add" else "u"
    only(ptx, rf"multimem\.ld_reduce\.weak\.global\.{op}\.{kind}{dtype.bitwidth} %\w+, \[%rd\d+\];")
    assert lean(ptx)


@pytest.mark.each_value
@pytest.mark.parametrize("semantic", ORDERINGS)
@pytest.mark.parametrize("dtype", [types.uint8, types.bfloat16, types.float64], ids=str)
def test_store_of_vectors(semantic, dtype):
    def kernel(view, i, x):
        sk.multimem_store_vec16(view, i, sk.load_vec16(x, i), semantic)

    ptx = compile_ptx(kernel, (array(dtype), types.int64, array(dtype)))
    only(ptx, rf"multimem\.st\.{ORDERINGS[semantic]}\.global\.v4\.f32 \[%rd\d+\], \{{(%r\d+(, )?){{4}}\}};")
    assert lean(ptx)


@pytest.mark.parametrize(
    "dtype, op, instruction",
    [
        (types.float32, "add", "add.v4.f32"),
        (types.float16, "add", "add.acc::f32.v4.f16x2"),
        (types.float16, "min", "min.v4.f16x2"),
        (types.float16, "max", "max.v4.f16x2"),
        (types.bfloat16, "add", "add.acc::f32.v4.bf16x2"),
        (types.bfloat16, "min", "min.v4.bf16x2"),
        (types.bfloat16, "max", "max.v4.bf16x2"),
    ],
    ids=str,
)
def test_reduce_of_vectors(dtype, op, instruction):
    def kernel(view, i, x):
        sk.store_vec16(x, i, sk.multimem_reduce_vec16(view, i, op))

    ptx = compile_ptx(kernel, (array(dtype), types.int64, array(dtype)))
    only(ptx, rf"multimem\.ld_reduce\.weak\.global\.{re.escape(instruction)} \{{.*\}}, \[%rd\d+\];")
    assert lean(ptx)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [t for t in NUMBERS if t != types.float32], ids=str)
@pytest.mark.parametrize("op", ["add", "min"])
def test_reduce_of_vectors_element_by_element(op, dtype):
    """The same instruction as for one element, for each of the 16 bytes once, in the order of the words."""

    def kernel(view, i, x):
        sk.store_vec16(x, i, sk.multimem_reduce_vec16(view, i, op))

    signature = array(dtype), types.int64, array(dtype)
    if dtype == types.float64 and op != "add":
        with pytest.raises(TypingError, match="is of float64; for op 'min' it must be of int32, "):
            compile_ptx(kernel, signature, refused=True)
        return
    ptx = compile_ptx(kernel, signature)
    kind = "f" if isinstance(dtype, types.Float) else "s" if dtype.signed and op != "add" else "u"
    name = rf"multimem\.ld_reduce\.weak\.global\.{op}\.{kind}{dtype.bitwidth}"
    snippet = next(line.strip() for line in ptx.splitlines() if "multimem.ld" in line)
    if dtype.bitwidth == 32:
        pattern = " ".join(rf"{name} %r\d+, \[%rd\d+\+{4 * k}\];" for k in range(4))
    else:
        register = "f64" if kind == "f" else "b64"
        loads = rf"{name} a, \[%rd\d+\]; {name} b, \[%rd\d+\+8\];"
        moves = r"mov\.b64 \{%r\d+, %r\d+\}, a; mov\.b64 \{%r\d+, %r\d+\}, b;"
        pattern = rf"\{{ \.reg \.{register} a, b; {loads} {moves} \}}"
    assert re.fullmatch(pattern, snippet), snippet
    assert ptx.count("multimem.ld") == snippet.count("multimem.ld")
    assert resources(ptx).spills == 0 and lean(ptx)


def test_fence():
    def kernel():
        sk.multimem_fence()

    only(compile_ptx(kernel, ()), r"fence\.proxy\.alias;")


@pytest.mark.each_value
@pytest.mark.parametrize("copy", [sk.multimem_copy_block, sk.multimem_copy_warp], ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [types.uint8, types.float16, types.float32, types.complex128], ids=str)
def test_copies(copy, dtype):
    """Stores of 16 and 4 bytes, none but multimem ones; four loads of 16 bytes before the first store."""

    def kernel(view, x):
        copy(view[1], x)

    ptx = compile_ptx(kernel, (array(dtype, 2), array(dtype)))
    assert lean(ptx)
    assert resources(ptx).spills == 0
    lines = instructions(ptx)
    stores = [line.split()[0] for line in lines if re.match(r"(multimem\.)?st\.", line)]
    narrow = {"multimem.st.weak.global.b32"} if dtype != types.complex128 else set()
    assert set(stores) == {"multimem.st.weak.global.v4.f32"} | narrow
    order = "".join(
        {"ld": "l", "mu": "s"}[line[:2]]
        for line in lines
        if re.match(r"ld\.(global\.)?v4|multimem\.st\.weak\.global\.v4", line)
    )
    assert "llllssss" in order


@pytest.mark.parametrize("form", ["warp", "block"])
def test_ll_keeps_words_whole(form):
    """Each word is a store of 64 bits; a vector would be four of 32."""
    pack, pass_on = getattr(sk, f"multimem_ll_pack_{form}"), getattr(sk, f"multimem_ll_recv_pack_{form}")

    def packs(view, x, flag):
        pack(view, x, flag)

    def passes_on(view, x, flag):
        pass_on(view, x, 6, flag)

    words = array(types.uint64)
    for kernel, has_loads in ((packs, False), (passes_on, True)):
        ptx = compile_ptx(kernel, (words, words, types.uint32))
        assert lean(ptx)
        assert resources(ptx).spills == 0
        stores = [line.strip() for line in ptx.splitlines() if re.search(r"\bst\.", line)]
        # The two of a line are one snippet.
        store = r"multimem\.st\.relaxed\.sys\.global\.b64 \[%rd\d+"
        whole = rf"\{{ \.reg \.b64 a, b; mov.*; mov.*; {store}\], a; {store}\+8\], b; \}}"
        assert stores and all(re.fullmatch(whole, line) for line in stores), stores
        assert ("ld.relaxed.sys.global.v2.b64" in ptx) == has_loads


@pytest.mark.slow
@pytest.mark.parametrize("lto", [False, True])
def test_linked(lto):
    def kernel(view, x, signals):
        sk.multimem_copy_block(view, x)
        sk.multimem_store(signals, 0, 1, "release")
        sk.multimem_fence()

    assert link(kernel, (array(types.uint8), array(types.uint8), array(types.uint64)), lto)


def test_not_for_older_gpus():
    def kernel(view):
        sk.multimem_store(view, 0, 1)

    with pytest.raises(AssertionError, match="requires .target sm_90 or higher"):
        resources(compile_ptx(kernel, (array(types.uint64),), AMPERE), AMPERE)


u64, f32, u8 = array(types.uint64), array(types.float32), array(types.uint8)


@pytest.mark.parametrize(
    "use, signature, message",
    [
        (lambda a: sk.multimem_store(a, 0, 1), (u8,), "must be a 1-D array of int32"),
        (lambda a: sk.multimem_store(a, 0, 1), (array(types.int32, 2),), "must be a 1-D array of int32"),
        (lambda a: sk.multimem_store(a, 0, 1, "acquire"), (u64,), "semantic is 'acquire'; it must"),
        (lambda a: sk.multimem_store(a, 0.5, 1), (u64,), "index is of type float64; it must be an integer"),
        (lambda a: sk.multimem_red(a, 0, 1, "weak"), (u64,), "semantic is 'weak'; it must"),
        (lambda a: sk.multimem_reduce(a, 0, "mul"), (u64,), "op is 'mul'; it must be "),
        (
            lambda a: sk.multimem_reduce_vec16(a, 0, "min"),
            (f32,),
            "is of float32; for op 'min' it must be .* uint64, float16 or bfloat16",
        ),
        (
            lambda a: sk.multimem_reduce_vec16(a, 0),
            (u8,),
            "is of uint8; for op 'add' it must be .* float16 or bfloat16",
        ),
        (
            lambda a: sk.multimem_store_vec16(a, 0, (1, 2)),
            (u8,),
            r"words is of type UniTuple\(.*\); it must be a tuple of 4 uint32",
        ),
        (lambda a: sk.multimem_copy_block(a, a), (types.Array(types.uint8, 1, "A"),), "dst is a non-contig"),
        (lambda a: sk.multimem_ll_pack_block(a, a, 1), (u8,), "must be a contiguous 1-D array of uint64"),
        (
            lambda a: sk.multimem_ll_recv_pack_warp(a, a, 2, 0.5),
            (u64,),
            "flag is of type float64; it must be an integer",
        ),
    ],
)
def test_refused(use, signature, message):
    with pytest.raises(TypingError, match=message):
        compile_ptx(use, signature, refused=True)


# ---- what the GPU computes, as Python: no GPU may run it here


class Multicast(Gpu):
    """Memory that the stores of multimem and LL go to, from address 0 on, and how often each of its words was
    written."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.memory, self.written = np.full(4096, 255, np.uint8), np.zeros(1024, int)

    def write_memory(self, address, value, size):
        assert (address % size, size) == (0, 4)
        self.memory[address : address + 4].view(np.uint32)[0] = value
        self.written[address // 4] += 1


@pytest.fixture
def multicast(monkeypatch):
    return Multicast(monkeypatch)


SIZES = [0, 1, 3, 4, 5, 15, 16, 17, 20, 31, 64, 100, 255, 256, 1023, 2000]


@pytest.mark.each_value
@pytest.mark.parametrize("threads", [1, 3, 32])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", SIZES)
def test_copies_write_each_word_once(multicast, size, width, threads):
    memory, written = multicast.memory, multicast.written
    x = np.random.default_rng(size).integers(0, 256, 4096, np.uint8)
    for thread in range(threads):
        multimem._copy_words(width)(x, np.uint64(64), size, thread, threads)
    padded = -(-size // 4) * 4
    assert (memory[64 : 64 + size] == x[:size]).all() and not memory[64 + size : 64 + padded].any()
    assert written[16 : 16 + padded // 4].tolist() == [1] * (padded // 4) and written.sum() == padded // 4


@pytest.mark.each_value
@pytest.mark.parametrize("threads", [1, 3, 32])
@pytest.mark.parametrize("size", SIZES)
def test_ll_packs_each_word_once(multicast, size, threads):
    memory, written = multicast.memory, multicast.written

    def store_line(address, low, high, flag):
        assert address % 16 == 0
        for i, word in enumerate((low, flag, high, flag)):
            multicast.write_memory(int(address) + 4 * i, int(word), 4)

    pack = ll.packing(8, store_line)
    x = np.random.default_rng(size).integers(0, 256, 4096, np.uint8)
    for thread in range(threads):
        pack(x, np.uint64(0), size, np.uint32(9), thread, threads)
    n = sk.ll_words(size)
    words = memory[: 8 * n].view(np.uint32).reshape(-1, 2)
    data = words[:, 0].tobytes()
    assert (words[:, 1] == 9).all() and data == x[:size].tobytes() + bytes(len(data) - size)
    assert written[: 2 * n].tolist() == [1] * (2 * n) and written.sum() == 2 * n
