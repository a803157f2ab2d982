"""Memory of many emulator runs in one process stays flat, however they end."""

import gc

import numpy as np
import pytest
from fast import slow
from numba import cuda

import shmemkit as sk
from shmemkit.device import notify, num_ranks, rank, symm_at, wait
from shmemkit.emu import DeadlockError, EmulatorError, OutOfBoundsError, RaceError

RUNS, WARM = 60, 10
THREADS, BLOCKS = 128, 2


@cuda.jit
def fine(x, flags):
    symm_at(x, (rank() + 1) % num_ranks())[cuda.grid(1)] = 1
    cuda.syncthreads()
    if cuda.grid(1) == 0:
        notify(flags, (rank() + 1) % num_ranks(), 1)
        wait(flags, 1, "sys", "acquire", 1)


@cuda.jit
def unordered(x, flags):
    symm_at(x, 0)[0] = 1


@cuda.jit
def stuck(x, flags):
    if cuda.grid(1) == 0:
        wait(flags, 1, "sys", "acquire", 1)
    cuda.syncthreads()


@cuda.jit
def outside(x, flags):
    cuda.syncthreads()
    x[cuda.grid(1) + x.size] = 1


@cuda.jit
def failing(x, flags):
    cuda.syncthreads()
    assert rank()


@cuda.jit
def freed(x, flags):
    x[cuda.grid(1)] = 1


def resident():
    """MiB of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / (1 << 20)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        (fine, None),
        *slow((unordered, RaceError), (stuck, DeadlockError), (outside, OutOfBoundsError)),
        (failing, EmulatorError),
        *slow((freed, None)),
    ],
)
def test_runs_leave_nothing(kernel, error, races):
    """Nor do errors that somebody keeps hold the threads and the accesses of their runs."""

    def main():
        world = sk.init()
        x, flags = sk.zeros(THREADS * BLOCKS, "int32"), sk.signals(1)
        if kernel is freed:  # large ones give their pages back
            for _ in range(4):
                sk.free(sk.zeros(1 << 20, "uint8"))
        kernel[BLOCKS, THREADS](x, flags)
        world.synchronize()
        return np.array(x)

    kept = []
    for run in range(RUNS):
        if run == WARM:
            before = resident()
        try:
            sk.emu.run(main, 2, races=races, heap_size=1 << 24)
        except EmulatorError as caught:
            kept.append(caught)
    if error is not RaceError or races:
        assert len(kept) == (RUNS if error else 0) and all(isinstance(e, error) for e in kept)
    assert resident() - before < 0.15 * (RUNS - WARM)
