"""Conflicts on the memory of other ranks: puts, gets, stores and loads through symm_at."""

from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    barrier_all,
    barrier_all_block,
    copy_block,
    fence,
    g,
    get,
    get_nbi,
    num_ranks,
    p,
    put,
    put_block,
    put_nbi,
    quiet,
    rank,
    symm_at,
)

from .case import RACE, RIGHT, case

PUT = (
    "OpenSHMEM, shmem_put: returns when the source has been copied, but not necessarily before the data "
    "has been "
    "delivered; two successive puts may deliver out of order unless a fence is between them"
)
NBI = (
    "OpenSHMEM, nonblocking RMA: the operation is complete after shmem_quiet, until when its source and "
    "dest are in use"
)
BARRIER = (
    "OpenSHMEM, shmem_barrier_all: completes all memory updates issued before it, then synchronizes all PEs"
)
STORES = "PTX, Conflict and Data-races: weak stores and loads of several GPUs that are not in causality order"


@case(RACE, STORES, ranks=3)
def two_ranks_store_to_one_cell_of_a_third(world):
    """Ranks 1 and 2 store to the same element of rank 0, and nothing orders one before the other."""

    @cuda.jit
    def report(box):
        if rank() > 0:
            symm_at(box, 0)[0] = rank()  # first second
        barrier_all()

    box = sk.zeros(1, "int32")
    report[1, 1, world.stream](box)
    return world.asnumpy(box).tolist()


@case(RIGHT, BARRIER, ranks=3, gives=[[0, 1, 2], [0, 0, 0], [0, 0, 0]])
def each_rank_has_a_cell_of_its_own(world):
    """The elements differ, and the barrier is before the owner's copy."""

    @cuda.jit
    def report(box):
        symm_at(box, 0)[rank()] = rank()
        barrier_all()

    box = sk.zeros(3, "int32")
    report[1, 1, world.stream](box)
    return world.asnumpy(box).tolist()


@case(RACE, PUT, ranks=3)
def two_ranks_put_to_one_row(world):
    """Both put three elements into the same row of rank 0; quiet completes each put, but orders none after
    the other."""

    @cuda.jit
    def send(rows, mine):
        if rank() > 0:
            put(rows[0], mine, 0)  # first second
            quiet()
        barrier_all()

    rows, mine = sk.zeros((2, 3), "int32"), sk.full(3, world.rank, "int32")
    send[1, 1, world.stream](rows, mine)
    return world.asnumpy(rows).tolist()


@case(RIGHT, BARRIER, ranks=3, gives=[[[1] * 3, [2] * 3], [[0] * 3] * 2, [[0] * 3] * 2])
def two_ranks_put_to_rows_of_their_own(world):
    """The rows differ, and barrier_all completes the puts."""

    @cuda.jit
    def send(rows, mine):
        if rank() > 0:
            put(rows[rank() - 1], mine, 0)
        barrier_all()

    rows, mine = sk.zeros((2, 3), "int32"), sk.full(3, world.rank, "int32")
    send[1, 1, world.stream](rows, mine)
    return world.asnumpy(rows).tolist()


@case(RACE, STORES)
def get_while_the_owner_computes(world):
    """Rank 1 fetches an element that rank 0 writes in the same phase."""

    @cuda.jit
    def exchange(value, copy):
        if rank() == 0:
            value[0] = 42  # first
        else:
            get(copy, value, 0)  # second
        barrier_all()

    value, copy = sk.zeros(1, "int32"), sk.zeros(1, "int32")
    exchange[1, 1, world.stream](value, copy)
    return world.asnumpy(copy).tolist()


@case(RIGHT, BARRIER, gives=[[0], [42]])
def get_after_the_owner_has_met_everyone(world):
    """The owner's store is before the barrier, the other's get behind it."""

    @cuda.jit
    def exchange(value, copy):
        if rank() == 0:
            value[0] = 42
        barrier_all()
        if rank() == 1:
            get(copy, value, 0)

    value, copy = sk.zeros(1, "int32"), sk.zeros(1, "int32")
    exchange[1, 1, world.stream](value, copy)
    return world.asnumpy(copy).tolist()


@case(RACE, NBI)
def source_of_put_nbi_is_overwritten(world):
    """The loop fills its buffer again while the put of the round before may still read it."""

    @cuda.jit
    def send(inbox, buffer):
        for i in range(3):
            buffer[0] = 10 + i  # first
            put_nbi(inbox[i:], buffer, 1 - rank())  # second
        quiet()
        barrier_all()

    inbox, buffer = sk.zeros(3, "int32"), sk.zeros(1, "int32")
    send[1, 1, world.stream](inbox, buffer)
    return world.asnumpy(inbox).tolist()


