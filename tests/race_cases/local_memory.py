"""Conflicts on the memory of one rank: shared and global memory, among threads, warps and blocks."""

from numba import cuda, int32

from .case import RACE, RIGHT, case

DATA_RACE = (
    "PTX, Memory Consistency Model, Conflict and Data-races: overlapping operations, at least one a "
    "write, that are "
    "not related in causality order"
)
BARRIER = "PTX, barrier{.cta}: orders the memory accesses of the participating threads"
WARP_BARRIER = (
    "PTX, bar.warp.sync: orders the memory accesses of the threads of its mask, and nothing else does"
)


@case(RACE, DATA_RACE)
def reverse_without_syncthreads(world):
    """Each thread reads what another thread has stored to shared memory, and no barrier is between them."""

    @cuda.jit
    def reverse(out):
        tile = cuda.shared.array(64, int32)
        i = cuda.threadIdx.x
        tile[i] = i  # first
        out[i] = tile[63 - i]  # second

    out = world.xp.zeros(64, "int32")
    reverse[1, 64, world.stream](out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BARRIER, gives=[list(range(63, -1, -1))] * 2)
def reverse_with_syncthreads(world):
    """The barrier is between each thread's store and the other's load."""

    @cuda.jit
    def reverse(out):
        tile = cuda.shared.array(64, int32)
        i = cuda.threadIdx.x
        tile[i] = i
        cuda.syncthreads()
        out[i] = tile[63 - i]

    out = world.xp.zeros(64, "int32")
    reverse[1, 64, world.stream](out)
    return world.asnumpy(out).tolist()


@case(RACE, WARP_BARRIER)
def neighbours_of_one_warp_in_lockstep(world):
    """Threads of one warp do not run in lockstep: the load of one and the store of its neighbour have no
    order."""

    @cuda.jit
    def shift(x):
        i = cuda.threadIdx.x
        if i < 7:
            x[i] = x[i + 1]  # first second

    x = world.xp.arange(8, dtype="int32")
    shift[1, 8, world.stream](x)
    return world.asnumpy(x).tolist()


@case(RIGHT, WARP_BARRIER, gives=[[1, 2, 3, 4, 5, 6, 7, 7]] * 2)
def neighbours_of_one_warp_with_syncwarp(world):
    """All threads of the warp have loaded when the first one stores."""

    @cuda.jit
    def shift(x):
        i = cuda.threadIdx.x
        value = x[min(i + 1, 7)]
        cuda.syncwarp()
        x[i] = value

    x = world.xp.arange(8, dtype="int32")
    shift[1, 8, world.stream](x)
    return world.asnumpy(x).tolist()


@case(RACE, DATA_RACE)
def last_steps_of_a_reduction_without_syncwarp(world):
    """The classic unrolled reduction: the last warp adds up shared memory without a barrier between the
    steps."""

    @cuda.jit
    def add_up(x, out):
        part = cuda.shared.array(64, int32)
        i = cuda.threadIdx.x
        part[i] = x[i]
        cuda.syncthreads()
        if i < 32:
            part[i] += part[i + 32]
            cuda.syncwarp()
            step = 16
            while step > 0:
                if i < step:
                    part[i] += part[i + step]  # first second
                step //= 2
            if i == 0:
                out[0] = part[0]

    out = world.xp.zeros(1, "int32")
    add_up[1, 64, world.stream](world.xp.arange(64, dtype="int32"), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BARRIER, gives=[[2016]] * 2)
def reduction_with_a_barrier_in_each_step(world):
    """Each step reads what the step before has stored, behind a barrier that all threads reach."""

    @cuda.jit
    def add_up(x, out):
        part = cuda.shared.array(64, int32)
        i = cuda.threadIdx.x
        part[i] = x[i]
        cuda.syncthreads()
        step = 32
        while step > 0:
            if i < step:
                part[i] += part[i + step]
            cuda.syncthreads()
            step //= 2
        if i == 0:
            out[0] = part[0]

    out = world.xp.zeros(1, "int32")
    add_up[1, 64, world.stream](world.xp.arange(64, dtype="int32"), out)
    return world.asnumpy(out).tolist()


