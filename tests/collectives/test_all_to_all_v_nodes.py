"""All-to-alls of variable splits over several nodes on the emulator; without races, with messages that
overtake each other; and what goes wrong without one of their waits."""

import numpy as np
import pytest
from fast import examples, slow
from hypothesis import given
from hypothesis import strategies as st
from kernel_types import listed
from mutations import argument, callee, goes_wrong, omit, seeds
from ptx import compile_ptx
from test_all_to_all import exchange_rows, random_calls

import shmemkit as sk
from shmemkit.collectives.all_to_all import AllToAllV, variable
from shmemkit.emu.stream import Stream

nodes_of = pytest.mark.parametrize("nodes, local_size", [(2, 1), (2, 2), *slow((3, 1), (2, 3))])


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("symmetric", [False, True])
@nodes_of
def test_nodes(pes, small_chunks, nodes, local_size, symmetric):
    n = nodes * local_size
    calls = random_calls(n, 2, 20, n)
    pes(n, local_size=local_size).run(exchange_rows, calls, (3,), "int16", symmetric)


@pytest.mark.slow
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
def test_many_ranks(pes):
    pes(12, local_size=4).run(exchange_rows, random_calls(12, 2, 5, 1), (2,), "float32")


@pytest.mark.parametrize("symmetric", [False, True])
def test_what_does_not_fit_is_reported(pes, small_chunks, symmetric):
    calls = [
        ([[2, 1, 1], [5, 0, 2], [3, 4, 0]], [4, 7, 7], [6, 6, 6]),  # rank 0 has no room for the 5 of rank 1
        ([[2, 3, 1], [-4, 1, 2], [1 << 62, 1 << 62, 1]], [4, 3, 7], [6, 6, 6]),  # x of rank 0 has but 4 rows
        ([[1, 1, 1], [1, 1, 1], [1, 1, 1]], [3, 3, 3], [3, 3, 3]),
    ]
    pes(3, local_size=1).run(exchange_rows, calls, (3,), "int16", symmetric)


@examples(4)
@given(
    data=st.data(),
    seed=st.none() | st.integers(0, 1 << 30),
    delivery=st.sampled_from(["eager", "ordered", "unordered"]),
    nodes=st.sampled_from([(2, 1), (3, 1), (2, 2)]),
    symmetric=st.booleans(),
)
def test_any_splits(pes, small_chunks, data, seed, delivery, nodes, symmetric):
    n, number, calls = nodes[0] * nodes[1], st.integers(0, 3) | st.integers(-2, 40), []
    for _ in range(data.draw(st.integers(1, 4))):
        splits = data.draw(st.lists(st.lists(number, min_size=n, max_size=n), min_size=n, max_size=n))
        rows = [sum(max(c, 0) for c in of) + data.draw(st.integers(-2, 3)) for of in splits]
        rooms = [sum(max(of[k], 0) for of in splits) + data.draw(st.integers(-2, 3)) for k in range(n)]
        calls.append((splits, *([max(m, 0) for m in ms] for ms in (rows, rooms))))
    shape, dtype = data.draw(st.sampled_from([((), "uint8"), ((3,), "int16"), ((4,), "float32")]))
    ranks = pes(n, local_size=nodes[1], seed=seed, delivery=delivery)
    ranks.run(exchange_rows, calls, shape, dtype, symmetric, data.draw(st.integers(0, 3)))


@pytest.mark.every(2)
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_graphs_and_streams(pes):
    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        exchange = AllToAllV(world, 40 * 8)
        other = Stream(world.stream.machine, me)
        x, out, back = np.arange(10) + 10 * me, *np.zeros((2, 40), "int64")
        splits, counts, back_counts = np.zeros((3, n), "int64")
        world.stream.begin_capture()
        exchange(x, splits, out, counts)
        other.wait_event(world.stream.record())
        exchange(out, counts, back, back_counts, stream=other)
        world.stream.wait_event(other.record())
        graph = world.stream.end_capture()
        for call in range(4):
            splits[:] = np.random.default_rng([call, me]).integers(0, 3, n)
            graph.launch(world.stream)
            if call == 2:
                exchange(x, splits, out, counts, stream=world.stream)
                exchange(out, counts, back, back_counts)
            world.synchronize()
            assert (back_counts == splits).all()
            assert (back[: splits.sum()] == x[: splits.sum()]).all()

    pes(4, local_size=2).run(main)


def few_calls(module, calls, threads=1, row=1, part=1 << 15, most=3):
    """Which no host holds up: of some rows each, of other splits each time. -> whether all are right"""
    world = sk.init()
    n, me = world.n_ranks, world.rank
    exchange = module.PushV(world, 4 * row * n * most, threads=threads, part=part)
    results = []
    for call in range(calls):
        splits = np.array([1 + (call + me + k) % most for k in range(n)])
        x = np.full((splits.sum(), row), 100 * call + me, "uint32")
        out = np.zeros((n * most, row), "uint32")
        out_splits, wanted = np.zeros(n, "int64"), [1 + (call + me + k) % most for k in range(n)]
        exchange.bind(x, splits, out, out_splits)(None)
        results.append((splits, out, out_splits, wanted, np.repeat(100 * call + np.arange(n), wanted)))
    world.synchronize()
    return all(
        counts.tolist() == wanted and (out[: len(rows)] == rows[:, None]).all()
        for _, out, counts, wanted, rows in results
    )


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks, calls", [(2, 3)])
def test_right_in_every_schedule(n_ranks, calls):
    def main():
        assert few_calls(variable, calls)

    found = sk.emu.explore(main, n_ranks, exhaustive=True, local_size=1, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


def is_wrong(n_ranks, n):
    """Whether it is seen in n schedules, with several blocks."""
    options = dict(local_size=1 + (n_ranks == 4), delivery="unordered", races=True)
    return goes_wrong(sk.emu.run, few_calls, n_ranks, (variable, 5, 2, 40, 128), **options, each=seeds(n))


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_nothing_is_wrong_otherwise(n_ranks):
    assert not is_wrong(n_ranks, 5)


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize(
    "change",
    [
        omit("put", 1),
        argument("put", 3, "epoch + 1", 1),
        omit("signal_wait_until"),
        omit("cuda.syncthreads", 2),
        omit("copy_block", 1),
        omit("put", 2),
        callee("put", "(put if begin < end else lambda *_: None)", 2),
        omit("wait_for"),
    ],
)
def test_each_line_is_needed(mutate, n_ranks, change):
    mutate(variable, change)
    assert is_wrong(n_ranks, 8)


def test_rows_that_differ_are_reported(pes):
    def main():
        world = sk.init()
        x, splits = np.zeros((4, 4 + world.rank)), np.ones(2, "int64")
        AllToAllV(world, 1024)(x, splits, np.zeros((8, 4 + world.rank)), splits.copy())

    with pytest.raises(ValueError, match=r"rank 0 calls AllToAllV of rows of float64 \(4,\) .*, rank 1 .*5,"):
        pes(2).run(main)


def test_without_far_ranks_it_does_not_call_nvshmem():
    for name, calls in (("push_all_to_all_v", False), ("push_all_to_all_v_network", True)):
        kernel, argument_types, _ = listed(variable)[name]
        assert ("nvshmem" in compile_ptx(kernel, argument_types)) == calls
