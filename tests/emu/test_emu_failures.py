"""A failure on one rank: what ends, what goes on, and what is said."""

import random

import numpy as np
import pytest
from emulated import line_of, spmd, untyped
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    barrier_all,
    rank,
    symm_at,
    wait,
)
from shmemkit.emu import DeadlockError, EmulatorError, OutOfBoundsError


@cuda.jit
def consume(flag, x, out):
    wait(flag, 1, "gpu", "acquire", 1)
    out[0] = x[0]


@cuda.jit
def add_one(x):
    x[0] += 1


@cuda.jit
def fails(x):
    if rank() == 1 and cuda.grid(1) == 7:
        raise ValueError("seven")
    cuda.syncthreads()
    barrier_all()


def test_an_exception_ends_everything():
    with pytest.raises(EmulatorError) as caught:
        spmd(3, lambda world: fails[2, 5](sk.zeros(1)))
    text = str(caught.value)
    assert text.startswith("ValueError: seven\n  rank 1 block 1 thread 2 at ")
    assert line_of(fails, "raise") in text and text.endswith("in kernel fails")
    assert isinstance(caught.value.__cause__, ValueError)
    assert spmd(2, lambda world: world.rank) == [0, 1]  # as good as new


@cuda.jit
def returns(x):
    return rank()


@cuda.jit
def rank_is_a_float(x):
    symm_at(x, 1.0)[0] = 1


@cuda.jit
def value_is_a_float(x):
    x[0] = 1
    wait(x, 1, "sys", "acquire", 1.0)


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (returns, "the kernel returns 0; a kernel must return nothing"),
        (rank_is_a_float, "a rank is 1.0; it must be an integer"),
        (value_is_a_float, "value is 1.0; it must be an integer"),
    ],
)
@untyped
def test_what_the_gpus_compiler_refuses(kernel, text):
    with pytest.raises(EmulatorError, match=f"TypeError: {text}\n  rank 0 block 0 thread 0"):
        spmd(2, lambda world: kernel[1, 1](sk.signals(2)))


def test_an_exception_in_a_device_function():
    @cuda.jit(device=True)
    def positive(a):
        if a <= 0:
            raise ValueError("it is not")
        return a

    @cuda.jit
    def kernel(x):
        x[0] = positive(x[0])

    with pytest.raises(EmulatorError, match=r"ValueError: it is not.*\n.*raise ValueError"):
        spmd(1, lambda world: kernel[1, 1](np.zeros(1, "int32")))


@pytest.mark.parametrize("with_block", [False, True])
def test_an_exception_in_one_host_program_ends_all(with_block):
    """While kernels of the others wait, and this one's too."""

    def main():
        if with_block:
            with sk.init() as world:
                body(world)
        else:
            body(sk.init())

    def body(world):
        wait_once[1, 3, cuda.stream()](sk.signals(1))
        if world.rank == 1:
            raise KeyError("only here")
        world.host_barrier()

    @cuda.jit
    def wait_once(x):
        wait(x, 1, "sys", "acquire", 1)

    with pytest.raises(KeyError, match="only here") as caught:
        sk.emu.run(main, 3)
    notes = getattr(caught.value, "__notes__", ["raised on rank 1 of 3"])  # Python 3.11
    assert notes == ["raised on rank 1 of 3"]
    assert sk.current() is None


def test_one_rank_can_fail_and_go_on():
    """On a single rank, as in a notebook, the exception comes out of the launch, and the World lives on."""

    @cuda.jit
    def kernel(x, fail):
        if fail:
            if cuda.threadIdx.x == 1:
                x[5] = 1
            cuda.syncthreads()
        x[0] += 1

    with sk.init("emulator") as world:
        x = sk.zeros(3)
        with pytest.raises(OutOfBoundsError):
            kernel[2, 4, world.stream](x, True)
        x[0] = 0
        kernel[1, 1, world.stream](x, False)
        never = sk.signals(1)
        with pytest.raises(DeadlockError):
            consume[1, 1, world.stream](never, x, x)
            world.stream.synchronize()
        kernel[1, 1, world.stream](x, False)
        assert world.asnumpy(x)[0] == 2


def test_exits_are_not_swallowed():
    def main(world):
        if world.rank == 1:
            raise SystemExit(3)
        world.host_barrier()

    with pytest.raises(SystemExit):
        spmd(2, main)
    assert sk.current() is None


def test_results_come_back_in_rank_order():
    assert sk.emu.run(lambda a, b: (sk.init().rank, a + b), 4, (1, 2)) == [(i, 3) for i in range(4)]


@pytest.mark.parametrize(
    "n, options, message",
    [
        (0, {}, "n_ranks is 0; it must be 1"),
        (2.0, {}, "n_ranks is 2.0; it must be an integer"),
        (4, {"local_size": 3}, "local_size is 3; it must be a divisor"),
        (2, {"local_size": 0}, "local_size is 0; it must be 1 or more"),
    ],
)
def test_wrong_runs(n, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sk.emu.run(print, n, **options)


def test_runs_do_not_nest():
    with pytest.raises(RuntimeError, match="cannot be called by a program that they run"):
        sk.emu.run(lambda: sk.emu.run(print, 2), 2)


def test_launch_without_a_world():
    def main():
        if next(ranks) == 1:
            add_one[1, 1](np.zeros(1))
        sk.init()

    ranks = iter(range(2))
    with pytest.raises(RuntimeError, match="there is no World yet. Call shmemkit.init"):
        sk.emu.run(main, 2)


@cuda.jit
def fails_in_the_standard_library(x):
    x[0] = random.choice(())


@untyped
def test_an_exception_in_the_standard_library_shows_the_kernels_line():
    with pytest.raises(EmulatorError, match=r"test_emu_failures\.py:\d+: x\[0\] = random\.choice\(\(\)\)"):
        spmd(1, lambda world: fails_in_the_standard_library[1, 1](np.zeros(1)))
