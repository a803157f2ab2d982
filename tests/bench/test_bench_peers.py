"""What the bench compares with: NCCL and PyTorch, here stand-ins for them."""

import contextlib
import ctypes
import mmap
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fast import slow

import shmemkit as sk
from shmemkit.bench import ag_gemm, cases, gemm, gemm_reduce, libraries, measure, product_cases, results
from shmemkit.bench import nccl as nccl_calls
from shmemkit.bench.layers import InTurn
from shmemkit.bench.nccl import Nccl, nodes_of
from shmemkit.bench.torch_peer import TorchGatherProduct, TorchNccl, TorchProductScatter, TorchSymmetric
from shmemkit.runtime.symmetric_memory import as_dtype

UNSET = -(2**31)  # NCCL_CONFIG_UNDEF_INT


class FakeStream(contextlib.nullcontext):
    ptr = 77


def memory(address, count, dtype):
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


class FakeNccl:
    """libnccl.so.2 between the emulator's ranks, as ctypes shows it: of addresses and numbers. `log` has the
    calls of all ranks: (rank, name, arguments)."""

    TYPES = {1: "uint8", 6: "float16", 7: "float32", 9: as_dtype("bfloat16")}

    def __init__(self, monkeypatch, path, code=23203, fails=(), missing=()):
        self.code, self.fails, self.missing, self.log, self.kept = code, fails, missing, [], {}
        self.configs, self.groups = {}, {}
        self.ncclGetErrorString, self.ncclGetLastError = (
            (lambda status: b"invalid usage"),
            (lambda comm: b"more"),
        )
        real = ctypes.CDLL
        monkeypatch.setattr(ctypes, "CDLL", lambda name: self if name == path else real(name))

    def __getattr__(self, attribute):
        name = attribute.removeprefix("nccl")
        if name == attribute or name in self.missing:
            raise AttributeError(attribute)

        def call(*arguments):
            rank = sk.current().rank if sk.current() else None
            self.log.append((rank, name, arguments))
            if name in self.fails:
                return 5
            getattr(self, f"_{name}")(*arguments)
            return 0

        setattr(self, attribute, call)
        return call

    def calls(self, name, rank=0):
        return [arguments for of, called, arguments in self.log if (of, called) == (rank, name)]

    def _GetVersion(self, code):
        code._obj.value = self.code

    def _GetUniqueId(self, number):
        number._obj.internal[3] = 5

    def _CommInitRankConfig(self, handle, n_ranks, number, rank, config):
        world = sk.current()
        assert (n_ranks, rank, number.internal[3]) == (world.n_ranks, world.rank, 5)
        handle._obj.value = 1000 + len(self.calls("CommInitRankConfig", rank))
        self.configs[rank, handle._obj.value] = config and config._obj

    def _CommDestroy(self, handle):
        del self.configs[sk.current().rank, handle.value]

    def _MemAlloc(self, address, size):
        block = ctypes.create_string_buffer(size)
        address._obj.value = ctypes.addressof(block)
        self.kept[ctypes.addressof(block)] = block

    def _MemFree(self, address):
        del self.kept[address]

    def _CommWindowRegister(self, comm, address, size, window, flags):
        assert flags == 1 and len(self.kept[address]) == size
        sk.current().host_barrier()
        window._obj.value = 5

    def _CommWindowDeregister(self, comm, window):
        assert window.value == 5

    def _gather(self, x, count, number):
        return sk.current().host_allgather(memory(x, count, self.TYPES[number]).copy())

    def _AllGather(self, x, out, count, number, comm, stream):
        memory(out, count * sk.current().n_ranks, "uint8")[:] = np.concatenate(self._gather(x, count, number))

    def _AllReduce(self, x, out, count, number, op, comm, stream):
        assert op == 0
        total = sum(part.astype("float32") for part in self._gather(x, count, number))
        memory(out, count, self.TYPES[number])[:] = total

    def _ReduceScatter(self, x, out, count, number, op, comm, stream):
        n = sk.current().n_ranks
        whole = np.empty(count * n, self.TYPES[number])
        self._AllReduce(x, whole.ctypes.data, whole.size, number, op, comm, stream)
        memory(out, count, whole.dtype)[:] = np.split(whole, n)[sk.current().rank]

    def _Broadcast(self, x, out, count, number, root, comm, stream):
        memory(out, count, "uint8")[:] = self._gather(x, count, number)[root]

    def _AlltoAll(self, x, out, count, number, comm, stream):
        world = sk.current()
        parts = self._gather(x, count * world.n_ranks, number)
        memory(out, count * world.n_ranks, "uint8")[:] = np.concatenate(
            [part[world.rank * count :][:count] for part in parts]
        )

    def _Gather(self, x, out, count, number, root, comm, stream):
        parts = self._gather(x, count, number)
        if sk.current().rank == root:
            memory(out, count * len(parts), "uint8")[:] = np.concatenate(parts)

    def _Scatter(self, x, out, count, number, root, comm, stream):
        world = sk.current()
        whole = world.host_allgather(
            memory(x, count * world.n_ranks, "uint8").copy() if world.rank == root else None
        )[root]
        memory(out, count, "uint8")[:] = whole[world.rank * count :][:count]

    def _Reduce(self, x, out, count, number, op, root, comm, stream):
        total = sum(part.astype("float32") for part in self._gather(x, count, number))
        if sk.current().rank == root:
            memory(out, count, self.TYPES[number])[:] = total

    def _GroupStart(self):
        self.groups[sk.current().rank] = []

    def _Send(self, address, count, number, rank, comm, stream):
        self.groups[sk.current().rank].append((address, count, rank, True))

    def _Recv(self, address, count, number, rank, comm, stream):
        self.groups[sk.current().rank].append((address, count, rank, False))

    def _GroupEnd(self):
        world = sk.current()
        mine = self.groups.pop(world.rank)
        sent = {to: memory(address, size, "uint8").copy() for address, size, to, sends in mine if sends}
        of_ranks = world.host_allgather(sent)
        for address, size, source, sends in mine:
            if not sends:
                memory(address, size, "uint8")[:] = of_ranks[source][world.rank]


