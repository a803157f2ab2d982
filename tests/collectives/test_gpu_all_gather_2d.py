"""Words of LL that go by NVSHMEM, on GPUs, between logical nodes of which messages go over NVLink:
``SHMEMKIT_LOCAL_SIZE=2 mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_all_gather_2d``, and with 1 and
4, and on 1 and 2 ranks."""

import functools

import numpy as np
import pytest
from gpu import on_gpus
from numba import cuda

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

pytestmark = pytest.mark.ranks


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


@pytest.mark.parametrize("size", on_gpus([4, 1000, 4096], [4, 40]))
@pytest.mark.parametrize("form", FORMS)
def test_words_that_are_sent(world, form, size):
    kernel, threads = ring(form)
    rows = on_gpus(50, 3)
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
