"""Bugs of multicast: two addresses of the same memory, and what a signal publishes."""

from numba import cuda

import shmemkit as sk
from shmemkit.device import multimem_fence, multimem_red, multimem_store, notify, rank, wait
from shmemkit.emu import RaceError

from .plant import CREDITS, MULTICAST, planted, result

RIGHT = [[-1], [7]]


def main_of(kernel):
    def main(world):
        slot, full = sk.zeros(1, "int32"), sk.signals(1)
        views = world.multicast_view(slot), world.multicast_view(full)
        return result(world, kernel[1, 1], slot, full, *views)

    return main


@planted(RaceError, MULTICAST, "slot", "multimem_fence() between them, and after the wait", right=RIGHT)
def missing_fence(correct):
    """The receiver reads at its own address what was stored at the multicast address."""

    @cuda.jit
    def kernel(slot, full, all_slots, all_full, out):
        if rank() == 0:
            multimem_store(all_slots, 0, 7)  # first
            multimem_store(all_full, 0, 1, "release")
        else:
            wait(full, 1, "sys", "acquire", 1)
            if correct:
                multimem_fence()
            out[0] = slot[0]  # second

    return main_of(kernel)


@planted(RaceError, MULTICAST, "slot", "multimem_fence() between them", right=RIGHT, seed=0)
def fence_before_the_wait(correct):
    """The receiver fences before it knows of the store."""

    @cuda.jit
    def kernel(slot, full, all_slots, all_full, out):
        if rank() == 0:
            multimem_store(all_slots, 0, 7)  # first
            multimem_red(all_full, 0, 1, "release")
        else:
            if not correct:
                multimem_fence()
            wait(full, 1, "sys", "acquire", 1)
            if correct:
                multimem_fence()
            out[0] = slot[0]  # second

    return main_of(kernel)


@planted(RaceError, MULTICAST, "slot", "a notify after", right=RIGHT)
def relaxed_signal(correct):
    """What is sent to all after the data says nothing about it."""

    @cuda.jit
    def kernel(slot, full, all_slots, all_full, out):
        if rank() == 0:
            multimem_store(all_slots, 0, 7)  # first
            multimem_fence()
            if correct:
                multimem_red(all_full, 0, 1, "release")
            else:
                multimem_red(all_full, 0, 1)
        else:
            wait(full, 1, "sys", "acquire", 1)
            out[0] = slot[0]  # second

    return main_of(kernel)


@planted(RaceError, CREDITS, "slot", "a notify after", right=[[-1], [0]], seed=0)
def overwritten_before_it_was_read(correct):
    """A store to all is one to the slot of each rank: a reader there must have said that it is done."""

    @cuda.jit
    def kernel(slot, full, all_slots, all_full, out):
        if rank() == 0:
            if correct:
                wait(full, 1, "sys", "acquire", 1)
            multimem_store(all_slots, 0, 7)  # second
        else:
            out[0] = slot[0]  # first
            notify(full, 0, 1)

    return main_of(kernel)