def measured_by(way, path, n_ranks, *kinds, sizes=(96, 960), dtype="bfloat16"):
    """Measure NCCL's calls in one way on ranks of the emulator. -> [(note, version), ...], in turn"""

    def main():
        world = sk.init()
        contender, found = Nccl(as_of_gpus(world), way, path), []
        for kind in kinds:
            for size in sizes:
                case = kind(world, size, as_dtype(dtype))
                case.make()
                us, note = measure.measure(world, sk.Timer(world, 2, 2), case, contender)
                found.append((note, us and contender.version))
        contender.close()
        return found

    first, *others = sk.emu.run(main, n_ranks)
    assert all(other == first for other in others)
    return first


CASES = tuple(
    case
    for case in cases.CASES.values()
    if (case.call or case.what.__name__) in nccl_calls.Library.SIGNATURES
)


@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize("n_ranks", [1, 2, *slow(3)])
@pytest.mark.parametrize("way", results.NCCL_WAYS)
def test_nccl(way, n_ranks, monkeypatch, tmp_path):
    nccl = FakeNccl(monkeypatch, str(tmp_path))
    assert measured_by(way, str(tmp_path), n_ranks, *CASES) == len(CASES) * 2 * [("", "2.32.3")]
    assert not nccl.configs and not nccl.kept  # all is given back
    assert all(arguments[-1] == 77 for arguments in nccl.calls("AllReduce"))
    windows = way in ("nccl_window", "nccl_ce")
    # Two blocks, of which each case gets its arrays anew.
    assert len(nccl.calls("MemAlloc")) == len(nccl.calls("MemFree")) == (0 if way == "nccl" else 2)
    assert len(nccl.calls("CommWindowRegister")) == len(nccl.calls("CommWindowDeregister")) == 2 * windows


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nccl_of_other_dtypes(dtype, monkeypatch, tmp_path):
    FakeNccl(monkeypatch, str(tmp_path))
    assert set(measured_by("nccl_window", str(tmp_path), 2, *CASES, dtype=dtype)) == {("", "2.32.3")}


