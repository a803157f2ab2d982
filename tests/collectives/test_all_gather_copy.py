"""All-gathers by copy engines on the emulator: into symmetric and private memory, whole and beside a kernel
that consumes the segments. (test_all_gather.py has what all methods must do.)"""

import itertools
import re

import numpy as np
import pytest
from launched import MPIRUN, succeed
from numba import cuda
from small_kernels import fill, take

import shmemkit as sk
from shmemkit.backends.emulator import EmulatorBackend
from shmemkit.collectives.all_gather import copy_engine
from shmemkit.collectives.all_gather.copy_engine import CopyPull, CopyPush, Transfer
from shmemkit.device import notify, num_ranks, rank, symm_at, wait
from shmemkit.runtime import stream_barrier
from shmemkit.runtime.stream_barrier import arrive_and_wait
from shmemkit.runtime.symmetric_memory import as_dtype

METHODS = {"copy_push": CopyPush, "copy_pull": CopyPull}
methods = pytest.mark.parametrize("method", METHODS)
outputs = pytest.mark.parametrize("symmetric", [False, True], ids=["private", "symmetric"])


@cuda.jit
def consume(out, arrived, seen, last):
    """Take the segments up to the `last` as they come: mine, and those of the ranks after me."""
    size = out.size // num_ranks()
    for i in range(last):
        k = (rank() + i) % num_ranks()
        wait(arrived[k:], 1, "sys", "acquire", 1)
        for j in range(k * size + cuda.threadIdx.x, (k + 1) * size, cuda.blockDim.x):
            seen[j] = out[j]


def room_for(world, n, dtype, symmetric):
    return world.zeros(n, dtype) if symmetric else np.zeros(n, as_dtype(dtype))


@methods
@outputs
@pytest.mark.parametrize("overlaps", [False, True], ids=["whole", "overlap"])
def test_streams_write_single_signals_and_wait_for_none(pes, monkeypatch, overlaps, method, symmetric):
    made, real = [], EmulatorBackend.memory_operations

    def memory_operations(self, operations):
        made.append([(kind, value) for kind, _, value in operations])
        return real(self, operations)

    monkeypatch.setattr(EmulatorBackend, "memory_operations", memory_operations)
    if overlaps:
        pes(3).run(overlap_all, method, 2, 3, symmetric)
    else:
        pes(3).run(whole_all, method, 2, symmetric)
    assert made == [[("write", 1)]] * (6 if overlaps else 0)


def test_outputs_of_one_object_alternate_with_private_ones(pes):
    """The method of a call is not that of the one before it."""

    def main():
        world = sk.init()
        n = world.n_ranks
        gathers = [sk.AllGather(world, n * 12, method) for method in METHODS]
        outs = [
            gathers[0].output((n, 3), "int32"),
            np.zeros((n, 3), "int32"),
            gathers[1].output(3 * n, "int32"),
        ]
        for call in range(9):
            out = outs[call % 3]
            for gather in gathers:
                gather(np.full(3, 10 * call + world.rank, "int32"), out)
                assert (out.reshape(n, 3) == 10 * call + np.arange(n)[:, None]).all()
                world.barrier()  # x and the outputs are read and written by host programs

    pes(3).run(main)


@pytest.mark.each_value
@methods
@outputs
@pytest.mark.schedules(deliveries="eager", seeds=[None, 0, 1])
def test_graphs_interleaved_with_calls(pes, method, symmetric):
    def main():
        world = sk.init()
        n, stream = world.n_ranks, cuda.stream()
        gather = sk.AllGather(world, n * 40 * 4, method)
        xs, graphs = [np.zeros(m, "int32") for m in (40, 3)], []
        outs = [room_for(world, n * x.size, "int32", symmetric) for x in xs]
        seen = [np.zeros_like(out) for out in outs]
        for x, out in zip(xs, outs, strict=True):
            stream.begin_capture()
            gather(x, out, stream=stream)
            graphs.append(stream.end_capture())
        for repeat in range(7):
            i = repeat % 2
            fill[1, 8, stream](xs[i], 100 * repeat + world.rank)
            if repeat == 4:
                gather(xs[i], outs[i], stream=stream)
            else:
                graphs[i].launch(stream)
            take[1, 8, stream](outs[i], seen[i])
            stream.synchronize()
            assert (seen[i].reshape(n, -1) == 100 * repeat + np.arange(n)[:, None]).all()

    pes(3).run(main)


