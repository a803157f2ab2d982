"""Arrays that are not the World's: PyTorch tensors, and what has DLPack or ``__array_interface__`` alone. On
GPUs: test_gpu_arrays.py."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

import shmemkit as sk
from shmemkit.device import notify, rank, wait
from shmemkit.runtime.symmetric_memory import as_dtype


class ByDlpack:
    """An array that has DLPack, and hides the rest."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class ByInterface:
    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


def tensor(array):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.array(array))


KINDS = [ByDlpack, ByInterface, tensor]
kinds = pytest.mark.parametrize("kind", KINDS)
RANKS = 2


def like(kind):
    """What new results are."""
    return pytest.importorskip("torch").Tensor if kind is tensor else np.ndarray


def numbers(x):
    return np.asarray(getattr(x, "array", x))


def collectives(world):
    """{name: (object, function, x, expected result)}, of integers"""
    n, me = world.n_ranks, world.rank
    xs = [10 * r + np.arange(2 * n) for r in range(n)]
    rows, total = np.array(xs), sum(xs)
    return {
        "AllGather": (sk.AllGather(world, 1024), sk.all_gather, xs[me], rows),
        "AllReduce": (sk.AllReduce(world, 1024), sk.all_reduce, xs[me], total),
        "ReduceScatter": (sk.ReduceScatter(world, 1024), sk.reduce_scatter, xs[me], total.reshape(n, -1)[me]),
        "AllToAll": (sk.AllToAll(world, 1024), sk.all_to_all, xs[me], rows.reshape(n, n, -1)[:, me].ravel()),
        "Broadcast": (sk.Broadcast(world, 1024), sk.broadcast, xs[me], xs[0]),
        "Gather": (sk.Gather(world, 1024), sk.gather, xs[me], rows if me == 0 else None),
    }


@pytest.mark.every(3)
@kinds
def test_collectives(pes, kind):
    """Results are of x's kind, and `out` of any; it is returned as it was given."""
    new = like(kind)

    def main():
        world = sk.init()
        for name, (made, function, x, wanted) in collectives(world).items():
            for call in (made, function):
                results = [call(kind(x.copy()))]  # a broadcast writes it
                for other in (kind, np.array) if call is made else ():
                    out = None if wanted is None else other(np.zeros_like(wanted))
                    results.append(call(kind(x), out=out))
                    assert results[-1] is out
                    results.append(call(x.copy(), out=out))
                world.synchronize()
                if wanted is None:
                    assert results == [None] * len(results)
                    continue
                assert isinstance(results[0], kind if name == "Broadcast" and kind is not tensor else new)
                for result in results:
                    np.testing.assert_array_equal(numbers(result), wanted)

    pes(RANKS).run(main)


@cuda.jit
def wait_until_set(signal):
    wait(signal, 1, "sys", "acquire")


@cuda.jit
def set_signal(signal):
    notify(signal, rank(), 1)


@kinds
def test_results_are_there_when_the_call_returns(pes, kind):
    """As those of PyTorch's functions of CPU tensors; but not on a stream that is named, or in a capture."""

    def main():
        world = sk.init()
        reduce = sk.AllReduce(world, 1024, "sum", "push")
        x, wanted = np.arange(5.0) + world.rank, 2 * np.arange(5.0) + 1
        assert numbers(reduce(kind(x))).tolist() == wanted.tolist()
        out = np.zeros(5)
        reduce(x, kind(out) if kind is not tensor else pytest.importorskip("torch").from_numpy(out))
        assert out.tolist() == wanted.tolist()
        if kind is tensor:
            assert sk.all_reduce(kind(x)).tolist() == wanted.tolist()
        out, go = np.zeros(5), sk.signals(1)
        wait_until_set[1, 1, world.stream](go)
        reduce(kind(x), out, stream=world.stream)  # returns, although what is before it waits
        assert out.tolist() == [0] * 5
        set_signal[1, 1, cuda.stream()](go)
        world.synchronize()
        assert out.tolist() == wanted.tolist()
        world.stream.begin_capture()
        reduce(kind(x), out)
        world.stream.end_capture()

    pes(RANKS).run(main)


@kinds
def test_rows_of_different_numbers(pes, kind):
    def main():
        world = sk.init()
        exchange, me = sk.AllToAllV(world, 1024), world.rank
        splits, x = np.array([1, 2]), 10 * me + np.arange(6).reshape(3, 2)
        out, out_splits = kind(np.zeros((4, 2), x.dtype)), kind(np.zeros(2, "int64"))
        for of_x in (kind(x), x):
            results = exchange(of_x, kind(splits), out, out_splits)
            assert results[0] is out and results[1] is out_splits
            world.synchronize()
            assert numbers(out_splits).tolist() == [me + 1] * 2
            wanted = [[0, 1], [10, 11]] if me == 0 else [[2, 3], [4, 5], [12, 13], [14, 15]]
            assert numbers(out)[: len(wanted)].tolist() == wanted

    pes(RANKS).run(main)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind, dtype", [*((kind, "float32") for kind in KINDS), (tensor, "bfloat16")])