@pytest.mark.parametrize(
    ("way", "code", "expected"),
    [
        ("nccl", 23203, None),
        ("nccl_graph", 23203, (88, 22907, UNSET, 1)),
        ("nccl_window", 22907, (88, 22907, UNSET, 1)),
        ("nccl_ce", 23203, (88, 22907, 2, 1)),
        ("nccl_ce", 22809, (80, 22809, 2, 1)),  # the last one lies beyond the 80 bytes
    ],
)
def test_the_communicator_is_told_how_it_is_used(way, code, expected, monkeypatch, tmp_path):
    nccl, configs = FakeNccl(monkeypatch, str(tmp_path), code), []
    monkeypatch.setattr(
        nccl, "_CommDestroy", lambda handle: configs.append(nccl.configs.pop((0, handle.value)))
    )
    measured_by(way, str(tmp_path), 1, cases.AllReduceCase)
    (config,) = configs
    assert (config and (config.size, config.version, config.CTAPolicy, config.graphUsageMode)) == expected
    if config:
        assert (config.magic, config.blocking, config.netName) == (0xCAFEBEEF, UNSET, None)


def test_an_old_nccl(monkeypatch, tmp_path):
    newer = "AlltoAll", "Gather", "MemAlloc", "CommWindowRegister"
    nccl = FakeNccl(monkeypatch, str(tmp_path), 22703, missing=newer)
    kinds = cases.AllToAllCase, cases.GatherCase
    assert measured_by("nccl", str(tmp_path), 3, *kinds) == 4 * [("", "2.27.3")]
    assert nccl.calls("Send") and nccl.calls("Recv")
    for way in ("nccl_window", "nccl_ce"):
        ((note, version),) = set(measured_by(way, str(tmp_path), 3, *kinds))
        assert note == f"refused: {way} needs NCCL 2.28 or newer; this is 2.27.3. Name one by --nccl"
        assert version is None


@pytest.mark.parametrize("fails", ["CommInitRankConfig", "MemAlloc", "CommWindowRegister", "AllReduce"])
def test_what_nccl_refuses_is_a_row(fails, monkeypatch, tmp_path):
    nccl = FakeNccl(monkeypatch, str(tmp_path), fails=(fails,))
    assert measured_by("nccl_window", str(tmp_path), 2, cases.AllReduceCase) == 2 * [
        (f"refused: nccl{fails}: invalid usage: more", None)
    ]
    assert not nccl.kept and not nccl.configs


def test_no_window_is_a_row(monkeypatch, tmp_path):
    nccl = FakeNccl(monkeypatch, str(tmp_path))
    monkeypatch.setattr(nccl, "_CommWindowRegister", lambda *arguments: None)
    ((note, _),) = set(measured_by("nccl_ce", str(tmp_path), 2, cases.AllGatherCase))
    assert len(nccl.calls("MemAlloc")) == len(nccl.calls("MemFree")) == 2  # the second size tries again
    assert (
        note == "refused: NCCL makes no window here: it needs NCCL_CUMEM_ENABLE=1 and GPUs joined by NVLink"
    )


def test_a_communicator_that_is_kept_serves_the_next_command(monkeypatch, tmp_path):
    nccl, kept = FakeNccl(monkeypatch, str(tmp_path)), {}
    monkeypatch.setattr(nccl_calls, "kept", kept)

    def main():
        world, notes = sk.init(), []
        gpus = as_of_gpus(world)
        for size in (96, 960, 96):
            contender = Nccl(gpus, "nccl_window", str(tmp_path))
            case = cases.AllGatherCase(world, size, as_dtype("bfloat16"))
            case.make()
            notes.append(measure.measure(world, sk.Timer(world, 2, 2), case, contender)[1])
            contender.close()
        world.host_barrier()
        nccl_calls.kept = None  # the end
        for contender in [each for each in kept.values() if each.world is gpus]:
            contender.close()
        return notes

    assert sk.emu.run(main, 2) == 2 * [["", "", ""]]
    assert len(nccl.calls("CommInitRankConfig")) == len(nccl.calls("CommDestroy")) == 1
    assert len(nccl.calls("MemAlloc")) == len(nccl.calls("MemFree")) == 2
    assert not nccl.configs and not nccl.kept


def test_no_nccl_is_a_row(tmp_path):
    ((note, _),) = set(measured_by("nccl", str(tmp_path / "libnccl.so.2"), 2, cases.AllGatherCase))
    assert note.startswith("refused: NCCL cannot be loaded") and "pip install nvidia-nccl-cu13" in note


def test_a_library_that_is_not_nccl_is_a_row():
    ((note, _),) = set(measured_by("nccl", "libm.so.6", 2, cases.AllGatherCase))
    assert note == "refused: NCCL of libm.so.6 has no ncclGetVersion. Name another one by --nccl"