@case(RIGHT, PUT, gives=[[10, 11, 12]] * 2)
def source_of_a_blocking_put_is_overwritten(world):
    """A put has read its source when it returns, so that the buffer may be filled again."""

    @cuda.jit
    def send(inbox, buffer):
        for i in range(3):
            buffer[0] = 10 + i
            put(inbox[i : i + 1], buffer, 1 - rank())
        barrier_all()

    inbox, buffer = sk.zeros(3, "int32"), sk.zeros(1, "int32")
    send[1, 1, world.stream](inbox, buffer)
    return world.asnumpy(inbox).tolist()


@case(RIGHT, NBI, gives=[[10, 11, 12]] * 2)
def source_of_put_nbi_is_overwritten_after_quiet(world):
    """Quiet in each round completes the put, so that the buffer may be filled again."""

    @cuda.jit
    def send(inbox, buffer):
        for i in range(3):
            buffer[0] = 10 + i
            put_nbi(inbox[i : i + 1], buffer, 1 - rank())
            quiet()
        barrier_all()

    inbox, buffer = sk.zeros(3, "int32"), sk.zeros(1, "int32")
    send[1, 1, world.stream](inbox, buffer)
    return world.asnumpy(inbox).tolist()


@case(RACE, NBI)
def result_of_get_nbi_is_read_at_once(world):
    """The data of a non-blocking get are here after quiet, and not before."""

    @cuda.jit
    def fetch(values, copy, out):
        get_nbi(copy, values, 1 - rank())  # first
        out[0] = copy[0] + copy[1]  # second
        quiet()

    values, copy = sk.full(2, 5, "int32"), sk.zeros(2, "int32")
    out = world.xp.zeros(1, "int32")
    fetch[1, 1, world.stream](values, copy, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, NBI, gives=[[10]] * 2)
def result_of_get_nbi_is_read_after_quiet(world):
    """Quiet completes the get; the source is read only, by everybody."""

    @cuda.jit
    def fetch(values, copy, out):
        get_nbi(copy, values, 1 - rank())
        quiet()
        out[0] = copy[0] + copy[1]

    values, copy = sk.full(2, 5, "int32"), sk.zeros(2, "int32")
    out = world.xp.zeros(1, "int32")
    fetch[1, 1, world.stream](values, copy, out)
    return world.asnumpy(out).tolist()


@case(RACE, PUT)
def p_and_then_g_of_the_same_element(world):
    """The thread reads back what it has just put: the put need not have been delivered, so that g may come
    first."""

    @cuda.jit
    def write_and_read_back(box, out):
        p(box, 7, 1 - rank())  # first
        out[0] = g(box, 1 - rank())  # second
        barrier_all()

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    write_and_read_back[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "OpenSHMEM, shmem_quiet: all puts before it are complete and visible when it returns",
    gives=[[7]] * 2,
)
def p_and_then_g_behind_quiet(world):
    """Quiet delivers the put before g reads."""

    @cuda.jit
    def write_and_read_back(box, out):
        p(box, 7, 1 - rank())
        quiet()
        out[0] = g(box, 1 - rank())

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    write_and_read_back[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RACE, PUT)
def two_puts_of_one_thread_to_one_place(world):
    """Two puts of one thread to the same element may be delivered in either order."""

    @cuda.jit
    def send(box, old, new):
        put(box, old, 1 - rank())  # first
        put(box, new, 1 - rank())  # second
        barrier_all()

    box, old, new = sk.zeros(1, "int32"), sk.full(1, 1, "int32"), sk.full(1, 2, "int32")
    send[1, 1, world.stream](box, old, new)
    return world.asnumpy(box).tolist()


@case(
    RIGHT,
    "OpenSHMEM, shmem_fence: puts before it are delivered before those after it, to the same PE",
    gives=[[2]] * 2,
)
def two_puts_of_one_thread_with_a_fence(world):
    """The fence keeps the two puts to one PE in order, and barrier_all completes them."""

    @cuda.jit
    def send(box, old, new):
        put(box, old, 1 - rank())
        fence()
        put(box, new, 1 - rank())
        barrier_all()

    box, old, new = sk.zeros(1, "int32"), sk.full(1, 1, "int32"), sk.full(1, 2, "int32")
    send[1, 1, world.stream](box, old, new)
    return world.asnumpy(box).tolist()


@case(RACE, STORES, ranks=3)
def halo_of_both_neighbours_is_one_element_too_wide(world):
    """Each rank sends two elements into a halo of one: both neighbours store to the element in the middle."""

    @cuda.jit
    def send_halos(row):
        me, n = rank(), num_ranks()
        to_left, to_right = symm_at(row, (me + n - 1) % n), symm_at(row, (me + 1) % n)
        for i in range(2):
            to_right[i] = me  # first
            to_left[2 - i] = me  # second
        barrier_all()

    row = sk.zeros(3, "int32")
    send_halos[1, 1, world.stream](row)
    return world.asnumpy(row).tolist()


