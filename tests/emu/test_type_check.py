"""Kernels that Numba refuses are refused on the emulator, with Numba's message and the line."""

import linecache
import logging
import re
import subprocess
import sys
import textwrap
import time
from collections import namedtuple

import numpy as np
import pytest
from emulated import spmd
from numba import cuda, float32, int32, int64, types, uint64
from numba.core.errors import TypingError
from numba.cuda.errors import UnsupportedBytecodeError
from ptx import compile_ptx

import shmemkit as sk
from shmemkit.compiler import type_check
from shmemkit.device import (
    ask_smem,
    atomic_add,
    atomic_compare_swap,
    atomic_fetch,
    atomic_fetch_add,
    atomic_fetch_and,
    atomic_fetch_inc,
    atomic_inc,
    atomic_or,
    atomic_set,
    atomic_swap,
    barrier_all,
    fence,
    g,
    get,
    get_multicast_array,
    notify,
    num_ranks,
    p,
    put,
    put_signal_nbi,
    quiet,
    rank,
    signal_op,
    signal_wait,
    symm_at,
    team_my_pe,
    team_n_pes,
    wait,
)

BOX = namedtuple("BOX", "n x")


@pytest.fixture
def world():
    with sk.init("emulator") as world:
        yield world


def refused(kernel, *arguments, error=Exception):
    """The text of the error that the launch raises."""
    with pytest.raises(error) as caught:
        kernel[1, 1](*arguments)
    return str(caught.value)


# ---- what Numba refuses


def on_the_host(n):
    return n + 1


@cuda.jit(device=True)
def helper(x, n):
    return x[n].real + on_the_host(n)  # HERE "helper"


@cuda.jit
def in_a_device_function(x):
    x[0] = helper(x, 1)


@cuda.jit
def calls_the_host(x):
    x[0] = on_the_host(1)  # HERE


@cuda.jit
def undefined(x):
    x[0] = 1
    x[1] = no_such_name(x)  # HERE  # noqa: F821


@cuda.jit
def appends(x):
    seen = []
    seen.append(1)  # HERE
    x[0] = seen[0]


@cuda.jit
def comprehension(x):
    x[0] = max([i for i in range(3)])  # HERE  # noqa: C419


@cuda.jit
def dictionary(x):
    seen = {}
    seen[1] = 2  # HERE
    x[0] = seen[1]


@cuda.jit
def text(x):
    x[0] = "a"  # HERE


@cuda.jit
def numpy_function(x):
    x[0] = np.fft.fft(x)[0].real  # HERE


@cuda.jit
def numpy_array(x):
    y = np.zeros(3)  # HERE
    x[0] = y[0]


@cuda.jit
def catches(x):
    try:
        x[0] = 1
    except ValueError:  # HERE
        x[0] = 2


@cuda.jit
def imports(x):
    import math  # HERE

    x[0] = math.sin(1)


@cuda.jit
def two_types(x):
    if x[0] > 2:
        y = 1.0
    else:
        y = (1, 2)
    x[0] = y  # HERE


@cuda.jit
def returns(x):
    return x[0]  # HERE


@cuda.jit
def shared_of_a_variable(x):
    tile = cuda.shared.array(x.size, float32)  # HERE
    tile[0] = 1


@cuda.jit
def tuple_by_a_variable(x):
    several = (1, 2.0, 3)
    for i in range(3):
        x[0] = several[i]  # HERE


@cuda.jit
def attribute(x):
    x[0] = x.device  # HERE


@cuda.jit
def too_few(x):
    notify(x)  # HERE


@cuda.jit
def too_many(x):
    x[0] = rank(1)  # HERE


@cuda.jit
def scope(x):
    wait(x, 1, "system", "acquire")  # HERE


@cuda.jit
def scope_in_a_variable(x):
    for where in ("gpu", "sys"):
        wait(x, 1, where, "acquire")  # HERE


@cuda.jit
def float_rank(x):
    symm_at(x, 1.0)[0] = 1  # HERE


@cuda.jit
def element_for_an_array(x):
    notify(x[0], 0, 1)  # HERE


