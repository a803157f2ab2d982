"""The World on GPUs: its stream, symmetric arrays, peer views, barriers and errors."""

import io

import numpy as np
import pytest
from gpu import on_gpus
from numba import cuda

import shmemkit as sk
from shmemkit.device import num_ranks, rank, symm_at

pytestmark = pytest.mark.ranks(3, fast=True)


@cuda.jit
def add_one(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] += 1


@cuda.jit
def write_to(x, peer, value):
    symm_at(x, peer)[cuda.threadIdx.x] = value


@cuda.jit
def who_am_i(out):
    out[0], out[1] = rank(), num_ranks()


@cuda.jit
def copy(src, dst):
    i = cuda.grid(1)
    if i < dst.size:
        dst[i] = src[i]


@cuda.jit
def write_turn(x, peer, turn, seen):
    """Read what the left neighbour wrote in the turn before; write for the right one, into the other row."""
    now, i = turn[0], cuda.threadIdx.x
    if now > 0:
        seen[now - 1, i] = x[(now - 1) % 2, i]
    symm_at(x, peer)[now % 2, i] = 1000 * now + rank()
    cuda.syncthreads()
    if i == 0:
        turn[0] = now + 1


def neighbour(world):
    return (world.rank + 1) % world.n_ranks


@pytest.mark.gpu("CuPy, and a device")
def test_world(world):
    import cupy

    assert world.backend.name == "nvshmem" and world.xp is cupy and sk.current() is world
    assert 0 <= world.rank < world.n_ranks and world.n_nodes * world.local_size == world.n_ranks
    assert cupy.cuda.runtime.getDevice() == world.backend.device
    with pytest.raises(RuntimeError, match="already"):
        sk.init()


def test_print_in_the_order_of_ranks(world):
    file = io.StringIO()
    world.print(world.rank, file=file)
    world.print("last", world.rank, ranks=world.n_ranks - 1, file=file)
    lines = [*map(str, range(world.n_ranks)), f"last {world.n_ranks - 1}"]
    assert file.getvalue().splitlines() == (lines if world.rank == 0 else [])


@pytest.mark.gpu("times")
def test_a_timer(world):
    """To add to 64 MiB takes longer than to 64 KiB; all ranks get the same figures."""
    large = world.xp.zeros(1 << 26, "uint8")
    small, timer = large[: 1 << 16], sk.Timer(world)
    us = [timer(lambda x=x: x.__iadd__(1)) for x in (small, large)]
    assert 0 < 2 * us[0] < us[1] and set(world.host_allgather(tuple(us))) == {tuple(us)}


@pytest.mark.gpu("streams of several libraries")
def test_one_stream_for_all(world):
    import cupy
    from cuda.core import Device
    from numba.cuda.cudadrv.driver import Stream

    stream = world.stream
    assert isinstance(stream, cupy.cuda.Stream) and isinstance(stream, Stream) and stream.is_non_blocking
    assert cupy.cuda.get_current_stream() == stream and stream.ptr != 0
    assert int(Device().create_stream(stream).handle) == stream.ptr
    x = cupy.zeros(1000)  # on the current stream, which is the World's
    for _ in range(10):
        add_one[8, 128, stream](x)
        x *= 2
    with cupy.cuda.Stream(non_blocking=True) as other:
        other.wait_event(stream.record())
        y = x + 1
    other.synchronize()
    np.testing.assert_array_equal(y.get(), np.full(1000, 2.0**11 - 1))
    assert cupy.cuda.get_current_stream() == stream


