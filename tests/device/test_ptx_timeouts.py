"""Waits with a deadline, as PTX: in armed kernels everywhere, in all others not a trace."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from kernel_types import listed
from numba import cuda
from numba.cuda import types
from ptx import AMPERE, HOPPER, compile_ptx, instructions, link, resources

from shmemkit import device as sk
from shmemkit.collectives import queue
from shmemkit.compiler.bounded_compile import arming
from shmemkit.support import timeouts

SIGNALS = types.Array(types.uint64, 1, "C")
TYPES = (SIGNALS, types.int64, types.uint64)
TRACES = ("globaltimer", "shmemkit_deadline")
GE = sk.ComparisonType.CMP_GE


@pytest.fixture(autouse=True)
def unset():
    if timeouts.default() is not None:
        pytest.skip("SHMEMKIT_TIMEOUT is set: all kernels are armed")


def wait_one(signals, n, value):
    sk.wait(signals, 1, "sys", "acquire", value)


def wait_many(signals, n, value):
    sk.wait(signals, n, "gpu", "relaxed", value, "eq")


def wait_warp(signals, n, value):
    sk.wait_warp(signals, n, "sys", "acquire", value)


def wait_block(signals, n, value):
    sk.wait_block(signals, 1, "sys", "acquire", value)


def until(signals, n, value):
    sk.signal_wait_until(signals, GE, value)


def signal_wait(signals, n, value):
    sk.signal_wait(signals, GE, value)


def barrier(signals, n, value):
    sk.barrier_all_block(signals[: n - 1], signals[n - 1 :])


def grid(signals, n, value):
    sk.grid_barrier(signals)


def ll_recv(signals, n, value):
    sk.ll_recv_block(signals[n:], signals, value)


def ll_load(signals, n, value):
    signals[n] = sk.ll_load(signals, n, value)


def ll_pass_on(signals, n, value):
    sk.ll_recv_pack_warp(signals[n:], signals, n, value)


def ll128_recv(signals, n, value):
    (tile,) = sk.ll128_load_some(signals, (n,), value)
    sk.store_tile(signals[n:], 0, tile)


def ll128_pass_on(signals, n, value):
    (tile,) = sk.ll128_load_some(signals, (n,), value)
    sk.ll128_store_tile(signals, n, tile, value, 1)


LINES = [ll_load, ll_recv, ll_pass_on, ll128_recv, ll128_pass_on]
with_nvshmem = pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="needs nvshmem4py")
WAITS = [
    wait_one,
    wait_many,
    wait_warp,
    wait_block,
    grid,
    *LINES,
    *[pytest.param(kernel, marks=with_nvshmem) for kernel in (until, signal_wait, barrier)],
]


@cuda.jit(device=True)
def in_a_function(signals, value):
    sk.wait(signals, 1, "sys", "acquire", value)


@cuda.jit(device=True)
def deeper(signals, value):
    in_a_function(signals, value)


def calls_a_function(signals, n, value):
    deeper(signals, value)


def calls_a_function_of_a_module(signals, n, value):
    queue.consumer_wait(signals, n, value)


def traces(ptx):
    return [trace for trace in TRACES if trace in ptx]


def armed_ptx(kernel, argument_types=TYPES, cc=HOPPER):
    with arming():
        return compile_ptx(kernel, argument_types, cc)


def code(ptx):
    """The instructions, without the kernel's name and types in its parameters' names."""
    return [re.sub(r"\[\w+_param_(\d+)", r"[param_\1", line) for line in instructions(ptx)]


def plain_loop(signals, n, value):
    while sk.ld_acquire(signals, 0) < value:
        pass


def test_without_a_limit_a_wait_is_the_plain_loop():
    assert code(compile_ptx(wait_one, TYPES)) == code(compile_ptx(plain_loop, TYPES))


@pytest.mark.parametrize(
    "kernel", [*WAITS, calls_a_function, calls_a_function_of_a_module], ids=lambda k: k.__name__
)
def test_armed_beside_what_is_not(kernel):
    """The same kernel, without a limit, armed, and without again: each is what it was asked to be."""
    before = compile_ptx(kernel, TYPES)
    armed = armed_ptx(kernel)
    after = compile_ptx(kernel, TYPES)
    assert traces(before) == traces(after) == []
    assert code(before) == code(after)
    assert traces(armed) == list(TRACES)
    assert traces(armed_ptx(kernel)) == list(TRACES), "the second time"


def test_armed_first():
    @cuda.jit(device=True)
    def function(signals, value):
        sk.wait(signals, 1, "sys", "acquire", value, "gt")

    def kernel(signals, n, value):
        function(signals, value)

    assert traces(armed_ptx(kernel)) == list(TRACES)
    assert traces(compile_ptx(kernel, TYPES)) == []


@pytest.mark.parametrize(
    "kernel", [wait_one, wait_many, wait_warp, until, grid, *LINES], ids=lambda k: k.__name__
)
def test_the_clock_is_not_read_at_every_poll(kernel):
    """A poll counts down, and branches around the look until it has come to 0."""
    ptx = armed_ptx(kernel)
    assert re.search(r"add\.s64\s+(%rd\d+), \1, -1;\s+setp\.ne\.s64\s+(%p\d+), \1, 0;\s+@\2 bra", ptx), ptx


@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
def test_registers(cc):
    kernel, argument_types, _ = next(iter(listed(queue).values()))
    plain = resources(compile_ptx(kernel, argument_types, cc), cc)
    armed = resources(armed_ptx(kernel, argument_types, cc), cc)
    assert (armed.spills, armed.stack) == (0, 0)
    assert armed.registers <= plain.registers + 8


@pytest.mark.parametrize("lto", [True, False], ids=["lto", "no-lto"])
def test_linked(lto):
    def kernel(signals, n, value):
        sk.wait(signals, 1, "sys", "acquire", value)
        sk.notify(signals, 0, value)

    plain = link(kernel, TYPES, lto)
    with arming():
        armed = link(kernel, TYPES, lto)
    assert b"shmemkit_deadline" in armed and b"shmemkit_deadline" not in plain
    assert b"shmemkit_world" in armed and b"shmemkit_world" in plain


@with_nvshmem
def test_signals_are_not_sent_any_more():
    def notify(signals, n, value):
        sk.notify(signals, 1, value)

    def signal_op(signals, n, value):
        sk.signal_op(signals, value, sk.SignalOp.SIGNAL_SET, 1)

    for kernel in (notify, signal_op):
        assert re.search(r"ld\.relaxed\.gpu.*\bbra\b.*(st\.release\.sys|call\.uni)", armed_ptx(kernel), re.S)
        assert "ld.relaxed.gpu" not in compile_ptx(kernel, TYPES)


@pytest.mark.parametrize("sig_op, instruction", [("set", "st.release.sys"), ("add", "red.release.sys")])
def test_signals_by_a_table_are_not_sent_any_more(sig_op, instruction):
    """For kernels with setmaxnreg: the table of peers is not linked."""

    def kernel(signals, offsets, rank, value):
        sk.notify_at(signals, 3, offsets, rank, value, sig_op)

    arguments = SIGNALS, types.int64[::1], types.int64, types.uint64
    plain, armed = compile_ptx(kernel, arguments), armed_ptx(kernel, arguments)
    for ptx in (plain, armed):
        assert instruction in ptx and "shmemkit_world" not in ptx and "call" not in ptx
    assert re.search(rf"ld\.relaxed\.gpu.*\bbra\b.*{re.escape(instruction)}", armed, re.S)
    assert "ld.relaxed.gpu" not in plain and "shmemkit_deadline" not in plain


def test_lines_are_not_sent_any_more():
    """Before what sends lines, and after what they were received by, a look at `stopped`, and a branch."""

    def ll_pack(signals, n, value):
        sk.ll_pack_block(signals, signals[n:], value)

    def ll128_pack(signals, n, value):
        sk.ll128_store_tile(signals, n, sk.load_tile(signals, n), value, 1)

    for kernel in (ll_pack, ll128_pack, ll_pass_on, ll128_pass_on):
        ptx = armed_ptx(kernel)
        sent = [m.start() for m in re.finditer(r"st\.relaxed\.sys\.global\.v2", ptx)]
        assert sent
        for at in sent:
            look = ptx.rfind("ld.relaxed.gpu", 0, at)
            assert look > ptx.rfind("ld.relaxed.sys.global.v2", 0, at)
            assert re.search(r"@%p\d+ bra", ptx[look:at])
        assert "ld.relaxed.gpu" not in compile_ptx(kernel, TYPES)


def test_a_warp_waits_together_for_lines_of_128_bytes():
    """No thread polls a flag by itself: the others would be ahead of it."""
    for kernel in (ll128_recv, ll128_pass_on):
        ptx = armed_ptx(kernel)
        assert "ld.relaxed.sys.global.v2" in ptx and "ld.relaxed.sys.global.u64" not in ptx


@with_nvshmem
def test_words_are_not_put_any_more():
    """The warp, or the block, does it together or not at all."""

    def by_block(signals, n, value):
        sk.ll_put_block(signals, signals[n:], n, 1)

    def by_warp(signals, n, value):
        sk.ll_put_warp(signals, signals[n:], n, 1)

    for kernel, vote in ((by_block, r"bar\.red\.or\.pred"), (by_warp, r"vote\.sync\.any")):
        together = rf"ld\.relaxed\.gpu.*{vote}.*@%p\d+ bra.*call\.uni"
        assert re.search(together, armed_ptx(kernel), re.S)
        assert "ld.relaxed.gpu" not in compile_ptx(kernel, TYPES)


@pytest.mark.parametrize("value", ["2.5", ""])
def test_variable(value):
    compile_ptx(calls_a_function, TYPES)  # skips where that cannot be done
    code = """
import sys
sys.path[:0] = "tests", "tests/device"
from test_ptx_timeouts import *
print(traces(compile_ptx(calls_a_function, TYPES)))
"""
    environment = os.environ | {"SHMEMKIT_TIMEOUT": value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(list(TRACES) if value else []), done.stderr
