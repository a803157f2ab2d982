"""Order between kernels on several streams, and between kernels and what hosts do with arrays."""

from numba import cuda

import shmemkit as sk
from shmemkit.device import rank, symm_at

from .case import RACE, RIGHT, case

STREAMS = (
    "CUDA Programming Guide, Streams: commands of different streams have no order with respect to one another"
)
EVENT = "CUDA, cudaStreamWaitEvent: later work of the stream waits for what the event has recorded"
LEGACY = (
    "CUDA, legacy default stream: synchronizes with blocking streams, and not with cudaStreamNonBlocking ones"
)
HOST = (
    "shmemkit, host API: what goes through world.stream is in order with the kernels there; before "
    "another rank's kernel "
    "may see what this host did, or the other way round, there is a world.barrier()"
)


@case(RACE, STREAMS)
def two_streams_without_an_event(world):
    """The second kernel reads what the first one stores, on another stream."""

    @cuda.jit
    def fill(x):
        x[0] = 5  # first

    @cuda.jit
    def read(x, out):
        out[0] = x[0]  # second

    x, out, a, b = sk.zeros(1, "int32"), sk.zeros(1, "int32"), cuda.stream(), cuda.stream()
    fill[1, 1, a](x)
    read[1, 1, b](x, out)
    b.synchronize()
    return world.asnumpy(out, stream=b).tolist()


@case(RIGHT, EVENT, gives=[[5]] * 2)
def two_streams_with_an_event(world):
    """The event is recorded behind the first kernel, and the second stream waits for it."""

    @cuda.jit
    def fill(x):
        x[0] = 5

    @cuda.jit
    def read(x, out):
        out[0] = x[0]

    x, out, a, b, event = (
        sk.zeros(1, "int32"),
        sk.zeros(1, "int32"),
        cuda.stream(),
        cuda.stream(),
        cuda.event(),
    )
    fill[1, 1, a](x)
    event.record(a)
    event.wait(b)
    read[1, 1, b](x, out)
    return world.asnumpy(out, stream=b).tolist()


@case(RACE, EVENT)
def event_is_recorded_before_the_kernel(world):
    """The event stands for what was on the stream when it was recorded: nothing."""

    @cuda.jit
    def fill(x):
        x[0] = 5  # first

    @cuda.jit
    def read(x, out):
        out[0] = x[0]  # second

    x, out, a, b, event = (
        sk.zeros(1, "int32"),
        sk.zeros(1, "int32"),
        cuda.stream(),
        cuda.stream(),
        cuda.event(),
    )
    event.record(a)
    fill[1, 1, a](x)
    event.wait(b)
    read[1, 1, b](x, out)
    return world.asnumpy(out, stream=b).tolist()


@case(
    RIGHT, "CUDA, cudaStreamSynchronize: the host goes on when the stream's work has ended", gives=[[5]] * 2
)
def host_waits_for_the_first_stream(world):
    """The second kernel is launched when the first one has ended."""

    @cuda.jit
    def fill(x):
        x[0] = 5

    @cuda.jit
    def read(x, out):
        out[0] = x[0]

    x, out, a, b = sk.zeros(1, "int32"), sk.zeros(1, "int32"), cuda.stream(), cuda.stream()
    fill[1, 1, a](x)
    a.synchronize()
    read[1, 1, b](x, out)
    return world.asnumpy(out, stream=b).tolist()


@case(RACE, LEGACY)
def launch_without_a_stream_beside_the_worlds(world):
    """The first launch is on the legacy default stream, which does not wait for non-blocking streams as
    world.stream."""

    @cuda.jit
    def fill(x):
        x[0] = 5  # first

    @cuda.jit
    def read(x, out):
        out[0] = x[0]  # second

    x, out = sk.zeros(1, "int32"), sk.zeros(1, "int32")
    fill[1, 1](x)
    read[1, 1, world.stream](x, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, LEGACY, gives=[[6]] * 2)
