"""GemmReduceScatter and GemmAllReduce over several nodes on the emulator: results, repeats, graphs, the order
of adding, with races checked and messages late; and what goes wrong when a part of the protocol is taken
away."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from fast import slow
from gemms import check_graphs_and_streams
from mutations import argument, goes_wrong, omit, omit_store, seeds, single_buffer, store
from numba import cuda
from test_gemm_rs import BFLOAT16, OBJECTS, compute, expected, given

import shmemkit as sk
from shmemkit.gemm import last_block
from shmemkit.gemm.reduce_scatter import fused_2d

pytestmark = pytest.mark.usefixtures("messages")
late = pytest.mark.schedules(deliveries="unordered", seeds=[None])


SMALL = {"tile": (64, 32), "chunk": 8}
summed = functools.partial(compute, options=SMALL)


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=2")


def all_right(pes, nodes, local_size, *args):
    return all(map(all, pes(nodes * local_size, local_size=local_size).run(summed, *args)))


@pytest.mark.each_value
@late
@pytest.mark.parametrize(
    "nodes, local_size, part_dtype", [(2, 1, "float32"), *slow((3, 1, None), (2, 2, None), (2, 2, "float32"))]
)
def test_sizes(pes, nodes, local_size, part_dtype):
    n = nodes * local_size
    sizes = [(2 * n, 24, 8), *([(n, 8, 72)] if local_size > 1 else []), (n, 40, 8)]
    assert all_right(pes, nodes, local_size, "rs", sizes, "fused_2d", "kn", False, part_dtype)


@pytest.mark.slow
@late
def test_six_ranks(pes):
    assert all_right(pes, 2, 3, "rs", [(6, 8, 8)] * 2, "fused_2d")


@late
@pytest.mark.parametrize(
    "nodes, local_size, symmetric", [(2, 1, True), *slow((2, 2, False), (2, 2, True), (3, 1, False))]
)
def test_all_reduce(pes, nodes, local_size, symmetric):
    n = nodes * local_size
    sizes = [(n, 24, 8), (2 * n, 8, 8)]
    assert all_right(pes, nodes, local_size, "ar", sizes, "fused_2d", "kn", symmetric)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["rs", *slow("ar")])
def test_operands_by_columns(pes, op):
    assert all_right(pes, 2, 2, op, [(16, 24, 24)], "fused_2d", "mk")


@pytest.mark.slow
@late
@pytest.mark.parametrize("op", OBJECTS)
def test_graphs_and_streams(pes, op):
    def main():
        world = sk.init()
        product, sizes = OBJECTS[op](world, 4, 40, method="fused_2d", options=SMALL), [(2, 40, 8), (4, 8, 8)]
        calls = []
        for call, size in enumerate(sizes):
            want = expected(op, call, size, world)
            calls.append((*given(call, size, world.rank), np.empty(want.shape, BFLOAT16), want))
        check_graphs_and_streams(world, product, calls)

    pes(2, local_size=1).run(main)


def sums(parts, part_dtype):
    """An element of each rank's rows, where the product of rank r is the sum of ``parts[r]``."""
    world = sk.init()
    n = world.n_ranks
    a, b = np.zeros((n, 16), BFLOAT16), np.ones((16, 8), BFLOAT16)
    a[:, :2] = parts[world.rank]
    out = sk.GemmReduceScatter(world, n, 8, "bfloat16", part_dtype, "fused_2d", options=SMALL)(a, b)
    world.synchronize()
    return float(out[0, 0])


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "parts, part_dtype, result",
    [
        # In float32 1 + 2**24 is 2**24.
        ([(1, 0), (2**24, 0), (-(2**24), 0)], None, 0),
        ([(2**24, 0), (-(2**24), 0), (1, 0)], None, 1),
        # Of 257 bfloat16 makes 256.
        ([(256, 1), (-256, 0)], None, 0),
        ([(256, 1), (-256, 0)], "float32", 1),
    ],
)
def test_the_order_of_the_nodes_and_what_is_rounded(pes, parts, part_dtype, result):
    assert set(pes(len(parts), local_size=1).run(sums, parts, part_dtype)) == {result}


@pytest.mark.slow
def test_the_order_of_sending(pes, messages):
    """The next node first, and none to my own."""
    assert all_right(pes, 3, 1, "rs", [(3, 8, 8)], "fused_2d")
    sent = [[to for rank, to in messages if rank == sender] for sender in range(3)]
    assert sent == [[1, 2], [2, 0], [0, 1]]


@cuda.jit
def first_columns(a, out):
    """In the place of a product."""
    for i in range(out.size):
        out[i] = a[i]


