"""bind on GPUs: streams, graphs, much shared memory, co-residency; and Numba's own launches beside it."""

import threading

import numpy as np
import pytest
from gpu import on_gpus
from numba import cuda, float64

import shmemkit as sk
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    grid_barrier,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    put_signal_block,
    signal_wait_until,
)

pytestmark = pytest.mark.ranks(fast=True)
SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def scale(x, factor, out):
    i = cuda.grid(1)
    if i < x.size:
        out[i] = factor * x[i]


@cuda.jit
def accumulate(total, value):
    total[0] += value


@cuda.jit
def reverse(x):
    """One block; its dynamic shared memory holds x."""
    shared = cuda.shared.array(0, float64)
    for i in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        shared[i] = x[i]
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        x[i] = shared[x.size - 1 - i]


@cuda.jit
def send(dst, src, signals, peer, step):
    put_signal_block(dst, src, signals, step, SET, peer)
    if cuda.threadIdx.x == 0:
        signal_wait_until(signals, GE, step)


@cuda.jit
def all_blocks_meet(arrived, seen, state):
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(arrived, 0, 1)
    grid_barrier(state)
    if cuda.threadIdx.x == 0:
        seen[cuda.blockIdx.x] = arrived[0]


@cuda.jit
def grid_sync(x):
    grid = cuda.cg.this_grid()
    if cuda.grid(1) == 0:
        x[0] = 7
    grid.sync()
    x[1 + cuda.blockIdx.x] = x[0]


def test_the_same_as_numba(world):
    xp = world.xp
    x, ours, theirs = xp.arange(1000, dtype="float32"), xp.zeros(1000, "float32"), xp.zeros(1000, "float32")
    step = sk.bind(scale, 8, 128, (x, np.float32(3), ours))
    step()
    scale[8, 128, world.stream](x, np.float32(3), theirs)
    np.testing.assert_array_equal(world.asnumpy(ours), np.arange(1000, dtype="float32") * 3)
    np.testing.assert_array_equal(world.asnumpy(ours), world.asnumpy(theirs))
    step.set("factor", 5)
    step.set("x", xp.ones(1000, "float32"))
    step()
    np.testing.assert_array_equal(world.asnumpy(ours), np.full(1000, 5, "float32"))


def test_views(world):
    x = world.xp.arange(24, dtype="int64").reshape(4, 6)
    out = world.xp.zeros(4, "int64")
    sk.bind(scale, 1, 32, (x[:, 2], 10, out))()
    assert world.asnumpy(out).tolist() == [20, 80, 140, 200]


def test_argument_kinds(world):
    @cuda.jit
    def kernel(out, flag, small, half, pair, complex_):
        out[0] = small if flag else 0
        out[1] = half + pair[0] + pair[1][0]
        out[2] = complex_.imag

    out = world.xp.zeros(3)
    sk.bind(kernel, 1, 1, (out, True, np.int8(-3), np.float16(1.5), (2, (np.float32(0.25),)), 1 + 9j))()
    assert world.asnumpy(out).tolist() == [-3, 3.75, 9]


@pytest.mark.gpu("its allocator")
def test_arguments_stay_alive(world):
    out = world.xp.zeros(1 << 20, "float32")
    step = sk.bind(scale, 1 << 13, 128, (world.xp.ones(1 << 20, "float32"), 2.0, out))
    junk = [world.xp.full(1 << 20, -1, "float32") for _ in range(4)]  # would take the place of a freed array
    step()
    assert (out.get() == 2).all() and junk


@pytest.mark.gpu("streams of several libraries")
def test_any_stream(world):
    import cupy
    from cuda.core import Device

    x, out = world.xp.ones(128), world.xp.zeros(128)
    world.stream.synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True), cuda.stream(), Device().create_stream(), world.stream, 0]
    for factor, stream in enumerate(streams):
        step = sk.bind(scale, 1, 128, (x, float(factor), out))
        step(stream=stream)
        world.synchronize()
        assert (out.get() == factor).all()
        sk.bind(scale, 1, 128, (x, factor + 0.5, out), stream=stream)()
        world.synchronize()
        assert (out.get() == factor + 0.5).all()


@pytest.mark.parametrize("cluster", [None, 1])
def test_captured_in_a_graph(world, cluster):
    total = world.xp.zeros(1, "int64")
    step = sk.bind(accumulate, 1, 1, (total, 1), cluster=cluster)
    world.stream.begin_capture()
    for value in (1, 10, 100):
        step.set("value", value)
        step()
    graph = world.stream.end_capture()
    step.set("value", 5)  # the graph keeps what it captured
    assert world.asnumpy(total)[0] == 0
    for _ in range(3):
        graph.launch(world.stream)
    assert world.asnumpy(total)[0] == 333


@pytest.mark.gpu("Numba's arrays of CuPy's memory")
def test_numba_launch_of_declared_arrays_in_a_graph(world):
    total = cuda.as_cuda_array(world.xp.zeros(1, "int64"), sync=False)
    accumulate[1, 1, world.stream](total, 1)
    world.stream.synchronize()
    world.stream.begin_capture()
    accumulate[1, 1, world.stream](total, 1)
    graph = world.stream.end_capture()
    graph.launch(world.stream)
    world.stream.synchronize()
    assert total.copy_to_host()[0] == 2


