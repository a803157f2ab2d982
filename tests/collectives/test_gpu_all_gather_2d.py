"""All-gathers of several logical nodes on GPUs, where messages between them go over NVLink:
``SHMEMKIT_LOCAL_SIZE=2 mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_all_gather_2d``, and with 1 and
4, and on 1 and 2 ranks."""

import functools

import gpu
import numpy as np
import pytest
from numba import cuda
from small_kernels import spin
from test_gpu_all_gather import check

import shmemkit as sk
from shmemkit.device import (
    ll_pack_block,
    ll_pack_warp,
    ll_put_block,
    ll_put_warp,
    ll_recv_block,
    ll_recv_warp,
    ll_words,
    num_ranks,
    rank,
)

pytestmark = pytest.mark.gpu
methods = pytest.mark.parametrize("method", ["ll_2d", "push_2d"])


@pytest.fixture
def world():
    return gpu.world()


@methods
def test_lengths_and_alignments(world, method):
    """Parts and chunks come and go."""
    gather = sk.AllGather(world, world.n_ranks * 3_000_001, method)
    sizes = (1, 3_000_001, 0, 7, 70_000, 4096, 4097, 1_000_000, 33, 3_000_001, 32_769, 500_000)
    for call, size in enumerate(sizes):
        for unaligned in (0, 1, 8):
            check(world, gather, call, size, unaligned, in_place=bool(call % 2))
    gather.free()


@methods
def test_2000_calls_of_ranks_that_are_apart(world, method):
    """Now and then a rank is late; each output is checked, on the GPU. Two lengths, so that some parts and
    chunks have more calls than others."""
    n, size, delay = world.n_ranks, 30_000, np.random.default_rng(world.rank)
    gather = sk.AllGather(world, n * size * 4, method)
    base = world.xp.arange(size, dtype="int32")
    rows = world.xp.arange(n, dtype="int32")[:, None] * 10_000_000
    wrong = world.xp.zeros(1, "int64")
    outs = [world.xp.zeros((n, size), "int32") for _ in range(3)]
    for call in range(2000):
        if delay.random() < 0.05:
            spin[1, 1, world.stream](int(delay.integers(1000, 300_000)))
        length = size if call % 3 else 17
        out = outs[call % 3].reshape(-1)[: n * length].reshape(n, length)
        gather(base[:length] + (call + world.rank * 10_000_000), out)
        wrong += (out != base[:length] + call + rows).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    gather.free()


@methods
def test_graph_of_many_calls(world, method):
    """As the bench replays them: nothing but this kernel between two calls."""
    gather = sk.AllGather(world, world.n_ranks * 65_536, method)
    x = world.xp.zeros(65_536, "uint8")
    outs = [world.xp.zeros((world.n_ranks, x.size), "uint8") for _ in range(2)]
    world.stream.begin_capture()
    for call in range(20):
        gather(x, outs[call % 2])
    graph = world.stream.end_capture()
    for repeat in range(100):
        x.fill((7 * repeat + world.rank) % 256)
        graph.launch(world.stream)
        if repeat % 10 == 0:
            expected = (7 * repeat + np.arange(world.n_ranks)[:, None]) % 256
            for out in outs:
                assert (world.asnumpy(out) == expected).all()
    world.synchronize()
    gather.free()


FORMS = {
    "warp": (ll_pack_warp, ll_put_warp, ll_recv_warp, 32),
    "block": (ll_pack_block, ll_put_block, ll_recv_block, 160),
}


@functools.cache
def ring(form):
    """-> kernel, threads: packed here, put to the next rank, unpacked there."""
    pack, put, recv, threads = FORMS[form]

    @cuda.jit
    def kernel(x, y, mine, theirs, first):
        following, n_words = rank() + 1, ll_words(x.size)
        if following == num_ranks():
            following = 0
        for i in range(len(y)):
            pack(mine[i], x, first + i)
            cuda.syncthreads()
            put(theirs[i], mine[i], n_words, following)
            recv(y[i], theirs[i], first + i)

    return kernel, threads


@pytest.mark.parametrize("size", [4, 1000, 4096])
@pytest.mark.parametrize("form", FORMS)
def test_words_that_are_sent(world, form, size):
    kernel, threads = ring(form)
    rows = 50
    x, y = world.xp.zeros(size, "uint8"), world.xp.zeros((rows, size), "uint8")
    mine, theirs = (sk.zeros((rows, ll_words(size)), "uint64") for _ in range(2))
    step = sk.bind(kernel, grid=1, block=threads, args=(x, y, mine, theirs, 1))
    for call in range(4):
        x[:] = world.xp.asarray((np.arange(size) * (call + 1) + world.rank).astype("uint8"))
        step.set("first", 1 + call * rows)
        step()
        expected = np.arange(size) * (call + 1) + (world.rank - 1) % world.n_ranks
        assert (world.asnumpy(y) == expected.astype("uint8")).all()
        world.barrier()  # the lines are used again
    for array in (mine, theirs):
        sk.free(array)