@case(RIGHT, BARRIER, ranks=3, gives=[[2, 0, 1], [0, 1, 2], [1, 2, 0]])
def halos_of_both_neighbours(world):
    """Each neighbour stores to its own end of the row, the owner to the middle."""

    @cuda.jit
    def send_halos(row):
        me, n = rank(), num_ranks()
        row[1] = me
        symm_at(row, (me + 1) % n)[0] = me
        symm_at(row, (me + n - 1) % n)[2] = me
        barrier_all()

    row = sk.zeros(3, "int32")
    send_halos[1, 1, world.stream](row)
    return world.asnumpy(row).tolist()


@case(RACE, STORES)
def owner_and_neighbour_add_to_one_counter(world):
    """The owner's ordinary addition and the neighbour's, through symm_at, conflict."""

    @cuda.jit
    def count(counter):
        for pe in range(num_ranks()):
            symm_at(counter, pe)[0] += 1  # first second
        barrier_all()

    counter = sk.zeros(1, "int32")
    count[1, 1, world.stream](counter)
    return world.asnumpy(counter).tolist()


@case(
    RACE,
    "PTX, Conflict and Data-races; shmemkit put: one thread, it knows nothing of what other threads store",
)
def one_thread_puts_what_others_are_storing(world):
    """Thread 0 puts a row that all threads of its block fill, without a barrier between them."""

    @cuda.jit
    def send(inbox, outbox):
        i = cuda.threadIdx.x
        outbox[i] = i  # first
        if i == 0:
            put(inbox, outbox, 1 - rank())  # second
        barrier_all_block()

    inbox, outbox = sk.zeros(4, "int32"), sk.zeros(4, "int32")
    send[1, 4, world.stream](inbox, outbox)
    return world.asnumpy(inbox).tolist()


@case(
    RIGHT,
    "shmemkit.device.shmem.rma: a _block call begins with a barrier of the block, so that what its threads "
    "stored is sent",
    gives=[[0, 1, 2, 3]] * 2,
)
def the_block_puts_what_its_threads_have_stored(world):
    """put_block begins with a barrier of the block; barrier_all_block completes it."""

    @cuda.jit
    def send(inbox, outbox):
        i = cuda.threadIdx.x
        outbox[i] = i
        put_block(inbox, outbox, 1 - rank())
        barrier_all_block()

    inbox, outbox = sk.zeros(4, "int32"), sk.zeros(4, "int32")
    send[1, 4, world.stream](inbox, outbox)
    return world.asnumpy(inbox).tolist()


@case(RACE, PUT)
def the_kernels_end_does_not_deliver_p(world):
    """The next kernel of the target reads what p has sent; that the sending kernel has ended and the hosts
    have met completes no put."""

    @cuda.jit
    def send(box):
        p(box, 7, 1 - rank())  # first

    @cuda.jit
    def read(box, out):
        out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](box)
    world.stream.synchronize()
    world.host_barrier()
    read[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "shmemkit World.barrier: work enqueued later, on any rank, sees what was done before; completes puts",
    gives=[[7]] * 2,
)
def the_worlds_barrier_delivers_p(world):
    """world.barrier() is between the kernels of both ranks, and completes the puts."""

    @cuda.jit
    def send(box):
        p(box, 7, 1 - rank())

    @cuda.jit
    def read(box, out):
        out[0] = box[0]

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](box)
    world.barrier()
    read[1, 1, world.stream](box, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, "PTX, Conflict and Data-races: reads do not conflict", ranks=3, gives=[[3, 4]] * 3)
def all_ranks_get_the_same_source(world):
    """Nobody writes the source after the collective allocation; each rank's destination is its own."""

    @cuda.jit
    def fetch(table, copy):
        get(copy, table, 0)

    table, copy = sk.array([3, 4], "int32"), sk.zeros(2, "int32")
    fetch[1, 1, world.stream](table, copy)
    return world.asnumpy(copy).tolist()


@case(RACE, STORES)
def pull_with_copy_block_before_the_owner_is_done(world):
    """copy_block orders nothing: it loads the peer's row while the peer's block stores it."""

    @cuda.jit
    def pull(row, out):
        i = cuda.threadIdx.x
        row[i] = 10 * rank() + i  # first
        cuda.syncthreads()
        copy_block(out, symm_at(row, 1 - rank()))  # second

    row, out = sk.zeros(4, "int32"), world.xp.zeros(4, "int32")
    pull[1, 4, world.stream](row, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BARRIER, gives=[[10, 11, 12, 13], [0, 1, 2, 3]])
def pull_with_copy_block_after_a_barrier_of_the_ranks(world):
    """All threads of both blocks meet before the peer's row is loaded."""

    @cuda.jit
    def pull(row, out):
        i = cuda.threadIdx.x
        row[i] = 10 * rank() + i
        barrier_all_block()
        copy_block(out, symm_at(row, 1 - rank()))

    row, out = sk.zeros(4, "int32"), world.xp.zeros(4, "int32")
    pull[1, 4, world.stream](row, out)
    return world.asnumpy(out).tolist()
