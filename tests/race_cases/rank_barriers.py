"""Order by barriers of ranks: in kernels, of teams, on streams and between hosts."""

from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    Teams,
    barrier,
    barrier_all,
    barrier_all_block,
    num_ranks,
    put,
    put_nbi,
    quiet,
    rank,
    symm_at,
    sync,
    sync_all,
)

from .case import RACE, RIGHT, case

BARRIER = (
    "OpenSHMEM, shmem_barrier_all: completes all memory updates issued before it, then suspends the PE "
    "until all "
    "others have arrived; it says nothing about what is issued after it"
)
SYNC = (
    "OpenSHMEM, shmem_sync_all: in contrast with shmem_barrier_all, completes previously issued memory "
    "stores only, and "
    "no remote memory updates issued by OpenSHMEM routines"
)
ONE_THREAD = (
    "shmemkit.device.shmem.barriers: the plain form is called by one thread per PE; PTX, Causality order"
)
WORLD_BARRIER = (
    "shmemkit World.barrier: all ranks meet on the stream that it is given, by default the World's"
)


@case(RACE, BARRIER)
def store_and_load_between_two_barriers(world):
    """The store to the neighbour and the neighbour's own load are both between the same two barriers."""

    @cuda.jit
    def step(box, out):
        barrier_all()
        symm_at(box, 1 - rank())[0] = 10 + rank()  # first
        out[0] = box[0]  # second
        barrier_all()

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    step[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BARRIER, gives=[[11], [10]])
def store_and_load_with_a_barrier_between(world):
    """One barrier before the store, one between it and the neighbour's load."""

    @cuda.jit
    def step(box, out):
        box[0] = -1
        barrier_all()
        symm_at(box, 1 - rank())[0] = 10 + rank()
        barrier_all()
        out[0] = box[0]

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    step[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, BARRIER)
def conflict_before_the_first_barrier(world):
    """The owner sets its box while the neighbour may already have stored to it; the barrier comes after
    both."""

    @cuda.jit
    def step(box, out):
        box[0] = 0  # first
        symm_at(box, 1 - rank())[0] = 10 + rank()  # second
        barrier_all()
        out[0] = box[0]

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    step[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, BARRIER)
def conflict_after_the_last_barrier(world):
    """The barrier is before both accesses, and orders neither before the other."""

    @cuda.jit
    def step(box, out):
        box[0] = rank()
        barrier_all()
        out[0] = symm_at(box, 1 - rank())[0]  # first
        box[0] = 7  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    step[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BARRIER, gives=[[1], [0]])
def box_is_changed_after_another_barrier(world):
    """The second barrier is between the neighbour's load and the owner's next store."""

    @cuda.jit
    def step(box, out):
        box[0] = rank()
        barrier_all()
        out[0] = symm_at(box, 1 - rank())[0]
        barrier_all()
        box[0] = 7

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    step[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, BARRIER, ranks=3)
def iterations_with_one_barrier_each(world):
    """Each round stores to the right, meets, and loads: the next round's store has no order with this round's
    load."""

    @cuda.jit
    def rounds(box, out):
        right = (rank() + 1) % num_ranks()
        for i in range(3):
            symm_at(box, right)[0] = 10 * i + rank()  # first
            barrier_all()
            out[i] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(3, "int32")
    rounds[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BARRIER, ranks=3, gives=[[2, 12, 22], [0, 10, 20], [1, 11, 21]])
def iterations_with_two_boxes_in_turn(world):
    """A box is stored again two rounds later: the barrier of the round between is behind its load."""

    @cuda.jit
    def rounds(box, out):
        right = (rank() + 1) % num_ranks()
        for i in range(3):
            symm_at(box, right)[i % 2] = 10 * i + rank()
            barrier_all()
            out[i] = box[i % 2]

    box, out = sk.zeros(2, "int32"), world.xp.zeros(3, "int32")
    rounds[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, SYNC)