@pytest.mark.parametrize("dtype", "float16 bfloat16 float32 float64 int8 int32 int64 uint8 uint64".split())
def test_symmetric_arrays_and_peer_views(world, dtype):
    x = sk.full((3, 50), world.rank + 1, dtype)
    assert x.shape == (3, 50) and x.dtype.name == dtype and world.backend.address(x) % 256 == 0
    view = sk.peer_view(x, neighbour(world))
    expected = neighbour(world) + 1
    np.testing.assert_array_equal(
        world.asnumpy(view).astype("float64"), np.full((3, 50), expected, "float64")
    )
    part = sk.peer_view(x[1:, ::7], neighbour(world))
    assert part.strides == x[1:, ::7].strides and part.shape == (2, 8)
    np.testing.assert_array_equal(world.asnumpy(part).astype("float64"), np.full((2, 8), expected, "float64"))
    world.host_barrier()  # everyone has read
    part[...] = 100 + world.rank
    world.stream.synchronize()
    world.host_barrier()
    left = (world.rank - 1) % world.n_ranks
    result = world.asnumpy(x).astype("float64")
    assert (result[1:, ::7] == 100 + left).all() and (result[0] == world.rank + 1).all()
    world.host_barrier()
    sk.free(x)


def test_empty_array(world):
    x = sk.zeros(0)
    assert x.size == 0
    sk.free(x)


def test_an_ordinary_array_has_no_peer_view(world):
    if world.n_ranks == 1:
        pytest.skip("with one rank every array is its own peer view")
    with pytest.raises(ValueError, match="not in symmetric memory"):
        sk.peer_view(world.xp.zeros(4), neighbour(world))


def test_kernels_know_who_they_are(world):
    out = world.xp.zeros(2, "int64")
    who_am_i[1, 1, world.stream](out)
    assert world.asnumpy(out).tolist() == [world.rank, world.n_ranks]


def test_barrier_orders_writes_to_a_peer(world):
    x = sk.zeros(32, "int64")
    for i in range(on_gpus(20, 4)):
        write_to[1, 32, world.stream](x, neighbour(world), 1000 * i + world.rank)
        world.barrier()
        mine = x.copy()
        world.barrier()  # nobody writes before all have read
        assert (world.asnumpy(mine) == 1000 * i + (world.rank - 1) % world.n_ranks).all()
    sk.free(x)


def test_barriers_in_a_graph(world):
    x, seen = sk.zeros((2, 32), "int64"), world.xp.zeros((5, 32), "int64")
    turn = world.xp.zeros(1, "int64")
    step = sk.bind(write_turn, 1, 32, (x, neighbour(world), turn, seen))
    step()  # loaded before the capture
    world.barrier()
    world.stream.begin_capture()
    step()
    world.barrier()
    graph = world.stream.end_capture()
    turn.fill(0)
    world.barrier()
    for _ in range(6):
        graph.launch(world.stream)
    left = (world.rank - 1) % world.n_ranks
    assert world.asnumpy(seen)[:, 0].tolist() == [1000 * i + left for i in range(5)]
    sk.free(x)


def test_bfloat16_in_a_kernel(world):
    import ml_dtypes

    values = np.arange(64).astype(ml_dtypes.bfloat16)
    src, dst = sk.array(values), world.xp.zeros(64, ml_dtypes.bfloat16)
    copy[1, 64, world.stream](src, dst)
    assert (world.asnumpy(dst) == values).all()
    dst[...] = 0
    sk.bind(copy, 1, 64, (src, dst))()
    assert (world.asnumpy(dst) == values).all()
    sk.free(src)


@pytest.mark.gpu("NVSHMEM's heap")
def test_a_full_heap_says_what_to_do(world):
    before = sk.zeros(16)
    with pytest.raises(MemoryError, match=r"1099511627776 bytes.*NVSHMEM_SYMMETRIC_SIZE"):
        sk.empty(1 << 40, "uint8")
    after = sk.full(16, 3.0)  # and the World goes on
    assert (after.get() == 3).all()
    sk.free(before), sk.free(after)


@pytest.mark.gpu("its memory")
def test_memory_is_used_again(world):
    free, _ = world.xp.cuda.runtime.memGetInfo()
    size = min(world.host_allgather(int(free))) // 3 // world.n_ranks
    for _ in range(6):
        sk.free(sk.empty(size, "uint8"))


def test_different_requests_raise_on_every_rank(world):
    if world.n_ranks == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(ValueError, match="ranks disagree"):
        sk.zeros(4 + world.rank)