@case(RACE, DATA_RACE)
def tile_is_overwritten_while_others_read_it(world):
    """The loop has a barrier between store and load, but none between the load and the next round's store."""

    @cuda.jit
    def rounds(x, out):
        tile = cuda.shared.array(8, int32)
        i = cuda.threadIdx.x
        for k in range(3):
            tile[i] = x[k, i]  # first
            cuda.syncthreads()
            out[k, i] = tile[7 - i]  # second

    x, out = world.xp.ones((3, 8), "int32"), world.xp.zeros((3, 8), "int32")
    rounds[1, 8, world.stream](x, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BARRIER, gives=[[[7 - i + 10 * k for i in range(8)] for k in range(4)]] * 2)
def two_tiles_in_turn_with_one_barrier_a_round(world):
    """A tile is stored again two rounds later: the barrier of the round between is behind all loads of it."""

    @cuda.jit
    def rounds(out):
        tile = cuda.shared.array((2, 8), int32)
        i = cuda.threadIdx.x
        for k in range(4):
            tile[k % 2, i] = 10 * k + i
            cuda.syncthreads()
            out[k, i] = tile[k % 2, 7 - i]

    out = world.xp.zeros((4, 8), "int32")
    rounds[1, 8, world.stream](out)
    return world.asnumpy(out).tolist()


@case(RACE, DATA_RACE)
def two_blocks_count_with_ordinary_additions(world):
    """`+=` on an array is a load and a store, and those of the blocks are not ordered."""

    @cuda.jit
    def count(total):
        total[0] += 1  # first second

    total = world.xp.zeros(1, "int32")
    count[2, 1, world.stream](total)
    return world.asnumpy(total).tolist()


@case(
    RIGHT,
    "PTX, Morally strong operations: strong operations of scopes that include the other",
    gives=[[24]] * 2,
)
def blocks_count_with_atomic_additions(world):
    """Atomic operations of one GPU are morally strong, so that they are no data race; the kernel's end orders
    them before the host's copy."""

    @cuda.jit
    def count(total):
        cuda.atomic.add(total, 0, 1)

    total = world.xp.zeros(1, "int32")
    count[3, 8, world.stream](total)
    return world.asnumpy(total).tolist()


@case(RACE, DATA_RACE)
def all_threads_set_a_flag_to_the_same_value(world):
    """Two weak stores to one place conflict, whatever their values are."""

    @cuda.jit
    def any_negative(x, flag):
        if x[cuda.threadIdx.x] < 0:
            flag[0] = 1  # first second

    flag = world.xp.zeros(1, "int32")
    any_negative[1, 4, world.stream](world.xp.full(4, -1, "int32"), flag)
    return world.asnumpy(flag).tolist()


@case(RIGHT, DATA_RACE, gives=[[1]] * 2)
def one_thread_sets_the_flag(world):
    """Only one of the threads meets the condition, so that there is one access."""

    @cuda.jit
    def any_negative(x, flag):
        if x[cuda.threadIdx.x] < 0:
            flag[0] = 1

    flag = world.xp.zeros(1, "int32")
    any_negative[1, 4, world.stream](world.xp.array([3, -1, 4, 1], "int32"), flag)
    return world.asnumpy(flag).tolist()


@case(RACE, DATA_RACE)
def slices_that_overlap_by_one_element(world):
    """The two blocks get slices of one array whose last and first elements are the same."""

    @cuda.jit
    def fill(left, right):
        i = cuda.threadIdx.x
        if cuda.blockIdx.x == 0:
            left[i] = 1  # first
        else:
            right[i] = 2  # second

    x = world.xp.zeros(7, "int32")
    fill[2, 4, world.stream](x[0:4], x[3:7])
    return world.asnumpy(x).tolist()


