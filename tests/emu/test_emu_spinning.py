"""Loops that poll give the others their turn; what can never end is found, or pointed out."""

import re
import threading

import numpy as np
import pytest
from emulated import deadlock_of, spmd
from numba import cuda, int32

import shmemkit as sk
from shmemkit.device import (
    atomic_compare_swap,
    atomic_fetch,
    atomic_set,
    g,
    ld_acquire,
    notify,
    num_ranks,
    p,
    rank,
    st_release,
    symm_at,
    wait,
)
from shmemkit.emu import EmulatorError, RaceError
from shmemkit.emu.watchdog import Watchdog, of_launches


@cuda.jit
def spin_on_mine(flag):
    if rank() == 0:
        while ld_acquire(flag, 0) != 3:
            pass
    else:
        for i in range(1, 4):
            cuda.nanosleep(100)
            st_release(symm_at(flag, 0), 0, i)


@cuda.jit
def spin_on_a_peer(flag):
    if rank() == 0:
        while ld_acquire(symm_at(flag, 1), 0) != 7:
            cuda.nanosleep(10)
    else:
        cuda.nanosleep(100)
        flag[0] = 7  # an ordinary store


@cuda.jit
def spin_everywhere(flag):
    """All threads of all blocks but one spin."""
    if rank() == num_ranks() - 1 and cuda.grid(1) == 0:
        for pe in range(num_ranks()):
            st_release(symm_at(flag, pe), 0, 1)
    while ld_acquire(flag, 0) == 0:
        pass


@cuda.jit
def spin_on_several(flag):
    """No flag alone says when to stop, and the loop looks at another one each time."""
    if rank() == 0:
        i = 0
        while ld_acquire(flag, i % 3) == 0:
            i += 1
    else:
        cuda.nanosleep(100)
        st_release(symm_at(flag, 0), 2, 1)


@cuda.jit
def spin_on_many(flag):
    if rank() == 0:
        i = 0
        while ld_acquire(flag, i % flag.size) == 0:
            i += 1
    else:
        for _ in range(5):
            cuda.nanosleep(100)
        st_release(symm_at(flag, 0), 300, 1)


@cuda.jit
def spin_with_a_fetch(flag):
    if rank() == 0:
        while atomic_fetch(flag, 1) != 5:
            pass
    else:
        cuda.nanosleep(100)
        atomic_set(flag, 5, 1)


@cuda.jit
def spin_with_a_get(flag):
    if rank() == 0:
        while g(flag, 1) != 5:
            pass
    else:
        cuda.nanosleep(100)
        p(flag, 5, 1)


@cuda.jit
def spin_with_cuda_atomics(flag):
    if rank() == 0:
        while cuda.atomic.add(flag, 0, 0) != 1:
            pass
        while cuda.atomic.max(flag, 0, 0) != 2:
            pass
        while cuda.atomic.cas(flag, 0, 3, 3) != 3:
            pass
    else:
        for i in range(1, 4):
            cuda.nanosleep(100)
            cuda.atomic.add(symm_at(flag, 0), 0, 1)
            while ld_acquire(symm_at(flag, 0), 0) != i:
                pass
            cuda.nanosleep(100)


@cuda.jit
def wait_for_a_put(flag):
    """A plain put, and a plain store, end a wait too."""
    if rank() == 0:
        wait(flag, 1, "sys", "acquire", 1)
        wait(flag[1:], 1, "sys", "acquire", 1)
    else:
        cuda.nanosleep(100)
        p(flag, 1, 0)
        symm_at(flag, 0)[1] = 1


@pytest.mark.parametrize("n, threads", [(2, 1), (5, 33)])
@pytest.mark.parametrize(
    "kernel",
    [
        spin_on_mine,
        spin_on_a_peer,
        spin_everywhere,
        spin_on_several,
        spin_on_many,
        spin_with_a_fetch,
        spin_with_a_get,
        wait_for_a_put,
    ],
)
def test_spin_loops(kernel, n, threads):
    spmd(n, lambda world: kernel[2, threads](sk.zeros(400, "int32")))


def test_spinning_with_cuda_atomics():
    spmd(2, lambda world: spin_with_cuda_atomics[1, 1](sk.zeros(1, "int32")))


@pytest.mark.parametrize("how", ["cas", "exch", "shared", "symmetric"])
def test_spin_locks(how):
    """A lock that every thread takes in turn, and holds while others try."""

    @cuda.jit
    def kernel(lock, total):
        if how == "shared":
            mutex = cuda.shared.array(1, int32)
            if cuda.threadIdx.x == 0:
                mutex[0] = 0
            cuda.syncthreads()
        else:
            mutex = lock
        if how == "exch":
            while cuda.atomic.exch(mutex, 0, 1) != 0:
                pass
        elif how == "symmetric":
            while atomic_compare_swap(mutex, 0, 1, 0) != 0:
                pass
        else:
            while cuda.atomic.cas(mutex, 0, 0, 1) != 0:
                pass
        old = total[0]
        cuda.nanosleep(10)  # here the others would get in
        total[0] = old + 1
        cuda.threadfence()
        if how == "symmetric":
            atomic_set(mutex, 0, 0)
        else:
            cuda.atomic.exch(mutex, 0, 0)

    def main(world):
        lock, total = sk.zeros(1, "int32"), np.zeros(1, "int64")
        blocks = 1 if how == "shared" else 3
        kernel[blocks, 20](lock, total)
        return total[0]

    assert spmd(1, main) == [20 if how == "shared" else 60]


