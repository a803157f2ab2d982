"""Clusters on the emulator and as PTX: blocks that load parts of a tile for each other, and hand its place
back to each other; and what goes wrong when one of their waits is taken away."""

import sys

import ml_dtypes
import numpy as np
import pytest
from mutations import argument, callee, condition, goes_wrong, omit, seeds
from numba import cuda, types
from ptx import compile_ptx, resources

import shmemkit as sk
from shmemkit.device import (
    cluster_block,
    cluster_sync,
    fence_mbarrier_init,
    mbarrier_arrive_expect_tx,
    mbarrier_arrive_on,
    mbarrier_init,
    mbarrier_wait,
    padding,
    span,
    tensormap_acquire,
    tma_load_multicast,
)
from shmemkit.device.cuda.tma import tensor_map


@cuda.jit
def shared_loads(map_x, out, n_tiles):
    """Each of a cluster's blocks, of a warp, gets all tiles, of 8 rows for each block: every block brings its
    8 rows to all of them, by way of one place.

    out  uint64 (blocks, n_tiles, 128 * blocks of a cluster)
    """
    memory = cuda.shared.array(0, types.uint8, 16)  # at the same place in all blocks
    tile = span(memory, padding(memory, 1024), 2048)
    full, empty = cuda.shared.array(1, types.uint64), cuda.shared.array(1, types.uint64)
    block, t = cluster_block(), cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 0, 1)
        mbarrier_init(empty, 0, 2)
        fence_mbarrier_init()
        tensormap_acquire(map_x)
    cluster_sync()  # all barriers are there
    for i in range(n_tiles):
        if t == 0:
            mbarrier_wait(empty, 0, i & 1 ^ 1)
            mbarrier_arrive_expect_tx(full, 0, 2048)
            mine = span(tile, block * 1024, 1024)
            tma_load_multicast(mine, map_x, 0, 8 * (2 * i + block), full, 0, 3)
        mbarrier_wait(full, 0, i & 1)
        words = tile.view(types.uint64)
        for j in range(t, 256, 32):
            out[cuda.blockIdx.x, i, j] = words[j]
        cuda.syncwarp()
        if t < 2:
            mbarrier_arrive_on(empty, 0, t)  # as read
    cluster_sync()  # nobody uses mine any more


def compute(kernel, n_tiles=3, **options):
    """-> whether two clusters of two blocks get what they should: rows of their own numbers, which no swizzle
    changes"""
    rows = np.arange(16 * n_tiles)[:, None] + np.zeros(64)
    x = rows.astype(ml_dtypes.bfloat16)

    def main():
        world = sk.init()
        out = np.zeros((4, n_tiles, 256), "uint64")
        sk.bind(kernel, 4, 32, (tensor_map(x, (8, 64)), out, n_tiles), shared=3072, cluster=2)()
        world.synchronize()
        return bool((out == x.view("uint64").reshape(n_tiles, 256)).all())

    return sk.emu.run(main, 1, **options)[0]


def test_blocks_load_for_each_other():
    assert compute(shared_loads)
    assert compute(shared_loads, races=True, delivery="unordered", seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        callee("cluster_sync", "cuda.syncthreads"),
        omit("cluster_sync", 2),
        omit("mbarrier_wait", 1),
        omit("mbarrier_wait", 2),
        condition("t < 2", "t == block"),  # another's is not told
        argument("mbarrier_arrive_on", 2, "t + 1"),
        argument("tma_load_multicast", 6, "1 << block"),
        argument("tma_load_multicast", 3, "8 * (2 * i)"),
    ],
)
def test_each_step_is_needed(mutate, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    mutate(sys.modules[__name__], change)
    assert goes_wrong(lambda **how: compute(shared_loads, **how), each=[{"races": True}, *seeds(8)])


def test_as_ptx():
    signature = types.uint64[::1], types.uint64[:, :, ::1], types.int64
    ptx = compile_ptx(shared_loads, signature)
    needed = resources(ptx)
    assert needed.spills == needed.stack == 0
    names = "barrier.cluster.arrive", "multicast::cluster", "mapa.shared::cluster"
    parts = *names, "mbarrier.arrive.shared::cluster"
    places = [ptx.index(part) for part in parts]
    assert places == sorted(places) and "%cluster_ctarank" in ptx
