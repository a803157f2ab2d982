"""All-gathers by copy engines on GPUs, beside a kernel that consumes the segments. On 1, 2 and 4 ranks:
``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_all_gather_copy``."""

import numpy as np
import pytest
from gpu import on_gpus
from numba import cuda
from small_kernels import spin

import shmemkit as sk
from shmemkit.collectives.all_gather.copy_engine import CopyPull, CopyPush
from shmemkit.device import num_ranks, rank, wait_block

pytestmark = pytest.mark.ranks
SIZE, CALLS, REPLAYS = on_gpus((50_000, 2000, 20), (40, 10, 4))
BLOCKS, THREADS = on_gpus((8, 256), (2, 8))
METHODS = {"copy_push": CopyPush, "copy_pull": CopyPull}
methods = pytest.mark.parametrize("method", METHODS)
outputs = pytest.mark.parametrize("symmetric", [False, True], ids=["private", "symmetric"])


@cuda.jit
def consume(out, arrived, call, wrong):
    """Check the segments, each as it comes; blocks share them."""
    size, k = out.size // num_ranks(), rank()
    for _ in range(num_ranks()):
        wait_block(arrived[k:], 1, "sys", "acquire", 1)
        i = cuda.grid(1)
        while i < size:
            if out[k * size + i] != call[0] + k * 10_000_000 + i:
                cuda.atomic.add(wrong, 0, 1)
            i += cuda.gridsize(1)
        k += 1
        if k == num_ranks():
            k = 0


@cuda.jit
def give(x, call):
    """Each rank's x of each call: other numbers everywhere."""
    i = cuda.grid(1)
    while i < x.size:
        x[i] = call[0] + rank() * 10_000_000 + i
        i += cuda.gridsize(1)


@cuda.jit
def count(call):
    call[0] += 1


def room_for(world, n, dtype, symmetric):
    return world.zeros(n, dtype) if symmetric else world.xp.zeros(n, dtype)


@methods
@outputs
def test_overlaps_of_ranks_that_are_apart(world, method, symmetric):
    n, size, delay = world.n_ranks, SIZE, np.random.default_rng(world.rank)
    engine = METHODS[method](world, n * size * 4)
    out, x = room_for(world, n * size, "int32", symmetric), world.xp.zeros(size, "int32")
    call, wrong = world.xp.zeros(1, "int64"), world.xp.zeros(1, "int64")
    world.synchronize()
    transfer, whole = engine.overlap(x, out), engine.bind(x, out, False)
    late, making = (sk.bind(spin, 1, 1, (0,)), sk.bind(give, BLOCKS, THREADS, (x, call)))
    consuming = sk.bind(consume, BLOCKS, THREADS, (out, engine.arrived, call, wrong))
    counting = sk.bind(count, 1, 1, (call,))
    for number in range(CALLS):
        if delay.random() < 0.05:
            late.set(0, int(delay.integers(1000, on_gpus(300_000, 20_000))))
            late()
        making()
        if number % 7 == 3:  # a whole one between them
            whole()
        else:
            transfer.start()
            if number % 5 == 0:
                transfer.wait()
            consuming()
            transfer.finish(awaited=number % 2 == 0)
        counting()
    assert int(world.asnumpy(wrong)[0]) == 0 and int(world.asnumpy(call)[0]) == CALLS
    assert world.asnumpy(engine.arrived).tolist() == [k == world.rank or transfer.pushes for k in range(n)]
    engine.free()
    if symmetric:
        world.free(out)


@methods
@outputs
def test_graphs_of_overlaps_and_whole_calls(world, method, symmetric):
    n, size = world.n_ranks, SIZE
    engine = METHODS[method](world, n * size * 4)
    out, x = room_for(world, n * size, "int32", symmetric), world.xp.zeros(size, "int32")
    call, wrong = world.xp.zeros(1, "int64"), world.xp.zeros(1, "int64")
    world.synchronize()
    transfer, whole = engine.overlap(x, out), engine.bind(x, out, False)
    making = sk.bind(give, BLOCKS, THREADS, (x, call))
    consuming = sk.bind(consume, BLOCKS, THREADS, (out, engine.arrived, call, wrong))
    checking = sk.bind(consume, BLOCKS, THREADS, (out, world.xp.ones(n, "uint64"), call, wrong))
    counting = sk.bind(count, 1, 1, (call,))
    world.synchronize()
    world.stream.begin_capture()
    for _ in range(3):
        making()
        transfer.start()
        consuming()
        transfer.finish()
        counting()
        making()
        whole()
        checking()
        counting()
    graph = world.stream.end_capture()
    for repeat in range(REPLAYS):
        if repeat % 4 == 3:
            making()
            whole()
            checking()
            counting()
        graph.launch(world.stream)
    assert int(world.asnumpy(wrong)[0]) == 0 and int(world.asnumpy(call)[0]) == 6 * REPLAYS + REPLAYS // 4
    engine.free()
    if symmetric:
        world.free(out)