SAYS = {
    in_a_device_function: "Untyped global name 'on_the_host'",
    calls_the_host: "Untyped global name 'on_the_host'",
    undefined: "name 'no_such_name' is not defined",
    appends: "Unknown attribute 'append'",
    comprehension: "Unknown attribute 'append'",
    dictionary: "setitem(DictType",
    text: "setitem(array(uint64, 1d, C)",
    numpy_function: "Unknown attribute 'fft'",
    numpy_array: "Function(<built-in function zeros>)",
    catches: "Exception matching is limited to <class 'Exception'>",
    imports: "unsupported opcode (IMPORT_NAME)",
    two_types: "Tuple(Literal[int](1), Literal[int](2))",
    returns: "No conversion from uint64 to none",
    shared_of_a_variable: "array(int64, class(float32))",
    tuple_by_a_variable: "getitem(Tuple(",
    attribute: "Unknown attribute 'device'",
    too_few: "missing a required argument: 'rank'",
    too_many: "too many positional arguments",
    scope: "wait(): scope is 'system'; it must be 'gpu' or 'sys'",
    scope_in_a_variable: "scope",
    float_rank: "symm_at(): rank is of type float64; it must be an integer",
    element_for_an_array: "notify(): signal is of type uint64",
}


def place(kernel):
    """ "file:line: source" that a kernel has marked"""
    code = (helper if kernel is in_a_device_function else kernel).py_func.__code__
    lines = range(code.co_firstlineno, code.co_firstlineno + 12)
    line = next(i for i in lines if "# HERE" in linecache.getline(code.co_filename, i))
    return f"test_type_check.py:{line}: {linecache.getline(code.co_filename, line).strip()}"


@pytest.mark.parametrize("kernel", SAYS, ids=lambda kernel: kernel.__name__)
def test_mistakes_are_refused_with_message_and_line(world, kernel):
    message = refused(kernel, sk.signals(4))
    assert message.startswith(f"kernel {kernel.__name__}: Numba refuses"), message
    assert SAYS[kernel] in message and place(kernel) in message, message
    assert "arguments: x: array(uint64, 1d, C)\n" in message and "SHMEMKIT_TYPING=0" in message


def test_the_reason_of_a_primitive_comes_first(world):
    _, line, reason, *_ = refused(scope, sk.signals(1)).splitlines()
    assert place(scope) in line and reason == "  wait(): scope is 'system'; it must be 'gpu' or 'sys'"


def test_the_classes_are_those_of_numba(world):
    refused(scope, sk.signals(1), error=TypingError)
    refused(imports, sk.signals(1), error=UnsupportedBytecodeError)


def test_bind_refuses_as_on_a_gpu(world):
    with pytest.raises(TypingError, match="setitem"):
        sk.bind(two_types, 1, 1, (sk.signals(4),))


def test_every_rank_is_refused():
    with pytest.raises(TypingError, match="scope is 'system'"):
        spmd(3, lambda world: scope[1, 1](sk.signals(1)))


def test_the_types_decide(world):
    @cuda.jit
    def low_bits(x, mask):
        x[0] &= mask

    low_bits[1, 1](x := sk.full(1, 7, "int32"), 3)
    assert x[0] == 3
    assert "mask: float64" in refused(low_bits, x, 3.0)
    low_bits[1, 1](x, 1)
    assert x[0] == 1


def test_a_refused_kernel_is_accepted_once_it_is_right(world):
    names = {"cuda": cuda}
    exec("@cuda.jit\ndef kernel(x):\n    x[0] = later(x)", names)
    refused(names["kernel"], sk.signals(1))
    names["later"] = cuda.jit(device=True)(lambda x: x.size)
    names["kernel"][1, 1](x := sk.signals(1))
    assert x[0] == 1


def test_the_same_code_with_another_function_is_typed_again(world):
    """As a notebook runs a cell again, after another one."""
    names = {"cuda": cuda, "helper": cuda.jit(device=True)(lambda x: x.size)}
    cell = "@cuda.jit\ndef kernel(x):\n    x[0] = helper(x)"
    exec(cell, names)
    names["kernel"][1, 1](sk.signals(1))
    names["helper"] = cuda.jit(device=True)(lambda x: x.length)
    exec(cell, names)
    assert "Unknown attribute 'length'" in refused(names["kernel"], sk.signals(1))


# ---- what is right


@cuda.jit
def language(x, box, flag):
    """Much of what Numba compiles."""
    me = rank()
    tile = cuda.shared.array((2, 4), float32)
    mine = cuda.local.array(3, dtype=np.int32)
    a, b = cuda.grid(2)
    for i, n in enumerate((1, 2, 3)):
        mine[i] = n
    if flag:
        tile[a, b] = float32(me) + np.float32(0.5)
    elif box.n is None or not (0 <= a < 2):
        return
    cuda.syncthreads()
    total = int32(0)
    while total < 3:
        total += mine[0]
        if total == 2:
            continue
    view = x[1:][::2]
    view[0] = abs(min(total, 2)) + int64(tile[0, 0] > 0) + len(box.x)
    x.reshape(2, 2)[0, 0] = cuda.atomic.add(x, 3, 1) + cuda.popc(7)
    pair = [1, 2]
    x[2] += pair[0] if me >= 0 else uint64(1)


