"""Deadlocks: each is found, and its report says who waits for what, and where."""

import re

import numpy as np
import pytest
from emulated import deadlock_of, line_of
from numba import cuda, int32

import shmemkit as sk
from shmemkit import device
from shmemkit.device import (
    ld_acquire,
    rank,
    symm_at,
    wait,
)
from shmemkit.emu import DeadlockError


@cuda.jit
def wait_for_three(signals, other):
    if cuda.threadIdx.x == 0:
        wait(signals[1:], 1, "sys", "acquire", rank() + 3, "eq")
    cuda.syncthreads()


def test_deadlock_report():
    report = deadlock_of(2, lambda world: wait_for_three[(2, 2), 4](sk.full(4, 1, "uint64"), sk.zeros(3)))
    assert report.startswith("deadlock: no rank can go on\n")
    for pe in (0, 1):
        assert (
            f"rank {pe} 4 blocks ((0, 0, 0) ... (1, 1, 0)) thread 0 in wait_for_three: "
            f"waits for signals[1] on rank {pe} == {pe + 3}, now 1\n" in report
        )
        assert (
            f"rank {pe} 4 blocks ((0, 0, 0) ... (1, 1, 0)) threads 1 to 3 in wait_for_three: waits for the"
            in report
        )
    assert report.count(line_of(wait_for_three, "wait(signals")) == 2
    assert report.count(line_of(wait_for_three, "syncthreads")) == 2


def test_deadlock_of_a_wait_on_a_matrix_of_a_peer():
    @cuda.jit
    def kernel(x):
        if rank() == 0:
            wait(symm_at(x[1], 1)[1:], 1, "sys", "acquire", 4, "gt")

    report = deadlock_of(2, lambda world: kernel[1, 1](sk.full((2, 2), 3, "int64")))
    assert "rank 0 block 0 thread 0 in kernel: waits for x[1, 1] on rank 1 > 4, now 3\n" in report
    assert "rank 1 block" not in report and "rank 1: its host program has ended" not in report


@cuda.jit
def spin_forever(flag):
    while ld_acquire(flag, 2) != 1:
        pass


@cuda.jit
def lock_forever(flag):
    mutex = cuda.shared.array(2, int32)
    mutex[1] = 1
    while cuda.atomic.cas(mutex, 1, 0, 1) != 0:
        cuda.nanosleep(10)


@cuda.jit
def spin_on_two_forever(flag):
    while ld_acquire(flag, 0) != 1 or ld_acquire(flag, 2) != 1:
        cuda.nanosleep(10)


def test_deadlock_of_spin_loops():
    report = deadlock_of(3, lambda world: spin_forever[2, 40](sk.zeros(3, "int32", name="my flag")))
    assert report.count("waits for flag[2] on rank") == 3 and "to change (polled in a loop), now 0" in report
    assert line_of(spin_forever, "while") in report
    assert "blocks 0 and 1 threads 0 to 39 in spin_forever" in report
    report = deadlock_of(1, lambda world: lock_forever[1, 1](sk.zeros(3, "int32")))
    assert "rank 0 block 0 thread 0 in lock_forever: waits for " in report
    report = deadlock_of(2, lambda world: spin_on_two_forever[1, 2](sk.zeros(3, "int32")))
    assert "in spin_on_two_forever: waits for" in report


def test_deadlock_of_a_lock_in_shared_memory_names_it():
    @cuda.jit
    def kernel():
        mutex = cuda.shared.array(2, int32)
        mutex[1] = 1
        while cuda.atomic.cas(mutex, 1, 0, 1) != 0:
            pass

    assert "waits for mutex[1] on rank 0 to change" in deadlock_of(1, lambda world: kernel[1, 1]())


@cuda.jit
def diverge(x):
    if cuda.threadIdx.x < 3:
        cuda.syncthreads()
    else:
        wait(x, 1, "gpu", "acquire", 1)


@cuda.jit
def half_a_warp(x):
    if cuda.threadIdx.x < 16:
        x[cuda.threadIdx.x] = cuda.shfl_sync(0xFFFFFFFF, 1, 0)
    else:
        cuda.syncthreads()


@cuda.jit
def different_calls(x):
    if cuda.threadIdx.x % 2:
        x[cuda.threadIdx.x] = cuda.shfl_sync(0xFFFFFFFF, 1, 0)
    else:
        cuda.syncwarp()


def refusal_of(kernel, threads):
    with pytest.raises(sk.emu.EmulatorError) as caught:
        sk.emu.run(lambda: (sk.init(), kernel[1, threads](sk.signals(threads))), 1)
    assert caught.type is sk.emu.EmulatorError
    return str(caught.value)


def test_lanes_in_different_calls_do_not_meet():
    report = refusal_of(different_calls, 4)
    assert "syncwarp with the mask 0xffffffff" in report and "thread 1 is in a shuffle, vote" in report


def test_deadlock_of_diverging_barriers():
    report = deadlock_of(1, lambda world: diverge[1, 5](sk.signals(1)))
    assert "threads 0 to 2 in diverge: waits for the other threads of its block in syncthreads" in report
    assert "threads 3 to 4 in diverge: waits for x[0] on rank 0 >= 1, now 0" in report
    report = refusal_of(half_a_warp, 32)
    assert "threads 0 to 15: waited for the other threads in a shuffle, vote or match (16 of" in report
    assert line_of(half_a_warp, "shfl_sync") in report and line_of(half_a_warp, "syncthreads") in report


