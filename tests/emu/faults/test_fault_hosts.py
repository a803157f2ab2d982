"""Bugs between kernels and what host programs do with symmetric arrays."""

import numpy as np
import pytest
from fault import DeadlockError, RaceError, fault, run
from numba import cuda

import shmemkit as sk
from shmemkit.device import rank, symm_at, wait


@cuda.jit
def fetch(box, out):
    out[0] = symm_at(box, 1 - rank())[0]


@cuda.jit
def send(box, value):
    symm_at(box, 1 - rank())[0] = value  # first


STORES = {
    "element": lambda box: box.__setitem__(0, 5),
    "slice": lambda box: box.__setitem__(slice(None), 5),
    "negative index": lambda box: box.__setitem__(-2, 5),
    "mask": lambda box: box.__setitem__(np.array([True, False]), 5),
    "fill": lambda box: box.fill(5),
    "copyto": lambda box: np.copyto(box, 5),
    "out": lambda box: np.add(box[1:], 5, out=box[:1]),
    "out of a function": lambda box: np.clip(box, 5, 6, out=box),
    "in place": lambda box: box.__iadd__(5),
    "at": lambda box: np.add.at(box, 0, 5),
    "view": lambda box: box.reshape(2, 1).T[..., :1].fill(5),
}
READS = {
    "element": lambda world, box: int(box[0]),
    "asnumpy": lambda world, box: int(world.asnumpy(box)[0]),
    "asnumpy of a view": lambda world, box: int(world.asnumpy(box[:1])[0]),
    "tolist": lambda world, box: box.tolist()[0],
    "item": lambda world, box: box.item(0),
    "iteration": lambda world, box: int(next(iter(box))),
    "comparison": lambda world, box: 5 if (box == 5).any() else 0,
    "reduction": lambda world, box: int(box.sum()),
    "function": lambda world, box: int(np.concatenate([box, box])[0]),
    "copy": lambda world, box: int(box.copy()[0]),
    "mask": lambda world, box: int(box[np.array([True, False])][0]),
    "printed": lambda world, box: 5 if "5" in str(box) else 0,
}


def check(main, right):
    """``main(world, ordered)`` has races of the host if it is not ordered; else it is `right`."""
    with pytest.raises(RaceError) as caught:
        run(lambda world: main(world, False), 2, None, "eager", None)
    for race in caught.value.races:
        assert race.array == "box" and "world.barrier()" in race.missing, race
        assert "'s host program: " in str(race) and "test_fault_hosts.py" in str(race)
    for seed in range(5):
        for delivery in ("eager", "ordered", "unordered"):
            assert run(lambda world: main(world, True), 2, None, delivery, seed) == right


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_host_stores_what_a_peers_kernel_reads(store):
    def main(world, ordered):
        box, out = sk.zeros(2, "int32", "box"), np.zeros(1, "int32")
        store(box)
        if ordered:
            world.barrier()
        fetch[1, 1, world.stream](box, out)
        world.synchronize()
        return out.tolist()

    check(main, [[5]] * 2)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_host_reads_what_a_peers_kernel_stores(read):
    def main(world, ordered):
        box = sk.zeros(2, "int32", "box")
        send[1, 1, world.stream](box, 5)
        world.barrier() if ordered else world.stream.synchronize()
        return read(world, box)

    check(main, [5] * 2)


@cuda.jit
def store(box, value):
    box[0] = value  # first


@fault(RaceError, "box", "the current stream", right=[[7]], pes=1, source=(store,))
def test_host_reads_beside_another_stream(correct):
    """Only the kernel's own stream says when it has ended."""

    def main(world):
        box, side = sk.zeros(2, "int32", "box"), cuda.stream()
        store[1, 1, side](box, 7)
        (side if correct else world.stream).synchronize()
        return [int(box[0])]  # second

    return main


@fault(RaceError, "box", "the current stream", right=[[9]], pes=1, source=(store,))
def test_kernel_without_a_stream_after_the_host(correct):
    """The host's store is on the World's stream, and the kernel on the default one."""

    def main(world):
        box = sk.zeros(2, "int32", "box")
        box[0] = 7  # first
        twice[1, 1, world.stream if correct else 0](box)
        cuda.synchronize()
        return [int(box[0])]

    @cuda.jit
    def twice(box):
        box[0] += 2  # second

    return main


@fault(RaceError, "box", "the current stream", right=[[0, 5]], pes=1)
def test_host_stores_to_what_a_kernel_has_captured(correct):
    """An array of the device is no constant: the kernel reads what is there when it runs."""

    def main(world):
        box, side, out = sk.zeros(2, "int32", "box"), cuda.stream(), np.zeros(2, "int32")

        @cuda.jit(device=True)
        def inner():
            return box[0]  # first

        @cuda.jit
        def kernel(out):
            out[0] = inner()

        kernel[1, 1, side](out[:1])
        if correct:
            side.synchronize()
        box[0] = 5  # second
        kernel[1, 1, world.stream](out[1:])
        world.synchronize()
        return out.tolist()

    return main


@fault(RaceError, "x", "the current stream", right=[[8, 8]], pes=1)
def test_host_changes_a_private_array_beside_another_stream(correct):
    @cuda.jit
    def double(x):
        x[cuda.threadIdx.x] *= 2  # first

    def main(world):
        x, side = world.xp.ones(2, "int32"), world.backend.new_stream()
        world.synchronize()
        double[1, 2, side](x)
        if correct:
            world.stream.wait_event(side.record())
        x += 6  # second
        return world.asnumpy(x).tolist()

    return main


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

    assert run(main, 1, None, "eager", None) == [(16, [[6, 3], [1, 0]])]


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

    assert run(lambda world: main(world, True), 1, None, "eager", None) == [5]
    with pytest.raises(DeadlockError, match="its host program waits for its stream, which runs stuck"):
        run(lambda world: main(world, False), 1, None, "eager", None)
