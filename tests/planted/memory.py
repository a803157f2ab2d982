"""Bugs of symmetric memory that was freed."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import num_ranks, put_nbi, rank, symm_at
from shmemkit.emu import UseAfterFreeError

from .plant import FREED, planted


@cuda.jit
def store_next(box):
    symm_at(box, (rank() + 1) % num_ranks())[0] = rank() + 10


@cuda.jit
def put_next(box, source):
    put_nbi(box, source, (rank() + 1) % num_ranks())


def filled(world, launch):
    """What is in a box of this rank after ``launch(box, free)``; `free` looks at it before it frees it."""
    box, seen = sk.zeros(4, "int32", "box"), []

    def free():
        world.barrier()
        seen.append(int(world.asnumpy(box)[0]))
        sk.free(box)

    launch(box, free)
    return seen


@planted(UseAfterFreeError, FREED, "box (int32)", "store_next[1, 1", "sk.free(box)", right=[[11], [10]])
def launch_after_free(correct):
    """A kernel gets an array that was freed, while another one has been made since."""

    def launch(box, free):
        if not correct:
            free()
        other = sk.zeros(4, "int32", "other")
        store_next[1, 1, sk.current().stream](box)
        if correct:
            free()
        assert not other.any()

    return lambda world: filled(world, launch)


@planted(UseAfterFreeError, FREED, "box (int32)", "graph.launch()", "sk.free(box)", right=[[11], [10]])
def graph_of_freed_array(correct):
    """A graph is launched again after an array of its kernel was freed."""

    def launch(box, free):
        stream = cuda.stream()
        stream.begin_capture()
        store_next[1, 1, stream](box[1:])
        store_next[1, 1, stream](box)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
        free()
        if not correct:
            graph.launch()

    return lambda world: filled(world, launch)


@planted(UseAfterFreeError, FREED, "all_reduce", "graph.launch()", "reduce.free()", right=[[3.0], [3.0]])
def graph_of_freed_object(correct):
    """A graph calls an AllReduce that was freed; its slots may be another object's."""

    def main(world):
        reduce, x = sk.AllReduce(world, 16), np.full(1, world.rank + 1, "float32")
        world.stream.begin_capture()
        out = reduce(x)
        graph = world.stream.end_capture()
        if not correct:
            reduce.free()
        graph.launch()
        if correct:
            world.synchronize()
            reduce.free()
        return out.tolist()

    return main


@planted(UseAfterFreeError, FREED, "box (int32)", "put_next[1, 1", "sk.free(box)", right=[[11], [10]])
def put_after_free(correct):
    """A put to freed memory. The twin frees what a put is under way to: that completes it, as NVSHMEM's free
    begins with a barrier of all PEs."""

    def main(world):
        box, source = sk.zeros(4, "int32", "box"), np.full(4, world.rank + 10, "int32")
        kept = sk.zeros(4, "int32", "kept")
        put_next[1, 1, world.stream](kept, source)
        if not correct:
            sk.free(box)
        put_next[1, 1, world.stream](box, source)
        if correct:
            sk.free(box)
        world.barrier()
        return [int(kept[0])]

    return main


@planted(UseAfterFreeError, FREED, "box (int32)", "store_next[1, 1]", "sk.free(box)", right=[[1], [1]])
def slice_of_freed_array(correct):
    """Part of the array is used: it was freed as well."""

    def main(world):
        box = sk.zeros(4, "int32", "box")
        part = box.view("uint32")[2:]
        if not correct:
            sk.free(box)
        store_next[1, 1](part)
        world.synchronize()
        return [1]

    return main


@planted(UseAfterFreeError, FREED, "box (int32)", "copy", "sk.free(box)", right=[[7], [7]])
def host_copy_of_freed_array(correct):
    """The host copies the result after it has given it back."""

    def main(world):
        box = sk.full(4, 7, "int32", name="box")
        copy = world.asnumpy(box) if correct else None
        sk.free(box)
        if not correct:
            copy = world.asnumpy(box)
        return [int(copy[0])]

    return main


@planted(
    UseAfterFreeError,
    FREED,
    "box (int32)",
    "store_next[1, 1, world.stream](there)",
    "sk.free(box)",
    right=[[1], [1]],
)
def peer_view_of_freed_array(correct):
    """The host holds a view of the other rank's part longer than the array lives."""

    @cuda.jit
    def store_next(there):
        there[0] = 1

    def main(world):
        box = sk.zeros(2, "int32", "box")
        there = sk.peer_view(box, 1 - world.rank)
        if correct:
            store_next[1, 1, world.stream](there)
            world.barrier()
            return world.asnumpy(box)[:1].tolist()
        sk.free(box)
        store_next[1, 1, world.stream](there)

    return main
