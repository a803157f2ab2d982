"""What the bench compares with: NCCL and PyTorch, here stand-ins for them."""

import contextlib
import ctypes
import functools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import shmemkit as sk
from shmemkit.bench import ag_gemm, cases, gemm, gemm_reduce, libraries, measure, results
from shmemkit.bench import nccl as nccl_peer
from shmemkit.bench.layers import InTurn
from shmemkit.bench.nccl import Nccl
from shmemkit.bench.torch_peer import TorchGatherProduct, TorchNccl, TorchProductScatter, TorchSymmetric
from shmemkit.memory import as_dtype


class FakeArray:
    def __init__(self, ptr, nbytes):
        self.data, self.nbytes = SimpleNamespace(ptr=ptr), nbytes


def fake_nccl(monkeypatch, **attributes):
    """CuPy's module, with what Nccl uses. -> what was called"""
    log = []

    class Communicator:
        def __init__(self, n_ranks, number, rank):
            log.append((n_ranks, number, rank))

        def allGather(self, *args):
            log.append(args)

        def destroy(self):
            log.append("destroy")

    module = SimpleNamespace(
        **{"available": True, "NCCL_UINT8": 1, "NcclError": OSError, "NcclCommunicator": Communicator}
        | {"get_unique_id": lambda: (1, 2)}
        | attributes
    )
    monkeypatch.setattr(nccl_peer, "gc", SimpleNamespace(collect=lambda: log.append("collect")))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=module))
    return log


def gpu_world(rank):
    comm = SimpleNamespace(bcast=lambda value, root: value or (1, 2))
    stream = SimpleNamespace(ptr=77)
    backend = SimpleNamespace(name="nvshmem", address=lambda array: array.data.ptr)
    return SimpleNamespace(backend=backend, comm=comm, rank=rank, n_ranks=4, stream=stream)


@pytest.mark.parametrize("rank", [0, 3])
def test_nccl_is_called_with_bytes_on_the_stream_of_the_world(rank, monkeypatch):
    log = fake_nccl(monkeypatch)
    nccl = Nccl(gpu_world(rank))
    for x, out in ((10, 20), (30, 40)):
        case = SimpleNamespace(x=FakeArray(x, 64), output=lambda out=out: FakeArray(out, 256), segment=64)
        case.nccl = functools.partial(cases.AllGatherCase.nccl, case)
        nccl.start(case)
        nccl.call()
        nccl.stop()
    nccl.close()
    assert log == [(4, (1, 2), rank), (10, 20, 64, 1, 77), (30, 40, 64, 1, 77), "collect", "destroy"]