@methods
@outputs
def test_streams_follow_each_other(pes, method, symmetric):
    def main():
        world = sk.init()
        n, streams = world.n_ranks, [world.stream, cuda.stream(), cuda.stream()]
        gather, x = sk.AllGather(world, n * 20, method), np.zeros(20, "uint8")
        out, seen = room_for(world, n * 20, "uint8", symmetric), np.zeros(n * 20, "uint8")
        for call in range(6):
            stream = streams[call % 3]
            if call:
                stream.wait_event(streams[(call - 1) % 3].record())
            fill[1, 4, stream](x, 10 * call + world.rank)
            gather(x, out, stream=stream)
            take[1, 4, stream](out, seen)
            world.synchronize()
            assert (seen.reshape(n, 20) == 10 * call + np.arange(n)[:, None]).all()

    pes(2).run(main)


# ---- beside a consumer


def overlap_all(method, calls, size=3, symmetric=True, in_place=False, threads=4, skip=0, dtype="int32"):
    """Each call: make x, gather it beside a consumer, which does not wait for the `skip` last to come."""
    world = sk.init()
    n = world.n_ranks
    engine = sk.AllGather._maker(method)(world, n * size * as_dtype(dtype).itemsize)
    out, seen = room_for(world, n * size, dtype, symmetric), np.zeros(n * size, as_dtype(dtype))
    x = out[world.rank * size :][:size] if in_place else np.zeros(size, as_dtype(dtype))
    transfer = engine.overlap(x, out)
    for call in range(calls):
        fill[1, threads, world.stream](x, 10 * call + world.rank)
        transfer.start()
        consume[1, threads, world.stream](out, engine.arrived, seen, max(n - skip, 1))
        transfer.finish()
        take[1, threads, world.stream](out, seen)
        fill[1, threads, world.stream](x, 255)
        assert (seen.reshape(n, size) == 10 * call + np.arange(n)[:, None]).all()
    world.synchronize()
    assert engine.arrived.tolist() == [k == world.rank or transfer.pushes for k in range(n)]
    engine.free()


@pytest.mark.each_value
@methods
@outputs
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
def test_overlap(pes, n_ranks, in_place, symmetric, method):
    pes(n_ranks).run(overlap_all, method, 4, 3, symmetric, in_place)


@pytest.mark.each_value
@methods
@outputs
@pytest.mark.parametrize("size", [0, 1])
def test_overlap_of_little(pes, method, symmetric, size):
    pes(3).run(overlap_all, method, 3, size, symmetric, False, 1, 2)


@cuda.jit
def see(arrived, seen):
    wait(arrived[1:], 1, "sys", "acquire", 1)
    notify(seen, 0, 1)
    notify(seen, 2, 1)


@cuda.jit
def hold(seen):
    wait(seen, 1, "sys", "acquire", 1)


@methods
def test_the_consumer_has_segments_before_all_have_come(pes, method):
    """Segment 2 is copied to rank 0 only when the consumer there has seen segment 1."""

    def main():
        world = sk.init()
        engine, seen, out = (
            sk.AllGather._maker(method)(world, 3 * 8),
            world.signals(1),
            world.zeros(3, "int64"),
        )
        transfer = engine.overlap(np.full(1, world.rank + 5), out)
        if world.rank == (2 if method == "copy_push" else 0):
            transfer.side_operations.insert(2, lambda stream: hold[1, 1, stream](seen))  # before copy 2
        transfer.start()
        if world.rank == 0:
            see[1, 1, world.stream](engine.arrived, seen)
        transfer.finish()
        world.synchronize()
        assert out.tolist() == [5, 6, 7]

    pes(3).run(main)


