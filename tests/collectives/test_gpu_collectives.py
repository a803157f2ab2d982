"""The collectives on GPUs, by each method: ``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_collectives``,
1 and 2 too; and with SHMEMKIT_LOCAL_SIZE=2 and 1, for several logical nodes, where messages go over NVLink.
"""

import contextlib

import numpy as np
import pytest
from fast import in_turn, slow
from gpu import on_gpus
from numba import cuda
from small_kernels import spin
from specification import ALL, calls, full

import shmemkit as sk
from shmemkit.device import num_ranks, rank, symm_at
from shmemkit.runtime.symmetric_memory import as_dtype

pytestmark = pytest.mark.ranks
CALLS, REPLAYS, SIZES = on_gpus((500, 50, (40_000, 5)), (5, 2, (40, 5)))
IN_GRAPH = on_gpus(20, 4)
WAYS = [(name, method) for name, what in ALL.items() for method in (*what.kind.methods, "auto")]
WAYS = [way for way in WAYS if "multimem" not in way[1]]  # never run where multicast is turned off
every = pytest.mark.parametrize(
    "name, method", [pytest.param(*way, marks=[pytest.mark.slow] * (way[1] == "auto")) for way in WAYS]
)
SUMS = [way for way in WAYS if ALL[way[0]].reduces and way[1] != "auto"]
OTHERS = [way for way in WAYS if way not in SUMS and way[1] != "auto"]
# A kernel of a reduction takes a second to compile, for each dtype and width: in the fast set most tests use
# the same. `shmemkit check` goes through all.
ERRORS = [("float16", 2e-3), ("bfloat16", 1e-2), ("float32", 1e-6)]
FLOATS = [("float32", 100_001, "touching", 0, False)]
PLACES = [
    ("uint8", 3_000_001, "apart", 0, False),
    ("uint8", 300_001, "apart", 1, False),
    ("float16", 100_001, "in place", 1, False),
    ("int32", 100_001, "apart", 2, True),
    ("uint8", 300_001, "in place", 8, True),
]


@contextlib.contextmanager
def skipped_where_it_cannot_run():
    """On all ranks."""
    try:
        yield
    except ValueError as refusal:
        if "cannot be used here" in str(refusal) or "is for one node" in str(refusal):
            pytest.skip(str(refusal))
        raise


def make(world, name, nbytes, method, root=0):
    with skipped_where_it_cannot_run():
        return ALL[name].make(world, nbytes, method, "sum", root)


def sleep_now_and_then(world, delay):
    """A rank is late."""
    if delay.random() < 0.05:
        spin[1, 1, world.stream](int(delay.integers(1000, on_gpus(300_000, 20_000))))


@pytest.mark.gpu("test_every_method.py makes such calls on the emulator")
@pytest.mark.parametrize(
    "name, method, dtype, most, where, unaligned, symmetric",
    [
        *in_turn(SUMS, FLOATS),
        *in_turn(OTHERS, PLACES + FLOATS),
        *slow(*((*way, *place) for way in SUMS for place in PLACES)),
    ],
)
def test_lengths_and_places(world, name, method, dtype, most, where, unaligned, symmetric):
    """Parts and chunks come and go."""
    if not ALL[name].in_place:
        where = where.replace("in place", "touching")
    sizes = [1, 0, 7, 8, most, 1000, 4096, 4097, 33, 32_769, most]
    with skipped_where_it_cannot_run():
        root = world.n_ranks - 1
        calls(name, method, sizes, dtype, "sum", root, unaligned, where, symmetric, world, world.xp)


class InARow:
    """Calls of two sizes whose x is `more` than what is given, and whose results the GPU checks."""

    def __init__(self, world, name, method, sizes=SIZES):
        self.world, self.what, self.root = world, ALL[name], world.n_ranks - 1
        what, n, me, xp = self.what, world.n_ranks, world.rank, world.xp
        self.made = make(world, name, full(what, n, max(sizes), "float32"), method, self.root)
        self.each = n if what.reduces else 1  # what comes of 1 more on all ranks
        self.given, self.wanted, self.outs, self.wrong = [], [], [], xp.zeros(1, "int64")
        for size in sizes:
            given = what.given(0, size, "float32", n)
            shape = (n, size) if what.gathers else (size,)
            self.given.append(xp.asarray(given[me]))
            self.wanted.append(xp.asarray(what.wanted(given, method, me, "sum", self.root)))
            self.outs.append([xp.zeros(shape, "float32"), self.made.output(shape, "float32")])

    def call(self, x, out, stream=None):
        self.what.call(self.made, x, out, stream)

    def check(self, out, which, more):
        if self.what.gets(self.world.rank, self.root):
            self.wrong += (out != self.wanted[which] + self.each * more).sum()

    def end(self):
        assert int(self.world.asnumpy(self.wrong)[0]) == 0
        self.made.free()


@every
def test_calls_of_ranks_that_are_apart(world, name, method):
    """Now and then a rank is late. Outputs are private and symmetric in turn."""
    delay, row = np.random.default_rng(world.rank), InARow(world, name, method)
    for call in range(CALLS):
        sleep_now_and_then(world, delay)
        which = int(call % 3 == 0)
        out = row.outs[which][call % 2]
        row.call(row.given[which] + call, out)
        row.check(out, which, call)
    row.end()


