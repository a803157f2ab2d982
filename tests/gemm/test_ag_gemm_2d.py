"""AllGatherGemm over several nodes on the emulator: results, all ways to call it, with races checked and
messages late; and what goes wrong when a part of the protocol is taken away."""

import numpy as np
import pytest
from fast import slow
from gemms import changed, check
from numba import cuda
from test_ag_gemm import BF16, in_a_row, integers, take, weight_of, words

import shmemkit as sk
from shmemkit.backends.emulator import EmulatorBackend
from shmemkit.emu import EmulatorError
from shmemkit.gemm import all_gather
from shmemkit.gemm.all_gather import column_hooks, multi_node, sm90_host
from shmemkit.gemm.sm90 import Tile
from shmemkit.gemm.sm90_host import Choice

pytestmark = pytest.mark.usefixtures("messages")
late = pytest.mark.schedules(deliveries="unordered", seeds=[None])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tiles, several chunks, and x by rows."""
    for module in (all_gather, sm90_host):
        monkeypatch.setattr(module, "choose", lambda m, n, k, sms: Choice(Tile(64, 32), 1))
    monkeypatch.setattr(column_hooks, "ROUNDS", -1)
    monkeypatch.setattr(multi_node, "CHUNK", 256)


def all_right(pes, n_nodes, local_size, calls, *args):
    n = n_nodes * local_size
    return pes(n, local_size=local_size).run(in_a_row, calls, *args) == [calls] * n


@pytest.mark.each_value
@late
@pytest.mark.parametrize(
    "n_nodes, local_size, rows, by_columns",
    [
        (2, 1, 24, False),
        *slow((3, 1, 64, False), (2, 2, 64, True)),
        (2, 2, 24, False),  # tiles with rows of several ranks: mine are copied first
        (2, 3, 8, True),
    ],
)
def test_nodes(pes, monkeypatch, n_nodes, local_size, rows, by_columns):
    monkeypatch.setattr(column_hooks, "ROUNDS", 1e9 if by_columns else -1)
    assert all_right(pes, n_nodes, local_size, 3, rows, 24, 16, None, "overlap_2d")


@pytest.mark.each_value
@late
@pytest.mark.parametrize("given", ["symmetric", "private", "in place"])
@pytest.mark.parametrize("n_nodes, local_size", [(2, 2), (2, 1)])
def test_gathered_rows(pes, n_nodes, local_size, given):
    assert all_right(pes, n_nodes, local_size, 2, 24, 24, 16, given, "overlap_2d")


def test_what_the_kernel_cannot_compute(pes):
    assert all_right(pes, 2, 2, 2, 3, 7, 9, None, "overlap_2d", 2, np.dtype("float32"))


def test_several_weights(pes):
    """One of them is not for the kernel; other sizes before."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = 2
        xs, widths = integers(2, 24, 16), (16, 14)
        weights = [weight_of(world.rank, 16, n, seed=i) for i, n in enumerate(widths)]
        bias = integers(14, dtype="float32")
        multiply = sk.AllGatherGemm(world, xs.nbytes, "overlap_2d")
        for rows in (8, 24):
            outs = multiply(xs[world.rank, :rows], weights, bias=(None, bias))
            world.synchronize()
            for out, weight, its in zip(outs, weights, (0, bias), strict=True):
                x = xs[:, :rows].reshape(2 * rows, 16)
                check(out, x.astype("float64") @ weight.astype("float64") + its)
        assert multiply(xs[world.rank, :0], weights[0]).shape == (0, 16)

    pes(2, local_size=1).run(main)


@late
@pytest.mark.parametrize("local_size", [1, *slow(2)])
def test_graphs_and_streams(pes, local_size):
    def main():
        world = sk.init()
        world.backend.multiprocessors = 2
        me, n, streams, calls = world.rank, world.n_ranks, [world.stream, cuda.stream()], 4
        xs, weight = integers(calls, n, 24, 8), weight_of(me, 8, 8)
        overlap = sk.AllGatherGemm(world, xs[0].nbytes, "overlap_2d")
        x, out = np.zeros((24, 8), BF16), np.zeros((n * 24, 8), "float32")
        seen = np.zeros((calls, *out.shape), "float32")
        gathered = [None, overlap.output((n * 24, 8), "bfloat16")]
        graphs = []
        for i, stream in enumerate(streams):
            stream.begin_capture()
            overlap(x, weight, out, gathered=gathered[i], stream=stream)
            graphs.append(stream.end_capture())
        for call in range(calls):
            stream = streams[call % 2]
            stream.wait_event(streams[1 - call % 2].record())
            take[1, 32, stream](words(xs[call, me]), words(x))
            if call != 2:
                graphs[call % 2].launch(stream)
            else:
                overlap(x, weight, out, gathered=gathered[call % 2], stream=stream)
            take[1, 32, stream](words(out), words(seen[call]))
        world.synchronize()
        assert (seen == xs.reshape(calls, n * 24, 8).astype("float32") @ weight.astype("float32")).all()

    pes(2 * local_size, local_size=local_size).run(main)


# ---- on the host