@pytest.mark.parametrize("dtype, number", [("float16", 6), ("float32", 7), ("bfloat16", 9)])
def test_nccl_sums_elements(dtype, number):
    log = []
    comm = SimpleNamespace(
        allReduce=lambda *args: log.append(args), reduceScatter=lambda *args: log.append(args)
    )
    case = SimpleNamespace(bytes=64, segment=16, dtype=as_dtype(dtype))
    for kind in (cases.AllReduceCase, cases.ReduceScatterCase):
        kind.nccl(case, comm, SimpleNamespace(NCCL_SUM=0), 10, 20, 77)
    assert log == [(10, 20, n // case.dtype.itemsize, number, 0, 77) for n in (64, 16)]


def test_nccl_exchanges_in_a_group():
    log = []
    comm = SimpleNamespace(
        send=lambda *args: log.append(("send", *args)), recv=lambda *args: log.append(("recv", *args))
    )
    nccl = SimpleNamespace(
        NCCL_UINT8=1, groupStart=lambda: log.append("start"), groupEnd=lambda: log.append("end")
    )
    cases.AllToAllCase.nccl(gpu_case(), comm, nccl, 1000, 2000, 77)
    calls = [
        (what, at + 16 * k, 16, 1, k, 77) for k in range(4) for what, at in (("send", 1000), ("recv", 2000))
    ]
    assert log == ["start", *calls, "end"]


@pytest.mark.parametrize("rank", [0, 2])
def test_nccl_broadcasts_and_gathers(rank):
    log = []
    comm = SimpleNamespace(
        **{name: lambda *args, name=name: log.append((name, *args)) for name in ("broadcast", "send", "recv")}
    )
    nccl = SimpleNamespace(NCCL_UINT8=1, groupStart=lambda: None, groupEnd=lambda: log.append("end"))
    case = SimpleNamespace(world=gpu_world(rank), segment=16, bytes=64)
    cases.BroadcastCase.nccl(case, comm, nccl, 1000, 2000, 77)
    cases.GatherCase.nccl(case, comm, nccl, 1000, 2000, 77)
    received = [("recv", 2000 + 16 * k, 16, 1, k, 77) for k in range(4)] if rank == 0 else []
    assert log == [("broadcast", 1000, 2000, 64, 1, 0, 77), ("send", 1000, 16, 1, 0, 77), *received, "end"]


def gpu_case():
    return SimpleNamespace(world=gpu_world(0), segment=16)


class FakeLibrary:
    """What ctypes.CDLL makes of a path: NVSHMEM or NCCL, whose versions the file's folder says."""

    def __init__(self, path):
        if "deleted" in path:
            raise OSError("no such file")
        self.numbers = [int(number) for number in path.split("/")[-2].split(".")]

    def nvshmemx_vendor_get_version_info(self, *results):
        for result, number in zip(results, self.numbers, strict=True):
            result._obj.value = number

    def ncclGetVersion(self, result):
        major, minor, patch = self.numbers
        result._obj.value = 10000 * major + 100 * minor + patch


def mapped(tmp_path, *paths):
    line = "7f00-7f10 r-xp 00000000 08:01 42                         {}\n"
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f10 rw-p 00000000 00:00 0 \n" + "".join(2 * line.format(path) for path in paths))
    return libraries.loaded(maps)


def test_loaded_libraries(monkeypatch, tmp_path):
    monkeypatch.setattr(ctypes, "CDLL", FakeLibrary)
    monkeypatch.setattr(sys, "path", ["", "/", "/home/u", "/home/u/env/site-packages"])
    site = "/home/u/env/site-packages"
    assert mapped(tmp_path, f"{site}/numpy/core.so", "/lib/libnccl-net.so") == {}
    found = mapped(tmp_path, f"{site}/nvshmem/3.8.0/libnvshmem_host.so.3", "/usr/lib/2.28.9/libnccl.so.2")
    assert found == {
        "NVSHMEM library": "3.8.0",
        "file of the NVSHMEM library": "nvshmem/3.8.0/libnvshmem_host.so.3",
        "NCCL library": "2.28.9",
        "file of the NCCL library": "/usr/lib/2.28.9/libnccl.so.2",
    }
    gone = "/libnccl.so (deleted)"
    found = mapped(tmp_path, f"{site}/2.28.9/libnccl.so.2", "/a b/2.27.3/libnccl.so.2", gone)
    assert found["NCCL library"] == "2.27.3 and 2.28.9 and unknown"
    files = "libnccl.so.2 and 2.28.9/libnccl.so.2 and libnccl.so (deleted)"
    assert found["file of the NCCL library"] == files


def test_the_loaded_nvshmem():
    core = pytest.importorskip("nvshmem.core")
    version = core.get_version().libnvshmem_version  # loads the library
    assert libraries.loaded()["NVSHMEM library"] == version


def test_results_name_what_was_loaded(monkeypatch):
    monkeypatch.setattr(libraries, "loaded", lambda: {"NVSHMEM library": "3.8.0"})
    FakeTorch(monkeypatch)
    found = sk.emu.run(lambda: results.Results(sk.init(), []).as_dict()["versions"], 1)[0]
    assert found["NVSHMEM library"] == "3.8.0" and found["NCCL that PyTorch was built with"] == "2.28.9"
    assert not {"nvidia-nvshmem-cu13", "nvidia-nccl-cu13", "nccl"} & set(found)


def failing(*_):
    raise OSError("duplicate GPU")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"available": False}, "pip install nvidia-nccl-cu13"),
        ({"NcclCommunicator": failing}, "duplicate GPU"),
    ],
)
def test_no_nccl_is_a_refusal(attributes, message, monkeypatch):
    fake_nccl(monkeypatch, **attributes)
    nccl = Nccl(gpu_world(0))
    with pytest.raises(ValueError, match=message):
        nccl.start(SimpleNamespace())
    nccl.close()


