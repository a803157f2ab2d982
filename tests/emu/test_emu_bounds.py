"""Accesses out of bounds are reported with the array, the index, the rank and the line."""

import re

import pytest
from emulated import spmd, untyped
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    ld_acquire,
    load_vec16,
    notify,
    num_ranks,
    p,
    put,
    rank,
    st_release,
    symm_at,
    wait,
)
from shmemkit.emu import EmulatorError, OutOfBoundsError


@cuda.jit
def index_1d(x, m, s):
    i = cuda.grid(1)
    if rank() == 1:
        x[i] = 1


@cuda.jit
def index_read(x, m, s):
    value = 0.0
    i = cuda.grid(1)
    if rank() == 1:
        value += x[i] * x[i + 1]


@cuda.jit
def index_2d(x, m, s):
    i = cuda.grid(1)
    if rank() == 1:
        m[1, i] = x[0]


@cuda.jit
def index_row(x, m, s):
    if rank() == 1:
        m[2][0] += 1


@cuda.jit
def index_mixed(x, m, s):
    if rank() == 1:
        m[7, 0:2] = 1


@cuda.jit
def index_peer(x, m, s):
    if rank() == 1:
        x[0] = symm_at(x, 0)[9]


@cuda.jit
def index_slice(x, m, s):
    if rank() == 1:
        wait(s[5:], 1, "sys", "acquire", 1)


@cuda.jit
def index_notify(x, m, s):
    if rank() == 1:
        notify(s[2 + rank() :], 0, 1)


@cuda.jit
def index_wait(x, m, s):
    if rank() == 1:
        wait(s, 4, "sys", "acquire", 0)


@cuda.jit
def index_ld(x, m, s):
    if rank() == 1:
        x[0] = ld_acquire(s, -1)


@cuda.jit
def index_st(x, m, s):
    if rank() == 1:
        st_release(symm_at(s, 0), rank() + 2, 1, "sys")


@cuda.jit
def index_atomic(x, m, s):
    if rank() == 1:
        cuda.atomic.add(m, (1, 4), 1)


@cuda.jit
def index_vec(x, m, s):
    if rank() == 1:
        x[0] = load_vec16(x, 4)[0]


@cuda.jit
def index_put(x, m, s):
    if rank() == 1:
        put(x, m[3], 0)


@cuda.jit
def index_p(x, m, s):
    if rank() == 1:
        p(x[4:], 1.0, 0)


OUT_OF_BOUNDS = {
    index_1d: "x[4] is out of bounds: x is float32 (4,) on rank 1",
    index_read: "x[4] is out of bounds: x is float32 (4,) on rank 1",
    index_2d: "m[1, 3] is out of bounds: m is float32 (2, 3) on rank 1",
    index_row: "m[2] is out of bounds: m is float32 (2, 3) on rank 1",
    index_mixed: "m[7, 0] is out of bounds: m is float32 (2, 3) on rank 1",
    index_peer: "symm_at(x, 0)[9] is out of bounds: symm_at(x, 0) is float32 (4,) on rank 0",
    index_slice: "s[5] is out of bounds: s is uint64 (3,) on rank 1",
    index_notify: "s[3] is out of bounds: s is uint64 (3,) on rank 1",
    index_wait: "s[3] is out of bounds: s is uint64 (3,) on rank 1. "
    "The second argument of wait() is how many signals; the fifth is the value",
    index_ld: "s[-1] is out of bounds: s is uint64 (3,) on rank 1",
    index_st: "symm_at(s, 0)[3] is out of bounds: symm_at(s, 0) is uint64 (3,) on rank 0",
    index_atomic: "m[1, 4] is out of bounds: m is float32 (2, 3) on rank 1",
    index_vec: "x[4] is out of bounds: x is float32 (4,) on rank 1",
    index_put: "m[3] is out of bounds: m is float32 (2, 3) on rank 1",
    index_p: "x[4] is out of bounds: x is float32 (4,) on rank 1",
}


@pytest.mark.parametrize("kernel", OUT_OF_BOUNDS, ids=lambda kernel: kernel.py_func.__name__)
def test_out_of_bounds(kernel):
    def main(world):
        kernel[2, 3](sk.zeros(4), sk.zeros((2, 3)), sk.signals(3))

    with pytest.raises(OutOfBoundsError) as caught:
        spmd(2, main)
    assert isinstance(caught.value, IndexError)
    first, second = str(caught.value).splitlines()
    assert first == OUT_OF_BOUNDS[kernel]
    assert re.match(
        rf"  rank 1 block \d thread \d at .*bounds.py:\d+: .* in kernel {kernel.py_func.__name__}$",
        second,
    )


def test_a_rank_that_does_not_exist():
    @cuda.jit
    def kernel(x):
        symm_at(x, num_ranks())[0] = 1

    with pytest.raises(EmulatorError, match="rank is 2; it must be 0 to 1"):
        spmd(2, lambda world: kernel[1, 1](sk.zeros(4)))


@untyped
@pytest.mark.parametrize("access", ["ld_acquire(m, 0)", "st_release(m, 0, 1)", "notify(m, 0, 1)"])
def test_matrices_where_a_row_is_needed(access):
    scope = {"ld_acquire": ld_acquire, "st_release": st_release, "notify": notify}
    exec(f"def kernel(m):\n    {access}", scope)
    with pytest.raises(EmulatorError, match="must be a 1-D array of .*. Pass a row or a slice of it"):
        spmd(1, lambda world: cuda.jit(scope["kernel"])[1, 1](sk.zeros((2, 3), "uint64")))