def test_the_language(world):
    box = BOX(2, sk.zeros(3, "float64"))
    language[1, (2, 4)](x := sk.zeros(4, "int64"), box, True)
    assert list(x[1:]) == [6, 8, 8]


SUMS = np.arange(4)


def summing(n, dtype):
    add = cuda.jit(device=True)(lambda a, b: a + b)

    @cuda.jit
    def kernel(x):
        for i in range(n):
            x[0] = add(x[0], dtype(SUMS[i]))

    return kernel


def test_closures_and_constants(world):
    summing(4, types.int32)[1, 1](x := sk.zeros(1, "float32"))
    assert x[0] == 6


@cuda.jit
def messages(x, out, signals, peer):
    """Functions of NVSHMEM, whose types are known without nvshmem4py."""
    put(x, out, peer)
    get(out[:1], x, peer)
    p(x[1:], 5, peer)
    out[0] = g(x[1:], peer) + out[0]
    put_signal_nbi(x[2:], out, signals, 1, 9, peer)
    signal_op(signals, 1, 10, peer)
    fence()
    quiet()
    barrier_all()
    value = signal_wait(signals, 0, 2)
    signals[1] = value + atomic_fetch_add(signals, 1, peer) + atomic_fetch_and(signals, 1, peer)
    atomic_add(signals[2:], 3, peer)
    atomic_inc(signals[2:], peer)
    signals[3] = atomic_compare_swap(signals[2:], 4, 5, peer) ^ atomic_fetch(signals[2:], peer)
    out[1] = team_n_pes(0) + num_ranks()