def test_experts(pes, kind, dtype):
    """What dispatch returns are tensors if x is one, always the same ones."""
    torch = pytest.importorskip("torch") if kind is tensor else None

    def main():
        world = sk.init()
        ep = sk.ExpertParallel(world, 3, 8, RANKS, 1, dtype)
        x = np.repeat(np.arange(3) + 3 * world.rank, 8).reshape(3, 8).astype("float32")
        experts, weights = np.array([[0], [1], [0]]), np.full((3, 1), 2, "float32")
        given = kind(x) if torch is None else kind(x).to(getattr(torch, dtype))
        received = ep.dispatch(given, kind(experts), kind(weights))
        world.synchronize()
        assert isinstance(received.rows, like(kind)) and received.scales is None
        assert int(received.counts[0]) == (4 if world.rank == 0 else 2)
        first = [0, 2, 3, 5] if world.rank == 0 else [1, 4]
        assert received.rows[0, : len(first), 0].tolist() == first
        assert ep.dispatch(given, experts, weights) is received
        new = ep.combine(received.rows)
        out = kind(np.zeros((3, 8), "float32")) if torch is None else torch.zeros_like(given)
        assert ep.combine(received.rows, out) is out
        world.synchronize()
        assert isinstance(new, like(kind))
        for result in (new, out):
            assert (as_float(result) == 2 * x).all()

    pes(RANKS).run(main)


def as_float(x):
    return np.asarray(x.float() if hasattr(x, "float") else numbers(x))


@kinds
def test_the_world_and_its_arrays(pes, kind):
    def main():
        world = sk.init()
        x = np.arange(4.0) + world.rank
        mine = sk.array(kind(x))
        assert isinstance(mine, np.ndarray) and (mine == x).all() and mine.dtype == x.dtype
        assert sk.array(kind(x), "float32").dtype == "float32"
        assert (world.asnumpy(kind(x)) == x).all()
        assert not world.is_symmetric(kind(x))

    pes(RANKS).run(main)


@kinds
def test_kernels(pes, kind):
    """Launched by Numba, and bound."""

    @cuda.jit
    def add(x, number):
        x[cuda.threadIdx.x] += number

    def main():
        world = sk.init()
        first, second = (kind(np.zeros(4, "int64")) for _ in range(2))
        add[1, 4, world.stream](first, 3)
        step = sk.bind(add, 1, 4, (first, 4))
        step()
        step.set("x", second)
        step()
        world.synchronize()
        assert numbers(first).tolist() == [7] * 4 and numbers(second).tolist() == [4] * 4

    pes(1).run(main)


@kinds
def test_queues(pes, kind):
    def main():
        world = sk.init()
        queue, x = (
            sk.Queue(world, 2, 4, n_producers=1, n_consumers=1, block=32),
            np.full((3, 4), world.rank, "float32"),
        )
        new, out = queue(kind(x)), kind(np.zeros((3, 4), "float32"))
        assert isinstance(new, like(kind)) and queue(kind(x), out) is out
        world.synchronize()
        assert (numbers(new) == 1 - world.rank).all() and (numbers(out) == 1 - world.rank).all()

    pes(RANKS).run(main)


# ---- PyTorch's


def test_views_of_symmetric_memory_are_symmetric(pes):
    torch = pytest.importorskip("torch")

    def main():
        world = sk.init()
        room = sk.zeros((4, 4), "int64")
        view = torch.from_dlpack(np.asarray(room))
        assert world.is_symmetric(view) and world.is_symmetric(view[2:])
        assert not world.is_symmetric(torch.zeros(4))
        sk.peer_view(view, 1 - world.rank)[3, 3] = 5 + world.rank
        world.barrier()
        world.synchronize()
        assert int(view[3, 3]) == 6 - world.rank
        gather = sk.AllGather(world, room.nbytes, "push_1d")
        out = gather.output((2, 3), torch.float32)
        gathered = torch.from_dlpack(np.asarray(out))
        assert gather(torch.full((3,), 1.0 + world.rank), gathered) is gathered
        world.synchronize()
        assert gathered.tolist() == out.tolist() == [[1.0] * 3, [2.0] * 3]

    pes(RANKS).run(main)


