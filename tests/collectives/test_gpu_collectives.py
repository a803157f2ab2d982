"""AllReduce, ReduceScatter, AllToAll and Broadcast on GPUs:
``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_collectives``, 1 and 2 too."""

import gpu
import numpy as np
import pytest
from numba import cuda

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.gpu
CALLS = 2000
KINDS = {
    "reduce": sk.AllReduce,
    "scatter": sk.ReduceScatter,
    "exchange": sk.AllToAll,
    "broadcast": sk.Broadcast,
}
METHODS = [(k, m) for k, cls in KINDS.items() for m in cls.methods if "multimem" not in m]
every = pytest.mark.parametrize("kind, method", METHODS)
sums = pytest.mark.parametrize("kind, method", [(k, m) for k, m in METHODS if k in ("reduce", "scatter")])


@pytest.fixture
def world():
    return gpu.world()


@cuda.jit
def spin(clocks):
    for _ in range(clocks // 1000):
        cuda.nanosleep(1000)


def made(world, kind, max_nbytes, method):
    """Skips the test, on all ranks, where the method cannot run."""
    try:
        return KINDS[kind](world, max_nbytes, method=method)
    except ValueError as refusal:
        if "cannot be used here" in str(refusal):
            pytest.skip(str(refusal))
        raise


def expected(kind, arrays, rank):
    """What `rank` gets, of all ranks' arrays, which are as large as n_ranks parts."""
    n = len(arrays)
    parts = [a.reshape(n, -1) for a in arrays]
    if kind == "broadcast":
        return arrays[0]
    if kind == "exchange":
        return np.concatenate([p[rank] for p in parts])
    total = sum(parts[1:], parts[0])
    return total[rank] if kind == "scatter" else total.reshape(-1)


def apart(size, out_of, unaligned, world, dtype):
    """-> x and out, private, `unaligned` elements behind what is aligned"""
    x, out = (world.xp.zeros(unaligned + k, dtype) for k in (size, out_of))
    return x[unaligned:], out[unaligned:]


@every
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_lengths_and_alignments(world, kind, method, dtype):
    n, dtype = world.n_ranks, as_dtype(dtype)
    sizes = [n * k for k in (1, 0, 7, 8, 1000, 4097, 100_001, 33)]
    collective = made(world, kind, max(sizes) * dtype.itemsize, method)
    for call, size in enumerate(sizes):
        given = [np.random.default_rng([call, r]).integers(0, 9, size).astype(dtype) for r in range(n)]
        wanted = expected(kind, given, world.rank)
        for unaligned in (0, 1):
            x, out = apart(size, wanted.size, unaligned * world.rank, world, dtype)
            x[...] = world.xp.asarray(given[world.rank])
            collective(x, out)
            np.testing.assert_array_equal(world.asnumpy(out), wanted)
    collective.free()


@every
def test_2000_calls_of_ranks_that_are_apart(world, kind, method):
    """Now and then a rank is late; each output is checked, on the GPU."""
    n, delay = world.n_ranks, np.random.default_rng(world.rank)
    sizes = [n * 2048, n * 5]
    collective = made(world, kind, sizes[0] * 4, method)
    given = [[np.random.default_rng([size, r]).integers(0, 99, size) for r in range(n)] for size in sizes]
    base = [world.xp.asarray(arrays[world.rank].astype("int32")) for arrays in given]
    wanted = [world.xp.asarray(expected(kind, arrays, world.rank).astype("int32")) for arrays in given]
    each = n if kind in ("reduce", "scatter") else 1  # what comes of 1 more on all ranks
    outs = [[world.xp.zeros(w.size, "int32"), collective.output(w.size, "int32")] for w in wanted]
    wrong = world.xp.zeros(1, "int64")
    for call in range(CALLS):
        if delay.random() < 0.05:
            spin[1, 1, world.stream](int(delay.integers(1000, 300_000)))
        which = call % 3 == 0
        out = outs[which][call % 2]
        collective(base[which] + call, out)
        wrong += (out != wanted[which] + each * call).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    collective.free()


@every
def test_graphs_interleaved(world, kind, method):
    n = world.n_ranks
    collective = made(world, kind, n * 20_000 * 4, method)
    xs = [world.xp.zeros(n * size, "int32") for size in (20_000, 21)]
    outs = [world.xp.zeros(x.size // n if kind == "scatter" else x.size, "int32") for x in xs]
    world.synchronize()
    graphs = []
    for x, out in zip(xs, outs, strict=True):
        world.stream.begin_capture()
        collective(x, out)
        graphs.append(world.stream.end_capture())
    for repeat in range(30):
        x, out = xs[repeat % 2], outs[repeat % 2]
        x.fill(100 * repeat + world.rank)
        if repeat % 5:
            graphs[repeat % 2].launch(world.stream)
        else:
            collective(x, out)
        given = [np.full(x.size, 100 * repeat + r, "int32") for r in range(n)]
        np.testing.assert_array_equal(world.asnumpy(out), expected(kind, given, world.rank))
    collective.free()


def hashed(world, size, rank, call, bits):
    """Words that are all different, with all `bits`; or that have few."""
    words = world.xp.arange(size, dtype="uint64") + np.uint64(size * rank + 977 * call)
    return words * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - bits)


@pytest.mark.parametrize("bits", [64, 2])
@pytest.mark.parametrize("captured", [False, True])
def test_pieces_of_copies_come_whole(world, bits, captured):
    """From all multiples of 16 bytes, short and long: what a copy engine does is no promise of CUDA's."""
    n, most = world.n_ranks, 1 << 19
    exchange = made(world, "exchange", n * most * 8, "copy_engine")
    rooms = [world.xp.zeros(n * most + 64, "uint64") for _ in range(2)]
    wrong, graphs = world.xp.zeros(1, "int64"), []
    for call in range(100):
        size = 2 * (1 + int((most // 2 - 1) ** (call * 37 % 100 / 99)))
        x, out = (room[2 * (call % 16) :][: n * size] for room in rooms)
        x[...] = hashed(world, n * size, world.rank, call, bits)
        if captured:
            world.stream.begin_capture()
            exchange(x, out)
            graphs.append(world.stream.end_capture())
            graphs[-1].launch(world.stream)
        else:
            exchange(x, out)
        for k in range(n):
            given = hashed(world, n * size, k, call, bits).reshape(n, size)[world.rank]
            wrong += (out.reshape(n, size)[k] != given).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    exchange.free()


@sums
@pytest.mark.parametrize("dtype, error", [("float16", 2e-3), ("bfloat16", 1e-2), ("float32", 1e-6)])
def test_close_to_float64_and_the_same_bits_in_every_run(world, kind, method, dtype, error):
    n, size = world.n_ranks, world.n_ranks * 30_000
    given = [np.random.default_rng(r).standard_normal(size).astype(as_dtype(dtype)) for r in range(n)]
    collective = made(world, kind, given[0].nbytes, method)
    x = world.xp.asarray(given[world.rank])
    bits = set()
    for _ in range(50):
        found = world.asnumpy(collective(x)).reshape(-1)
        bits.add(found.tobytes())
    assert len(bits) == 1
    if kind == "reduce":
        assert len(set(world.host_allgather(bits.pop()))) == 1
    wanted = expected(kind, [a.astype("float64") for a in given], world.rank)
    difference = np.linalg.norm(found.astype("float64") - wanted)
    assert difference <= error * np.linalg.norm(wanted)
    collective.free()


@pytest.mark.parametrize("symmetric", [False, True])
def test_variable_splits(world, symmetric):
    n, me = world.n_ranks, world.rank
    rng, delay = np.random.default_rng(0), np.random.default_rng(me)
    rows = 16 * n
    exchange = sk.AllToAllV(world, rows * 8 * 8)
    x = world.xp.zeros((rows, 8), "int64")
    out = exchange.output(x.shape, "int64") if symmetric else world.xp.zeros(x.shape, "int64")
    came, wrong = world.xp.zeros(n, "int64"), world.xp.zeros(1, "int64")
    for call in range(CALLS // 4):
        splits = rng.integers(0, 17, (n, n)) * rng.integers(0, 2, (n, n))  # of all ranks
        x[...] = (1000 * call + 100_000_000 * me + world.xp.arange(rows))[:, None]
        if delay.random() < 0.05:
            spin[1, 1, world.stream](int(delay.integers(1000, 300_000)))
        exchange(x, world.xp.asarray(splits[me]), out, came)
        first = splits[:, :me].sum(axis=1)
        wanted = [1000 * call + 100_000_000 * k + first[k] + np.arange(splits[k, me]) for k in range(n)]
        wanted = world.xp.asarray(np.concatenate(wanted))
        wrong += (out[: wanted.size] != wanted[:, None]).sum() + (
            came != world.xp.asarray(splits[:, me])
        ).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    exchange.free()
