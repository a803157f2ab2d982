"""Bugs between kernels: streams, events, graphs, and kernels of other ranks."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import notify, num_ranks, rank, symm_at, wait
from shmemkit.emu import RaceError

from .plant import COUNTS, STREAMS, planted


@cuda.jit
def fill(x, value):
    x[0] = value  # first


@cuda.jit
def read(x, out):
    out[0] = x[0]  # second


@planted(RaceError, STREAMS, "x", "event", right=[[7]], ranks=1, source=(fill, read))
def two_streams_without_an_event(correct):
    """The second stream does not wait for the first."""

    def main(world):
        a, b = cuda.stream(), cuda.stream()
        x, out = np.zeros(1, "int32"), np.zeros(1, "int32")
        fill[1, 1, a](x, 7)
        if correct:
            b.wait_event(a.record())
        read[1, 1, b](x, out)
        b.synchronize()
        return out.tolist()

    return main


@planted(RaceError, STREAMS, "x", "event", right=[[7]], ranks=1, source=(fill, read))
def event_recorded_too_early(correct):
    """The event is recorded before the kernel that it is to stand for."""

    def main(world):
        a, b = cuda.stream(), cuda.stream()
        x, out = np.zeros(1, "int32"), np.zeros(1, "int32")
        event = a.record()
        fill[1, 1, a](x, 7)
        if correct:
            event = a.record()
        b.wait_event(event)
        read[1, 1, b](x, out)
        b.synchronize()
        return out.tolist()

    return main


@planted(RaceError, STREAMS, "x", right=[[7]], ranks=1, source=(fill, read))
def synchronizes_another_stream(correct):
    """The host waits for the stream that it is going to use, not for the one that still runs."""

    def main(world):
        a, b = cuda.stream(), cuda.stream()
        x, out = np.zeros(1, "int32"), np.zeros(1, "int32")
        fill[1, 1, a](x, 7)
        (a if correct else b).synchronize()
        read[1, 1, b](x, out)
        b.synchronize()
        return out.tolist()

    return main


@cuda.jit
def fill_next(x, value):
    symm_at(x, (rank() + 1) % num_ranks())[0] = value  # first second


@cuda.jit
def read_mine(x, out):
    out[0] = x[0]  # first second


@planted(RaceError, STREAMS, "x", "barrier", right=[[12], [10], [11]], ranks=3, source=(fill_next, read_mine))
def kernels_of_two_ranks_without_a_barrier(correct):
    """The next kernel of this rank reads what the last one of another rank stores here."""

    def main(world):
        x, out = sk.zeros(1, "int32"), np.zeros(1, "int32")
        fill_next[1, 1, world.stream](x, 10 + world.rank)
        if correct:
            world.barrier()
        read_mine[1, 1, world.stream](x, out)
        world.stream.synchronize()
        return out.tolist()

    return main


@planted(RaceError, STREAMS, "x", right=[[12], [10], [11]], ranks=3, source=(fill_next, read_mine))
def barrier_on_another_stream(correct):
    """The barrier stands on a stream that neither kernel runs on."""

    def main(world):
        x, out = sk.zeros(1, "int32"), np.zeros(1, "int32")
        other = cuda.stream()
        fill_next[1, 1, world.stream](x, 10 + world.rank)
        world.barrier(stream=world.stream if correct else other)
        read_mine[1, 1, world.stream](x, out)
        world.stream.synchronize()
        other.synchronize()
        return out.tolist()

    return main


@planted(RaceError, COUNTS, "slots", right=[[10, 11, 12]] * 2)
def number_of_the_call_baked_into_a_graph(correct):
    """A host-side count of the calls: every replay waits for the value of the first."""

    @cuda.jit
    def exchange(slots, arrived, calls, call, out):
        if correct:
            call = calls[0] + 1
        other = 1 - rank()
        symm_at(slots, other)[calls[0]] = 10 + calls[0]  # first second
        notify(arrived, other, 1, "add")
        wait(arrived, 1, "sys", "acquire", call)
        out[calls[0]] = slots[calls[0]]  # first second
        calls[0] += 1

    def main(world):
        slots, arrived = sk.zeros(3, "int32"), sk.signals(1)
        calls, out = np.zeros(1, "int32"), np.zeros(3, "int32")
        world.stream.begin_capture()
        exchange[1, 1, world.stream](slots, arrived, calls, 1, out)
        graph = world.stream.end_capture()
        for _ in range(3):
            graph.launch(world.stream)
        world.stream.synchronize()
        return out.tolist()

    return main


@planted(RaceError, STREAMS, "x", right=[[7, 8]], ranks=1, source=(fill, read))
def graph_without_its_fork(correct):
    """A side stream is captured; the main stream goes on without waiting for it."""

    def main(world):
        a, b = world.stream, cuda.stream()
        x, outs = np.zeros(1, "int32"), [np.zeros(1, "int32") for _ in range(2)]
        found = []
        for value in (7, 8):
            a.begin_capture()
            b.wait_event(a.record())
            fill[1, 1, b](x, value)
            joined = b.record()
            if correct:
                a.wait_event(joined)
            read[1, 1, a](x, outs[0])
            a.wait_event(joined)
            a.end_capture().launch(a)
            a.synchronize()
            found.append(int(outs[0][0]))
        return found

    return main


@planted(RaceError, STREAMS, "x", "the default one", right=[[7]], ranks=1, source=(fill, read))
def launch_without_a_stream_before_one_on_the_worlds(correct):
    """The default stream and the World's, which is non-blocking, do not wait for each other."""

    def main(world):
        x, out = sk.zeros(1, "int32", "x"), np.zeros(1, "int32")
        fill[1, 1, world.stream if correct else 0](x, 7)
        read[1, 1, world.stream](x, out)
        world.synchronize()
        return out.tolist()

    return main


