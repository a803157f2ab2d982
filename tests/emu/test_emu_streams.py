"""Streams, events and graphs of the emulator."""

import numpy as np
import pytest
from emulated import spmd
from numba import cuda

import shmemkit as sk
from shmemkit.device import notify, rank, wait
from shmemkit.emu import DeadlockError


@cuda.jit
def consume(flag, x, out):
    wait(flag, 1, "gpu", "acquire", 1)
    out[0] = x[0]


@cuda.jit
def produce(flag, x):
    x[0] = 5
    notify(flag, rank(), 1, "set", "gpu")


@pytest.mark.parametrize("n", [1, 3])
def test_kernels_on_two_streams_wait_for_each_other(n):
    """The consumer is launched first: its launch returns, and the kernel goes on when the producer runs."""

    def main(world):
        other = cuda.stream()
        flag, x, out = sk.signals(1), np.zeros(1), np.zeros(1)
        consume[1, 1, other](flag, x, out)
        assert out[0] == 0 and not other.done
        produce[1, 1, world.stream](flag, x)
        other.synchronize()
        return out[0]

    assert spmd(n, main) == [5] * n


def test_the_default_stream_waits_for_blocking_ones_and_they_for_it():
    def main(world):
        one, other, free = cuda.stream(), cuda.stream(), world.backend.new_stream()
        flag, x, out, copied = sk.signals(1), np.zeros(1), np.zeros(1), np.zeros((3, 1))
        consume[1, 1, one](flag, x, out)
        copy_one[1, 1](copied[0], out)  # after one
        copy_one[1, 1, other](copied[1], copied[0])  # after that
        copy_one[1, 1, free](copied[2], np.ones(1))
        free.synchronize()
        assert not other.done and copied.tolist() == [[0], [0], [1]]
        produce[1, 1, world.stream](flag, x)
        cuda.default_stream().synchronize()
        assert one.done and copied[0] == 5
        cuda.synchronize()
        return copied[1, 0]

    assert spmd(2, main) == [5, 5]


def test_the_default_stream_and_captures():
    """As on a GPU: it cannot capture, and does not wait for a stream that captures."""
    with sk.init("emulator") as world:
        with pytest.raises(RuntimeError, match="default stream cannot capture"):
            cuda.default_stream().begin_capture()
        x, other = np.zeros(1), cuda.stream()
        other.begin_capture()
        with pytest.raises(RuntimeError, match="End the capture first"):
            add_one[1, 1](x)
        other.end_capture()
        world.stream.begin_capture()
        add_one[1, 1](x)
        world.stream.end_capture()
        assert x[0] == 1


def test_streams_have_addresses():
    with sk.init("emulator") as world:
        other = cuda.stream()
        for stream, address in ((cuda.default_stream(), 0), (cuda.legacy_default_stream(), 1)):
            assert cuda.external_stream(address) is stream
        assert cuda.external_stream(2) is cuda.per_thread_default_stream() is not cuda.default_stream()
        for stream in (world.stream, other):
            assert cuda.external_stream(stream.ptr) is stream
        with pytest.raises(ValueError, match="must be the address of a stream"):
            add_one[1, 1, 99](np.zeros(1))
        with pytest.raises(TypeError, match="it must be a stream of numba"):
            add_one[1, 1, "a"](np.zeros(1))


def test_work_of_one_stream_runs_in_order():
    @cuda.jit
    def append(x, value):
        if value == 0:
            wait(x[9:], 1, "gpu", "acquire", 1)  # held until everything else has been enqueued
        cuda.atomic.add(x, 0, 1)
        x[x[0]] = value

    def main(world):
        other, x = cuda.stream(), sk.signals(10)
        for value in range(4):
            append[1, 1, other](x, value)
        assert x[0] == 0
        notify_it[1, 1, world.stream](x)
        other.synchronize()
        return x[1:5].tolist()

    @cuda.jit
    def notify_it(x):
        notify(x[9:], rank(), 1)

    assert spmd(2, main) == [[0, 1, 2, 3]] * 2


def test_events_order_streams():
    """Stream b waits for an event of a, whose kernel waits for a third one: the host is not held up by it."""

    def main(world):
        a, b = cuda.stream(), cuda.stream()
        flag, x, out, copied = sk.signals(1), np.zeros(1), np.zeros(1), np.zeros(1)
        consume[1, 1, a](flag, x, out)
        event = a.record()
        b.wait_event(event)
        copy_one[1, 1, b](copied, out)
        assert not event.done and not event.query() and copied[0] == 0
        produce[1, 1, world.stream](flag, x)
        event.synchronize()
        assert event.done
        b.synchronize()
        assert world.stream.record().done and cuda.event().query()
        return copied[0]

    assert spmd(2, main) == [5, 5]


@cuda.jit
def copy_one(dst, src):
    dst[0] = src[0]


