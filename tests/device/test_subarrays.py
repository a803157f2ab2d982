"""Parts of arrays without Python's rules for slices, and what a kernel computes before it waits."""

import re

import numpy as np
import ptx
import pytest
from emulated import untyped
from numba import cuda, int64, types

import shmemkit as sk
from shmemkit.device import griddepcontrol_wait, num_ranks, span, symm_at


@cuda.jit
def copy_part(out, x, first, size):
    part = span(x, first, size)
    for i in range(cuda.threadIdx.x, part.size, cuda.blockDim.x):
        out[i] = part[i]


def copied(first, size, dtype="int16"):
    with sk.init() as world:
        x, out = np.arange(10).astype(dtype), np.zeros(10, dtype)
        copy_part[1, 4, world.stream](out, x, first, size)
        world.synchronize()
        return out.tolist()


@pytest.mark.parametrize("first, size", [(0, 10), (3, 4), (10, 0), (0, 0)])
def test_it_is_a_slice(first, size):
    part = list(range(first, first + size))
    assert sk.emu.run(copied, 1, (first, size), races=True) == [part + [0] * (10 - size)]


@pytest.mark.parametrize("first, size", [(-1, 2), (8, 3), (0, -1), (11, 0)])
def test_beyond_an_end(first, size):
    with pytest.raises(
        sk.emu.EmulatorError, match=rf"span\(\): first is {first}, size {size}; both must .* at most 10"
    ):
        sk.emu.run(copied, 1, (first, size))


@cuda.jit
def of_every_other(x):
    span(x[::2], 0, 1)[0] = 1


def use_every_other():
    with sk.init() as world:
        of_every_other[1, 1, world.stream](np.zeros(4))
        world.synchronize()


def test_only_contiguous_arrays():
    with pytest.raises(sk.emu.EmulatorError, match="it must be a contiguous 1-D array"):
        untyped(sk.emu.run)(use_every_other, 1)
    with pytest.raises(Exception, match="it must be a contiguous 1-D array"):
        ptx.compile_ptx(of_every_other, (types.Array(types.float64, 1, "C"),), (9, 0))


def test_it_costs_less_than_a_slice():
    array = types.Array(types.float64, 1, "C")

    @cuda.jit
    def by_span(x, first, size):
        part = span(x, first, size)
        part[0] = part.size

    @cuda.jit
    def by_slice(x, first, size):
        part = x[first : first + size]
        part[0] = part.size

    of_span, of_slice = (
        len(re.findall(r";$", ptx.compile_ptx(kernel, (array, int64, int64), (9, 0)), re.M))
        for kernel in (by_span, by_slice)
    )
    assert of_span <= 12 and of_slice >= 2 * of_span


@cuda.jit
def needs(x, signals, n):
    griddepcontrol_wait(x, symm_at(signals, 0), n)
    x[num_ranks() + n] = signals[0]


@cuda.jit
def needs_a_float(x, signals, n):
    griddepcontrol_wait(1.5)


SIGNATURE = types.Array(types.float64, 1, "C"), types.Array(types.uint64, 1, "C"), int64


def test_what_is_needed_is_computed_before_the_wait():
    text = ptx.compile_ptx(needs, SIGNATURE, (9, 0, "a"))
    assert "@p griddepcontrol.wait" in text
    code = ptx.machine_code(text, (9, 0, "a"))
    before, after = code.split("ACQBULK")
    assert "shmemkit_world" in before
    assert "griddepcontrol" not in ptx.compile_ptx(needs, SIGNATURE, (8, 0))


def test_only_arrays_and_integers_are_needed():
    with pytest.raises(Exception, match="is of type float64; it must be an array or an integer"):
        ptx.compile_ptx(needs_a_float, SIGNATURE, (9, 0))
