"""Copies and memory operations of streams: what they do and order on the emulator, and what is asked of the
driver on GPUs."""

import ctypes
import re
import types

import numpy as np
import pytest
from emulated import deadlock_of
from numba import cuda

import shmemkit as sk
from shmemkit.backends.nvshmem import NvshmemBackend
from shmemkit.device import notify, wait
from shmemkit.device.shmem import peers
from shmemkit.runtime.stream_order import StreamOrder


@cuda.jit
def add_one(x):
    for i in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        x[i] += 1


@cuda.jit
def take_when(flag, x, seen):
    wait(flag, 1, "sys", "acquire", 1)
    seen[cuda.threadIdx.x] = x[cuda.threadIdx.x]


@cuda.jit
def raise_flag(flag, to):
    notify(flag, to, 1)


@pytest.mark.schedules(deliveries="eager", seeds=[None, *range(3)])
def test_a_copy_and_the_write_behind_it_reach_a_kernel_of_a_peer(pes):
    def main():
        world = sk.init()
        following = (world.rank + 1) % world.n_ranks
        data, flag = sk.full(4, world.rank, "int16"), world.signals(1)
        got, seen = sk.zeros(4, "int16"), np.zeros(4, "int16")
        world.backend.copy(world.peer_view(got, following), data)(world.stream)
        world.backend.memory_operations([("write", world.peer_view(flag, following), 1)])(world.stream)
        take_when[1, 4, world.stream](flag, got, seen)
        world.synchronize()
        assert (seen == (world.rank - 1) % world.n_ranks).all()

    pes(3).run(main)


@pytest.mark.schedules(deliveries="eager", seeds=[None, *range(3)])
def test_operations_are_in_order_with_kernels_and_other_waits(pes):
    def main():
        world = sk.init()
        peer, stream, backend = 1 - world.rank, world.stream, world.backend
        x, y, flags = sk.full(3, world.rank, "float32"), sk.zeros(3), world.signals(2)
        mine, theirs = flags[:1], world.peer_view(flags[:1], peer)
        meet = backend.memory_operations([("write", theirs, 5), ("wait", mine, 5), ("write", mine, 0)])
        again = backend.memory_operations(
            [("write", world.peer_view(flags[1:], peer), 1), ("wait", flags[1:], 1)]
        )
        add_one[1, 2, stream](x)
        meet(stream)
        backend.copy(y, world.peer_view(x, peer))(stream)
        add_one[1, 2, stream](y)
        again(stream)
        add_one[1, 2, stream](x)  # the peer has read it
        stream.synchronize()
        assert (y == peer + 2).all() and (x == world.rank + 2).all() and flags.tolist() == [0, 1]

    pes(2).run(main)


@pytest.mark.parametrize("missing", ["nothing", "the write", "the wait", "the event"])
def test_races_of_copies_are_found(pes, missing):
    """`x` is written by a kernel, copied to a peer's `y` on another stream, and read there by a kernel."""

    def main():
        world = sk.init()
        side, backend, peer = cuda.stream(), world.backend, 1 - world.rank
        x, y, flag = sk.zeros(2), sk.zeros(2, name="y"), world.signals(1)
        write = backend.memory_operations([("write", world.peer_view(flag, peer), 1)])
        await_it = backend.memory_operations([("wait", flag, 1)])
        add_one[1, 2, world.stream](x)
        if missing != "the event":
            backend.order(side, world.stream)
        backend.copy(world.peer_view(y, peer), x)(side)
        if missing != "the write":
            write(side)
            if missing != "the wait":
                await_it(world.stream)
        add_one[1, 2, world.stream](y)
        world.synchronize()

    if missing == "nothing":
        pes(2).run(main)
    else:
        with pytest.raises(sk.emu.RaceError, match="in a copy: (reads|writes) it") as caught:
            pes(2).run(main)
        assert not re.search(r"\?|\b0:|line 0", str(caught.value)), "a copy has no line"
        assert re.search("(after|before) the copy|and the copy", str(caught.value))