@every
def test_graphs_and_streams(world, name, method):
    """A graph of calls on two streams, some of which overlap by programmatic launch; and calls between
    its launches, on another stream in turn."""
    row, other, stream = InARow(world, name, method), world.backend.new_stream(), world.stream
    xs = [given.copy() for given in row.given]
    world.synchronize()
    stream.begin_capture()
    other.wait_event(stream.record())
    for i in range(IN_GRAPH):
        row.call(xs[i % 2], row.outs[i % 2][0], (None, None, other)[i % 3])
    stream.wait_event(other.record())
    graph = stream.end_capture()
    for repeat in range(REPLAYS):
        for x, given in zip(xs, row.given, strict=True):
            x[...] = given + 100 * repeat
        graph.launch(stream)
        if repeat % 5 == 0:
            world.synchronize()  # x is made on the World's stream
            row.call(xs[0], row.outs[0][1], (None, other)[repeat % 2])
            world.synchronize()
            row.check(row.outs[0][1], 0, 100 * repeat)
        for which, outs in enumerate(row.outs):
            row.check(outs[0], which, 100 * repeat)
    row.end()


@pytest.mark.parametrize("name, method, dtype, error", in_turn(SUMS, ERRORS))
def test_close_to_float64_and_the_same_bits_in_every_run(world, name, method, dtype, error):
    what, n, me, bits = ALL[name], world.n_ranks, world.rank, set()
    size = on_gpus(30_000, 100)
    shape = (n, size) if what.scatters else (n * size,)
    given = [np.random.default_rng(r).standard_normal(shape).astype(as_dtype(dtype)) for r in range(n)]
    made, x = make(world, name, given[0].nbytes, method), world.xp.asarray(given[me])
    out = world.xp.zeros(shape[-1], x.dtype)
    for _ in range(REPLAYS):
        what.call(made, x, out)
        found = world.asnumpy(out)
        bits.add(found.tobytes())
    assert len(bits) == 1
    if name == "AllReduce":
        assert len(set(world.host_allgather(bits.pop()))) == 1
    if what.gets(me, 0):
        wanted = what.wanted([a.astype("float64") for a in given], method, me)
        assert np.linalg.norm(found.astype("float64") - wanted) <= error * np.linalg.norm(wanted)
    made.free()


def hashed(world, size, rank, call, bits):
    """Words that are all different, with all `bits`; or that have few."""
    words = world.xp.arange(size, dtype="uint64") + np.uint64(size * rank + 977 * call)
    return words * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - bits)


@pytest.mark.gpu("what its copy engines do")
@pytest.mark.parametrize("bits", [64, 2])
@pytest.mark.parametrize("captured", [False, True])
def test_pieces_of_copies_come_whole(world, bits, captured):
    """From all multiples of 16 bytes, short and long: what a copy engine does is no promise of CUDA's."""
    n, most = world.n_ranks, 1 << 19
    exchange = make(world, "AllToAll", n * most * 8, "copy_engine")
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


@pytest.mark.gpu("NVLink multicast")
@pytest.mark.parametrize("method", ["multimem", "ll_2d_multimem"])
def test_multimem_is_refused_where_it_is_turned_off(world, method, monkeypatch):
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    with pytest.raises(ValueError, match="NVSHMEM_DISABLE_NVLS|is for one node"):
        sk.AllGather(world, 1 << 20, method)


@pytest.mark.parametrize("symmetric", [False, True])
def test_variable_splits(world, symmetric):
    n, me = world.n_ranks, world.rank
    rng, delay = np.random.default_rng(0), np.random.default_rng(me)
    rows = 16 * n
    exchange = sk.AllToAllV(world, rows * 8 * 8)
    x = world.xp.zeros((rows, 8), "int64")
    out = exchange.output(x.shape, "int64") if symmetric else world.xp.zeros(x.shape, "int64")
    came, wrong = world.xp.zeros(n, "int64"), world.xp.zeros(1, "int64")
    for call in range(CALLS):
        splits = rng.integers(0, 17, (n, n)) * rng.integers(0, 2, (n, n))  # of all ranks
        x[...] = (1000 * call + 100_000_000 * me + world.xp.arange(rows))[:, None]
        sleep_now_and_then(world, delay)
        exchange(x, world.xp.asarray(splits[me]), out, came)
        first = splits[:, :me].sum(axis=1)
        wanted = [1000 * call + 100_000_000 * k + first[k] + np.arange(splits[k, me]) for k in range(n)]
        wanted = world.xp.asarray(np.concatenate(wanted))
        wrong += (out[: wanted.size] != wanted[:, None]).sum() + (
            came != world.xp.asarray(splits[:, me])
        ).sum()
    assert int(world.asnumpy(wrong)[0]) == 0
    exchange.free()


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


def test_all_meet_at_barriers(world):
    """Many times, ranks being late, and in graphs."""
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

    for _ in range(4 * CALLS):
        sleep_now_and_then(world, delay)
        meet()
    world.stream.begin_capture()
    for _ in range(IN_GRAPH):
        meet()
    graph = world.stream.end_capture()
    for _ in range(REPLAYS):
        graph.launch(world.stream)
    assert int(world.asnumpy(wrong)[0]) == 0
    assert int(world.asnumpy(call)[0]) == 1 + 4 * CALLS + IN_GRAPH * REPLAYS
    barrier.free()
    sk.free(seen)