@pytest.mark.each_value
@methods
@outputs
@pytest.mark.schedules(deliveries="eager", seeds=[None, 0, 1])
def test_graphs_of_an_overlap(pes, method, symmetric):
    def main():
        world = sk.init()
        n, size, stream = world.n_ranks, 5, world.stream
        engine = sk.AllGather._maker(method)(world, n * size)
        x, out = np.zeros(size, "uint8"), room_for(world, n * size, "uint8", symmetric)
        seen, after = np.zeros(n * size, "uint8"), np.zeros(n * size, "uint8")
        transfer, whole = engine.overlap(x, out), engine.bind(x, out, False)
        stream.begin_capture()
        transfer.start(stream)
        consume[1, 4, stream](out, engine.arrived, seen, n)
        transfer.finish(stream, awaited=True)
        graph = stream.end_capture()
        for repeat in range(6):
            fill[1, 4, stream](x, 10 * repeat + world.rank)
            if repeat % 3 == 2:
                whole(stream)
            else:
                graph.launch(stream)
            take[1, 4, stream](out, after)
            world.synchronize()
            assert (after.reshape(n, size) == 10 * repeat + np.arange(n)[:, None]).all()
            assert repeat % 3 == 2 or (seen == after).all()

    pes(3).run(main)


def test_an_overlap_is_started_and_finished_in_turn(pes):
    def main():
        world = sk.init()
        engine, out = CopyPush(world, 64), np.zeros((world.n_ranks, 2))
        first, second = (engine.overlap(np.zeros(2), out) for _ in range(2))
        with pytest.raises(RuntimeError, match="was not started"):
            first.finish()
        first.start()
        for begin in (first.start, second.start, second.run):
            with pytest.raises(RuntimeError, match="was started and not finished"):
                begin()
        with pytest.raises(RuntimeError, match="was not started"):
            second.finish()
        first.finish()
        second.run()

    pes(2).run(main)


def test_a_start_and_its_finish_are_in_one_capture(pes):
    """Else a finish would wait for what was never begun, or again for what has come."""

    def main():
        world = sk.init()
        out, stream = np.zeros((world.n_ranks, 2)), world.stream
        for captured in (True, False):
            transfer = CopyPush(world, 64).overlap(np.zeros(2), out)
            if captured:
                stream.begin_capture()
                transfer.start()
                with pytest.raises(RuntimeError, match="not joined"):
                    stream.end_capture()
            else:
                transfer.start()
                stream.begin_capture()
            for end in (transfer.wait, transfer.finish):
                with pytest.raises(RuntimeError, match="in the same one"):
                    end()
        stream.end_capture()
        world.synchronize()

    pes(2).run(main)


def test_wrong_arrays(pes):
    def main():
        world = sk.init()
        engine, x = CopyPull(world, 64), np.zeros(4, "float32")
        for array, out in [
            (x, np.zeros(7, "float32")),
            (x, np.zeros(8, "int32")),
            (np.zeros(8, "float32")[::2], np.zeros(8, "float32")),
            (np.zeros(9, "float32"), np.zeros(18, "float32")),
        ]:
            with pytest.raises(ValueError, match="out 2 times as large, 64 bytes at most"):
                engine.overlap(array, out)
        room = np.zeros(16, "float32")
        for first in range(13):
            if first in (0, 4 + 4 * world.rank, 12):  # before out, its part, behind out
                engine.overlap(room[first : first + 4], room[4:12])
            else:
                with pytest.raises(ValueError, match=r"x and out overlap; x must be out\[rank\], or lie"):
                    engine.overlap(room[first : first + 4], room[4:12])

    pes(2).run(main)


@methods
def test_an_engine_that_was_freed(pes, method):
    def main():
        world = sk.init()
        engine, x, out = sk.AllGather._maker(method)(world, 64), np.zeros(2), np.zeros((world.n_ranks, 2))
        transfers = [engine.overlap(x, out) for _ in range(2)]
        transfers[0].start()
        transfers[0].finish()
        world.synchronize()
        engine.free()
        calls = [lambda: engine.overlap(x, out)]
        calls += [call for t in transfers for call in (t.start, t.finish, t.run)]
        for call in calls:
            with pytest.raises(RuntimeError, match="freed; make a new one"):
                call()

    pes(2).run(main)