def test_the_host_waits_for_what_waits_and_not_for_copies(pes):
    def main():
        world = sk.init()
        side, backend = cuda.stream(), world.backend
        x, flags = np.ones(1), world.signals(2)
        backend.memory_operations([("wait", flags[:1], 1)])(side)  # returns when nothing else can run
        backend.copy(np.zeros(1), x)(side)
        backend.memory_operations([("write", flags[1:], 1)])(side)
        assert not side.done and flags[1] == 0
        raise_flag[1, 1, world.stream](flags, world.rank)
        side.synchronize()
        assert flags[1] == 1
        y = np.zeros(1)
        backend.copy(y, x)(side)
        assert not side.done and y[0] == 0
        side.synchronize()
        assert y[0] == 1

    pes(1).run(main)


@pytest.mark.schedules(deliveries="eager", seeds=[None, *range(3)])
def test_graphs_of_operations_on_two_streams(pes):
    def main():
        world = sk.init()
        peer, stream, side, backend = 1 - world.rank, world.stream, cuda.stream(), world.backend
        x, y, z, flag = sk.zeros(3), sk.zeros(3), np.zeros(3, "float32"), world.signals(1)
        stream.begin_capture()
        add_one[1, 2, stream](x)
        backend.order(side, stream)
        backend.copy(z, x)(side)
        backend.copy(world.peer_view(y, peer), x)(stream)
        tell = ("write", world.peer_view(flag, peer), 1)
        backend.memory_operations([tell, ("wait", flag, 1), ("write", flag, 0)])(stream)
        backend.order(stream, side)
        graph = stream.end_capture()
        assert not side.is_capturing() and not x.any()
        for repeat in range(1, 5):
            graph.launch(stream)
            world.barrier()
            world.synchronize()
            assert (y == repeat).all() and (z == repeat).all() and flag[0] == 0
            world.host_barrier()

    pes(2).run(main)


def test_a_wait_for_a_value_that_nobody_writes():
    def main(world):
        flags = sk.signals(3, "flags")
        if world.rank == 1:
            world.backend.memory_operations([("write", flags[:1], 7), ("wait", flags[2:], 4)])(world.stream)
        world.synchronize()

    report = deadlock_of(2, main)
    assert "rank 1 block 0 thread 0 in memory operations: waits for flags[2] on rank 1 >= 4, now 0" in report
    assert "its stream, which runs memory operations" in report
    assert "?" not in report, "they have no line"


def test_a_kernel_may_have_a_view_of_a_peer_as_argument(pes):
    """Its accesses are those of the peer's memory, for races too."""

    def main(both_write):
        world = sk.init()
        x, peer = sk.zeros(4), 1 - world.rank
        if both_write:
            add_one[1, 4, world.stream](x)
        else:
            world.barrier()
        add_one[1, 4, world.stream](world.peer_view(x, peer))
        world.barrier()
        world.synchronize()
        return x.tolist()

    assert pes(2).run(main, False) == [[1] * 4] * 2
    with pytest.raises(sk.emu.RaceError, match=r"race on array 1\[0\] on rank"):
        pes(2).run(main, True)


def test_what_is_symmetric(pes):
    def main():
        world = sk.init()
        x, y = sk.zeros((4, 6), "int16"), sk.zeros(0)
        assert all(map(world.is_symmetric, (x, x[1:, 2:], x[3, 5:], x.T, x.view("uint8"))))
        assert not any(map(world.is_symmetric, (np.zeros(3), x.copy(), y)))
        if world.n_ranks > 1:
            assert not world.is_symmetric(world.peer_view(x, 1 - world.rank))
        sk.free(x)
        assert not world.is_symmetric(x)

    pes(1).run(main)
    pes(2).run(main)


# ---- what the driver is asked for