def test_a_group_is_ended_when_a_call_in_it_fails(monkeypatch, tmp_path):
    nccl = FakeNccl(monkeypatch, str(tmp_path), 22703, fails=("Send",))
    ((note, _),) = set(measured_by("nccl", str(tmp_path), 2, cases.AllToAllCase))
    assert note == "refused: ncclSend: invalid usage: more"
    assert len(nccl.calls("GroupStart")) == len(nccl.calls("GroupEnd")) == 2  # of two sizes


def test_what_fails_at_the_end_does_not_lose_results(monkeypatch, tmp_path, capsys):
    FakeNccl(monkeypatch, str(tmp_path), fails=("CommDestroy",))
    assert measured_by("nccl", str(tmp_path), 2, cases.AllGatherCase) == 2 * [("", "2.32.3")]
    assert "nccl cannot be closed: ncclCommDestroy: invalid usage" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["nccl", *slow(*results.NCCL_WAYS[1:])])
def test_wrong_results_of_nccl_are_found(way, monkeypatch, tmp_path):
    nccl = FakeNccl(monkeypatch, str(tmp_path))
    monkeypatch.setattr(nccl, "_AllGather", lambda *arguments: None)
    notes = [note for note, _ in measured_by(way, str(tmp_path), 2, cases.AllGatherCase)]
    assert all(note.startswith("wrong: on rank 0") for note in notes) and len(notes) == 2


def test_what_runs_in_a_graph(monkeypatch):
    """The nodes of a graph of two calls, as cuda.bindings tells them."""
    names = {1: b"_Z17ncclDevKernel_FooPi", 2: b"nvjet"}
    nodes = [("EVENT_RECORD", 0), ("KERNEL", 1), ("KERNEL", 1), ("MEMCPY", 0), ("KERNEL", 2), ("KERNEL", 2)]

    def nodes_in(graph, count=0):
        return 0, nodes[:count], len(nodes)

    driver = SimpleNamespace(
        CUgraph=lambda handle: handle,
        cuGraphGetNodes=nodes_in,
        cuGraphNodeGetType=lambda node: (0, SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{node[0]}")),
        cuGraphKernelNodeGetParams=lambda node: (
            0,
            SimpleNamespace(func=node[1] == 2 and 2, kern=node[1], gridDimX=8),
        ),
        cuFuncGetName=lambda function: (0, names[function]),
        cuKernelGetName=lambda kernel: (0, names[kernel]),
    )
    for name, module in {"cuda": None, "cuda.bindings": SimpleNamespace(driver=driver)}.items():
        if module or name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, module or SimpleNamespace())
    text = "0.5 event_record, ncclDevKernel_Foo of 8 blocks, 0.5 memcpy, nvjet of 8 blocks"
    assert nodes_of(SimpleNamespace(graph=7), 2) == text


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


