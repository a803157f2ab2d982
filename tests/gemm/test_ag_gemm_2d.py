"""AllGatherGemm over several nodes on the emulator: results, all ways to call it, with races checked and
messages late; and what goes wrong when a part of the protocol is taken away."""

import functools

import numpy as np
import pytest
from fast import slow
from gemms import check
from mutations import argument, goes_wrong, omit, omit_store, seeds, store
from numba import cuda
from test_ag_gemm import BF16, in_a_row, integers, small, take, weight_of, words

import shmemkit as sk
from shmemkit.backends.emulator import EmulatorBackend
from shmemkit.gemm.all_gather import multi_node

pytestmark = pytest.mark.usefixtures("messages")
late = pytest.mark.schedules(deliveries="unordered", seeds=[None])


CHUNKS = small(chunk=256)


def all_right(pes, n_nodes, local_size, calls, *args, options=CHUNKS):
    n = n_nodes * local_size
    main = functools.partial(in_a_row, method="overlap_2d", options=options)
    return pes(n, local_size=local_size).run(main, calls, *args) == [calls] * n


@pytest.mark.each_value
@pytest.mark.every(2)
@late
@pytest.mark.parametrize(
    "n_nodes, local_size, rows, by_columns",
    [
        (2, 1, 24, False),
        *slow((3, 1, 64, False), (2, 2, 64, True)),
        (2, 1, 8, True),
        *slow((2, 2, 24, False)),  # tiles with rows of several ranks: mine are copied first
        *slow((2, 3, 8, True)),
    ],
)
def test_nodes(pes, n_nodes, local_size, rows, by_columns):
    options = small(by_columns, chunk=256)
    assert all_right(pes, n_nodes, local_size, 3, rows, 24, 16, options=options)


@pytest.mark.each_value
@pytest.mark.every(3)
@late
@pytest.mark.parametrize("given", ["symmetric", "private", "in place"])
@pytest.mark.parametrize("n_nodes, local_size", [*slow((2, 2)), (2, 1)])
def test_gathered_rows(pes, n_nodes, local_size, given):
    assert all_right(pes, n_nodes, local_size, 2, 24, 24, 16, given)


def test_what_the_kernel_cannot_compute(pes):
    main = functools.partial(in_a_row, method="overlap_2d", dtype=np.dtype("float32"))
    assert pes(2, local_size=1).run(main, 2, 3, 7, 9) == [2] * 2


@pytest.mark.slow
def test_several_weights(pes):
    """One of them is not for the kernel; other sizes before."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = 2
        xs, widths = integers(2, 8, 16), (16, 14)
        weights = [weight_of(world.rank, 16, n, seed=i) for i, n in enumerate(widths)]
        bias = integers(14, dtype="float32")
        multiply = sk.AllGatherGemm(world, xs.nbytes, "overlap_2d", options=CHUNKS)
        for rows in (2, 8):
            outs = multiply(xs[world.rank, :rows], weights, bias=(None, bias))
            world.synchronize()
            for out, weight, its in zip(outs, weights, (0, bias), strict=True):
                x = xs[:, :rows].reshape(2 * rows, 16)
                check(out, x.astype("float64") @ weight.astype("float64") + its)
        assert multiply(xs[world.rank, :0], weights[0]).shape == (0, 16)

    pes(2, local_size=1).run(main)


@pytest.mark.slow
@late
@pytest.mark.parametrize("local_size", [1, *slow(2)])
def test_graphs_and_streams(pes, local_size):
    def main():
        world = sk.init()
        world.backend.multiprocessors = 2
        me, n, streams, calls = world.rank, world.n_ranks, [world.stream, cuda.stream()], 4
        xs, weight = integers(calls, n, 8, 8), weight_of(me, 8, 8)
        overlap = sk.AllGatherGemm(world, xs[0].nbytes, "overlap_2d", options=CHUNKS)
        x, out = np.zeros((8, 8), BF16), np.zeros((n * 8, 8), "float32")
        seen = np.zeros((calls, *out.shape), "float32")
        gathered = [None, overlap.output((n * 8, 8), "bfloat16")]
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
        assert (seen == xs.reshape(calls, n * 8, 8).astype("float32") @ weight.astype("float32")).all()

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


def test_where_the_gpus_are_others(pes):
    def main():
        auto = sk.AllGatherGemm(sk.init(), 64)
        assert "compute capability 8.0" in auto.refused["overlap_2d"]
        assert auto.method_for((1, 1 << 20), "bfloat16", 8) == "sequential"

    pes(2, local_size=1, gpu="A100").run(main)


# ---- what is needed


@cuda.jit
def copy(x, seen, at):
    """In the place of a product."""
    for i in range(x.size):
        seen[at + i] = x[i]


def few_calls(calls, chunk, threads=1):
    """Of few threads per block, little enough for all schedules. -> whether all rows have come"""
    world = sk.init()
    n, me, size = world.n_ranks, world.rank, 256 * threads
    exchange = multi_node.Nodes(world, size, chunk)
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
def test_right_in_every_schedule(n_nodes, calls, chunk):
    def main():
        assert few_calls(calls, chunk)

    found = sk.emu.explore(main, n_nodes, exhaustive=True, local_size=1, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


def is_wrong(n, chunk=256):
    """Whether it is seen in n schedules."""
    options = dict(local_size=1, delivery="unordered", races=True)
    return goes_wrong(sk.emu.run, few_calls, 3, (3, chunk, 4), **options, each=seeds(n))


def test_nothing_is_wrong_otherwise():
    assert not is_wrong(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        omit("signal_wait_until", inside="send_rows"),
        omit("signal_wait_until", inside="await_rows"),
        omit("cuda.syncthreads", inside="send_rows"),
        omit("cuda.syncthreads", inside="leave_rows"),
        omit_store("epochs[]", inside="leave_rows"),
        store("signal", "span(landed_full, node * MAX_CHUNKS, 1)"),  # one for all chunks
        argument("put_signal_nbi_block", 3, "before"),
        argument("signal_op", 1, "epoch + 1"),
        store("j", "(node - 1) % n_nodes", inside="Nodes.bind"),
    ],
)
def test_each_part_is_needed(mutate, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    mutate(multi_node, change)
    assert is_wrong(3, 128)