def test_deadlock_of_a_grid_barrier():
    @cuda.jit
    def kernel(state):
        if cuda.blockIdx.x != 2:
            device.grid_barrier(state)
        else:
            wait(state, 1, "gpu", "acquire", 1)

    report = deadlock_of(1, lambda world: kernel[3, 2](np.zeros(2, "uint32")))
    assert (
        "blocks 0 and 1 threads 0 to 1 in kernel: waits for the other threads in a grid barrier (4 of 6"
        in report
    )
    assert "waits for state[0] on rank 0 >= 1, now 0" in report


@cuda.jit
def meet_all():
    device.barrier_all_block()


def test_deadlock_of_a_barrier_that_a_rank_does_not_come_to():
    def main(world):
        if world.rank != 1:
            meet_all[1, 4]()

    report = deadlock_of(3, main)
    assert (
        "waits for rank 1 in a barrier, sync or collective of ranks 0 to 2 (0 calls there, 1 here)" in report
    )
    assert "threads 0 to 3 in meet_all: waits for rank 1" in report  # one of which carries it out
    assert line_of(meet_all, "barrier_all_block") in report
    assert "rank 1: its host program waits for ranks 0 and 2 to call finalize(), too" in report


def test_deadlock_of_host_programs():
    def main():
        world = sk.init()
        if world.rank == 0:
            world.host_barrier()
        world.abandon()

    with pytest.raises(DeadlockError) as caught:
        sk.emu.run(main, 2)
    text = str(caught.value)
    assert (
        "rank 0: its host program waits for rank 1 to call host_barrier() (tests/emu/test_emu_deadlock.py:"
        in text
    )
    assert "rank 1: its host program has ended" in str(caught.value)


def test_missing_rank():
    def main():
        if next(ranks) == 1:
            return  # never calls init
        sk.init().host_barrier()

    ranks = iter(range(3))
    with pytest.raises(DeadlockError) as caught:
        sk.emu.run(main, 3)
    assert "rank 1: its host program has ended" in str(caught.value)
    assert "rank 2: its host program waits for rank 1 to call host_barrier() (tests/" in str(caught.value)


def test_ranks_in_different_calls():
    """The user's calls and lines are named, not what they are made of."""

    def one_calls(first, others=lambda: None):
        def main():
            world = sk.init()
            (first if world.rank == 0 else others)()

        return main

    def message(main, kind=RuntimeError):
        with pytest.raises(kind) as caught:
            sk.emu.run(main, 3)
        return str(caught.value)

    here = r"\(tests/emu/test_emu_deadlock.py:\d+\)"
    text = message(one_calls(lambda: sk.all_reduce(np.ones(3, "float32"))))
    assert re.search(rf"rank 0 calls all_reduce\(\) {here}, ranks 1 and 2 call finalize\(\)", text), text
    text = message(one_calls(lambda: sk.AllReduce(sk.current(), 64), lambda: sk.current().host_allgather(1)))
    assert re.search(
        rf"rank 0 calls AllReduce\(\) {here}, ranks 1 and 2 call host_allgather\(\) {here}", text
    ), text
    two, three = lambda: sk.signals(2), lambda: sk.zeros(3, "int32")
    asked = (
        rf"rank 0 asks for uint64 \(2,\) in signals\(\) {here}, ranks 1 and 2 ask for int32 \(3,\) in "
        rf"zeros\(\) {here}\. A symmetric array has the same"
    )
    assert re.search(asked, message(one_calls(two, three), ValueError))


def test_very_large_reports_are_cut():
    @cuda.jit
    def kernel(x):
        wait(x[cuda.grid(1) :], 1, "gpu", "acquire", 1)

    report = deadlock_of(1, lambda world: kernel[30, 20](sk.signals(600)))
    assert "rank 0: and 592 more like this" in report and len(report.splitlines()) < 30


@pytest.mark.parametrize("kept", [True, False])
def test_who_has_not_made_a_collective_call(kept):
    """The first call, and the second."""

    def main(world):
        reduce, x = sk.AllReduce(world, 64), np.ones(3, "float32")
        for _ in range(1 + kept):
            if world.rank != 1 or kept and not _:
                reduce(x)
        world.synchronize()

    report = deadlock_of(3, main)
    here = r"AllReduce of 3 float32 \(tests/emu/test_emu_deadlock.py:\d+\)"
    last = f"number 1, {here}" if kept else "none"
    assert re.search(
        rf"The last call\n    of ranks 0 and 2: number {1 + kept}, {here}\n    of rank 1: {last}", report
    )


def test_who_has_written_to_the_word():
    """By each way to write; so a signal that was given to another slot, or too few, shows."""

    @cuda.jit
    def kernel(flags, shift):
        me = rank()
        if me == 1:
            device.notify(flags[shift:], 0, 3)  # set
        elif me == 2:
            device.signal_op(flags[shift:], 2, device.SignalOp.SIGNAL_ADD, 0)  # add
        else:
            wait(flags[shift:], 1, "sys", "acquire", 9)

    def main(world):
        flags = sk.signals(2)
        kernel[1, 1](flags, 0)

    def by(pe, text):
        file, line, _ = line_of(kernel, text).split(":", 2)
        return f"by rank {pe} block 0 thread 0 (tests/emu/{file}:{line})"

    report = deadlock_of(3, main)
    assert f"written so far: 5 {by(2, '# add')}; 3 {by(1, '# set')}\n" in report, report


def test_deadlock_of_a_barrier_of_ranks_names_the_call():
    def main(world):
        if world.rank == 1:
            world.barrier()
        world.synchronize()

    report = deadlock_of(2, main)
    first = main.__code__.co_firstlineno
    assert f"test_emu_deadlock.py:{first + 2}): waits for rank 0 in a barrier" in report