def test_bounded_polling_ends_by_itself():
    """A kernel that gives up after many tries does so, although nothing changes and others wait for it."""

    @cuda.jit
    def kernel(flag, out):
        if rank() == 0:
            tries = 0
            while ld_acquire(flag, 0) == 0 and tries < 30000:
                tries += 1
            for _ in range(30000):
                cuda.nanosleep(10)
            for i in range(30000):
                cuda.atomic.max(flag, 1, i % 2)
            out[0] = tries
            notify(flag[2:], 1, 1)
        else:
            wait(flag[2:], 1, "sys", "acquire", 1)

    def main(world):
        out = np.zeros(1, "int64")
        kernel[1, 1](sk.signals(3), out)
        return out[0]

    assert spmd(2, main) == [30000, 0]


@pytest.mark.slow
def test_endless_counting_is_a_deadlock():
    @cuda.jit
    def kernel(flag):
        tries = 0
        while ld_acquire(flag, 0) == 0:
            tries += 1

    report = deadlock_of(1, lambda world: kernel[1, 2](sk.signals(1)))
    assert "waits for flag[0] on rank 0 to change" in report


def test_a_loop_without_a_turn_is_pointed_out(capfd):
    """An ordinary load in a loop: nobody else runs, and no deadlock can be found. Once, it is said where."""

    @cuda.jit
    def kernel(flag):
        if rank() == 1:
            while flag[0] == 0:
                pass
        cuda.syncthreads()

    def main(world):
        flag = sk.zeros(1, "int32")
        if world.rank == 1:
            Watchdog(seconds=0.1).watch(world.backend.machine.scheduler)
            timers.append(threading.Timer(0.3, flag.fill, [1]))
            timers[0].start()
        kernel[1, 2](flag)
        return world.backend.machine.scheduler

    timers = []
    assert spmd(2, main)[0] is of_launches.watched[0], "that of all launches looks on, too"
    said = capfd.readouterr().err
    assert said.count("runs for 0.1 s without waiting for anybody") == 1
    assert re.search(
        r"rank 1 block 0 thread 0 at .*test_emu_spinning.py:\d+: (while flag\[0\] == 0:|pass)", said
    )


def test_a_spin_on_an_ordinary_load_is_an_error():
    """With races it ends at once, whatever the array looks like, and with explore, too."""

    @cuda.jit
    def kernel(flags, row):
        if rank() == 1:
            while flags[row, 1] == 0:
                cuda.nanosleep(10)
        else:
            st_release(symm_at(flags, 1)[row], 1, 1)

    @cuda.jit
    def kernel_that_does_not_sleep(flags, row):
        if rank() == 1:
            while True:
                if flags[row, 1] != 0:
                    break

    def main(kernel):
        kernel[1, 1](sk.zeros((2, 3), "int32"), 1)

    with pytest.raises(EmulatorError, match=r"(?s)rank 1 block 0 thread 0 .*spins on an ordinary load"):
        spmd(2, lambda world: main(kernel_that_does_not_sleep), races=True)
    for exhaustive in (False, True):
        found = sk.emu.explore(
            lambda: main(kernel_that_does_not_sleep) if sk.init() else None, 2, exhaustive=exhaustive
        )
        assert "spins on an ordinary load" in str(found.failure)
    with pytest.raises((EmulatorError, RaceError), match=r"ordinary load|race on flags\[1, 1\]"):
        spmd(2, lambda world: main(kernel), races=True)


def test_loops_that_make_progress_do_not_spin():
    """Loops over ordinary memory that end by themselves: nothing but what they store tells one round from
    the next."""

    @cuda.jit
    def kernel(x, table, total):
        while x[0] < 5000:
            x[0] += 1
        while table[1, 2] < 3000:
            table[1, 2] += 1
        while table[0, 0] < 1500:
            cuda.nanosleep(1)
            table[0, 0] += 1
        mine = cuda.local.array(1, int32)
        mine[0] = 0
        while mine[0] < 3000:
            mine[0] += 1
        shared = cuda.shared.array((2, 2), int32)
        shared[1, 1] = 0
        while shared[1, 1] < 3000:
            shared[1, 1] += 1
        for _ in range(3000):  # reads the same again and again
            total[0] = x[0] + table[1, 2] + mine[0] + shared[1, 1]

    def main(world):
        x, table, total = sk.zeros(1, "int32"), np.zeros((2, 3), "int32"), np.zeros(1, "int32")
        kernel[1, 1](x, table, total)
        return total[0]

    assert spmd(1, main, races=True) == [14000]


def test_reading_the_same_in_vain_is_no_spin_where_the_loop_ends():
    @cuda.jit
    def kernel(x, found):
        for _ in range(4000):
            if x[1, 0] == 0:
                continue
        left = 3000
        while x[0, 0] == 0 and left:
            left -= 1
        found[0] = left

    def main(world):
        found = np.ones(1, "int32")
        kernel[1, 1](np.zeros((2, 2), "int32"), found)
        return found[0]

    assert spmd(1, main, races=True) == [0]
