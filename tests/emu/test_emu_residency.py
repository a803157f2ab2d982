"""Planted bugs: blocks that wait for blocks which cannot be on the GPU at the same time."""

import numpy as np
import pytest
from numba import cuda

import shmemkit as sk
from shmemkit.device import grid_barrier, notify, rank, wait
from shmemkit.emu import DeadlockError, EmulatorError
from shmemkit.gemm import gpu_of


@cuda.jit
def chain(flags, forward):
    """Each block waits for its neighbour: for the one before it, or, which does not work, after it."""
    me, n = cuda.blockIdx.x, cuda.gridDim.x
    other = me - 1 if forward else me + 1
    if 0 <= other < n:
        wait(flags[other:], 1, "gpu", "acquire", 1)
    notify(flags[me:], rank(), 1, "set", "gpu")


@cuda.jit
def meet(state):
    grid_barrier(state)


def run(grid, threads, forward, shared=0, **options):
    def main():
        world, flags = sk.init(), sk.signals(grid)
        chain[grid, threads, world.stream, shared](flags, forward)
        world.stream.synchronize()
        return int(world.asnumpy(flags).sum())

    return sk.emu.run(main, 1, **options)


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_blocks_start_as_others_end(races, seed):
    assert run(9, 1, True, gpu="H200,sms=1,blocks=2", races=races, seed=seed) == [9]
    assert run(9, 1, False, gpu="H200,sms=1,blocks=9", races=races, seed=seed) == [9]


@pytest.mark.parametrize("races", [False, True])
def test_a_wait_for_a_block_that_cannot_start(races):
    with pytest.raises(
        DeadlockError, match=r"blocks from 8 on, 1 of 9 have not started: 8 of the 9"
    ) as caught:
        run(9, 1, False, gpu="H200,sms=4,blocks=2", races=races)
    assert "4 SMs with 2 each, for an SM has 2 blocks" in str(caught.value)


@pytest.mark.parametrize("given, limit", [((256, 0), "2048 threads"), ((32, 100 << 10), "228 KB of shared")])
def test_threads_and_shared_memory_decide(given, limit):
    threads, shared = given
    with pytest.raises(DeadlockError, match=limit):
        run(9, threads, False, shared, gpu="H200,sms=1")


def test_a_barrier_of_a_grid_that_does_not_fit(monkeypatch):
    main = lambda: meet[5, 2](np.zeros(2, "uint32")) if sk.init() else None  # noqa: E731
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "A100,sms=1,blocks=4")
    with pytest.raises(EmulatorError, match="not all blocks of the grid run at once: 4 of the 5"):
        sk.emu.run(main, 1)
    sk.emu.run(main, 1, gpu="A100,sms=1,blocks=5")


@pytest.mark.parametrize(
    "gpu, seen",
    [
        (None, ((9, 0), 132, 227 << 10)),
        ("H200,sms=2", ((9, 0), 2, 227 << 10)),
        ("L40S", ((8, 9), 142, 99 << 10)),
    ],
)
def test_what_host_objects_see_of_it(gpu, seen):
    """Compute capability, multiprocessors and bytes of shared memory of a block."""
    backend, product = sk.emu.run(lambda: (sk.init().backend, gpu_of(sk.current())), 1, gpu=gpu)[0]
    assert (backend.compute_capability, backend.multiprocessors, product.shared_bytes) == seen
    assert (product.compute_capability, product.multiprocessors) == seen[:2]


@pytest.mark.parametrize("gpu", ["H300", "H200,sms=0", "H200,sms", "H200,name=3", 7])
def test_unknown_gpus(gpu):
    with pytest.raises(ValueError, match="it must be H200, H100"):
        sk.emu.run(lambda: None, 1, gpu=gpu)
