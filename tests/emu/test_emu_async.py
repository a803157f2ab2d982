"""Bulk copies and tensor cores on the emulator: what may not be changed, or left, while they are under way,
and which stores of threads they do not see. (What they compute: test_gemm_sm90.py. Bugs of kernels:
planted/tma.py.)"""

import numpy as np
import pytest
from emulated import spmd, untyped
from numba import cuda, types

from shmemkit import device
from shmemkit.device import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    bulk_wait_group,
    bulk_wait_group_read,
    copy_block,
    fence_mbarrier_init,
    fence_proxy_async,
    load_vec16,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    padding,
    span,
    store_vec16,
    store_word,
    tensor_map,
    tensormap_acquire,
    warpgroup_mma,
    wgmma_wait_group,
)
from shmemkit.device.cuda.accumulators import fragment_store, packed_add, packed_store
from shmemkit.emu import EmulatorError, RaceError
from shmemkit.emu.async_proxy import SharedArray, is_used_by
from shmemkit.emu.translation import rebind
from shmemkit.emu.vector_clock import BLOCK, MBARRIER, forget_superseded

every_mode = pytest.mark.parametrize("races", [False, True], ids=["plain", "races"])
ONE = 0x3F800000  # the bits of 1.0


def run(kernel, *given, threads=1, shared=0, races=False):
    """-> what is in `out`, 64 float32, afterwards"""

    def main(world):
        out = np.zeros(64, "float32")
        kernel[1, threads, 0, shared](out, *given)
        world.synchronize()
        return out.tolist()

    return spmd(1, main, races=races)[0]


# ---- stores of threads that call no fence


def element(tile, i):
    tile[i] = 1.0


def from_the_end(tile, i):
    tile[i - 64] = 1.0


def of_a_slice(tile, i):
    tile[i:][0] = 1.0


