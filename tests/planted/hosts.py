"""Bugs between kernels and what host programs do with symmetric arrays."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import rank, symm_at
from shmemkit.emu import RaceError

from .plant import HOSTS, planted


@cuda.jit
def fetch(box, out):
    out[0] = symm_at(box, 1 - rank())[0]  # second


@cuda.jit
def send(box, value):
    symm_at(box, 1 - rank())[0] = value  # first


STORES = {
    "element": lambda box: box.__setitem__(0, 5),  # first
    "slice": lambda box: box.__setitem__(slice(None), 5),  # first
    "negative index": lambda box: box.__setitem__(-2, 5),  # first
    "mask": lambda box: box.__setitem__(np.array([True, False]), 5),  # first
    "fill": lambda box: box.fill(5),  # first
    "copyto": lambda box: np.copyto(box, 5),  # first
    "out": lambda box: np.add(box[1:], 5, out=box[:1]),  # first
    "out of a function": lambda box: np.clip(box, 5, 6, out=box),  # first
    "in place": lambda box: box.__iadd__(5),  # first
    "at": lambda box: np.add.at(box, 0, 5),  # first
    "view": lambda box: box.reshape(2, 1).T[..., :1].fill(5),  # first
}
READS = {
    "element": lambda world, box: int(box[0]),  # second
    "asnumpy": lambda world, box: int(world.asnumpy(box)[0]),  # second
    "asnumpy of a view": lambda world, box: int(world.asnumpy(box[:1])[0]),  # second
    "tolist": lambda world, box: box.tolist()[0],  # second
    "item": lambda world, box: box.item(0),  # second
    "iteration": lambda world, box: int(next(iter(box))),  # second
    "comparison": lambda world, box: 5 if (box == 5).any() else 0,  # second
    "reduction": lambda world, box: int(box.sum()),  # second
    "function": lambda world, box: int(np.concatenate([box, box])[0]),  # second
    "copy": lambda world, box: int(box.copy()[0]),  # second
    "mask": lambda world, box: int(box[np.array([True, False])][0]),  # second
    "printed": lambda world, box: 5 if "5" in str(box) else 0,  # second
}


for way, how in STORES.items():

    @planted(RaceError, HOSTS, "box", "world.barrier()", right=[[5]] * 2, source=(how, fetch), way=way)
    def host_stores_what_a_peers_kernel_reads(correct, how=how):
        """The host's store is on its own World's stream, and the peer's kernel on the peer's."""

        def main(world):
            box, out = sk.zeros(2, "int32", "box"), np.zeros(1, "int32")
            how(box)
            if correct:
                world.barrier()
            fetch[1, 1, world.stream](box, out)
            world.synchronize()
            return out.tolist()

        return main


for way, how in READS.items():

    @planted(RaceError, HOSTS, "box", "world.barrier()", right=[5] * 2, source=(how, send), way=way)
    def host_reads_what_a_peers_kernel_stores(correct, how=how):
        """The host waits for its own stream, which says nothing about the peer's kernel."""

        def main(world):
            box = sk.zeros(2, "int32", "box")
            send[1, 1, world.stream](box, 5)
            world.barrier() if correct else world.stream.synchronize()
            return how(world, box)

        return main


@cuda.jit
def store(box, value):
    box[0] = value  # first


@planted(RaceError, HOSTS, "box", "the current stream", right=[[7]], ranks=1, source=(store,))
def host_reads_beside_another_stream(correct):
    """Only the kernel's own stream says when it has ended."""

    def main(world):
        box, side = sk.zeros(2, "int32", "box"), cuda.stream()
        store[1, 1, side](box, 7)
        (side if correct else world.stream).synchronize()
        return [int(box[0])]  # second

    return main


@planted(RaceError, HOSTS, "box", "the current stream", right=[[9]], ranks=1, source=(store,))
def kernel_without_a_stream_after_the_host(correct):
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


@planted(RaceError, HOSTS, "box", "the current stream", right=[[0, 5]], ranks=1)
def host_stores_to_what_a_kernel_has_captured(correct):
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


@planted(RaceError, HOSTS, "x", "the current stream", right=[[8, 8]], ranks=1)
def host_changes_a_private_array_beside_another_stream(correct):
    """Arrays of the World's array module are checked, too."""

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


@planted(RaceError, HOSTS, "box", right=[[5, 1]] * 2)
def host_fills_what_a_peers_kernel_stores(correct):
    """fill is an operation on this rank's stream, the kernel one on the peer's."""

    @cuda.jit
    def send(box):
        symm_at(box, 1 - rank())[0] = 5  # second

    def main(world):
        box = sk.zeros(2, "int32")
        box.fill(1)  # first
        if correct:
            world.barrier()
        send[1, 1, world.stream](box)
        world.barrier()
        return world.asnumpy(box).tolist()

    return main


@planted(RaceError, HOSTS, "box", right=[[6, 1]] * 2)
def host_fills_and_reads_around_a_kernel_on_another_stream(correct):
    """fill, the kernel and the host's loads are in order if all are on world.stream."""

    @cuda.jit
    def add(box):
        box[0] += 5  # first second

    def main(world):
        box, side = sk.zeros(2, "int32"), cuda.stream()
        box.fill(1)  # first
        add[1, 1, world.stream if correct else side](box)
        return [int(box[0]), int(box[1])]  # second

    return main


@planted(RaceError, HOSTS, "box", right=[[5]] * 2)
def host_stores_through_a_peer_view_while_the_peer_reads(correct):
    """The store through peer_view is on this rank's stream, the kernel on the peer's."""

    @cuda.jit
    def read(box, out):
        out[0] = box[0]  # second

    def main(world):
        box, out = sk.zeros(1, "int32"), np.zeros(1, "int32")
        sk.peer_view(box, 1 - world.rank)[0] = 5  # first
        if correct:
            world.barrier()
        read[1, 1, world.stream](box, out)
        world.stream.synchronize()
        return out.tolist()

    return main