def few_calls(calls, chunk):
    """Of one thread per block, little enough for all schedules."""
    world = sk.init()
    options = {**fused_2d.Fused2D.options, "chunk": chunk}
    method = fused_2d.Fused2D(world, world.n_ranks, 16, "bfloat16", "bfloat16", options)
    method.threads = 1
    method._launches.clear()
    method._product = lambda a, b, out: sk.bind(first_columns, 1, 1, (words(a), words(out)))
    a, b, out = (
        np.zeros((world.n_ranks, 16), BFLOAT16),
        np.zeros((16, 16), BFLOAT16),
        np.zeros((1, 16), BFLOAT16),
    )
    for call in range(calls):
        a[:] = call + world.rank + 10 * np.arange(world.n_ranks)[:, None]
        method.bind(a, b, out)(None)
        world.synchronize()
        n = world.n_ranks
        assert (out == n * (call + 10 * world.rank) + sum(range(n))).all()
        out[:] = np.nan


def words(array):
    return array.reshape(-1).view("uint16")


@pytest.mark.slow
@pytest.mark.parametrize("nodes, calls, chunk", [(2, 3, 8), (2, 2, 2)])
def test_right_in_every_schedule(nodes, calls, chunk):
    """The third call uses the first buffer again."""
    found = sk.emu.explore(few_calls, nodes, (calls, chunk), exhaustive=True, local_size=1, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


# ---- on the host


def test_what_is_refused(pes):
    def main():
        world = sk.init()
        with pytest.raises(ValueError, match="it is for bfloat16 and float16"):
            sk.GemmReduceScatter(world, 8, 8, "float32", method="fused_2d")
        with pytest.raises(ValueError, match="on another node"):
            sk.GemmReduceScatter(world, 8, 8, method="fused")
        x = np.zeros((8, 16), BFLOAT16)
        product = sk.GemmAllReduce(world, 8, 16, method="fused_2d")
        for arrays, reason in [
            ((x, x.T[:, :4]), "N is 4; M must be a multiple of the number of ranks, 2"),
            ((x[:7], x.T), "M is 7"),
        ]:
            with pytest.raises(ValueError, match=reason):
                product(*arrays)
        product.free()

    pes(2, local_size=1).run(main)

    def on_one_node():
        with pytest.raises(ValueError, match="there is one node; it is for several"):
            sk.GemmReduceScatter(sk.init(), 8, 8, method="fused_2d")

    pes(2).run(on_one_node)


def test_which_method(pes):
    def main():
        world = sk.init()
        for kind in OBJECTS.values():
            product = kind(world, 8, 8)
            assert "fused_2d" in product._methods and "fused" not in product._methods
            assert product.method_for(8, 8, 8) == "sequential"  # on the emulator
            product.free()

    pes(4, local_size=2).run(main)
    gpus = object.__new__(fused_2d.Fused2D)
    gpus.world = SimpleNamespace(n_ranks=16, n_nodes=2, backend=SimpleNamespace(name="nvshmem"))
    sizes = (8192, 1024, 8192), (8192, 1024, 8191), (8192, 1023, 8192), (16 * 511, 64, 8192), (64, 8192, 8192)
    found = [gpus.refuses(*size) is None and gpus.is_for(*size) for size in sizes]
    assert found == [True, False, False, True, False]


# ---- what is needed


def is_wrong(n):
    """Whether it is seen in n schedules."""
    args, options = ("rs", [(2, 40, 8)] * 3, "fused_2d"), dict(local_size=1, delivery="unordered", races=True)
    return goes_wrong(sk.emu.run, summed, 2, args, **options, each=seeds(n))


@pytest.mark.slow
def test_nothing_is_wrong_otherwise():
    assert not is_wrong(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        omit("quiet"),
        omit("signal_wait_until"),
        argument("signal_wait_until", 2, "epoch - 1"),
        omit("cuda.syncthreads"),
        omit_store("epochs[]"),
        (last_block, omit_store("done[]")),
        (last_block, store("last", "cuda.atomic.add(done, 0, 1) == 0")),
        argument("put_signal_nbi_block", 2, "span(inbox_full, node * MAX_CHUNKS, 1)"),
        store("there", "span(inbox, buffer * n_nodes * room + begin, size)"),  # one slot for all nodes
        single_buffer(),
    ],
)
def test_each_part_is_needed(mutate, change):
    """Without it the result is wrong, or the emulator reports why it may be."""
    mutate(*(change if isinstance(change, tuple) else (fused_2d, change)))
    assert is_wrong(3)