class FakeDriver:
    """cuda.bindings.driver without a GPU: remembers what it is asked for."""

    def __init__(self, driver):
        self.real, self.asked, self.attribute = driver, [], 1
        self.nvlink, self.capabilities = 1, [(9, 0), (9, 0)]  # of devices

    def __getattr__(self, name):
        return getattr(self.real, name)

    def cuStreamBatchMemOp(self, stream, count, entries, flags):
        raw = [ctypes.string_at(entry.getPtr(), 32) for entry in entries]
        assert (len(raw), flags) == (count, 0)
        self.asked.append((int(stream), [np.frombuffer(entry, "uint64").tolist() for entry in raw]))
        return (0,)

    def cuMemcpyDtoDAsync(self, dst, src, size, stream):
        self.asked.append((int(stream), int(dst), int(src), size))
        return (0,)

    def cuEventCreate(self, flags):
        return 0, "event"

    def cuEventRecord(self, event, stream):
        self.asked.append(("record", int(stream)))
        return (0,)

    def cuStreamWaitEvent(self, stream, event, flags):
        self.asked.append(("wait", int(stream)))
        return (0,)

    def cuStreamGetCaptureInfo(self, stream):
        capture = int(stream) // 10  # streams 10 to 19 capture one graph, 20 to 29 another
        return 0, int(capture > 0), self.cuuint64_t(capture), None, None, 0  # a new object each time

    def cuDeviceGet(self, number):
        return 0, number

    def cuDeviceGetP2PAttribute(self, attribute, device, peer):
        assert attribute.name == "CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED"
        return 0, self.nvlink

    def cuDeviceGetAttribute(self, attribute, device):
        if "COMPUTE_CAPABILITY" in attribute.name:
            return 0, self.capabilities[device]["MINOR" in attribute.name]
        assert attribute.name == "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS"
        return 0, self.attribute


@pytest.fixture
def driver(monkeypatch):
    pytest.importorskip("cuda.bindings")
    import cuda.bindings.driver

    fake = FakeDriver(cuda.bindings.driver)
    monkeypatch.setattr("shmemkit.backends.nvshmem.driver", fake)
    return fake


@pytest.fixture
def backend():
    result = NvshmemBackend.__new__(NvshmemBackend)
    result.rank, result.n_ranks, result.device, result.offsets = 1, 2, 0, [4096, 0]
    result.stream, result._event, result.ranks = 5, None, range(4, 6)
    return result


def at(address, nbytes=8):
    return types.SimpleNamespace(data=types.SimpleNamespace(ptr=address), nbytes=nbytes)


def test_memory_operations_of_the_driver(driver, backend):
    operations = [("write", at(0x7F0012345678), 1), ("wait", at(0x10), 3), ("write", at(0x10), 0)]
    enqueue = backend.memory_operations(operations)
    enqueue(backend.handle(None))
    enqueue(backend.handle(9))
    entries = [
        [5, 0x7F0012345678, 1, 0],
        [4, 0x10, 3, 0],
        [5, 0x10, 0, 0],
    ]  # operation, address, value, flags
    assert driver.asked == [(5, entries), (9, entries)]


def test_the_driver_takes_fewer_than_256_at_once(driver, backend):
    backend.memory_operations([("write", at(8 * i), i) for i in range(600)])(backend.handle(7))
    assert [len(entries) for _, entries in driver.asked] == [255, 255, 90]
    assert [entry[2] for _, entries in driver.asked for entry in entries] == list(range(600))


def test_copies_of_the_driver(driver, backend):
    backend.copy(at(0x5000, 3), at(0x6000, 3))(backend.handle(7))
    assert driver.asked == [(7, 0x5000, 0x6000, 3)]


def test_order_and_follow_on_gpus(driver, backend):
    backend.order(backend.handle(2), backend.handle(11))  # a capture extends to other streams
    assert driver.asked == [("record", 11), ("wait", 2)]
    backend.follow(2, 11)
    assert len(driver.asked) == 2, "a call on a stream that captures does not wait for one that does not"
    backend.follow(2, None)
    backend.follow(12, 11)
    assert driver.asked[2:] == [("record", 5), ("wait", 2), ("record", 11), ("wait", 12)]