def sync_all_after_a_put(world):
    """sync_all meets, but does not complete the put before it."""

    @cuda.jit
    def send(inbox, outbox, out):
        put(inbox, outbox, 1 - rank())  # first
        sync_all()
        out[0] = inbox[0]  # second

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 10 + world.rank, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, SYNC, gives=[[11], [10]])
def quiet_and_sync_all_after_a_put(world):
    """Quiet completes the put, sync_all says so to the other rank."""

    @cuda.jit
    def send(inbox, outbox, out):
        put(inbox, outbox, 1 - rank())
        quiet()
        sync_all()
        out[0] = inbox[0]

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 10 + world.rank, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, SYNC, gives=[[11], [10]])
def sync_all_after_a_store(world):
    """A store through symm_at is a memory store, which sync_all completes and makes visible."""

    @cuda.jit
    def send(inbox, out):
        symm_at(inbox, 1 - rank())[0] = 10 + rank()
        sync_all()
        out[0] = inbox[0]

    inbox, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BARRIER, gives=[[11], [10]])
def barrier_all_after_put_nbi(world):
    """barrier_all completes non-blocking puts, too; then their source may be overwritten."""

    @cuda.jit
    def send(inbox, outbox, out):
        put_nbi(inbox, outbox, 1 - rank())
        barrier_all()
        outbox[0] = 0
        out[0] = inbox[0]

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 10 + world.rank, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, out)
    return world.asnumpy(out).tolist()


@case(RACE, ONE_THREAD)
def thread_0_meets_the_ranks_for_threads_that_do_not_wait_for_it(world):
    """Thread 0 alone is at the barrier of the ranks; thread 1 loads without having met it."""

    @cuda.jit
    def step(box, out):
        i = cuda.threadIdx.x
        if i == 0:
            symm_at(box, 1 - rank())[0] = 10 + rank()  # first
            barrier_all()
        else:
            out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    step[1, 2, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, ONE_THREAD)
def thread_0_meets_the_ranks_for_threads_that_it_has_not_met(world):
    """Thread 1's store is not before thread 0's barrier, for nothing orders the two threads."""

    @cuda.jit
    def step(box, out):
        i = cuda.threadIdx.x
        if i == 1:
            symm_at(box, 1 - rank())[0] = 10 + rank()  # first
        if i == 0:
            barrier_all()
            out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    step[1, 2, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "PTX, Causality order: it is transitive over barriers of the block and of the ranks",
    gives=[[11], [10]],
)
def syncthreads_on_either_side_of_thread_0s_barrier(world):
    """Thread 1's store is before the block's barrier, that before thread 0's, and so on to thread 1's
    load."""

    @cuda.jit
    def step(box, out):
        i = cuda.threadIdx.x
        if i == 1:
            symm_at(box, 1 - rank())[0] = 10 + rank()
        cuda.syncthreads()
        if i == 0:
            barrier_all()
        cuda.syncthreads()
        if i == 1:
            out[0] = box[0]

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    step[1, 2, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, "shmemkit barrier_all_block(arrivals, epoch): it does not complete puts: quiet first")
def barrier_by_notify_after_a_put(world):
    """The barrier over NVLink orders loads and stores, and completes no put."""

    @cuda.jit
    def send(inbox, outbox, arrivals, epoch, out):
        if cuda.threadIdx.x == 0:
            put(inbox, outbox, 1 - rank())  # first
        barrier_all_block(arrivals, epoch)
        out[cuda.threadIdx.x] = inbox[0]  # second

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 10 + world.rank, "int32")
    out = world.xp.zeros(2, "int32")
    send[1, 2, world.stream](inbox, outbox, sk.signals(2), world.xp.zeros(1, "uint64"), out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "shmemkit barrier_all_block(arrivals, epoch): it does not complete puts: quiet first",
    gives=[[11, 11], [10, 10]],
)
def barrier_by_notify_after_quiet(world):
    """The thread that has put calls quiet before the block's barrier."""

    @cuda.jit
    def send(inbox, outbox, arrivals, epoch, out):
        if cuda.threadIdx.x == 0:
            put(inbox, outbox, 1 - rank())
            quiet()
        barrier_all_block(arrivals, epoch)
        out[cuda.threadIdx.x] = inbox[0]

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 10 + world.rank, "int32")
    out = world.xp.zeros(2, "int32")
    send[1, 2, world.stream](inbox, outbox, sk.signals(2), world.xp.zeros(1, "uint64"), out)
    return world.asnumpy(out).tolist()