def of_a_matrix(tile, i):
    tile.reshape(8, 8)[i // 8, i % 8] = 1.0


def a_column(tile, i):
    if i < 8:
        tile.reshape(8, 8)[:, i] = 1.0


def other_bits(tile, i):
    tile.view(np.uint32)[i] = ONE


def words(tile, i):
    if i % 2 == 0:
        store_word(tile.view(np.uint64), i // 2, ONE << 32 | ONE)


def vectors(tile, i):
    if i % 4 == 0:
        store_vec16(tile, i, (ONE, ONE, ONE, ONE))


def by_atomics(tile, i):
    cuda.atomic.exch(tile.view(np.uint32), i, ONE)


STORES = (element, from_the_end, of_a_slice, of_a_matrix, a_column, other_bits, words, vectors, by_atomics)


@every_mode
@pytest.mark.parametrize("store", STORES, ids=lambda f: f.__name__)
def test_every_store_is_noted(store, races):
    store_mine = cuda.jit(device=True)(store)

    @cuda.jit
    def kernel(out, without):
        tile = cuda.shared.array(64, types.float32)
        i = cuda.threadIdx.x
        store_mine(tile, i)
        if i != without:
            fence_proxy_async()
        cuda.syncthreads()
        if i == 0:
            bulk_store(out, tile)
            bulk_commit_group()
            bulk_wait_group(0)

    assert run(kernel, -1, threads=64, races=races) == [1] * 64
    for without in (0, 4):
        with pytest.raises(EmulatorError, match=rf"bulk_store, .*\.py:\d+: thread {without} has stored to"):
            run(kernel, without, threads=64, races=races)


@every_mode
def test_copies_to_shared_memory_are_noted(races):
    @cuda.jit
    def kernel(out, source, fence):
        tile = cuda.shared.array(0, types.float32)
        copy_block(tile, source)
        if fence:
            fence_proxy_async()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            bulk_store(out, tile)
            bulk_commit_group()
            bulk_wait_group(0)

    source = np.arange(64, dtype="float32")
    assert run(kernel, source, True, threads=5, shared=256, races=races) == source.tolist()
    with pytest.raises(EmulatorError, match="thread 0 has stored to the tile, without fence_proxy_async"):
        run(kernel, source, False, threads=5, shared=256, races=races)


def test_a_store_beside_the_tile_or_of_another_block_needs_no_fence():
    @cuda.jit
    def kernel(out):
        room = cuda.shared.array(32, types.float32)
        room[cuda.threadIdx.x] = cuda.blockIdx.x
        if cuda.threadIdx.x < 16:
            fence_proxy_async()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            bulk_store(out[cuda.blockIdx.x * 16 :][:16], room[:16])
            bulk_commit_group()
            bulk_wait_group(0)

    def main(world):
        out = np.full(32, -1, "float32")
        kernel[2, 32](out)
        world.synchronize()
        return out.tolist()

    assert spmd(1, main) == [[0] * 16 + [1] * 16]


@every_mode
def test_tensor_cores_see_no_store_without_a_fence(races):
    products = warpgroup_mma(8, "bfloat16")
    zeros, multiply, wait = products

    @cuda.jit
    def kernel(out, fence):
        memory = cuda.shared.array(0, types.uint8)
        memory = span(memory, padding(memory, 1024), 9216)
        for i in range(cuda.threadIdx.x, 9216, 128):
            memory[i] = 0
        if fence:
            fence_proxy_async()
        cuda.syncthreads()
        acc = wait(multiply(zeros(), span(memory, 0, 8192), span(memory, 8192, 1024), False))
        out[0] = acc[0] if cuda.threadIdx.x == 0 else 0

    assert run(kernel, True, threads=128, shared=10240)[0] == 0
    with pytest.raises(EmulatorError, match=r"wgmma, .*\.py:\d+: thread 0 has stored to the tile"):
        run(kernel, False, threads=128, shared=10240, races=races)


def test_tma_stores_see_no_store_without_a_fence():
    @cuda.jit
    def kernel(out, map_out):
        memory = cuda.shared.array(0, types.uint8)
        tile = span(memory, padding(memory, 1024), 256)
        tile[5] = 1
        tensormap_acquire(map_out)
        device.tma_store(map_out, 0, 0, tile)
        bulk_commit_group()
        bulk_wait_group(0)

    with pytest.raises(EmulatorError, match=r"tma_store, .*\.py:\d+: thread 0 has stored to the tile"):
        run(kernel, tensor_map(np.zeros((8, 8), "float32"), (8, 8)), shared=2048)


@pytest.mark.parametrize(("dtype", "x", "allowed"), [("float32", 4, 4), ("float32", 2, 4), ("float16", 4, 8)])
def test_boxes_begin_at_multiples_of_16_bytes(dtype, x, allowed):
    """Elsewhere an H200 stops: an illegal instruction."""

    @cuda.jit
    def kernel(out, map_out, x):
        memory = cuda.shared.array(0, types.uint8)
        tile = span(memory, padding(memory, 1024), 512)
        fence_proxy_async()
        tensormap_acquire(map_out)
        device.tma_store(map_out, x, 0, tile)
        bulk_commit_group()
        bulk_wait_group(0)

    matrix = np.zeros((8, 64), dtype)  # kept alive
    arguments = tensor_map(matrix, (8, 32 // matrix.itemsize)), x
    if x % allowed == 0:
        run(kernel, *arguments, shared=2048)
        return
    with pytest.raises(EmulatorError, match=f"tma_store.*: x is {x}; it must be a multiple of {allowed}, "):
        run(kernel, *arguments, shared=2048)


@untyped
def test_only_kernels_of_asynchronous_copies_are_slowed_down():
    kinds = []

    def look(tile):
        kinds.append(isinstance(tile, SharedArray))

    @cuda.jit(device=True)
    def send(map_out, tile):
        device.tma_store(map_out, 0, 0, tile)

    functions = (1, (send,))

    def kernel_with(uses):
        def plain(out):
            look(cuda.shared.array(4, types.float32))

        def sending(out):
            tile = cuda.shared.array(4, types.float32)
            look(tile)
            if out.size > 64:
                functions[1][0](out, tile)

        return cuda.jit(sending if uses else plain)

    run(kernel_with(False))
    run(kernel_with(True))
    assert kinds == [False, True]


def test_what_is_known_of_mbarriers_outlives_barriers_of_the_block():
    thread, mbarrier = BLOCK + 1, BLOCK + MBARRIER
    clock = {BLOCK: 5, thread: 4 << 32 | 1, mbarrier: 2}
    forget_superseded(clock, {}, {})
    assert clock == {BLOCK: 5, mbarrier: 2}


def test_functions_that_call_each_other():
    @cuda.jit(device=True)
    def even(n):
        return n == 0 or odd(n - 1)

    @cuda.jit(device=True)
    def odd(n):
        return n != 0 and even(n - 1)

    @cuda.jit
    def kernel(out):
        out[0] = even(3)

    assert not is_used_by(rebind(kernel.py_func))


# ---- what is under way


@cuda.jit
def two_stores(out, first, left):
    """The first of two stores is waited for, or all but `left`."""
    tile = cuda.shared.array(32, types.float32)
    for i in range(2):
        for j in range(16 * i, 16 * i + 16):
            tile[j] = 1.0
        fence_proxy_async()
        bulk_store(out[16 * i : 16 * i + 16], tile[16 * i : 16 * i + 16])
        bulk_commit_group()
    bulk_wait_group_read(left)
    tile[0 if first else 16] = 2.0
    bulk_wait_group(0)


@untyped  # the primitive takes a literal
@every_mode
def test_waits_for_all_but_so_many_groups(races):
    right = [1] * 32 + [0] * 32
    for first, left in ((True, 0), (False, 0), (True, 1)):
        assert run(two_stores, first, left, races=races) == right
    for first, left in ((True, 2), (False, 2), (True, 3), (False, 7)):
        with pytest.raises(EmulatorError, match="overwritten while bulk_store, asked for at .*, reads it"):
            run(two_stores, first, left, races=races)


@untyped
def test_waits_for_all_but_so_many_products():
    zeros, multiply, wait = warpgroup_mma(8, "bfloat16")

    @cuda.jit
    def kernel(out, left):
        memory = cuda.shared.array(0, types.uint8)
        memory = span(memory, padding(memory, 1024), 10240)
        acc = zeros()
        for i in range(2):
            acc = multiply(acc, span(memory, 0, 8192), span(memory, 8192 + 1024 * i, 1024), i > 0)
        wgmma_wait_group(left)
        if cuda.threadIdx.x == 0:
            memory[8192] = 0  # of the first
        wait(acc)

    for left in (0, 1):
        run(kernel, left, threads=128, shared=11264)
    for left in (2, 3, 5):
        with pytest.raises(EmulatorError, match="overwritten while a product, asked for at .*, reads it"):
            run(kernel, left, threads=128, shared=11264)


@cuda.jit
def load_and_store(out, source, wait_for_load, wait_for_store, overwrite):
    tile = cuda.shared.array(64, types.float32)
    full = cuda.shared.array(1, types.uint64)
    mbarrier_init(full, 0, 1)
    fence_mbarrier_init()
    mbarrier_arrive_expect_tx(full, 0, 256)
    bulk_load(tile, source, full, 0)
    if overwrite:
        tile[63] = 5.0
    if wait_for_load:
        mbarrier_wait(full, 0, 0)
        bulk_store(out, tile)
        bulk_commit_group()
        if wait_for_store:
            bulk_wait_group_read(0)


@every_mode
@pytest.mark.parametrize(
    ("wait_for_load", "wait_for_store", "overwrite", "error"),
    [
        (True, True, False, None),
        (True, False, False, r"a block has ended before its bulk_store, asked for at .*:\d+, has read its"),
        (False, False, False, r"a block has ended before its bulk_load, asked for at .*:\d+, has come"),
        (True, True, True, r"overwritten while bulk_load, asked for at .*:\d+, writes it"),
    ],
)
def test_what_is_under_way_is_waited_for(wait_for_load, wait_for_store, overwrite, error, races):
    source, waits = np.arange(64, dtype="float32"), (wait_for_load, wait_for_store, overwrite)
    if error is None:
        assert run(load_and_store, source, *waits, races=races) == source.tolist()
    else:
        with pytest.raises(EmulatorError, match=error):
            run(load_and_store, source, *waits, races=races)


@pytest.mark.parametrize("stored", ["packed", "fragment"])
@pytest.mark.parametrize("barrier", [True, False])
def test_what_fragments_store_is_checked(stored, barrier):
    """A warp reads what another one has stored, behind a barrier or without one."""
    store = packed_store("bfloat16") if stored == "packed" else fragment_store("bfloat16", 64)
    add = packed_add("bfloat16")

    @cuda.jit
    def kernel(out):
        piece = cuda.shared.array(3072, types.uint8)
        piece = span(piece, padding(piece, 1024), 1024)
        one = np.float32(1)
        ones = one, one, one, one, one, one, one, one
        if cuda.threadIdx.x < 32:
            store(piece, 0, ones)
        if barrier:
            cuda.syncthreads()
        if cuda.threadIdx.x >= 32:
            if stored == "packed":
                out[cuda.threadIdx.x - 32] = add(piece, 0, ones)[0]
            else:
                out[cuda.threadIdx.x - 32] = load_vec16(piece, 0)[0]

    def main(world):
        kernel[1, 64](np.zeros(32, "float32"))
        world.synchronize()

    if barrier:
        spmd(1, main, races=True)
    else:
        with pytest.raises(RaceError, match="1 data race\nrace on piece"):
            spmd(1, main, races=True)