@methods
def test_refused_on_all_ranks_where_one_cannot_copy(pes, monkeypatch, capfd, method):
    monkeypatch.setattr(
        EmulatorBackend, "no_copies", lambda backend, _: "rank 1 is elsewhere" if backend.pe == 1 else None
    )

    def main():
        with sk.init() as world:
            with pytest.raises(ValueError, match="copy engines cannot be used here: rank 1 is elsewhere"):
                sk.AllGather(world, 64, method)

    pes(3).run(main)
    assert "without free" not in capfd.readouterr().err


@methods
def test_who_is_missing(pes, method):
    def main():
        world = sk.init()
        gather = sk.AllGather(world, 24, method)
        if world.rank != 1:
            gather(np.zeros(1))
        world.synchronize()

    with pytest.raises(sk.emu.DeadlockError, match="in team_barrier_kernel: waits for") as caught:
        pes(3).run(main)
    waits = re.findall(r"rank (.) .* waits for arrivals\[1\] on rank \1 >= 1", str(caught.value))
    assert waits == ["0", "2"]


# ---- all schedules


def whole_all(method, calls, symmetric):
    world = sk.init()
    n = world.n_ranks
    engine = sk.AllGather._maker(method)(world, n)
    out, x, seen = room_for(world, n, "uint8", symmetric), np.zeros(1, "uint8"), np.zeros(n, "uint8")
    run = engine.bind(x, out, False)
    for call in range(calls):
        fill[1, 1, world.stream](x, 10 * call + world.rank)
        run(None)
        take[1, 1, world.stream](out, seen)
        fill[1, 1, world.stream](x, 255)
        assert (seen == 10 * call + np.arange(n)).all()
    engine.free()


def explored(n_ranks, calls, method, symmetric, skip=None):
    """Without `skip` whole calls, else beside a consumer."""
    main, args = whole_all, (method, calls, symmetric)
    if skip is not None:
        main, args = overlap_all, (method, calls, 1, symmetric, False, 1, skip)
    return sk.emu.explore(main, n_ranks, args, exhaustive=True, heap_size=1 << 16)


PULLED = [("copy_pull", False), ("copy_pull", True)]
PROTOCOLS = [("copy_push", True), *PULLED]  # copy_push pulls into private memory, as copy_pull does


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, symmetric, n_ranks, calls, skip",
    [
        *[(*protocol, n, calls, None) for protocol in PROTOCOLS for n, calls in ((2, 2), (3, 1))],
        *[("copy_push", True, n, calls, skip) for n, calls in ((2, 4), (3, 2)) for skip in (0, 1)],
        *[(*pulled, 2, 2, skip) for pulled in PULLED for skip in (0, 1)],
        ("copy_pull", True, 3, 1, 0),
    ],
)
def test_proven_for_a_small_size(n_ranks, calls, skip, method, symmetric):
    found = explored(n_ranks, calls, method, symmetric, skip)
    assert found.finished and found.failure is None, str(found)


@cuda.jit
def only_count(arrivals, epoch, first, end, signals):
    """A barrier that waits for nobody."""
    for k in range(num_ranks()):
        if k != rank():
            signals[k] = 0
            notify(arrivals[rank() :], k, 1, "add")
    epoch[0] += 1


@cuda.jit
def reset_late(arrivals, epoch, first, end, signals):
    """One that has arrived before it sets the signals back."""
    k, call = cuda.threadIdx.x, epoch[0] + 1
    if k != rank():
        notify(arrivals[rank() :], k, 1, "add")
        signals[k] = 0
        wait(arrivals[k:], 1, "sys", "acquire", call)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        epoch[0] = call


@cuda.jit
def reset_nothing(arrivals, epoch, first, end, signals):
    there = symm_at(arrivals, cuda.threadIdx.x)
    call = arrive_and_wait(arrivals, there, epoch, first, end)
    if cuda.threadIdx.x == 0:
        epoch[0] = call


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, symmetric, left_out, skip",
    [
        *[(*protocol, left_out, None) for protocol in PROTOCOLS for left_out in (0, 1)],
        ("copy_push", True, 0, 0),  # beside a consumer it has no other
        *[(*pulled, left_out, 0) for pulled in PULLED for left_out in (0, 1)],
    ],
)
def test_each_barrier_is_needed(monkeypatch, method, symmetric, left_out, skip):
    """Without one of them, the exploration above fails."""
    whole, of_a_call = copy_engine.bind_team_barrier, 1 if (method, skip) == ("copy_push", 0) else 2

    def without(arrivals, epoch, ranks, signals, world):
        barrier, calls = whole(arrivals, epoch, ranks, signals, world), itertools.count()
        count = sk.bind(only_count, 1, 1, (arrivals, epoch, 0, len(ranks), signals), stream=world.stream)
        return lambda s: (count if next(calls) % of_a_call == left_out else barrier)(s)

    monkeypatch.setattr(copy_engine, "bind_team_barrier", without)
    assert explored(2, 2, method, symmetric, skip).failure is not None