def launch_without_a_stream_beside_blocking_streams(world):
    """The default stream waits for the stream before it, and the next one waits for the default stream."""

    @cuda.jit
    def fill(x):
        x[0] = 5

    @cuda.jit
    def add(x):
        x[0] += 1

    @cuda.jit
    def read(x, out):
        out[0] = x[0]

    x, out, a, b = sk.zeros(1, "int32"), sk.zeros(1, "int32"), cuda.stream(), cuda.stream()
    fill[1, 1, a](x)
    add[1, 1](x)
    read[1, 1, b](x, out)
    return world.asnumpy(out, stream=b).tolist()


@case(RACE, "shmemkit World.barrier: all ranks meet on the stream that it is given")
def barrier_on_another_stream_than_the_kernels(world):
    """The ranks meet on a stream that neither kernel is on."""

    @cuda.jit
    def send(box):
        symm_at(box, 1 - rank())[0] = 5  # first

    @cuda.jit
    def read(box, out):
        out[0] = box[0]  # second

    box, out, other = sk.zeros(1, "int32"), world.xp.zeros(1, "int32"), cuda.stream()
    send[1, 1, world.stream](box)
    world.barrier(stream=other)
    read[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, HOST)
def host_stores_what_a_peers_kernel_reads(world):
    """The host's store is on its own World's stream, and the peer's kernel on the peer's."""

    @cuda.jit
    def read(box, out):
        out[0] = symm_at(box, 1 - rank())[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    box[0] = 5  # first
    read[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, HOST, gives=[[5]] * 2)
def host_stores_what_a_peers_kernel_reads_after_a_barrier(world):
    """world.barrier() is between the host's store and the peer's kernel."""

    @cuda.jit
    def read(box, out):
        out[0] = symm_at(box, 1 - rank())[0]

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    box[0] = 5
    world.barrier()
    read[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, HOST)
def host_fills_what_a_peers_kernel_stores(world):
    """fill is an operation on this rank's stream, the kernel one on the peer's."""

    @cuda.jit
    def send(box):
        symm_at(box, 1 - rank())[0] = 5  # second

    box = sk.zeros(2, "int32")
    box.fill(1)  # first
    send[1, 1, world.stream](box)
    world.barrier()
    return world.asnumpy(box).tolist()


@case(RIGHT, HOST, gives=[[6, 1]] * 2)
def host_fills_and_reads_around_its_own_kernel(world):
    """fill, the kernel and the host's loads are all on world.stream."""

    @cuda.jit
    def add(box):
        box[0] += 5

    box = sk.zeros(2, "int32")
    box.fill(1)
    add[1, 1, world.stream](box)
    return [int(box[0]), int(box[1])]


@case(RACE, HOST)
def host_reads_what_a_kernel_on_another_stream_stores(world):
    """The host's load is on world.stream, which does not wait for the kernel's stream."""

    @cuda.jit
    def fill(box):
        box[0] = 5  # first

    box, other = sk.zeros(1, "int32"), cuda.stream()
    fill[1, 1, other](box)
    return int(box[0])  # second


@case(RIGHT, HOST, gives=[5, 5])
def host_reads_after_it_has_waited_for_the_other_stream(world):
    """The kernel has ended when the host reads."""

    @cuda.jit
    def fill(box):
        box[0] = 5

    box, other = sk.zeros(1, "int32"), cuda.stream()
    fill[1, 1, other](box)
    other.synchronize()
    return int(box[0])


@case(RACE, HOST)
def host_reads_what_a_peers_kernel_stores(world):
    """The host waits for its own stream, which says nothing about the peer's kernel."""

    @cuda.jit
    def send(box):
        symm_at(box, 1 - rank())[0] = 5  # first

    box = sk.zeros(1, "int32")
    send[1, 1, world.stream](box)
    world.stream.synchronize()
    return world.asnumpy(box).tolist()  # second


@case(RACE, HOST)
def host_stores_through_a_peer_view_while_the_peer_reads(world):
    """The store through peer_view is on this rank's stream, the kernel on the peer's."""

    @cuda.jit
    def read(box, out):
        out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    sk.peer_view(box, 1 - world.rank)[0] = 5  # first
    read[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, HOST, gives=[[5]] * 2)
def host_stores_through_a_peer_view_before_a_barrier(world):
    """world.barrier() is between the store and the peer's kernel."""

    @cuda.jit
    def read(box, out):
        out[0] = box[0]

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    sk.peer_view(box, 1 - world.rank)[0] = 5
    world.barrier()
    read[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()
