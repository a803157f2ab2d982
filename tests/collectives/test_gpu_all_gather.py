"""All-gathers on GPUs: ``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_all_gather``, 1 and 2 too."""

import gpu
import numpy as np
import pytest
from small_kernels import spin

import shmemkit as sk

pytestmark = pytest.mark.gpu
MULTIMEM = "multimem", "ll_2d_multimem"  # never run where the environment turns multicast off
methods = pytest.mark.parametrize("method", [m for m in sk.AllGather.methods if m not in MULTIMEM])


@pytest.fixture
def world():
    return gpu.world()


def values(call, size, rank):
    return np.random.default_rng([call, rank]).integers(0, 256, size, "uint8")


def made(world, max_nbytes, method):
    """An AllGather; skips the test, on all ranks, where its method cannot run."""
    try:
        return sk.AllGather(world, max_nbytes, method)
    except ValueError as refusal:
        if "cannot be used here" in str(refusal):
            pytest.skip(str(refusal))
        raise


def check(world, gather, call, size, unaligned=0, in_place=False, symmetric=None):
    """One call, into a part of `symmetric`, or into private memory."""
    n, room_size = world.n_ranks, unaligned + world.n_ranks * size + 5
    room = world.xp.empty(room_size, "uint8") if symmetric is None else symmetric[:room_size]
    room[:] = 0
    world.barrier()  # nobody writes into it before
    out = room[unaligned : unaligned + n * size].reshape(n, size)
    x = out[world.rank] if in_place else world.xp.zeros(unaligned + size, "uint8")[unaligned:]
    x[...] = world.xp.asarray(values(call, size, world.rank))
    gather(x, out)
    expected = np.stack([values(call, size, rank) for rank in range(n)])
    np.testing.assert_array_equal(world.asnumpy(out), expected)
    assert not room[:unaligned].any() and not room[unaligned + n * size :].any()


@methods
def test_lengths_and_alignments(world, method):
    gather = made(world, world.n_ranks * 300_001, method)
    output = gather.output(8 + world.n_ranks * 300_001 + 5, "uint8")
    for call, size in enumerate((1, 0, 7, 8, 4096, 4097, 100_000, 300_001, 33)):
        for unaligned in (0, 1, 8):
            for symmetric in (None, output):
                check(world, gather, call, size, unaligned, bool(call % 2), symmetric)
    gather.free()


@methods
def test_2000_calls_of_ranks_that_are_apart(world, method):
    """Now and then a rank is late; each output is checked, on the GPU."""
    n, size, delay = world.n_ranks, 3000, np.random.default_rng(world.rank)
    gather = made(world, n * size * 4, method)
    base = world.xp.arange(size, dtype="int32")
    rows = world.xp.arange(n, dtype="int32")[:, None] * 10_000_000
    wrong = world.xp.zeros(1, "int64")
    outs = [world.xp.zeros((n, size), "int32"), gather.output((n, size), "int32")]
    for call in range(2000):
        if delay.random() < 0.05:
            spin[1, 1, world.stream](int(delay.integers(1000, 300_000)))
        length = size if call % 3 else 17
        out = outs[call % 2].reshape(-1)[: n * length].reshape(n, length)
        gather(base[:length] + (call + world.rank * 10_000_000), out)
        wrong += (out != base[:length] + call + rows).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    gather.free()


@methods
def test_graphs_interleaved(world, method):
    n = world.n_ranks
    gather = made(world, n * 50_000 * 4, method)
    xs = [world.xp.zeros(size, "int32") for size in (50_000, 21)]
    outs = [world.xp.zeros((n, x.size), "int32") for x in xs]
    world.synchronize()
    graphs = []
    for x, out in zip(xs, outs, strict=True):
        world.stream.begin_capture()
        gather(x, out)
        graphs.append(world.stream.end_capture())
    for repeat in range(30):
        x, out = xs[repeat % 2], outs[repeat % 2]
        x.fill(100 * repeat + world.rank)
        if repeat % 5:
            graphs[repeat % 2].launch(world.stream)
        else:
            gather(x, out)
        assert (world.asnumpy(out) == 100 * repeat + np.arange(n)[:, None]).all()
    gather.free()


@pytest.mark.parametrize("method", MULTIMEM)
def test_multimem_is_refused_where_it_is_turned_off(world, method, monkeypatch):
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    with pytest.raises(ValueError, match="NVSHMEM_DISABLE_NVLS|is for one node"):
        sk.AllGather(world, 1 << 20, method)


@methods
def test_on_several_streams(world, method):
    n, other = world.n_ranks, world.xp.cuda.Stream(non_blocking=True)
    gather = made(world, n * 100_000, method)
    x = [world.xp.zeros(100_000, "uint8") for _ in range(4)]
    outs = [world.xp.zeros((n, 100_000), "uint8") for _ in range(4)]
    for repeat in range(20):
        for i in range(4):
            x[i].fill((40 * repeat + 10 * i + world.rank) % 251)
        world.synchronize()
        for i in range(4):
            gather(x[i], outs[i], (None, other)[i % 2])
        world.synchronize()
        for i in range(4):
            expected = (40 * repeat + 10 * i + np.arange(n)[:, None]) % 251
            assert (world.asnumpy(outs[i]) == expected).all()
    gather.free()


@methods
def test_a_graph_over_two_streams(world, method):
    """Calls of one object on two streams of one capture, some of which overlap by programmatic launch."""
    n, xp = world.n_ranks, world.xp
    stream, other = world.stream, xp.cuda.Stream(non_blocking=True)
    gather = made(world, n * 100_000, method)
    x = [xp.zeros(100_000, "uint8") for _ in range(6)]
    outs = [xp.zeros((n, 100_000), "uint8") for _ in range(6)]
    world.synchronize()
    stream.begin_capture()
    other.wait_event(stream.record())
    for i in range(6):
        gather(x[i], outs[i], (None, None, other)[i % 3])
    stream.wait_event(other.record())
    graph = stream.end_capture()
    for repeat in range(20):
        for i in range(6):
            x[i].fill((40 * repeat + 10 * i + world.rank) % 251)
        graph.launch(stream)
        world.synchronize()
        for i in range(6):
            expected = (40 * repeat + 10 * i + np.arange(n)[:, None]) % 251
            assert (world.asnumpy(outs[i]) == expected).all()
    gather.free()


def test_auto(world):
    gather = sk.AllGather(world, 8 << 20)
    output = gather.output((1 << 21) + 5, "uint8")
    for call, size in enumerate((100, 1 << 21, 3000)):
        for symmetric in (None, output):
            check(world, gather, call, size // world.n_ranks, symmetric=symmetric)
    gather.free()