@pytest.mark.parametrize("contender", [TorchNccl, TorchSymmetric])
def test_no_pytorch_is_a_refusal(contender, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    torch = contender(gpu_world(0))
    with pytest.raises(ValueError, match="PyTorch is not installed.*pip install torch"):
        torch.start(SimpleNamespace())
    torch.close()


class FakeTorch:
    """What the bench uses of PyTorch: tensors are NumPy arrays, a graph is a list of calls, and NCCL is the
    host's allgather. All ranks of the emulator share it; `log` has (rank, what)."""

    uint8, int16, ops, bfloat16 = "uint8", "int16", None, as_dtype("bfloat16")
    Tensor = ()  # nothing is one
    is_grad_enabled = staticmethod(lambda: True)
    set_grad_enabled = staticmethod(lambda enabled: None)
    fails = ""  # the call that raises

    def __init__(self, monkeypatch):
        self.log, self.connected, self.streams, self.graphs = [], set(), {}, {}
        self.cuda = SimpleNamespace(
            set_device=lambda number: self.note("device", number),
            current_device=lambda: 5,
            ExternalStream=lambda ptr, device: ("stream", ptr, device),
            CUDAGraph=lambda: SimpleNamespace(calls=[]),
            stream=self.stream,
            graph=self.graph,
            nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        )
        symmetric = SimpleNamespace(
            empty=self.symmetric_empty,
            rendezvous=lambda x, g: self.note("symm", g),
            enable_symm_mem_for_group=lambda g: self.note("symm", g),
        )
        self.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)))
        self.distributed = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: self.rank in self.connected,
            init_process_group=self.connect,
            destroy_process_group=lambda: (self.note("destroy"), self.connected.remove(self.rank)),
            all_gather_into_tensor=self.all_gather,
            group=SimpleNamespace(WORLD=SimpleNamespace(group_name="all")),
            _symmetric_memory=symmetric,
        )
        self.ops = SimpleNamespace(
            symm_mem=SimpleNamespace(
                _low_contention_all_gather=self.gather_anew,
                fused_all_gather_matmul=self.gather_product,
                fused_matmul_reduce_scatter=self.product_scatter,
            ),
            _c10d_functional=SimpleNamespace(wait_tensor=lambda x: x),
        )
        monkeypatch.setitem(sys.modules, "torch", self)
        monkeypatch.setitem(sys.modules, "torch.distributed", self.distributed)
        monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", symmetric)

    rank = property(lambda self: sk.current().rank)
    device = staticmethod(lambda kind, number: (kind, number))
    from_dlpack = staticmethod(lambda array: array)

    def note(self, *what):
        if what[0] == self.fails:
            raise RuntimeError(f"no {what[0]}")
        self.log.append((self.rank, *what))

    @contextlib.contextmanager
    def stream(self, stream):
        self.streams[self.rank] = stream
        yield
        del self.streams[self.rank]

    @contextlib.contextmanager
    def graph(self, graph, stream):
        self.note("capture")
        with self.stream(stream):
            self.graphs[self.rank] = graph
            graph.replay = lambda: [call() for call in graph.calls]
            yield
            del self.graphs[self.rank]

    def connect(self, backend, init_method, rank, world_size, device_id):
        assert (backend, rank, world_size, device_id) == ("nccl", self.rank, 2, ("cuda", 3))
        self.note("connect", init_method)
        self.connected.add(rank)

    def all_gather(self, out, x):
        assert self.streams[self.rank] == ("stream", 77, 3) and out.dtype == x.dtype == "uint8"
        if graph := self.graphs.get(self.rank):
            graph.calls.append(lambda: self.gather_into(out, x))
        else:
            self.gather_into(out, x)
        self.note("gather")

    def gather_into(self, out, x):
        out[:] = np.concatenate(sk.current().host_allgather(x.copy()))

    def gather_anew(self, x, group):
        assert group == "all"
        out = np.zeros(2 * x.size, "uint8")
        self.all_gather(out, x)
        return out

    def matmul(self, x, b, out):
        assert self.streams[self.rank] == ("stream", 77, 3) and not self.backends.cuda.matmul.allow_tf32
        self.note("matmul")
        out[:] = x.astype("float32") @ b.astype("float32")

    def gather_product(self, x, weights, gather_dim, group, return_A):
        assert (gather_dim, group, return_A) == (0, "all", False) and group == "all"
        self.note("fused")
        rows = np.concatenate(sk.current().host_allgather(x.copy())).astype("float32")
        return None, [(rows @ b.astype("float32")).astype(x.dtype) for b in weights]

    def product_scatter(self, x, b, op, scatter_dim, group):
        assert (op, scatter_dim, group) == ("sum", 0, "all")
        self.note("fused")
        parts = sk.current().host_allgather(x.astype("float32") @ b.astype("float32"))
        return np.split(sum(parts), len(parts))[self.rank].astype(x.dtype)

    def symmetric_empty(self, nbytes, dtype, device):
        assert device == ("cuda", 5)
        tensor = np.zeros(nbytes, dtype).view(Tensor)
        return tensor


