"""Gather and Barrier on GPUs: ``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_gather``, 1 and 2 too;
and with SHMEMKIT_LOCAL_SIZE=2 and 1, for barriers of several logical nodes."""

import gpu
import numpy as np
import pytest
from numba import cuda
from test_gpu_collectives import spin

import shmemkit as sk
from shmemkit.device import num_ranks, rank, symm_at
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu
methods = pytest.mark.parametrize("method", sk.Gather.methods)
CALLS = 2000


@pytest.fixture
def world():
    return gpu.world()


@methods
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_lengths_and_alignments(world, method, dtype):
    n, me, dtype = world.n_ranks, world.rank, as_dtype(dtype)
    sizes, root = [1, 0, 7, 8, 1000, 4097, 3_000_001, 33, 100_000], n - 1
    gather = sk.Gather(world, n * max(sizes) * dtype.itemsize, root, method)
    for call, size in enumerate(sizes):
        given = [np.random.default_rng([call, r]).integers(0, 9, size).astype(dtype) for r in range(n)]
        for unaligned in (0, 1):
            first = unaligned * me
            room = world.xp.zeros(first + n * size, dtype)[first:].reshape(n, size)
            x = room[root] if call % 2 else world.xp.zeros(first + size, dtype)[first:]
            x[...] = world.xp.asarray(given[me])
            out = gather(x, room if me == root else None)
            assert (out is room) == (me == root)
            world.synchronize()
            if me == root:
                np.testing.assert_array_equal(world.asnumpy(out), given)
    gather.free()


@methods
def test_2000_calls_of_ranks_that_are_apart(world, method):
    """Now and then a rank is late; each result is checked, on the GPU. Then graphs of many calls."""
    n, me, delay = world.n_ranks, world.rank, np.random.default_rng(world.rank)
    sizes = 40_000, 17
    gather = sk.Gather(world, n * sizes[0] * 4, 0, method)
    base = [world.xp.arange(size, dtype="int32") for size in sizes]
    rows = world.xp.arange(n, dtype="int32")[:, None] * 10_000_000
    outs = [[world.xp.zeros((n, size), "int32") if me == 0 else None for _ in range(2)] for size in sizes]
    wrong = world.xp.zeros(1, "int64")
    for call in range(CALLS):
        if delay.random() < 0.05:
            spin[1, 1, world.stream](int(delay.integers(1000, 300_000)))
        which = int(call % 3 == 0)
        out = outs[which][call % 2]
        gather(base[which] + (call + me * 10_000_000), out)
        if me == 0:
            wrong += (out != base[which] + call + rows).sum()
    assert int(world.asnumpy(wrong)[0]) == 0

    x = world.xp.zeros(sizes[0], "int32")
    world.stream.begin_capture()
    for call in range(20):
        gather(x, outs[0][call % 2])
    graph = world.stream.end_capture()
    for repeat in range(50):
        x.fill(1000 * repeat + me)
        graph.launch(world.stream)
        if me == 0:
            wrong += (outs[0][1] != 1000 * repeat + world.xp.arange(n, dtype="int32")[:, None]).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    gather.free()


@cuda.jit
def tell(seen, call):
    """All ranks that I am in this call."""
    if cuda.threadIdx.x < num_ranks():
        symm_at(seen, cuda.threadIdx.x)[rank()] = call[0]


@cuda.jit
def look(seen, call, wrong):
    """That all are in it; the next one begins."""
    k = cuda.threadIdx.x
    if k < num_ranks() and seen[k] != call[0]:
        cuda.atomic.add(wrong, 0, 1)
    cuda.syncthreads()
    if k == 0:
        call[0] += 1


def test_all_meet(world):
    """2000 times, ranks being late, and in graphs."""
    delay, barrier = np.random.default_rng(world.rank), sk.Barrier(world)
    seen = sk.zeros(world.n_ranks, "int64")
    call, wrong = world.xp.ones(1, "int64"), world.xp.zeros(1, "int64")
    telling = sk.bind(tell, 1, 32, (seen, call))
    looking = sk.bind(look, 1, 32, (seen, call, wrong))

    def meet():
        telling()
        barrier()
        looking()
        barrier()

    for _ in range(CALLS):
        if delay.random() < 0.05:
            spin[1, 1, world.stream](int(delay.integers(1000, 300_000)))
        meet()
    world.stream.begin_capture()
    for _ in range(20):
        meet()
    graph = world.stream.end_capture()
    for _ in range(50):
        graph.launch(world.stream)
    assert int(world.asnumpy(wrong)[0]) == 0 and int(world.asnumpy(call)[0]) == 1 + CALLS + 1000
    barrier.free()
    sk.free(seen)
