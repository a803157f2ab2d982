"""``python -m shmemkit.bench`` on the emulator: what it measures, checks and writes; times mean nothing."""

import contextlib
import functools
import gc
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fast import slow
from hypothesis import given
from hypothesis import strategies as st
from ptx import AMPERE, HOPPER, compile_ptx, resources

import shmemkit as sk
from shmemkit.bench import cases, first_launch, launch, measure, results
from shmemkit.bench.__main__ import main, parse
from shmemkit.bench.kernels import GPU_KERNELS
from shmemkit.bench.refusal import Refused, agreed, allocated
from shmemkit.bench.sizes import parse_size, parse_sizes, size_text
from shmemkit.collectives import tuning
from shmemkit.collectives.registry import collectives
from shmemkit.tools import ledger

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

MULTICAST_OFF = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
GPU_ONLY = ["nccl", "nccl through torch", "torch symm_mem"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Tables are not wrapped."""
    monkeypatch.setenv("COLUMNS", "120")


def run(n, *arguments, races=True, **options):
    """-> (exit status, printed)"""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        statuses = sk.emu.run(lambda: main(list(arguments)), n, races=races, **options)
    assert len(set(statuses)) == 1
    return statuses[0], printed.getvalue()


def measured(tmp_path, n, *arguments, status=0, **options):
    """-> (what the JSON file has, printed)"""
    path = tmp_path / "results.json"
    found, printed = run(n, *arguments, "--json", str(path), **options)
    assert found == status
    return json.loads(path.read_text()), printed


# ---- sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8K:256M", ["8K", "64K", "512K", "4M", "32M", "256M"]),
        ("8K,1M", ["8K", "1M"]),
        ("8K:64K:2", ["8K", "16K", "32K", "64K"]),
        ("8K:100K", ["8K", "64K"]),
        ("1G", ["1G"]),
        (" 8k : 64K , 8K,1mb, 1MiB", ["8K", "64K", "1M"]),
        ("100:100", ["100"]),
    ],
)
def test_sizes(text, sizes):
    assert [size_text(size) for size in parse_sizes(text)] == sizes


@pytest.mark.parametrize(
    "text", ["", "8X", "-8K", "8.5K", "0", "8K,", "8K:", "8K:1M:1", "8K:1M:2:2", "1M:8K", "8K:1M:x"]
)
def test_sizes_that_are_not_allowed(text):
    with pytest.raises(ValueError, match="size"):
        parse_sizes(text)


@given(st.integers(1, 1 << 40), st.sampled_from(["", "K", "M", "G"]))
def test_size_is_read_as_written(number, unit):
    n_bytes = parse_size(f"{number}{unit}")
    assert n_bytes == number << {"": 0, "K": 10, "M": 20, "G": 30}[unit]
    if number < 1000:
        assert size_text(n_bytes) == f"{number}{unit}"


# ---- all ranks or none


@pytest.mark.parametrize("refusing", [[], [1], [0, 2]])
def test_what_one_rank_refuses_none_does(refusing):
    def main():
        world = sk.init()

        def action():
            if world.rank in refusing:
                raise ValueError(f"not on rank {world.rank}")
            return world.rank

        try:
            return agreed(world, action)
        except Refused as error:
            return str(error)

    expected = [f"not on rank {refusing[0]}"] * 3 if refusing else [0, 1, 2]
    assert sk.emu.run(main, 3) == expected


def test_without_memory_nothing_is_left():
    def main():
        with sk.init() as world:
            makers = [functools.partial(world.zeros, n, "uint8") for n in (3 << 18, 3 << 18, 8)]
            with pytest.raises(Refused, match="symmetric heap is full"):
                allocated(world, *makers)
            assert [array.size for array in allocated(world, *makers[1:])] == [3 << 18, 8]

    sk.emu.run(main, 2, heap_size=1 << 20)


# ---- the timer


@pytest.mark.parametrize(("n_bytes", "iters"), [(8, 20), (4 << 20, 20), ((4 << 20) + 1, 5)])
def test_iterations(n_bytes, iters):
    world = FakeGpu(0, ())
    assert sk.Timer(world).iters_for(n_bytes) == iters and sk.Timer(world).replays == 20
    assert sk.Timer(world, 7, 3).iters_for(n_bytes) == 7 and sk.Timer(world, 7, 3).replays == 3


class FakeGpu(sk.World):
    """A World whose stream runs what it is given on a clock of its own: call k of a replay takes k units."""

    ptr = 7  # of its stream

    def __init__(self, rank, durations):
        self.now, self.durations, self.captured, self.log = 0.0, iter(durations), None, []
        self.finalized = False
        self.backend, self.stream, self.rank = SimpleNamespace(name="nvshmem"), self, rank
        self.xp = SimpleNamespace(
            cuda=SimpleNamespace(Event=self.event, get_elapsed_time=lambda a, b: b.at - a.at)
        )

    def event(self):
        return _Event(self)

    def synchronize(self):
        self.log.append("synchronize")

    def host_allgather(self, value):
        if isinstance(value, str):  # what all ranks must give
            self.log.append("barrier")
            return [value, value]
        return [value, [5.0 * 4 for _ in value]]

    def begin_capture(self):
        self.captured = 0

    def call(self):
        self.captured += 1

    def end_capture(self):
        count, self.captured = self.captured, None

        def launch(stream):
            self.log.append(count)
            self.now += next(self.durations)

        return SimpleNamespace(launch=launch)


class HotGpu(FakeGpu):
    """After so many replays its clock is lower."""

    def __init__(self, rank, cool):
        super().__init__(rank, ())
        self.cool = cool

    def barrier(self):
        self.log.append("meet")
        self.now += 100

    def replay(self, name, ms):
        def replay():
            self.log.append(name)
            self.cool -= 1
            self.now += ms if self.cool >= 0 else 1.25 * ms

        return replay


class _Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self, stream):
        self.at = self.gpu.now


@pytest.mark.parametrize(
    ("durations", "us"),
    [([900, 1, 2, 90], 500.0), ([900, 0.004, 0.008, 0.02], 5.0)],
    ids=["mine", "another rank's"],
)
def test_time_is_the_median_of_the_replays_and_the_maximum_of_the_ranks(durations, us):
    gpu = FakeGpu(0, durations)  # milliseconds per replay of 4 calls, the first of which is not timed
    timer = sk.Timer(gpu, 4, 3)
    replay = timer.capture(gpu.call, 4)
    assert gpu.log == []
    assert timer.time(replay, 4) == us
    assert gpu.log == ["synchronize", "barrier", 4, 4, 4, 4, "synchronize"]


def test_a_call_is_timed_by_its_own():
    """It has run once before, as its kernels must be compiled, and is then captured."""
    gpu, calls = FakeGpu(0, [900, 1, 2, 90]), []

    def call():
        calls.append(gpu.captured)
        if gpu.captured is not None:
            gpu.call()

    assert sk.Timer(gpu, replays=3)(call, iters=2) == 1000
    assert calls == [None, 0, 1]


def test_calls_with_tensors_are_captured(monkeypatch):
    """They go to PyTorch's current stream: while they are captured, that is the World's."""
    current, seen, waited = ["PyTorch's"], [], []

    class Stream:
        def __init__(self, address):
            self.address = address

        def wait_stream(self, other):
            waited.append(other)

    @contextlib.contextmanager
    def stream(of_world):
        current.append(of_world.address)
        yield
        current.pop()

    names = {"is_initialized": lambda: True, "current_stream": lambda: current[-1]}
    cuda = SimpleNamespace(**names, stream=stream, ExternalStream=Stream)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    gpu = FakeGpu(0, [900, 1, 2, 90])

    def call():
        seen.append((current[-1], gpu.captured is not None))
        if gpu.captured is not None:
            gpu.call()

    sk.Timer(gpu, replays=3)(call, iters=1)
    assert seen == [(gpu.ptr, False), (gpu.ptr, True)]
    assert current == ["PyTorch's"] and set(waited) == {"PyTorch's"}


def test_a_timer_on_the_emulator():
    """It is the same number on all ranks, and calls are few."""

    def main():
        world, calls = sk.init(), []
        us = sk.Timer(world)(lambda: calls.append(world.barrier()))
        assert us > 0 and len(calls) == 2 and set(world.host_allgather(us)) == {us}
        sk.Timer(world, iters=3, replays=2)(lambda: calls.append(world.barrier()))
        assert len(calls) == 2 + 1 + 3 * 2

    sk.emu.run(main, 2)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda world: sk.Timer(world, iters=0), ValueError, "Timer: iters is 0; it must be 1 or more"),
        (lambda world: sk.Timer(world, replays=-1), ValueError, "Timer: replays is -1"),
        (lambda world: sk.Timer(world, replays=2.0), TypeError, "Timer: replays"),
        (lambda world: sk.Timer(world)(lambda: None, True), TypeError, "Timer: iters"),
        (lambda world: sk.Timer(world)(3), TypeError, "Timer: call is 3; it must be a function"),
    ],
)
def test_numbers_that_a_timer_refuses(make, error, message):
    world = FakeGpu(0, ())
    with pytest.raises(error, match=message):
        make(world)


def test_a_timer_is_asked_alike_on_all_ranks():
    def main():
        with sk.init() as world:
            text = "ranks disagree: rank 0 gives iters=1 and replays=1, rank 1 gives iters=2 and replays=1"
            with pytest.raises(ValueError, match=text):
                sk.Timer(world)(world.barrier, iters=1 + world.rank)
            with pytest.raises(ValueError, match=r"rank 1 gives 1 graph\(s\) and"):
                sk.Timer(world).times([world.barrier] * (2 - world.rank))

    sk.emu.run(main, 2)


def test_what_cannot_be_captured_is_refused():
    gpu = FakeGpu(0, [])

    def unfit():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(ValueError, match="cannot capture the call: operation not permitted"):
        sk.Timer(gpu, 4, 3).capture(unfit, 4)
    assert gpu.captured is None  # the capture has ended


@pytest.mark.parametrize("cool", [0, 3, 3 + 30, 99])
def test_graphs_in_rounds_share_the_clock(cool):
    gpu = HotGpu(0, cool)
    a, b, c = sk.Timer(gpu, 4, 20).times([gpu.replay(*of) for of in (("a", 1), ("b", 1), ("c", 0.001))])
    assert a == b == {0: 1250, 3: 1250, 33: 1125, 99: 1000}[cool]
    assert c == 20  # of the other rank


def test_a_round_has_each_graph_once_after_a_barrier():
    logs = []
    for rank in range(2):
        gpu = HotGpu(rank, 0)
        sk.Timer(gpu, 4, 20).times([gpu.replay(name, 1) for name in "abc"])
        logs.append(gpu.log)
    assert logs[0] == logs[1]  # or the ranks would wait for each other for ever
    log = logs[0]
    # No graph is launched for the first time while another one runs.
    assert log[:8] == ["synchronize", "barrier", "a", "synchronize", "b", "synchronize", "c", "synchronize"]
    assert log[8:-1:2] == ["meet"] * 60 and log[-1] == "synchronize"
    rounds = ["".join(log[i : i + 6 : 2]) for i in range(9, 9 + 120, 6)]
    assert {"".join(sorted(order)) for order in rounds} == {"abc"} and len(set(rounds)) > 3


# ---- all_gather


@pytest.mark.parametrize("n", slow(1, 2, 3))
def test_all_gather(n, tmp_path):
    picture = tmp_path / "plot.png"
    arguments = ["--sizes", "1K,4K", "--vs", "nccl,torch_nccl,torch_symm", "--plot", str(picture)]
    data, printed = measured(tmp_path, n, "all_gather", *arguments)
    rows = data["rows"]
    sizes = [size // n // 16 * 16 * n for size in (1024, 4096)]
    names = [*GPU_ONLY, *sk.AllGather.methods, "auto"]
    assert [(row["bytes"], row["method"]) for row in rows] == [
        (size, name) for size in sizes for name in names
    ]
    assert all(row["op"] == "all_gather" for row in rows)
    for row in rows:
        if row["method"] in GPU_ONLY:
            assert row["note"].startswith("refused: ") and "us" not in row
        elif "note" not in row:
            assert row["us"] > 0 and row["bus_GBps"] == pytest.approx(
                row["bytes"] * (n - 1) / n / row["us"] / 1e3
            )
            if n > 1:
                assert row["of_p2p"] == pytest.approx(row["bus_GBps"] / data["p2p_GBps"])
    assert any("note" not in row for row in rows)
    assert f"{n} rank{'s' * (n > 1)}, {results.ON_EMULATOR}" in printed
    assert data["method"] == results.ON_EMULATOR
    for row in rows:
        assert row.get("took") in (sk.AllGather.methods if row["method"] == "auto" else [None])
    assert all(name in printed for name in names)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in cases.CASES if op != "all_gather"])
def test_other_collectives(op, tmp_path):
    host, passes = cases.host_of(op), 2 if op in ("all_reduce", "broadcast") else 1
    arguments = ["--sizes", "96", "--out", "private,symmetric", "--dtype", "float16", "--replays", "1"]
    data, printed = measured(tmp_path, 2, op, *arguments)
    ours = [row for row in data["rows"] if row["method"] not in results.NCCL_WAYS]
    names = [name for name in (*host.methods, "auto") for _ in tuning.OUTPUTS]
    assert [(row["op"], row["method"]) for row in ours] == [(op, name) for name in names]
    for row in ours:
        assert "note" not in row and row["us"] > 0
        assert row["bus_GBps"] == pytest.approx(passes * row["bytes"] / 2 / row["us"] / 1e3)
    assert all(name in printed for name in names)


@pytest.mark.slow
def test_in_groups(tmp_path, capsys):
    """Of four ranks, two groups of two; the results are those of the first."""
    options = "--sizes", "1K", "--methods", "one_shot", "--vs", ""
    found, printed = measured(tmp_path, 4, "all_reduce", "--group", "2", *options, races=False)
    assert found["n_ranks"] == 2 and "2 ranks" in printed
    assert [row["method"] for row in found["rows"]] == ["one_shot"]
    with pytest.raises(SystemExit, match="--group is 3; it must divide the number of ranks, 4"):
        run(4, "all_reduce", "--group", "3", *options)


def test_barrier(tmp_path):
    data, printed = measured(tmp_path, 4, "barrier", local_size=2)
    assert [(row["op"], row["method"], row.get("note")) for row in data["rows"]] == [
        ("barrier", "sk.Barrier", None),
        *(("barrier", way, "refused: NCCL needs GPUs") for way in results.NCCL_WAYS),
        ("barrier", "nvshmem", "refused: NVSHMEM's barrier needs GPUs"),
    ]
    assert data["rows"][0]["us"] > 0 and "barrier, on the stream" in printed


def test_a_barrier_that_does_not_wait_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sk.Barrier, "__call__", lambda barrier, stream=None: None)
    data, _ = measured(tmp_path, 2, "barrier", "--vs", "", status=1, races=False)
    assert [row["note"][:28] for row in data["rows"]] == ["wrong: rank 0 has not waited"]


def test_all_reduce_is_checked(tmp_path, monkeypatch, capsys):
    class OneWrong(sk.AllReduce):
        def __call__(self, x, out=None, stream=None):
            super().__call__(x, out, stream=stream)
            out[5] += 1
            return out

    monkeypatch.setattr(sk, "AllReduce", OneWrong)
    statuses = sk.emu.run(main, 2, (["all_reduce", "--sizes", "64", "--methods", "one_shot", "--vs", ""],))
    assert statuses == [1, 1] and "wrong: on rank 0 1 of 64 bytes differ" in capsys.readouterr().out


def test_json_says_where_and_how(tmp_path, monkeypatch):
    for name in MULTICAST_OFF:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("SHMEMKIT_SECRET", "which nobody else knows")
    arguments = ["--sizes", "64", "--methods", "auto", f"--plot={tmp_path}/p.svg"]
    data, _ = measured(tmp_path, 2, "all_gather", *arguments)
    assert set(data) == {
        *("machine", "versions", "environment", "command", "date", "method", "n_ranks", "p2p_GBps", "rows")
    }
    assert set(data["machine"]) == {"gpu", "gpus", "driver", "cuda", "cpus", "python", "n_nodes"}
    assert data["n_ranks"] == 2 and not MULTICAST_OFF.items() - data["environment"].items()
    assert "SHMEMKIT_SECRET" not in data["environment"]
    command = "python3 -m shmemkit.bench all_gather --sizes 64 --methods auto"
    assert data["command"] == f"{command} --plot=p.svg --json results.json"
    assert data["versions"]["numpy"] == np.__version__
    assert [row["method"] for row in data["rows"]] == [*results.NCCL_WAYS, "auto"]
    for row in data["rows"]:
        assert set(row) <= set(results.Row.__dataclass_fields__)


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float16", "float32")])
def test_dtypes_and_symmetric_output(dtype, tmp_path):
    arguments = ["all_gather", "--sizes", "2", "--dtype", dtype, "--methods", "auto", "--vs", "", "--out"]
    data, _ = measured(tmp_path, 2, *arguments, "private,symmetric", delivery="unordered")
    size = 2 * (4 if dtype == "float32" else 2)
    assert [(row["method"], row.get("out"), row["bytes"]) for row in data["rows"]] == [
        ("auto", None, size),
        ("auto", "symmetric", size),
    ]


class StandIn:
    """An AllGather through the host; what it does wrong is in the subclasses."""

    methods = ("first", "second")
    alive = 0

    def __init__(self, world, max_nbytes, method="auto", sms=None):
        self.world, self.calls = world, 0
        self.data = world.empty(max_nbytes // world.n_ranks, "uint8")
        type(self).alive += 1

    def __call__(self, x, out=None, stream=None):
        self.calls += 1
        self.data[:] = x.view("uint8")
        parts = self.world.host_allgather(self.data.copy())
        out.view("uint8")[:] = self.spoiled(np.concatenate(parts))
        return out

    def spoiled(self, data):
        return data

    def method_for(self, nbytes, symmetric=False):
        return "first"

    def free(self):
        self.world.free(self.data)
        type(self).alive -= 1


class OneBitWrong(StandIn):
    def spoiled(self, data):
        if self.world.rank == 1:
            data[20] ^= 1
        return data


class Stale(StandIn):
    """From the second call on it gives what it gave first."""

    def spoiled(self, data):
        self.first = getattr(self, "first", data)
        return self.first


class HalfDone(StandIn):
    """The last byte is left as it was, from the second call on."""

    def __call__(self, x, out=None, stream=None):
        before = out.view("uint8")[-1]
        super().__call__(x, out)
        if self.calls > 1:
            out.view("uint8")[-1] = before


class TooLarge(StandIn):
    def __call__(self, x, out=None, stream=None):
        if x.nbytes > 16:
            raise ValueError("16 bytes at most")
        return super().__call__(x, out)


class NoSuchHardware(StandIn):
    def __init__(self, world, max_nbytes, method="auto", sms=None):
        if method == "second":
            raise ValueError("this machine has none")
        super().__init__(world, max_nbytes, method)


def with_stand_in(monkeypatch, kind, tmp_path, *arguments, **options):
    kind = type("AllGather", (kind,), {})
    monkeypatch.setattr(sk, "AllGather", kind, raising=False)
    monkeypatch.setitem(collectives(), "all_gather", kind)
    data, printed = measured(tmp_path, 2, "all_gather", "--vs", "", *arguments, **options)
    assert kind.alive == 0  # all were freed
    return data["rows"], printed


@pytest.mark.slow
def test_one_size_has_its_data_at_a_time(tmp_path, monkeypatch):
    held = []

    class Looking(StandIn):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            held.append(sum(isinstance(o, cases.Case) and hasattr(o, "x") for o in gc.get_objects()))

    rows, _ = with_stand_in(
        monkeypatch, Looking, tmp_path, "--sizes", "64,128,256,96,100", "--methods", "first"
    )
    assert [row["bytes"] for row in rows] == [64, 128, 256, 96]  # 100 is rounded to 96
    assert max(held) == 2  # on two ranks


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("kind", "note"),
    [
        *slow((OneBitWrong, "wrong: on rank 1 1 of 64 bytes differ, the first at 20, in the part of rank 0")),
        (Stale, "wrong: on rank 0 64 of 64 bytes differ, the first at 0, in the part of rank 0"),
        (HalfDone, "wrong: on rank 0 1 of 64 bytes differ, the first at 63, in the part of rank 1"),
    ],
)
def test_wrong_results_are_found(kind, note, tmp_path, monkeypatch):
    rows, printed = with_stand_in(
        monkeypatch, kind, tmp_path, "--sizes", "64", "--methods", "first", status=1
    )
    assert [row["note"] for row in rows] == [note]
    assert "wrong" in printed


@pytest.mark.slow
def test_right_results_pass(tmp_path, monkeypatch):
    rows, _ = with_stand_in(monkeypatch, StandIn, tmp_path, "--sizes", "64", "--iters", "3", "--replays", "2")
    assert [row["method"] for row in rows] == ["first", "second", "auto"]
    assert all("note" not in row for row in rows)


@pytest.mark.slow
def test_refused_at_a_call(tmp_path, monkeypatch):
    rows, _ = with_stand_in(monkeypatch, TooLarge, tmp_path, "--sizes", "32,64", "--methods", "first")
    assert [row.get("note") for row in rows] == [None, "refused: 16 bytes at most"]


@pytest.mark.slow
def test_refused_at_construction(tmp_path, monkeypatch):
    rows, _ = with_stand_in(monkeypatch, NoSuchHardware, tmp_path, "--sizes", "64")
    assert [row.get("note") for row in rows] == [None, "refused: this machine has none", None]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["64,4M", *slow("4M,64")])
def test_without_symmetric_memory_there_is_a_row_that_says_so(sizes, tmp_path):
    arguments = ["--sizes", sizes, "--methods", "copy_push,ll,auto", "--vs", "", "--out", "private,symmetric"]
    data, printed = measured(tmp_path, 2, "all_gather", *arguments, heap_size=1 << 20)
    for row in data["rows"]:
        if row["bytes"] == 64:
            assert "note" not in row and row["us"] > 0
        else:
            assert "symmetric heap is full" in row["note"] and "us" not in row
    assert len(data["rows"]) == 12 and "symmetric heap is full" in " ".join(printed.split())


@pytest.mark.slow
def test_the_method_is_freed_where_there_is_no_memory_for_the_result(tmp_path):
    """The heap has room for half of the array, once."""
    arguments = ["--sizes", "1M", "--methods", "copy_push,copy_pull", "--vs", ""]
    arguments += ["--out", "symmetric,private"]
    data, _ = measured(tmp_path, 2, "all_gather", *arguments, heap_size=7 << 17)
    notes = [(row["method"], row.get("out"), row.get("note", "")[:8]) for row in data["rows"]]
    assert notes == [
        ("copy_push", "symmetric", "refused:"),
        ("copy_push", None, ""),
        ("copy_pull", "symmetric", "refused:"),
        ("copy_pull", None, ""),
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize("step", ["make", "_found"])
def test_one_rank_without_private_memory(step, tmp_path, monkeypatch):
    whole = getattr(cases.AllGatherCase, step)

    def less(case, *args):
        if case.world.rank == 1 and case.bytes > 64:
            raise MemoryError("out of memory")
        return whole(case, *args)

    monkeypatch.setattr(cases.AllGatherCase, step, less)
    rows, _ = with_stand_in(monkeypatch, StandIn, tmp_path, "--sizes", "128,64", "--methods", "first,auto")
    refused = "refused: out of memory"
    assert [row.get("note") for row in rows] == [refused, refused, None, None]
    assert [row.get("took") for row in rows] == [None, None if step == "make" else "first", None, "first"]


def of_rows(*rows):
    """-> Results of (method, size, us, note) of all_gather, compared"""
    found = results.Results.__new__(results.Results)
    found.rows, found.p2p_GBps = [], 400.0
    for method, size, us, *note in rows:
        found.add("all_gather", method, size, us, bus_GBps=us and 100.0, note="".join(note))
    found.compare()
    return found


def test_ratios():
    torch = results.TORCH_NCCL
    rows = ("nccl", 8, 10.0), (torch, 8, 5.0), ("ll", 8, 2.5), ("push", 8, None), ("ll", 16, 3.0)
    found = of_rows(*rows, (torch, 16, 9.0), ("nccl", 16, 1.0, "wrong: all of it"))
    assert [row.vs_plain for row in found.rows] == [1.0, 2.0, 4.0, None, None, None, None]
    assert [row.vs_torch_nccl for row in found.rows] == [0.5, 1.0, 2.0, None, 3.0, 1.0, 9.0]
    assert [row.of_p2p for row in found.rows][2:5] == [0.25, None, 0.25]
    assert found.failed


def test_the_ratio_to_nccl_is_that_to_its_best_way():
    sizes = 8, 16, 32
    nccl = [(way, 8, us) for way, us in zip(results.NCCL_WAYS, (9.0, 7.0, 3.0, 20.0), strict=True)]
    wrong = ("nccl_window", 16, 0.1, "wrong: all of it")
    symmetric = [(name, 8, us) for name, us in zip(results.TORCH_SYMMETRIC, (8.0, 6.0, 7.0), strict=True)]
    ours = [("auto", size, 2.0) for size in sizes]
    found = of_rows(
        *nccl, ("nccl", 16, 9.0), wrong, ("nccl_ce", 16, 5.0), ("nccl", 32, 4.0), *symmetric, *ours
    )
    ratios = {
        row.bytes: (row.vs_nccl, row.vs_plain, row.vs_torch) for row in found.rows if row.method == "auto"
    }
    assert ratios == {8: (1.5, 4.5, 3.0), 16: (2.5, 4.5, None), 32: (None, 2.0, None)}


@pytest.mark.slow
def test_further_runs(tmp_path):
    found = of_rows(("ll", 8, 3.0), ("ll", 8, 1.0), ("ll", 8, 2.0), ("push", 8, 4.0), ("auto", 8, 1.0))
    found.add("all_gather", "auto", 8, note="refused: no")
    found.add("all_gather", "auto", 8, 2.0)
    ll, push, auto = found.rows
    assert (ll.us, ll.runs, ll.bus_GBps) == (2.0, [3.0, 1.0, 2.0], 150.0)
    assert (push.us, push.runs, push.bus_GBps) == (4.0, None, 100.0)
    assert (auto.us, auto.runs, auto.note, auto.bus_GBps) == (None, None, "refused: no", None)
    data, _ = measured(
        tmp_path, 2, "all_gather", "--sizes", "64", "--methods", "ll", "--vs", "", "--runs", "3"
    )
    (row,) = data["rows"]
    assert len(row["runs"]) == 3 and row["us"] == sorted(row["runs"])[1]
    assert row["bus_GBps"] == pytest.approx(32 / row["us"] / 1e3)


# ---- p2p


@pytest.mark.every(2)
@pytest.mark.parametrize("n", [2, 3, *slow(4)])
def test_p2p(n, tmp_path):
    picture = tmp_path / "plot.svg"
    arguments = ["p2p", "--sizes", "8,100", "--blocks", "1,3", "--plot", str(picture)]
    data, printed = measured(tmp_path, n, *arguments, delivery="unordered")
    rows = [(row["op"], row["method"], row["bytes"], row.get("blocks")) for row in data["rows"]]
    kernels = ("push", "pull", "put_signal")
    assert rows == [
        *(("latency", method, 8, None) for method in ("notify", "put_signal")),
        *(("p2p", method, 8, 1) for method in kernels),
        ("p2p", "copy engine", 8, None),
        *(("p2p", method, 100, blocks) for method in kernels for blocks in (1, 3)),
        ("p2p", "copy engine", 100, None),
    ]
    assert all(row["us"] > 0 and "note" not in row for row in data["rows"])
    best = max(row["bus_GBps"] for row in data["rows"] if row["bytes"] == 100)
    assert data["p2p_GBps"] == best
    assert max(row["of_p2p"] for row in data["rows"] if row["bytes"] == 100) == 1.0
    assert results.ON_EMULATOR in printed and "<svg" in picture.read_text()


def test_p2p_without_memory(tmp_path):
    data, _ = measured(tmp_path, 2, "p2p", "--sizes", "8,4M,16", "--blocks", "1", heap_size=1 << 20)
    rows = [(row["bytes"], row["method"], row.get("note", "")[:35]) for row in data["rows"][2:]]
    methods = ("push", "pull", "put_signal", "copy engine")
    refused = "refused: the symmetric heap is full"
    assert rows == [(n, m, refused if n == 4 << 20 else "") for n in (8, 4 << 20, 16) for m in methods]
    assert data["p2p_GBps"] == max(row["bus_GBps"] for row in data["rows"] if row["bytes"] == 16)


def test_p2p_without_any_memory(tmp_path, monkeypatch):
    def zeros(self, *args, **kwargs):
        raise MemoryError("full")

    monkeypatch.setattr(sk.World, "zeros", zeros)
    data, _ = measured(tmp_path, 2, "p2p", "--sizes", "8", "--blocks", "1")
    assert [row["note"] for row in data["rows"]] == ["refused: full"] * 6 and data["p2p_GBps"] is None
    data, _ = measured(tmp_path, 2, "all_gather", "--sizes", "64", "--methods", "ll", "--vs", "")
    assert [row["note"] for row in data["rows"]] == ["refused: full"] and data["p2p_GBps"] is None


@pytest.mark.parametrize("method", ["push", "pull", "put_signal", "copy engine"])
def test_p2p_finds_wrong_bytes(method, monkeypatch):
    from shmemkit.bench import p2p

    def main():
        world = sk.init()
        ring = p2p.Ring(world, 100, 3)
        right = ring.measure(sk.Timer(world), method, 100, 3)[2]
        world.host_barrier()
        if world.rank == 1:
            ring.src[99] ^= 1
        world.host_barrier()
        wrong = ring.measure(sk.Timer(world), method, 100, 3)[2]
        ring.free()
        return right, wrong

    reader = 0 if method == "pull" else 2
    assert sk.emu.run(main, 3) == [("", f"wrong: 1 of 100 bytes differ on rank {reader}")] * 3


def test_p2p_over_no_link_is_a_refusal(tmp_path):
    data, _ = measured(tmp_path, 3, "p2p", "--sizes", "8", "--blocks", "1", local_size=1)
    refused = {(row["op"], row["method"]): row["note"] for row in data["rows"] if "note" in row}
    assert {method for _, method in refused} == {"notify", "push", "pull", "copy engine"}
    assert len(data["rows"]) == 6 and len(refused) == 4
    assert all("is on another node" in note for note in refused.values())


def test_p2p_needs_two_ranks():
    with pytest.raises(SystemExit, match="there is one rank; it needs two"):
        main(["p2p"])
    assert sk.current() is None


@pytest.mark.each_value
@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_kernels_compile(name, cc):
    if name.startswith("put_signal"):
        pytest.importorskip("nvshmem", reason="needs nvshmem4py")
    kernel, argument_types = GPU_KERNELS[name]
    ptx = compile_ptx(kernel, argument_types, cc)
    needed = resources(ptx, cc)
    assert needed.spills == 0, needed
    assert "NRT_" not in ptx
    if not name.startswith("put_signal"):  # NVSHMEM's functions, linked later, take addresses of arguments
        assert needed.stack == 0 and ".local" not in ptx
    if name in ("push", "pull"):
        assert "ld.global.v4.u32" in ptx and "st.global.v4.u32" in ptx


# ---- launch


@pytest.mark.parametrize("n", [1, *slow(2, 3)])
def test_launch(n, tmp_path):
    data, printed = measured(tmp_path, n, "launch", "--batches", "1", "--batch-size", "2", "--replays", "1")
    methods = [row["method"] for row in data["rows"]]
    assert methods[0] == "sk.bind: b()" and methods[3].startswith("AllGather(method='ll')")
    assert "graph" in methods[-1] and len(methods) == 5
    assert [row["op"] for row in data["rows"]] == ["launch"] * 4 + ["graph"]
    assert all(row["us"] > 0 for row in data["rows"])
    assert "launch" in printed


def test_launch_without_ll(tmp_path, monkeypatch):
    def refuse(world, max_nbytes, method):
        raise ValueError(f"no {method} for {max_nbytes} bytes")

    refuse.methods = ()
    monkeypatch.setattr(sk, "AllGather", refuse)
    data, _ = measured(tmp_path, 2, "launch", "--batches", "1", "--batch-size", "1")
    row = next(row for row in data["rows"] if row["method"] == launch.GATHER)
    assert row["note"] == "refused: no ll for 8192 bytes" and "us" not in row


def test_a_launch_of_ours_says_whose_kernels_it_launched(tmp_path, monkeypatch):
    def noting(world):
        return ledger.Launches(world) if world.rank == 0 else contextlib.nullcontext()

    monkeypatch.setattr(measure, "noting", noting)
    data, _ = measured(tmp_path, 2, "launch", "--batches", "1", "--batch-size", "1")
    found = {row["method"]: row["rooms"] for row in data["rows"] if "rooms" in row}
    assert found == {launch.GATHER: ["collectives.schedules.rows"]}


def test_first_launches(tmp_path, monkeypatch):
    seconds = {None: [4.0], "cold": [5.0], "warm": [0.5, 0.3, 0.4]}
    folders, run_process = set(), subprocess.run

    def stand_in(command, **options):
        """The process that launches for the first time."""
        if command[-1] != "shmemkit.bench.first_launch":
            return run_process(command, **options)
        cache = options["env"].get("SHMEMKIT_CACHE_DIR")
        assert (cache is None) == (options["env"].get("SHMEMKIT_CACHE") == "0")
        if cache is not None:
            folders.add(cache)
        took = seconds[cache and ("warm" if not seconds["cold"] else "cold")].pop(0)
        return subprocess.CompletedProcess(command, 0, f"{took}\n", "")

    monkeypatch.setattr(subprocess, "run", stand_in)
    monkeypatch.delenv("SHMEMKIT_CACHE_DIR", raising=False)
    monkeypatch.delenv("SHMEMKIT_CACHE", raising=False)
    arguments = ["launch", "--batches", "1", "--batch-size", "1", "--first"]
    data, printed = measured(tmp_path, 1, *arguments)
    rows = [(row["method"], row["us"]) for row in data["rows"] if row["op"] == "first_launch"]
    assert rows == [("cache off", 4e6), ("cache cold", 5e6), ("cache warm", 0.3e6)]
    assert "4000000" in printed and len(folders) == 1
    with pytest.raises(SystemExit, match="--first: there are several ranks"):
        run(2, *arguments)


@pytest.mark.slow
def test_a_first_launch_is_that_of_a_new_process(tmp_path, monkeypatch):
    for name, value in {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHMEMKIT_BACKEND", "emulator")
    assert 0 < first_launch.measure(str(tmp_path)) < 60e6
    monkeypatch.setenv("SHMEMKIT_BACKEND", "none")
    with pytest.raises(RuntimeError, match="(?s)the process failed:.*SHMEMKIT_BACKEND"):
        first_launch.measure(None)


def test_ratio_to_the_driver():
    found = results.Results.__new__(results.Results)
    found.rows, found.p2p_GBps = [], None
    for method, us in ((results.DRIVER, 8.0), ("sk.bind: b()", 10.0)):
        found.add("launch", method, us=us)
    found.compare()
    assert [row.vs_driver for row in found.rows] == [1.0, 1.25]


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["reduced"], "reduced"),
        (["all_gather", "--sizes", "8X"], "8X"),
        (["all_gather", "--methods", "ll,warp"], "'warp'"),
        (
            ["all_gather", "--vs", "mpi"],
            "'mpi' is given; it must be nccl, nccl_graph, nccl_window, nccl_ce, torch_nccl, torch_symm, "
            "torch_one_shot or torch_two_shot",
        ),
        (["all_gather", "--dtype", "int3"], "bfloat16"),
        (["all_gather", "--out", "shared"], "private or symmetric"),
        (["all_gather", "--iters", "0"], "1 or more"),
        (["all_gather", "--json", "/no/such/folder/f.json"], "f.json' does not exist"),
        (["all_gather", "--tune", "/no/such/folder/f.json"], "f.json' does not exist"),
        (["all_gather", "--nccl", "/no/libnccl.so.2"], "'/no/libnccl.so.2' does not exist"),
        (["all_gather", "--compare", "/no.json"], "'/no.json' is no file that this version's --json wrote"),
        (["--compare", "/no.json"], "'/no.json' is no file that this version's --json wrote"),
        (["p2p", "--json", "/"], "'/' is a folder; it must be a file"),
        (["p2p", "--blocks", "4,x"], "'x'"),
        (["launch", "--replays", "-1"], "1 or more"),
        (["launch", "--plot", "f.png"], "--plot"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err
    assert sk.current() is None


def test_one_rank_speaks(capsys):
    def wrong():
        with pytest.raises(SystemExit):
            main(["p2p", "--sizes", "8X"])

    sk.emu.run(wrong, 3)
    assert capsys.readouterr().err.count("8X") == 1


@pytest.mark.parametrize(
    ("package", "arguments"), [("rich", []), ("matplotlib", ["--plot", "f.png"])], ids=["rich", "matplotlib"]
)
def test_missing_packages(package, arguments, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as caught:
        main(["p2p", *arguments])
    assert caught.value.code == 2
    assert f"needs {package}" in (err := capsys.readouterr().err) and "pip install rich matplotlib" in err


def test_matplotlib_is_needed_for_plots_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert parse(["p2p"]).plot is None


def test_defaults():
    options = parse(["all_gather"])
    assert options.sizes is None and options.usual_sizes == parse(["p2p"]).usual_sizes == "8K:256M"
    assert (
        options.vs == list(results.NCCL_WAYS)
        and options.out == ["private"]
        and options.dtype.name == "bfloat16"
    )
    assert options.methods == [*sk.AllGather.methods, "auto"] and options.tune is None


@pytest.mark.slow
def test_the_emulator_measures_small_sizes(tmp_path):
    results, _ = measured(tmp_path, 2, "all_gather", "--methods", "push_1d", "--vs", "")
    assert [row["bytes"] for row in results["rows"]] == [8 << 10, 64 << 10]


def test_a_plot_has_a_format(capsys):
    with pytest.raises(SystemExit):
        main(["all_gather", "--plot", "x.foo"])
    assert "it is 'x.foo'; it must end with .svg, .png or .pdf" in capsys.readouterr().err


COMMANDS = ["barrier", "p2p", "gemm", "grouped_gemm", "ag_gemm", "gemm_rs", "gemm_ar", "launch"]
COMMANDS += ["all_reduce_rms_norm", "attention_combine", "flash_decode", "ag_grouped_gemm", "grouped_gemm_rs"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, "expert_parallel"])
def test_each_command_alone_runs_on_the_emulator(command, pes, capsys):
    """Its defaults are small there."""
    pes(2, races=False).run(main, [command])
    assert "emulator: times mean nothing" in capsys.readouterr().out
