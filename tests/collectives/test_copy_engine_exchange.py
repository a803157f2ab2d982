"""What copy engines bring piece by piece, on the emulator: copies to places, and exchanges whose segments are
stored. (test_reduce_scatter_copy.py and test_all_reduce_copy.py have what is combined.)"""

import numpy as np
import pytest
from numba import cuda

import shmemkit as sk
from shmemkit.device import lamport_load, store_piece

EXCHANGES = {"all_to_all": ("copy_engine", sk.AllToAll), "all_gather": ("copy_staged", sk.AllGather)}
exchanges = pytest.mark.parametrize("kind", EXCHANGES)
PATTERN = 5, 7


@cuda.jit
def spoil(x):
    for i in range(x.size):
        x[i] = 0


@cuda.jit
def take(out, lines):
    for i in range(3):
        (piece,) = lamport_load(lines, (i,), 5, 7)
        store_piece(out, i, piece)


def copied(calls=1, first=PATTERN, piece=0, at=0):
    """Three pieces to the other rank, in each call."""
    world = sk.init()
    x, out = (np.arange(6 + at, dtype="uint64") + 100 * world.rank)[at:], np.zeros(6, "uint64")
    x[2:4] += np.array(piece, "uint64")
    lines = world.zeros((6,), "uint64", "lines")
    lines.reshape(-1, 2)[:] = first
    world.barrier()
    there = world.peer_view(lines, 1 - world.rank)
    copy = world.backend.copy_pieces(there, x.view("uint8"), PATTERN)
    for _ in range(calls):
        copy(world.stream)
        take[1, 1, world.stream](out, lines)
    world.barrier()
    world.synchronize()
    assert (out == np.arange(6) + 100 * (1 - world.rank)).all()
    assert (lines.reshape(-1, 2) == PATTERN).all()


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_copies_to_places(pes):
    pes(2).run(copied)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"calls": 2}, r"a copy: lines\[\d\] on rank [01] (is not empty|was made empty by a launch)"),
        ({"first": (5, 0)}, r"a copy: lines\[4\] on rank [01] is not empty"),
        ({"piece": [3, 4]}, r"a copy: the piece equals the pattern of an empty place"),
        ({"at": 1}, r"a copy of 48 bytes at 0x\w+8 to 0x\w+0: size and addresses must be multiples of 16"),
    ],
)
def test_wrong_copies(wrong, message):
    """Two calls need something between them that says that the places are empty; pieces are not the
    pattern: those of rank 0 are 2 + 3 and 3 + 4."""
    found = sk.emu.explore(
        copied, 2, tuple({"calls": 1, "first": PATTERN, "piece": 0, "at": 0, **wrong}.values())
    )
    assert found.failure is not None
    found.failure.__traceback__ = None
    with pytest.raises(sk.emu.EmulatorError, match=message):
        raise found.failure


def calls(kind, sizes, dtype, offsets=(0,), threads=4):
    """One after another, without a barrier of the host between them. `offsets` of x, in elements, on ranks
    and in calls in turn."""
    method, kind = EXCHANGES[kind]
    world = sk.init()
    n, me = world.n_ranks, world.rank
    exchange = kind._maker(method)(world, max(sizes) * np.dtype(dtype).itemsize * n, threads=threads)
    runs, xs, outs, expected = [], [], [], []
    for call, size in enumerate(sizes):
        given = [
            100 * call + 10 * r + np.arange(n * size if exchange.personalized else size) for r in range(n)
        ]
        offset = offsets[(me + call) % len(offsets)]
        x = np.concatenate([np.zeros(offset), given[me]]).astype(dtype)[offset:]
        outs.append(np.zeros(n * size, dtype))
        parts = [g.reshape(n, size)[me] if exchange.personalized else g for g in given]
        expected.append(np.concatenate(parts).astype(dtype))
        xs.append(x.view("uint8"))
        unit = "uint8" if (x.ctypes.data | outs[-1].ctypes.data | x.nbytes) % 8 else "uint64"
        runs.append(exchange.bind(x.view(unit), outs[-1].view(unit), False))
    for run, x in zip(runs, xs, strict=True):
        run(None)
        spoil[1, 1, world.stream](x)  # the call has ended: x may be used again
    world.synchronize()
    for out, wanted in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out, wanted)
    exchange.free()