DTYPES = "bool uint8 int16 int64 float16 bfloat16 float32 complex64 float8_e4m3fn float8_e5m2".split()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(pes, dtype):
    torch = pytest.importorskip("torch")

    def main():
        world = sk.init()
        kind = getattr(torch, dtype)
        x = torch.tensor([0.0, 1.0, 2.0, world.rank]).to(kind)
        gathered, sent = sk.all_gather(x), sk.broadcast(x.clone(), root=1)
        parts = sk.all_to_all(x)
        world.synchronize()
        assert {gathered.dtype, sent.dtype, parts.dtype} == {kind}
        assert (
            gathered[:, 3].to(torch.complex64).tolist()
            == torch.arange(2).to(kind).to(torch.complex64).tolist()
        )
        assert sent[3].to(torch.complex64).item() == 1
        assert world.asnumpy(x).dtype == getattr(ml_dtypes, dtype, dtype)
        if dtype in ("bool", "complex64"):
            with pytest.raises(ValueError, match=f"{dtype}.* cannot be reduced|must be"):
                sk.all_reduce(x)
            return
        total = sk.all_reduce(x)
        world.synchronize()
        assert total.dtype == kind and total.tolist() == [0, 2, 4, 1]
        assert as_dtype(kind) == sk.zeros(1, kind).dtype == as_dtype(dtype)

    pes(RANKS).run(main)


def test_gradients_are_not_recorded(pes):
    torch = pytest.importorskip("torch")

    def main():
        world = sk.init()
        x = torch.ones(4, requires_grad=True)
        w = torch.nn.Parameter(torch.eye(4))
        total, product = sk.all_reduce(x), sk.matmul(x[None], w)
        world.synchronize()
        assert not total.requires_grad and not product.requires_grad
        assert total.tolist() == [2.0] * 4 and product.tolist() == [[1.0] * 4]

    pes(RANKS).run(main)


def test_products(pes):
    torch = pytest.importorskip("torch")

    def main():
        world, kind = sk.init(), torch.bfloat16
        x, w = torch.full((4, 8), 1.0 + world.rank).to(kind), torch.ones(8, 2).to(kind)
        results = {
            "matmul": (sk.matmul(x, w), [8.0 + 8 * world.rank] * 4),
            "gather": (sk.AllGatherGemm(world, 1024)(x, w), [8.0] * 4 + [16.0] * 4),
            "scatter": (sk.GemmReduceScatter(world, 4, 2)(x, w), [24.0] * 2),
            "reduce": (sk.GemmAllReduce(world, 4, 2)(x, w), [24.0] * 4),
        }
        world.synchronize()
        for result, wanted in results.values():
            assert result.dtype == kind and result[:, 1].tolist() == wanted

    pes(RANKS).run(main)


HOLLOW = [
    ("DTensor", r"give x.to_local\(\)"),
    ("AsyncCollectiveTensor", r"give x.wait\(\)"),
    ("FakeTensor", "it must be"),
    ("Other", "it must be a torch.Tensor with data"),
]


def test_tensors_that_are_refused(pes):
    torch = pytest.importorskip("torch")

    def main():
        reduce = sk.AllReduce(sk.init(), 1024)
        whole = torch.zeros(4, 4)

        def hollow(name):
            kind = type(name, (torch.Tensor,), {"data_ptr": lambda self: 0})
            return whole.as_subclass(kind)

        for x, kind, message in [
            (
                whole[:, 0],
                ValueError,
                r"\(4,\) with strides \(16,\); it must be C-contiguous.* x.contiguous\(\)",
            ),
            (
                whole.to_sparse(),
                TypeError,
                r"x is a tensor of torch.sparse_coo and torch.float32; it must be dense .*x.to_dense\(\)",
            ),
            (torch.zeros(4, dtype=torch.complex64).conj(), ValueError, r"give x.resolve_conj\(\)"),
            (whole.to("meta"), TypeError, "x is a META torch.Tensor; it has no data"),
            (whole > 0, ValueError, r"dtype bool, which .* x.view\(torch.uint8\)\) with op 'max'"),
            *(
                (hollow(kind), TypeError, f"x is a .*{kind}, which has no .* own; {text}")
                for kind, text in HOLLOW
            ),
        ]:
            for call in (reduce, sk.all_reduce):
                with pytest.raises(kind, match=message):
                    call(x)
        for wrong, error, message in [
            (torch.zeros(4, dtype=torch.float64), ValueError, "out is float64 .*; out must be float32"),
            (whole[:, 0], ValueError, "out is float32 .* must be C-contiguous. Give a C-contiguous `out`"),
            (hollow("DTensor")[0], TypeError, r"out is a .*DTensor, .*; give out.to_local\(\)"),
        ]:
            with pytest.raises(error, match=message):
                reduce(whole[0], wrong)
        with pytest.raises(TypeError, match=r"all_reduce\(\): op is a torch.Tensor; give `out` and"):
            sk.all_reduce(whole, torch.zeros(4, 4))
        with pytest.raises(ValueError, match="op is 'add'"):
            sk.all_reduce(whole, "add")

    pes(1).run(main)