class Tensor(np.ndarray):
    def copy_(self, other):
        self[:] = other


def as_of_gpus(world):
    """A World of the emulator, to a contender as one of GPUs."""
    xp = SimpleNamespace(**vars(np), cuda=SimpleNamespace(Device=lambda: SimpleNamespace(id=3)))
    stream, backend = SimpleNamespace(ptr=77), SimpleNamespace(name="nvshmem", address=world.backend.address)
    return SimpleNamespace(
        rank=world.rank, n_ranks=world.n_ranks, comm=world.comm, xp=xp, stream=stream, backend=backend
    )


def with_torch(torch, *kinds, iters=2):
    """Measure what PyTorch does on the emulator's ranks. -> [(microseconds, note), ...], of each of `kinds`
    at two sizes"""

    def main():
        world = sk.init()
        gpus = as_of_gpus(world)
        contenders, found = [kind(gpus) for kind in kinds], []
        for size in (64, 256):
            case = cases.AllGatherCase(world, size, np.dtype("uint8"))
            case.make()
            timer = sk.Timer(world, iters)
            found += [measure.measure(world, timer, case, contender) for contender in contenders]
        for contender in contenders:
            contender.close()
        return found

    first, second = sk.emu.run(main, 2)
    assert [note for _, note in first] == [note for _, note in second]
    return first


def test_pytorch(monkeypatch):
    torch = FakeTorch(monkeypatch)
    found = with_torch(torch, TorchNccl, TorchSymmetric)
    assert all(us > 0 and note == "" for us, note in found)
    mine = [what for rank, *what in torch.log if rank == 1]
    assert [what for what in mine if what[0] == "connect"] == [["connect", mine[1][1]]]
    assert mine[0] == ["device", 3] and mine[1][1].startswith("tcp://127.0.0.1:")
    assert [what for what in torch.log if what[1] == "connect"][0][2] == mine[1][1]  # of rank 0, too
    measured = ["gather", "capture", "gather", "gather"]
    assert [what[0] for what in mine[2:]] == [*(measured + ["symm"] + measured) * 2, "destroy"]
    assert not torch.connected and not torch.streams


@pytest.mark.parametrize("fails", ["connect", "gather", "capture"])
def test_what_pytorch_refuses_is_a_row(fails, monkeypatch):
    torch = FakeTorch(monkeypatch)
    torch.fails = fails
    found = with_torch(torch, TorchNccl)
    assert found == [(None, f"refused: RuntimeError: no {fails}")] * 2


@pytest.mark.parametrize("kind", [TorchNccl, TorchSymmetric])
def test_wrong_results_of_pytorch_are_found(kind, monkeypatch):
    torch = FakeTorch(monkeypatch)
    monkeypatch.setattr(torch, "gather_into", lambda out, x: None)
    assert all(note.startswith("wrong") for _, note in with_torch(torch, kind))
    assert all(us is not None for us, _ in with_torch(torch, kind))


def test_ranks_of_several_hosts_meet_at_the_first(monkeypatch):
    torch = FakeTorch(monkeypatch)
    monkeypatch.setattr("socket.gethostname", lambda: f"node{sk.current().rank}")
    with_torch(torch, TorchNccl)
    assert {what[2].rpartition(":")[0] for what in torch.log if what[1] == "connect"} == {"tcp://node0"}


# ---- layers


