"""What AllGatherGemm, GemmReduceScatter and GemmAllReduce have in common, on the emulator: arrays that lie
otherwise on each rank, GPUs of other sizes, several objects on several streams, and what they keep."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from fast import slow
from gemms import moved
from test_ag_gemm import BF16, integers, small, weight_of
from test_gemm_rs import BFLOAT16, OBJECTS, SMALL, expected, given

import shmemkit as sk
from shmemkit.collectives.all_gather import AllGather
from shmemkit.collectives.all_gather.copy_engine import CopyPush
from shmemkit.emu.stream import Stream
from shmemkit.gemm import Alone, Simt
from shmemkit.gemm.reduce_scatter import copy_engine, fused_2d, methods
from shmemkit.support.arrays import new_output, unowned

late = pytest.mark.schedules(deliveries="unordered", seeds=[None])
KINDS = [sk.AllGatherGemm, sk.GemmReduceScatter, sk.GemmAllReduce]


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=2")


# ---- how arrays lie


@pytest.mark.slow
@pytest.mark.parametrize("tile, part_dtype", [((64, 32), "float32"), *slow(((128, 32), None))])
def test_operands_may_be_stored_otherwise_on_each_rank(pes, tile, part_dtype):
    """Parts lie alike, although slabs of B do not."""
    options = {"tile": tile}

    def main():
        world, size = sk.init(), (8, 40, 24)
        product = sk.GemmReduceScatter(
            world, *size[:2], part_dtype=part_dtype, method="fused", options=options
        )
        out = product(*given(0, size, world.rank, ("kk", "mn")[world.rank]))
        world.synchronize()
        pairs = [given(0, size, rank, ("kk", "mn")[rank]) for rank in range(2)]
        whole = sum(a.astype("float32") @ b.astype("float32") for a, b in pairs)
        np.testing.assert_array_equal(out, whole.astype(BFLOAT16)[4 * world.rank : 4 * world.rank + 4])

    pes(2).run(main)


@pytest.mark.slow
@late
@pytest.mark.parametrize(
    "op, method, how, on_rank, nodes",
    [
        ("rs", "fused", ("odd rows", "odd columns", "at an odd address"), 0, 1),
        *slow(
            ("rs", "copy_engine", ("odd columns", "backwards", None), None, 1),
            ("ar", "fused", ("apart", None, "at an odd address"), 0, 1),
            ("ar", "one_shot", ("odd columns", "odd rows", "at an odd address"), 1, 1),
            ("ar", "two_shot", (None, "apart", None), None, 1),
            ("ar", "two_shot_overlap", ("odd columns", "odd rows", "at an odd address"), 1, 1),
            ("rs", "fused_2d", ("odd columns", "odd rows", "at an odd address"), 0, 2),
        ),
    ],
)
def test_arrays_that_the_tma_does_not_take(pes, monkeypatch, op, method, how, on_rank, nodes):
    """On one rank alone, or on all. Also N and K of which rows are no multiple of 16 bytes."""
    bind = fused_2d.Fused2D._bind

    def bind_words(self, a, b, out):
        assert self.world.backend.address(out) % 8 == 0
        return bind(self, a, b, out)

    monkeypatch.setattr(fused_2d.Fused2D, "_bind", bind_words)

    def main():
        world = sk.init()
        options = SMALL if method in ("fused", "copy_engine", "fused_2d") else None
        product = OBJECTS[op](world, 8, 36, method=method, options=options)
        for call, size in enumerate([(8, 16 if nodes > 1 else 36, 9), (4, 8, 72)][: 3 - nodes]):
            want = expected(op, call, size, world)
            arrays = [*given(call, size, world.rank), np.empty(want.shape, BFLOAT16)]
            if on_rank in (None, world.rank):
                pairs = zip(arrays, how, strict=True)
                arrays = [array if to is None else moved(array, to) for array, to in pairs]
            for _ in range(2):
                arrays[2][:] = np.nan
                product(*arrays)
                world.synchronize()
                np.testing.assert_array_equal(arrays[2], want)

    n = 2 * nodes
    pes(n, local_size=n // nodes).run(main)


@pytest.mark.every(2)
@pytest.mark.parametrize("by_columns", [False, True])
def test_rows_at_an_odd_address_on_one_rank(pes, by_columns):
    def main():
        world = sk.init()
        xs, weight = integers(2, 64, 64), weight_of(world.rank, 64, 32)
        x = moved(xs[world.rank], "at an odd address") if world.rank == 0 else xs[world.rank]
        overlap = sk.AllGatherGemm(world, xs.nbytes, "overlap", options=small(by_columns))
        for gathered in (None, overlap.output((128, 64), "bfloat16")):
            out = overlap(x, weight, np.zeros((128, 32), "float32"), gathered=gathered)
            world.synchronize()
            np.testing.assert_array_equal(
                out, xs.reshape(128, 64).astype("float32") @ weight.astype("float32")
            )

    pes(2).run(main)


# ---- GPUs of other sizes


@pytest.mark.slow
def test_the_least_gpu_decides_for_all(pes):
    """Tiles, where rows of them are sent, and whether x comes by rows or by columns."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = (2, 3)[world.rank]
        size = 128, 264, 72
        product = sk.GemmReduceScatter(world, *size[:2], method="fused")
        tile = product._methods["fused"].choose(size[0] // 2, size[1], size[2])
        want, out = expected("rs", 0, size, world), product(*given(0, size, world.rank))
        few_rows = sk.GemmAllReduce(world, 8, 264, method="one_shot")
        assert few_rows._methods["one_shot"].multiprocessors == 2
        world.backend.multiprocessors = (4, 1)[world.rank]
        xs, weight = integers(2, 128, 256), weight_of(world.rank, 256, 32)
        options = small(by_columns=None)
        gathered = sk.AllGatherGemm(world, xs.nbytes, "overlap", options=options)(xs[world.rank], weight)
        world.synchronize()
        np.testing.assert_array_equal(out, want)
        whole = xs.reshape(256, 256).astype("float32") @ weight.astype("float32")
        np.testing.assert_array_equal(gathered, whole.astype(BF16))
        return tile

    assert len(set(pes(2).run(main))) == 1


@pytest.mark.parametrize(
    "kind, n_ranks, chosen",
    [
        (methods.Fused, 2, [True, True, True, True]),
        (methods.Fused, 4, [True, True, True, True]),
        (methods.FusedEverywhere, 2, [True, True, True, False]),
        (methods.FusedEverywhere, 4, [True, True, True, True]),
        (copy_engine.Copied, 2, [True, True, True, False]),
        (copy_engine.Copied, 4, [False, True, False, False]),
        (copy_engine.CopiedEverywhere, 4, [False, False, False, False]),
    ],
)
def test_what_auto_takes_of_llama_on_h200(kind, n_ranks, chosen):
    method = object.__new__(kind)
    method.world = SimpleNamespace(backend=SimpleNamespace(name="nvshmem"))
    method.ranks, method.part_dtype, method.multiprocessors = range(n_ranks), "bfloat16", 132
    layers = (8192, 14336, 4096), (8192, 28672, 8192), (8192, 8192, 8192), (512, 28672, 8192)
    assert [method.is_for(m, k // n_ranks, n) for m, k, n in layers] == chosen
    assert not any(method.is_for(m, k // n_ranks, 4) for m, k, _ in layers)  # arrays would be copied


# ---- calls


@pytest.mark.slow
def test_calls_of_several_objects_are_in_one_order():
    """On streams that nothing else orders: each computes with what the one before has."""

    def main():
        world = sk.init()
        streams = [Stream(world.stream.machine, world.rank) for _ in KINDS]
        x, weight = np.ones((2, 4), "float32"), np.ones((4, 4), "float32")
        made = [
            kind(world, *sizes, "float32") for kind, sizes in zip(KINDS[1:], [(4, 4), (2, 4)], strict=True)
        ]
        made.insert(0, sk.AllGatherGemm(world, 2 * x.nbytes))
        outs = [np.zeros((rows, 4), "float32") for rows in (4, 2, 2)]
        for _ in range(2):
            for call, stream, rows, out in zip(made, streams, [x, *outs], outs, strict=False):
                call(rows, weight, out, stream=stream)
        world.synchronize()
        assert (outs[-1] == 4 * 4 * 2 * 4 * 2).all()
        for call in made:
            call.free()

    for seed in (None, 0, 1):
        sk.emu.run(main, 2, races=True, delivery="unordered", seed=seed)


def test_graphs_keep_each_call_once(pes):
    def main():
        world = sk.init()
        product = sk.GemmReduceScatter(world, 2, 4, "float32")
        arrays = np.ones((2, 4), "float32"), np.ones((4, 4), "float32"), np.zeros((1, 4), "float32")
        product(*arrays)
        for _ in range(3):
            world.stream.begin_capture()
            product(*arrays)
            product(*arrays)
            world.stream.end_capture()
        assert len(product._plans.of_graphs) == 1

    pes(2).run(main)


@pytest.mark.every(2)
@pytest.mark.parametrize("op", OBJECTS)
def test_what_is_bound_does_not_depend_on_others(pes, monkeypatch, op):
    bound, init = [], Simt.__init__
    monkeypatch.setattr(Simt, "__init__", lambda self, *args, **how: bound.append(init(self, *args, **how)))
    monkeypatch.setattr("shmemkit.gemm.PLANS", 2)

    def main():
        world = sk.init()
        product = OBJECTS[op](world, 2, 8, "float32", method="sequential")
        a, b = np.ones((2, 8), "float32"), np.ones((8, 8), "float32")
        out = np.zeros((1 if op == "rs" else 2, 8), "float32")
        product(a, b, out)
        for _ in range(3):
            sk.matmul(a, b, np.zeros((2, 8), "float32"))
        world.synchronize()
        before = len(bound)
        product(a, b, out)
        world.host_barrier()
        assert len(bound) == before

    pes(2).run(main)


def test_bound_calls_do_not_keep_memory():
    """Of CuPy's arrays: or new arrays would never get the memory of those before, and each call be bound."""
    cupy = pytest.importorskip("cupy")

    class Owner:
        pass

    owner = Owner()
    memory = cupy.cuda.UnownedMemory(4096, 64, owner, 0)
    array = cupy.ndarray((2, 3), "float16", cupy.cuda.MemoryPointer(memory, 16), (16, 2))
    found, alive = unowned(array), weakref.ref(owner)
    assert (found.data.ptr, found.shape, found.strides, found.dtype) == (4112, (2, 3), (16, 2), array.dtype)
    del owner, memory, array
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("captures", [False, True])
def test_without_a_world_a_stream_follows_the_one_that_new_results_are_made_on(captures):
    done = []
    runtime = SimpleNamespace(
        streamIsCapturing=lambda stream: captures and stream == 7,
        eventRecord=lambda *args: done.append(("record", *args)),
        streamWaitEvent=lambda *args: done.append(("wait", *args)),
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        Event=lambda **_: SimpleNamespace(ptr=99),
        get_current_stream=lambda: SimpleNamespace(ptr=5),
    )
    after = Alone(SimpleNamespace(cuda=cuda)).follow
    for stream in (None, SimpleNamespace(ptr=5), SimpleNamespace(ptr=7)):
        assert new_output(np.zeros(1), (2, 3), "float16", np, stream, after).shape == (2, 3)
    assert done == ([] if captures else [("record", 99, 5), ("wait", 7, 99)])


# ---- which method


@pytest.mark.parametrize("kind", KINDS)
def test_methods_for_nodes(kind):
    one, several = kind.methods_for(1), kind.methods_for(2)
    assert set(one) | set(several) == set(kind.methods) and set(one) & set(several) == {"sequential"}
    assert all(name.endswith("_2d") == (name not in one) for name in kind.methods)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "op, size, part_dtype, method",
    [
        ("rs", (8, 16, 16), "float32", "fused"),
        ("ar", (8, 16, 16), "float32", "fused"),
        ("ar", (7, 16, 16), "float32", "two_shot_overlap"),
        ("ar", (7, 16, 16), None, "sequential"),
    ],
)
def test_auto_computes_what_any_method_can(pes, op, size, part_dtype, method):
    """Although no method of those that can is the one for such sizes, on the emulator."""

    def main():
        world, (m, n, k) = sk.init(), size
        product = OBJECTS[op](world, m, n, part_dtype=part_dtype)
        assert product.method_for(m, k, n) == method
        out = product(*given(0, size, world.rank))
        world.synchronize()
        np.testing.assert_array_equal(out, expected(op, 0, size, world))

    pes(2).run(main)


@pytest.mark.slow
def test_the_first_method_that_can_and_is_faster(pes, monkeypatch):
    def main():
        world = sk.init()
        product = sk.GemmAllReduce(world, 256, 64)
        order, asked = product._methods, []
        assert list(order) == [
            "one_shot",
            "two_shot",
            "two_shot_overlap",
            "copy_engine",
            "fused",
            "sequential",
        ]
        for name, method in order.items():
            monkeypatch.setattr(method, "is_for", lambda *_, name=name: asked.append(name) or name == "fused")
        assert product.method_for(256, 8, 64) == "fused"
        assert product.method_for(255, 8, 64) == "sequential"
        assert asked[:3] == ["two_shot_overlap", "copy_engine", "fused"]  # not of those that cannot
        assert asked[3:] == ["two_shot_overlap", "sequential"]
        many = sk.GemmAllReduce(world, 1026, 4096, part_dtype="float32")
        with pytest.raises(
            ValueError, match="'one_shot': M is 1025; .*'fused': M is 1025; .*part_dtype is float32"
        ):
            many.method_for(1025, 8, 4096)

    pes(2).run(main)


def test_what_is_refused_leaves_nothing_allocated(pes, monkeypatch):
    def refuse(self, *args, **names):
        raise MemoryError("the heap is full")

    monkeypatch.setattr(CopyPush, "prepare", refuse)

    def main():
        world = sk.init()
        alone = [sk.AllGatherGemm(world, 1 << 12, method) for method in ("sequential", "push")]
        before = len(world._allocations)
        for one in alone:
            one.free()
        auto = sk.AllGatherGemm(world, 1 << 12)
        assert len(world._allocations) == before and auto.refused == {"overlap": "the heap is full"}
        assert (auto(np.ones((2, 8)), np.ones((8, 1))) == 8).all()
        with pytest.raises(MemoryError, match="method='overlap': the heap is full"):
            sk.AllGatherGemm(world, 1 << 12, "overlap")
        assert len(world._allocations) == before
        monkeypatch.setattr(AllGather, "__init__", refuse)
        with pytest.raises(MemoryError, match="AllGatherGemm: max_nbytes=4096, method='auto': the heap is"):
            sk.AllGatherGemm(world, 1 << 12)
        assert len(world._allocations) == before

    pes(2).run(main)


# ---- options


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_options(pes, kind):
    sizes = (1 << 12,) if kind is sk.AllGatherGemm else (8, 8)

    def main():
        world = sk.init()
        for options, error, said in [
            (8, TypeError, "options is 8; it must be a dict"),
            ({"tiles": 8}, ValueError, "options has 'tiles'; it must be "),
            (
                {"tile": (64, 40)},
                ValueError,
                r"options\['tile'\] is \(64, 40\); it must be \(rows, columns\)",
            ),
            ({"tile": 64}, ValueError, r"options\['tile'\] is 64"),
            ({"chunk": 0}, ValueError, r"options\['chunk'\] is 0; it must be 1 or more"),
            ({"chunk": 8 + world.rank}, ValueError, "needs the same options on all ranks"),
        ]:
            with pytest.raises(error, match=f"{kind.__name__}.*{said}"):
                kind(world, *sizes, options=options)
        assert kind.options["tile"] is None and kind(world, *sizes).options == kind.options

    pes(2).run(main)


@pytest.mark.parametrize("options", [{"senders": 3}, {"part_bytes": 64}])
def test_wrong_options_of_push(pes, options):
    ((name, value),) = options.items()

    def main():
        with pytest.raises(ValueError, match=f"push: {name} is {value}; it must be"):
            sk.AllGatherGemm(sk.init(), 1 << 12, "push", options=options)

    pes(2).run(main)