def test_graphs_are_replayed():
    def main(world):
        x, graphs = np.zeros(1), []
        for factor in (2, 3):
            world.stream.begin_capture()
            assert world.stream.is_capturing()
            scale[1, 1, world.stream](x, factor)
            world.barrier()
            add_one[1, 1, world.stream](x)
            graphs.append(world.stream.end_capture())
            assert not world.stream.is_capturing()
        assert x[0] == 0  # nothing has run
        results = []
        for which in (0, 1, 0, 0, 1):
            graphs[which].launch(world.stream)
            results.append(x[0])
        other = cuda.stream()
        graphs[1].launch(other)
        other.synchronize()
        return [*results, x[0]]

    assert spmd(3, main) == [[1, 4, 9, 19, 58, 175]] * 3


@cuda.jit
def scale(x, factor):
    x[0] *= factor


@cuda.jit
def add_one(x):
    x[0] += 1


def test_graph_with_a_fork():
    """Two streams in one capture: the kernels wait for each other in every replay."""

    def main(world):
        a, b = world.stream, cuda.stream()
        flag, x, out = sk.signals(1), np.zeros(1), np.zeros(1)
        a.begin_capture()
        b.wait_event(a.record())
        consume[1, 1, b](flag, x, out)
        produce[1, 1, a](flag, x)
        a.wait_event(b.record())
        clear[1, 1, a](flag, x)
        graph = a.end_capture()
        assert not b.is_capturing()
        for _ in range(3):
            out[0] = 0
            graph.launch(a)
            a.synchronize()
            assert out[0] == 5 and flag[0] == 0

    spmd(2, main)


@cuda.jit
def clear(flag, x):
    flag[0], x[0] = 0, 0


def test_captures_whose_streams_are_not_joined():
    """Work on another stream comes before the capture's end, by however many events, or is refused."""

    def main(world):
        a, b, c = world.stream, cuda.stream(), cuda.stream()
        flag, x = sk.signals(1), np.zeros(1)
        for joined in (True, False):
            a.begin_capture()
            b.wait_event(a.record())
            c.wait_event(b.record())
            clear[1, 1, c](flag, x)
            b.wait_event(c.record())
            if joined:
                clear[1, 1, b](flag, x)
                a.wait_event(b.record())
                a.end_capture().launch(a)
            else:
                a.wait_event(a.record())
                with pytest.raises(RuntimeError, match="'?clear.* is not joined"):
                    a.end_capture()
            assert not c.is_capturing()
        a.begin_capture()
        b.wait_event(a.record())  # nothing is done there
        a.end_capture()

    spmd(1, main)


def test_misused_captures():
    with sk.init("emulator") as world:
        with pytest.raises(RuntimeError, match="Call begin_capture"):
            world.stream.end_capture()
        world.stream.begin_capture()
        event = world.stream.record()
        with pytest.raises(RuntimeError, match="captures a graph already"):
            world.stream.begin_capture()
        with pytest.raises(RuntimeError, match="captures a graph"):
            world.stream.synchronize()
        world.stream.end_capture()
        with pytest.raises(RuntimeError, match="captured into a graph"):
            event.synchronize()
        with pytest.raises(RuntimeError, match="capture that has ended"):
            cuda.stream().wait_event(event)


# ---- host programs


def test_what_needs_no_order():
    """Other elements, views that are only made, and kernels of the same stream; who waits for a value."""

    @cuda.jit
    def add(box):
        box[0] += 1

    def main(world):
        box, side = sk.zeros((2, 2), "int32", "box"), cuda.stream()
        add[1, 1, side](box[1])
        box[0, 1] = 3
        box[0][0] = 4
        assert box.shape == np.shape(box) == (2, 2) and box[1:].T.reshape(-1).size == 2
        add[1, 1, world.stream](box[0])
        total = (box[0] * 2).sum()  # waits for the World's stream
        add[1, 1, side](box[0])
        side.synchronize()
        return int(total), box.tolist()

    assert spmd(1, main, races=True) == [(16, [[6, 3], [1, 0]])]


def test_host_that_reads_behind_a_kernel_that_waits_for_it():
    """A store waits on the stream, as on a GPU, and the host goes on; a read never returns."""

    @cuda.jit
    def stuck(flag):
        wait(flag, 1, "sys", "acquire", 1)

    def main(world, by_store):
        flag, box = sk.signals(1, "flag"), sk.zeros(1, "int32", "box")
        stuck[1, 1, world.stream](flag)
        box[0] = 5
        if by_store:
            release = world.backend.memory_operations([("write", flag, 1)])
            release(world.backend.new_stream())
        return int(box[0])

    assert spmd(1, lambda world: main(world, True), races=True) == [5]
    with pytest.raises(DeadlockError, match="its host program waits for its stream, which runs stuck"):
        spmd(1, lambda world: main(world, False), races=True)