@pytest.mark.slow
@pytest.mark.parametrize("method, symmetric", PROTOCOLS)
@pytest.mark.parametrize("broken", [reset_nothing, reset_late])
def test_signals_are_set_back_before_the_arrival(monkeypatch, broken, method, symmetric):
    """For those that I write myself, before the stream goes on is enough."""
    monkeypatch.setattr(stream_barrier, "team_barrier_kernel", broken)
    needed = broken is reset_nothing or method == "copy_push"
    assert (explored(2, 2, method, symmetric, 0).failure is not None) == needed


@pytest.mark.parametrize("method, symmetric", PROTOCOLS)
def test_the_stream_follows_the_copies(monkeypatch, method, symmetric):
    monkeypatch.setattr(Transfer, "_follow", lambda transfer, stream: None)
    assert explored(2, 2, method, symmetric, 0 if method == "copy_push" else 1).failure is not None


@pytest.mark.parametrize("method, symmetric", PROTOCOLS)
def test_signals_follow_the_data(monkeypatch, method, symmetric):
    whole = Transfer.side_operations.func
    before = property(lambda transfer: whole(transfer)[::-1])  # each signal before its copy
    monkeypatch.setattr(Transfer, "side_operations", before)
    assert explored(2, 1, method, symmetric, 0).failure is not None


@pytest.mark.slow
def test_the_kernel_that_waits_is_needed(monkeypatch):
    """Where a consumer does not wait for all."""
    start = Transfer.start

    def without(transfer, stream=None):
        transfer.awaiting = lambda stream: None
        start(transfer, stream)

    monkeypatch.setattr(Transfer, "start", without)
    assert explored(2, 2, "copy_push", True, 0).failure is None
    assert explored(2, 2, "copy_push", True, 1).failure is not None


# ---- one process per rank


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed")
def test_under_mpirun():
    succeed(
        3,
        """
        from shmemkit.collectives.all_gather.copy_engine import CopyPull, CopyPush

        @cuda.jit
        def consume(out, arrived, seen):
            for i in range(num_ranks()):
                k = (rank() + i) % num_ranks()
                wait(arrived[k:], 1, "sys", "acquire", 1)
                seen[k] = out[k]

        with sk.init() as world:
            n, me = world.n_ranks, world.rank
            expected, x = np.arange(n)[:, None], np.zeros(5, "int32")
            for method in ("copy_push", "copy_pull"):
                gather = sk.AllGather(world, n * x.nbytes, method)
                outs = gather.output((n, x.size), "int32"), np.zeros((n, x.size), "int32")
                graphs = []
                for out in outs:
                    world.stream.begin_capture()
                    gather(x, out)
                    graphs.append(world.stream.end_capture())
                for call in range(12):
                    time.sleep(0.01 * (call % n == me))
                    x[:] = 10 * call + me
                    if call % 3:
                        gather(x, outs[call % 2])
                    else:
                        graphs[call % 2].launch(world.stream)
                    world.synchronize()
                    assert (outs[call % 2] == 10 * call + expected).all()
                    world.host_barrier()
                gather.free()
            for method in (CopyPush, CopyPull):
                engine, out, seen = method(world, 8 * n), sk.zeros(n, "int64"), np.zeros(n, "int64")
                part = out[me : me + 1]
                transfer = engine.overlap(part, out)
                for call in range(5):
                    part[0] = 10 * call + me
                    transfer.start()
                    consume[1, 1, world.stream](out, engine.arrived, seen)
                    transfer.finish()
                    world.synchronize()
                    assert seen.tolist() == out.tolist() == [10 * call + k for k in range(n)]
                    world.host_barrier()
        print("rank ok")
        """,
    )
