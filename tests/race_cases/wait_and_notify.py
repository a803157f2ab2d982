"""Order by releases and acquires: wait, notify, ld_acquire, st_release, red_release and threadfence."""

from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    ld_acquire,
    notify,
    rank,
    red_release,
    st_release,
    symm_at,
    threadfence,
    wait,
    wait_block,
    wait_warp,
)

from .case import RACE, RIGHT, case

PATTERNS = (
    "PTX, Release and Acquire Patterns: a release pattern synchronizes with an acquire pattern that "
    "observes its value"
)
RELAXED = (
    "PTX, Release and Acquire Patterns: a relaxed read is an acquire pattern only with a fence behind it "
    "in program order"
)
SCOPES = (
    "PTX, Morally strong operations: each operation's scope has to include the thread that executes the "
    "other one"
)
BASE = "PTX, Causality order: what follows a release in program order is not before it"
BLOCK = "shmemkit wait: the calling thread waits alone; cuda.syncthreads() passes on what it acquired"


def flags(world, n=1):
    return sk.zeros(n, "int32"), sk.signals(2), world.xp.zeros(4, "int32")


@case(RACE, RELAXED)
def relaxed_wait_without_a_fence(world):
    """The wait sees the value, and orders nothing."""

    @cuda.jit
    def send(box, ready, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        notify(ready, 1 - rank(), 1)
        wait(ready, 1, "sys", "relaxed", 1)
        out[0] = box[0]  # second

    box, ready, out = flags(world)
    send[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, RELAXED, gives=[[5, 0, 0, 0]] * 2)
def relaxed_wait_with_a_fence_behind_it(world):
    """The relaxed wait and the fence are an acquire pattern together."""

    @cuda.jit
    def send(box, ready, out):
        symm_at(box, 1 - rank())[0] = 5
        notify(ready, 1 - rank(), 1)
        wait(ready, 1, "sys", "relaxed", 1)
        threadfence("sys")
        out[0] = box[0]

    box, ready, out = flags(world)
    send[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RACE, RELAXED)
def fence_before_the_relaxed_wait(world):
    """The fence has to follow the wait; before it, it orders other things."""

    @cuda.jit
    def send(box, ready, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        notify(ready, 1 - rank(), 1)
        threadfence("sys")
        wait(ready, 1, "sys", "relaxed", 1)
        out[0] = box[0]  # second

    box, ready, out = flags(world)
    send[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RACE, SCOPES)
def fence_of_gpu_scope_for_a_peer(world):
    """The wait is of scope "sys", but the fence behind it does not include the other GPU's thread."""

    @cuda.jit
    def send(box, ready, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        notify(ready, 1 - rank(), 1)
        wait(ready, 1, "sys", "relaxed", 1)
        threadfence("gpu")
        out[0] = box[0]  # second

    box, ready, out = flags(world)
    send[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RACE, SCOPES)
def release_of_gpu_scope_for_a_peer(world):
    """The release's scope does not include the peer: neither is the flag itself free of a race, nor is the
    data released."""

    @cuda.jit
    def send(box, ready, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        st_release(symm_at(ready, 1 - rank()), 0, 1, "gpu")  # first
        wait(ready, 1, "sys", "acquire", 1)  # second
        out[0] = box[0]  # second

    box, ready, out = flags(world)
    send[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, SCOPES, gives=[[0, 5, 0, 0]] * 2)
def release_and_acquire_of_gpu_scope_within_a_rank(world):
    """Both blocks run on one GPU, which scope "gpu" includes."""

    @cuda.jit
    def pass_on(box, ready, out):
        if cuda.blockIdx.x == 0:
            box[0] = 5
            st_release(ready, 0, 1, "gpu")
        else:
            wait(ready, 1, "gpu", "acquire", 1)
            out[1] = box[0]

    box, ready, out = flags(world)
    pass_on[2, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RACE, BASE)
def notify_before_the_store(world):
    """The store follows the release, which does not publish it."""

    @cuda.jit
    def send(box, ready, out):
        peer = symm_at(box, 1 - rank())
        peer[0] = 5
        notify(ready, 1 - rank(), 1)
        peer[1] = 6  # first
        wait(ready, 1, "sys", "acquire", 1)
        out[0] = box[0]
        out[1] = box[1]  # second

    box, ready, out = flags(world, 2)
    send[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RACE, PATTERNS)
def wait_for_the_first_release_and_read_what_the_second_published(world):
    """A wait for 1 may see the first release, which does not publish what was stored after it."""

    @cuda.jit
    def send(box, ready, out):
        peer = symm_at(box, 1 - rank())
        peer[0] = 5
        notify(ready, 1 - rank(), 1)
        peer[1] = 6  # first
        notify(ready, 1 - rank(), 2)
        wait(ready, 1, "sys", "acquire", 1)
        out[1] = box[1]  # second

    box, ready, out = flags(world, 2)
    send[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, PATTERNS, gives=[[5, 6, 0, 0]] * 2)
def wait_for_the_second_release(world):
    """The value 2 is of the second release, before which both stores are."""

    @cuda.jit
    def send(box, ready, out):
        peer = symm_at(box, 1 - rank())
        peer[0] = 5
        notify(ready, 1 - rank(), 1)
        peer[1] = 6
        notify(ready, 1 - rank(), 2)
        wait(ready, 1, "sys", "acquire", 2)
        out[0] = box[0]
        out[1] = box[1]

    box, ready, out = flags(world, 2)
    send[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RACE, BLOCK)
def thread_0_waits_and_thread_1_does_not_meet_it(world):
    """Thread 1 has neither waited nor met thread 0."""

    @cuda.jit
    def send(box, ready, out):
        i = cuda.threadIdx.x
        if i == 0:
            symm_at(box, 1 - rank())[0] = 5  # first
            notify(ready, 1 - rank(), 1)
            wait(ready, 1, "sys", "acquire", 1)
        else:
            out[i] = box[0]  # second

    box, ready, out = flags(world)
    send[1, 2, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BLOCK, gives=[[5, 6, 7, 8]] * 2)
def wait_block_is_for_all_threads_of_the_block(world):
    """The threads meet after their stores, one notifies, and wait_block ends with a barrier of the block."""

    @cuda.jit
    def send(box, ready, out):
        i = cuda.threadIdx.x
        symm_at(box, 1 - rank())[i] = 5 + i
        cuda.syncthreads()
        if i == 0:
            notify(ready, 1 - rank(), 1)
        wait_block(ready, 1, "sys", "acquire", 1)
        out[i] = box[i]

    box, ready, out = flags(world, 4)
    send[1, 4, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(
    RACE,
    "shmemkit notify: what this thread did and saw before; to publish a whole block's stores: "
    "syncthreads, then notify",
)
def thread_0_notifies_for_threads_that_it_has_not_met(world):
    """The stores of the other threads are not before thread 0's release."""

    @cuda.jit
    def send(box, ready, out):
        i = cuda.threadIdx.x
        symm_at(box, 1 - rank())[i] = 5 + i  # first
        if i == 0:
            notify(ready, 1 - rank(), 1)
        wait_block(ready, 1, "sys", "acquire", 1)
        out[i] = box[i]  # second

    box, ready, out = flags(world, 4)
    send[1, 4, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RACE, "shmemkit wait_warp: for all threads of the warp; they meet as at syncwarp")
def wait_warp_of_the_first_warp_only(world):
    """The second warp has not waited, and has not met the first one."""

    @cuda.jit
    def send(box, ready, out):
        i = cuda.threadIdx.x
        if i == 0:
            symm_at(box, 1 - rank())[0] = 5  # first
            notify(ready, 1 - rank(), 1)
        if i < 32:
            wait_warp(ready, 1, "sys", "acquire", 1)
        if i == 32:
            out[0] = box[0]  # second

    box, ready, out = flags(world)
    send[1, 64, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "PTX, Causality order: it is transitive over several releases and acquires",
    ranks=3,
    gives=[[0] * 4, [0] * 4, [5, 0, 0, 0]],
)
def causality_over_three_ranks(world):
    """Rank 0 stores on rank 2 and tells rank 1, which tells rank 2."""

    @cuda.jit
    def relay(box, ready, out):
        if rank() == 0:
            symm_at(box, 2)[0] = 5
            notify(ready, 1, 1)
        elif rank() == 1:
            wait(ready, 1, "sys", "acquire", 1)
            notify(ready, 2, 1)
        else:
            wait(ready, 1, "sys", "acquire", 1)
            out[0] = box[0]

    box, ready, out = flags(world)
    relay[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "shmemkit red_release: who acquires a sum sees what preceded each of its additions",
    gives=[[6, 0, 0, 0]] * 2,
)
def sum_of_releases_of_several_blocks(world):
    """Three blocks add a release each; the fourth waits for all of them."""

    @cuda.jit
    def collect(parts, count, out):
        b = cuda.blockIdx.x
        if b < 3:
            parts[b] = b + 1
            red_release(count, 0, 1, "gpu")
        else:
            wait(count, 1, "gpu", "acquire", 3)
            out[0] = parts[0] + parts[1] + parts[2]

    parts, count, out = flags(world, 3)
    collect[4, 1, world.stream](parts, count, out)
    return world.asnumpy(out).tolist()


@case(
    RACE,
    "shmemkit red_release: who acquires a sum sees what preceded each of its additions, and of no others",
)
def first_of_several_releases(world):
    """A count of 1 is one block's addition, and the others' stores are read, too."""

    @cuda.jit
    def collect(parts, count, out):
        b = cuda.blockIdx.x
        if b < 3:
            parts[b] = b + 1  # first
            red_release(count, 0, 1, "gpu")
        else:
            wait(count, 1, "gpu", "acquire", 1)
            out[0] = parts[0] + parts[1] + parts[2]  # second

    parts, count, out = flags(world, 3)
    collect[4, 1, world.stream](parts, count, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, PATTERNS, gives=[[5, 0, 0, 0]] * 2)
def polling_with_ld_acquire(world):
    """The load that ends the loop has acquired what the release published."""

    @cuda.jit
    def send(box, ready, out):
        symm_at(box, 1 - rank())[0] = 5
        st_release(symm_at(ready, 1 - rank()), 0, 1)
        while ld_acquire(ready, 0) != 1:
            pass
        out[0] = box[0]

    box, ready, out = flags(world)
    send[1, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, PATTERNS, gives=[[1, 0, 0, 0]] * 2)
def data_is_read_only_if_the_flag_is_set(world):
    """One look at the flag: if the release has not been seen, the data are left alone."""

    @cuda.jit
    def look(box, ready, out):
        if cuda.blockIdx.x == 0:
            box[0] = 5
            st_release(ready, 0, 1, "gpu")
        else:
            out[0] = 1
            if ld_acquire(ready, 0, "gpu") == 1 and box[0] != 5:
                out[0] = 0

    box, ready, out = flags(world)
    look[2, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()


@case(RACE, PATTERNS, schedules=True)
def data_is_read_whether_or_not_the_flag_is_set(world):
    """One look at the flag, whose value is not heeded: where it was not set yet, the load races with the
    store."""

    @cuda.jit
    def look(box, ready, out):
        if cuda.blockIdx.x == 0:
            box[0] = 5  # first
            st_release(ready, 0, 1, "gpu")
        else:
            out[1] = ld_acquire(ready, 0, "gpu")
            out[0] = box[0]  # second

    box, ready, out = flags(world)
    look[2, 1, world.stream](box, ready, out)
    return world.asnumpy(out).tolist()