@pytest.mark.each_value
@pytest.mark.every(3)
@exchanges
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_ranks, sizes", [(1, [5]), (2, [100, 3, 64]), (3, [300, 1, 128, 7]), (8, [40, 6])])
def test_sizes(pes, small_chunks, kind, n_ranks, sizes):
    pes(n_ranks).run(calls, kind, sizes, "uint64")


@pytest.mark.each_value
@exchanges
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize(
    "dtype, offsets", [("uint8", (0, 1, 3)), ("float32", (0, 4, 1)), ("float64", (2, 1))]
)
def test_threads_send_what_is_not_at_multiples_of_16_bytes(pes, small_chunks, kind, dtype, offsets):
    """On some ranks, all of it; and on all of them, what is left of a segment."""
    pes(3).run(calls, kind, [97, 12, 80, 1], dtype, offsets)


@pytest.mark.slow
@exchanges
def test_right_in_every_schedule(kind):
    """Of a piece, and two and a half. It fails without the barrier, and without any of the orders of the
    streams."""
    found = sk.emu.explore(calls, 2, (kind, [2, 5], "uint64", (0,), 1), exhaustive=True, heap_size=1 << 16)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.parametrize("multiprocessors, blocks", [(1, 1), (56, 28), (264, 66)])
def test_half_of_the_multiprocessors(pes, multiprocessors, blocks):
    def main():
        world = sk.init()
        world.backend.multiprocessors = multiprocessors
        exchange = sk.AllToAll._maker("copy_engine")(world, 1 << 20)
        return exchange.storing(*[np.zeros(1 << 17, "uint64")] * 2).grid[0]

    assert pes(1).run(main) == [blocks]


METHODS = [*((kind, name) for name, kind in EXCHANGES.values()), (sk.ReduceScatter, "copy_engine")]


@pytest.mark.parametrize("kind, method", METHODS)
def test_what_cannot_be_counted_is_refused(pes, kind, method):
    """Lines of more than 16 GiB, before they are asked for."""

    def main():
        options = ("sum",) * (kind is sk.ReduceScatter)
        with pytest.raises(ValueError, match=f"{method}: its slots would take .*; it is for smaller"):
            kind._maker(method)(sk.init(), 18 << 30, *options)

    pes(1).run(main)


@pytest.mark.slow
@exchanges
def test_many_ranks(pes, small_chunks, kind):
    pes(18).run(calls, kind, [5, 2], "uint64")


def test_many_ranks_are_not_combined(pes):
    def main():
        with pytest.raises(ValueError, match="copy_engine: there are 17 ranks; it is for 16 at most"):
            sk.ReduceScatter._maker("copy_engine")(sk.init(), 64, "sum")

    pes(17).run(main)


def to_the_root(sizes, dtype):
    """Gathers and reduces to each rank, of x at any offset, one after the other."""
    world = sk.init()
    n, me = world.n_ranks, world.rank
    for root in range(n):
        gather = sk.Gather(world, 8 * n * max(sizes), root, "copy_engine")
        reduce = sk.Reduce(world, 8 * max(sizes), root, "sum", "copy_engine")
        for call, size in enumerate(sizes):
            given = [np.arange(size + call).astype(dtype)[call:] + np.array(r, dtype) for r in range(n)]
            got, total = gather(given[me]), reduce(given[me])
            if me == root:
                np.testing.assert_array_equal(got, given)
                np.testing.assert_array_equal(total, sum(given))
            world.synchronize()


@pytest.mark.each_value
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_ranks, dtype", [(1, "float32"), (2, "int16"), (3, "uint8"), (3, "float64")])
def test_to_the_root(pes, small_chunks, n_ranks, dtype):
    """x that begins at no multiple of 16 bytes is sent by threads, as is the rest of odd sizes."""
    pes(n_ranks).run(to_the_root, [40, 7, 0, 33, 1, 16], dtype)
