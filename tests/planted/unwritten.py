"""Bugs of symmetric memory that nobody has written."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import SignalOp, get, ld_acquire, notify, num_ranks, put_signal, rank, symm_at, wait
from shmemkit.emu import UninitializedReadError

from .plant import UNWRITTEN, launches, planted, result, signals


@cuda.jit
def read_next(box, out):
    out[0] = symm_at(box, (rank() + 1) % num_ranks())[1]


@planted(UninitializedReadError, UNWRITTEN, "box[1] on rank", "read_next", "sk.empty(2", right=[[-1], [-1]])
def nobody_has_filled_it(correct):
    """The program takes empty for zeros. The twin's host fills it with -1, which no kernel sees."""

    def main(world):
        box = sk.empty(2, "int32", "box")
        if correct:
            box[:] = -1
        world.barrier()
        return result(world, lambda out: read_next[1, 1, world.stream](box, out))

    return main


@planted(UninitializedReadError, UNWRITTEN, "sums[0] on rank", "sums[0] += 1", right=[[6], [6]])
def sum_begins_with_garbage(correct):
    """A kernel adds to memory that it has not set."""

    @cuda.jit
    def add(sums, out):
        if correct:
            sums[0] = 5
        sums[0] += 1
        out[0] = sums[0]

    return launches(add, lambda world: sk.empty(1, "int32", "sums"))


@planted(
    UninitializedReadError, UNWRITTEN, "outbox[0] on rank", "put_signal(", "sk.empty(4", right=[[7], [7]]
)
def sends_what_it_never_wrote(correct):
    """A message of an outbox that nobody has filled. The twin's outbox has padding that nobody reads."""

    @cuda.jit
    def send(inbox, outbox, full, out):
        if correct:
            outbox[0] = 7
        put_signal(inbox, outbox, full, 1, SignalOp.SIGNAL_SET, 1 - rank())
        wait(full, 1, "sys", "acquire", 1)
        out[0] = inbox[0] if correct else 7

    def main(world):
        inbox, outbox = sk.zeros(4, "int32", "inbox"), sk.empty(4, "int32", "outbox")
        return result(world, send[1, 1], inbox, outbox, sk.signals(1))

    return main


@planted(UninitializedReadError, UNWRITTEN, "flags[0] on rank", "ld_acquire", right=[[0], [0]])
def flag_never_set(correct):
    """A flag that was not zeroed is looked at."""

    @cuda.jit
    def look(flags, out):
        out[0] = ld_acquire(flags, 0) & 1

    def main(world):
        flags = (sk.zeros if correct else sk.empty)(1, "uint64", name="flags")
        return result(world, look[1, 1], flags)

    return main


@planted(UninitializedReadError, UNWRITTEN, "inbox[2] on rank", "out[0] = inbox[2]", right=[[11], [10]])
def reads_beyond_what_came(correct):
    """The message is shorter than what its receiver reads."""

    @cuda.jit
    def swap(inbox, outbox, full, out):
        put_signal(inbox[: 3 if correct else 2], outbox, full, 1, SignalOp.SIGNAL_SET, 1 - rank())
        wait(full, 1, "sys", "acquire", 1)
        out[0] = inbox[2]

    def main(world):
        outbox = np.full(4, world.rank + 10, "int32")
        return result(world, swap[1, 1], sk.empty(4, "int32", "inbox"), outbox, sk.signals(1))

    return main


@planted(UninitializedReadError, UNWRITTEN, "theirs[0] on rank", "get(", right=[[3], [3]])
def gets_what_was_never_written(correct):
    """The other rank's kernel, which was to write it, is missing."""

    @cuda.jit
    def fill(theirs):
        theirs[cuda.threadIdx.x] = 3

    @cuda.jit
    def fetch(theirs, out):
        get(out, theirs, 1 - rank())

    def main(world):
        theirs = sk.empty(1, "int32", "theirs")
        if correct:
            fill[1, 1, world.stream](theirs)
        world.barrier()
        return result(world, lambda out: fetch[1, 1, world.stream](theirs, out))

    return main


@planted(UninitializedReadError, UNWRITTEN, "box[0] on rank 1", "out[0] = box[0]", right=[[-1], [1]])
def another_array_is_filled(correct):
    """The sender writes next to what its receiver reads."""

    @cuda.jit
    def send(box, full, out):
        if rank() == 0:
            symm_at(box, 1)[0 if correct else 1] = 1
            notify(full, 1, 1)
        else:
            wait(full, 1, "sys", "acquire", 1)
            out[0] = box[0]

    return launches(send, lambda world: sk.empty(2, "int32", "box"), signals())