def test_errors_of_the_driver(driver, backend):
    driver.cuMemcpyDtoDAsync = lambda *_: (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        backend.copy(at(0), at(0))(backend.handle(None))


def test_where_gpus_cannot_copy(driver, backend):
    assert backend.no_copies() is None
    driver.attribute = 0
    assert "rank 5 has no 64-bit stream memory operations" in backend.no_copies()
    backend.offsets[0] = peers.UNREACHABLE
    assert "rank 5 cannot access the memory of rank 4" in backend.no_copies()
    assert "rank 5 cannot access the memory of rank 4" in backend.unreached(nvlink=False, ranks=[1, 0])
    assert backend.unreached(nvlink=False, ranks=[1]) is None


@pytest.mark.parametrize(
    ("nvlink", "capabilities", "why"),
    [
        (1, [(9, 0), (9, 0)], None),
        (1, [(7, 0), (7, 0)], None),
        (1, [(10, 0), (10, 0)], None),
        (0, [(9, 0), (9, 0)], "no NVLink connects the GPUs of ranks 5 and 4$"),
        (
            1,
            [(8, 6), (8, 6)],
            "are of compute capability 8.6 and 8.6; .* 7.0, 8.0, 9.0 or 10.0",
        ),
        (1, [(9, 0), (8, 0)], "ranks 5 and 4 are of compute capability 9.0 and 8.0"),
    ],
)
def test_whose_lines_arrive_in_order(driver, backend, monkeypatch, nvlink, capabilities, why):
    module = "shmemkit.backends.nvshmem"
    monkeypatch.setattr(f"{module}._count_devices", lambda: 2)
    monkeypatch.setattr(f"{module}._uuid", "GPU {}".format)
    driver.nvlink, driver.capabilities = nvlink, capabilities
    backend._uuids = ["GPU of others"] * 4 + ["GPU 1", "GPU 0"]
    reason = backend.unreached(nvlink=True)
    assert re.search(why, reason) if why else reason is None
    assert backend.unreached(nvlink=True, ranks=[1]) is None, "within one GPU they do"
    assert backend.unreached(nvlink=False) is None, "single words arrive whole everywhere"


class Backend:
    """Streams 10 to 19 capture one graph, 20 to 29 another; others none, until they are in `captures`."""

    calls = None

    def __init__(self):
        self.followed, self.captures = [], {}

    def capture_of(self, stream):
        return self.captures.get(stream, (stream or 0) // 10 or None)

    def follow(self, later, earlier):
        if self.capture_of(later) == self.capture_of(earlier):
            self.followed.append((later, earlier))


def world_of(backend):
    world = types.SimpleNamespace(backend=backend, kept={})
    world.world = world
    return world


@pytest.mark.parametrize(
    "streams, wanted",
    [
        ([1, 2, 2, None, 1], [(1, None), (2, 1), (None, 2), (1, None)]),
        ([10, 11, 1, 12], [(11, 10), (1, None), (12, 11)]),  # a call outside of the capture
        ([10, 20, 11, 21, 10], [(11, 10), (21, 20), (10, 11)]),  # two captures in turn
        ([1, 10, 2, 3], [(1, None), (2, 1), (3, 2)]),
        (["begins", 11, 1, 12], [(3, None), (11, 3), (12, 11)]),  # nothing can wait for 3 while it captures
    ],
)
def test_calls_of_interleaved_captures_are_ordered(streams, wanted):
    backend = Backend()
    order = StreamOrder(world_of(backend))
    if streams[0] == "begins":  # stream 3 begins to capture after its call, and makes another one
        order.before(3, "a")
        backend.captures[3] = 1
        order.before(3, "a")
        streams = streams[1:]
    for stream in streams:
        order.before(stream, "a")
    assert backend.followed == wanted


def test_many_captures():
    backend = Backend()
    order = StreamOrder(world_of(backend))
    for capture in range(1, 100):
        order.before(10 * capture, "a")
        order.before(10 * capture + 1, "a")
    assert backend.followed == [(10 * c + 1, 10 * c) for c in range(1, 100)]