@case(RACE, "OpenSHMEM, shmem_team_sync: it synchronizes the PEs of the team", ranks=4, local_size=2)
def barrier_of_the_node_for_a_rank_on_another_node(world):
    """Rank r puts to rank (r + 2) % 4, on the other node; the barrier is among the ranks of its own node."""

    @cuda.jit
    def send(inbox, outbox, out):
        put(inbox, outbox, (rank() + 2) % 4)  # first
        quiet()
        barrier(Teams.TEAM_NODE)
        out[0] = inbox[0]  # second

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 10 + world.rank, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "OpenSHMEM, shmem_team_sync: it synchronizes the PEs of the team",
    ranks=4,
    local_size=2,
    gives=[[12], [13], [10], [11]],
)
def sync_of_the_team_that_has_both_ranks(world):
    """Ranks r and (r + 2) % 4 have the same local rank, so that they are in one team SAME_MYPE_NODE."""

    @cuda.jit
    def send(inbox, outbox, out):
        put(inbox, outbox, (rank() + 2) % 4)
        quiet()
        sync(Teams.TEAM_SAME_MYPE_NODE)
        out[0] = inbox[0]

    inbox, outbox = sk.zeros(1, "int32"), sk.full(1, 10 + world.rank, "int32")
    out = world.xp.zeros(1, "int32")
    send[1, 1, world.stream](inbox, outbox, out)
    return world.asnumpy(out).tolist()


@case(RACE, WORLD_BARRIER, ranks=3)
def kernels_of_two_ranks_without_a_barrier(world):
    """A kernel stores to the next rank, whose own next kernel loads: they are on different streams of two
    GPUs."""

    @cuda.jit
    def send(box, n):
        symm_at(box, (rank() + 1) % n)[0] = rank()  # first

    @cuda.jit
    def receive(box, out):
        out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](box, world.n_ranks)
    receive[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, WORLD_BARRIER, ranks=3, gives=[[2], [0], [1]])
def kernels_of_two_ranks_with_the_worlds_barrier(world):
    """The barrier stands on the stream of both kernels, on every rank."""

    @cuda.jit
    def send(box, n):
        symm_at(box, (rank() + 1) % n)[0] = rank()

    @cuda.jit
    def receive(box, out):
        out[0] = box[0]

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](box, world.n_ranks)
    world.barrier()
    receive[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, WORLD_BARRIER)
def the_worlds_barrier_comes_one_kernel_too_early(world):
    """The barrier is before both kernels: it orders neither before the other rank's."""

    @cuda.jit
    def send(box):
        symm_at(box, 1 - rank())[0] = rank()  # first

    @cuda.jit
    def receive(box, out):
        out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    world.barrier()
    send[1, 1, world.stream](box)
    receive[1, 1, world.stream](box, out)
    world.barrier()
    return world.asnumpy(out).tolist()


@case(RACE, "shmemkit World.host_barrier: the host programs meet; it does not wait for work on streams")
def host_barrier_without_synchronize(world):
    """The hosts meet while the sending kernel may still run: a launch does not wait for its kernel."""

    @cuda.jit
    def send(box):
        symm_at(box, 1 - rank())[0] = rank()  # first

    @cuda.jit
    def receive(box, out):
        out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](box)
    world.host_barrier()
    receive[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT, "CUDA, cudaStreamSynchronize: the stream's work has ended; then the hosts meet", gives=[[1], [0]]
)
def host_barrier_after_synchronize(world):
    """Each host has waited for its kernel when the hosts meet, and launches the next kernel after that."""

    @cuda.jit
    def send(box):
        symm_at(box, 1 - rank())[0] = rank()

    @cuda.jit
    def receive(box, out):
        out[0] = box[0]

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](box)
    world.stream.synchronize()
    world.host_barrier()
    receive[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()