def test_functions_of_nvshmem(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvshmem", None)  # its import fails, and takes no time

    def main(world):
        arrays = sk.zeros(4, "float32"), sk.zeros(2, "float32"), sk.signals(4)
        messages[1, 1](*arrays, world.rank)

    spmd(2, main)


RETURNING = (
    lambda x, s, pe: put(x, x, pe),
    lambda x, s, pe: p(x, 1, pe),
    lambda x, s, pe: g(x, pe),
    lambda x, s, pe: signal_op(s, 1, 10, pe),
    lambda x, s, pe: signal_wait(s, 0, 1),
    lambda x, s, pe: atomic_add(s, 1, pe),
    lambda x, s, pe: atomic_or(s, 1, pe),
    lambda x, s, pe: atomic_inc(s, pe),
    lambda x, s, pe: atomic_set(x, 1, pe),
    lambda x, s, pe: atomic_swap(x, 1, pe),
    lambda x, s, pe: atomic_fetch(x, pe),
    lambda x, s, pe: atomic_fetch_inc(s, pe),
    lambda x, s, pe: atomic_fetch_add(s, 1, pe),
    lambda x, s, pe: atomic_fetch_and(s, 1, pe),
    lambda x, s, pe: atomic_compare_swap(s, 1, 2, pe),
    lambda x, s, pe: team_my_pe(pe),
    lambda x, s, pe: team_n_pes(pe),
    lambda x, s, pe: ask_smem(pe),
    lambda x, s, pe: get_multicast_array(pe, x).size,
    lambda x, s, pe: barrier_all(),
)


def test_their_types_are_those_of_nvshmem4py(monkeypatch):
    pytest.importorskip("nvshmem.core.device.numba")

    def returned():
        contexts = type_check._contexts.__wrapped__()
        with type_check.contexts_instead(contexts), type_check._typed_instead_of_compiled():
            argument_types = float32[::1], uint64[::1], int64
            return [
                type_check._type(cuda.jit(device=True)(function), argument_types, None).return_type
                for function in RETURNING
            ]

    without = returned()
    monkeypatch.setattr(type_check, "checking", lambda: False)
    assert without == returned() and len(set(without)) > 4


def test_a_declared_kernel_has_the_types_of_its_declaration(world):
    """An int64 for n would make a tuple of two types of it."""

    @cuda.jit("void(int32[:], int32)")
    def kernel(x, n):
        several = (n, x[0])
        for i in range(2):
            x[i] += several[i]

    kernel[1, 1](x := sk.full(2, 1, "int32"), 3)
    assert list(x) == [4, 2]
    refused(cuda.jit(kernel.py_func), x, 3)

    @cuda.jit("int32(int32)", device=True)
    def narrow(n):
        return n

    @cuda.jit
    def calls(x, n):
        several = (narrow(n), x[0])
        for i in range(2):
            x[i] += several[i]

    calls[1, 1](x := sk.full(2, 1, "int32"), 3)
    refused(cuda.jit("void(int32[:])")(two_types.py_func), x)


def test_a_kernel_compiled_ahead_takes_other_types_too(world):
    @cuda.jit
    def kernel(x, n):
        x[0] &= n

    kernel.compile("void(int32[:], float32)")
    kernel[1, 1](sk.zeros(1, "int32"), 1)


def test_what_is_compiled_afterwards_sees_nothing_of_it():
    kernel = in_and_out()
    for each in (kernel, in_and_out()):
        type_check._accepted.clear()
        with sk.init("emulator"):
            kernel[1, 1](sk.zeros(4, "float32"), sk.signals(1))
        ptx = compile_ptx(each, (float32[::1], uint64[::1]))
        assert "ld.acquire.sys" in ptx and "st.release.sys" in ptx


def in_and_out():
    @cuda.jit
    def kernel(x, signals):
        symm_at(x, rank())[0] = 1
        notify(signals, rank(), 1)
        wait(signals, 1, "sys", "acquire")

    return kernel


def test_assertions_that_pytest_has_rewritten(world):
    @cuda.jit
    def asserts(x):
        assert x[0] == 0

    asserts[1, 1](sk.zeros(1, "int32"))


# ---- how


def test_it_can_be_turned_off(world, monkeypatch):
    monkeypatch.setenv("SHMEMKIT_TYPING", "0")
    appends[1, 1](x := sk.signals(4))
    assert x[0] == 1


def test_each_kernel_is_typed_once(monkeypatch):
    typed, type_it = [], type_check._type
    monkeypatch.setattr(type_check, "_type", lambda *a: typed.append(a[0].__name__) or type_it(*a))

    def main(world):
        for n in (1, 2):
            kernel = summing(2, types.uint16)
            for _ in range(2):
                kernel[n, n](sk.zeros(n, "float64"))
        sk.all_reduce(sk.zeros(4, "float32"))  # its kernels are shmemkit's own

    spmd(2, main)
    assert typed == ["kernel", "<lambda>"]


def test_an_error_of_the_check_itself_refuses_nothing(world, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "shmemkit")
    monkeypatch.setattr(type_check, "_type", lambda *_: 1 // 0)
    summing(1, types.uint8)[1, 1](sk.zeros(1, "float64"))
    assert re.search("kernel .*kernel is not typed", caplog.text) and "ZeroDivisionError" in caplog.text


def test_it_is_quick(world):
    """In seconds of this process: a kernel with a few primitives. (It takes 0.15.)"""
    language[1, (2, 4)](sk.zeros(4, "int64"), BOX(2, sk.zeros(3, "float64")), True)

    start = time.process_time()
    sk.bind(in_and_out(), 1, 1, (sk.zeros(1, "float32"), sk.signals(1)))
    assert time.process_time() - start < 1


@pytest.mark.slow
def test_the_first_kernel_of_a_process():
    """What it takes, with the modules of Numba that it imports. (0.25 s)"""
    program = """
        import time
        import shmemkit as sk
        from numba import cuda

        @cuda.jit
        def kernel(x):
            x[0] = 1

        with sk.init("emulator"):
            x = sk.zeros(1, "float32")
            start = time.process_time()
            kernel[1, 1](x)
            print(time.process_time() - start)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert float(run.stdout) < 1.5


def test_captured_arrays_of_the_device_may_be_written():
    """As numba-cuda takes them: those of an array module, of Numba and symmetric ones; none of the host."""

    def main():
        world = sk.init()
        arrays = [world.xp.zeros(1, "int32"), cuda.to_device(np.zeros(1, "int32")), sk.zeros(1, "int32", "x")]

        def writes(x):
            @cuda.jit(device=True)
            def one():
                x[0] += 1

            @cuda.jit
            def kernel():
                one()
                x[0] += 1

            return kernel

        for array in arrays:
            writes(array)[1, 1, world.stream]()
            world.synchronize()
            assert np.asarray(array).tolist() == [2]
        several = tuple(arrays)

        @cuda.jit
        def in_a_tuple():
            several[0][0] = 1

        for kernel in (writes(np.zeros(1, "int32")), in_a_tuple):
            with pytest.raises(
                TypingError, match="an array of the host that a kernel captures is a constant"
            ):
                kernel[1, 1, world.stream]()

    sk.emu.run(main, 1)
