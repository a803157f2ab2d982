"""What every collective must do by each of its methods, on the emulator, with races checked and messages
late: ranks, nodes, lengths, dtypes, ops, alignments, in place, symmetric memory, repeats, streams and graphs.
(The files of a collective, or of a method, have what it alone does, and explorations.)"""

import itertools

import numpy as np
import pytest
from fast import covering, examples, slow
from fast import full as full_cases
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda
from specification import ALL, calls, full

import shmemkit as sk
from shmemkit.backends.emulator import EmulatorBackend
from shmemkit.collectives.collective import Collective
from shmemkit.device.cuda.word_reductions import DTYPES, OPS
from shmemkit.emu.stream import Stream
from shmemkit.runtime import symmetric_memory
from shmemkit.runtime.symmetric_memory import as_dtype

SWITCHED = "int32", "uint32", "int64", "uint64", "float16", "bfloat16"
ADDED = "float32", "float64"
OF_EACH_SIZE = "uint8", "int32", "bfloat16", "float64", "complex128"
SMALL_OR_WIDE = "uint8", "bfloat16", "complex128"
OVER_NODES = {
    "AllGather": ("push_1d", "ll_2d", "push_2d", "ll_2d_multimem"),
    "AllReduce": ("ring", "double_tree"),
}
WITHOUT_REACH = "AllGather", "AllReduce", "AllToAll", "Broadcast", "Gather", "ReduceScatter"
ONE_NODE = [(1, 1), (1, 2), (1, 3), (1, 4)]
NODES = [(2, 1), (2, 2), (3, 1)]


def over_nodes(name, method):
    return method in OVER_NODES.get(name, ("push_2d",))


def can(name, method, dtype, op="sum"):
    """Whether it is for such arrays: all can be moved; the NVSwitch, of multimem, does not combine all."""
    if not ALL[name].reduces:
        return True
    if "multimem" in method:
        return op in ("sum", "max", "min") and dtype in SWITCHED or op == "sum" and dtype in ADDED
    return dtype in DTYPES and (op != "avg" or "float" in dtype)


WAYS = [(name, method) for name, what in ALL.items() for method in what.kind.methods]


def fewest(ways):
    """As few of them as have each collective and each method's name once: namesakes share what is tested."""
    return covering(ways, lambda way: dict(zip(("name", "method"), way, strict=True)))


def ways(chosen=lambda name, method: True, few=False):
    """Parametrizes with collectives and methods: fixtures `name` and `method`. With `few`, only the fewest
    are fast."""
    found = [way for way in WAYS if chosen(*way)]
    fast = fewest(found) if few else found
    cases = [
        pytest.param(way, id="-".join(way), marks=[] if way in fast else pytest.mark.slow) for way in found
    ]
    return pytest.mark.parametrize("way", cases)


def test_every_collective_is_specified():
    named = {name: getattr(sk, name) for name in sk.__all__}
    found = {k for k, v in named.items() if isinstance(v, type) and issubclass(v, Collective)}
    assert ALL.keys() == found - {"AllToAllV"}  # of lengths that differ: it has tests of its own


def text(value):
    return "-".join(value) if isinstance(value, tuple) else value


@pytest.fixture
def name(way):
    return way[0]


@pytest.fixture
def method(way):
    return way[1]


