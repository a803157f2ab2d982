"""Scatter and Reduce on GPUs: ``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_scatter_reduce``, 1 and 2
too."""

import gpu
import numpy as np
import pytest
from small_kernels import spin

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu
ways = pytest.mark.parametrize("kind, method", [(k, m) for k in (sk.Scatter, sk.Reduce) for m in k.methods])


@pytest.fixture
def world():
    return gpu.world()


def call_of(world, made, root):
    """-> call(x, out): x has n segments on all ranks; of a scatter only the root's counts"""
    mine = world.rank == root
    if isinstance(made, sk.Scatter):
        return lambda x, out: made(x if mine else None, out)
    return lambda x, out: made(x, out if mine else None)


@ways
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_lengths_and_alignments(world, kind, method, dtype):
    n, me, dtype = world.n_ranks, world.rank, as_dtype(dtype)
    sizes, root = [1, 0, 7, 8, 1000, 4097, 1_000_001, 33], n - 1
    made = kind(world, n * max(sizes) * dtype.itemsize, root, method=method)
    call = call_of(world, made, root)
    for number, size in enumerate(sizes):
        given = [np.random.default_rng([number, r]).integers(0, 9, n * size).astype(dtype) for r in range(n)]
        for unaligned in (0, me):
            x = world.xp.zeros(unaligned + n * size, dtype)[unaligned:]
            x[...] = world.xp.asarray(given[me])
            out = world.xp.zeros(unaligned + (size if kind is sk.Scatter else n * size), dtype)[unaligned:]
            call(x, out)
            world.synchronize()
            if kind is sk.Scatter:
                np.testing.assert_array_equal(world.asnumpy(out), given[root].reshape(n, -1)[me])
            elif me == root:
                np.testing.assert_array_equal(world.asnumpy(out), sum(given[1:], given[0]))
    made.free()


@ways
def test_calls_and_graphs_of_ranks_that_are_apart(world, kind, method):
    """Now and then a rank is late; each result is checked, on the GPU."""
    n, me, delay = world.n_ranks, world.rank, np.random.default_rng(world.rank)
    made = kind(world, n * 40_000 * 4, 0, method=method)
    call, size = call_of(world, made, 0), 40_000
    base = world.xp.arange(n * size, dtype="int32")
    wanted = base[me * size : (me + 1) * size] if kind is sk.Scatter else n * base
    outs = [world.xp.zeros(wanted.size, "int32") for _ in range(2)]
    wrong, each = world.xp.zeros(1, "int64"), 1 if kind is sk.Scatter else n
    counts = kind is sk.Scatter or me == 0
    for number in range(1000):
        if delay.random() < 0.05:
            spin[1, 1, world.stream](int(delay.integers(1000, 300_000)))
        out = outs[number % 2]
        call(base + number, out)
        if counts:
            wrong += (out != wanted + each * number).sum()
    x = base.copy()
    world.stream.begin_capture()
    for number in range(20):
        call(x, outs[number % 2])
    graph = world.stream.end_capture()
    for repeat in range(30):
        x[...] = base + 1000 * repeat
        graph.launch(world.stream)
        if counts:
            wrong += (outs[1] != wanted + each * 1000 * repeat).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    made.free()