def test_on_pytorchs_current_stream(monkeypatch):
    """Of a tensor on a GPU, as which one of the host is taken here: after what is on that stream, before what
    comes there next."""
    torch = pytest.importorskip("torch")

    class OnGpu(torch.Tensor):
        is_cuda = True

    @cuda.jit
    def fill(x, number):
        x[cuda.threadIdx.x] = number

    @cuda.jit
    def double(x):
        x[cuda.threadIdx.x] *= 2

    def main():
        world = sk.init()
        current = streams[world.rank] = cuda.stream()
        same, weight = np.zeros(4, "float32"), torch.eye(4)
        x, out = torch.from_numpy(same).as_subclass(OnGpu), torch.zeros(4).as_subclass(OnGpu)
        queue = sk.Queue(world, 2, 4, n_producers=1, n_consumers=1, block=32)
        for i in range(2):
            fill[1, 4, current](x, 10 * i + world.rank)
            results = (
                sk.all_reduce(x),
                sk.matmul(x[None], weight),
                queue(x[None]),
                sk.all_reduce(same, out=out),
            )
            fill[1, 4, current](x, -1)
            for result in results:
                double[1, 4, current](result.view(-1))
            current.synchronize()
            total, wanted = 2 * (20 * i + 1), [2 * (10 * i + rank) for rank in (world.rank, 1 - world.rank)]
            assert [result.flatten()[3].item() for result in results] == [total, *wanted, total]
        assert sk.all_reduce(x, stream=world.stream).shape == (4,)
        world.synchronize()

    streams = {}
    current_stream = lambda device: SimpleNamespace(cuda_stream=streams[sk.current().rank])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    for seed in (None, 0):
        sk.emu.run(main, RANKS, races=True, delivery="unordered", seed=seed)


def test_each_rank_has_its_own_grad_mode():
    torch = pytest.importorskip("torch")

    def main():
        world = sk.init()
        enabled = []
        for without in range(RANKS):
            with torch.set_grad_enabled(world.rank != without):
                world.host_barrier()
                enabled.append(torch.is_grad_enabled())
                sk.all_reduce(torch.ones(3))
                enabled.append(torch.is_grad_enabled())
        if world.rank == 0:
            torch.set_grad_enabled(False)
        return [*enabled, torch.is_grad_enabled()]

    assert sk.emu.run(main, RANKS) == [[False] * 2 + [True] * 2 + [False], [True] * 2 + [False] * 2 + [True]]
    assert torch.is_grad_enabled()


# ---- wrong types


WRONG = [([1.0], "a list"), (None, "None"), (1.5, "1.5"), (np.float32(1), "a numpy.float32"), (b"1", "b'1'")]


@pytest.mark.parametrize("wrong, text", WRONG, ids=[text for _, text in WRONG])
def test_wrong_types(pes, wrong, text):
    needed = "it must be a NumPy array, a PyTorch CPU tensor, or another array in host memory"

    def main():
        world, x = sk.init(), np.zeros(2)
        splits = np.ones(1, "int64")
        ep = sk.ExpertParallel(world, 2, 8, 2, 1, "float32")
        rows, experts = np.zeros((2, 8), "float32"), np.zeros((2, 1), "int32")
        calls = [
            (lambda: ep.dispatch(wrong, experts), "ExpertParallel: x"),
            (lambda: ep.dispatch(rows, wrong), "ExpertParallel: topk_ids"),
            (lambda: ep.combine(wrong, rows), "ExpertParallel: y"),
            (lambda: sk.AllToAllV(world, 64)(wrong, splits, x, splits), "AllToAllV: x"),
            (lambda: sk.AllToAllV(world, 64)(x, splits, x.copy(), wrong), "AllToAllV: out_splits"),
            (lambda: sk.matmul(wrong, x), "Gemm: x"),
            (lambda: sk.GemmAllReduce(world, 1, 1)(rows, wrong), "GemmAllReduce: w"),
            (lambda: sk.AllGatherGemm(world, 1)(wrong, rows), "AllGatherGemm: x"),
        ]
        for name, (made, function, *_) in collectives(world).items():
            calls.append((lambda made=made: made(wrong), f"{name}: x"))
            calls.append((lambda function=function: function(wrong), rf"{function.__name__}\(\): x"))
            if wrong is not None:
                calls.append((lambda made=made: made(x, wrong), f"{name}: out"))
        for call, who in calls:
            with pytest.raises(TypeError, match=f"{who} is {text}; {needed}"):
                call()

    pes(1).run(main)