def nodes_for(method, n):
    """-> how ``pes`` makes `n` ranks: on two nodes for a method of several nodes, else on one"""
    return {"n": n, "local_size": max(1, n // 2) if method.endswith("2d") else n}


def in_place_of(name):
    return ["apart", "in place"] if ALL[name].in_place else ["apart"]


@pytest.mark.each_value
@pytest.mark.every(3)
@ways()
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_ranks, root", [(1, 0), (2, 0), (3, 1), (4, 3)])
def test_lengths(pes, name, method, n_ranks, root):
    pes(n_ranks).run(calls, name, method, [9, 4, 0, 300, 41, 1], "float32", "sum", root)


@pytest.mark.each_value
@pytest.mark.every(4)
@ways(few=True)
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize(
    "n_ranks, dtype, where",
    [
        (2, "bfloat16", "apart"),
        (3, "int32", "apart"),
        (3, "int32", "touching"),
        (3, "int32", "some in place"),
    ],
)
def test_several_parts_and_chunks(pes, small_chunks, name, method, n_ranks, dtype, where):
    """Where arrays are apart, those of ranks 1 and 2 are not aligned: some methods have another kernel for
    them."""
    if not ALL[name].in_place and "place" in where:
        where = "touching"
    unaligned = int(where == "apart")
    pes(n_ranks).run(calls, name, method, [1, 250, 0, 333, 33, 520, 65, 7], dtype, "sum", 0, unaligned, where)


@pytest.mark.slow
@ways(lambda *way: way in fewest(WAYS))
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_ranks, sizes", [(5, [9, 0, 130, 1]), (16, [33])])
def test_many_ranks(pes, small_chunks, name, method, n_ranks, sizes):
    pes(n_ranks).run(calls, name, method, sizes, "int32", "max", 2)


@pytest.mark.slow
@ways(lambda name, method: name in ("Broadcast", "Gather", "Scatter") or (name, method) == ("Reduce", "ll"))
def test_more_ranks_than_a_thread_holds(pes, name, method):
    pes(18).run(calls, name, method, [33, 1], "int16", "sum", 2)


@pytest.mark.each_value
@pytest.mark.every(4)
@ways(lambda name, method: "ll128" in method or "lamport" in method, few=True)
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("threads", [32, 64])
def test_more_tiles_than_warps(pes, small, name, method, threads):
    """Of tiles that are full and tiles that are not, in turn."""
    small(ALL[name].kind, **{method: {"threads": threads, "blocks": 0}})
    pes(3).run(calls, name, method, [200, 1, 61, 421, 2], "uint64", "sum", 1)


IN_STEPS = (
    ("AllGather", "push_1d"),
    *((n, "push") for n in ("ReduceScatter", "AllToAll", "Gather", "Scatter")),
)


@pytest.mark.every(3)
@ways(lambda *way: way in IN_STEPS)
@pytest.mark.parametrize("n_ranks", [2, *slow(3)])
def test_parts_of_several_steps(pes, small, name, method, n_ranks):
    """Of which the last rank to come tells; aligned arrays and others."""
    small(ALL[name].kind, **{method: {"part": 128, "chunk": 8192, "senders": 3}})
    pes(n_ranks).run(calls, name, method, [25_000, 3, 35_001], "uint8", "sum", 1, 1)


@pytest.mark.slow
@ways()
def test_gpus_may_differ(pes, name, method):
    """The one with fewest multiprocessors says how many blocks and parts there are."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = (5, 3)[world.rank]
        calls(name, method, [5000, 3], "int32", world=world)

    pes(2).run(main)


@pytest.mark.slow
@ways(lambda *way: way in fewest(WAYS))
def test_larger_than_a_chunk(pes, name, method):
    large = {"ll": 1100, "ll_2d": 4100, "ll_2d_multimem": 4100}.get(method, 34_000)
    pes(2).run(calls, name, method, [large, 4], "int32", "sum", 1)


@pytest.mark.each_value
@pytest.mark.every(4)
@ways(over_nodes)
@pytest.mark.schedules(deliveries=("ordered", "unordered"), seeds=[0])
@pytest.mark.parametrize(
    "nodes, local_size, root", [(2, 1, 0), (3, 1, 0), *slow((2, 2, -1), (2, 3, 1), (4, 2, 0))]
)
def test_nodes(request, pes, small_chunks, name, method, nodes, local_size, root):
    n = nodes * local_size
    if method.endswith("2d"):
        request.getfixturevalue("messages")
    pes(n, local_size=local_size).run(calls, name, method, [9, 130, 0, 333, 1], "int32", "sum", root % n)


@ways(lambda name, method: not over_nodes(name, method))
def test_refused_over_nodes(pes, capfd, name, method):
    """On all ranks; and nothing is left allocated."""

    def main():
        with sk.init() as world, pytest.raises(ValueError, match="cannot be used here|is for one node"):
            ALL[name].make(world, 64, method)

    pes(4, local_size=2).run(main)
    assert "without free" not in capfd.readouterr().err


@pytest.fixture
def unreached(monkeypatch):
    """No rank maps the memory of others, as GPUs without peer access."""
    monkeypatch.setattr(
        EmulatorBackend, "mapped", lambda self: [k == self.pe for k in range(self.machine.n_ranks)]
    )


@pytest.mark.each_value
@pytest.mark.every(3)
@ways(
    lambda name, method: name in WITHOUT_REACH and over_nodes(name, method) and "ll_2d" not in method,
    few=True,
)
@pytest.mark.schedules(deliveries=("ordered", "unordered"), seeds=[0])
@pytest.mark.parametrize("n_ranks, local_size, root", [(3, 3, 1), (4, 2, -1)])
def test_without_reach(pes, unreached, small_chunks, name, method, n_ranks, local_size, root):
    """What is for several nodes is for the ranks of one, too, where stores do not reach them."""
    sizes = [9, 130, 0, 333, 1]
    pes(n_ranks, local_size=local_size).run(calls, name, method, sizes, "int32", "sum", root % n_ranks)


@pytest.mark.parametrize("name", WITHOUT_REACH)
def test_auto_without_reach(pes, unreached, name):
    pes(4).run(calls, name, "auto", [9, 130, 0], "int32")


def dtype_of(way, dtype):
    """Elements of 4 and 8 bytes are in all other tests, too: here namesakes stand for each other."""
    return [(way, dtype)] if dtype in SMALL_OR_WIDE or way in fewest(WAYS) else full_cases((way, dtype))


@pytest.mark.each_value
@pytest.mark.every(4)
@pytest.mark.parametrize(
    "way, dtype",
    [case for w in WAYS for d in OF_EACH_SIZE if can(*w, d) for case in dtype_of(w, d)],
    ids=text,
)
def test_dtypes(pes, name, method, dtype):
    """Of each size. test_ops has all others that are combined, test_all_dtypes_by_auto all that move."""
    for where in in_place_of(name):
        pes(**nodes_for(method, 4)).run(calls, name, method, [1, 70, 33], dtype, "sum", 2, 3, where)


@pytest.mark.each_value
@pytest.mark.parametrize("collective", ALL)
@pytest.mark.parametrize("dtype", symmetric_memory.DTYPES)
def test_all_dtypes_by_auto(pes, collective, dtype):
    if can(collective, "auto", dtype):
        pes(2).run(calls, collective, "auto", [5, 6], dtype)


def ops_of(way):
    """All ops of all dtypes for the first method of a collective; for others, which combine by the same
    functions, each op and each dtype once."""
    both = [(op, dtype) for op in OPS for dtype in DTYPES if can(*way, dtype, op)]
    few = covering(both, lambda pair: dict(zip(("op", "dtype"), pair, strict=True)))
    return [(way, *pair) for pair in (both if way[1] == ALL[way[0]].kind.methods[0] else few)]


@pytest.mark.each_value
@pytest.mark.parametrize(
    "way, op, dtype", [case for way in WAYS if ALL[way[0]].reduces for case in ops_of(way)], ids=text
)
def test_ops(pes, name, method, op, dtype):
    pes(**nodes_for(method, 2)).run(calls, name, method, [9, 17], dtype, op, 1, 0, "in place")


@pytest.mark.each_value
@ways(few=True)
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_ranks, unaligned", [(1, 0), (3, 0), (3, 1)])
def test_symmetric_memory(pes, name, method, n_ranks, unaligned):
    for where in in_place_of(name):
        args = "int32", "sum", n_ranks - 1, unaligned, where, True
        pes(n_ranks).run(calls, name, method, [9, 4, 0, 70], *args)


@ways()
@examples(4)
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    delivery=st.sampled_from(["eager", "ordered", "unordered"]),
    layout=st.sampled_from(ONE_NODE + NODES),
    root=st.integers(0, 5),
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    dtype=st.sampled_from(["uint8", "float8_e4m3fn", "int32", "bfloat16", "float64", "complex128"]),
    op=st.sampled_from(["sum", "min"]),
    unaligned=st.integers(0, 3),
    where=st.sampled_from(["apart", "in place", "some in place"]),
    symmetric=st.booleans(),
)
def test_any_call(
    pes,
    small_chunks,
    name,
    method,
    seed,
    delivery,
    layout,
    root,
    sizes,
    dtype,
    op,
    unaligned,
    where,
    symmetric,
):
    (nodes, local_size), what = layout, ALL[name]
    n = nodes * local_size
    if not can(name, method, dtype, op):
        dtype, op = "int32", "sum"
    if not what.in_place:
        where = "apart"
    if symmetric and where == "some in place":
        where = "in place"
    ranks = pes(n, local_size=local_size if over_nodes(name, method) else n, seed=seed, delivery=delivery)
    ranks.run(calls, name, method, sizes, dtype, op, root % n, unaligned, where, symmetric)


@cuda.jit
def count_from(x, value):
    for i in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        x[i] = value + i


@cuda.jit
def add(x, total):
    for i in range(x.size):
        total[0] += x[i]


@pytest.mark.each_value
@pytest.mark.every(4)
@ways(few=True)
@pytest.mark.parametrize("size", [40, 39])  # 39: segments are not aligned
def test_into_one_output_again_and_again(pes, name, method, size):
    """What makes x and takes out is on the stream; neither the host nor a barrier waits between."""

    def main(symmetric):
        world, what, root = sk.init(), ALL[name], 1
        n, me = world.n_ranks, world.rank
        made = what.make(world, full(what, n, size, "int32"), method, "sum", root)
        lengths, (place, place_out) = what.places(n, size, "apart", 0)
        x = np.zeros(lengths[0], "int32").reshape(place[2])
        out = (made.output if symmetric else np.zeros)(place_out[2], "int32")
        out[...] = 0
        world.barrier()
        total, expected = np.zeros(1, "int64"), 0
        for call in range(5):
            count_from[1, 8, world.stream](x.reshape(-1), 1000 * call + 10_000 * me)
            what.call(made, x, out)
            add[1, 1, world.stream](out.reshape(-1), total)
            given = [
                (np.arange(x.size, dtype="int32") + 1000 * call + 10_000 * k).reshape(x.shape)
                for k in range(n)
            ]
            if what.gets(me, root):
                expected += int(what.wanted(given, method, me, "sum", root).sum())
        world.synchronize()
        assert total[0] == expected

    for symmetric in (False, True):
        pes(3).run(main, symmetric)


@pytest.mark.each_value
@pytest.mark.every(4)
@ways(few=True)
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("nodes, local_size", [(1, 2), *slow((2, 2))])
def test_streams_and_graphs(pes, name, method, nodes, local_size):
    """Graphs of two streams, and calls on both, in turn. Calls of one object are in order on all streams, in
    captures, too; captured calls are of their graph alone."""
    what, root = ALL[name], 1

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        made = what.make(world, full(what, n, 40, "float64"), method, "sum", root)
        other, sizes = Stream(world.stream.machine, me), (40, 9)
        shapes = [[shape for *_, shape in what.places(n, size, "apart", 0)[1]] for size in sizes]
        (x, y), outs = (np.zeros(of_x) for of_x, _ in shapes), [np.zeros(of_out) for _, of_out in shapes * 2]
        what.call(made, x, outs[0])
        graphs = []
        for stream in (world.stream, other):
            stream.begin_capture()
            what.call(made, x, outs[0], stream)
            what.call(made, y, outs[1], stream)
            graphs.append(stream.end_capture())
            what.call(made, x, outs[2], stream)
        for call in range(4):
            world.synchronize()
            given = [what.given(call + k, size, "float64", n) for k, size in enumerate(sizes)]
            x[...], y[...] = given[0][me], given[1][me]
            graphs[call % 2].launch(world.stream)
            what.call(made, x, outs[2], (None, world.stream)[call % 2])
            what.call(made, y, outs[3], other)
            world.synchronize()
            for k, out in enumerate(outs):
                if what.gets(me, root):
                    wanted = what.wanted(given[k % 2], method, me, "sum", root)
                    np.testing.assert_array_equal(out, wanted)

    n = nodes * local_size
    pes(n, local_size=local_size if over_nodes(name, method) else n).run(main)


@pytest.mark.every(3)
@ways(lambda name, method: ALL[name].reduces and "multimem" not in method, few=True)
def test_nan_and_inf_pass(pes, name, method):
    def main(op, dtype):
        world, what = sk.init(), ALL[name]
        n, me = world.n_ranks, world.rank
        rows = [[np.nan, np.inf, -np.inf, 1, np.nan]] + [[1, 2, 3, np.nan, np.nan]] * (n - 1)
        given = [np.array([row] * n if what.scatters else row, as_dtype(dtype)) for row in rows]
        made = what.make(world, given[0].nbytes, method, op)
        out = np.zeros(5, as_dtype(dtype))
        what.call(made, given[me], out)
        world.synchronize()
        if what.gets(me, 0):
            wanted = what.wanted(given, method, me, op)
            np.testing.assert_array_equal(out.astype("float64"), wanted.astype("float64"))

    for op, dtype in itertools.product(("sum", "max", "min"), ("float16", "bfloat16", "float32", "float64")):
        pes(2).run(main, op, dtype)


@pytest.mark.each_value
@ways(lambda name, method: ALL[name].reduces and "multimem" not in method)
@pytest.mark.parametrize(
    "dtype, n_ranks", [*(("float8_e4m3fn", n) for n in (1, 2, 3, 4, 7, 9)), ("float8_e5m2", 3)]
)
def test_float8_is_combined_in_float32_and_rounded_once(pes, name, method, n_ranks, dtype):
    """Also of odd lengths, at odd addresses; sums that saturate, and NaN."""

    def main():
        world, what = sk.init(), ALL[name]
        n, me = world.n_ranks, world.rank
        shape = (n, 33) if what.scatters else (33,)
        given = 4.0 * np.random.default_rng(n).integers(-64, 64, (n, *shape))
        given[n // 2, ..., 7], given[0, ..., 9], given[n - 1, ..., 9] = np.nan, np.inf, -np.inf
        given = given.astype(as_dtype(dtype))
        x = np.zeros(given[me].size + me, given.dtype)[me:].reshape(shape)
        x[...] = given[me]
        for op in ("sum", "min", "avg"):
            made, out = what.make(world, 2 * x.nbytes, method, op), np.zeros(33, given.dtype)
            what.call(made, x, out)
            world.synchronize()
            if what.gets(me, 0):
                wanted = what.wanted(given, method, me, op)
                np.testing.assert_array_equal(out.view("uint8"), wanted.view("uint8"))

    pes(n_ranks).run(main)


IN_A_TREE = "double_tree", "push_2d"  # whose orders are said where they are tested


@pytest.mark.each_value
@pytest.mark.every(4)
@ways(lambda name, method: ALL[name].reduces and "multimem" not in method and method not in IN_A_TREE)
@pytest.mark.parametrize("dtype, op", [("float32", "sum"), ("bfloat16", "avg"), ("float16", "prod")])
def test_the_order_is_the_documented_one_every_time(pes, small_chunks, name, method, dtype, op):
    """Bit by bit: of numbers whose sum depends on the order of adding, and on the precision of what is
    carried. 8 and 16 bits are rounded once."""

    def main():
        world, what = sk.init(), ALL[name]
        n, me = world.n_ranks, world.rank
        shape = (n, 70) if what.scatters else (333,)
        given = [
            (np.random.default_rng(r).standard_normal(shape) * 4.0 ** (r % 3)).astype(as_dtype(dtype))
            for r in range(n)
        ]
        made, out = what.make(world, given[0].nbytes, method, op), np.zeros(shape[-1], as_dtype(dtype))
        for _ in range(3):
            out[:] = 0
            what.call(made, given[me], out)
            world.synchronize()
            if what.gets(me, 0):
                assert out.tobytes() == what.wanted(given, method, me, op).tobytes()

    pes(4).run(main)