@pytest.mark.gpu("its shared memory")
def test_much_shared_memory(world):
    n = 12_500  # 100 KB
    x = world.xp.arange(n, dtype="float64")
    sk.bind(reverse, 1, 256, (x,), shared=8 * n)()
    np.testing.assert_array_equal(x.get(), np.arange(n)[::-1])
    sk.bind(reverse, 1, 256, (x,), shared=8)  # does not take it away
    reverse[1, 256, world.stream, 8 * n](x)  # Numba's own launch may use it now
    np.testing.assert_array_equal(x.get(), np.arange(n))
    with pytest.raises(ValueError, match="1000000 dynamic and 0 static.*this GPU has"):
        sk.bind(reverse, 1, 256, (x,), shared=1_000_000)


@pytest.mark.gpu("how many blocks fit")
def test_co_resident(world):
    sms = cuda.get_current_device().MULTIPROCESSOR_COUNT
    xp = world.xp
    arrived, state = xp.zeros(1, "int64"), xp.zeros(2, "uint32")
    with pytest.raises(
        ValueError, match=f"{100 * sms} blocks; it must have .* waits across blocks.*Use fewer blocks"
    ):
        seen = xp.zeros(100 * sms, "int64")
        sk.bind(all_blocks_meet, 100 * sms, 1024, (arrived, seen, state), co_resident=True)
    seen = xp.zeros(sms, "int64")
    step = sk.bind(all_blocks_meet, sms, 1024, (arrived, seen, state), co_resident=True)
    for repeat in range(1, 6):
        step()
        assert (seen.get() == repeat * sms).all()


@pytest.mark.gpu("how many blocks fit")
def test_cooperative(world):
    x = world.xp.zeros(65, "int64")
    sk.bind(grid_sync, 64, 32, (x,))()  # cooperative by itself: it uses grid.sync()
    assert (x.get() == 7).all()
    with pytest.raises(ValueError, match="is cooperative"):
        sk.bind(grid_sync, 1_000_000, 32, (x,))


@pytest.mark.gpu("clusters that are not portable")
def test_clusters(world):
    if cuda.get_current_device().compute_capability < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    x, out = world.xp.ones(1024), world.xp.zeros(1024)
    for cluster in (2, 8, 16):
        out[...] = 0
        sk.bind(scale, 16, 64, (x, float(cluster), out), cluster=cluster, co_resident=True)()
        assert (out.get() == cluster).all()


@pytest.mark.parametrize("bound", [True, False])
def test_put_signal(world, bound):
    n, right = 1000, (world.rank + 1) % world.n_ranks
    dst, signals = sk.zeros(n), sk.signals(1)
    src = sk.full(n, world.rank + 1.0)
    arguments = dst, src, signals, np.int32(right), np.uint64(1)
    if bound:
        sk.bind(send, 1, 128, arguments)()
    else:
        world.stream.synchronize()
        send[1, 128, world.stream](*arguments)
    left = (world.rank - 1) % world.n_ranks
    assert (world.asnumpy(dst) == left + 1).all() and world.asnumpy(signals)[0] == 1
    world.host_barrier()
    sk.free(dst), sk.free(signals), sk.free(src)


@pytest.mark.gpu("memory of the host is another one")
def test_errors(world):
    x, out = world.xp.ones(4), world.xp.zeros(4)
    with pytest.raises(TypeError, match="argument x is .*host memory"):
        sk.bind(scale, 1, 4, (np.ones(4), 1.0, out))
    step = sk.bind(scale, 1, 4, (x, 1.0, out))
    with pytest.raises(TypeError, match="was bound as array.float64, 1d, C."):
        step.set("x", world.xp.ones(4, "float32"))
    step()
    assert (out.get() == 1).all()


@pytest.mark.gpu("the emulator has one thread")
def test_from_another_thread(world):
    import cupy

    x, out, errors = world.xp.ones(4), world.xp.zeros(4), []
    step = sk.bind(scale, 1, 4, (x, 2.0, out))
    world.stream.synchronize()

    def launch():
        try:
            cupy.cuda.Device(world.backend.device).use()
            cupy.cuda.runtime.free(0)  # CuPy makes the context current when it first uses it
            step()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=launch)
    thread.start(), thread.join()
    assert not errors and (out.get() == 2).all()


@cuda.jit
def shift(x, y):
    """y[i] = x[i + 1] + 1, of what the launch before has written; the last one is 0."""
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i + 1] + 1 if i + 1 < x.size else 0


@pytest.mark.parametrize("how", ["stream", "graph", "other stream"])
def test_launches_that_overlap_see_what_those_before_wrote(world, how):
    n, times = on_gpus((100_000, 200), (300, 6))
    x, y = world.xp.arange(n), world.xp.zeros(n, "int64")
    there, back = (sk.bind(shift, -(-n // 256), 256, args, pdl=True) for args in ((x, y), (y, x)))
    stream = world.backend.new_stream() if how == "other stream" else world.stream
    world.synchronize()
    if how == "graph":
        stream.begin_capture()
    for _ in range(times // 2):
        there(stream=stream)
        back(stream=stream)
    if how == "graph":
        stream.end_capture().launch(stream)
    stream.synchronize()
    expected = np.arange(n) + 2 * times
    expected[n - times :] = np.arange(times)[::-1]
    np.testing.assert_array_equal(world.asnumpy(x), expected)