@case(
    RIGHT,
    "PTX, Memory operations: a memory location is a range of bytes; these do not overlap",
    gives=[[0, 1, 2, 3, 4, 5, 6, 7]] * 2,
)
def neighbouring_bytes_of_one_word(world):
    """Each thread stores a byte of its own; that they share a word and a cache line is no conflict."""

    @cuda.jit
    def fill(x):
        i = cuda.grid(1)
        x[i] = i

    x = world.xp.zeros(8, "uint8")
    fill[2, 4, world.stream](x)
    return world.asnumpy(x).tolist()


@case(RACE, DATA_RACE)
def block_zero_adds_up_the_other_blocks_results(world):
    """The barrier of a block says nothing about other blocks: their partial sums have no order with the
    loads."""

    @cuda.jit
    def add_up(parts, out):
        if cuda.threadIdx.x == 0:
            parts[cuda.blockIdx.x] = cuda.blockIdx.x + 1  # first
        cuda.syncthreads()
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            out[0] = parts[0] + parts[1] + parts[2]  # second

    parts, out = world.xp.zeros(3, "int32"), world.xp.zeros(1, "int32")
    add_up[3, 2, world.stream](parts, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "CUDA Programming Guide, Streams: a kernel begins when those before it on its stream have ended",
    gives=[[6]] * 2,
)
def a_second_kernel_adds_up_the_blocks_results(world):
    """The kernels are on one stream, so that the first one's stores are before the second one's loads."""

    @cuda.jit
    def compute(parts):
        parts[cuda.blockIdx.x] = cuda.blockIdx.x + 1

    @cuda.jit
    def add_up(parts, out):
        out[0] = parts[0] + parts[1] + parts[2]

    parts, out = world.xp.zeros(3, "int32"), world.xp.zeros(1, "int32")
    compute[3, 1, world.stream](parts)
    add_up[1, 1, world.stream](parts, out)
    return world.asnumpy(out).tolist()


@case(RACE, DATA_RACE)
def histogram_bins_are_read_before_all_have_added(world):
    """The additions are atomic, but thread 0 reads the bins by ordinary loads, and no barrier is before
    that."""

    @cuda.jit
    def histogram(x, out):
        bins = cuda.shared.array(2, int32)
        i = cuda.threadIdx.x
        if i < 2:
            bins[i] = 0
        cuda.syncthreads()
        cuda.atomic.add(bins, x[i], 1)  # first
        if i < 2:
            out[i] = bins[i]  # second

    out = world.xp.zeros(2, "int32")
    histogram[1, 4, world.stream](world.xp.array([0, 1, 1, 0], "int32"), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, BARRIER, gives=[[1, 3]] * 2)
def histogram_bins_are_read_behind_a_barrier(world):
    """One barrier is between the zeros and the additions, one between these and the loads."""

    @cuda.jit
    def histogram(x, out):
        bins = cuda.shared.array(2, int32)
        i = cuda.threadIdx.x
        if i < 2:
            bins[i] = 0
        cuda.syncthreads()
        cuda.atomic.add(bins, x[i], 1)
        cuda.syncthreads()
        if i < 2:
            out[i] = bins[i]

    out = world.xp.zeros(2, "int32")
    histogram[1, 4, world.stream](world.xp.array([0, 1, 1, 1], "int32"), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, DATA_RACE, gives=[[0, 2, 4, 6]] * 2)
def every_thread_has_a_local_array(world):
    """Local arrays belong to one thread each, and the same name in several threads is several arrays."""

    @cuda.jit
    def twice(out):
        mine = cuda.local.array(2, int32)
        i = cuda.threadIdx.x
        mine[0] = i
        mine[1] = i
        out[i] = mine[0] + mine[1]

    out = world.xp.zeros(4, "int32")
    twice[1, 4, world.stream](out)
    return world.asnumpy(out).tolist()
