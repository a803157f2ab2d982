"""The bench on GPUs: ``mpirun -n 2 python3 -m pytest -m gpu -k test_gpu_bench`` (also 1 and 4)."""

import gpu
import pytest

import shmemkit as sk
from shmemkit.bench import launch, results, tune
from shmemkit.bench.__main__ import measure, parse
from shmemkit.bench.cases import CASES
from shmemkit.collectives import tuning

nvshmem = pytest.importorskip("nvshmem")
pytest.importorskip("rich")
pytestmark = pytest.mark.gpu


@pytest.fixture
def world():
    return gpu.world()


def measured(world, *arguments):
    found = measure(world, parse([*arguments, "--replays", "3"]))
    assert not found.failed, [row.note for row in found.rows if row.wrong]
    return found


def several_gpus(world):
    if world.n_ranks == 1:
        pytest.skip("needs two ranks or more")


@pytest.mark.parametrize("out", ["private", "symmetric"])
def test_all_gather_and_nccl(world, out):
    several_gpus(world)
    found = measured(world, "all_gather", "--sizes", "8K,1M,8M", "--vs", "nccl", "--out", out)
    ours = [row for row in found.rows if row.method != "nccl" and row.us]
    assert len(found.rows) == 3 * (len(sk.AllGather.methods) + 2)
    assert {row.method.split(",")[0] for row in ours} >= {"auto", "push_1d"}
    assert all(0 < row.us < 1e5 for row in ours)
    assert found.p2p_GBps > 1
    nccl = [row for row in found.rows if row.method == "nccl"]
    assert all(row.us or row.note.startswith("refused") for row in nccl)
    versions = found.as_dict()["versions"]
    assert versions["NVSHMEM library"] == nvshmem.core.get_version().libnvshmem_version
    if nccl[0].us:
        assert all(row.vs_plain for row in ours)
        assert versions["NCCL library"].count(".") == 2


@pytest.mark.parametrize("op", [*CASES, "barrier"])
def test_all_ways_of_nccl(world, op):
    """With ranks that share a GPU: NCCL 2.30 or newer, and NCCL_MULTI_RANK_GPU_ENABLE=1."""
    sizes = [] if op == "barrier" else ["--sizes", "8K,3M", "--iters", "2", "--methods", "auto"]
    found = measured(world, op, *sizes)
    rows = [row for row in found.rows if row.method in results.NCCL_WAYS]
    assert len(rows) == len(results.NCCL_WAYS) * (2 if sizes else 1)
    if rows[0].note:
        pytest.skip(rows[0].note)
    assert all(row.us > 0 and row.version and row.ran for row in rows)
    if world.n_ranks > 1 and op in ("all_gather", "all_reduce", "reduce_scatter"):  # which have such kernels
        windows = [row.ran for row in rows if row.method == "nccl_window"]
        assert all("Symk" in ran and "event" not in ran for ran in windows)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_layers_by_all_ways_of_nccl(world, op):
    found = measured(
        world, op, "--shapes", "512x1024x512,256x512x1024", "--iters", "2", "--methods", "sequential"
    )
    rows = [row for row in found.rows if row.method in results.NCCL_CUBLAS_WAYS]
    if rows[0].note:
        pytest.skip(rows[0].note)
    assert all(row.us > 0 and row.version and row.ran for row in rows) and len(rows) == 8
    ours = [row for row in found.rows if row.method == "sequential"]
    assert all(row.vs_nccl and row.vs_plain for row in ours)


def test_pytorch(world):
    several_gpus(world)
    pytest.importorskip("torch")
    arguments = ("--sizes", "8K,8M", "--vs", "nccl,torch_nccl,torch_symm", "--methods", "push_1d")
    found = measured(world, "all_gather", *arguments)
    assert all(row.us or row.note.startswith("refused") for row in found.rows)
    through_torch = [row for row in found.rows if row.method == results.TORCH_NCCL]
    assert len(through_torch) == 2 and all(row.us and 1 < row.us < 1e5 for row in through_torch)
    assert all(row.vs_torch_nccl for row in found.rows if row.method == "push_1d")