class Communicator:
    """NCCL's, between the emulator's ranks, for bfloat16 sums: it gets addresses."""

    def __init__(self, n_ranks, number, rank):
        self.n_ranks, self.rank = n_ranks, rank

    def memory(self, address, count, dtype):
        size = count * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)

    def allGather(self, x, out, count, number, stream):
        assert (number, stream) == (1, 77)
        parts = sk.current().host_allgather(self.memory(x, count, "uint8").copy())
        self.memory(out, self.n_ranks * count, "uint8")[:] = np.concatenate(parts)

    def allReduce(self, x, out, count, number, op, stream):
        assert (number, stream) == (cases.NCCL_TYPES["bfloat16"], 77)
        mine = self.memory(x, count, as_dtype("bfloat16")).astype("float32")
        self.memory(out, count, as_dtype("bfloat16"))[:] = sum(sk.current().host_allgather(mine))

    def reduceScatter(self, x, out, count, number, op, stream):
        whole = np.empty(self.n_ranks * count, as_dtype("bfloat16"))
        self.allReduce(x, whole.ctypes.data, whole.size, number, op, stream)
        self.memory(out, count, whole.dtype)[:] = np.split(whole, self.n_ranks)[self.rank]

    def destroy(self):
        pass


def layers(op):
    """Measure a layer's parts and all of it, as if on GPUs, with ours among them. -> [(method, note), ...]"""

    def main():
        world, dtype = sk.init(), as_dtype("bfloat16")
        gpus = as_of_gpus(world)
        if op == "ag_gemm":
            product = ag_gemm.Product(world, (12, 5, 6), dtype)
            between = ag_gemm.Gathering(product)
            both = ag_gemm.Both(product, between)
            ours = [ag_gemm.Ours(world, "sequential"), TorchGatherProduct(gpus)]
        else:
            product = gemm.GemmCase(world, (6, 5, 12), dtype)
            between = cases.CASES[gemm_reduce.OPS[op][0]](world, 60, dtype, unit=1)
            both = gemm_reduce.Both(op, product, between)
            ours = [gemm_reduce.Ours(world, "sequential"), TorchProductScatter(gpus)]
        pairs = [(product, gemm.Cublas(gpus)), (between, Nccl(gpus)), (both, InTurn(gpus))]
        pairs += [(both, contender) for contender in ours[: 1 if op == "gemm_ar" else 2]]
        found = []
        for _ in range(2):  # they can be used again
            for case in (product, between, both):
                case.make()
            times = measure.measure_all(world, sk.Timer(world, 3, 2), pairs)
            found += [(c.method, us and note) for (_, c), (us, note) in zip(pairs, times, strict=True)]
        for _, contender in pairs:
            contender.close()
        return found

    first, second = sk.emu.run(main, 2)
    assert first == second
    return first


OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
FUSED = {"ag_gemm": [results.TORCH_AG_GEMM], "gemm_rs": [results.TORCH_GEMM_RS], "gemm_ar": []}


@pytest.fixture
def gpu_libraries(monkeypatch):
    fake_nccl(monkeypatch, NcclCommunicator=Communicator, NCCL_SUM=0)
    return FakeTorch(monkeypatch)


@pytest.mark.parametrize("op", OPS)
def test_layers(op, gpu_libraries):
    names = [results.CUBLAS, results.NCCL, results.NCCL_CUBLAS, "sequential", *FUSED[op]]
    assert layers(op) == 2 * [(name, "") for name in names]
    assert not gpu_libraries.connected and not gpu_libraries.streams


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fails", ["matmul", "fused"])
def test_what_fails_of_layers_is_a_note(fails, op, gpu_libraries):
    gpu_libraries.fails = fails
    broken = [results.CUBLAS, results.NCCL_CUBLAS] if fails == "matmul" else FUSED[op]
    for name, note in layers(op):
        assert note == (None if name in broken else "")


@pytest.mark.parametrize("op", OPS)
def test_wrong_results_of_layers_are_found(op, gpu_libraries, monkeypatch):
    def late(x, b, out):
        out[:] = 0

    monkeypatch.setattr(gpu_libraries, "matmul", late)
    wrong = [note for name, note in layers(op) if name in (results.CUBLAS, results.NCCL_CUBLAS)]
    assert len(wrong) == 4 and all(note.startswith("wrong: relative error") for note in wrong)
