"""Gather on the emulator: methods, ranks, roots, lengths, dtypes, in place, repeats, streams and graphs, with
races checked and messages late."""

import numpy as np
import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st

import shmemkit as sk
from shmemkit.emu.stream import Stream
from shmemkit.runtime.symmetric_memory import as_dtype

methods = pytest.mark.parametrize("method", sk.Gather.methods)


def gather_all(method, sizes, root=0, dtype="float32", unaligned=0, in_place=False, symmetric=False):
    """One after another, by one object. The private arrays of rank 0 are aligned, also if others' are not."""
    world = sk.init()
    n, dtype = world.n_ranks, as_dtype(dtype)
    gather = sk.Gather(world, n * max(sizes) * dtype.itemsize, root, method)
    first = unaligned * (1 if symmetric else world.rank)
    for call, size in enumerate(sizes):
        expected = [np.random.default_rng([call, r]).integers(0, 100, size).astype(dtype) for r in range(n)]
        room = np.zeros(first + n * size + 5, dtype)
        if symmetric:
            room = gather.output(room.shape, dtype)
            room[:] = 0
            world.barrier()
        out = room[first : first + n * size].reshape(n, size)
        x = out[root] if in_place else np.zeros(first + size, dtype)[first:]
        x[...] = expected[world.rank]
        if world.rank == root:
            assert gather(x, out) is out
        else:
            assert gather(x) is None
        world.synchronize()
        if world.rank == root:
            np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(x, expected[world.rank])
        assert not room[:first].any() and not room[first + n * size :].any()
    gather.free()
    with pytest.raises(RuntimeError, match="freed"):
        gather(x)


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_pes, root", [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_lengths(pes, small_chunks, n_pes, root, method):
    pes(n_pes).run(gather_all, method, [1, 40, 0, 333, 41, 7, 300], root)


@pytest.mark.slow
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
@pytest.mark.parametrize("n_pes, sizes", [(5, [7, 130, 1]), (8, [64, 9]), (16, [33])])
def test_many_ranks(pes, small_chunks, n_pes, sizes, method):
    pes(n_pes).run(gather_all, method, sizes, 2, "int16")


@pytest.mark.each_value
@methods
@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "complex128"])
@pytest.mark.parametrize("in_place", [False, True])
def test_dtypes_unaligned(pes, method, dtype, in_place):
    pes(3).run(gather_all, method, [1, 300, 33], 1, dtype, 3, in_place)


@methods
def test_larger_than_a_step(pes, small_chunks, method):
    """Of 3 steps; the arrays of rank 1 are not aligned."""
    size = {"ll": 1100}.get(method, 60_000)
    pes(2).run(gather_all, method, [size, 3, size + 1], 0, "uint8", 1)


@methods
@examples(8)
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    n_pes=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    dtype=st.sampled_from(["uint8", "float32", "float64"]),
    unaligned=st.integers(0, 3),
    in_place=st.booleans(),
    symmetric=st.booleans(),
)
def test_any_shape(pes, small_chunks, method, seed, n_pes, sizes, dtype, unaligned, in_place, symmetric):
    args = method, sizes, n_pes // 2, dtype, unaligned, in_place, symmetric
    pes(n_pes, seed=seed).run(gather_all, *args)


@pytest.mark.each_value
@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_streams_and_graphs(pes, method):
    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        gather = sk.Gather(world, n * 320, 1, method)
        other = Stream(world.stream.machine, me)
        xs, graphs = [np.zeros(40), np.zeros(9)], []
        outs = [np.zeros((n, x.size)) if me == 1 else None for x in (*xs, xs[0])]
        for stream in (world.stream, other):
            stream.begin_capture()
            gather(xs[0], outs[0], stream)
            gather(xs[1], outs[1], stream)
            graphs.append(stream.end_capture())
        for call in range(4):
            xs[0][:], xs[1][:] = call + 100 * me, -call + 100 * me
            graphs[call % 2].launch(world.stream)
            gather(xs[0], outs[2], (None, world.stream)[call % 2])
            world.synchronize()
            if me == 1:
                for out, wanted in zip(outs, (call, -call, call), strict=True):
                    assert (out == wanted + 100 * np.arange(n)[:, None]).all()

    pes(2).run(main)


def few_calls(method, calls, n_bytes):
    """Of one thread per block, to a root that nobody holds up: little enough for all schedules."""
    world = sk.init()
    gather = sk.Gather.maker(method)(world, 8 * world.n_ranks, 0, threads=1)
    outs = [np.zeros(world.n_ranks * n_bytes, "uint8") for _ in range(calls)]
    for call, out in enumerate(outs):
        x = np.full(n_bytes, 10 * call + world.rank, "uint8")
        gather.bind(x, x if world.rank else out, False)(None)
    world.synchronize()
    if world.rank == 0:
        ranks = np.arange(world.n_ranks).repeat(n_bytes)
        assert all((out == 10 * call + ranks).all() for call, out in enumerate(outs))


@pytest.mark.slow
@pytest.mark.parametrize("method, n_pes, calls", [("ll", 2, 4), ("ll", 3, 3), ("push", 2, 4), ("push", 3, 3)])
def test_right_in_every_schedule(method, n_pes, calls):
    """It fails with one half in the place of two, if a sender does not wait for the root, or the root for
    senders."""
    args = method, calls, 8
    found = sk.emu.explore(few_calls, n_pes, args, exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda w: (w, 8, 2), "root is 2; it must be 0 to 1"),
        (
            lambda w: (w, 8, 0, "tree"),
            "method is 'tree'; it must be 'll', 'll128', 'push', 'push_2d'",
        ),
        (lambda w: (w, 8, w.rank), "rank 0 gives root=0, rank 1 gives root=1"),
    ],
)
def test_wrong_arguments(pes, arguments, message):
    def main():
        world = sk.init()
        with pytest.raises(ValueError, match=message):
            sk.Gather(*arguments(world))

    pes(2).run(main)


def test_wrong_arrays(pes):
    def main():
        world = sk.init()
        gather = sk.Gather(world, 64, 1)
        x = np.zeros(8, "float32")
        wrong = [
            (np.zeros(9, "float32"), None, "has 72 bytes, more than max_nbytes=64"),
            (np.zeros(16, "float32")[::2], None, "it must be C-contiguous"),
        ]
        if world.rank == 1:
            room = np.zeros(20, "float32")
            wrong += [
                (x, np.zeros((2, 8), "int32"), "out is int32 .*; out must be float32"),
                (x, np.zeros(8, "float32"), "out must be float32 with 16 elements"),
                (room[:8], room[:16], "overlap; they must lie apart, or x must be its own part"),
            ]
        else:
            wrong += [
                (
                    x,
                    np.zeros((2, 8), "float32"),
                    "out is given on rank 0; it must be None there. The root, rank 1, gets",
                )
            ]
        for array, out, message in wrong:
            with pytest.raises(ValueError, match=message):
                gather(array, out)
        with pytest.raises(TypeError, match="Gather: x is a list; it must be a NumPy array"):
            gather([1, 2])

    pes(2).run(main)


@pytest.mark.parametrize("method", ["ll", "push"])
def test_several_nodes_are_refused(pes, method):
    def main():
        with pytest.raises(ValueError, match=f"gather {method} cannot be used here"):
            sk.Gather(sk.init(), 8, 0, method)

    pes(2, local_size=1).run(main)