def test_results_name_what_was_loaded(monkeypatch, tmp_path):
    real = ctypes.CDLL
    ours = lambda name: (FakeLibrary if str(tmp_path) in str(name) else real)(name)  # noqa: E731
    monkeypatch.setattr(ctypes, "CDLL", ours)
    FakeTorch(monkeypatch)
    path = tmp_path / "3.8.0" / "libnvshmem_host.so.3"
    path.parent.mkdir()
    path.write_bytes(bytes(4096))
    with open(path, "rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # as a library is
    with held:
        found = sk.emu.run(lambda: results.Results(sk.init(), []).as_dict()["versions"], 1)[0]
    assert "3.8.0" in found["NVSHMEM library"].split(" and ")
    assert found["NCCL that PyTorch was built with"] == "2.28.9"
    assert not {"nvidia-nvshmem-cu13", "nvidia-nccl-cu13", "nccl"} & set(found)


@pytest.mark.parametrize("contender", [TorchNccl, TorchSymmetric])
def test_no_pytorch_is_a_refusal(contender, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    torch = contender(SimpleNamespace(backend=SimpleNamespace(name="nvshmem")))
    with pytest.raises(ValueError, match="PyTorch is not installed.*pip install torch"):
        torch.start(SimpleNamespace())
    torch.close()


class FakeTorch:
    """What the bench uses of PyTorch: tensors are NumPy arrays, a graph is a list of calls, and NCCL is the
    host's allgather. All ranks of the emulator share it; `log` has (rank, what)."""

    uint8, int8, int16, ops, bfloat16 = "uint8", "int8", "int16", None, as_dtype("bfloat16")
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
    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(id=3),
        UnownedMemory=lambda address, size, owner: (ctypes.c_char * size).from_address(address),
        MemoryPointer=lambda memory, offset: memory,
    )
    return SimpleNamespace(
        rank=world.rank,
        n_ranks=world.n_ranks,
        comm=world.comm,
        host_allgather=world.host_allgather,
        xp=SimpleNamespace(**vars(np), cuda=cuda),
        stream=FakeStream(),
        backend=SimpleNamespace(name="nvshmem", address=world.backend.address),
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
    measured = ["gather", "capture", "gather", "gather", "gather"]  # the last one is a single call
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


def layers(op, way, path):
    """Measure a layer's parts and all of it, as if on GPUs, with ours among them. -> [(method, note), ...]"""

    def main():
        world, dtype = sk.init(), as_dtype("bfloat16")
        gpus = as_of_gpus(world)
        if op == "ag_gemm":
            product = ag_gemm.Product(world, (4, 5, 4), dtype)
            between = ag_gemm.Gathering(product, 4, 4)
            both = ag_gemm.Both(product, between)
            ours = [measure.Ours(world, "sequential"), TorchGatherProduct(gpus)]
        else:
            product = product_cases.GemmCase(world, (4, 5, 6), dtype)
            between = cases.CASES[gemm_reduce.OPS[op][0]](world, 40, dtype, unit=1)
            both = gemm_reduce.Both(op, product, between)
            ours = [measure.Ours(world, "sequential"), TorchProductScatter(gpus)]
        pairs = [(product, gemm.Cublas(gpus)), (between, Nccl(gpus, way, path))]
        pairs.append((both, InTurn(gpus, way, path)))
        pairs += [(both, contender) for contender in ours[: 1 if op == "gemm_ar" else 2]]
        found = []
        for _ in range(2):  # they can be used again
            for case in (product, between, both):
                case.make()
            times = measure.measure_all(world, sk.Timer(world, 2, 1), pairs)
            found += [(c.method, us and note) for (_, c), (us, note) in zip(pairs, times, strict=True)]
        for _, contender in pairs:
            contender.close()
        return found

    first, second = sk.emu.run(main, 2)
    assert first == second
    return first


FUSED = {"ag_gemm": [results.TORCH_AG_GEMM], "gemm_rs": [results.TORCH_GEMM_RS], "gemm_ar": []}


@pytest.fixture
def torch(monkeypatch):
    return FakeTorch(monkeypatch)


@pytest.mark.each_value
@pytest.mark.parametrize("way", ["nccl", *slow(*results.NCCL_WAYS[1:])])
@pytest.mark.parametrize("op", slow("ag_gemm", "gemm_rs", "gemm_ar"))
def test_layers(op, way, torch, monkeypatch, tmp_path):
    nccl = FakeNccl(monkeypatch, str(tmp_path))
    names = [results.CUBLAS, way, results.nccl_cublas(way), "sequential", *FUSED[op]]
    assert layers(op, way, str(tmp_path)) == 2 * [(name, "") for name in names]
    assert not torch.connected and not torch.streams and not nccl.kept and not nccl.configs


@pytest.mark.each_value
@pytest.mark.parametrize("op", slow("ag_gemm", "gemm_rs", "gemm_ar"))
@pytest.mark.parametrize("fails", [*slow("matmul"), "fused"])
def test_what_fails_of_layers_is_a_note(fails, op, torch, monkeypatch, tmp_path):
    FakeNccl(monkeypatch, str(tmp_path))
    torch.fails = fails
    in_turn = results.nccl_cublas("nccl_window")
    broken = [results.CUBLAS, in_turn] if fails == "matmul" else FUSED[op]
    for name, note in layers(op, "nccl_window", str(tmp_path)):
        assert note == (None if name in broken else "")


@pytest.mark.slow
@pytest.mark.parametrize("op", ["ag_gemm", *slow("gemm_rs", "gemm_ar")])
def test_wrong_results_of_layers_are_found(op, torch, monkeypatch, tmp_path):
    def late(x, b, out):
        out[:] = 0

    FakeNccl(monkeypatch, str(tmp_path))
    monkeypatch.setattr(torch, "matmul", late)
    found = layers(op, "nccl", str(tmp_path))
    wrong = [note for name, note in found if name in (results.CUBLAS, results.NCCL_CUBLAS)]
    assert len(wrong) == 4 and all(note.startswith("wrong: relative error") for note in wrong)