def test_tune(world, tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    found = measured(world, "all_gather", "--tune", str(path), "--sizes", "8K,8M")
    if world.rank == 0:
        tuning.update(path, "all_gather", tune.entry_of(world, found.rows, sk.AllGather.methods))
    monkeypatch.setenv("SHMEMKIT_TUNING", str(path))
    gather = sk.AllGather(world, 16 << 20)
    assert gather.refused == {}
    for out in (None, "symmetric"):
        at_8k = [row for row in found.rows if row.us and row.bytes <= 8192 and row.out == out]
        fastest = min(at_8k, key=lambda row: row.us)
        assert gather.method_for(8192, out is not None) == fastest.method
    gather.free()


@pytest.mark.parametrize("op", ["gemm", "ag_gemm", "gemm_rs", "gemm_ar"])
def test_products(world, op):
    if op != "gemm":
        several_gpus(world)
    found = measured(world, op, "--shapes", "1024x2048x1024,256x1024x512")
    assert found.method == results.METHOD_OF_ROUNDS
    assert all(0 < row.us < 1e5 if row.us else row.note.startswith("refused") for row in found.rows)
    methods = {row.method: row for row in found.rows if not row.alone}
    parts = [(row.alone, row.method) for row in found.rows if row.alone and row.us]
    assert methods["auto"].us and (op == "gemm") == (not parts)
    if op != "gemm":
        assert len({part for part, _ in parts}) == 2
        assert all(row.overlap for row in methods.values() if row.us)
        assert not methods[results.NCCL_CUBLAS].us or methods["auto"].vs_plain


@pytest.mark.parametrize(
    ("op", "shape"), [("flash_decode", "1024x4x4"), ("attention_combine", "2x16x128"), ("rms_norm", "8x4096")]
)
def test_attention_and_norms(world, op, shape):
    """All that is compared runs, and is right, but for what is not installed."""
    pytest.importorskip("torch")
    found = measured(world, op if op != "rms_norm" else "all_reduce_rms_norm", "--shapes", shape)
    refused = [row for row in found.rows if not row.us]
    assert all("not installed" in row.note or world.n_ranks == 1 for row in refused), refused
    assert not [row for row in found.rows if row.us and row.note]
    if world.n_ranks > 1:
        assert all(row.vs_torch for row in found.rows if row.us and not row.alone)
    if op == "flash_decode":
        ours = found.rows[-1]
        assert ours.method == "FlashDecode" and 0 < ours.of_memory < 1


def test_p2p(world):
    several_gpus(world)
    found = measured(world, "p2p", "--sizes", "8,64K,64M", "--blocks", "4,64")
    assert all(row.us and not row.note for row in found.rows)
    latencies = [row.us for row in found.rows if row.op == "latency"]
    assert len(latencies) == 2 and all(0.1 < us < 1e4 for us in latencies)
    # A method that did nothing would be faster than any link.
    large = [row.bus_GBps for row in found.rows if row.bytes == 64 << 20]
    assert len(large) == 7 and all(1 < rate < 5000 for rate in large)


def test_first_launch(world):
    if world.n_ranks > 1:
        pytest.skip("of one rank")
    found = measured(world, "launch", "--batches", "1", "--batch-size", "1", "--first")
    seconds = {row.method: row.us / 1e6 for row in found.rows if row.op == "first_launch"}
    assert list(seconds) == ["cache off", "cache cold", "cache warm"]
    assert 0.01 < seconds["cache warm"] < seconds["cache off"] < 200


def test_launch(world):
    found = measured(world, "launch", "--batches", "3", "--batch-size", "50")
    by_method = {row.method: row for row in found.rows}
    assert by_method[results.DRIVER].vs_driver == 1.0
    assert 0.5 < by_method["sk.bind: b()"].vs_driver < 3
    gather = by_method[launch.GATHER]
    assert gather.note.startswith("refused") if gather.note else 0.5 < gather.vs_driver < 5
    assert found.rows[-1].op == "graph" and 0.05 < found.rows[-1].us < 100
