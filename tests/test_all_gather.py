"""All-gathers on the emulator: methods, ranks, lengths, dtypes, repeated calls, in place, graphs; under
several schedules and without races."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import cuda, uint8, uint64

import shmemkit as sk
from shmemkit.device import (
    BULK_WORDS,
    bulk_copy_warp,
    ll128_pack_block,
    ll128_pack_warp,
    ll128_recv_block,
    ll128_recv_pack_block,
    ll128_recv_pack_warp,
    ll128_recv_warp,
    ll128_words,
    ll_pack_block,
    ll_pack_warp,
    ll_recv_block,
    ll_recv_pack_block,
    ll_recv_pack_warp,
    ll_recv_warp,
    ll_words,
    num_ranks,
    rank,
    symm_at,
)
from shmemkit.emu.stream import Stream
from shmemkit.kernels.all_gather import METHODS
from shmemkit.memory import DTYPES, as_dtype

methods = pytest.mark.parametrize("method", sk.AllGather.methods)
SIZES = [1, 0, 7, 8, 33, 4096, 5000, 3]  # elements; one after another, of one object


def values(call, size, dtype, n):
    """What all ranks give in `call`: other bytes each time."""
    return np.stack([np.random.default_rng([call, r]).integers(0, 100, size) for r in range(n)]).astype(
        as_dtype(dtype)
    )


def gather_all(method, sizes, dtype="float32", unaligned=0, in_place=False, symmetric=False):
    world = sk.init()
    n, item = world.n_ranks, as_dtype(dtype).itemsize
    gather = sk.AllGather(world, n * max(sizes) * item, method)
    for call, size in enumerate(sizes):
        expected = values(call, size, dtype, n)
        room = np.zeros(unaligned + n * size + 5, as_dtype(dtype))
        if symmetric:
            room = gather.output(room.shape, dtype)
            room[:] = 0
            world.barrier()
        out = room[unaligned : unaligned + n * size].reshape(n, size)
        x = out[world.rank] if in_place else np.zeros(unaligned + size, as_dtype(dtype))[unaligned:]
        x[...] = expected[world.rank]
        assert gather(x, out) is out
        world.synchronize()
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(x, expected[world.rank])
        assert not room[:unaligned].any() and not room[unaligned + n * size :].any()
    gather.free()
    with pytest.raises(RuntimeError, match="freed"):
        gather(x, out)


@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, *range(2)])
@pytest.mark.parametrize("n_pes", [1, 2, 3, 4, 5, 8])
def test_any_number_of_ranks(pes, n_pes, method):
    pes(n_pes).run(gather_all, method, [9, 4, 0, 300])


@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_pes", [1, 2, 3])
def test_into_symmetric_memory(pes, n_pes, method):
    pes(n_pes).run(gather_all, method, [9, 4, 0, 300], "float32", 0, False, True)


@methods
@pytest.mark.parametrize("in_place", [False, True])
def test_into_one_output_again_and_again(pes, method, in_place):
    """What uses the output comes between; no barrier does."""

    def main():
        world = sk.init()
        n = world.n_ranks
        gather = sk.AllGather(world, n * 40, method)
        out, total = gather.output((n, 40), "uint8"), np.zeros(1, "int64")
        for call in range(5):
            x = out[world.rank] if in_place else np.zeros(40, "uint8")
            fill[1, 8, world.stream](x, 10 * call + world.rank)
            gather(x, out)
            add[1, 1, world.stream](out.reshape(-1), total)
        world.synchronize()
        assert total[0] == 40 * sum(10 * call + k for call in range(5) for k in range(n))

    pes(3).run(main)


@cuda.jit
def fill(x, value):
    for i in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        x[i] = value


@cuda.jit
def add(x, total):
    for i in range(x.size):
        total[0] += x[i]


@methods
@pytest.mark.schedules(deliveries="unordered", seeds=[None, *range(3)])
def test_on_several_streams(pes, method):
    """Calls on another stream follow those before, also in a capture."""

    def main():
        world = sk.init()
        n = world.n_ranks
        gather = sk.AllGather(world, n * 40, method)
        other = Stream(world.stream.machine, world.rank)
        x, outs = np.zeros(40, "uint8"), [np.zeros((n, 40), "uint8") for _ in range(3)]
        for call in range(6):
            stream = (None, other, world.stream)[call % 3]
            world.synchronize()
            x[:] = 10 * call + world.rank
            gather(x, outs[0], stream)
            gather(x[:7], outs[1].reshape(-1)[: 7 * n], other)
            gather(x, outs[2], stream)
            world.synchronize()
            for out in (outs[0], outs[2]):
                assert (out == 10 * call + np.arange(n)[:, None]).all()
        world.stream.begin_capture()
        gather(x, outs[0])
        other.wait_event(world.stream.record())
        gather(x, outs[1], other)
        gather(x, outs[2])
        graph = world.stream.end_capture()
        for call in range(3):
            x[:] = 10 * call + world.rank
            graph.launch(world.stream)
            world.synchronize()
            assert all((out == 10 * call + np.arange(n)[:, None]).all() for out in outs)

    pes(3).run(main)


@methods
def test_lengths(pes, method):
    pes(3).run(gather_all, method, SIZES, "uint8")


@methods
def test_many_ranks(pes, method):
    pes(16).run(gather_all, method, [5, 1], "int16")


@methods
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(pes, method, dtype):
    pes(2).run(gather_all, method, [5, 6], dtype)


@methods
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    n_pes=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    dtype=st.sampled_from(["uint8", "int16", "float32", "float64", "complex128"]),
    unaligned=st.integers(0, 3),
    in_place=st.booleans(),
)
def test_any_shape(pes, method, seed, n_pes, sizes, dtype, unaligned, in_place):
    pes(n_pes, seed=seed).run(gather_all, method, sizes, dtype, unaligned, in_place)


@methods
@pytest.mark.schedules(deliveries="eager", seeds=range(4))
def test_graphs_interleaved_with_calls(pes, method):
    def main():
        world = sk.init()
        n = world.n_ranks
        gather = sk.AllGather(world, n * 40 * 4, method)
        xs, outs, graphs = [np.zeros(m, "int32") for m in (40, 3)], [], []
        for x in xs:
            world.stream.begin_capture()
            outs.append(gather(x, np.zeros((n, x.size), "int32")))
            graphs.append(world.stream.end_capture())
        for repeat in range(7):
            x, out = xs[repeat % 2], outs[repeat % 2]
            x[:] = 100 * repeat + world.rank
            if repeat == 4:
                gather(x, out)
            else:
                graphs[repeat % 2].launch(world.stream)
            world.synchronize()
            assert (out == 100 * repeat + np.arange(n)[:, None]).all()

    pes(3).run(main)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda w: (w, 8, "lll"), "method='lll': 'll', .* or 'auto' are allowed"),
        (lambda w: (w, -1), "max_nbytes=-1: 0 or more"),
        (lambda w: (3, 8), "the first argument is the World"),
    ],
)
def test_wrong_arguments(pes, arguments, message):
    def main():
        with pytest.raises((TypeError, ValueError), match=message):
            sk.AllGather(*arguments(sk.init()))

    pes(1).run(main)


@pytest.mark.parametrize("method", ["auto", *sk.AllGather.methods])
@pytest.mark.parametrize("where", [{0, 1, 2}, {1}], ids=["everywhere", "on_rank_1"])
def test_nothing_is_left_of_one_that_is_refused(pes, monkeypatch, capfd, method, where):
    """What does not fit on one GPU is refused on all ranks."""

    def bind(*args, **options):
        if sk.current().rank in where:
            raise ValueError("does not fit")
        return real(*args, **options)

    real = sk.bind
    monkeypatch.setattr("shmemkit.kernels.method.bind", bind)
    monkeypatch.setattr("shmemkit.stream_barrier.bind", bind)

    def main():
        with sk.init() as world:
            reason = "does not fit" if world.rank in where else "rank 1: does not fit"
            with pytest.raises(ValueError, match=f"{'.*: ' * (method == 'auto')}{reason}") as caught:
                sk.AllGather(world, 2 << 20, method)
            assert method == "auto" or str(caught.value) == reason
            world.host_barrier()

    pes(3).run(main)
    assert "without free" not in capfd.readouterr().err


def test_wrong_arrays(pes):
    def main():
        world = sk.init()
        gather = sk.AllGather(world, 64)
        x = np.zeros(4, "float32")
        for array, out, message in [
            (x, np.zeros(7, "float32"), "out 2 times as large"),
            (x, np.zeros((8, 2), "float32")[:, 0], r"out \(8,\) has strides \(8,\): C-contiguous"),
            (x, np.zeros(8, "int32"), "one dtype is allowed"),
            (np.zeros(8, "float32")[::2], None, "C-contiguous"),
            (np.zeros(9, "float32"), None, "72 bytes gathered, max_nbytes=64"),
        ]:
            with pytest.raises(ValueError, match=message):
                gather(array, out)

        for array, out in (([1.0] * 4, None), (x, [0.0] * 8)):
            with pytest.raises(TypeError, match="x and out must be of numpy.ndarray, given"):
                gather(array, out)
        room = np.zeros(9, "float32")
        for first in (1, 3, 5):
            with pytest.raises(ValueError, match="x lies in out, but not where its part is"):
                gather(room[first : first + 4], room[:8])

    pes(2).run(main)


# ---- the primitives of LL


PROTOCOLS = {
    ("ll", "warp"): (ll_words, ll_pack_warp, ll_recv_warp, ll_recv_pack_warp),
    ("ll", "block"): (ll_words, ll_pack_block, ll_recv_block, ll_recv_pack_block),
    ("ll128", "warp"): (ll128_words, ll128_pack_warp, ll128_recv_warp, ll128_recv_pack_warp),
    ("ll128", "block"): (ll128_words, ll128_pack_block, ll128_recv_block, ll128_recv_pack_block),
}


@pytest.mark.parametrize("protocol, form", PROTOCOLS)
@pytest.mark.parametrize("dtype, size", [("uint8", 21), ("int16", 5), ("float64", 130), ("complex128", 4)])
@pytest.mark.schedules(deliveries="eager", seeds=[None, 0, 1])
def test_packed_passed_on_and_unpacked(pes, protocol, form, dtype, size):
    """Rank 0 sends to 1, which passes on to 2, which sends back to 0; twice, through one buffer."""
    words, pack, recv, pass_on = PROTOCOLS[protocol, form]

    @cuda.jit
    def kernel(x, y, lines, n_bytes):
        following = symm_at(lines, (rank() + 1) % num_ranks())
        for flag in (7, 8):
            if rank() == 0:
                pack(following, x, flag)
                recv(y, lines, flag)
                cuda.syncthreads()
            else:
                pass_on(following, lines, words(n_bytes), flag)

    def main():
        world = sk.init()
        x, y = np.arange(1, size + 1).astype(dtype), np.zeros(size + 1, dtype)
        kernel[1, 32 if protocol == "ll128" else 20](
            x, y[:size], sk.zeros(words(x.nbytes), "uint64"), x.nbytes
        )
        assert world.rank or ((y[:size] == x).all() and y[size] == 0)

    pes(3).run(main)


def test_a_line_is_stored_at_once_and_its_data_are_read_after_the_flag(pes):
    """Who reads a line before its flag is there has a race."""

    @cuda.jit
    def kernel(x, y, lines, early):
        if rank() == 0:
            ll128_pack_warp(symm_at(lines, 1), x, 3)
        elif early:
            y[cuda.threadIdx.x % y.size] = lines[cuda.threadIdx.x % y.size]
        else:
            ll128_recv_warp(y, lines, 3)

    def main(early):
        world = sk.init()
        x, y = np.arange(1, 31).astype("uint64"), np.zeros(30, "uint64")
        kernel[1, 32](x, y, sk.zeros(ll128_words(x.nbytes), "uint64"), early)
        world.synchronize()
        assert early or world.rank == 0 or (y == x).all()

    pes(2).run(main, False)
    with pytest.raises(sk.emu.RaceError):
        sk.emu.run(main, 2, (True,), races=True)


@methods
def test_a_capture_between_calls_on_its_stream(pes, method):
    """Captured calls are of their graph; what comes after them on that stream follows the calls before."""

    def main():
        world = sk.init()
        n = world.n_ranks
        gather = sk.AllGather(world, n * 40, method)
        other = Stream(world.stream.machine, world.rank)
        x, outs = np.zeros(40, "uint8"), [np.zeros((n, 40), "uint8") for _ in range(4)]
        x[:] = world.rank
        gather(x, outs[0])
        other.begin_capture()
        gather(x, outs[1], other)
        gather(x, outs[2])
        graph = other.end_capture()
        gather(x, outs[3], other)
        world.synchronize()
        graph.launch(other)
        world.synchronize()
        for out in outs:
            assert (out == np.arange(n)[:, None]).all()

    pes(2).run(main)


def test_push_in_steps(pes, monkeypatch):
    """A part of several steps, of arrays that the TMA can and cannot move, one rank this and one that."""
    monkeypatch.setattr("shmemkit.kernels.all_gather.push_1d.STEP", 8192)

    def main():
        world = sk.init()
        gather = sk.AllGather(world, 2 * 50_000 * 24, "push_1d")
        for size, shift in ((50_000 * 24, 0), (50_000 * 24, world.rank), (20_000, 0), (1, 1)):
            room = np.zeros(size + 1, "uint8")
            x = room[shift : shift + size]
            x[:] = np.arange(size) % 250 + world.rank
            out = gather(x)
            world.synchronize()
            assert all((out[k] == np.arange(size) % 250 + k).all() for k in range(2))

    pes(2).run(main)


@pytest.mark.parametrize("method, error", [("push_1d", MemoryError), ("auto", ValueError)])
def test_what_does_not_fit_leaves_nothing_behind(method, error):
    """ "auto" looks for a method that fits, and says what it has tried."""

    def main():
        with sk.init() as world:
            with pytest.raises(error, match="symmetric heap exhausted"):
                sk.AllGather(world, 6 << 20, method)
            sk.free(sk.zeros(7 << 20, "uint8"))

    sk.emu.run(main, 2, heap_size=8 << 20)


def test_an_output_that_the_user_has_freed_is_not_freed_again(pes):
    def main():
        with sk.init() as world:
            gather = sk.AllGather(world, 64)
            sk.free(gather.output((2, 3), "uint8"))
            gather.free()
            with pytest.raises(RuntimeError, match="freed"):
                gather.output((2, 3), "uint8")

    pes(2).run(main)


def test_ll128_needs_whole_warps_and_lines(pes):
    @cuda.jit
    def kernel(lines, x):
        ll128_pack_block(lines, x, 1)

    def main(threads, first):
        lines = sk.init().zeros(256, "uint64")
        kernel[1, threads](lines[first:], np.zeros(960, "uint8"))

    pes(1).run(main, 64, 16)
    for threads, first, message in (
        (33, 0, "whole warps"),
        (32, 2, "multiple of 128"),
        (32, 144, "128 words"),
    ):
        with pytest.raises(sk.emu.EmulatorError, match=message):
            pes(1).run(main, threads, first)


@pytest.mark.parametrize("dtype, size", [("uint8", 0), ("uint8", 1), ("int16", 4097), ("float64", 5000)])
def test_bulk_copy(pes, dtype, size):
    @cuda.jit
    def kernel(y, x):
        buffer = cuda.shared.array(BULK_WORDS, uint64)
        bulk_copy_warp(symm_at(y, 1 - rank()), x, buffer)

    def main():
        world = sk.init()
        y = world.zeros(size + 1, dtype)
        kernel[1, 32](y[:size], (np.arange(size) % 100 + world.rank).astype(dtype))
        world.barrier()
        assert (y[:size] == np.arange(size) % 100 + 1 - world.rank).all() and y[size] == 0

    pes(2).run(main)


@pytest.mark.parametrize(
    "words, data, message",
    [
        (np.zeros(4, "uint32"), np.zeros(3, uint8.name), "lines must be a 1-D contiguous array of uint64"),
        (np.zeros(2, "uint64"), np.zeros(9, uint8.name), "9 bytes need 4 words, given 2"),
        (np.zeros(8, "uint64"), np.zeros(9, "int32")[::2], "must be contiguous"),
    ],
)
def test_wrong_lines(pes, words, data, message):
    @cuda.jit
    def kernel(lines, x):
        ll_pack_block(lines, x, 1)

    def main():
        sk.init()
        kernel[1, 1](words, data)

    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(1).run(main)


# ---- all schedules


@pytest.mark.parametrize(
    "method, n_pes, calls", [("ll", 2, 3), ("ll", 3, 1), ("pull", 2, 3), ("push_1d", 2, 3)]
)
def test_proven_for_a_small_size(method, n_pes, calls):
    """Three calls use the first half again. (ll128 is the kernel of ll.)"""

    def main():
        world = sk.init()
        n = world.n_ranks
        gather = METHODS[method](world, 4 * n)
        gather.threads = 1
        gather._launches.clear()
        for call in range(calls):
            x, out = np.full(4, 10 * call + world.rank, "uint8"), np.zeros((n, 4), "uint8")
            gather.bind(x, out.reshape(-1), False)(None)
            assert (out == 10 * call + np.arange(n)[:, None]).all()

    found = sk.emu.explore(main, n_pes, exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)