@planted(RaceError, STREAMS, "x", "the default one", right=[[7]], ranks=1, source=(fill, read))
def launch_without_a_stream_after_one_on_the_worlds(correct):
    """To wait for the default stream is not to wait for the World's."""

    def main(world):
        x, out = np.zeros(1, "int32"), np.zeros(1, "int32")
        fill[1, 1, world.stream](x, 7)
        (cuda if correct else cuda.default_stream()).synchronize()
        read[1, 1](x, out)
        world.synchronize()
        return out.tolist()

    return main


@planted(RaceError, STREAMS, "x", "the default one", right=[[7]], ranks=1, source=(fill, read))
def default_stream_before_a_non_blocking_one(correct):
    """A stream that is made non-blocking does not wait for the default one; others do."""

    def main(world):
        x, out = np.zeros(1, "int32"), np.zeros(1, "int32")
        other = cuda.stream() if correct else world.backend.new_stream()
        fill[1, 1](x, 7)
        read[1, 1, other](x, out)
        world.synchronize()
        return out.tolist()

    return main


@planted(RaceError, STREAMS, "x", "event", right=[[7]], ranks=1, source=(fill, read))
def per_thread_default_stream(correct):
    """The per-thread default stream waits for the default stream alone."""

    def main(world):
        x, out = np.zeros(1, "int32"), np.zeros(1, "int32")
        fill[1, 1, 0 if correct else cuda.stream()](x, 7)
        read[1, 1, cuda.per_thread_default_stream()](x, out)
        world.synchronize()
        return out.tolist()

    return main


@planted(RaceError, STREAMS, "x", "event", right=[[7]], ranks=1, source=(fill, read))
def blocking_streams_joined_by_the_default_one(correct):
    """Two blocking streams are in order where there is work on the default stream between."""

    def main(world):
        x, y, out = (np.zeros(1, "int32") for _ in range(3))
        fill[1, 1, cuda.stream()](x, 7)
        fill[1, 1, 0 if correct else world.stream](y, 1)
        read[1, 1, cuda.stream()](x, out)
        world.synchronize()
        return out.tolist()

    return main
