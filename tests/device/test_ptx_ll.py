"""LL128 and bulk copies as PTX: lines are whole, what is asynchronous is awaited."""

import contextlib
import re

import pytest
from numba import cuda
from numba.cuda import types
from ptx import AMPERE, HOPPER, compile_ptx, resources
from ptx_code import LOAD, STORE, Code, is_lean

from shmemkit import device as sk
from shmemkit.compiler.bounded_compile import arming
from shmemkit.device import BULK_WORDS

dtypes = pytest.mark.parametrize("dtype", [types.uint8, types.float32, types.complex128], ids=str)


def array(dtype):
    return types.Array(dtype, 1, "C")


# ---- LL128


def stores(lines, x, flag):
    sk.ll128_store_tile(lines, 1, sk.load_tile(x, 1), flag, 1)


def loads(lines, x, flag):
    a, b = sk.ll128_load_some(lines, (0, 3), flag)
    sk.store_tile(x, 0, a)
    sk.store_tile(x, 1, b)


def passes_on(lines, x, flag):
    (tile,) = sk.ll128_load_some(lines, (0,), flag)
    sk.ll128_store_tile(lines, 1, tile, flag, 1)


def in_rows(lines, x, flag):
    sk.ll128_store_tiles(lines, 1, 0, (sk.load_tile(x, 0),), flag)
    a, b = sk.ll128_load_tiles(lines, 1, 2, 0, flag)
    sk.store_tile(x, 0, a)
    sk.store_tile(x, 1, b)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "armed, cc",
    [(False, HOPPER), (True, HOPPER), (False, AMPERE)],
    ids=["plain", "armed", "ampere"],
)
@pytest.mark.parametrize("dtype", [types.uint8, types.uint64, types.complex128], ids=str)
@pytest.mark.parametrize(
    "kernel, n_dims, n_loads, n_stores",
    [(stores, 1, 0, 1), (loads, 1, 2, 0), (passes_on, 1, 1, 1), (in_rows, 2, 2, 1)],
    ids=["stores", "loads", "passes_on", "in_rows"],
)
def test_lines_are_stored_and_loaded_by_whole_warps(kernel, n_dims, n_loads, n_stores, dtype, armed, cc):
    """Accesses follow a barrier of the warp immediately, and one another."""
    with arming() if armed else contextlib.nullcontext():
        ptx = compile_ptx(kernel, (types.Array(types.uint64, n_dims, "C"), array(dtype), types.uint64), cc)
    assert is_lean(ptx)
    needed = resources(ptx, cc)
    assert (needed.spills, needed.stack) == (0, 0)
    code = Code(ptx)
    assert len(code.all(LOAD)) == 2 * n_loads and len(code.all(STORE)) == n_stores
    for i in (*code.all(LOAD), *code.all(STORE)):
        assert code.are_together(i), code.steps[i]
        meeting = max(k for k in code.all(r"bar\.warp\.sync") if k < i)
        assert code.are_neighbours(meeting + 1, i), code.steps[meeting : i + 1]


def test_no_whole_warp():
    """Branches that part a warp are found, before an access and around it."""
    head = ".entry k()\n{\n\t.reg .b64 %rd<3>;\n\n\tbar.warp.sync -1;\n"
    store, tail = "\tst.relaxed.sys.global.v2.b64 [%rd1], {%rd2, %rd2};\n", "\tret;\n}\n"
    assert Code(head + store + tail).are_together(1)
    for between in ("@%p1 bra $L1;\n", "$L1:\n"):
        code = Code(head + between + store + "@%p1 bra $L1;\n$L2:\n" + tail)
        assert not code.are_together(code.all(STORE)[0])
    vote = "vote.sync.any.pred %p1, %p2, %r1;\nnot.pred %p3, %p1;\n@%p3 bra $L1;\n"
    code = Code(head + vote + store + "$L1:\n" + store + tail)
    assert all(map(code.are_together, code.all(STORE)))
    assert not Code(head + "@%p1 " + store.strip() + "\n" + tail).are_together(1)


# ---- bulk copies


def bulk(dst, src):
    buffer = cuda.shared.array(BULK_WORDS, types.uint64)
    if cuda.threadIdx.x < 32:
        sk.bulk_copy_warp(dst, src, buffer)


@dtypes
def test_bulk_copies(dtype):
    ptx = compile_ptx(bulk, (array(dtype), array(dtype)))
    assert is_lean(ptx)
    needed = resources(ptx)
    assert (needed.spills, needed.stack) == (0, 0)
    code = Code(ptx)
    loads = code.all(r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes ")
    stores = code.all(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group .*cp\.async\.bulk\.commit_group;")
    inits, ends = code.all(r"mbarrier\.init"), code.all(r"mbarrier\.inval")
    assert loads and stores and len(inits) == len(ends) > 0
    for i in inits:  # the mbarriers, and what was acquired before, for the TMA
        assert not code.reaches(i, r"cp\.async\.bulk", avoiding=r"fence\.proxy\.async;")
    for i in loads:
        assert re.search(r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64", code.steps[i])
        assert not code.reaches(i, r"cp\.async\.bulk\.global", avoiding=r"mbarrier\.try_wait\.parity")
    for i in stores:
        assert not code.reaches(i, r"^ret|bar\.warp\.sync|inval", avoiding=r"cp\.async\.bulk\.wait_group 0;")
    for i in code.all(r"cp\.async\.bulk\.wait_group 0;"):
        assert not code.reaches(i, r"^ret", avoiding=r"bar\.warp\.sync")


def test_bulk_puts():
    """Each step is announced between copies, by a release."""

    def put(dst, src, signal, value, step, peer):
        buffer = cuda.shared.array(BULK_WORDS, types.uint64)
        if cuda.threadIdx.x < 32:
            sk.bulk_put_warp(dst, src, buffer, signal, value, step, peer)

    numbers = [types.int64] * 3
    ptx = compile_ptx(put, (array(types.uint8), array(types.uint8), array(types.uint64), *numbers))
    needed = resources(ptx)
    assert (needed.spills, needed.stack) == (0, 0)
    code = Code(ptx)
    announced = code.all(r"st\.release\.sys")
    assert announced and code.all(r"cp\.async\.bulk\.global")
    assert any(code.reaches(i, r"cp\.async\.bulk\.global", avoiding="never") for i in announced)


def test_bulk_copies_need_hopper():
    with pytest.raises(AssertionError, match="requires .target sm_90 or higher"):
        resources(compile_ptx(bulk, (array(types.uint8), array(types.uint8)), AMPERE), AMPERE)