def test_refusals_and_choice(pes):
    def main():
        world = sk.init()
        with pytest.raises(ValueError, match="method='overlap': .* on another node"):
            sk.AllGatherGemm(world, 1 << 10, "overlap")
        auto = sk.AllGatherGemm(world, 1 << 10)
        assert not auto.refused and auto.method_for((4, 8), "bfloat16", 8) == "sequential"  # emulated
        name, world.backend.name = world.backend.name, "nvshmem"
        assert auto.method_for((1 << 10, 1 << 13), "bfloat16", 8) == "overlap_2d"
        assert auto.method_for((1, 1 << 13), "bfloat16", 8) == "sequential"
        world.backend.name = name
        multiply, x, room = (
            sk.AllGatherGemm(world, 2 * 64, "overlap_2d"),
            integers(4, 8),
            np.zeros((16, 8), BF16),
        )
        for arguments, text in [
            ({"out": room[4:12], "gathered": room[8:]}, "out overlaps another"),
            ({"out": room[:4]}, r"out is \(4, 8\); it must be \(8, 8\)"),
        ]:
            with pytest.raises(ValueError, match=text):
                multiply(x, integers(8, 8), **arguments)

    pes(2, local_size=1).run(main)

    def on_one_node():
        with pytest.raises(ValueError, match="there is one node; 'overlap_2d' is for several"):
            sk.AllGatherGemm(sk.init(), 64, "overlap_2d")

    pes(2).run(on_one_node)


def test_copies_in_a_node_need_memory_operations_of_its_ranks_only(pes, monkeypatch):
    asked = []

    def no_copies(self, ranks=None):
        asked.append(list(ranks))
        return "no memory operations" if self.pe == 3 else None

    monkeypatch.setattr(EmulatorBackend, "no_copies", no_copies)

    def main():
        assert "no memory operations" in sk.AllGatherGemm(sk.init(), 1 << 10).refused["overlap_2d"]

    pes(4, local_size=2).run(main)
    assert sorted(asked) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_where_the_gpus_are_others(pes, monkeypatch):
    monkeypatch.setattr("shmemkit.backends.emulator.EmulatorBackend.compute_capability", (8, 0))

    def main():
        auto = sk.AllGatherGemm(sk.init(), 64)
        assert "compute capability 8.0" in auto.refused["overlap_2d"]
        assert auto.method_for((1, 1 << 20), "bfloat16", 8) == "sequential"

    pes(2, local_size=1).run(main)


# ---- what is needed


@cuda.jit
def copy(x, seen, at):
    """In the place of a product."""
    for i in range(x.size):
        seen[at + i] = x[i]


def few_calls(calls, threads=1):
    """Of few threads per block, little enough for all schedules. -> whether all rows have come"""
    world = sk.init()
    n, me, size = world.n_ranks, world.rank, 256 * threads
    exchange = multi_node.Nodes(world, size)
    exchange.threads = threads
    exchange._launches.clear()
    x, seen = np.zeros(size, "uint8"), np.zeros((n, size), "uint8")
    right = True
    for call in range(calls):
        x[:] = 10 * call + me
        seen[:] = 255
        exchange.bind(x, lambda j, rows: sk.bind(copy, 1, 1, (rows, seen.reshape(-1), j * size)))(None)
        world.synchronize()
        right &= bool((seen == 10 * call + np.arange(n)[:, None]).all())
    exchange.free()
    return right


@pytest.mark.slow
@pytest.mark.parametrize("n_nodes, calls, chunk", [(2, 2, 256), (2, 1, 128)])
def test_right_in_every_schedule(monkeypatch, n_nodes, calls, chunk):
    monkeypatch.setattr(multi_node, "CHUNK", chunk)

    def main():
        assert few_calls(calls)

    found = sk.emu.explore(main, n_nodes, exhaustive=True, local_size=1, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


def found_out(seed):
    """Whether it is seen that something is wrong: by the result, or by a report."""
    try:
        options = dict(local_size=1, delivery="unordered", races=True, seed=seed)
        return not all(sk.emu.run(few_calls, 3, (3, 4), **options))
    except EmulatorError as report:
        print(report)
        return True


def test_nothing_is_found_otherwise():
    assert not any(found_out(seed) for seed in (None, 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, change",
    [
        ("signal_wait_until(span(credits, j, 1), GE, before)", "pass"),
        ("signal_wait_until(span(landed_full, j * MAX_CHUNKS + b, 1), GE, epoch)", "pass"),
        (
            "        j += cuda.blockDim.x\n    cuda.syncthreads()\n    mine",
            "        j += cuda.blockDim.x\n    mine",
        ),
        ("    cuda.syncthreads()  # all threads have read the counter\n", ""),
        ("        epochs[0] = epoch\n", "        pass\n"),
        ("landed_full, node * MAX_CHUNKS + b", "landed_full, node * MAX_CHUNKS"),
        ("b += cuda.blockDim.x", "b = chunks"),
        ("before + 1, SET", "before, SET"),
        ("span(credits, node, 1), epoch", "span(credits, node, 1), epoch + 1"),
        ("steps.append(leave)", "steps.insert(-1, leave)"),
        ("j = (node - hops) % n_nodes", "j = (node - 1) % n_nodes"),
    ],
)
def test_each_part_is_needed(monkeypatch, line, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    module = changed(multi_node, line, change)
    module.CHUNK = 32
    monkeypatch.setattr(multi_node, "Nodes", module.Nodes)
    assert any(found_out(seed) for seed in (None, 0, 1, 2))
